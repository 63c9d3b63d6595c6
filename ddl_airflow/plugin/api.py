"""The plugin's routes: a page, the progress that it draws, and the logs of ranks. Read-only."""

from __future__ import annotations

import base64
import codecs
import hashlib
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from ddl_airflow.airflow_internals import readers_of_task_logs
from ddl_airflow.core.beneath import open_beneath, read_object
from ddl_airflow.core.errors import FileRefused, StagingError
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.sections.definition import slug
from ddl_airflow.core.metrics import Measurement, newest, source_of
from ddl_airflow.core.progress import ABOUT_RUN, read_line
from ddl_airflow.lineage.record import has_part, measured, read_part
from ddl_airflow.links import tensorboard
from ddl_airflow.site import training_of, workspace

_PAGE = Path(__file__).with_name("training.html")
_MOST_BYTES = 1024 * 1024
_PIECE = 64 * 1024
# Of a log, in one answer: its end first, of which people want to read the last lines.
_TAIL = 64 * 1024
_LONGEST_MESSAGE = 10_000
_LARGEST = 2**62  # place in a file


def app() -> FastAPI:
    """The app. A user who may read the run's task logs may read its progress and rank logs."""
    api = FastAPI(title="DDL training", docs_url=None, redoc_url=None, openapi_url=None)
    page = _PAGE.read_text("utf-8")
    headers = {"Content-Security-Policy": _policy(page), "X-Content-Type-Options": "nosniff"}
    may_read = Depends(readers_of_task_logs())

    @api.get("/training", response_class=HTMLResponse)
    def training() -> str:
        return page

    @api.middleware("http")
    async def with_headers(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response = await call_next(request)
        response.headers.update(headers)
        return response

    @api.get("/progress/{dag_id}/{run_id:path}", dependencies=[may_read])
    def progress(dag_id: str, run_id: str, offset: int = 0) -> dict[str, Any]:
        layout = _layout(dag_id, run_id)
        news = read_progress(layout.progress, layout.workspace, min(max(0, offset), _LARGEST))
        return news | {
            "sources": sources_in(news["lines"]),
            "measurements": read_measurements(layout),
            "failure": read_failure(layout),
            "tensorboard": tensorboard(),
            "ranks": ranks_with_logs(layout.logs),
        }

    def opened(rank: int, dag_id: str, run_id: str) -> BinaryIO:
        layout = _layout(dag_id, run_id)
        log = rank_log(layout.logs, layout.workspace, rank)
        if log is None:
            raise HTTPException(404, f"rank {rank} has no log")
        return log

    @api.get("/log/{rank}/{dag_id}/{run_id:path}", dependencies=[may_read])
    def log(rank: int, dag_id: str, run_id: str) -> StreamingResponse:
        pieces = _pieces(opened(rank, dag_id, run_id))
        return StreamingResponse(pieces, media_type="text/plain; charset=utf-8")

    @api.get("/log-part/{rank}/{dag_id}/{run_id:path}", dependencies=[may_read])
    def log_part(
        rank: int, dag_id: str, run_id: str, before: int | None = None, after: int | None = None
    ) -> dict[str, Any]:
        with opened(rank, dag_id, run_id) as file:
            return read_part_of_log(file, before, after)

    return api


def _policy(page: str) -> str:
    """What a browser may do with the page: run its one script, and ask where it came from."""
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'self'"
    )


def _layout(dag_id: str, run_id: str) -> RunLayout:
    if slug(dag_id) != dag_id:
        raise HTTPException(404, f"{dag_id!r} is no DAG of a manifest")
    return RunLayout(workspace(), dag_id, training_of(dag_id, run_id, make=False))


def rank_log(folder: Path, root: Path, rank: int) -> BinaryIO | None:
    """The rank's log; None if there is none, or a link to what is not the script's to show.

    Args:
        folder: of the logs.
        root: no link beneath it is followed.
        rank: from 0.
    """
    try:
        return open(open_beneath(folder / f"rank-{rank}.log", root), "rb")
    except (FileNotFoundError, FileRefused):
        return None


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        left = os.fstat(file.fileno()).st_size  # what ranks add meanwhile is for the next request
        while left > 0 and (piece := file.read(min(_PIECE, left))):
            left -= len(piece)
            yield piece


