"""The argv of a command; how it ends is in test_rank.py."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ddl_ops.command_line import _WAITS, STARTUP, command_argv

OWN = shlex.quote(sys.executable)
_OUTPUT: dict[str, Any] = {"capture_output": True, "text": True}


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


@pytest.mark.parametrize("command", ["A=1", " A='x y' B= ", "A=1 # no program"])
def test_what_only_assigns_fails_and_shows_no_environment(command):
    """As `env A=1` it printed all of it, secrets too, and ended well."""
    env = {"PATH": "/usr/bin:/bin", "PARAM_TOKEN": "planted"}
    told = subprocess.run(command_argv(command), env=env, **_OUTPUT)
    assert (told.returncode, told.stdout) == (127, "")


@pytest.mark.parametrize(
    "command", ["a | b", "a '||' | b", "a || b | c", "cd x && (a; b) 2>&1 |\ntee out"]
)
def test_only_bash_knows_how_each_part_of_a_pipe_ended(command):
    shell, *options, text = command_argv(command)
    assert [shell, *options] == [shutil.which("bash"), "--posix", "-c"]
    assert f"\n{command}\n" in text


@pytest.mark.parametrize("operator", ["&>", "&>>", "2>&1 |& cat >"])
def test_both_outputs_go_to_a_file_and_the_exit_code_is_the_commands(operator, tmp_path):
    """To another shell than bash, &> ends the command at once, and well."""
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    command = f"python -c {shlex.quote(code)} {operator} log"
    ended = subprocess.run(command_argv(command), cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})
    assert ended.returncode == 3
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("source site.sh && echo $SITE", "here"),
        ("source site.sh && echo {a,b}$SITE", "ahere bhere"),
        ("cd . && source ./site.sh && echo $SITE | cat", "here"),
        ("if [[ -f site.sh && x == x* ]] ; then echo yes ; fi", "yes"),
        ("! [[ a =~ b ]] && echo yes", "yes"),
        ("cat <(echo one) <(echo two)", "one two"),
        ("echo one > >(cat) && sleep 0.2", "one"),
        ("cat <<< one", "one"),
        ("set -euo pipefail && echo one", "one"),
        ("pushd . > log && echo one", "one"),
        ("A=(one two) && echo ${A[1]}", "two"),
        ("(echo one && (echo two >&2)) >& log && sort -r log", "two one"),
        ("source site.sh && false | cat || echo no", ""),
    ],
)
def test_what_only_bash_knows_runs_in_bash(command, out, tmp_path):
    """Such a command failed in dash, with `source: not found` or a syntax error."""
    (tmp_path / "site.sh").write_text("SITE=here\n")
    argv = command_argv(command)
    told = subprocess.run(argv, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, **_OUTPUT)
    assert (told.returncode, told.stdout.split(), told.stderr) == (0, out.split(), "")


@pytest.mark.parametrize("command", ["source site.sh && false | cat", "[[ 1 == 2 ]]"])
def test_what_fails_in_bash_fails_the_command(command, tmp_path):
    (tmp_path / "site.sh").write_text("")
    told = subprocess.run(command_argv(command), cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})
    assert told.returncode == 1


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("cd .; (exit 3) | tee log", 3),
        ('(exit 3) | cat; echo "it\'s"', 0),
        ("yes | head -1; exit 4", 4),
        ("cd .; yes | head -1", 0),
        ("false; true", 0),
        ("false || true; (false || true) | cat", 0),
        ("false; [[ a == b ]] | cat", 1),
        ("cd .; test {a,b} = b", 2),
    ],
)
def test_several_commands_of_ffdl_end_as_the_last_one_and_each_part_of_its_pipe(
    text, code, tmp_path
):
    """Wrapped in ``bash -c``, a pipe had failed only if its last part did."""
    argv = command_argv(f"bash -c {shlex.quote(text)}")
    told = subprocess.run(argv, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, **_OUTPUT)
    assert told.returncode == code, told.stderr


@pytest.mark.parametrize(
    "command", ['bash -c "a; b | c $X"', "bash -ec 'a; b | c'", "bash -c 'a; b | c' d"]
)
def test_what_a_manifest_has_another_shell_do_is_that_ones(command):
    assert command_argv(command) == ["/bin/sh", "-c", f"{_WAITS}\n{command}"]


@pytest.mark.parametrize(
    "command",
    [
        "python t.py source && python u.py '[[ x'",
        "cd source && python t.py --shape [[1,2]]",
        "python t.py 2>&1 1>&$LOG",
        "python t.py --set -o pipefail && true",
        "python t.py && test $((a<(b))) = 1",
        "python t.py >&2 2>& 1 > log",
    ],
)
def test_what_sh_knows_stays_in_sh(command):
    assert command_argv(command)[0] == "/bin/sh"


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("PYTHONPATH=src python {}", [STARTUP, "src"]),
        ("PYTHONPATH= python {}", [STARTUP]),
        ("PYTHONPATH='a b':c python {}", [STARTUP, "a b", "c"]),
        ("export PYTHONPATH=$HERE/lib && python {}", [STARTUP, "there/lib"]),
        ("bash -c 'PYTHONPATH=src python {}'", [STARTUP, "src"]),
        ("PYTHONPATH=src:$PYTHONPATH python {}", ["src", "site"]),
        ("PYTHONPATH=${{PYTHONPATH}}:src python {}", ["site", "src"]),
        ("MY_PYTHONPATH=src python {}", ["site"]),
    ],
)
def test_a_path_of_the_commands_own_keeps_what_every_rank_starts_with(command, path, tmp_path):
    """Without it a script of TensorFlow 1 or of Horovod would not find its API."""
    (tmp_path / "tells.py").write_text("import os; print(os.environ['PYTHONPATH'])")
    folders = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": folders, "HERE": "there", "PYTHONPATH": "site"}
    argv = command_argv(command.format("tells.py"))
    said = subprocess.check_output(argv, cwd=tmp_path, env=environment, text=True)
    assert said.strip().split(":") == path


def test_an_argument_may_look_like_an_operator():
    assert command_argv("python t.py '&>'")[:2] == ["/bin/sh", "-c"]
