"""upload_results: the model, its checkpoints, its logs and its lineage; the marker last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.configuration import conf

from ddl_airflow.core.errors import TransformError
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import store_of
from ddl_airflow.lineage.production import LATEST, PRODUCTION, point
from ddl_airflow.lineage.record import LINEAGE, assemble
from ddl_airflow.links import ResultsLink
from ddl_airflow.operators.base import StepOperator, TransferLog, asset_of
from ddl_airflow.storage.store import SUCCESS


class UploadResultsOperator(StepOperator):
    """Publishes results, rank logs and the experiment below ``<results>/<training_id>/``.

    A reader who finds the marker object ``_SUCCESS`` finds everything; without it there is
    nothing to read. ``lineage.json`` lies beside ``model/``.

    Args:
        results: where to publish. Its keys are never serialised nor rendered.
        manifest: name, digest and dialect of the manifest, for the lineage.
        promote: whether the model goes into production.
    """

    template_fields = ("results", "manifest", "promote")
    template_fields_renderers = {"manifest": "json"}
    ui_color = "#d9efd5"
    operator_extra_links = (ResultsLink(),)

    def __init__(
        self,
        *,
        results: StoreReference,
        manifest: Mapping[str, Any],
        promote: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._reference = results
        self.results = results.view()
        self.manifest = dict(manifest)
        self.promote = promote
        # All trainings of this DAG are published below this key prefix.
        self.outlets = [asset_of(f"{results.uri}/{self.dag_id}")]

    def rehearse(self, layout: RunLayout) -> str:
        """Where to. A bucket is asked whether it is there, and for us."""
        store = store_of(self._reference)
        if self._reference.connection is not None:  # a folder is made when it is needed
            store.at(layout.training_id).list()
        return f"would publish to {store.uri}/{layout.training_id}"

    def run_step(self, layout: RunLayout, context: Any) -> dict[str, Any]:
        """Returns the model's and the lineage's place."""
        from ddl_airflow.storage.transfer import publish  # no parse needs it

        if not (layout.model / "saved_model.pb").is_file():
            raise TransformError(
                f"there is no SavedModel in {layout.model}. Clear the transform task first."
            )
        files = _files(layout.result, "") | _files(layout.logs, "logs/")
        files |= _files(layout.experiment, "experiment/")
        store = store_of(self._reference)
        record = assemble(
            layout,
            self.manifest,
            context,
            files,
            tries=self.tries(context),
            published=store.at(layout.training_id).exists(SUCCESS),
        )
        files[LINEAGE] = layout.state / LINEAGE
        self.log.info("publishing %d files to %s/%s", len(files), store.uri, layout.training_id)
        published = publish(
            files,
            store,
            layout.training_id,
            marker={"training_id": layout.training_id, "manifest": self.manifest["digest"]},
            workers=conf.getint("ddl", "transfer_workers", fallback=8),
            progress=TransferLog(self.log, "published"),
        )
        places = {
            "training": published.uri,
            "model": f"{published.uri}/model",
            "lineage": f"{published.uri}/{LINEAGE}",
        }
        self.log.info("model: %s", places["model"])
        self.log.info("lineage: %s", places["lineage"])
        names = (LATEST, PRODUCTION) if self.promote else (LATEST,)
        for name in names:
            point(
                store,
                self.dag_id,
                name,
                layout.training_id,
                record["result"]["metrics"],
                made_of={
                    "dataset": record["dataset"]["fingerprint"],
                    "code": record["code"]["digest"],
                    "manifest": self.manifest["digest"],
                    "parameters": record["run"]["parameters"],
                },
            )
            self.log.info("%s/%s/%s.json names it", store.uri, self.dag_id, name)
        context["outlet_events"][self.outlets[0]].extra = places | {
            "training_id": layout.training_id,
            "production": self.promote,
            "dataset": record["dataset"]["fingerprint"],
            "code": record["code"]["digest"],
            "manifest": self.manifest["digest"],
        }
        return places


def _files(folder: Path, prefix: str) -> dict[str, Path]:
    return {
        prefix + path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
