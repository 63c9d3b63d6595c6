"""From a browser to a TensorBoard on a socket of this host, and back.

Each way only the headers that are listed go through: no cookie and no authorization to TensorBoard,
none that it may think of to the browser. The page is sandboxed: see
``ddl_airflow.plugin.tensorboard``.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

_ASKED_WITH = ("accept", "accept-encoding", "content-type")
_ANSWERED_WITH = ("content-type", "content-encoding", "content-length")
_MOST_SENT = 2**20
_LIMITS = httpx.Timeout(60.0, connect=5.0)
_SHIM = "in-a-sandbox.js"
# A sandboxed page has no cookies, no storage and no workers, which TensorBoard takes for granted:
# settings last as long as the page then, and it draws in its own thread.
_SANDBOXED = """\
(() => {
  for (const name of ["localStorage", "sessionStorage"]) {
    const kept = new Map();
    const storage = {
      getItem: (key) => kept.get(String(key)) ?? null,
      setItem: (key, value) => void kept.set(String(key), String(value)),
      removeItem: (key) => void kept.delete(String(key)),
      clear: () => kept.clear(),
      key: (index) => [...kept.keys()][index] ?? null,
      get length() { return kept.size; },
    };
    Object.defineProperty(window, name, { value: storage });
  }
  Object.defineProperty(document, "cookie", { value: "" });
  delete window.OffscreenCanvas;
  // Headers of its own, which nobody needs, would have a browser ask before each request.
  const set = XMLHttpRequest.prototype.setRequestHeader;
  XMLHttpRequest.prototype.setRequestHeader = function (name, value) {
    if (!/^x-/i.test(name)) set.call(this, name, value);
  };
})();
"""
# Whatever comes from there, also an image or a script that is opened by itself, is nobody's page:
# no cookies, no storage, no form, no window, no frame around it; it loads what is of this server.
_HEADERS = {
    "Content-Security-Policy": "sandbox allow-scripts allow-downloads; default-src 'none'; "
    "script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self' data:; media-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    # Its address opens it, so no other page is told.
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    # The origin of a sandboxed page. Who knows the address may read what is there.
    "Access-Control-Allow-Origin": "null",
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "content-type",
    "Access-Control-Max-Age": "7200",
}


class Unlogged:
    """An ASGI app whose requests are logged without the keys that are in their paths.

    The api-server's log says what was asked when the answer is there, whatever that is: it reads
    the request's scope, of which the app within has a copy.

    Args:
        app: the app within.
        below: what stands before a key in a path.
    """

    def __init__(self, app: Any, below: str) -> None:
        self._app, self._masked = app, f"{below}/..."
        self._key = re.compile(f"{re.escape(below)}/+[^/]+")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        inner = dict(scope)
        if scope["type"] == "http":
            scope["path"] = self._key.sub(self._masked, scope["path"], count=1)
        await self._app(inner, receive, send)


async def pass_on(request: Request, path: str, socket: Path) -> Response:
    """TensorBoard's answer to a request.

    Args:
        request: the browser's.
        path: what of its path is TensorBoard's, without a slash in front.
        socket: where TensorBoard listens.

    Raises:
        httpx.ConnectError: nobody listens there.
        httpx.HTTPError: it does not answer, or not in time.
    """
    if request.method == "OPTIONS":  # a sandboxed page asks before it sends what forms do not
        return Response(headers=_HEADERS)
    if path == _SHIM:
        return Response(_SANDBOXED, media_type="text/javascript", headers=_HEADERS)
    if int(request.headers.get("content-length", 0)) > _MOST_SENT:
        return refused(413, f"more than {_MOST_SENT:,} bytes")
    if "transfer-encoding" in request.headers:
        return refused(411, "how long is it?")
    try:
        sent = await request.body()
    except ClientDisconnect:
        return refused(400, "nobody waits for an answer")
    query = request.url.query.encode() or None
    # Nothing is encrypted on a Unix socket: no certificates are read for it, which takes a while.
    transport = httpx.AsyncHTTPTransport(uds=str(socket), verify=False)
    client = httpx.AsyncClient(transport=transport, timeout=_LIMITS)
    try:
        asked = client.build_request(
            request.method,
            httpx.URL("http://tensorboard", path=f"/{path}", query=query),
            headers={
                name: request.headers[name] for name in _ASKED_WITH if name in request.headers
            },
            content=sent,
        )
        answer = await client.send(asked, stream=True)
    except BaseException:
        await client.aclose()
        raise

    async def parts() -> AsyncIterator[bytes]:
        try:
            async for part in answer.aiter_raw():
                yield part
        finally:
            await answer.aclose()
            await client.aclose()

    told = {name: answer.headers[name] for name in _ANSWERED_WITH if name in answer.headers}
    if path in ("", "index.html") and "text/html" in told.get("content-type", ""):
        page = b"".join([part async for part in parts()])
        page = page.replace(b"<head>", f'<head><script src="{_SHIM}"></script>'.encode(), 1)
        # What it names from the root of a server that is its own.
        page = page.replace(b"url(/font-roboto/", b"url(font-roboto/")
        return Response(page, answer.status_code, {"content-type": "text/html"} | _HEADERS)
    if answer.is_redirect:  # to its own pages of before, all of which are one by now
        await answer.aclose()
        await client.aclose()
        return Response(status_code=404, headers=_HEADERS)
    return StreamingResponse(parts(), answer.status_code, told | _HEADERS)


def refused(status: int, why: str) -> Response:
    """Words in place of TensorBoard's answer."""
    return Response(f"{why}\n", status, _HEADERS, "text/plain; charset=utf-8")
