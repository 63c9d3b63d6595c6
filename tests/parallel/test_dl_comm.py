"""Scripts for Cray's deep learning plugin on two and three ranks: one job for each way of use."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent / "scripts"


def checks(script: str) -> list[str]:
    return re.findall(r"^@check\ndef (\w+)", (SCRIPTS / script).read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[2, 3], ids=lambda ranks: f"np{ranks}")
def arrays(request, run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("arrays")
    # Short, because a comparison that only rank 0 asks for is given up after a fourth of it.
    ended = run_ranks("dl_comm_arrays.py", request.param, str(folder), DDL_STALL_TIMEOUT="12")
    return request.param, ended


@pytest.mark.parametrize("name", checks("dl_comm_arrays.py"))
def test_check_of_arrays_passes_on_every_rank(arrays, name):
    ranks, ended = arrays
    said = [line for rank in range(ranks) for line in ended.lines_of(rank)]
    assert [line for line in said if line.startswith(f"{name}:")] == [f"{name}: ok"] * ranks, (
        ended.output
    )


def test_what_rank_0_says(arrays):
    ranks, ended = arrays
    assert ended.returncode == 0, ended.output
    report = (
        r'ddl: rank 0: dl_comm team 1 "float32 of team 1": step {} of 4, {}: 0\.000 MB a step, '
        r"communication \d+\.\d+ ms a step, \d+\.\d+ ms of it hidden behind computing\n"
    )
    for step, phase in ((2, "blocking"), (4, "pipelined")):
        assert len(re.findall(report.format(step, phase), ended.output)) == 1, ended.output
    assert ended.output.count("of 3 buffers 1 differ between the ranks: 0\n") == 1
    assert f"rank {ranks - 1} did not call it" in ended.output
    assert "Nothing was compared: call it on all ranks." in ended.output


@pytest.fixture(scope="module")
def graphs(ddl_run, tmp_path_factory):
    ranks, folder = 3, tmp_path_factory.mktemp("graphs")
    words = ("--tf1", "--np", str(ranks), "--timeline", folder / "timeline.json")
    script = SCRIPTS / "dl_comm_graphs.py"
    ended = ddl_run(*words, "python", script, folder, DDL_STALL_TIMEOUT="60")
    return ranks, ended, folder


@pytest.mark.parametrize("name", checks("dl_comm_graphs.py"))
def test_check_of_graphs_passes_on_every_rank(graphs, name):
    ranks, ended, _ = graphs
    if name.startswith("legacy_") and importlib.util.find_spec("tensorflow_estimator") is None:
        pytest.skip("no Estimators: pip install -r requirements/legacy.txt")
    said = [line for rank in range(ranks) for line in ended.lines_of(rank)]
    assert [line for line in said if line.startswith(f"{name}:")] == [f"{name}: ok"] * ranks, (
        ended.output
    )


def test_a_second_average_of_clipped_gradients_is_said(graphs):
    _, ended, _ = graphs
    assert ended.returncode == 0, ended.output
    twice = "averages, in a graph that calls dl_comm.gradients()."
    assert ended.output.count(twice) == 1, ended.output


def test_the_timeline_shows_communication_beside_the_next_step(graphs):
    """Blocking: a step computes when that before is communicated. Pipelined: while it is."""
    _, ended, folder = graphs
    said = " ".join(ended.lines_of(0))
    began = [float(at) for at in re.findall(r"computes from ([0-9.]+)", said)]
    ((name, process),) = re.findall(r"op (\S+) of process (\d+)", said)
    events = json.loads((folder / "timeline.json").read_text())
    ours = [event for event in events if event["pid"] == int(process) and event["name"] == name]

    def spans(category: str) -> list[tuple[float, float]]:
        return sorted((e["ts"], e["ts"] + e["dur"]) for e in ours if e["cat"] == category)

    # Each collective waits in the queue, and is next then. Steps before these may end during them.
    pairs = zip(spans("queued"), spans("TeamGradients"), strict=True)
    passages = [(*queued, *reduced) for queued, reduced in pairs]
    assert all(abs(turn - start) < 0.01 for _, turn, start, _ in passages)
    steps = [passage for passage in passages if passage[0] > began[0]][: len(began)]
    handed_over, reduced = [s[0] for s in steps], [s[3] for s in steps]
    assert len(began) == len(handed_over) == len(reduced) == 6
    for step in range(5):
        assert handed_over[step] < began[step + 1]
        if step < 2:
            assert reduced[step] < began[step + 1]
        else:
            assert began[step + 1] < reduced[step]


def test_keras_of_those_days_trains_one_model_by_a_wrapped_optimizer(ddl_run):
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras not installed: pip install -r requirements/legacy.txt")
    words = ("--tf1", "--np", "2", "python", SCRIPTS / "cray_keras.py")
    ended = ddl_run(*words, DDL_STALL_TIMEOUT="60")
    assert ended.returncode == 0, ended.output[-5000:]
    assert ended.lines_of(0) == ended.lines_of(1)
    assert ended.lines_of(0)[0].startswith("weights: ")
    output = ddl_run(*words, "as published").output
    assert "got multiple values for argument 'name'. If it is of an optimizer's get_conf" in output
