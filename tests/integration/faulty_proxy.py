"""An HTTP proxy before a real service, which puts a fault at the requests that a test names."""

from __future__ import annotations

import http.client
import io
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_BLOCK = 256 * 1024
_WAIT_S = 60
# What must not be passed on: it is of the connection, not of the message.
_OWN = {"connection", "keep-alive", "transfer-encoding", "expect"}
_SAID = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>by a test</Message></Error>"

_CODES = {
    "301": (301, b"PermanentRedirect"),
    "400": (400, b"InvalidRequest"),
    "403": (403, b"AccessDenied"),
    "500": (500, b"InternalError"),
    "501": (501, b"NotImplemented"),
    "503": (503, b"SlowDown"),
    "expired": (400, b"ExpiredToken"),
    "location": (400, b"IllegalLocationConstraintException"),
    "region": (400, b"AuthorizationQueryParametersError"),
    "request timeout": (400, b"RequestTimeout"),
    "skewed": (403, b"RequestTimeTooSkewed"),
}


class Asked(NamedTuple):
    """A request: its method, the path in plain text, the range in bytes, and what came of it.

    ``sent``: bytes of the body that were passed on to the client. ``query``: of the URL, as it is.
    ``took``: bytes of a body that came from the client. ``source``: of a copy, in plain text.
    ``headers``: that the client sent, in lower case.
    """

    method: str
    path: str
    range: str
    sent: int
    query: str
    took: int
    source: str
    headers: Mapping[str, str]


def _has_its_crc(near: BaseHTTPRequestHandler, body: bytes) -> bool:
    from botocore.httpchecksum import CrtCrc64NvmeChecksum

    said = near.headers.get("x-amz-checksum-crc64nvme")
    return near.command != "PUT" or said in (None, CrtCrc64NvmeChecksum().handle(body))


