"""Whether what later steps connect by is there: said before the data are fetched, not after."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ddl_airflow.core.errors import ConnectionInvalid, StagingError
from ddl_airflow.core.manifest.sections.launchers import launcher_kind
from ddl_airflow.core.plan import ScriptStep, Step, StoreReference, TrainStep, UploadResultsStep
from ddl_airflow.steps.base import Site
from ddl_airflow.steps.upload import check_place_of_results
from ddl_airflow.storage.store import ObjectStore

# The section of a manifest that a store of a step is of, by the step's field.
_SECTIONS = {"dataset": "training_data_reference", "results": "training_results_reference"}


def open_named(site: Site, reference: StoreReference, field: str) -> ObjectStore:
    """The store of a step.

    Args:
        site: that opens it.
        reference: of it.
        field: of the step, ``dataset`` or ``results``.

    Raises:
        ConnectionInvalid: as ``Site.open_store``; it says of which section of the manifest.
    """
    with _said_of(f"{_SECTIONS[field]}.connection"):
        return site.open_store(reference)


def check_connections(
    later: Mapping[str, Step],
    site: Site,
    parameters: Mapping[str, Any],
    training_id: str,
    results: StoreReference | None,
    unsure: Collection[str],
    log: Any,
) -> None:
    """Looks up what the steps after the staging connect by, and where they publish.

    Args:
        later: the steps, by their names. What an earlier task is still to return is passed over.
        site: the place.
        parameters: the run's, which may have another launcher.
        training_id: of the run.
        results: a place where it is known that the run can publish; None: of none.
        unsure: of which of the steps to warn only, as ``StepContext`` has it.
        log: a logger; it gets the warnings.

    Raises:
        ConnectionInvalid: there is no such connection, or it is of another type; or a secret has no
            value. Names the field.
        StagingError: as ``check_place_of_results``.
    """
    for name, step in later.items():
        try:
            _check_step(step, site, parameters, training_id, results)
        except StagingError as error:
            if name not in unsure:
                raise
            log.warning("%s may fail, if it runs and finds no more than this task: %s", name, error)


def _check_step(
    step: Step,
    site: Site,
    parameters: Mapping[str, Any],
    training_id: str,
    results: StoreReference | None,
) -> None:
    if isinstance(step, TrainStep):
        _check_launcher(step, site, parameters)
    if isinstance(step, ScriptStep) and _runs_scripts(step):
        for name, conn_id in _known(step.secrets).items():
            with _said_of(f"parameters.{name}"):
                site.secret(conn_id)
    for field in _SECTIONS:
        reference = getattr(step, field, None)
        if not isinstance(reference, StoreReference) or reference == results:
            continue
        if not isinstance(reference.uri, str):
            continue
        store = open_named(site, reference, field)
        if isinstance(step, UploadResultsStep):
            check_place_of_results(store, training_id)


def _runs_scripts(step: ScriptStep) -> bool:
    """Whether it starts a process of the manifest, which is given the secrets."""
    return bool(getattr(step, "command", None) or getattr(step, "commands", None))


def _known(named: Any) -> dict[str, str]:
    """What is text by now."""
    pairs = named.items() if isinstance(named, Mapping) else ()
    return {name: value for name, value in pairs if isinstance(value, str)}


def _check_launcher(step: TrainStep, site: Site, parameters: Mapping[str, Any]) -> None:
    if parameters.get("launcher", step.launcher) != step.launcher:
        return  # nothing of the manifest's is another launcher's
    conn_id = _known(step.scheduler).get("connection")
    kind = launcher_kind(step.launcher) if isinstance(step.launcher, str) else None
    if kind is None or not conn_id or not kind.connection_types:
        return
    with _said_of("launcher.connection"):
        conn_type, wanted = site.connection(conn_id).conn_type, kind.connection_types
        if conn_type not in wanted:
            raise ConnectionInvalid(
                f"connection {conn_id!r} is of type {conn_type!r}, wanted {' or '.join(wanted)}."
            )


@contextmanager
def _said_of(field: str) -> Iterator[None]:
    try:
        yield
    except ConnectionInvalid as error:
        raise ConnectionInvalid(f"{field}: {error}", retryable=error.retryable) from error
