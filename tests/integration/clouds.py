"""Emulators of other clouds' object stores, on free ports. What they hold is lost at the end."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.limits import within

AZURITE = Path(__file__).parents[2] / "build/azurite/node_modules/azurite/dist/src/blob/main.js"
ACCOUNT = "ddlaccount"
# A service of Google's API that is there already: a bucket in it is made, and stays. Google's own
# test bench, which heeds conditions as the emulator on the package index does not, or the real one.
GOOGLE = "DDL_TEST_GCS_ENDPOINT"


def azurite_missing() -> str:
    """Why Azure's emulator cannot run here; empty if it can."""
    if shutil.which("node") and AZURITE.exists():
        return ""
    return "needs Azure's emulator Azurite: install node and npm, then make build/azurite/.fetched"


@contextmanager
def azurite(folder: Path) -> Iterator[tuple[str, str]]:
    """Microsoft's emulator of Blob Storage. Yields the URL of ``ACCOUNT``, and its key."""
    key, port = base64.b64encode(secrets.token_bytes(64)).decode(), _free_port()
    command = ["node", str(AZURITE), "--inMemoryPersistence", "--blobPort", str(port)]
    command += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with _served(command, port, folder, {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}):
        yield f"http://127.0.0.1:{port}/{ACCOUNT}", key


@contextmanager
def google(folder: Path) -> Iterator[str]:
    """An emulator of Cloud Storage, which heeds no conditions. Yields its URL."""
    if given := os.environ.get(GOOGLE):
        yield given
        return
    port = _free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--in-memory"]
    with _served([*command, "--host", "127.0.0.1", "--port", str(port)], port, folder, {}):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _served(
    command: Sequence[str], port: int, folder: Path, environ: Mapping[str, str]
) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with open(log, "wb") as out:
        # It ends with the tests, also where these are killed.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            cwd=folder,
            stdout=out,
            stderr=out,
            env={**os.environ, **environ},
        )
    try:
        _wait_for(port, process, log)
        yield
    finally:
        process.terminate()
        process.wait(within(10))


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + within(30)
    while process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
            return
        except urllib.error.HTTPError:  # it has nothing at that address, and says so
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{process.args} does not answer: {log.read_text('utf-8', 'replace')}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
