"""The plugin's routes: the page, and what it shows of trainings. Nothing is changed by them.

But for one: a TensorBoard is started.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import httpx
from airflow.configuration import conf
from anyio import CapacityLimiter, to_thread
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

from ddl_airflow.airflow_internals import (
    readers_among_dags,
    readers_of_task_logs,
    rights_over_dag,
)
from ddl_airflow.core.errors import DdlError, TensorBoardRefused
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.sections.definition import slug
from ddl_airflow.links import tensorboard
from ddl_airflow.plugin.bounded import Bounded
from ddl_airflow.plugin.curves import read_curves
from ddl_airflow.plugin.graph import Pointers, read_graph
from ddl_airflow.plugin.logs import (
    lines_with,
    part_of_log,
    rank_log,
    ranks_with_logs,
    whole_log,
)
from ddl_airflow.plugin.proxy import Unlogged, pass_on, refused
from ddl_airflow.plugin.sendable import sendable
from ddl_airflow.plugin.tensorboard import TensorBoards, Tokens
from ddl_airflow.plugin.training import (
    facts,
    read_checkpoints,
    read_communication,
    read_failure,
    read_jobs,
    read_measurements,
    read_pace,
    read_record,
    read_starts,
    read_state,
)
from ddl_airflow.plugin.trainings import Line, Trainings
from ddl_airflow.plugin.unchanged import Unchanged
from ddl_airflow.site import training_of, workspace

# What `make ui` makes of ui/.
_BUILT = Path(__file__).with_name("built")
_HEADERS = {
    # Its own scripts and styles, no others, and to nobody but where it came from.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    # A browser asks each time whether it has changed: an upgrade is seen at once.
    "Cache-Control": "no-cache",
}
_LONGEST_SEARCH = 200
# That are remembered: of the files of a model each may have 200 KB.
_MOST_LINEAGES = 200
# Of the list, for all folders that models are published in.
_PATIENCE_S = 0.5
_PRODUCTION = {
    said: b',"production":' + json.dumps(said).encode() + b"}" for said in (None, False, True)
}
# All trainings are in so many parts, each with a tag of so many characters: a page says the tags
# that it has, and is sent the other parts. In a header, for addresses are in the server's log.
_PARTS = 256
_TAG = 8
_KNOWN = "DDL-Known-Parts"
_TENSORBOARD = "tensorboard"
_STARTING = 4
_TOO_OLD = "This address is too old. Open TensorBoard from the training."
_FOREIGN = (
    "This address is not whole, or of an api-server with another [api] secret_key. Open "
    "TensorBoard from the training; if that does not help, set the key, the same for all of them."
)


def app() -> FastAPI:
    """The app. Who may read a DAG's task logs may see its trainings; others see nothing of them."""
    api = FastAPI(title="DDL training", docs_url=None, redoc_url=None, openapi_url=None)
    page = (_BUILT / "index.html").read_text("utf-8")
    listed, pointers, boards = Trainings(), Pointers(), cache(_tensorboards)
    files, lineages = Unchanged(), Unchanged(_MOST_LINEAGES)
    # In threads of their own: they look into the workspace, which may hang.
    starting = CapacityLimiter(_STARTING)
    # The key may come of a command or a secrets backend: it is asked once, for whoever waits.
    tokens, asking = cache(_tokens), CapacityLimiter(1)
    api.state.tensorboards = boards
    may_read = Depends(readers_of_task_logs())
    among = Depends(readers_among_dags())
    rights = Depends(rights_over_dag())

    @api.get("/training", response_class=HTMLResponse)
    def training() -> str:
        return page

    api.mount("/assets", StaticFiles(directory=_BUILT / "assets"), "assets")

    api.add_middleware(Bounded)
    api.add_middleware(Unlogged, below=f"/{_TENSORBOARD}")

    @api.middleware("http")
    async def with_headers(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response = await call_next(request)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    @api.exception_handler(DdlError)
    @api.exception_handler(OSError)
    def unread(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 503)

    @api.get("/trainings")
    def trainings(
        request: Request, dag_id: str = "", may: Callable[[Iterable[str]], set[str]] = among
    ) -> Response:
        place = workspace()
        lines, left_out = listed.read(place, may, dag_id)
        # Most lines are as they were when somebody asked before: of none the JSON is made again.
        parts, known = _parts(lines, _ends(lines, pointers)), request.headers.get(_KNOWN, "")
        news = [
            (number, tag, of)
            for number, (tag, of) in enumerate(parts)
            if tag != known[number * _TAG : (number + 1) * _TAG]
        ]
        whole = b",".join(line.json[:-1] + end for *_, of in news for line, end in of)
        rest = {
            "parts": [[number, tag, len(of)] for number, tag, of in news],
            "left_out": left_out,
            "no_workspace": _lacking(place),
        }
        told = b'{"trainings":[' + whole + b"]," + json.dumps(rest).encode()[1:]
        return Response(told, media_type="application/json")

    @api.get("/rights/{dag_id}")
    def rights_over(said: dict[str, bool] = rights) -> dict[str, bool]:
        return said

    @api.get("/curves/{dag_id}/{run_id:path}", dependencies=[may_read])
    def curves(dag_id: str, run_id: str, cursor: str = "", points: int = 800) -> JSONResponse:
        layout = _layout(dag_id, run_id)
        return _answer(
            read_curves(
                layout.progress,
                layout.workspace,
                cursor=cursor,
                started=read_starts(layout, files),
                points=points,
            )
        )

    @api.get("/about/{dag_id}/{run_id:path}", dependencies=[may_read])
    def about(dag_id: str, run_id: str) -> JSONResponse:
        layout = _layout(dag_id, run_id)
        record = read_record(layout, lineages)
        return _answer(
            {
                "training_id": layout.training_id,
                "no_workspace": _lacking(layout.workspace),
                **read_state(layout, record),
                "pace": read_pace(layout),
                "failure": read_failure(layout),
                "jobs": read_jobs(layout, files),
                "communication": read_communication(layout, files),
                "checkpoints": read_checkpoints(layout, record),
                "measurements": read_measurements(layout, record, lineages),
                "facts": facts(record),
                "logs": ranks_with_logs(layout.logs),
                "tensorboard": tensorboard(),
                "tensorboards": conf.get("ddl", "tensorboards", fallback="4").strip() != "0",
            }
        )

    # A request that changes something: no page of others can have a browser send it with cookies.
    @api.post("/tensorboard-of/{dag_id}/{run_id:path}", dependencies=[may_read])
    def start_tensorboard(dag_id: str, run_id: str) -> dict[str, str]:
        layout = _layout(dag_id, run_id)
        try:
            token = tokens().make(dag_id, layout.training_id)
            boards().start(layout)
        except TensorBoardRefused as error:
            raise HTTPException(503, str(error)) from None
        return {"path": f"{_TENSORBOARD}/{token}/"}

    @api.api_route(f"/{_TENSORBOARD}/{{token}}/{{path:path}}", methods=["GET", "POST", "OPTIONS"])
    async def through(token: str, path: str, request: Request) -> Response:
        try:
            ours = await to_thread.run_sync(tokens, limiter=asking)
            of = ours.read(token)
            if of is None:
                return refused(403, _TOO_OLD if ours.signed(token) else _FOREIGN)
            layout = RunLayout(workspace(), *of)
            try:
                return await pass_on(request, path, boards().socket(layout))
            except httpx.ConnectError:  # it has ended meanwhile, or runs on another host
                socket = await to_thread.run_sync(boards().start, layout, limiter=starting)
                return await pass_on(request, path, socket)
        except TensorBoardRefused as error:
            return refused(503, str(error))
        except httpx.HTTPError as error:
            return refused(502, f"TensorBoard does not answer: {type(error).__name__}")

    @api.get("/graph/{dag_id}/{run_id:path}", dependencies=[may_read])
    def graph(dag_id: str, run_id: str, fresh: bool = False) -> JSONResponse:
        if fresh:
            pointers.forget(dag_id)
        return _answer(read_graph(_layout(dag_id, run_id), pointers, lineages))

    def opened(rank: int, dag_id: str, run_id: str) -> BinaryIO:
        layout = _layout(dag_id, run_id)
        log = rank_log(layout.logs, layout.workspace, rank)
        if log is None:
            raise HTTPException(404, f"rank {rank} has no log")
        return log

    @api.get("/log/{rank}/{dag_id}/{run_id:path}", dependencies=[may_read])
    def log(rank: int, dag_id: str, run_id: str) -> StreamingResponse:
        pieces = whole_log(opened(rank, dag_id, run_id))
        return StreamingResponse(pieces, media_type="text/plain; charset=utf-8")

    @api.get("/log-part/{rank}/{dag_id}/{run_id:path}", dependencies=[may_read])
    def log_part(
        rank: int, dag_id: str, run_id: str, before: int | None = None, after: int | None = None
    ) -> dict[str, Any]:
        with opened(rank, dag_id, run_id) as file:
            return part_of_log(file, before, after)

    @api.get("/log-lines/{rank}/{dag_id}/{run_id:path}", dependencies=[may_read])
    def log_lines(rank: int, dag_id: str, run_id: str, words: str) -> dict[str, Any]:
        if not 0 < len(words) <= _LONGEST_SEARCH:
            raise HTTPException(400, f"words: 1 to {_LONGEST_SEARCH} characters")
        with opened(rank, dag_id, run_id) as file:
            return lines_with(file, words)

    return api


def _tensorboards() -> TensorBoards:
    idle_min = conf.getfloat("ddl", "tensorboard_idle_minutes", fallback=15.0)
    most = conf.getint("ddl", "tensorboards", fallback=4)
    made = TensorBoards(workspace(), idle_s=60 * idle_min, most=most)
    atexit.register(made.close)
    return made


def _tokens() -> Tokens:
    try:
        key = conf.get("api", "secret_key", fallback="")
        # In place of one that is not set Airflow makes one up, another one in each process.
        if key == conf.get_default_value("api", "secret_key"):
            key = conf.get("api_auth", "jwt_secret", fallback="")
    except Exception as error:
        # A secrets backend may raise what it likes; its words, or a command's, may have the key.
        raise TensorBoardRefused(
            f"[api] secret_key cannot be read: {type(error).__name__}. See on the api-server's "
            "host what `airflow config get-value api secret_key` says."
        ) from None
    return Tokens(key)


def _answer(said: Mapping[str, Any]) -> JSONResponse:
    # As it is: FastAPI would go through all of it once more.
    return JSONResponse(sendable(said))


def _lacking(place: Path) -> str:
    """Why there is nothing to see; empty if there is a workspace."""
    if place.is_dir():
        return ""
    return (
        f"The workspace {place} is not there on the api-server's host, so nothing of trainings is "
        "shown. Mount it there, or mend [ddl] workspace; of a new site the first training makes it."
    )


def _layout(dag_id: str, run_id: str) -> RunLayout:
    if slug(dag_id) != dag_id:
        raise HTTPException(404, f"{dag_id!r} is no DAG of a manifest")
    return RunLayout(workspace(), dag_id, training_of(dag_id, run_id, make=False))


def _parts(lines: list[Line], ends: list[bytes]) -> list[tuple[str, list[tuple[Line, bytes]]]]:
    """Tag and lines, with how their JSON ends, of each part: a training stays in its part."""
    parts: list[list[tuple[Line, bytes]]] = [[] for _ in range(_PARTS)]
    for line, end in zip(lines, ends, strict=True):
        parts[crc32(line["training_id"].encode()) % _PARTS].append((line, end))
    told = []
    for of in parts:
        digest = hashlib.sha256(b"".join(line.digest + end for line, end in of))
        told.append((digest.hexdigest()[:_TAG], of))
    return told


def _ends(lines: list[Line], pointers: Pointers) -> list[bytes]:
    """How the JSON of each ends: with whether it is in ``production``; null: nobody knows."""
    results: dict[str, Any] = {}
    for line in lines:  # the newest first: where its DAG publishes now
        if line["results"]:
            results.setdefault(line["dag_id"], line["results"])
    for dag_id, place in results.items():  # all at once
        pointers.read(place, dag_id, patience_s=0.0)
    told, until = {}, time.monotonic() + _PATIENCE_S
    for dag_id, place in results.items():
        # The list does not wait for stores: the next answer has what they say.
        patience_s = 0.0 if "conn_id" in place else max(0.0, until - time.monotonic())
        told[dag_id] = pointers.read(place, dag_id, patience_s=patience_s)
    ends = []
    for line in lines:
        known = told.get(line["dag_id"], {"unknown": ""})
        serving = known.get("production")
        published = line["publication"]
        names = bool(published and serving and published.endswith(f"/{serving['publication']}"))
        production = None if published and "unknown" in known else names
        ends.append(_PRODUCTION[production])
    return ends
