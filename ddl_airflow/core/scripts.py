"""What can be seen of a training's scripts without running them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

# Whatever a script averages gradients by has one of these in its text, be it in a comment.
_OURS = re.compile(rb"\b(ddl|ddl_MDR|mpi_collectives|dl_comm|ml_comm|horovod)\b")
# What a script imports, as lines of it say: a warning that is wrong costs more than one missing.
_TORCH = re.compile(
    rb"^\s*(?:import\s+(?:horovod\.)?torch\b|from\s+(?:horovod\.)?torch(?:\.\w+)*\s+import\b)",
    re.MULTILINE,
)
# As _OURS: anywhere, for there are many ways to import it.
_TENSORFLOW = re.compile(
    rb"\b(tensorflow\w*|keras|tf_keras|tf_slim|ddl|ddl_MDR|mpi_collectives|dl_comm|ml_comm)\b"
)
_MOST_FILES = 2_000
_MOST_BYTES = 2**20  # of one file
_MOST_BYTES_IN_ALL = 16 * 2**20


def will_train_apart(code: Path, distribution: str, ranks: int) -> str:
    """A sentence if the ranks are to train one model, and no script can average their gradients.

    Args:
        code: folder of the scripts. Links in it are not followed; one that is not there, has no
            Python file, or more than can be read soon, is none to speak of.
        distribution, ranks: as the manifest has them.
    """
    if distribution != "mpi" or ranks < 2 or _may_average(code):
        return ""
    return (
        f"no .py file of the code folder mentions ddl: the {ranks} ranks will train apart, each a "
        "model of its own, and train will fail"
    )


# What to do about it.
CURE = (
    "Write `import ddl` in the script before the optimizer is made, ask for one rank, or write "
    "distribution: independent."
)


def of_torch(code: Path, distribution: str, ranks: int) -> str:
    """A sentence if scripts import PyTorch, and none TensorFlow, and ranks are to train together.

    Args:
        code, distribution, ranks: as ``will_train_apart``.
    """
    if distribution == "independent" or ranks < 2:
        return ""
    found = ""
    for name, text in _scripts(code):
        if text is None or _TENSORFLOW.search(text):
            return ""
        found = found or (name if _TORCH.search(text) else "")
    return found and (
        f"{found} imports torch, and no .py file of the code folder names TensorFlow or Keras: "
        "only TensorFlow's gradients are averaged here, and only its models are published"
    )


TORCH_CURE = (
    "Port the script to TensorFlow or Keras; or train with torchrun and DistributedDataParallel, "
    "without a manifest."
)


def _may_average(code: Path) -> bool:
    any_script = False
    for _, text in _scripts(code):
        if text is None or _OURS.search(text):
            return True
        any_script = True
    return not any_script


def _scripts(code: Path) -> Iterator[tuple[str, bytes | None]]:
    """Each Python file of a folder, by its path there, and its text; None for what is not read."""
    files = read = 0
    for folder, folders, names in os.walk(code):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.endswith(".py"):
                continue
            files += 1
            path = Path(folder, name)
            text = _text(path)
            read += len(text or b"")
            if files > _MOST_FILES or read > _MOST_BYTES_IN_ALL:
                text = None
            yield path.relative_to(code).as_posix(), text
            if text is None:
                return


def _text(path: Path) -> bytes | None:
    """None where it cannot be said what is in it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        text = file.read(_MOST_BYTES + 1)
    return None if len(text) > _MOST_BYTES else text
