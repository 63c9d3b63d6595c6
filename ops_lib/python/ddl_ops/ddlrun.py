"""What ``ddlrun`` runs: PowerAI's launcher, by ``ddl-run``.

    ddlrun -H host1,host2 python train.py
    ddlrun --accelerators 4 python train.py

Each host runs a rank for each of its GPUs, or as many as are asked for. Flags are written before
the program, with one dash or two; each that has no effect is named.

Source: "Using the ddlrun tool" of IBM Watson Machine Learning Community Edition 1.6.2.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from ddl_ops import run

# By each of its names, without dashes.
_WITH_VALUE = {
    **dict.fromkeys(("H", "host"), "H"),
    **dict.fromkeys(("m", "mode"), "mode"),
    **dict.fromkeys(("ddlarg", "ddloption"), "ddlarg"),
    **dict.fromkeys(("rf", "rankfile"), "rankfile"),
    **{name: name for name in ("hostfile", "accelerators", "mpiarg", "x")},
    **{name: name for name in ("nodes", "racks", "aisles")},
}
_SWITCHES = {
    **dict.fromkeys(("t", "tcp"), "tcp"),
    **dict.fromkeys(("v", "verbose"), "verbose"),
    **dict.fromkeys(("h", "help"), "help"),
    **{name: name for name in ("no_ddloptions", "tf1")},
}
# MPI finds its ways by itself, and a script's ddl.init() is taken with DDL_OPTIONS as without.
_IDLE = ("tcp", "no_ddloptions")
_NODES = ("nodes", "racks", "aisles")
_HELP = """\
usage: ddlrun [-H HOST,... | -hostfile FILE] [-accelerators N] [-x NAME=VALUE] [-mode MODE]
              [-ddlarg ARG] [-mpiarg ARG] [--tf1] PROGRAM [ARGUMENT ...]

Starts ranks, as ddl-run does, with the flags of PowerAI's ddlrun.

  -H, -host HOST,...    hosts that ssh reaches; this one by default
  -hostfile FILE        the same, a line each
  -accelerators N       ranks of each host; by default one for each GPU of this host
  -x NAME=VALUE         a variable of the ranks; NAME alone has the value that it has here
  -m, -mode MODE        with -ddlarg the ranks' DDL_OPTIONS, which have no effect
  -mpiarg ARG           "-x NAME=VALUE"; others have no effect
  -nodes, -racks, -aisles N    their product must be the number of hosts
  --tf1                 a TensorFlow 1 script: `import tensorflow` gives 1.x
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ranks. Returns the exit code of the one that failed first, 0 if none did."""
    given, command = _flags(list(sys.argv[1:] if argv is None else argv))
    if "help" in given:
        print(_HELP, end="")
        return 0
    if not command:
        _fail("no program given; for example: ddlrun -H host1,host2 python train.py")
    if "rankfile" in given:
        _fail(
            "-rankfile: ranks fill the hosts one by one here. Name the hosts by -H, and the ranks "
            "of each by -accelerators."
        )
    idle = [f"-{name}" for name in _IDLE if name in given]
    idle += _set(os.environ, given)
    words = [*_where(given), *(["--tf1"] if "tf1" in given else []), "--", *command]
    for flag in dict.fromkeys(idle):
        print(f"ddlrun: {flag} has no effect here", file=sys.stderr)
    return _ddl_run(words)


def _flags(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Each flag with its values, and the program: the first word that is neither.

    Not by argparse: what is passed to MPI begins with a dash, too.
    """
    given: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        name, equals, value = word[1:].removeprefix("-").partition("=")
        if not equals and name in _SWITCHES:
            given.setdefault(_SWITCHES[name], [])
        elif name in _WITH_VALUE:
            if not equals and not words:
                _fail(f"{word} needs a value")
            given.setdefault(_WITH_VALUE[name], []).append(value if equals else words.pop(0))
        else:
            _fail(f"there is no flag {word}. `ddlrun --help` names those that there are.")
    return given, words


def _set(environ: MutableMapping[str, str], given: dict[str, list[str]]) -> list[str]:
    """Sets what ranks are to have, and returns what else was to reach MPI."""
    others = []
    variables = list(given.get("x", []))
    for argument in given.get("mpiarg", []):
        try:
            words = shlex.split(argument)
        except ValueError as error:
            _fail(f"-mpiarg {argument}: {error}")
        while words:
            word = words.pop(0)
            if word == "-x" and words:
                variables.append(words.pop(0))
            else:
                others.append(f"-mpiarg {shlex.join([word, *words])}")
                break
    for variable in variables:
        name, equals, value = variable.partition("=")
        if equals:  # else they have what this process has
            environ[name] = value
    if "mode" in given or "ddlarg" in given:
        mode = given.get("mode", ["p"])[-1]
        environ["DDL_OPTIONS"] = " ".join([f"-mode {mode}", *given.get("ddlarg", [])])
    return others


def _where(given: dict[str, list[str]]) -> list[str]:
    """What tells ddl-run how many ranks run on which host."""
    run.find_launching()
    from ddl_airflow.core.hosts import Host, parse_host, parse_hostfile

    ranks = _number(given, "accelerators")
    if ranks is None and not (ranks := _gpus(os.environ)):
        _fail("this host has no NVIDIA GPU to count. How many ranks on each? -accelerators N")
    hosts: Sequence[Host] = []
    try:
        if "H" in given:
            hosts = [parse_host(one) for one in ",".join(given["H"]).split(",")]
        elif "hostfile" in given:
            file = given["hostfile"][-1]
            hosts = parse_hostfile(Path(file).read_text("utf-8-sig"), file)
    except OSError as error:
        _fail(f"-hostfile {error.filename}: {error.strerror}")
    except ValueError as error:  # UnicodeDecodeError is one
        _fail(f"{error}.")
    nodes = math.prod(_number(given, name) or 1 for name in _NODES)
    if any(name in given for name in _NODES) and nodes != max(len(hosts), 1):
        _fail(
            f"-nodes, -racks and -aisles are for {nodes} hosts, and there are "
            f"{max(len(hosts), 1)}. Name them by -H or -hostfile."
        )
    if not hosts:
        return ["--np", str(ranks)]
    return ["--hosts", ",".join(f"{one.name}:{one.slots or ranks}" for one in hosts)]


def _number(given: dict[str, list[str]], name: str) -> int | None:
    if name not in given:
        return None
    text = given[name][-1]
    if not text.isdecimal() or int(text) == 0:
        _fail(f"-{name}: {text!r} is no number from 1 on")
    return int(text)


def _gpus(environ: MutableMapping[str, str]) -> int:
    """How many GPUs ranks see on this host; all hosts have as many."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _fail(why: str) -> NoReturn:
    print(f"ddlrun: {why}", file=sys.stderr)
    raise SystemExit(2)


def _ddl_run(words: list[str]) -> int:
    sys.argv = ["ddl-run", *words]
    return run.main()
