"""upload_results: the model, its checkpoints, its logs and its lineage; the marker last."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ddl_airflow.core.beneath import check_folder, open_beneath
from ddl_airflow.core.errors import (
    AccessDenied,
    EvaluationInvalid,
    FileChanged,
    FileRefused,
    NotApproved,
    QualityTooLow,
    StagingError,
    TransformError,
)
from ddl_airflow.core.metrics import Measurement, deciding
from ddl_airflow.core.plan import UploadResultsStep, named_by
from ddl_airflow.evidence.names import EVIDENCE
from ddl_airflow.lineage.compare import CODE
from ddl_airflow.lineage.index import add, begin
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    Pointer,
    check_not_worse,
    made_of,
    point,
    why_stays,
)
from ddl_airflow.lineage.record import (
    APPROVE,
    INSTEAD_OF,
    LINEAGE,
    OF_A_BRANCH,
    assemble,
    fixed_run,
    has_part,
    lets_pass,
    model_digest,
    read_part,
    write_lineage,
)
from ddl_airflow.steps.base import StepTry, TransferLog
from ddl_airflow.steps.checkpoints import drop_published
from ddl_airflow.storage.filesystem import FolderStore, paths_below, why_private
from ddl_airflow.storage.store import PART_PREFIX, RETIRED, SUCCESS, ObjectStore

# Lines in a log, each of a file that is not published.
_MOST_SAID = 20
_MOST_CHANGES = 2  # of files, by whoever still writes to them, until the task has to be tried again
_MOST_SCRIPTS = 16 * 2**20  # bytes, of all scripts of a training
# What the name of an object cannot hold, or a listing in XML not say: controls, and bytes that are
# no UTF-8, which Python has as halves of a character.
_UNUSABLE = re.compile("[\0-\x1f\x7f\ud800-\udfff]")
# In bytes: S3 has 1,024 for a whole key, with prefix, training and publication.
_LONGEST = 600

# The first two would be there before all is, and say what they like.
_RESERVED = (SUCCESS, RETIRED, LINEAGE, CODE.rstrip("/"), EVIDENCE.rstrip("/"))
_OURS = "what is published has a file or folder of ours of that name. Rename it"

if TYPE_CHECKING:
    from ddl_airflow.storage.publication import PublishedResult


class UploadResults(StepTry[UploadResultsStep]):
    """Publishes results, rank logs and the experiment below ``<results>/<training_id>/<name>/``.

    A reader who finds the marker object ``_SUCCESS`` finds everything; without it there is
    nothing to read. ``lineage.json`` lies beside ``model/``. What was published stays as it is:
    another model of the same training gets another name, and then the pointers name that.
    """

    def rehearse(self) -> str:
        """Where to. A bucket is asked whether it is there, and for us."""
        store = self.site.open_store(self.step.results)
        check_place_of_results(store, self.layout.training_id)
        return f"would publish to {store.uri}/{self.layout.training_id}"

    def run(self) -> dict[str, Any]:
        """Returns the model's and the lineage's place.

        Raises:
            TransformError: there is no model.
            EvaluationInvalid: evaluate is a step of the run, and has not let it pass.
            NotApproved: the run asks a person, who has not approved of it.
            StagingError: it cannot be stored.
        """
        layout = self.layout
        files = self._found()
        if "model/saved_model.pb" not in files:
            raise TransformError(
                f"there is no SavedModel in {layout.model}. Clear the transform task first."
            )
        store = self.site.open_store(self.step.results)
        self._check_evaluated()
        self._check_approved()
        with suppress(StagingError):  # `_index` says that nothing can be written there
            begin(store, layout.training_id)
        published, record = self._published(store, files)
        places = {
            "training": published.uri,
            "model": f"{published.uri}/model",
            "lineage": f"{published.uri}/{LINEAGE}",
        }
        self.log.info("model: %s", places["model"])
        self.log.info("lineage: %s", places["lineage"])
        facts = record["result"], made_of(record)
        publication = f"{layout.training_id}/{published.name}"
        # Before the pointers: what is published is to be known, whatever becomes of these.
        self._index(store, record, publication)
        pointers = {
            name: f"{store.uri}/{self.context.run.dag_id}/{name}.json"
            for name in (LATEST, PRODUCTION)
            if (name == LATEST or self.step.promote)
            and self._point(store, name, publication, *facts)
        }
        drop_published(store, layout.training_id, self.log)
        self.context.published(
            places
            | {
                "training_id": layout.training_id,
                "production": PRODUCTION in pointers,
                "pointers": pointers,
                "metrics": record["result"]["metrics"],
                "digest": model_digest(record),
                "dataset": record["dataset"]["fingerprint"],
                "code": record["code"]["digest"],
                "manifest": record["manifest"]["digest"],
            }
        )
        return places

    def became(self, done: Mapping[str, Any]) -> dict[str, Any]:
        """Published; and where, for who wants to see which pointers name it."""
        named = {"publication": done["training"]} if "training" in done else {}
        return {"state": "published", **named, "results": self.step.results.view()}

    def promote_newest(self, newest: Pointer) -> None:
        """Lets production name what a run has no need to train again.

        That may be of a run that was due before the one whose model serves: a failed one that was
        cleared, or a backfill, which trained on what is newest nevertheless.

        Args:
            newest: the pointer to it.
        """
        if not self.step.promote:
            return
        facts = newest, newest["made_of"]
        try:
            self._point(
                self.site.open_store(self.step.results), PRODUCTION, newest["publication"], *facts
            )
        except QualityTooLow as worse:
            self.log.warning("%s", worse)

    def _check_evaluated(self) -> None:
        """Raises EvaluationInvalid if evaluate is a step of the run, and has not passed it."""
        # Not by the states of tasks: evaluate may have been cleared while a person was asked.
        if missed := self._missed("evaluate"):
            raise EvaluationInvalid(
                f"{missed} has not passed this model: it failed, was skipped, has not run to its "
                "end, or was marked success without being run, which measures nothing. Nothing "
                f"was published. Clear {missed} (by hand: --step evaluate), or stage_data with "
                "downstream if the manifest has no evaluation any more; with the bundle, on the "
                "latest bundle version."
            )

    def _check_approved(self) -> None:
        """Raises NotApproved if the run asks a person, who has not approved of this model."""
        # Not by the tasks there are: the manifest may have been edited while the form was open.
        if missed := self._missed(APPROVE):
            raise NotApproved(
                "the run began with approval in its manifest, and a person has not approved this "
                f"model: nobody has answered, or {missed} was marked success, which asks nobody. "
                "Nothing was published. Put approval back if it was taken out, and clear "
                f"{missed}; or clear stage_data with downstream, to go on with the manifest as it "
                "is now; with the bundle, on the latest bundle version."
            )

    def _missed(self, kind: str) -> str:
        """Which of the steps that are to let the model pass have not; empty: all have.

        Args:
            kind: ``evaluate`` or ``APPROVE``.
        """
        begun = fixed_run(self.layout)
        if begun is None:
            return ""
        if gates := begun.get("gates"):
            # Of an upload that the DAG has got since: all that there are.
            its = [gates[self.context.name]] if self.context.name in gates else gates.values()
            names = {one for of_it in its for one in of_it[kind]}
            missed = [one for one in sorted(names) if not lets_pass(self.layout, one)]
            some = sorted({one for of_it in its for one in of_it.get(kind + OF_A_BRANCH, ())})
            instead = {
                one: {o for of_it in its for o in of_it.get(INSTEAD_OF + one, some)} & {*some}
                for one in some  # by default all: of an earlier version of ours
            }
            passed = {one for one in some if lets_pass(self.layout, one)}
            left = [one for one in some if one not in passed and not passed & instead[one]]
            missed += [one for one in left if not instead[one] & {*left}]
            if either := [one for one in left if instead[one] & {*left}]:
                missed.append(" or ".join(either))
            return " and ".join(missed)
        # By hand there is at most one. So it is of a run that began before there were more.
        if kind not in begun["steps"]:
            return ""
        if not has_part(self.layout, kind):
            return kind
        read_part(self.layout, kind)  # of what the run is made of now
        return ""

    def _found(self) -> dict[str, Path]:
        layout = self.layout
        if layout.experiment_copy.exists():
            # A copy lies where scripts write as well.
            check_folder(layout.experiment_copy, layout.workspace)
        files: dict[str, Path] = {}
        for folder, prefix in (
            (layout.logs, "logs/"),
            (layout.experiment_copy, "experiment/"),
            (layout.result, ""),
        ):
            found, left = _files(folder, prefix)
            taken = files.keys() | _above(files)
            for key in [*found]:
                if key in taken or not files.keys().isdisjoint(_above([key])):
                    left.append((found.pop(key), _OURS))
            files |= found
            for path, why in left[:_MOST_SAID]:
                self.log.warning("%a is not published: %s.", str(path), why)
            if len(left) > _MOST_SAID:
                self.log.warning("%d more are not published", len(left) - _MOST_SAID)
        return files | self._scripts()

    def _scripts(self) -> dict[str, Path]:
        """Those that ran, so that the code of two models can be compared and run again."""
        from ddl_airflow.storage.code import digest_of  # no parse needs it

        layout = self.layout
        if not self.step.with_code:
            return {}
        staged = read_part(layout, "stage_data")["code"]
        found, _ = _files(layout.code, CODE)
        files = {key: path for key, path in found.items() if key[len(CODE) :] in staged["files"]}
        gone = sorted(set(staged["files"]) - {key[len(CODE) :] for key in files})
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            why = f"{gone[0]}{more} is there no more, or not to be published"
        elif sum(path.stat().st_size for path in files.values()) > _MOST_SCRIPTS:
            why = f"they are larger than {_MOST_SCRIPTS // 2**20} MiB"
        elif digest_of({key[len(CODE) :]: files[key] for key in files}) != staged["digest"]:
            why = "they were changed there since"
        else:
            return files
        self.log.warning("the scripts in %s are not published: %s", layout.code, why)
        return {}

    def _index(self, store: ObjectStore, record: Mapping[str, Any], publication: str) -> None:
        """Answers come faster with the index; it is made of the records where it is not whole."""
        try:
            add(store, record, publication)
        except Exception as error:  # whatever is there, the model is published
            self.log.warning(
                "`ddl-airflow lineage list` and `impact` do not know this training before somebody "
                "calls them with --rebuild: the index of the results, _lineage, was not written: "
                "%s: %s",
                *(type(error).__name__, error),
            )

    def _published(
        self, store: ObjectStore, files: Mapping[str, Path]
    ) -> tuple[PublishedResult, dict[str, Any]]:
        """Begins again where something still writes to a file: its record and its object would
        have different digests.
        """
        for _ in range(_MOST_CHANGES):
            try:
                return self._publish(store, files)
            except FileChanged as changed:
                self.log.warning("%s. Its digests are made again", changed)
        return self._publish(store, files)

    def _publish(
        self, store: ObjectStore, files: Mapping[str, Path]
    ) -> tuple[PublishedResult, dict[str, Any]]:
        from ddl_airflow.evidence.files import Evidence, add_signature, make  # no parse needs these
        from ddl_airflow.storage.publication import publications, publish

        layout = self.layout
        steps = (fixed_run(layout) or {}).get("steps", {})
        manifest = named_by(self.step.manifest, self.context.run.dag_id, steps)
        made = Evidence()

        def evidence(record: dict[str, Any]) -> Mapping[str, Path]:
            if self.site.evidence:
                make(made, record, layout)
                record["evidence"] = made.record()
            return made.files

        record = assemble(
            layout,
            manifest,
            self.context.run,
            files,
            tries=self.context.tries,
            published=publications(store.at(layout.training_id)).values(),
            evidence=evidence,
        )
        known = {f["key"]: (f["sha256"], f["size"]) for f in record["result"]["files"]}
        if self.site.signing_key:
            add_signature(made, record, layout, self.site.signing_key, self.site.secret)
        write_lineage(layout, record)
        for key, why in made.not_made.items():
            say = self.log.warning if key in made.failed else self.log.info
            say("%s is not made: %s", key, why)
        files = {**files, **made.files, LINEAGE: layout.kept / LINEAGE}
        self.log.info("publishing %d files to %s/%s", len(files), store.uri, layout.training_id)
        published = publish(
            files,
            store,
            layout.training_id,
            known=known,
            marker={
                "dag_id": self.context.run.dag_id,
                "training_id": layout.training_id,
                "manifest": manifest["digest"],
                # The rule is the newest publication's: see ddl_airflow.lineage.retention.
                "keep": self.step.keep,
            },
            workers=self.site.transfer_workers,
            progress=TransferLog(self.log, "published"),
        )
        return published, record

    def _point(
        self,
        store: ObjectStore,
        name: str,
        publication: str,
        quality: Mapping[str, Any],
        made: Mapping[str, Any],
    ) -> bool:
        """Whether the pointer then names it. ``quality`` has its metrics and measurements."""
        run = self.context.run
        due, metrics = run.due, quality["metrics"]
        told = [Measurement.load(one) for one in quality.get("measurements", ())]
        decides_by = deciding(told, self.step.not_worse_in, self.step.source)
        if (
            decides_by is None and self.step.not_worse_in in metrics
        ):  # of an earlier version of ours
            decides_by = Measurement(self.step.not_worse_in, metrics[self.step.not_worse_in])
        who = run.triggered_by or run.type

        def check(now: Pointer) -> None:
            try:
                if other := check_not_worse(decides_by, now, small=self.step.small):
                    self.log.warning("%s", other)
            except QualityTooLow as worse:
                raise QualityTooLow(
                    f"{worse} That came there after this one was evaluated. {publication} is "
                    "published, and not in production; `ddl-airflow promote` puts it there."
                ) from None

        decides = name == PRODUCTION
        pointer = point(
            store,
            self.context.run.dag_id,
            name,
            publication,
            metrics,
            measurements=quality.get("measurements", ()),
            made_of=made,
            due=due if decides else None,
            check=check if decides and self.step.not_worse_in else None,
            by=f"{who}, run {run.run_id}",
        )
        place = f"{store.uri}/{self.context.run.dag_id}/{name}.json"
        if pointer["publication"] == publication:
            self.log.info("%s names it", place)
            return True
        why = why_stays(store, run.dag_id, pointer, publication, due if decides else None)
        self.log.warning("%s goes on naming %s: %s", place, pointer["publication"], why)
        return False


def check_place_of_results(store: ObjectStore, training_id: str) -> None:
    """Looks whether a training could publish there; costs a bucket one small request.

    Raises:
        StagingError: a folder can neither be used nor made; there is no such bucket, or none for
            these keys.
    """
    try:
        if isinstance(store, FolderStore):
            store.check_writable()
        else:
            store.at(training_id).exists(SUCCESS)
    except StagingError as error:
        said = f"training_results_reference: {error}"
        raise type(error)(said, retryable=error.retryable) from error


def _files(folder: Path, prefix: str) -> tuple[dict[str, Path], list[tuple[Path, str]]]:
    """The files in a folder by their keys; and what is none, or not the folder's, and why.

    A training may leave links to whatever Airflow can read, also names of another's file (link(2)).
    Only those to files of the same folder are what they seem.

    Raises:
        AccessDenied: a file that may be of the model or a checkpoint, or a folder, may not be read.
        FileRefused: what may be of the model or a checkpoint cannot be published.
    """
    files: dict[str, Path] = {}
    left: list[tuple[Path, str]] = []
    top = folder.resolve()
    for path in paths_below(folder) if folder.is_dir() else ():
        key = prefix + path.relative_to(folder).as_posix()
        target = Path(os.path.realpath(path))  # Path.resolve raises where links lead in a circle
        try:
            belongs = target.is_relative_to(top) and _belongs(target, top)
        except PermissionError:
            why = why_private(target)
            if _may_be_of_model(target, top):
                raise AccessDenied(f"{str(target)!a}: {why}.") from None
            left.append((path, why))
            continue
        if not belongs:
            if not os.path.lexists(path):
                continue  # gone meanwhile
            why = (
                "it leads out of the training's folder, to no file, or to another user's. "
                "Copy what is there in place of it"
            )
        elif key in _RESERVED or (key.startswith((CODE, EVIDENCE)) and not prefix):
            left.append((path, _OURS))
            continue
        elif _UNUSABLE.search(key):
            why = "no object can be called so. Rename it"
        elif len(key.encode()) > _LONGEST:
            why = f"its path is longer than {_LONGEST} bytes. Shorten it"
        elif path.name.startswith(PART_PREFIX):
            why = "what is being written to a folder is called so. Rename it"
        else:
            files[key] = target
            continue
        if not prefix and _misses(key, target, top):
            raise FileRefused(f"{str(path)!a} cannot be published with the model: {why}.")
        left.append((path, why))
    return files, left


def _above(keys: Iterable[str]) -> set[str]:
    """The folders that they are in."""
    return {str(folder) for key in keys for folder in PurePosixPath(key).parents}


def _may_be_of_model(path: Path, top: Path) -> bool:
    """Whether a model that is published without it might not be whole."""
    from ddl_airflow.storage.checkpoint_files import is_checkpoint  # no parse needs it

    key = path.relative_to(top).as_posix()
    return os.path.isdir(path) or key.startswith("model/") or is_checkpoint(key)


def _misses(key: str, target: Path, top: Path) -> bool:
    """Whether the model, or a checkpoint, might not be whole without what is called so."""
    from ddl_airflow.storage.checkpoint_files import is_checkpoint  # no parse needs it

    if key == "model" or key.startswith("model/"):
        return True
    # What is in a folder of the training's own is published under that folder's name. A link to
    # nothing there misses nothing; what is elsewhere may be there for whoever wrote the link.
    return is_checkpoint(key) and (not target.is_relative_to(top) or os.path.isfile(target))


def _belongs(path: Path, top: Path) -> bool:
    try:
        os.close(open_beneath(path, top))
    except (FileRefused, FileNotFoundError):
        return False
    return True
