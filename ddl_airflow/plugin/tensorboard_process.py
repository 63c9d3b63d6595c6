"""`python -m ddl_airflow.plugin.tensorboard_process`: TensorBoard over one training, on a socket.

The api-server starts it, and says on a line of standard input, as JSON, what it is to serve. It
listens on a Unix socket alone, in a folder that no other user may enter: a port, also one of the
loopback address, would be open to all users of the host. It ends

- when its standard input ends: whoever started it is no more, however that came about;
- when nobody has asked it anything for a while;
- when its socket is removed, by which others end it.

Event files were written by ranks, so they are untrusted: no link is followed, the plugins that come
with TensorBoard are all there are, and what one process may take is limited.
"""

from __future__ import annotations

import json
import os
import resource
import select
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddl_airflow.core.beneath import check_folder, open_beneath
from ddl_airflow.core.errors import FileRefused

TOP = "/training"
_LOOK_S = 0.5
_MOST_MEMORY = 4 * 2**30
_MOST_READ = 64 * 2**20
_MOST_LOG = 2**20
_NICE = 10


@dataclass(frozen=True)
class Served:
    """What one process serves.

    Attributes:
        root: the workspace, beneath which no link is followed.
        folders: where event files may lie, by the name under which runs in them are shown.
        socket: where it listens.
        idle_s: after how many seconds without a request it ends.
    """

    root: Path
    folders: dict[str, Path]
    socket: Path
    idle_s: float

    def dump(self) -> str:
        """As a line of JSON."""
        folders = {name: str(folder) for name, folder in self.folders.items()}
        said = {"root": str(self.root), "folders": folders, "socket": str(self.socket)}
        return json.dumps(said | {"idle_s": self.idle_s}) + "\n"

    @classmethod
    def load(cls, line: str) -> Served:
        """The reverse."""
        said = json.loads(line)
        folders = {name: Path(folder) for name, folder in said["folders"].items()}
        return cls(Path(said["root"]), folders, Path(said["socket"]), said["idle_s"])