def ranks_with_logs(folder: Path) -> list[int]:
    """Ranks whose log is in the folder, in order."""
    numbers = (path.stem[5:] for path in folder.glob("rank-*.log"))
    # The shim writes no other names; int() would take more, and fail over "²".
    return sorted(int(number) for number in numbers if re.fullmatch("[0-9]{1,9}", number))


def read_progress(path: Path, root: Path, offset: int) -> dict[str, Any]:
    """Whole lines from an offset on, at most 1 MiB of them. What is no progress is left out.

    Returns:
        ``lines`` (objects) and ``offset`` (bytes), to ask again from. An offset beyond the end is
        of a file that is gone: then from the start, and the offset is a smaller one.
    """
    try:
        opened = open_beneath(path, root)
    except (FileNotFoundError, FileRefused):
        return {"lines": [], "offset": 0}
    with open(opened, "rb") as file:
        if offset > os.fstat(file.fileno()).st_size:
            offset = 0
        file.seek(offset)
        new = file.read(_MOST_BYTES)
    whole = new.rfind(b"\n") + 1
    if not whole and len(new) == _MOST_BYTES:
        whole = len(new)  # a line that is longer is none, and must not stand in the others' way
    lines = [read_line(line) for line in new[:whole].split(b"\n")]
    return {"lines": [line for line in lines if line], "offset": offset + whole}


def sources_in(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What each metric of progress lines was measured on, for people; the last of each name."""
    return {
        name: Measurement(name, 0.0, source_of(name, line.get("source"))).measured_on
        for line in lines
        for name in line
        if name not in ABOUT_RUN
    }


def read_measurements(layout: RunLayout) -> list[dict[str, Any]]:
    """What the run's steps have measured of the model, the newest of each metric; no steps, none.

    Each has ``metric``, ``value`` (a number, or "NaN" and the like) and ``measured_on``.
    """
    try:
        if has_part(layout, "evaluate"):
            told = read_part(layout, "evaluate")["result"]["measurements"]
            known = [Measurement.load(one) for one in told]
        else:
            known = measured(layout)
        return [one.dump() | {"measured_on": one.measured_on} for one in newest(known).values()]
    except (StagingError, OSError, LookupError, TypeError, ValueError, AttributeError):
        return []  # no step has come so far; or it is of another version of ours


def read_failure(layout: RunLayout) -> dict[str, Any] | None:
    """Which step of the run failed last, and how: step, try, error, message and rank, or None."""
    try:
        said = read_object(layout.kept / "failure.json", layout.workspace)
    except (FileRefused, OSError):
        return None
    texts = {name: said.get(name) for name in ("step", "error", "message")}
    tried, rank = said.get("try"), said.get("rank")
    sound = all(isinstance(text, str) for text in texts.values())
    if not sound or type(tried) is not int or not (rank is None or type(rank) is int):
        return None
    cut = {name: str(text)[:_LONGEST_MESSAGE] for name, text in texts.items()}
    return {**cut, "try": tried, "rank": rank}


def read_part_of_log(file: BinaryIO, before: int | None, after: int | None) -> dict[str, Any]:
    """A piece of a log, at most 64 KiB, in whole lines where they are shorter than that.

    Args:
        file: the log, which may grow.
        before: where the piece ends, in bytes; by default the log's end.
        after: where it begins instead, to follow the log. Beyond the end: as without.

    Returns:
        ``text``, its ``start`` and ``end`` in the file, and the file's ``size``, in bytes.
    """
    size = os.fstat(file.fileno()).st_size
    if after is not None and 0 <= after <= size:
        start, end = after, min(size, after + _TAIL)
    else:
        end = size if before is None else min(max(0, before), size)
        start = max(0, end - _TAIL)
    file.seek(start)
    piece = file.read(end - start)
    if start > 0 and after is None:
        line = piece.find(b"\n") + 1  # 0 where there is none
        piece = piece[line if line < len(piece) else 0 :]
    start = file.tell() - len(piece)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(piece)
    cut = len(decoder.getstate()[0])  # of a character, whose rest is still to come
    return {"text": text, "start": start, "end": start + len(piece) - cut, "size": size}
