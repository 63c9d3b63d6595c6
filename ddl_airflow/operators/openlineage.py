"""What the steps have read and written, as events of Airflow's provider of OpenLineage.

Imported when the provider asks, and by nobody else: the package is an extra, and no parse needs it.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

import attrs
from airflow.providers.openlineage.extractors import OperatorLineage
from openlineage.client.event_v2 import InputDataset, OutputDataset
from openlineage.client.facet_v2 import (
    DatasetFacet,
    JobFacet,
    RunFacet,
    dataset_version_dataset,
    input_statistics_input_dataset,
    lineage,
    output_statistics_output_dataset,
    ownership_dataset,
    schema_dataset,
    storage_dataset,
)

from ddl_airflow import __version__
from ddl_airflow.lineage.flow import Dataset, Facts, Flow
from ddl_airflow.lineage.record import facets_schema

PRODUCER = f"pkg:pypi/ddl-airflow@{__version__}"
# Airflow kills a task five seconds after it has asked it to end; the ranks come first.
_EMITS_S = 1.5


def _schema_of(name: str) -> str:
    return f"{facets_schema()['$id']}#/$defs/{name}"


@attrs.define
class TrainingRunFacet(RunFacet):
    """What is known of the training by now."""

    @staticmethod
    def _get_schema() -> str:
        return _schema_of("TrainingRunFacet")


@attrs.define
class ManifestJobFacet(JobFacet):
    """The manifest that the job was made of."""

    @staticmethod
    def _get_schema() -> str:
        return _schema_of("ManifestJobFacet")


@attrs.define
class ModelDatasetFacet(DatasetFacet):
    """The model that a dataset is, or names."""

    @staticmethod
    def _get_schema() -> str:
        return _schema_of("ModelDatasetFacet")


def operator_lineage(flow: Flow) -> OperatorLineage[Any, Any]:
    """What the provider puts into an event of a step that has read and written this."""
    owner = flow.manifest.get("author", "")
    run: dict[str, RunFacet] = {}
    job: dict[str, JobFacet] = {}
    if flow.training:
        run["ddl_training"] = _filled(TrainingRunFacet, flow.training)
    if flow.manifest:
        job["ddl_manifest"] = _filled(ManifestJobFacet, flow.manifest)
    return OperatorLineage(
        inputs=[_input(one) for one in flow.inputs],
        outputs=[_output(one, owner) for one in flow.outputs],
        run_facets=run,
        job_facets=job,
    )


def _filled(kind: type[Any], facts: Facts) -> Any:
    """A facet of ours; its fields are those of its schema."""
    return kind(producer=PRODUCER).with_additional_properties(**facts)


def say_aborted(operator: Any, task_instance: Any, found: OperatorLineage[Any, Any]) -> None:
    """Tells that somebody has ended the task; the provider calls it a failure, and then does not.

    Args:
        operator: that of the task.
        task_instance: Airflow's.
        found: as ``operator_lineage`` gives it.
    """
    from airflow.providers.openlineage.api.core import emit
    from airflow.providers.openlineage.api.emission_policy import (
        extend_global_openlineage_emission_policy,
    )
    from airflow.providers.openlineage.plugins.macros import (
        lineage_job_name,
        lineage_job_namespace,
        lineage_run_id,
    )
    from airflow.providers.openlineage.utils.emission_policy import resolve_task_emission_policy
    from openlineage.client.event_v2 import Job, Run, RunEvent, RunState

    rules = resolve_task_emission_policy(operator, task_instance.dag_id, task_instance.task_id)
    if not rules.emit:
        return
    if not rules.extract_operator_metadata:
        found = OperatorLineage()
    event = RunEvent(
        eventType=RunState.ABORT,
        eventTime=datetime.now(UTC).isoformat(),
        run=Run(lineage_run_id(task_instance), facets=dict(found.run_facets)),
        job=Job(
            lineage_job_namespace(),  # type: ignore[no-untyped-call]
            lineage_job_name(task_instance),
            facets=dict(found.job_facets),
        ),
        inputs=list(found.inputs),
        outputs=list(found.outputs),
        producer=PRODUCER,
    )
    told = threading.Event()

    def tell() -> None:
        emit(event)
        told.set()

    # The catalogue may not answer, and this process has little time left.
    threading.Thread(target=tell, name="openlineage-abort", daemon=True).start()
    if told.wait(_EMITS_S):
        extend_global_openlineage_emission_policy(operator, emit_task_events=False)


def _input(one: Dataset) -> InputDataset:
    known: dict[str, Any] = {}
    if one.files is not None:
        known["inputStatistics"] = input_statistics_input_dataset.InputStatisticsInputDatasetFacet(
            fileCount=one.files, size=one.nbytes, producer=PRODUCER
        )
    return InputDataset(one.namespace, one.name, facets=_facets(one), inputFacets=known)


def _output(one: Dataset, owner: str) -> OutputDataset:
    known: dict[str, Any] = {}
    if one.files is not None:
        known["outputStatistics"] = (
            output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
                fileCount=one.files, size=one.nbytes, producer=PRODUCER
            )
        )
    facets = _facets(one)
    if owner:
        facets["ownership"] = ownership_dataset.OwnershipDatasetFacet(
            owners=[ownership_dataset.Owner(name=owner)], producer=PRODUCER
        )
    if one.made_of:
        facets["lineage"] = lineage.LineageDatasetFacet(
            inputs=[
                lineage.LineageDatasetInput(source.namespace, source.name, "DATASET")
                for source in one.made_of
            ],
            producer=PRODUCER,
        )
    return OutputDataset(one.namespace, one.name, facets=facets, outputFacets=known)


def _facets(one: Dataset) -> dict[str, DatasetFacet]:
    facets: dict[str, DatasetFacet] = {
        "storage": storage_dataset.StorageDatasetFacet(
            storageLayer=one.layer, fileFormat=one.format or None, producer=PRODUCER
        )
    }
    if one.version:
        facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(
            datasetVersion=one.version, producer=PRODUCER
        )
    if one.fields:
        facets["schema"] = schema_dataset.SchemaDatasetFacet(
            fields=[
                schema_dataset.SchemaDatasetFacetFields(name=name, type=kind)
                for name, kind in one.fields
            ],
            producer=PRODUCER,
        )
    if one.model:
        facets["ddl_model"] = _filled(ModelDatasetFacet, one.model)
    return facets
