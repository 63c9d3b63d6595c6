"""The plugin's routes: a page, the progress that it draws, and the logs of ranks. Read-only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import requires_access_dag
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import FileResponse, HTMLResponse

from ddl_airflow.core.layout import RunLayout, training_id
from ddl_airflow.core.manifest.sections.definition import slug
from ddl_airflow.links import tensorboard
from ddl_airflow.operators.base import workspace

_PAGE = Path(__file__).with_name("training.html")
_MOST_BYTES = 1024 * 1024


def app() -> FastAPI:
    """The app. A user who may read the run's task logs may read its progress and rank logs."""
    api = FastAPI(title="DDL training", docs_url=None, redoc_url=None)
    may_read = Depends(requires_access_dag("GET", DagAccessEntity.TASK_LOGS))

    @api.get("/training", response_class=HTMLResponse)
    def training() -> str:
        return _PAGE.read_text("utf-8")

    @api.get("/progress/{dag_id}/{run_id:path}", dependencies=[may_read])
    def progress(dag_id: str, run_id: str, offset: int = 0) -> dict[str, Any]:
        layout = _layout(dag_id, run_id)
        return read_progress(layout.progress, max(0, offset)) | {
            "tensorboard": tensorboard(),
            "ranks": ranks_with_logs(layout.logs),
        }

    @api.get("/log/{rank}/{dag_id}/{run_id:path}", dependencies=[may_read])
    def log(rank: int, dag_id: str, run_id: str) -> FileResponse:
        path = rank_log(_layout(dag_id, run_id).logs, rank)
        if path is None:
            raise HTTPException(404, f"rank {rank} has no log")
        return FileResponse(path, media_type="text/plain; charset=utf-8")

    return api


def _layout(dag_id: str, run_id: str) -> RunLayout:
    if slug(dag_id) != dag_id:
        raise HTTPException(404, f"{dag_id!r} is no DAG of a manifest")
    return RunLayout(workspace(), dag_id, training_id(dag_id, run_id))


def rank_log(folder: Path, rank: int) -> Path | None:
    """The rank's log; None if there is none, or a link to what is not the script's to show."""
    path = folder / f"rank-{rank}.log"
    if folder.is_symlink() or path.is_symlink() or not path.is_file():
        return None
    return path


def ranks_with_logs(folder: Path) -> list[int]:
    """Ranks whose log is in the folder, in order."""
    return sorted(
        int(path.stem[5:]) for path in folder.glob("rank-*.log") if path.stem[5:].isdigit()
    )


def read_progress(path: Path, offset: int) -> dict[str, Any]:
    """Whole lines from an offset on, at most 1 MiB of them. What is no JSON object is left out.

    Returns:
        ``lines`` (objects) and ``offset`` (bytes), to ask again from.
    """
    if not path.exists():
        return {"lines": [], "offset": 0}
    with path.open("rb") as file:
        file.seek(offset)
        new = file.read(_MOST_BYTES)
    whole = new.rfind(b"\n") + 1
    lines = [_object(line) for line in new[:whole].splitlines()]
    return {"lines": [line for line in lines if line], "offset": offset + whole}


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line, parse_constant=lambda _word: None)  # NaN is no JSON
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
