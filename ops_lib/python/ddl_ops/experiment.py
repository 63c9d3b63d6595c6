"""Keeps an experiment as a training has left it, while others go on with it.

``python -m ddl_ops.experiment FOLDER COPY`` runs when all ranks have ended, and before another
training may begin in the experiment: what exports, evaluates and publishes the model afterwards
finds what belongs to it.

Standard library only: it runs in jobs that have no need of TensorFlow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

# TensorFlow's note of which checkpoint is the newest.
_STATE = "checkpoint"


def keep(folder: Path, copy: Path) -> None:
    """Copies a folder, whole or not at all; an empty one if there is none.

    Links are copied as links; pipes, sockets and devices are left out. A ``checkpoint`` file that
    names files by their whole paths, as ``tf.compat.v1.train.Saver`` writes it, names those of the
    copy.

    Args:
        folder: nobody writes in it meanwhile.
        copy: replaced if it is there; its parent is there.

    Raises:
        OSError: a file cannot be read or written.
    """
    new = copy.with_name(f".{copy.name}.new")
    for earlier in (new, copy):
        if earlier.exists():
            shutil.rmtree(earlier)
    if folder.is_dir():
        shutil.copytree(folder, new, symlinks=True, ignore=_special)
    else:
        new.mkdir()
    for state in new.rglob(_STATE):
        if state.is_file() and not state.is_symlink():
            here = os.fsencode(folder / state.parent.relative_to(new))
            said = state.read_bytes()
            if (relative := said.replace(b'"' + here + b"/", b'"')) != said:
                state.write_bytes(relative)
    new.rename(copy)


def _special(folder: str, names: list[str]) -> list[str]:
    modes = ((name, os.lstat(os.path.join(folder, name)).st_mode) for name in names)
    kinds = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
    return [name for name, mode in modes if not any(kind(mode) for kind in kinds)]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(prog="python -m ddl_ops.experiment", description=__doc__)
    parser.add_argument("folder", type=Path, help="the experiment")
    parser.add_argument("copy", type=Path, help="made or replaced")
    given = parser.parse_args(argv)
    keep(given.folder, given.copy)


if __name__ == "__main__":
    main()
