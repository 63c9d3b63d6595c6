"""The plugin's routes: a page, the progress that it draws, and the logs of ranks. Read-only."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import requires_access_dag
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.sections.definition import slug
from ddl_airflow.core.progress import read_line
from ddl_airflow.links import tensorboard
from ddl_airflow.site import training_of, workspace

_PAGE = Path(__file__).with_name("training.html")
_MOST_BYTES = 1024 * 1024
_PIECE = 64 * 1024
_LARGEST = 2**62  # place in a file


def app() -> FastAPI:
    """The app. A user who may read the run's task logs may read its progress and rank logs."""
    api = FastAPI(title="DDL training", docs_url=None, redoc_url=None, openapi_url=None)
    page = _PAGE.read_text("utf-8")
    headers = {"Content-Security-Policy": _policy(page), "X-Content-Type-Options": "nosniff"}
    may_read = Depends(requires_access_dag("GET", DagAccessEntity.TASK_LOGS))

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
        return read_progress(layout.progress, layout.workspace, min(max(0, offset), _LARGEST)) | {
            "tensorboard": tensorboard(),
            "ranks": ranks_with_logs(layout.logs),
        }

    @api.get("/log/{rank}/{dag_id}/{run_id:path}", dependencies=[may_read])
    def log(rank: int, dag_id: str, run_id: str) -> StreamingResponse:
        layout = _layout(dag_id, run_id)
        log = rank_log(layout.logs, layout.workspace, rank)
        if log is None:
            raise HTTPException(404, f"rank {rank} has no log")
        return StreamingResponse(_pieces(log), media_type="text/plain; charset=utf-8")

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
        ``lines`` (objects) and ``offset`` (bytes), to ask again from.
    """
    try:
        opened = open_beneath(path, root)
    except (FileNotFoundError, FileRefused):
        return {"lines": [], "offset": 0}
    with open(opened, "rb") as file:
        file.seek(offset)
        new = file.read(_MOST_BYTES)
    whole = new.rfind(b"\n") + 1
    if not whole and len(new) == _MOST_BYTES:
        whole = len(new)  # a line that is longer is none, and must not stand in the others' way
    lines = [read_line(line) for line in new[:whole].split(b"\n")]
    return {"lines": [line for line in lines if line], "offset": offset + whole}
