"""The argv of a command; how it ends is in test_rank.py."""

from __future__ import annotations

import shlex
import shutil
import sys

import pytest
from ddl_ops.command_line import _WAITS, command_argv

OWN = shlex.quote(sys.executable)


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("python train.py --epochs 3", [OWN, "train.py", "--epochs", "3"]),
        ("python3 'my train.py' \"a b\"", [OWN, "my train.py", "a b"]),
        ("python t.py $DATA_DIR", ["/bin/sh", "-c", f"exec {OWN} t.py $DATA_DIR"]),
        ("python3 t.py *.npy", ["/bin/sh", "-c", f"exec {OWN} t.py *.npy"]),
        ("LR=0.1 B= python3 t.py", ["/bin/sh", "-c", f"exec env LR=0.1 B= {OWN} t.py"]),
        ("A='x y' python3 t.py", ["/bin/sh", "-c", "exec env A='x y' python3 t.py"]),
        ("cd a && python t.py", ["/bin/sh", "-c", f"{_WAITS}\ncd a && python t.py"]),
        ("python t.py > out", ["/bin/sh", "-c", f"{_WAITS}\n{OWN} t.py > out"]),
        ("python t.py --lr=0.1", [OWN, "t.py", "--lr=0.1"]),
        ("python", [OWN]),
        ("python3.9 t.py", ["python3.9", "t.py"]),
        ("pythonic t.py", ["pythonic", "t.py"]),
        ("./python3 t.py", ["./python3", "t.py"]),
        ("python t.py '|' || b", ["/bin/sh", "-c", f"{_WAITS}\n{OWN} t.py '|' || b"]),
        ("a \\| && b >| c", ["/bin/sh", "-c", f"{_WAITS}\na \\| && b >| c"]),
        ("a | b || c", ["/bin/sh", "-c", f"{_WAITS}\na | b || c"]),
    ],
)
def test_a_shell_is_asked_only_where_it_must_be(command, argv):
    assert command_argv(command) == argv


@pytest.mark.parametrize(
    "command", ["a | b", "a '||' | b", "a || b | c", "cd x && (a; b) 2>&1 |\ntee out"]
)
def test_only_bash_knows_how_each_part_of_a_pipe_ended(command):
    shell, *options, text = command_argv(command)
    assert [shell, *options] == [shutil.which("bash"), "--posix", "-c"]
    assert f"\n{command}\n" in text
