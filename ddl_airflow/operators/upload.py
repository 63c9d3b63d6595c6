"""upload_results: the model, its checkpoints, its logs and its lineage; the marker last."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf

from ddl_airflow.airflow_internals import asset_of
from ddl_airflow.core.beneath import check_folder, open_beneath
from ddl_airflow.core.errors import (
    FileRefused,
    QualityTooLow,
    TransformError,
)
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.metrics import Measurement, deciding
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import check_folder_of_results, store_of
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    Pointer,
    check_not_worse,
    made_of,
    point,
)
from ddl_airflow.lineage.record import LINEAGE, assemble, due_of
from ddl_airflow.links import ResultsLink
from ddl_airflow.operators.base import StepOperator, TransferLog
from ddl_airflow.storage.filesystem import paths_below
from ddl_airflow.storage.store import SUCCESS, ObjectStore

# Lines in a log, each of a file that is not published.
_MOST_SAID = 20
# What the name of an object cannot hold, or a listing in XML not say: controls, and bytes that are
# no UTF-8, which Python has as halves of a character.
_UNUSABLE = re.compile("[\0-\x1f\x7f\ud800-\udfff]")

if TYPE_CHECKING:
    from ddl_airflow.storage.transfer import PublishedResult


class UploadResultsOperator(StepOperator):
    """Publishes results, rank logs and the experiment below ``<results>/<training_id>/<name>/``.

    A reader who finds the marker object ``_SUCCESS`` finds everything; without it there is
    nothing to read. ``lineage.json`` lies beside ``model/``. What was published stays as it is:
    another model of the same training gets another name, and then the pointers name that.

    Args:
        results: where to publish. Its keys are never serialised nor rendered.
        manifest: name, digest and dialect of the manifest, for the lineage.
        promote: whether the model goes into production, unless that of a later run is there.
        not_worse_in: the metric in which it then must be as good as that in production is at that
            moment; empty: none.
        source: what that must be measured on; empty: anything but training batches.
        small: whether less of the metric is better.
        keep: publications of the DAG that stay when the results are cleaned, the newest; None: all.
    """

    template_fields = ("results", "manifest", "promote", "not_worse_in", "source", "small")
    # Not the results: they go to where they are wanted now.
    fixed = ("manifest", "promote", "not_worse_in", "source", "small")
    template_fields_renderers = {"manifest": "json"}
    ui_color = "#d9efd5"
    operator_extra_links = (ResultsLink(),)

    def __init__(
        self,
        *,
        results: StoreReference,
        manifest: Mapping[str, Any],
        promote: bool = False,
        not_worse_in: str = "",
        source: str = "",
        small: bool = False,
        keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._reference = results
        self.results = results.view()
        self.manifest = dict(manifest)
        self.promote = promote
        self.not_worse_in = not_worse_in
        self.source = source
        self.small = small
        self.keep = keep
        # All trainings of this DAG are published below this key prefix.
        self.outlets = [asset_of(f"{results.uri}/{self.dag_id}")]

    def rehearse(self, layout: RunLayout) -> str:
        """Where to. A bucket is asked whether it is there, and for us."""
        store = store_of(self._reference)
        check_folder_of_results(self._reference)
        if self._reference.connection is not None:
            store.at(layout.training_id).list()
        return f"would publish to {store.uri}/{layout.training_id}"

    def run_step(self, layout: RunLayout, context: Any) -> dict[str, Any]:
        """Returns the model's and the lineage's place."""
        if not (layout.model / "saved_model.pb").is_file():
            raise TransformError(
                f"there is no SavedModel in {layout.model}. Clear the transform task first."
            )
        store = store_of(self._reference)
        published, record = self._publish(layout, context, store, self._found(layout))
        places = {
            "training": published.uri,
            "model": f"{published.uri}/model",
            "lineage": f"{published.uri}/{LINEAGE}",
        }
        self.log.info("model: %s", places["model"])
        self.log.info("lineage: %s", places["lineage"])
        facts = record["result"], made_of(record), context["dag_run"]
        publication = f"{layout.training_id}/{published.name}"
        self._point(store, LATEST, publication, *facts)
        in_production = self.promote and self._point(store, PRODUCTION, publication, *facts)
        context["outlet_events"][self.outlets[0]].extra = places | {
            "training_id": layout.training_id,
            "production": in_production,
            "dataset": record["dataset"]["fingerprint"],
            "code": record["code"]["digest"],
            "manifest": record["manifest"]["digest"],
        }
        return places

    def promote_newest(self, newest: Pointer, run: Any) -> None:
        """Lets production name what a run has no need to train again.

        That may be of a run that was due before the one whose model serves: a failed one that was
        cleared, or a backfill, which trained on what is newest nevertheless.

        Args:
            newest: the pointer to it.
            run: Airflow's, which finds nothing new.
        """
        if not self.promote:
            return
        facts = newest, newest["made_of"], run
        try:
            self._point(store_of(self._reference), PRODUCTION, newest["publication"], *facts)
        except QualityTooLow as worse:
            self.log.warning("%s", worse)

    def _found(self, layout: RunLayout) -> dict[str, Path]:
        if layout.experiment_left.exists():
            # A copy lies where scripts write as well.
            check_folder(layout.experiment_left, layout.workspace)
        files: dict[str, Path] = {}
        for folder, prefix in (
            (layout.result, ""),
            (layout.logs, "logs/"),
            (layout.experiment_left, "experiment/"),
        ):
            found, left = _files(folder, prefix)
            files |= found
            for path, why in left[:_MOST_SAID]:
                self.log.warning("%a is not published: %s.", str(path), why)
            if len(left) > _MOST_SAID:
                self.log.warning("%d more are not published", len(left) - _MOST_SAID)
        return files

    def _publish(
        self, layout: RunLayout, context: Any, store: ObjectStore, files: Mapping[str, Path]
    ) -> tuple[PublishedResult, dict[str, Any]]:
        from ddl_airflow.storage.transfer import publications, publish  # no parse needs it

        record = assemble(
            layout,
            self.manifest,
            context,
            files,
            tries=self.tries(context),
            published=publications(store.at(layout.training_id)).values(),
        )
        self.log.info("publishing %d files to %s/%s", len(files), store.uri, layout.training_id)
        published = publish(
            {**files, LINEAGE: layout.kept / LINEAGE},
            store,
            layout.training_id,
            marker={
                "dag_id": self.dag_id,
                "training_id": layout.training_id,
                "manifest": self.manifest["digest"],
                # The rule is the newest publication's: see ddl_airflow.lineage.retention.
                "keep": self.keep,
            },
            workers=conf.getint("ddl", "transfer_workers", fallback=8),
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
        run: Any,
    ) -> bool:
        """Whether the pointer then names it. ``quality`` has its metrics and measurements."""
        due, metrics = due_of(run), quality["metrics"]
        told = [Measurement.load(one) for one in quality.get("measurements", ())]
        decides_by = deciding(told, self.not_worse_in, self.source)
        if decides_by is None and self.not_worse_in in metrics:  # of an earlier version of ours
            decides_by = Measurement(self.not_worse_in, metrics[self.not_worse_in])
        who = run.triggering_user_name or getattr(run.run_type, "value", run.run_type)

        def check(now: Pointer) -> None:
            try:
                if other := check_not_worse(decides_by, now, small=self.small):
                    self.log.warning("%s", other)
            except QualityTooLow as worse:
                raise QualityTooLow(
                    f"{worse} That came there after this one was evaluated. {publication} is "
                    "published, and not in production; `ddl-airflow promote` puts it there."
                ) from None

        decides = name == PRODUCTION
        pointer = point(
            store,
            self.dag_id,
            name,
            publication,
            metrics,
            measurements=quality.get("measurements", ()),
            made_of=made,
            due=due if decides else None,
            check=check if decides and self.not_worse_in else None,
            by=f"{who}, run {run.run_id}",
        )
        place = f"{store.uri}/{self.dag_id}/{name}.json"
        if pointer["publication"] == publication:
            self.log.info("%s names it", place)
            return True
        content = publication.rpartition("-")[0]
        before = [p for p in pointer["before"] if p["publication"].rpartition("-")[0] == content]
        if any(one["withdrawn"] for one in before):
            why = "it named this one before, and somebody went back from it"
        elif before:
            why = "it named this one before"
        elif decides and pointer["due"] and datetime.fromisoformat(pointer["due"]) > due:
            why = f"the run of that was due later, {pointer['due']}"
        else:
            why = "that has the same content"
        self.log.warning("%s goes on naming %s: %s", place, pointer["publication"], why)
        return False


def _files(folder: Path, prefix: str) -> tuple[dict[str, Path], list[tuple[Path, str]]]:
    """The files in a folder by their keys; and what is none, or not the folder's, and why.

    A training may leave links to whatever Airflow can read, also names of another's file (link(2)).
    Only those to files of the same folder are what they seem.
    """
    files: dict[str, Path] = {}
    left: list[tuple[Path, str]] = []
    top = folder.resolve()
    for path in paths_below(folder) if folder.is_dir() else ():
        key = prefix + path.relative_to(folder).as_posix()
        target = Path(os.path.realpath(path))  # Path.resolve raises where links lead in a circle
        if not target.is_relative_to(top) or not _belongs(target, top):
            if not os.path.lexists(path):
                continue  # gone meanwhile
            why = "it leads out of the training's folder, to no file, or to another user's. Copy it"
            left.append((path, why))
        elif key in (SUCCESS, LINEAGE):
            # The first would be there before all is, and say what it likes.
            left.append((path, "what is published has a file of ours of that name. Rename it"))
        elif _UNUSABLE.search(key):
            left.append((path, "no object can be called so. Rename it"))
        else:
            files[key] = target
    return files, left


def _belongs(path: Path, top: Path) -> bool:
    try:
        os.close(open_beneath(path, top))
    except (FileRefused, FileNotFoundError):
        return False
    return True
