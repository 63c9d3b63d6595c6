"""stage_data: the training's data and code, to where ranks find them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ddl_airflow.core.command import check_command
from ddl_airflow.core.connections import FindConnection
from ddl_airflow.core.errors import StagingError, SubmitFailed
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.sections.places import POINTERS, UNPACKED_AND_STREAMED
from ddl_airflow.core.manifest.templates import differs_by_run
from ddl_airflow.core.plan import StageDataStep, TrainStep, UploadResultsStep, named_by
from ddl_airflow.core.scripts import CURE, will_train_apart
from ddl_airflow.launchers.registry import launcher
from ddl_airflow.lineage.index import FOLDER as INDEX_FOLDER
from ddl_airflow.lineage.production import LATEST, is_no_news, read_pointer, rejected
from ddl_airflow.lineage.record import (
    check_can_list,
    drop_part,
    drop_parts,
    fix_run,
    has_begun_training,
    has_part,
    write_part,
)
from ddl_airflow.steps.base import StepSkipped, StepTry, TransferLog
from ddl_airflow.steps.connections import check_connections, open_named
from ddl_airflow.steps.job import kept_job
from ddl_airflow.steps.streaming import check_can_stream, with_digests, with_proved
from ddl_airflow.steps.upload import UploadResults, check_place_of_results
from ddl_airflow.storage.filesystem import FolderStore, holder_of
from ddl_airflow.storage.stores import place_of

if TYPE_CHECKING:
    from ddl_airflow.storage.cache import Cache
    from ddl_airflow.storage.code import CodeSnapshot
    from ddl_airflow.storage.staging import Listing, StagedDataset
    from ddl_airflow.storage.store import ObjectSource, ObjectStore, StoredObject

# For ranks that were told to end, when train was cleared as well.
_ENDS_S = 30.0
_LOOK_S = 0.5
# What the lineage has of an object that was checked by MD5s of parts, with the largest part.
_MD5_OF_PARTS: Mapping[str, Any] = {"etag_is": "md5", "part_size": 5 * 2**40}


class StageData(StepTry[StageDataStep]):
    """Copies the scripts as they are now, and stages the dataset through the cache. Where that
    comes while the ranks train, it is only listed here.

    What the run trains with is fixed here, data, code, parameters and the manifest's other steps:
    whoever edits the manifest changes the next run, or clears this step. What ranks of the run work
    with is not replaced under them.

    The cheap checks come first: a command whose script is missing fails here, before a byte of
    data has moved.
    """

    def rehearse(self) -> str:
        """What is there, and how much of it would have to be fetched."""
        from ddl_airflow.storage.cache import Cache  # here and below: no parse needs it
        from ddl_airflow.storage.staging import list_dataset

        self._rehearse_code()
        streams = self._streams()
        self._check_connections()
        store = open_named(self.site, self.step.dataset, "dataset")
        cache = Cache(self.layout.cache)
        found = list_dataset(store, self.step.selection, self.log.warning).objects
        missing = [obj for obj in found if not self._is_there(store, cache, obj)]
        return (
            f"{store.uri} has {len(found)} files, {_mib(found)}; would fetch {len(missing)} of "
            f"them, {_mib(missing)}{', while the ranks train' * streams}"
        )

    def run(self) -> dict[str, Any]:
        """Returns uri, fingerprint and counts of the dataset, and the code's digest."""
        from ddl_airflow.storage.cache import Cache
        from ddl_airflow.storage.staging import check_stageable, list_dataset

        self._skip_before_start()
        layout = self.layout
        if not self.context.cleared and has_begun_training(layout):
            # No training begins before this step has ended. What is there is another's.
            self.log.info("%s is of a deleted run of this id: training starts again", layout.root)
            layout.restart_requested.touch()
            drop_parts(layout, "stage_data")
        self._leave_alone_who_trains()
        layout.close_to_ranks()  # a task that was killed has left it open, and perhaps ranks
        # From here on the folders are not what it says, until all is done.
        drop_part(layout, "stage_data")
        code = self._take_code(layout.code)
        self._warn_of_ranks_apart()
        streams = self._streams()
        store = open_named(self.site, self.step.dataset, "dataset")
        if self.step.results is not None:  # now, and not after days of training
            results = open_named(self.site, self.step.results, "results")
            check_place_of_results(results, layout.training_id)
            self._check_results_are_no_data(results, store)
        listing = list_dataset(store, self.step.selection, self.log.warning)
        self._skip_if_trained(listing.fingerprint, code)
        self._check_connections()
        summary: dict[str, Any] = {
            "uri": store.uri,
            "fingerprint": listing.fingerprint,
            "files": len(listing.objects),
            "bytes": sum(obj.size for obj in listing.objects),
        }
        if (resolved := store.resolved_uri) != store.uri:
            summary["resolved_uri"] = resolved
        files = [{"key": o.key, "size": o.size, "etag": o.etag} for o in listing.objects]
        check_can_list(
            longest_listed(
                files,
                in_folder=isinstance(store, FolderStore),
                prove=self.step.prove,
                unpack=self.step.unpack,
            )
        )
        if streams:
            check_stageable(store, Cache(layout.cache), listing.objects)
            self.log.info(
                "%d files, %s, come while the ranks train; fingerprint %s",
                *(len(files), _mib(listing.objects), listing.fingerprint),
            )
        else:
            staged, packed = self._stage(store, listing)
            files = with_proved(files, staged.files)
            if self.step.prove:
                files = with_digests(layout, files, packed)
            else:  # what lies there only unpacked cannot be read later
                for file in files:
                    if digest := packed.get(str(file["key"])):
                        file["sha256"] = digest
        fix_run(
            layout,
            self.context.run.run_id,
            self._made_of(listing.fingerprint, code),
            self._fixed(),
            self.step.manifest.get("earlier_digests", ()),
            self.step.selection,
            {name: summary[name] for name in ("uri", "resolved_uri") if name in summary},
            self.context.gates,
        )
        write_part(
            layout,
            "stage_data",
            {
                "dataset": summary | {"listing": files},
                "code": code.record(),
                "manifest": {
                    name: value
                    for name, value in self._manifest().items()
                    if name != "earlier_digests"
                },
                "tries": {"stage_data": self.context.tries},
            },
        )
        return summary | {"code": code.digest}

    def _check_connections(self) -> None:
        later, parameters = self.context.later, self.context.run.parameters
        training_id = self.layout.training_id
        unsure, results = self.context.unsure, self.step.results
        check_connections(later, self.site, parameters, training_id, results, unsure, self.log)

    def _check_results_are_no_data(self, results: ObjectStore, data: ObjectStore) -> None:
        """As a manifest's text says it of places; here by what opens them.

        Raises:
            StagingError: what is published would be data, on which runs train without end.
        """
        source, target = place_of(data), place_of(results)
        dag_id, selection = self.context.run.dag_id, self.step.selection

        def is_data(*written: str, below: bool = False) -> bool:
            place = (*target, *written)
            key = "/".join(place[len(source) :])
            left_out = selection.leaves_out_below if below else selection.leaves_out
            return place[: len(source)] == source and not left_out(key)

        folders = (self.layout.training_id, INDEX_FOLDER)
        if any(is_data(folder, below=True) for folder in folders):
            among = results.uri
        elif found := [name for name in POINTERS if is_data(dag_id, name)]:
            among = f"{results.uri}/{dag_id}/{found[0]}"
        else:
            return
        raise StagingError(
            f"training_results_reference: {among} is among the data, {data.uri}: what is written "
            "there would be trained on. Give the results a place of their own, or name it in "
            "training_data_reference.exclude.",
            retryable=False,
        )

    def _is_there(self, store: ObjectStore, cache: Cache, obj: StoredObject) -> bool:
        from ddl_airflow.storage.archives import suffix_of
        from ddl_airflow.storage.unpacked import is_unpacked

        if self.step.unpack and suffix_of(obj.key):
            return is_unpacked(store, cache, obj)
        return cache.holds(store, obj)

    def _stage(
        self, store: ObjectStore, listing: Listing
    ) -> tuple[StagedDataset, Mapping[str, str]]:
        """Returns also the SHA-256 in hex of what is there only unpacked, by key."""
        from ddl_airflow.storage.cache import Cache
        from ddl_airflow.storage.staging import stage
        from ddl_airflow.storage.unpacked import unpack

        layout, cache, workers = self.layout, Cache(self.layout.cache), self.site.transfer_workers
        self.log.info("staging %s to %s", store.uri, layout.staged)
        source: ObjectSource = store
        packed: Mapping[str, str] = {}
        with cache.in_use():
            if self.step.unpack:
                progress = TransferLog(self.log, "archives")
                unpacked, listing = unpack(
                    store, cache, listing, workers=workers, progress=progress
                )
                source, packed = unpacked, unpacked.sha256
            dataset = stage(
                source,
                cache,
                layout.staged,
                listing=listing,
                closed_cache=layout.ranks_group is not None,
                workers=workers,
                progress=TransferLog(self.log, "staged"),
            )
        cache.flush()  # who trains after this host has crashed does not look at the data again
        self.log.info(
            "staged %d files, %.1f MiB: %d fetched, %d already in the cache; fingerprint %s",
            *(len(dataset.files), dataset.nbytes / 2**20, dataset.fetched, dataset.reused),
            dataset.fingerprint,
        )
        return dataset, packed

    def _streams(self) -> bool:
        """Whether ``train`` brings the data. Raises SubmitFailed if its launcher cannot."""
        for train in self.context.later.values():
            if isinstance(train, TrainStep) and train.stream:
                chosen = self.context.run.parameters.get("launcher", train.launcher)
                check_can_stream(str(chosen))
                if self.step.unpack:
                    wrong, fix = UNPACKED_AND_STREAMED
                    raise SubmitFailed(
                        f"training_data_reference.unpack: {wrong}. {fix}", retryable=False
                    )
                return True
        return False

    def _skip_before_start(self) -> None:
        """Airflow looks at the start for times alone."""
        run, start = self.context.run, self.step.not_before
        if not start or self.context.cleared or run.type != "asset_triggered":
            return
        if run.due < datetime.fromisoformat(start):
            raise StepSkipped(
                f"Nothing is due before {start}, says schedule.start. A run that a person triggers "
                "trains all the same."
            )

    def _skip_if_trained(self, dataset: str, code: CodeSnapshot) -> None:
        from ddl_airflow.storage.publication import missing_from

        reference, dag_id = self.step.results, self.context.run.dag_id
        commands = (*self.step.commands, self.step.evaluation)
        always = self.context.run.by_a_person or self.context.cleared
        if reference is None or always or any(map(differs_by_run, commands)):
            return
        results = self.site.open_store(reference)
        made_of, defaults = self._made_of(dataset, code), self._defaults()
        newest = read_pointer(results, dag_id, LATEST)
        earlier = self.step.manifest.get("earlier_digests", ())
        if newest is not None and is_no_news(made_of, newest["made_of"], defaults, earlier):
            if gone := missing_from(results.at(newest["publication"])):
                self.log.warning(
                    "%s/%s is not as it was published, %s is missing, changed or archived: "
                    "training again",
                    *(results.uri, newest["publication"], gone[0]),
                )
                return
            for step in self.context.later.values():
                if isinstance(step, UploadResultsStep):
                    UploadResults(step, self.context).promote_newest(newest)
            said = f"those of {newest['training_id']}"
        elif why := rejected(results, dag_id, made_of, defaults, earlier):
            said = f"those of a model that was rejected: {why}"
        else:
            return
        raise StepSkipped(
            f"Data, code, manifest and parameters are {said}: there is nothing new to train. A "
            "run that a person triggers trains all the same."
        )

    def _leave_alone_who_trains(self) -> None:
        """Somebody may have cleared this step alone: the ranks work in what it would replace."""
        deadline = time.monotonic() + _ENDS_S
        while who := _who_trains(self.layout, self.site.connection):
            if time.monotonic() > deadline:
                raise StagingError(
                    f"{who} works with what is staged in {self.layout.root}. Clear train as well, "
                    "or let it end first."
                )
            time.sleep(_LOOK_S)

    def _made_of(self, dataset: str, code: CodeSnapshot) -> dict[str, Any]:
        return {
            "dataset": dataset,
            "code": code.digest,
            "manifest": self._manifest()["digest"],
            "parameters": dict(self.context.run.parameters),
        }

    def _fixed(self) -> dict[str, Any]:
        return {name: step.fixed() for name, step in self.context.later.items()}

    def _manifest(self) -> Mapping[str, Any]:
        return named_by(self.step.manifest, self.context.run.dag_id, self._fixed())

    def _defaults(self) -> dict[str, Any]:
        """What a run may set, by name, as the later steps have it where no run does."""
        later = self.context.later.values()
        return {name: getattr(step, name) for step in later for name in step.settable}

    def _warn_of_ranks_apart(self) -> None:
        for train in self.context.later.values():
            if not isinstance(train, TrainStep):
                continue
            nodes, slots = self.context.run.parameters.get("nodes", train.nodes), train.slots
            if not (isinstance(nodes, int) and isinstance(slots, int)):
                continue  # an earlier task of a Python DAG says so later
            if said := will_train_apart(self.layout.code, train.distribution, nodes * slots):
                self.log.warning("%s. %s", said, CURE)

    def _rehearse_code(self) -> None:
        """Takes the code to where the steps that are rehearsed next look for it; but of a run that
        has staged it stays what ranks ran, and what the lineage names.
        """
        if not has_part(self.layout, "stage_data"):
            self._take_code(self.layout.code)
            return
        with TemporaryDirectory(dir=self.layout.root, prefix=".code-") as aside:
            self._take_code(Path(aside) / "code")

    def _take_code(self, folder: Path) -> CodeSnapshot:
        from ddl_airflow.storage.code import snapshot

        code = snapshot(
            Path(self.step.code),
            folder,
            leave_out=map(Path, self.step.not_code),
            give=self.layout.give_to_ranks,
            within=self.step.dataset.within or None,
        )
        for name in code.left_out:
            self.log.warning(
                "code: %s is a link that leads out of %s, and is not copied. Put there what it "
                "leads to.",
                *(name, self.step.code),
            )
        python = self.step.python or self.site.python
        for number, command in enumerate(self.step.commands):
            ranks = 1 if number == 0 else 0  # or more; only the training runs in them
            check_command(command, folder, python, ranks)
        if self.step.evaluation:
            check_command(self.step.evaluation, folder, python, field="evaluation.command")
        self.log.info(
            "code %s: %d files from %s", code.digest[:19], len(code.files), self.step.code
        )
        return code


