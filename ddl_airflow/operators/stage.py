"""stage_data: the training's data and code, to where ranks find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.sdk.exceptions import AirflowSkipException

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.parameters import differs_by_run
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import store_of
from ddl_airflow.lineage.production import LATEST, read_pointer
from ddl_airflow.lineage.record import write_part
from ddl_airflow.operators.base import StepOperator, TransferLog, rank_python
from ddl_airflow.operators.command import check_command

if TYPE_CHECKING:
    from ddl_airflow.storage.code import CodeSnapshot
    from ddl_airflow.storage.store import ObjectStore, StoredObject


class StageDataOperator(StepOperator):
    """Copies the scripts as they are now, and stages the dataset through the cache.

    The cheap checks come first: a command whose script is missing fails here, before a byte of
    data has moved. The dataset is no asset of this task: as an outlet it would start whoever waits
    for it, this training perhaps; as an inlet it would need the name that its maker gives it.

    Args:
        dataset: where the data lies. Its keys are never serialised nor rendered.
        code: folder with the scripts.
        not_code: folders in it that are not copied, data and results among them.
        python: the ranks' Python, for the checks; empty for the site's.
        commands: the manifest's commands, checked against the code.
        results: where trainings are published. A run that no person started does nothing if the
            newest one there was made of the same. None: it always trains.
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

    def _skip_if_trained(self, store: ObjectStore, code: CodeSnapshot, context: Any) -> None:
        from ddl_airflow.storage.transfer import list_dataset

        run = context["dag_run"]
        by_a_person = getattr(run.run_type, "value", run.run_type) in ("manual", "backfill")
        always = by_a_person or self.was_cleared(context)
        if self._results is None or always or any(map(differs_by_run, self.commands)):
            return
        newest = read_pointer(store_of(self._results), self.dag_id, LATEST)
        made_of = {
            "dataset": list_dataset(store).fingerprint,
            "code": code.digest,
            "manifest": self.manifest.get("digest"),
            "parameters": dict(context["params"]),
        }
        if newest is not None and newest["made_of"] == made_of:
            raise AirflowSkipException(
                f"Data, code, manifest and parameters are those of {newest['training_id']}: there "
                "is nothing new to train. A run that a person triggers trains all the same."
            )

    def _take_code(self, layout: RunLayout) -> CodeSnapshot:
        from ddl_airflow.storage.code import snapshot

        code = snapshot(Path(self.code), layout.code, map(Path, self.not_code))
        for command in self.commands:
            check_command(command, layout.code, rank_python(self.python))
        self.log.info("code %s: %d files from %s", code.digest[:19], len(code.files), self.code)
        return code

    def run_step(self, layout: RunLayout, context: Any) -> dict[str, Any]:
        """Returns uri, fingerprint and counts of the dataset, and the code's digest."""
        from ddl_airflow.storage.cache import Cache
        from ddl_airflow.storage.transfer import stage

        code = self._take_code(layout)
        store = store_of(self._reference)
        self._skip_if_trained(store, code, context)
        self.log.info("staging %s to %s", store.uri, layout.staged)
        dataset = stage(
            store,
            Cache(layout.cache),
            layout.staged,
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
        listing = [{"key": o.key, "size": o.size, "etag": o.etag} for o in dataset.files]
        write_part(
            layout,
            "stage_data",
            {
                "dataset": summary | {"listing": listing},
                "code": code.record(),
                "tries": {"stage_data": self.tries(context)},
            },
        )
        return summary | {"code": code.digest}


def _mib(objects: Sequence[StoredObject]) -> str:
    return f"{sum(obj.size for obj in objects) / 2**20:.1f} MiB"
