"""What is there before a rank's script begins: the import of TensorFlow, which is not collected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddl_ops import rank

STARTUP = Path(rank.__file__).parent / "startup"


def said(script: str, *paths: Path, fails: bool = False) -> str:
    """What `script` prints where ranks run."""
    path = os.pathsep.join(str(path) for path in (STARTUP, *paths))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) is fails, done.stderr
    return done.stdout


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with a package called tensorflow that says whether it is being collected."""
    package = tmp_path / "tensorflow"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import gc\nkept = [[] for _ in range(99)]\nrests = not gc.isenabled()\n"
    )
    return tmp_path


def test_tensorflow_is_imported_uncollected_and_is_what_it_is_elsewhere():
    words = said(
        "import gc, sys, tensorflow as tf\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "print(type(tf.__spec__.loader).__name__, tf.__loader__ is tf.__spec__.loader)\n"
        "print([f for f in sys.meta_path if 'TensorFlow' in type(f).__name__])\n"
        "from importlib.resources import files\n"
        "print(files('tensorflow').joinpath('__init__.py').is_file())"
    )
    assert words.splitlines() == ["True True", "SourceFileLoader True", "[]", "True"]


def test_the_collector_works_before_and_after(other: Path):
    words = said(
        "import gc; before = gc.isenabled()\n"
        "import tensorflow; print(before, tensorflow.rests, gc.isenabled())\n"
        "class Kept: pass\n"
        "import weakref; it = Kept(); it.self = it; seen = weakref.ref(it); del it\n"
        "gc.collect(); print(seen())",
        other,
    )
    assert words.splitlines() == ["True True True", "None"]


def test_a_collector_that_the_script_stopped_stays_so(other: Path):
    words = said(
        "import gc; gc.disable()\n"
        "import tensorflow; print(gc.isenabled(), gc.get_freeze_count() > 99)",
        other,
    )
    assert words.split() == ["False", "False"]


def test_an_import_that_fails_leaves_the_collector_as_it_was(other: Path):
    (other / "tensorflow" / "__init__.py").write_text("import no_such_module_at_all\n")
    words = said(
        "import gc\n"
        "try: import tensorflow\n"
        "except ModuleNotFoundError as e: print(e.name, gc.isenabled(), gc.get_freeze_count())\n",
        other,
    )
    assert words.split() == ["no_such_module_at_all", "True", "0"]


def test_nothing_is_frozen_while_a_file_is_written(other: Path, tmp_path: Path):
    """In a cycle it is flushed by the last collection, which leaves alone what is frozen."""
    words = said(
        f"log = open({str(tmp_path / 'log')!r}, 'w')\n"
        "import gc, tensorflow; print(tensorflow.rests, gc.get_freeze_count(), gc.isenabled())",
        other,
    )
    assert words.split() == ["True", "0", "True"]


def test_what_a_script_made_before_is_no_hindrance(other: Path):
    words = said(
        "import gc, io, weakref\n"
        "class Odd(io.RawIOBase):\n"
        "    def writable(self): raise KeyError('odd')\n"
        "class Gone: pass\n"
        "it = Gone(); proxy = weakref.proxy(it); del it\n"
        "odd = Odd()\n"
        "import tensorflow; print(tensorflow.rests, gc.get_freeze_count() > 0)",
        other,
    )
    assert words.split() == ["True", "True"]


def test_a_script_without_tensorflow_is_collected_all_along(tmp_path: Path):
    assert (
        said("import gc\ntry: import tensorflow_not\nexcept ImportError: print(gc.isenabled())")
        == "True\n"
    )