class FaultyProxy:
    """Passes requests to ``endpoint_url``; those that are counted may get a fault.

    Args:
        endpoint_url: of the service.
        faults: number of the request, from 0 -> fault: "301", "400", "403", "500", "501", "503",
            "expired", "location", "region", "request timeout", "skewed", "reset" (in the middle of
            the body),
            "cut" (the same, in an orderly way), "half" (of the body, answered as if it were all),
            "changed" (one byte of it), "error as success" (a body of XML), "whole" (the range is
            ignored), or "stall 3" (seconds, or until the client goes; in the middle). Of what the
            client sends: "sent reset", "sent cut" and "sent stall 3" (in the middle of the body,
            nothing is passed on), "sent changed" (one byte). Of what was passed on and done: "done
            500", "done reset", "done cut" (in the head of the answer), "done stall 3" (before it).
            The key None is for all others. See ``placed``: what has no body gets no fault in the
            middle of it.
        counted: whether a request counts, by method and path; what does not gets no fault.
        bytes_per_s: of each body; None: as fast as it goes.
        tls: with what clients are answered by https.
        signed_urls: the fault of all requests that count and are signed in their URL.
        with_header: header -> the fault of all requests that count and have it.
        compares: whether bodies that do not have their CRC64NVME are refused, as by Amazon.
    """

    def __init__(
        self,
        endpoint_url: str,
        faults: Mapping[int | None, str],
        counted: Callable[[str, str], bool] = lambda method, path: method == "GET",
        bytes_per_s: float | None = None,
        tls: ssl.SSLContext | None = None,
        signed_urls: str = "",
        with_header: Mapping[str, str] = MappingProxyType({}),
        compares: bool = False,
    ) -> None:
        self._ended: list[Asked] = []
        self._target = urlsplit(endpoint_url)
        self._faults, self._counted, self._bytes_per_s = faults, counted, bytes_per_s
        self._tls, self._signed_urls, self._with_header = tls, signed_urls, with_header
        self._compares = compares
        self._changed = threading.Condition()
        self._number = self._placed = 0
        self._open = 0  # requests that count and have not ended

    def __enter__(self) -> FaultyProxy:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:  # the client has gone
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                proxy._answer(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 100

        self._server = Server(("127.0.0.1", 0), Handler)
        # Of its connections, too: else the kernel takes tens of MB that nobody reads.
        self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_port}"
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            self.endpoint_url = self.endpoint_url.replace("http", "https")
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait(self) -> None:
        """Until no request that counts is open: a client has its answer before one has ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open, _WAIT_S):
                raise TimeoutError(f"{self._open} request(s) have not ended in {_WAIT_S} s")

    @property
    def asked(self) -> Sequence[Asked]:
        """The requests that count, as they ended; none is open."""
        self.wait()
        return tuple(self._ended)

    @property
    def placed(self) -> int:
        """How many requests had their fault; none is open."""
        self.wait()
        return self._placed

    def begin(self, faults: Mapping[int | None, str]) -> None:
        """Counts from 0 again, with other faults, when no request is open."""
        self.wait()
        with self._changed:
            self._faults, self._number, self._placed = faults, 0, 0
            self._ended.clear()

    def _answer(self, near: BaseHTTPRequestHandler) -> None:
        url = urlsplit(near.path)
        path = unquote(url.path)
        fault, sent, body, asked_range = "", 0, b"", near.headers.get("Range", "")
        counts = self._counted(near.command, path)
        if counts:
            with self._changed:
                fault = self._faults.get(self._number, self._faults.get(None, ""))
                self._number += 1
                self._open += 1
            if self._signed_urls and "X-Amz-Signature=" in url.query:
                fault = self._signed_urls
            for name, of_header in self._with_header.items():
                fault = of_header if name in near.headers else fault
        try:
            body = self._body(near, fault)
            if (
                fault in _CODES
                or fault == "error as success"
                or (fault.startswith(("sent ", "done ")) and (fault != "sent changed" or body))
                or (fault == "whole" and asked_range)
            ):
                self._note_placed()
            if fault in _CODES:
                status, code = _CODES[fault]
                self._say(near, status, _SAID % code)
            elif self._compares and not _has_its_crc(near, body):
                self._say(near, 400, _SAID % b"BadDigest")
            elif fault == "error as success":
                self._say(near, 200, _SAID % b"InternalError")
            elif fault.startswith("sent ") and fault != "sent changed":
                self._break(near, fault.removeprefix("sent "))
            elif fault.startswith("done "):
                self._do(near, body, fault.removeprefix("done "))
            else:
                for now in self._pass(near, body, fault):
                    sent = now
        finally:
            if counts:
                source = unquote(near.headers.get("x-amz-copy-source", ""))
                one = Asked(
                    *(near.command, path, asked_range, sent, url.query, len(body), source),
                    {name.lower(): value for name, value in near.headers.items()},
                )
                with self._changed:
                    self._ended.append(one)
                    self._open -= 1
                    self._changed.notify_all()

    def _body(self, near: BaseHTTPRequestHandler, fault: str) -> bytes:
        """What the client sends, as far as the fault lets it."""
        length = int(near.headers.get("Content-Length", 0))
        if fault.startswith("sent ") and fault != "sent changed":
            length //= 2
        body, began = bytearray(), time.monotonic()
        while block := near.rfile.read(min(_BLOCK, length - len(body))):
            body += block
            self._slow_down(began, len(body))
        if len(body) < length:
            raise ConnectionError("the client has gone")
        if fault == "sent changed" and body:
            body[length // 2] ^= 1
        return bytes(body)

    def _note_placed(self) -> None:
        with self._changed:
            self._placed += 1

    @staticmethod
    def _stall(near: BaseHTTPRequestHandler, how: str) -> None:
        gone = select.poll()
        gone.register(near.connection, select.POLLRDHUP)  # said though there is more to read
        gone.poll(1000 * float(how.split()[1]))

    def _break(self, near: BaseHTTPRequestHandler, how: str) -> None:
        near.close_connection = True
        if how.startswith("stall"):
            self._stall(near, how)
        elif how == "reset":
            linger = struct.pack("ii", 1, 0)  # so that it is a reset, and no end
            near.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def _do(self, near: BaseHTTPRequestHandler, body: bytes, fault: str) -> None:
        """Has the service do it; the client hears of that late, wrongly, half or not."""
        with closing(self._far()) as far:
            answer = self._asked(near, far, body)
            said = answer.read()
        if fault == "500":
            status, code = _CODES[fault]
            self._say(near, status, _SAID % code)
        elif fault.startswith("stall"):
            self._stall(near, fault)
            near.send_response_only(answer.status)
            near.send_header("ETag", answer.headers.get("ETag", ""))
            near.send_header("Content-Length", str(len(said)))
            near.end_headers()
            near.wfile.write(said)
        else:
            if fault == "cut":
                near.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETa")
                near.wfile.flush()
            self._break(near, fault)

    @staticmethod
    def _say(near: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        near.send_response_only(status)
        near.send_header("Content-Type", "application/xml")
        near.send_header("Content-Length", str(len(body)))
        near.end_headers()
        if near.command != "HEAD":
            near.wfile.write(body)

    def _pass(self, near: BaseHTTPRequestHandler, body: bytes, fault: str) -> Iterator[int]:
        """Passes on request and answer; yields how many bytes of that were sent."""
        with closing(self._far()) as far:
            yield from self._exchanged(near, far, body, fault)

    def _far(self) -> http.client.HTTPConnection:
        assert self._target.hostname is not None
        return http.client.HTTPConnection(self._target.hostname, self._target.port)

    @staticmethod
    def _asked(
        near: BaseHTTPRequestHandler,
        far: http.client.HTTPConnection,
        body: bytes,
        leave_out: str = "",
    ) -> http.client.HTTPResponse:
        far.putrequest(near.command, near.path, skip_host=True, skip_accept_encoding=True)
        # What is signed must go on: s5cmd signs Expect, too, when it sends once more.
        signed = near.headers.get("Authorization", "").partition("SignedHeaders=")[2]
        own = _OWN - {*signed.partition(",")[0].split(";")}
        for name, value in near.headers.items():
            if name.lower() not in {*own, leave_out}:
                far.putheader(name, value)
        far.endheaders(body or None)
        return far.getresponse()

    def _exchanged(
        self,
        near: BaseHTTPRequestHandler,
        far: http.client.HTTPConnection,
        body: bytes,
        fault: str,
    ) -> Iterator[int]:
        answer = self._asked(near, far, body, "range" if fault == "whole" else "")
        chunked = "Content-Length" not in answer.headers and near.command != "HEAD"
        whole = answer.read() if chunked else b""
        wanted = len(whole) if chunked else int(answer.headers.get("Content-Length", 0))
        middle = wanted // 2
        near.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in {*_OWN, "content-length"}:
                near.send_header(name, value)
        near.send_header("Content-Length", str(middle if fault == "half" else wanted))
        near.end_headers()
        reader = io.BytesIO(whole) if chunked else answer
        sent, began = 0, time.monotonic()
        while near.command != "HEAD" and (block := reader.read(_BLOCK)):
            halts = fault and fault not in ("whole", "sent changed")
            faulty = halts and sent <= middle < sent + len(block)
            if faulty:
                self._note_placed()
            if faulty and fault == "changed":
                at = middle - sent
                block = block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :]
            elif faulty:
                block = block[: middle - sent]
            near.wfile.write(block)
            sent += len(block)
            yield sent
            if faulty and fault != "changed":
                near.wfile.flush()
                self._break(near, fault)
                break
            self._slow_down(began, sent)

    def _slow_down(self, began: float, nbytes: int) -> None:
        if self._bytes_per_s:
            time.sleep(max(0.0, began + nbytes / self._bytes_per_s - time.monotonic()))