def longest_listed(
    files: Sequence[Mapping[str, Any]], *, in_folder: bool, prove: bool, unpack: bool
) -> list[Mapping[str, Any]]:
    """Files of a dataset, each as long as the lineage may come to list it once it is here.

    Args:
        files: as they are listed before.
        in_folder: whether they are a folder's, of which no digest is found out as they come.
        prove: whether the lineage has a digest of each.
        unpack: whether archives become folders, and the lineage has a digest of them.
    """
    from ddl_airflow.storage.archives import suffix_of  # no parse needs it

    # Of an object the store knows an MD5, a CRC or a SHA-256: ``Fetched.proved``. The last is the
    # longest.
    found = {"sha256": "0" * 64}
    if prove and not in_folder:
        found |= _MD5_OF_PARTS
    all_have = prove or not in_folder
    return [
        {**file, **found} if all_have or (unpack and suffix_of(str(file["key"]))) else file
        for file in files
    ]


def _who_trains(layout: RunLayout, connections: FindConnection) -> str:
    """The job of this run that works, or that a scheduler will start; empty for none."""
    for place in (layout.experiment, layout.earlier_kept_alone):
        with suppress(FileNotFoundError):  # nobody ever was in it
            who = holder_of(place)
            if who.startswith(f"{layout.training_id}/"):  # else it is another of the experiment
                return who
    if (kept := kept_job(layout.scheduled_job)) is None:
        return ""
    scheduled = launcher(kept.handle.kind, None, connections).status(kept.handle)
    return "" if scheduled.ended else f"{kept.handle.kind} job {kept.handle.number}"


def _mib(objects: Sequence[StoredObject]) -> str:
    return f"{sum(obj.size for obj in objects) / 2**20:.1f} MiB"
