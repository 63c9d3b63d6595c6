"""Checkpoints in the store of results while ranks train, so that a lost worker loses minutes.

A thread of the step saves what RESULT_DIR has, now and then and at the end (``Snapshots``); ranks
have no keys. A try that finds older checkpoints than there are in the store, damaged ones, or none,
goes on from those. What is published needs none any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddl_airflow.core.errors import DdlError, StagingError, SubmitFailed
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.sections.launchers import cannot_save, launcher_kind
from ddl_airflow.core.plan import TrainStep
from ddl_airflow.lineage.record import begun_with, fixed_run
from ddl_airflow.steps.base import Site
from ddl_airflow.storage.store import ObjectStore

if TYPE_CHECKING:
    from ddl_airflow.storage.snapshots import Snapshots

FIELD = "checkpoints.upload_every"
_ENDS_S = 20.0  # what is being sent when the ranks have ended


def check_can_save(kind: str) -> None:
    """Raises SubmitFailed if no step is there while ranks of that launcher run."""
    found = launcher_kind(kind)
    if found is not None and not found.can_stream:
        wrong, fix = cannot_save(kind)
        raise SubmitFailed(f"{FIELD}: {wrong}. {fix}", retryable=False)


def place_of(results: ObjectStore, training_id: str) -> ObjectStore:
    """Where the snapshots of a training lie."""
    from ddl_airflow.storage.snapshots import SNAPSHOTS  # here and below: no parse needs it

    return results.at(f"{training_id}/{SNAPSHOTS}")


def drop_published(results: ObjectStore, training_id: str, log: Any) -> None:
    """Removes the snapshots of a training whose publication has its checkpoints."""
    from ddl_airflow.storage.snapshots import drop

    try:
        drop(place_of(results, training_id))
    except StagingError as error:  # the model is published
        log.warning(
            "%s: checkpoints that nobody needs are left; `ddl-airflow clean` removes them", error
        )


class CheckpointsInStore:
    """Those of one try.

    Args:
        step, layout, site, log: of the step.
        try_number: the run's.
    """

    def __init__(
        self,
        step: TrainStep,
        layout: RunLayout,
        site: Site,
        log: Any,
        try_number: int,
    ) -> None:
        from ddl_airflow.storage.snapshots import Snapshots

        assert step.results is not None and step.upload_every_s is not None
        self._layout, self._log, self._every_s = layout, log, step.upload_every_s
        self._wanted: Callable[[], bool] = lambda: True
        self._over = False
        self._said_half: set[str] = set()
        self._stop = threading.Event()
        made_of = (fixed_run(layout) or {}).get("made_of") or {}
        self._snapshots: Snapshots = Snapshots(
            place_of(site.open_store(step.results), layout.training_id),
            layout.result,
            layout.workspace,
            {"dataset": str(made_of.get("dataset", ""))},
            try_number,
            now=time.time,
            go_on=lambda: self._wanted() and not self._over,
            begun_with=lambda: begun_with(layout),
        )

    @property
    def brought(self) -> Mapping[str, Any]:
        """What ranks trained with whose checkpoints ``restore`` has brought, as ``begun_with``
        has it; empty where it brought none.
        """
        return self._snapshots.brought

    def start_again(self) -> None:
        """Forgets those of a training that is to begin from its start."""
        self._snapshots.drop()

    def restore(self, leave_whole: Callable[[Path], None]) -> None:
        """Brings those in the store where what is here is older, damaged, or lost.

        Args:
            leave_whole: moves damaged checkpoints out of a folder to the run's ``damaged``; it has
                those that are here. Newer ones than those that are brought are kept there, too.

        Raises:
            TryIsOver: a later try of the training has begun.
            StagingError: there are none here, and it is not known whether there are in the store,
                or they cannot be fetched: the training would begin from its start.
            JobFailed, JobLost: as ``leave_whole``.
        """
        from ddl_airflow.storage.checkpoint_files import is_to_go_on_from
        from ddl_airflow.storage.snapshots import TryIsOver

        layout = self._layout
        try:
            self._snapshots.begin()
        except TryIsOver:
            raise
        except StagingError as error:  # so says every save
            self._log.warning("%s: checkpoints will not be saved in the store: %s", FIELD, error)
        here = is_to_go_on_from(layout.result, layout.workspace, layout.damaged)

        def look(folder: Path) -> None:
            layout.give_to_ranks(folder)
            leave_whole(folder)

        try:
            brought = self._snapshots.restore(look, layout.damaged)
        except StagingError as error:
            layout.create()  # some may have been brought
            if not is_to_go_on_from(layout.result, layout.workspace, layout.damaged):
                raise
            self._log.warning("goes on from the checkpoints that are here: %s", error)
            return
        if brought is None:
            return
        layout.create()
        self._log.info(
            "goes on from checkpoints in the store, %s here: %d files, %.1f MiB of try %d, "
            "saved %.0f s ago: %s",
            *(
                "damaged" if brought.was_damaged else "newer than those" if here else "lost",
                brought.files,
                brought.nbytes / 2**20,
                brought.by_try,
            ),
            *(time.time() - brought.made, brought.uri),
        )
        if brought.kept is not None:
            self._log.warning("newer ones, beside the damaged one, are kept in %s", brought.kept)

    @contextmanager
    def saved(self, wanted: Callable[[], bool]) -> Iterator[None]:
        """Saves them while this lasts, and at its end, unless nobody wants them any more."""
        self._wanted = wanted
        thread = threading.Thread(target=self._run, name="ddl-checkpoints", daemon=True)
        thread.start()
        try:
            yield
        except DdlError:
            self._end(thread)
            raise
        except BaseException:  # also an interrupt: whoever ends the task waits seconds
            self._over = True
            self._stop.set()
            raise
        self._end(thread)

    def _end(self, thread: threading.Thread) -> None:
        self._stop.set()
        if self._wanted():
            thread.join(_ENDS_S)
        if thread.is_alive() or not self._wanted():
            if self._wanted():
                self._log.warning(
                    "%s: the last checkpoints are not in the store: what was being sent took over "
                    "%.0f s more than the ranks",
                    *(FIELD, _ENDS_S),
                )
            self._over = True
            return
        self._save()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._save()

    def _save(self) -> None:
        began = time.monotonic()
        try:
            saved = self._snapshots.save()
        except Exception as error:  # not worth a training; nor is what nobody has thought of
            if not isinstance(error, DdlError) or (self._wanted() and not self._over):
                self._log.warning(
                    "%s: checkpoints are not saved in the store: %s: %s",
                    *(FIELD, type(error).__name__, error),
                )
            return
        if saved is not None:
            self._log.info(
                "checkpoints saved: %d files, %.1f MiB; sent %.1f MiB in %d chunks, %.1f s: %s",
                *(saved.files, saved.nbytes / 2**20, saved.sent_nbytes / 2**20, saved.sent),
                *(time.monotonic() - began, saved.uri),
            )
            for key in saved.half_written:
                if key not in self._said_half:
                    self._said_half.add(key)
                    self._log.warning(
                        "%s: %s was half written whenever it was read, so what was saved before "
                        "stays, too. Let the script write it under another name and rename it, as "
                        "ddl.keras.CheckpointCallback does",
                        *(FIELD, key),
                    )
