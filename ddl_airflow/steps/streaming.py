"""Training with data that still come: what stage_data and train agree on.

``stage_data`` lists the data, and keeps the listing: that is what the run trains with. ``train``
brings what is in it while its ranks run (``Stream``), in a thread of its own process, so that
nothing of it goes on when the try ends, however it does; what has come is in the cache for the next
one. Only a training whose data have all come, as they were listed, ends well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ddl_airflow.core.errors import JobLost, StagingError, SubmitFailed, TrainedOnPart
from ddl_airflow.core.job import JobHandle
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.sections.launchers import cannot_stream, launcher_kind
from ddl_airflow.core.plan import TrainStep
from ddl_airflow.lineage.record import read_part, selected_by
from ddl_airflow.steps.base import Site, TransferLog
from ddl_airflow.storage.filesystem import os_errors
from ddl_airflow.storage.fingerprint import file_sha256

if TYPE_CHECKING:
    from ddl_airflow.storage.staging import StagedDataset, StagedFile
    from ddl_airflow.storage.stream import Stream

_FIELD = "training_data_reference.stream"


def check_can_stream(kind: str) -> None:
    """Raises SubmitFailed if data cannot come while ranks of that launcher run."""
    found = launcher_kind(kind)
    if found is not None and not found.can_stream:
        wrong, fix = cannot_stream(kind)
        raise SubmitFailed(f"{_FIELD}: {wrong}. {fix}", retryable=False)


@contextmanager
def streamed(step: TrainStep, layout: RunLayout, site: Site, log: Any) -> Iterator[Stream]:
    """The run's data, which come while this lasts.

    Raises:
        StagingError: it is not known which data, or where they are now.
    """
    from ddl_airflow.storage.cache import Cache  # here and below: no parse needs it
    from ddl_airflow.storage.staging import Listing
    from ddl_airflow.storage.store import StoredObject
    from ddl_airflow.storage.stream import Stream

    listed = read_part(layout, "stage_data")["dataset"]
    store = site.open_store(step.dataset) if step.dataset is not None else None
    if store is None or store.uri != listed["uri"]:
        now = store.uri if store is not None else f"{_FIELD} is not in the manifest any more"
        raise StagingError(
            f"the run began with data that come from {listed['uri']} while it trains; now: {now}. "
            "Clear stage_data with downstream.",
            retryable=False,
        )
    objects = [StoredObject(one["key"], one["size"], one["etag"]) for one in listed["listing"]]
    log.info("%d files come from %s to %s", len(objects), store.uri, layout.staged)
    with Stream(
        store,
        Cache(layout.cache),
        layout.staged,
        Listing(objects, listed["fingerprint"]),
        selection=selected_by(layout),
        closed_cache=layout.ranks_group is not None,
        workers=site.transfer_workers,
        progress=TransferLog(log, "staged"),
    ) as stream:
        yield stream


def check_all_read(stream: Stream, job: JobHandle) -> None:
    """Raises TrainedOnPart if no rank of a job that has ended well has waited for all it read.

    Whatever a rank leaves there, it only says it of its own training.
    """
    if not stream.was_whole and not any(job.record_dir.glob("rank-*.read")):
        raise TrainedOnPart(
            "the ranks began before all of the data was there, and none has read it to its end "
            f"with ddl.data.files(); {stream.count} of {stream.total} files have come by now. "
            "Whoever only looks into $DATA_DIR sees what has come so far. Read the files as they "
            f"come, all of them (docs/scripts.md), or delete {_FIELD}."
        )


def wait_for_rest(stream: Stream, go_on: Callable[[], bool], log: Any) -> StagedDataset:
    """Waits until all are there: the lineage names them, and later steps may read them.

    Raises:
        StagingError: some never come.
        JobLost: nobody waits any more.
    """
    if stream.count < stream.total:
        log.info(
            "the ranks have ended; %d of %d files still come",
            stream.total - stream.count,
            stream.total,
        )
    dataset = stream.finish(go_on)
    if dataset is None:
        raise JobLost("cancelled while the rest of the data came")
    log.info(
        "staged %d files, %.1f MiB: %d fetched, %d already in the cache; fingerprint %s",
        *(len(dataset.files), dataset.nbytes / 2**20, dataset.fetched, dataset.reused),
        dataset.fingerprint,
    )
    return dataset


def with_proved(
    files: Sequence[Mapping[str, Any]], staged: Iterable[StagedFile]
) -> list[dict[str, Any]]:
    """Files of a dataset, as the lineage lists them, each with what was found out when it came: by
    what a copy of it can be told from another content.
    """
    proved = {file.key: file.proved for file in staged}
    return [{**file, **proved.get(str(file["key"]), {})} for file in files]


def with_digests(
    layout: RunLayout,
    files: Sequence[Mapping[str, Any]],
    packed: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Files of a dataset, as the lineage lists them, each with the SHA-256 of what is there.

    Args:
        layout: of the run.
        files: of the dataset.
        packed: the SHA-256 in hex of what is there only unpacked, by key.
    """

    def digest(key: str) -> str:
        return packed.get(key) or file_sha256(layout.staged / key)[0]

    with os_errors(layout.staged):
        return [{**file, "sha256": digest(str(file["key"]))} for file in files]
