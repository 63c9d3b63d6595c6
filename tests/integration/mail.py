"""A mail server on a free port of this machine: takes every mail, delivers none, shows all."""

from __future__ import annotations

import email.policy
import socketserver
import threading
import time
from email.message import EmailMessage
from types import TracebackType
from typing import cast

from tests.limits import within


class Mailbox:
    """Runs while its context lasts. Speaks as much SMTP as a sender needs (RFC 5321)."""

    def __init__(self) -> None:
        self._mails: list[EmailMessage] = []
        mails = self._mails

        class Session(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self._say(220)
                for line in self.rfile:
                    word = line[:4].upper()
                    if word == b"DATA":
                        self._say(354)
                        mails.append(self._mail())
                    self._say(221 if word == b"QUIT" else 250)
                    if word == b"QUIT":
                        return

            def _say(self, code: int) -> None:
                self.wfile.write(b"%d ok\r\n" % code)

            def _mail(self) -> EmailMessage:
                text = b""
                for line in self.rfile:
                    if line == b".\r\n":
                        break
                    text += line.removeprefix(b".") if line.startswith(b"..") else line
                parsed = email.message_from_bytes(text, policy=email.policy.default)
                return cast(EmailMessage, parsed)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def __enter__(self) -> Mailbox:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def about(self, word: str, limit_s: float = 30) -> list[EmailMessage]:
        """The mails with the word in their subject, as soon as there is one."""
        deadline = time.monotonic() + within(limit_s)
        while not (found := [mail for mail in self._mails if word in mail["Subject"]]):
            assert time.monotonic() < deadline, [mail["Subject"] for mail in self._mails]
            time.sleep(0.1)
        return found


def body(mail: EmailMessage) -> str:
    """A mail's text, without its outer headers."""
    part = mail.get_body(("html", "plain"))
    assert part is not None
    return cast(str, part.get_content())