class Watched:
    """A WSGI application that notes when it was asked last, also as the time of the socket file.

    By that time whoever needs room finds the one that nobody has used for longest.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], socket: Path) -> None:
        self._app, self._socket = app, socket
        self.last = time.monotonic()

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        self.last = time.monotonic()
        with suppress(FileNotFoundError):  # it is ending
            os.utime(self._socket)
        return self._app(environ, start_response)


class OneTraining:
    """The file system that TensorBoard reads: folders of one training, and no link in them.

    They are all below a folder that is there for TensorBoard alone, so that its page tells nobody
    where they are, whatever they are called.

    It has the methods of ``tensorboard.compat.tensorflow_stub.io.gfile.LocalFileSystem`` that
    reading takes.
    """

    def __init__(self, served: Served) -> None:
        self._root, self._folders = served.root, served.folders

    def _real(self, path: str | bytes) -> Path:
        """Where something is that TensorBoard knows as `/training/<folder>/...`."""
        path = os.fsdecode(path)
        top, _, rest = path.removeprefix(f"{TOP}/").partition("/")
        if not path.startswith(f"{TOP}/") or top not in self._folders or ".." in rest.split("/"):
            raise FileRefused(f"{path} is not of this training")
        return self._folders[top] / rest.lstrip("/")

    def join(self, path: str, *paths: str) -> str:
        """As ``os.path.join``."""
        return os.path.join(path, *paths)

    def exists(self, path: str | bytes) -> bool:
        """Whether it is a file or a folder that may be read."""
        return self.isdir(path) or self._size(path) is not None

    def isdir(self, path: str | bytes) -> bool:
        """Whether it is a folder, and no link."""
        if _is_top(path):
            return True
        try:
            check_folder(self._real(path), self._root)
        except (FileRefused, OSError):
            return False
        return True

    def listdir(self, path: str | bytes) -> list[str]:
        """The names in a folder, without links."""
        if _is_top(path):
            return list(self._folders)
        if not self.isdir(path):
            return []
        with os.scandir(self._real(path)) as entries:
            return [entry.name for entry in entries if not entry.is_symlink()]

    def glob(self, pattern: str) -> list[str]:
        """Nothing: folders are walked."""
        return []

    def stat(self, path: str | bytes) -> Any:
        """Its ``length``, in bytes."""
        size = self._size(path)
        if size is None:
            raise _not_found(path)
        return types.SimpleNamespace(length=size)

    def read(
        self,
        path: str | bytes,
        binary_mode: bool = False,
        size: int | None = None,
        continue_from: dict[str, int] | None = None,
    ) -> tuple[bytes | str, dict[str, int]]:
        """Part of a file, from where the last part ended, and where this one ends."""
        at = (continue_from or {}).get("opaque_offset", 0)
        try:
            with open(open_beneath(self._real(path), self._root), "rb") as file:
                # A record says itself how long it is, and may say anything.
                left = max(0, os.fstat(file.fileno()).st_size - at)
                file.seek(at)
                part = file.read(min(left, _MOST_READ, left if size is None else size))
        except (FileRefused, OSError):
            raise _not_found(path) from None
        said = part if binary_mode else part.decode("utf-8", "replace")
        return said, {"opaque_offset": at + len(part)}

    def _size(self, path: str | bytes) -> int | None:
        try:
            opened = open_beneath(self._real(path), self._root)
        except (FileRefused, OSError):
            return None
        try:
            return os.fstat(opened).st_size
        finally:
            os.close(opened)


def _is_top(path: str | bytes) -> bool:
    return os.fsdecode(path).rstrip("/") == TOP


def _not_found(path: str | bytes) -> Exception:
    from tensorboard.compat.tensorflow_stub import errors

    error: Exception = errors.NotFoundError(
        None, None, f"{os.fsdecode(path)} is no file that may be read"
    )
    return error


class _OnSocket:
    """A server as ``tensorboard.program`` wants one, on a Unix socket."""

    watched: Watched
    socket: Path

    def __init__(self, app: Callable[..., Iterable[bytes]], flags: Any) -> None:
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            # The api-server says in its own log what was asked.
            def log(self, type: str, message: str, *args: Any) -> None:
                if type == "error":
                    super().log(type, message, *args)

        type(self).watched = Watched(app, self.socket)
        self._server = make_server(
            f"unix://{self.socket}", 0, self.watched, threaded=True, request_handler=Quiet
        )

    def serve_forever(self) -> None:
        self._server.serve_forever()

    def get_url(self) -> str:
        return f"unix://{self.socket}"


def serve(served: Served) -> Watched:
    """Serves in a thread of its own.

    Returns:
        What notes the requests.
    """
    # TensorFlow may be installed here: it would take seconds and memory, and read in C++, without
    # regard to links, what ranks wrote. By this name TensorBoard is told to do without.
    sys.modules["tensorboard.compat.notf"] = types.ModuleType("tensorboard.compat.notf")
    from tensorboard import program
    from tensorboard.compat.tensorflow_stub.io import gfile
    from tensorboard.plugins.audio.audio_plugin import AudioPlugin
    from tensorboard.plugins.core.core_plugin import CorePluginLoader
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
    from tensorboard.plugins.distribution.distributions_plugin import DistributionsPlugin
    from tensorboard.plugins.graph.graphs_plugin import GraphsPlugin
    from tensorboard.plugins.histogram.histograms_plugin import HistogramsPlugin
    from tensorboard.plugins.hparams.hparams_plugin import HParamsPlugin
    from tensorboard.plugins.image.images_plugin import ImagesPlugin
    from tensorboard.plugins.metrics.metrics_plugin import MetricsPlugin
    from tensorboard.plugins.pr_curve.pr_curves_plugin import PrCurvesPlugin
    from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin
    from tensorboard.plugins.text.text_plugin import TextPlugin

    gfile.register_filesystem("", OneTraining(served))
    # Those that show what event files hold. Not: what is installed beside it (dynamic plugins),
    # what reads other files (projector, debugger), and what only says where it has gone.
    plugins = [
        CorePluginLoader(include_debug_info=False),
        *(MetricsPlugin, ScalarsPlugin, CustomScalarsPlugin, ImagesPlugin, AudioPlugin),
        *(GraphsPlugin, DistributionsPlugin, HistogramsPlugin, TextPlugin, PrCurvesPlugin),
        HParamsPlugin,
    ]
    _OnSocket.socket = served.socket
    board = program.TensorBoard(plugins=plugins, server_class=_OnSocket)
    # Its data server would listen on a port.
    board.configure(logdir=TOP, load_fast="false", reload_multifile=True)
    board.launch()
    return _OnSocket.watched


def main() -> None:
    """Serves until it is time to end."""
    served = Served.load(sys.stdin.readline())
    os.umask(0o077)
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_LOG, _MOST_LOG))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where the host has no memory left, this is what it can do without.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    alone = threading.Event()
    threading.Thread(target=_until_alone, args=(alone,), daemon=True).start()
    watched = serve(served)
    made = served.socket.stat().st_ino
    while not alone.wait(_LOOK_S):
        if time.monotonic() - watched.last > served.idle_s or not _is_there(served.socket, made):
            break
    if _is_there(served.socket, made):
        served.socket.unlink(missing_ok=True)
    # Threads that read what a training left may hang in a file system that does.
    os._exit(0)


def _until_alone(alone: threading.Event) -> None:
    while select.select([0], [], [])[0]:
        if not os.read(0, 4096):
            break
    alone.set()
    time.sleep(10 * _LOOK_S)
    os._exit(1)  # it had not begun to serve


def _is_there(socket: Path, made: int) -> bool:
    try:
        return socket.stat().st_ino == made
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main()
