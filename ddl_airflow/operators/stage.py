"""stage_data: the training's data and code, to where ranks find them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.sdk import XComArg
from airflow.sdk.exceptions import AirflowSkipException

from ddl_airflow.core.command import check_command
from ddl_airflow.core.errors import StagingError
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.parameters import differs_by_run
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.core.scripts import CURE, will_train_apart
from ddl_airflow.hooks.store import check_folder_of_results, store_of
from ddl_airflow.launchers.registry import launcher
from ddl_airflow.lineage.production import LATEST, read_pointer, rejected
from ddl_airflow.lineage.record import (
    fix_run,
    forget_part,
    forget_parts,
    has_begun_training,
    write_part,
)
from ddl_airflow.operators.base import StepOperator, TransferLog, rank_python
from ddl_airflow.operators.launch import kept_job
from ddl_airflow.operators.train import TrainOperator
from ddl_airflow.operators.upload import UploadResultsOperator
from ddl_airflow.storage.filesystem import holder_of

if TYPE_CHECKING:
    from ddl_airflow.storage.code import CodeSnapshot
    from ddl_airflow.storage.store import StoredObject


# For ranks that were told to end, when train was cleared as well.
_ENDS_S = 30.0
_LOOK_S = 0.5
# Types of run: from the UI, the API or the command line, and "Materialize" of an asset in the UI.
_BY_A_PERSON = ("manual", "backfill", "asset_materialization")


class StageDataOperator(StepOperator):
    """Copies the scripts as they are now, and stages the dataset through the cache.

    What the run trains with is fixed here, data, code, parameters and the manifest's other steps:
    whoever edits the manifest changes the next run, or clears this task. What ranks of the run work
    with is not replaced under them.

    The cheap checks come first: a command whose script is missing fails here, before a byte of
    data has moved. The dataset is no asset of this task: as an outlet it would start whoever waits
    for it, this training perhaps; as an inlet it would need the name that its maker gives it.

    Args:
        dataset: where the data lies. Its keys are never serialised nor rendered.
        code: folder with the scripts.
        not_code: folders in it that are not copied, data and results among them.
        python: the ranks' Python, for the checks; empty for the site's.
        commands: the manifest's commands, that of the training first; checked against the code.
        results: where trainings are published. A run that no person started does nothing if the
            newest one there was made of the same and is whole, or one that was rejected was. None:
            it always trains.
        manifest: name, digest and dialect of the manifest, for that.
    """

    template_fields = ("dataset", "code", "commands")
    ui_color = "#d8ecf3"

    def __init__(
        self,
        *,
        dataset: StoreReference,
        code: Path,
        commands: Sequence[str],
        not_code: Sequence[Path] = (),
        python: str = "",
        results: StoreReference | None = None,
        manifest: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._reference = dataset
        self.dataset = dataset.view()
        self.code = str(code)
        self.commands = list(commands)
        self.python = python
        self.not_code = [str(folder) for folder in not_code]
        self._results = results
        self.manifest = dict(manifest or {})

    def take_fixed(self, context: Any) -> None:
        """Takes nothing: this is the step that fixes what the run trains with."""

    def rehearse(self, layout: RunLayout) -> str:
        """What is there, and how much of it would have to be fetched."""
        from ddl_airflow.storage.cache import Cache  # here and below: no parse needs it

        self._take_code(layout)
        store, cache = store_of(self._reference), Cache(layout.cache)
        found = store.list()
        missing = [obj for obj in found if not cache.holds(store, obj)]
        return (
            f"{store.uri} has {len(found)} files, {_mib(found)}; would fetch {len(missing)} of "
            f"them, {_mib(missing)}"
        )

    def _skip_if_trained(self, dataset: str, code: CodeSnapshot, context: Any) -> None:
        from ddl_airflow.storage.transfer import missing_from

        run = context["dag_run"]
        by_a_person = getattr(run.run_type, "value", run.run_type) in _BY_A_PERSON
        always = by_a_person or self.was_cleared(context)
        if self._results is None or always or any(map(differs_by_run, self.commands)):
            return
        results = store_of(self._results)
        made_of = self._made_of(context, dataset, code)
        newest = read_pointer(results, self.dag_id, LATEST)
        if newest is not None and newest["made_of"] == made_of:
            if gone := missing_from(results.at(newest["publication"])):
                self.log.warning(
                    "%s/%s is not as it was published, %s is missing or changed: training again",
                    *(results.uri, newest["publication"], gone[0]),
                )
                return
            for step in self.get_flat_relatives():
                if isinstance(step, UploadResultsOperator):
                    step.promote_newest(newest, run)
            said = f"those of {newest['training_id']}"
        elif why := rejected(results, self.dag_id, made_of):
            said = f"those of a model that was rejected: {why}"
        else:
            return
        raise AirflowSkipException(
            f"Data, code, manifest and parameters are {said}: there is nothing new to train. A "
            "run that a person triggers trains all the same."
        )

    def _leave_alone_who_trains(self, layout: RunLayout) -> None:
        """Somebody may have cleared this task alone: the ranks work in what it would replace."""
        deadline = time.monotonic() + _ENDS_S
        while who := _who_trains(layout):
            if time.monotonic() > deadline:
                raise StagingError(
                    f"{who} works with what is staged in {layout.root}. Clear train as well, or "
                    "let it end first."
                )
            time.sleep(_LOOK_S)

    def _made_of(self, context: Any, dataset: str, code: CodeSnapshot) -> dict[str, Any]:
        return {
            "dataset": dataset,
            "code": code.digest,
            "manifest": self.manifest.get("digest"),
            "parameters": dict(context["params"]),
        }

    def _warn_of_ranks_apart(self, layout: RunLayout, context: Any) -> None:
        for train in self.get_flat_relatives():
            if not isinstance(train, TrainOperator):
                continue
            nodes = context["params"].get("nodes", train.nodes)
            if isinstance(nodes, XComArg) or isinstance(train.slots, XComArg):
                continue  # nobody knows it yet
            if said := will_train_apart(layout.code, train.distribution, nodes * train.slots):
                self.log.warning("%s. %s", said, CURE)

    def _take_code(self, layout: RunLayout) -> CodeSnapshot:
        from ddl_airflow.storage.code import snapshot

        code = snapshot(Path(self.code), layout.code, map(Path, self.not_code))
        layout.give_to_ranks(layout.code)
        for name in code.left_out:
            self.log.warning(
                "code: %s is a link that leads out of %s, and is not copied. Put there what it "
                "leads to.",
                *(name, self.code),
            )
        for number, command in enumerate(self.commands):
            ranks = 1 if number == 0 else 0  # or more; only the training runs in them
            check_command(command, layout.code, rank_python(self.python), ranks)
        self.log.info("code %s: %d files from %s", code.digest[:19], len(code.files), self.code)
        return code

    def run_step(self, layout: RunLayout, context: Any) -> dict[str, Any]:
        """Returns uri, fingerprint and counts of the dataset, and the code's digest."""
        from ddl_airflow.storage.cache import Cache
        from ddl_airflow.storage.transfer import list_dataset, stage

        cleared = self.was_cleared(context) or context["dag_run"].clear_number
        if not cleared and has_begun_training(layout):
            # No training begins before this step has ended. What is there is another's.
            self.log.info("%s is of a deleted run of this id: training starts again", layout.root)
            layout.to_start_again.touch()
            forget_parts(layout, "stage_data")
        self._leave_alone_who_trains(layout)
        # From here on the folders are not what it says, until all is done.
        forget_part(layout, "stage_data")
        code = self._take_code(layout)
        self._warn_of_ranks_apart(layout, context)
        if self._results is not None:  # now, and not after days of training
            check_folder_of_results(self._results)
        store = store_of(self._reference)
        listing = list_dataset(store)
        self._skip_if_trained(listing.fingerprint, code, context)
        self.log.info("staging %s to %s", store.uri, layout.staged)
        dataset = stage(
            store,
            Cache(layout.cache),
            layout.staged,
            listing=listing,
            closed_cache=layout.ranks_group is not None,
            workers=conf.getint("ddl", "transfer_workers", fallback=8),
            progress=TransferLog(self.log, "staged"),
        )
        self.log.info(
            "staged %d files, %.1f MiB: %d fetched, %d already in the cache; fingerprint %s",
            *(len(dataset.files), dataset.nbytes / 2**20, dataset.fetched, dataset.reused),
            dataset.fingerprint,
        )
        summary = {
            "uri": dataset.uri,
            "fingerprint": dataset.fingerprint,
            "files": len(dataset.files),
            "bytes": dataset.nbytes,
        }
        files = [{"key": o.key, "size": o.size, "etag": o.etag} for o in dataset.files]
        later = [step for step in self.get_flat_relatives() if isinstance(step, StepOperator)]
        fix_run(
            layout,
            context["dag_run"].run_id,
            self._made_of(context, dataset.fingerprint, code),
            {step.task_id: _known(step) for step in later},
        )
        write_part(
            layout,
            "stage_data",
            {
                "dataset": summary | {"listing": files},
                "code": code.record(),
                "tries": {"stage_data": self.tries(context)},
            },
        )
        return summary | {"code": code.digest}


def _who_trains(layout: RunLayout) -> str:
    """The job of this run that works, or that a scheduler will start; empty for none."""
    who = ""
    with suppress(FileNotFoundError):  # nobody ever was in it
        who = holder_of(layout.kept_alone)
    if who.startswith(f"{layout.training_id}/"):  # else it is another one of the experiment
        return who
    if (kept := kept_job(layout.scheduled_job)) is None:
        return ""
    scheduled = launcher(kept.handle.kind).status(kept.handle)
    return "" if scheduled.ended else f"{kept.handle.kind} job {kept.handle.number}"


def _known(step: StepOperator) -> dict[str, Any]:
    """Its fixed fields, but for those that an earlier task of a Python DAG is to return."""
    fields = {name: getattr(step, name) for name in step.fixed}
    return {name: value for name, value in fields.items() if not isinstance(value, XComArg)}


def _mib(objects: Sequence[StoredObject]) -> str:
    return f"{sum(obj.size for obj in objects) / 2**20:.1f} MiB"
