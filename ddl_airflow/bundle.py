"""A DAG bundle of manifests: Airflow's own way to DAGs that are not Python, for many of them.

Airflow's DAG processor parses Python files, each in a process and on its own: an error in one is an
import error of that one. So this bundle is a folder with a copy of each manifest and, beside it,
``<manifest>.py``: a stub of two lines that makes its DAG. A stub is written when its manifest
changes and then only, so that Airflow parses at once what changed, and nothing else.

::

    <[dag_processor] dag_bundle_storage_path>/<bundle>/
        latest/                   copies and stubs of the manifests as they are
        versions/<version>/       the same as they were; made for a task, deleted by Airflow
        listings/<version>.json   which manifest had which text
        manifests/<sha256>        the texts
        shown/<sha256>.yml        those with keys, without them, by the same digests
        taken.json                which manifests have the DAG id of another bundle's DAG

A version is the digest of its listing. Versions are what lets a run finish with the manifest that
it began with. A text with keys written out is kept for a day after its change, others for a month.
Airflow's scheduler goes on with the runs of a DAG only while a file has that DAG, and their tasks
look for it under the path of that file, in their own version. So while a DAG has open runs it stays
in its file, whatever becomes of its manifest.

A DAG that Airflow has of another bundle stays there as well: until it has gone, a manifest of its
id is an import error here. Versions say nothing of that: they are for tasks, whose DAG is known.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from airflow.configuration import conf
from airflow.dag_processing.bundles.base import BaseDagBundle, BundleVersion
from airflow.sdk.exceptions import AirflowException

from ddl_airflow.airflow_internals import (
    dags_of_other_bundles,
    held_back,
    with_open_runs,
    wrongly_watched,
)
from ddl_airflow.core.errors import ManifestError
from ddl_airflow.core.manifest.folder import (
    KEYS_FORGOTTEN,
    label,
    read_manifest,
    state_of,
    yaml_files,
)
from ddl_airflow.core.manifest.load import load_manifest_text, without_keys
from ddl_airflow.core.manifest.rights import RightsTable
from ddl_airflow.core.manifest.sections.schedule import DATA_CHANGE
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.core.real_path import first_link, real_path

_STUB = '''\
"""The Airflow DAG of a manifest. Generated: change the manifest, not this."""
from ddl_airflow.dag import dag_of_stub

'''
# Longer than a parse takes.
_PARSED_S = 5.0
_DAY_S = 24 * 3600.0
_KEPT_S = 30 * _DAY_S
_KEYS_KEPT_S = _DAY_S
_LOOK_EVERY_S = 3600.0
_log = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """A manifest in a listing.

    Attributes:
        text: SHA-256 of its bytes; empty when it cannot be read.
        unreadable: why it cannot be read.
        claimed_by: the other manifests of its DAG id.
        was: the path of a manifest that is gone, and whose DAG has open runs.
        place: where the stub lies, if not where the manifest does: where those runs look for it.
        domain: of one that was read through a link, where manifests have rights: as
            ``RightsTable.domain`` has it.
    """

    text: str
    unreadable: str = ""
    claimed_by: tuple[str, ...] = ()
    was: str = ""
    place: str = ""
    domain: str = ""


class _Read(NamedTuple):
    """What was read of a manifest: its entry, its DAG id, and where its folder lay then."""

    entry: _Entry
    dag_id: str | None
    folder: Path | None = None


# By the manifest's path in the folder; one that is gone by its DAG id, after a prefix that no path
# has, since names with a dot are passed over.
_Listing = Mapping[str, _Entry]
_GONE = ".gone/"
# Of a folder that is to become a version, which is made under the lock.
_NEW = ".new-"


class ManifestBundle(BaseDagBundle):
    """One DAG for each manifest below a folder; see the top of this module.

    Args:
        path: the folder, the same on all hosts; by default Airflow's DAG folder. Scripts stay
            there: a run copies them when it starts.
        kwargs: as for every bundle: name, refresh_interval, version.
    """

    supports_versioning = True

    def __init__(self, *, path: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        folder = os.path.expanduser(path or conf.get("core", "dags_folder"))
        self._folder = Path(folder).absolute()
        self._latest: str | None = None
        self._written = False  # whether the folder has become that version, whole
        # DAG id -> the file, and the other bundle, that has it; None until somebody has said so.
        self._elsewhere: Mapping[str, tuple[str, str]] | None = None
        self._look_for_keys = 0.0
        self._again: dict[Path, float] = {}  # stub -> when it is to be parsed once more
        # What a YAML file's state on disk was, and what was read then; None: no manifest.
        self._seen: dict[str, tuple[tuple[int, ...], _Read | None]] = {}
        self._without_keys: set[str] = set()  # texts, which never change

    @property
    def path(self) -> Path:
        """Folder of the version in use."""
        return self.versions_dir / self.version if self.version else self.base_dir / "latest"

    def get_current_version(self) -> BundleVersion:
        """The version in use."""
        if self.version is None and self._latest is None:
            self.refresh()
        return BundleVersion(self.version or str(self._latest))

    def initialize(self) -> None:
        """Makes the folder: of the wanted version, or of the manifests as they are now.

        Raises AirflowException if this host does not know the version.
        """
        if self.version is None:
            self.refresh()
        else:
            with self.lock():
                if not self.path.is_dir():
                    self._make_version(self.version)
        super().initialize()

    def refresh(self) -> None:
        """Brings the folder up to date with the manifests.

        Raises AirflowException if there are none to read because their folder is gone, cannot be
        read, or is empty and was not: a file server that is away for a moment must not take all
        DAGs with it. Nor does a folder below that cannot be searched take those in it.
        """
        if self.version is not None:
            raise AirflowException(f"{self!r} is version {self.version} and cannot be refreshed.")
        # For the DAG processor, which forks for each stub: so they all have it already.
        import ddl_airflow.dag  # noqa: F401

        with self.lock():
            if (elsewhere := dags_of_other_bundles(self.name)) is not None:
                self._elsewhere = elsewhere
            listing, names = self._list(hold=True)
            was_taken = self._read_taken()
            taken = was_taken if self._elsewhere is None else self._taken(names, self._elsewhere)
            version, unsaid = self._version_of(listing), set[Path]()
            if version != self._latest or taken != was_taken or not self._written:
                self._note_changed(listing)
                self._write_listing(version, listing)
                self._written = False  # if the disk is full meanwhile, say
                written = self._write_stubs(self.path, _with_claims(listing, taken))
                _write(self._taken_file, json.dumps(taken).encode(), 0o644)
                self._written = True
                if self._latest is not None:  # at its start the DAG processor parses them all
                    self._again |= dict.fromkeys(written, time.time() + _PARSED_S + _stored_every())
                self._latest = version
                unsaid = self._of_several(listing)
                self._forget_old()
            if time.time() >= self._look_for_keys:
                self._look_for_keys = time.time() + _LOOK_EVERY_S
                self._forget_keys()
            self._touch_again(unsaid)

    def _of_several(self, listing: _Listing) -> set[Path]:
        """The stubs of a manifest and of what it was before: its error is filed under itself, which
        is no file to Airflow, and so at each new version Airflow deletes it.
        """
        places = {name: entry.place or _place_of(name) for name, entry in listing.items()}
        of_files = {place for name, place in places.items() if not name.startswith(_GONE)}
        held = {place for name, place in places.items() if name.startswith(_GONE)}
        return {self.path / f"{place}.py" for place in of_files & held}

    def _touch_again(self, unsaid: set[Path]) -> None:
        """Has stubs parsed once more whose last parse may have come to nothing.

        Airflow stores no DAG that it stored a moment before, and takes a parse that began before
        the change and ended after it for one of the new stub. Either way the change would wait
        until all files are parsed again. So would runs of a DAG that was parsed while one ended,
        and those that changed data start, of a DAG that somebody has unpaused.

        Args:
            unsaid: others, whose errors Airflow deletes when it sees this version.
        """
        due = {stub for stub, due_at in self._again.items() if time.time() >= due_at}
        self._again = {stub: at for stub, at in self._again.items() if stub not in due}
        stale = held_back(self.name) | wrongly_watched(self.name, DATA_CHANGE)
        for stub in due | unsaid | {self.path / name for name in stale}:
            with suppress(FileNotFoundError):
                os.utime(stub)

    # --- from the manifests to a listing ------------------------------------------------------

    def _known(self) -> _Listing:
        """The manifests as they were found last, also by an earlier process."""
        version = self._newest()
        return (version and self._read_listing(version)) or {}

    def _newest(self) -> str | None:
        """The version that was made last, also by an earlier process; None if there is none."""
        if self._latest is not None:
            return self._latest
        listings = (self.base_dir / "listings").glob("*.json")
        by_age = sorted(listings, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        found = (path.stem for path in by_age if self._read_listing(path.stem) is not None)
        return next(found, None)

    def _list(self, *, hold: bool, again: int = 3) -> tuple[_Listing, Mapping[str, Sequence[str]]]:
        """The manifests as they are, and those of each DAG id; of a broken one, / and its path.

        Args:
            hold: whether DAGs stay for their open runs, which only the DAG processor knows.
            again: how often to begin anew if links on its own path, or on those of the table of
                rights, are turned meanwhile, as by git-sync.
        """
        kept = self._known()
        check_mounted(self._folder, self.name, len(kept))
        closed: list[OSError] = []
        seen, self._seen = self._seen, {}
        found: dict[str, _Read] = {}
        behind_links: list[Path] = []
        top, rights = real_path(self._folder), _rights_table()
        for path, folder in yaml_files(self._folder, closed):
            name = path.relative_to(self._folder).as_posix()
            state = state_of(path)
            before, read = seen.get(name, ((), None))
            as_before = state and before == state and (read is None or read.folder == folder)
            if not as_before or (read and not self._kept(read.entry.text).exists()):
                read = self._read(path, name)
            self._seen[name] = (state, read)
            if read is None:
                continue
            found[name] = read
            # The others stay where they lie. As text: all are compared at each refresh.
            if read.folder and str(read.folder) != os.path.dirname(f"{top}/{name}"):
                behind_links.append(read.folder)
                domain = self._domain(read, name, top, rights, kept)
                found[name] = read._replace(entry=read.entry._replace(domain=domain))
        turned = real_path(self._folder) != top or (
            rights is not None and not rights.says_the_same(_rights_table(), behind_links)
        )
        if again and turned:
            return self._list(hold=hold, again=again - 1)
        by_path = {
            read.folder / Path(name).name: name
            for name, read in (found.items() if closed else ())
            if read.folder
        }
        for error in closed:
            if Path(error.filename) == self._folder:
                said = f"{_away(self._folder, self.name)} cannot be read: {error.strerror}."
                raise AirflowException(said) from error
            name = Path(error.filename).relative_to(self._folder).as_posix()
            found[name] = _Read(_Entry("", unreadable=str(error.strerror)), None)
            inside = [
                other
                for other, entry in kept.items()
                if other.startswith(f"{name}/") and entry.text and self._kept(entry.text).exists()
            ]
            for other in inside:
                if alias := by_path.get(top / other):  # by a link, which does not take it over
                    found.pop(alias, None)
                read = self._of_text(kept[other].text, other)
                entry = read.entry._replace(domain=kept[other].domain)
                found[other] = read._replace(entry=entry)
            if inside:
                said = "bundle %s: %s cannot be read, %s; its %d manifests stay as they were"
                _log.warning(said, self.name, error.filename, error.strerror, len(inside))
        listing = {name: read.entry for name, read in found.items()}
        names = defaultdict[str, list[str]](list)
        for name, read in found.items():
            names[read.dag_id or f"/{name}"].append(name)
        for claims in names.values():
            for name in claims if len(claims) > 1 else ():
                others = tuple(label(other) for other in claims if other != name)
                listing[name] = listing[name]._replace(claimed_by=others)
        if hold:
            self._hold(kept, listing, names)
        return listing, names

    def _domain(
        self, read: _Read, name: str, top: Path, rights: RightsTable | None, kept: _Listing
    ) -> str:
        """The domain of a manifest behind a link.

        Args:
            read: what was read of it.
            name: its path in the bundle's folder.
            top: that folder, without links.
            rights: the table; None if there is none, or one that cannot be read.
            kept: the manifests as they were.
        """
        if rights is not None and read.folder is not None:
            parent = Path(name).parent
            link = first_link(top, parent)
            return rights.domain(read.folder, top, self._folder / parent, link)
        if not conf.get("ddl", "manifest_rights", fallback="").strip():
            return ""
        before = kept.get(name)  # who has written that text has not changed
        return before.domain if before and before.text == read.entry.text else ""

    def _hold(
        self, kept: _Listing, listing: dict[str, _Entry], names: Mapping[str, Sequence[str]]
    ) -> None:
        """Leaves each DAG in its file while it has open runs; adds to the listing.

        Args:
            kept: the manifests as they were.
            listing: as they are.
            names: manifests by DAG id.
        """
        there = {dag_id: claims[0] for dag_id, claims in names.items() if len(claims) == 1}
        changed: dict[str, _Entry] = {}
        for name, entry in kept.items():
            text = entry.text
            same = listing.get(name) == entry
            if same or entry.claimed_by or not text or not self._kept(text).exists():
                continue
            dag_id, place = self._of_text(text, name).dag_id, entry.place or _place_of(name)
            if dag_id and dag_id not in (self._elsewhere or ()):  # else its runs go on there
                # What is held already comes last, and counts: the other text makes no DAG.
                was = entry.was or name
                changed[dag_id] = _Entry(text, was=was, place=place, domain=entry.domain)
        taken = {_place_of(name) for name in listing}
        for dag_id in sorted(with_open_runs(changed)) if changed else ():
            held, now = changed[dag_id], there.get(dag_id)
            if now is None or not self._makes_dag(listing[now].text, now):
                listing[f"{_GONE}{dag_id}"] = held
            elif _place_of(now) != held.place and held.place not in taken:
                listing[now] = listing[now]._replace(place=held.place)
        if any(entry.place for entry in listing.values()):
            self._leave_folders(listing)

    @staticmethod
    def _leave_folders(listing: dict[str, _Entry]) -> None:
        """Has no copy lie where a stub that stays has its folder, as of what was in ``m.yml/``."""
        places = {name: entry.place or _place_of(name) for name, entry in listing.items()}
        folders = {str(above) for place in places.values() for above in Path(place).parents}
        for name, place in places.items():
            if place in folders and not name.startswith(_GONE):
                listing[name] = listing[name]._replace(place=_odd_place(name))

    def _makes_dag(self, text: str, name: str) -> bool:
        """Whether a manifest that loads also has a DAG in this Airflow, as its stub would make it.

        Takes as long as a parse: for what changed while runs are open, and nothing else.
        """
        from ddl_airflow.manifest_file import ManifestFile

        try:
            content = self._kept(text).read_bytes()
            file = ManifestFile.of(self._folder / name, label(name), content)
            file.dag(None, in_documentation=False)
        except Exception:  # its stub says what; a timetable of the site's may raise anything
            return False
        return True

    def _read(self, path: Path, name: str) -> _Read | None:
        found = read_manifest(path)
        if found is None:
            return None
        content = found.content
        if isinstance(content, OSError):
            return _Read(_Entry("", unreadable=str(content.strerror)), None, found.folder)
        text = hashlib.sha256(content).hexdigest()
        if _digest(self._kept(text)) != text:  # or a host was lost while it was written
            # Airflow's own, which must read it, also where the manifest's owner may not.
            _write_kept(self._kept(text), content, found.mode | 0o600)
        return self._of_text(text, name)._replace(folder=found.folder)

    def _of_text(self, text: str, name: str) -> _Read:
        try:
            content = self._kept(text).read_bytes()
            compute = compute_table(conf.get("ddl", "compute", fallback=""))
            return _Read(_Entry(text), load_manifest_text(content, label(name), compute).dag_id)
        except ManifestError:
            pass  # its stub says so
        except Exception:  # the boundary: one manifest must not stop the others
            _log.exception("bundle %s: %s", self.name, label(name))
        return _Read(_Entry(text), None)

    def _version_of(self, listing: _Listing) -> str:
        said = [(name, _as_before_domains(entry)) for name, entry in sorted(listing.items())]
        content = json.dumps([str(self._folder), said, _STUB])
        return hashlib.sha256(content.encode()).hexdigest()[:20]

    # --- what other bundles have --------------------------------------------------------------

    @property
    def _taken_file(self) -> Path:
        return self.base_dir / "taken.json"

    def _read_taken(self) -> dict[str, str]:
        """As the newest folder has it, for who may not ask: a task whose run has no version."""
        try:
            taken: dict[str, str] = json.loads(self._taken_file.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return taken

    @staticmethod
    def _taken(
        names: Mapping[str, Sequence[str]], elsewhere: Mapping[str, tuple[str, str]]
    ) -> dict[str, str]:
        """Which manifests have the DAG id of another bundle's DAG, and where that is.

        Args:
            names: manifests by DAG id.
            elsewhere: file and bundle, by DAG id.
        """
        taken: dict[str, str] = {}
        for dag_id in names.keys() & elsewhere.keys():
            file, bundle = elsewhere[dag_id]
            manifest = re.sub(r"(\.ya?ml)\.py$", r"\1", file)  # of a stub
            taken |= dict.fromkeys(names[dag_id], f"{label(manifest)} of bundle {bundle}")
        return taken

    # --- from a listing to a folder -----------------------------------------------------------

    def _write_stubs(self, folder: Path, listing: _Listing) -> list[Path]:
        """Makes a folder that of the listing; returns the stubs that were not as they should be."""
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[Path, dict[str, _Entry]] = defaultdict(dict)  # by stub
        for name, entry in sorted(listing.items(), key=lambda item: item[0].startswith(_GONE)):
            place = folder / (entry.place or _place_of(name))
            files[place.with_name(f"{place.name}.py")][name] = entry
        copies = {
            _copy_of(stub, name)
            for stub, entries in files.items()
            for name, entry in entries.items()
            if entry.text
        }
        wanted = copies | files.keys()
        for parent, folders, found in os.walk(folder, topdown=False):
            for name in found:
                if (path := Path(parent, name)) not in wanted:
                    path.unlink()
            for name in folders:
                with suppress(OSError):  # it is not empty
                    Path(parent, name).rmdir()
        return [stub for stub, entries in files.items() if self._write_stub(stub, entries)]

    def _write_stub(self, stub: Path, entries: Mapping[str, _Entry]) -> bool:
        """Whether it, or a copy, was not as it should be; the manifest's own DAG comes first."""
        lines = [_STUB]
        for number, (name, entry) in enumerate(entries.items()):
            fields = {
                **{key: value for key, value in entry._asdict().items() if key != "place"},
                "folder": str(self._folder),
                "path": entry.was or name,
                "was": bool(entry.was),
                "copy": _copy_of(stub, name).name,
                "shown": str(self._shown(entry.text)) if entry.text else "",
                "alone": len(entries) == 1,
            }
            arguments = ", ".join(f"{key}={ascii(value)}" for key, value in fields.items() if value)
            variable = "dag" if number == 0 else f"dag_{number}"
            lines.append(f"{variable} = dag_of_stub(__file__, {arguments})\n")
        content = "".join(lines).encode("ascii")
        copies = {_copy_of(stub, name): entry.text for name, entry in entries.items() if entry.text}
        # A copy may be of a manifest whose stub could not be written any more.
        there = all(
            _digest(copy) == text and self._shown(text).exists() for copy, text in copies.items()
        )
        if there and stub.exists() and stub.read_bytes() == content:
            return False
        for copy, text in copies.items():
            self._write_copy(copy, text)
        _write(stub, content, 0o644)
        return True

    def _write_copy(self, copy: Path, text: str) -> None:
        content, mode = self._kept(text).read_bytes(), self._kept(text).stat().st_mode & 0o777
        # Airflow reads it after the parse, when there may be another copy.
        if not self._shown(text).exists():
            _write_kept(self._shown(text), without_keys(content), mode)
        _write(copy, content, mode)

    def _make_version(self, version: str) -> None:
        listing = self._read_listing(version)
        if listing is None:
            # Another host made it. If the folder has the same manifests here, so can we.
            listing, _ = self._list(hold=False)  # which runs are open, only the other one knows
            if self._version_of(listing) != version:
                raise AirflowException(
                    f"version {version} of bundle {self.name} is not on this host, and the "
                    f"manifests in {self._folder} are of another one by now. Each is kept for "
                    f"{_KEPT_S // _DAY_S:.0f} days after it was the newest. Let all hosts share "
                    "[dag_processor] dag_bundle_storage_path, or run with the newest version."
                )
            self._note_changed(listing)
            self._write_listing(version, listing)
            self._forget_keys()
        listing = self._with_what_is_kept(listing)
        self.versions_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_NEW, dir=self.versions_dir) as folder:
            new = Path(folder, "version")
            self._write_stubs(new, listing)
            new.rename(self.path)

    # --- what is kept -------------------------------------------------------------------------

    def _kept(self, text: str) -> Path:
        return self.base_dir / "manifests" / text

    def _shown(self, text: str) -> Path:
        """What may be shown of a text, and never changes: itself, if it has no keys."""
        if text not in self._without_keys:
            content = self._kept(text).read_bytes()
            if hashlib.sha256(content).hexdigest() != text or without_keys(content) != content:
                return self.base_dir / "shown" / f"{text}.yml"
            self._without_keys.add(text)
        return self._kept(text)

    def _with_what_is_kept(self, listing: _Listing) -> _Listing:
        """The listing, with texts that are gone as manifests that cannot be read."""
        gone = _Entry("", unreadable=KEYS_FORGOTTEN)
        return {
            name: entry if not entry.text or self._kept(entry.text).exists() else gone
            for name, entry in listing.items()
        }

    def _listing_of(self, version: str) -> Path:
        return self.base_dir / "listings" / f"{version}.json"

    def _write_listing(self, version: str, listing: _Listing) -> None:
        said = {name: _as_before_domains(entry) for name, entry in listing.items()}
        _write_kept(self._listing_of(version), json.dumps(said).encode(), 0o644)

    def _read_listing(self, version: str) -> _Listing | None:
        """None also for one that was being written when the host was lost."""
        try:
            entries = json.loads(self._listing_of(version).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return {n: _Entry(text, why, tuple(c), *was) for n, (text, why, c, *was) in entries.items()}

    def _note_changed(self, listing: _Listing) -> None:
        """Has the version that is no longer the newest, and its other texts, begin to age."""
        if (version := self._newest()) is not None:
            # The clock of files is coarse, and the newest is found by it.
            with suppress(FileNotFoundError):
                os.utime(self._listing_of(version), (time.time() - 1,) * 2)
        now = {entry.text for entry in listing.values()}
        for text in {entry.text for entry in self._known().values()} - now - {""}:
            with suppress(FileNotFoundError):
                os.utime(self._kept(text))

    def _forget_keys(self) -> None:
        """Deletes texts with keys that no manifest has had for a day, in all versions.

        Also what was left of versions that were being made; the lock is held, so nobody makes one.
        """
        now = {entry.text for entry in self._known().values()}
        folder = self.base_dir / "manifests"
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name in now or time.time() - path.stat().st_mtime < _KEYS_KEPT_S:
                continue
            if without_keys(content := path.read_bytes()) != content:
                path.unlink()
        for made in self.versions_dir.iterdir() if self.versions_dir.is_dir() else ():
            if made.name.startswith(_NEW):  # a task was killed while it made it
                shutil.rmtree(made)
                continue
            listing = self._read_listing(made.name) or {}
            if (left := self._with_what_is_kept(listing)) != listing:
                self._write_stubs(made, left)

    def _forget_old(self) -> None:
        """Deletes listings of a month ago and the texts that no other one has."""
        listings = [path for path in (self.base_dir / "listings").glob("*.json")]
        age_s = {path: time.time() - path.stat().st_mtime for path in listings}
        if max(age_s.values()) < _KEPT_S + _DAY_S:
            return  # once a day is enough
        wanted: set[str] = set()
        for path in listings:
            if path.stem != self._latest and age_s[path] > _KEPT_S:
                path.unlink()
            else:
                listing = self._read_listing(path.stem) or {}
                wanted |= {entry.text for entry in listing.values()}
        for folder in (self.base_dir / "manifests", self.base_dir / "shown"):
            for path in folder.iterdir() if folder.is_dir() else ():
                if path.stem not in wanted:
                    path.unlink()


def check_mounted(folder: Path, bundle: str, known: int) -> None:
    """Raises AirflowException if a folder seems to be away.

    Args:
        folder: of manifests.
        bundle: name of its bundle.
        known: how many manifests it had.
    """
    if not folder.is_dir():
        raise AirflowException(
            f"{_away(folder, bundle)} is not there. Mount it, or correct `path` in [dag_processor] "
            "dag_bundle_config_list."
        )
    if known and not os.listdir(folder):
        raise AirflowException(
            f"{_away(folder, bundle)} is empty, as a mount point is to which nothing is mounted. "
            f"Mount it; or if its {known} manifests are to go, put any file there, as .empty."
        )


def _away(folder: Path, bundle: str) -> str:
    return f"the DAGs stay as they were: the folder {folder} of bundle {bundle}"


def is_copy(path: Path) -> bool:
    """Returns whether a YAML file is a bundle's copy of a manifest, whose stub makes its DAG."""
    stub = path.with_name(f"{path.name}.py")
    try:
        with stub.open("rb") as file:
            return file.read(len(_STUB)) == _STUB.encode()
    except OSError:
        return False


def _as_before_domains(entry: _Entry) -> tuple[object, ...]:
    """Returns what is written of an entry: versions stay, and an earlier state of ours reads it."""
    return tuple(entry) if entry.domain else entry[:-1]


def _rights_table() -> RightsTable | None:
    """Returns the site's; None where it has none, or one that cannot be read: the stubs say so."""
    try:
        return RightsTable.read(conf.get("ddl", "manifest_rights", fallback=""))
    except ManifestError:
        return None


def _with_claims(listing: _Listing, taken: Mapping[str, str]) -> _Listing:
    """The listing, with what other bundles have as a claim of the DAG id."""
    return {
        name: entry._replace(claimed_by=(*entry.claimed_by, taken[name]))
        if name in taken
        else entry
        for name, entry in listing.items()
    }


def _place_of(name: str) -> str:
    """Returns where a manifest's copy lies: under its name, if nothing can go wrong with that."""
    plain = name.isprintable() and not re.search(r"\.ya?ml(\.py|\.redacted)/", name)
    if plain and len(name) <= 500 and all(len(p.encode()) <= 200 for p in name.split("/")):
        return name
    return _odd_place(name)


def _odd_place(name: str) -> str:
    return f"odd-names/{hashlib.sha256(os.fsencode(name)).hexdigest()}.yml"


def _copy_of(stub: Path, name: str) -> Path:
    """Returns where the copy of a manifest lies: beside its stub, which may have others too."""
    place = stub.with_suffix("")
    if not name.startswith(_GONE):
        return place
    return place.with_name(f".was-{hashlib.sha256(os.fsencode(name)).hexdigest()[:20]}.yml")


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file; empty where there is none that may be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, PermissionError):
        return ""


def _stored_every() -> float:
    return conf.getfloat("core", "min_serialized_dag_update_interval")


def _write_kept(path: Path, content: bytes, mode: int) -> None:
    """Writes a file that cannot be made again of others: whole also where the host is lost."""
    _write(path, content, mode, True)


def _write(path: Path, content: bytes, mode: int, synced: bool = False) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    # Never open to more than it shall be: there may be keys in it.
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    new.replace(path)
