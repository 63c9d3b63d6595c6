"""What the page is told of one training, and of all of them."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.lineage.record import Run, drop_parts, keep_so_far, write_part
from ddl_airflow.plugin import training, unchanged
from ddl_airflow.plugin.training import (
    facts,
    read_checkpoints,
    read_communication,
    read_failure,
    read_jobs,
    read_measurements,
    read_pace,
    read_starts,
)
from ddl_airflow.plugin.unchanged import Unchanged
from ddl_airflow.storage.experiments import claim
from tests.limits import until, within

A_DAY_AGO = time.time() - 86_400


# Texts of JSON: ranks may write where Airflow's tasks do, and a damaged disk, too.
NONSENSE = [
    *("7", "-1e300", "1e400", "NaN", "true", "null", "[]", "{}", f"1{'0' * 400}"),
    *('["x"]', '{"toString": 1, "valueOf": 2}', '{"__proto__": {"length": 7}}', '"\\ud800"'),
    '"<img src=x onerror=alert(1)>\\u0000\\u202e"',
    *('"{}"'.format("x" * 50_000), "[{}]".format("7," * 5000 + "7")),
    *("[" * 600 + "]" * 600, '{"a":' * 300 + "7" + "}" * 300),
]
SECTIONS = ("outcome", "run", "dataset", "code", "manifest", "environment", "result")
FIELDS = (
    *("state", "step", "publication", "results", "type", "started", "triggered_by", "parameters"),
    *("experiment", "uri", "fingerprint", "files", "bytes", "digest", "git_commit", "name", "file"),
    *("dialect", "launcher", "world_size", "hosts", "settings", "versions", "metrics", "steps"),
    *("measurements", "goodput", "accuracy", "listing"),
)


def write_nonsense(layout, what, value, run_id="r"):
    """Has the records of a run say a value, as a text of JSON, wherever there is something."""
    path = layout.kept / "record.json"
    said = json.loads(path.read_text())
    for section in SECTIONS:
        fields = {"a section": "*", "a field": dict.fromkeys(FIELDS, "*")}.get(what)
        inner = {"uri": "*", "held_s": "*", "steps_per_held_s": "*", "loss": "*", "keras": "*"}
        said[section] = fields or dict.fromkeys(FIELDS, inner | {"metric": "*", "source": "*"})
    said["run"] = said["run"] if what == "a section" else said["run"] | {"run_id": run_id}
    text = json.dumps(said).replace('"*"', value)
    path.write_text(text)
    for name in ("lineage.json", "failure.json"):
        (layout.kept / name).write_text(text.replace('"outcome"', '"other"'))


@pytest.fixture
def layout(tmp_path):
    made = RunLayout(tmp_path / "workspace", "digits", "digits-run-1")
    made.create()
    return made


def progress(layout, *lines):
    with layout.progress.open("a") as file:
        file.writelines(json.dumps({"source": "keras"} | line) + "\n" for line in lines)


def record(layout, folder, rank, **said):
    place = layout.state / folder
    place.mkdir(exist_ok=True)
    (place / f"rank-{rank}.json").write_text(json.dumps({"rank": rank} | said).ljust(8192))


def fail(layout, message, rank=1, error="JobFailed"):
    said = {"step": "train", "try": 2, "error": error, "message": message, "rank": rank}
    layout.failure.write_text(json.dumps(said))


def test_what_stopped_early_and_ended_well_is_done_and_nothing_is_left(layout):
    progress(layout, *({"t": 1.0 + n, "step": 10 * n, "steps": 1500} for n in range(1, 52)))
    pace = read_pace(layout)
    assert (pace["step"], pace["steps"], pace["done"]) == (510, 1500, 0.34)
    assert pace["left_s"] == pytest.approx(99) and not pace["stopped_early"]
    write_part(layout, "train", {"result": {"metrics": {}}})
    pace = read_pace(layout)
    assert (pace["done"], pace["left_s"], pace["stopped_early"]) == (1.0, None, True)
    # Cleared: it trains again.
    drop_parts(layout, "train")
    assert read_pace(layout)["done"] == 0.34
    fail(layout, "gone")
    pace = read_pace(layout)
    assert (pace["done"], pace["left_s"]) == (0.34, None)


@pytest.mark.parametrize(("last", "early"), [(400, False), (399, False), (398, True)])
def test_who_counts_steps_from_0_has_not_stopped_early(layout, last, early):
    progress(layout, *({"t": 1.0 + n, "step": n, "steps": 400} for n in range(last + 1)))
    write_part(layout, "train", {"result": {"metrics": {}}})
    assert read_pace(layout)["stopped_early"] is early


def test_how_far_it_is_is_known_long_after_the_script_said_it(layout):
    """Whose ops have said more since than what is looked at."""
    progress(layout, {"t": 1.0, "step": 5000, "steps": 20_000})
    ops = {"source": "ops", "comm_s": 123.456789, "wait_s": 12.3456789}
    progress(layout, *(ops | {"t": 1.0 + n, "step": n} for n in range(3000)))
    assert layout.progress.stat().st_size > 200_000
    pace = read_pace(layout)
    assert (pace["step"], pace["steps"], pace["done"]) == (5000, 20_000, 0.25)
    assert read_pace(layout, 16 * 1024) == pace


def test_a_training_that_told_nothing(layout):
    assert set(read_pace(layout).values()) == {None, False}
    assert read_failure(layout) is None and read_communication(layout) is None
    assert read_jobs(layout) == read_checkpoints(layout, {}) == []


@pytest.mark.parametrize(
    ("message", "cause", "fix", "line"),
    [
        (
            "rank 0 of 2 on vm raised FileNotFoundError at train.py:3: [Errno 2] No such file or "
            "directory: 'train.npz'. A rank runs in a copy of the script's folder; staged data is "
            "in $DATA_DIR. All ranks were ended. Its whole log: /w/logs/rank-0.log",
            "rank 0 of 2 on vm raised FileNotFoundError at train.py:3: [Errno 2] No such file or "
            "directory: 'train.npz'.",
            "A rank runs in a copy of the script's folder; staged data is in $DATA_DIR.",
            "train.py:3",
        ),
        (
            "rank 0 of 2 on vm raised ValueError at train.py:5: invalid literal: 'ten'. All ranks "
            "were ended. Its whole log: /w/logs/rank-0.log",
            "rank 0 of 2 on vm raised ValueError at train.py:5: invalid literal: 'ten'.",
            "",
            "train.py:5",
        ),
        (
            "rank 1 of 2 on vm raised KeyError at train.py:3: 'DATADIR'. Did you mean DATA_DIR? "
            "All ranks were ended. Its whole log: /w/logs/rank-1.log",
            "rank 1 of 2 on vm raised KeyError at train.py:3: 'DATADIR'.",
            "Did you mean DATA_DIR?",
            "train.py:3",
        ),
        (
            "rank 0 of 2 on vm was ended by SIGKILL (often the machine ran out of memory). Give "
            "each rank a smaller batch, or run fewer ranks on a node. All ranks were ended.",
            "rank 0 of 2 on vm was ended by SIGKILL (often the machine ran out of memory).",
            "Give each rank a smaller batch, or run fewer ranks on a node.",
            "",
        ),
        (
            "train.py:1: invalid syntax. Mend it: the script is not valid Python.",
            "train.py:1: invalid syntax.",
            "Mend it: the script is not valid Python.",
            "train.py:1",
        ),
        (
            "conn_id: Airflow has no connection 'my_s4'. Add it under Admin > Connections.",
            "conn_id: Airflow has no connection 'my_s4'.",
            "Add it under Admin > Connections.",
            "",
        ),
    ],
)
def test_a_failure_is_one_cause_one_fix_and_the_line(layout, message, cause, fix, line):
    fail(layout, message)
    said = read_failure(layout)
    assert (said["cause"], said["fix"], said["line"]) == (cause, fix, line)
    assert said["message"] == message


def test_each_try_in_words(layout):
    begun = {"host": "gpu01", "started": 100.0}
    raised = {"type": "ValueError", "message": "loss is NaN", "file": "train.py", "line": 33}
    record(layout, "try-1", 0, **begun, ended=160.5, exit_code=143, asked_to_end=160.0)
    failed = {"exit_code": 1, "exception": raised | {"t": 159.0}}
    record(layout, "try-1", 1, host="gpu02", started=101.0, ended=160.0, **failed)
    saved = {"exit_code": 0, "preempted": {"step": 40}}
    for rank in (0, 1):
        record(layout, "try-2", rank, **begun, ended=260.0, **saved)
        record(layout, "try-2.1", rank, **begun, ended=300.0 + rank, exit_code=0)
        record(layout, "try-3", rank, **begun)
    told = [(job["name"], job["state"], job["words"]) for job in read_jobs(layout)]
    assert told == [
        ("try 1", "failed", "rank 1 on gpu02 raised ValueError at train.py:33: loss is NaN"),
        ("try 2", "made_room", "made room for other jobs after step 40, where it was saved"),
        ("try 2, job 2", "done", "2 ranks ended well"),
        ("try 3", "running", "2 ranks at work"),
    ]
    assert read_starts(layout) == [100.0] * 4
    # One that never began, and one that has yet to, say nothing of the others.
    layout.all_records()[0].joinpath("rank-0.json").unlink()
    layout.all_records()[-1].joinpath("rank-0.json").unlink()
    assert read_starts(layout) == [100.0, 100.0, 100.0, math.inf]
    record(layout, "try-1", 0, **begun, ended=160.5, exit_code=143, asked_to_end=160.0)
    record(layout, "try-3", 0, **begun)
    first = read_jobs(layout)[0]
    assert (first["started"], first["ended"]) == (100.0, 160.5)
    assert first["hosts"] == ["gpu01", "gpu02"]
    # A try that was ended so hard that its ranks could not say so.
    record(layout, "try-4", 0, **begun, ended=9.0, exit_code=137)
    words = [job["words"] for job in read_jobs(layout)]
    assert words[3:] == [
        "was ended, and its ranks said no more",
        "rank 0 on gpu01 was ended by signal 9",
    ]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        *((255, "exited with code 255"), (192, "was ended by signal 64")),
        *((193, "exited with code 193"), (129, "was ended by signal 1"), (1, "exited with code 1")),
    ],
)
def test_an_exit_code_beyond_signals_is_none(layout, code, words):
    """``sys.exit(-1)`` is 255."""
    record(layout, "try-1", 0, host="vm", started=1.0, ended=2.0, exit_code=code)
    assert read_jobs(layout)[0]["words"] == f"rank 0 on vm {words}"


@pytest.mark.parametrize(
    "said",
    [
        {"exit_code": "1", "exception": "none", "host": 5, "gpus": {"a": 1}, "started": "now"},
        {"exit_code": 1, "exception": {"type": ["x"], "t": "NaN", "line": True}, "ended": 1e999},
        {"exit_code": 10**30, "ended": 10**400, "started": True, "preempted": 7},
        {"host": "\ud800", "preempted": {"step": "x" * 1000}, "exit_code": 0},
    ],
)
def test_a_rank_may_write_anything(layout, said):
    from ddl_airflow.plugin.sendable import sendable

    record(layout, "try-1", 0, **said)
    record(layout, "try-1", 1, host="vm")
    (layout.state / "try-1" / "rank-0.usage").write_text(json.dumps(said | {"peak": [1]}))
    (layout.state / "try-1" / "rank-1.usage").symlink_to("/etc/passwd")
    spent = said | {"run_s": said.get("started"), "comm_s": said.get("ended"), "wait_s": [1]}
    (layout.state / "try-1" / "rank-0.communication").write_text(json.dumps(spent))
    (layout.state / "try-1" / "rank-1.communication").symlink_to("/etc/passwd")
    (layout.state / "try-1" / "rank-2.json").write_text("[")
    (layout.state / "try-1" / "rank-3.json").symlink_to("/etc/passwd")
    layout.statistics.write_text(json.dumps({"ranks": [said], "straggler": said}))
    (job,) = read_jobs(layout)
    assert [rank["rank"] for rank in job["ranks"]] == [0, 1]
    json.dumps(sendable(job), allow_nan=False).encode()
    assert read_communication(layout) is None


def test_the_graph_of_a_run_that_trains_anew_is_not_that_of_what_it_published(layout):
    """For somebody may have to approve what comes of it."""
    from ddl_airflow.plugin.graph import Pointers, read_graph

    def told(name, version, **outcome):
        (layout.kept / name).write_text(
            json.dumps(
                {
                    "dataset": {"uri": "s3://b/d", "fingerprint": f"sha256:data{version}"},
                    "code": {"digest": f"sha256:code{version}"},
                    "manifest": {"digest": f"sha256:manifest{version}"},
                    **({"outcome": outcome} if outcome else {}),
                }
            )
        )

    told("lineage.json", 1)
    told("record.json", 2, state="failed", step="train")
    facts = [node["facts"] for node in read_graph(layout, Pointers())["nodes"]]
    assert "data2" in str(facts) and "code2" in str(facts) and "manifest2" in str(facts)
    assert "data1" not in str(facts) and "code1" not in str(facts)


def test_the_graph_of_a_model_of_many_objects_has_its_files(layout, monkeypatch):
    from ddl_airflow.plugin import graph

    listing = [{"key": f"images/{n:07}.png", "size": 1, "etag": "e" * 32} for n in range(250_000)]
    record = {"dataset": {"uri": "s3://b/d", "fingerprint": "sha256:1"}, "code": {"digest": "c"}}
    outcome = {"state": "published", "publication": "file:///r/t/c"}
    (layout.kept / "record.json").write_text(json.dumps(record | {"outcome": outcome}))
    file = {"key": "model/saved_model.pb", "size": 5, "sha256": "f" * 64}
    record["dataset"]["listing"] = listing
    (layout.kept / "lineage.json").write_text(json.dumps(record | {"result": {"files": [file]}}))
    assert (layout.kept / "lineage.json").stat().st_size > 16 * 2**20

    def model():
        (found,) = [
            node
            for node in graph.read_graph(layout, graph.Pointers())["nodes"]
            if node["kind"] == "model"
        ]
        return found

    assert model()["files"] == [file]
    # Of what is larger still it says that it does not show it.
    monkeypatch.setattr(graph, "_MOST_OF_LINEAGE", 2**20)
    assert model()["files"] == [] and "larger than 1 MiB" in dict(model()["facts"])["files"]


def reads_of_lineages(monkeypatch):
    """A list, to which each whole lineage that is read from now on is added, whoever reads it."""
    from ddl_airflow.plugin import graph

    read, lineages = unchanged.read_object, []

    def counted(path, *limits):
        lineages.extend([path] if path.name == "lineage.json" else [])
        return read(path, *limits)

    for module in (graph, training, unchanged):
        monkeypatch.setattr(module, "read_object", counted, raising=False)
    return lineages


def test_a_lineage_that_has_not_changed_is_not_read_again(layout, monkeypatch):
    """It may list hundreds of thousands of objects, and the page asks every 2 seconds."""
    from ddl_airflow.plugin import graph

    lineages = reads_of_lineages(monkeypatch)
    files, pointers = Unchanged(), graph.Pointers()
    listing = [{"key": f"images/{n}.png", "size": 1} for n in range(1000)]
    record = {
        "dataset": {"uri": "s3://b/d", "fingerprint": "sha256:1", "listing": listing},
        "code": {"digest": "c", "files": ["train.py"]},
        "manifest": {"name": "digits", "digest": "m"},
        "run": {"run_id": "run", "triggered_by": "ada", "parameters": {"rate": 1}},
        "result": {
            "metrics": {"loss": 0.5},
            "files": [{"key": f"{n}.pb", "size": 5, "sha256": "f"} for n in range(600)],
        },
        "outcome": {"state": "published", "publication": "file:///r/t/c"},
    }
    (layout.kept / "record.json").write_text(json.dumps(record))
    path = layout.kept / "lineage.json"
    path.write_text(json.dumps(record))
    os.utime(path, (1, 1))
    first = graph.read_graph(layout, pointers, files)
    assert graph.read_graph(layout, pointers, files) == first and len(lineages) == 1
    nodes = {node["kind"]: node for node in first["nodes"]}
    assert nodes["data"]["title"] == "s3://b/d" and nodes["code"]["title"] == "train.py"
    assert ["asked for by", "ada"] in [list(one) for one in nodes["run"]["facts"]]
    assert dict(nodes["model"]["facts"])["loss"] == 0.5 and len(nodes["model"]["files"]) == 500
    # What is kept of it has no listing.
    kept = files.read(path, layout.workspace, graph._drawn)
    assert len(lineages) == 1 and "images" not in str(kept)


def test_a_whole_record_is_read_where_there_is_no_other_and_once(layout, monkeypatch):
    """An earlier version of ours wrote no other; and the page asks every 2 seconds."""
    from ddl_airflow.plugin import graph

    looked = reads_of_lineages(monkeypatch)
    listing = [{"key": f"{n}.png", "size": 1} for n in range(1000)]
    whole = {
        "dataset": {"uri": "s3://b/d", "listing": listing},
        "run": {"run_id": "run", "experiment": "wide"},
        "result": {"metrics": {"loss": 0.5}, "files": [{"key": f"{n}"} for n in range(600)]},
    }
    path = layout.kept / "lineage.json"
    path.write_text(json.dumps(whole))
    os.utime(path, (1, 1))
    files = Unchanged()
    for _ in range(2):
        record = training.read_record(layout, files)
        assert facts(record)["result"] == {"metrics": {"loss": 0.5}}
        assert record["run"] == whole["run"] and record["dataset"] == {"uri": "s3://b/d"}
    assert len(looked) == 1
    assert graph.read_graph(layout, graph.Pointers(), files)["nodes"]
    assert len(looked) == 2  # of which it draws other parts
    graph.read_graph(layout, graph.Pointers(), files)
    assert len(looked) == 2


@pytest.mark.parametrize("text", ["", "[]", None], ids=["empty", "a list", "a link"])
def test_what_was_published_before_stands_for_no_record_that_cannot_be_read(layout, text):
    """The run was cleared since, and has failed."""
    (layout.kept / "lineage.json").write_text('{"run": {"run_id": "run"}}')
    path = layout.kept / "record.json"
    if text is None:
        path.symlink_to("lineage.json")
    else:
        path.write_text(text)
    assert training.read_record(layout) == {}


def test_what_each_rank_takes_of_its_host(layout):
    told = {"t": 110.0, "cores": 1.9, "cpu_s": 15.0, "memory": 2 << 20, "peak": 3 << 20}
    of_gpu = {"gpu": 97.5, "gpu_average": 88.0, "gpu_memory": 5 << 30, "gpu_peak": 6 << 30}
    record(layout, "try-1", 0, started=100.0)
    record(layout, "try-1", 1, started=100.0, ended=111.0, exit_code=0)
    record(layout, "try-1", 2, started=100.0)
    record(layout, "try-1", 3, started=100.0)
    for rank, usage in ((0, told | of_gpu), (1, told | of_gpu), (3, told)):
        (layout.state / "try-1" / f"rank-{rank}.usage").write_text(json.dumps(usage))
    host = ("cores", "memory", "peak")
    gpu = ("gpu", "gpu_memory", "gpu_peak")
    found = [one["usage"] for one in read_jobs(layout)[0]["ranks"]]
    assert [[one[name] for name in host] for one in found] == [
        [1.9, 2 << 20, 3 << 20],
        [1.5, None, 3 << 20],
        [None, None, None],
        [1.9, 2 << 20, 3 << 20],
    ]
    assert [[one[name] for name in gpu] for one in found] == [
        [97.5, 5 << 30, 6 << 30],
        [88.0, None, 6 << 30],
        [None, None, None],
        [None, None, None],
    ]


def test_what_has_not_changed_is_not_read_again(layout, monkeypatch):
    """Of 3 tries of 50 ranks, whose page is open; one of them changes."""
    monkeypatch.setattr(unchanged, "_SETTLED_S", 600.0)  # as if this test took no time
    for tried in (1, 2, 3):
        for rank in range(50):
            record(layout, f"try-{tried}", rank, started=100.0 * tried, exit_code=0, ended=150.0)
    layout.statistics.write_text(json.dumps({"ranks": []}))
    files = Unchanged()

    def look():
        before = files.reads
        jobs, starts = read_jobs(layout, files), read_starts(layout, files)
        read_communication(layout, files)
        assert jobs == read_jobs(layout) and starts == read_starts(layout)
        return files.reads - before

    look()
    # What was written a moment ago may be written again in the same tick of the clock.
    assert look() == 150 + 3 + 1
    for path in layout.state.rglob("*.json"):
        os.utime(path, (path.stat().st_mtime - 3600,) * 2)
    assert (look(), look()) == (151, 0)
    record(layout, "try-3", 7, started=300.0, exit_code=1, ended=160.0)
    assert look() == 1 and "rank 7 exited with code 1" in read_jobs(layout, files)[-1]["words"]
    # Replaced by one of the same length and time: it is another file.
    path = layout.state / "try-3" / "rank-8.json"
    os.utime(layout.state / "try-3" / "rank-7.json", (1, 1))
    look()
    new = path.with_suffix(".new")
    new.write_text(path.read_text().replace('"exit_code": 0', '"exit_code": 2'))
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.replace(path)
    assert look() == 1
    # One that was known is not shown from memory when a link has taken its place.
    moved = layout.state / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    assert len(read_jobs(layout, files)[-1]["ranks"]) == 49


def test_ranks_cannot_have_the_page_read_without_end(layout):
    """Records of many MiB, and one file linked under many names."""
    record(layout, "try-1", 0, host="vm", message="x" * 900_000)
    record(layout, "try-1", 1, host="vm", message="x" * 2**20)
    record(layout, "try-2", 0, host="vm", message="x" * 900_000)
    (layout.state / "try-2" / "rank-0.usage").write_text(json.dumps({"cores": 2.0}))
    for rank in range(1, 1000):
        os.link(layout.state / "try-2/rank-0.json", layout.state / f"try-2/rank-{rank}.json")
    first, last = read_jobs(layout)
    assert len(last["ranks"]) == 64 * 2**20 // 900_000 and first["hosts"] == []
    assert read_communication(layout) is None and read_starts(layout) == [math.inf] * 2
    # Less than that is all shown, but for a single one that is too large.
    for path in (layout.state / "try-2").glob("rank-*.json"):
        if path.name != "rank-0.json":
            path.unlink()
    first, last = read_jobs(layout)
    assert first["hosts"] == ["vm"] and last["ranks"][0]["usage"]["cores"] == 2.0


def test_ranks_cannot_have_the_page_look_at_files_without_end(layout, monkeypatch):
    """However small they are, and also where nothing of them has changed."""
    monkeypatch.setattr(unchanged, "_MOST_FILES", 10)
    for name in ("try-1", "try-2"):
        for rank in range(8):
            record(layout, name, rank, host="vm")
            os.utime(layout.state / name / f"rank-{rank}.json", (1, 1))
            (layout.state / name / f"rank-{rank}.usage").write_text('{"cores": 2.0}')
    files, listed = Unchanged(), []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path.name) or scandir(path))
    for _ in range(2):
        first, last = read_jobs(layout, files)
        assert [one["usage"]["cores"] for one in last["ranks"]] == [2.0] * 2 + [None] * 6
        assert first["hosts"] == []
    assert "try-2" in listed and "try-1" not in listed
    layout.statistics.write_text(json.dumps({"ranks": [], "more": "x" * 1000}))
    assert read_communication(layout)["ended"]
    monkeypatch.setattr(training, "_MOST_OF_RANKS", 1000)
    assert read_communication(layout) is None


def test_ranks_cannot_have_the_page_list_names_without_end(layout, monkeypatch):
    """In the folder of logs, among the tries, and in all of those together."""
    from ddl_airflow.plugin.logs import ranks_with_logs

    listed = []
    scandir = os.scandir

    class Counted:
        def __init__(self, folder):
            self._within, self._name = scandir(folder), Path(folder).name

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._within.close()

        def __iter__(self):
            for entry in self._within:
                listed.append(self._name)
                yield entry

    monkeypatch.setattr(os, "scandir", Counted)
    for rank in range(5000):
        (layout.logs / f"rank-{rank}.log").touch()
    assert ranks_with_logs(layout.logs) == list(range(4096))
    for rank in range(5000, 25_000):
        (layout.logs / f"rank-{rank}.log").touch()
    del listed[:]
    assert len(ranks_with_logs(layout.logs)) == 4096 and len(listed) == 20_000
    monkeypatch.setattr(training, "_MOST_ENTRIES", 100)
    monkeypatch.setattr(unchanged, "_MOST_NAMES", 30)
    for number in range(200):
        (layout.state / f"try-{number}").mkdir()
    del listed[:]
    jobs = read_jobs(layout)
    assert len(jobs) == 100 and listed == ["ddl"] * 100
    assert len(read_starts(layout)) == 100 and len(listed) == 200
    for job in jobs[-2:]:
        for rank in range(20):
            record(layout, f"try-{job['try']}", rank, host="vm")
    del listed[:]
    *_, before, last = read_jobs(layout)
    assert len(last["ranks"]) == 20 and before["hosts"] == ["vm"]
    assert listed.count("ddl") == 100 and len(listed) == 130
    assert "more than a page looks at" in before["words"]


def test_large_files_are_read_one_after_the_other_and_each_once(layout, monkeypatch):
    """A record of 50 MiB takes 250 MiB while it is read, and eight requests are answered."""
    read, at_once, most = unchanged.read_object, [], []

    def slowly(*words):
        at_once.append(words)
        most.append(len(at_once))
        time.sleep(0.05)
        at_once.pop()
        return read(*words)

    monkeypatch.setattr(unchanged, "read_object", slowly)
    monkeypatch.setattr(unchanged, "_LARGE", 100, raising=False)
    paths = [layout.kept / f"{name}.json" for name in "ab"]
    for path in paths:
        path.write_text(json.dumps({"listing": ["x"] * 100}))
        os.utime(path, (1, 1))
    files = Unchanged()
    readers = [
        threading.Thread(target=files.read, args=(path, layout.workspace, len))
        for path in paths * 4
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert (max(most), files.reads) == (1, 2)


def test_of_what_was_read_the_oldest_is_forgotten_first(layout):
    files = Unchanged(4)
    paths = [layout.state / f"{number}.json" for number in range(5)]
    for path in paths:
        path.write_text("{}")
        os.utime(path, (1, 1))
        files.read(path, layout.workspace, dict)
    for path in paths[1:]:
        files.read(path, layout.workspace, dict)
    assert files.reads == 5


@pytest.mark.parametrize(
    "said",
    [
        *({name: [{}] * 200_000} for name in ("started", "ended", "exit_code")),
        {"preempted": {"step": [{}] * 200_000}, "exit_code": 10**4000},
        {"exception": dict.fromkeys(("t", "line"), [{}] * 100_000)},
        {"exception": {"type": "E", "file": "x" * 400_000, "line": 10**4000, "t": "x" * 400_000}},
    ],
)
def test_ranks_cannot_have_the_server_keep_what_is_long(layout, said):
    """What has not changed is kept for as long as the api-server runs."""
    record(layout, "try-1", 0, host="vm", **said)
    path = layout.state / "try-1" / "rank-0.json"
    os.utime(path, (1, 1))
    files = Unchanged()
    read_jobs(layout, files)
    reads, kept = files.reads, files.read(path, layout.workspace, training._what_counts)
    assert files.reads == reads and len(json.dumps(kept)) < 2000


def test_how_each_rank_spent_its_time(layout):
    ranks = [
        {"rank": 0, "host": "a", "run_s": 10.0, "comm_s": 2.0, "wait_s": 1.5},
        {"rank": 1, "host": "b", "run_s": 10.0, "comm_s": 99.0, "wait_s": -1.0},
    ]
    layout.statistics.write_text(json.dumps({"straggler": {"rank": 0}, "ranks": ranks}))
    told = read_communication(layout)
    assert told["ended"] and told["straggler"] == 0
    seconds = [
        [one[f"{n}_s"] for n in ("computing", "reducing", "waiting")] for one in told["ranks"]
    ]
    assert seconds == [[8.0, 0.5, 1.5], [0.0, 10.0, 0.0]]


def test_how_each_rank_spends_its_time_while_the_job_runs(layout):
    """Of the last job, whose statistics are there when it ends; each rank says it by itself."""
    layout.statistics.write_text("")
    for job, waits in (("try-1", [1.0, 1.0, 1.0]), ("try-2", [3.0, 0.5])):
        for rank in range(3):
            record(layout, job, rank, host=f"gpu0{rank}", started=100.0)
        for rank, wait in enumerate(waits):
            told = {"t": 110.0, "run_s": 10.0, "comm_s": 4.0, "wait_s": wait}
            (layout.state / job / f"rank-{rank}.communication").write_text(json.dumps(told))
    told = read_communication(layout)
    assert not told["ended"] and told["straggler"] == 1
    assert [(one["rank"], one["host"]) for one in told["ranks"]] == [(0, "gpu00"), (1, "gpu01")]
    assert told["ranks"][0] == {
        **{"rank": 0, "host": "gpu00", "run_s": 10.0},
        **{"computing_s": 6.0, "reducing_s": 1.0, "waiting_s": 3.0},
    }


def test_a_rank_that_was_killed_takes_nothing_any_more(layout):
    record(layout, "try-1", 0, host="gpu01", started=100.0)
    usage = {"t": 110.0, "cores": 2.5, "cpu_s": 9.0, "memory": 2, "peak": 3}
    usage |= {"gpu": 97.0, "gpu_average": 88.0, "gpu_memory": 7, "gpu_peak": 8}
    (layout.state / "try-1" / "rank-0.usage").write_text(json.dumps(usage))
    (job,) = read_jobs(layout)
    assert not job["over"] and job["ranks"][0]["usage"]["memory"] == 2
    said = {"step": "train", "try": 1, "error": "JobFailed", "rank": None, "message": "ended"}
    layout.failure.write_text(json.dumps(said))
    (job,) = read_jobs(layout)
    assert job["over"] and job["ranks"][0]["usage"] == {
        **{"cores": 0.9, "memory": None, "peak": 3},
        **{"gpu": 88.0, "gpu_memory": None, "gpu_peak": 8},
    }


def test_checkpoints_are_files_of_the_training(layout):
    for name in ("mnist-50.index", "mnist-50.data-00000-of-00001", "mnist-50.meta", "notes.txt"):
        (layout.result / name).write_bytes(b"x" * 10)
    (layout.checkpoints / "model-3.keras").write_bytes(b"x" * 7)
    (layout.checkpoints / "best.weights.h5").write_bytes(b"x")
    (layout.checkpoints / "best.hdf5").write_bytes(b"x")
    (layout.checkpoints / "at-step_400.keras").write_bytes(b"x")
    (layout.checkpoints / "model-0.25.keras").write_bytes(b"x")  # a loss of 0.25
    (layout.result / "linked-9.keras").symlink_to("/etc/passwd")
    for age, path in enumerate(sorted(layout.root.rglob("*.*"))):
        if not path.is_symlink():
            os.utime(path, (1000 + age, 1000 + age))
    told = {(one["name"], one["step"], one["bytes"]) for one in read_checkpoints(layout, {})}
    assert told == {
        *(("mnist-50", 50, 20), ("at-step_400.keras", 400, 1)),
        # What an epoch or a loss may be is not taken for a step.
        *(("model-3.keras", None, 7), ("model-0.25.keras", None, 1)),
        ("best.weights.h5", None, 1),
        ("best.hdf5", None, 1),
    }


def test_checkpoints_in_an_experiment_with_a_name_are_the_trainings(workspace, client):
    named = kept(workspace, "a", "r", {"state": "running", "step": "train"}, of="shared")

    def listed():
        return [one["name"] for one in client.get("/about/a/r").json()["checkpoints"]]

    claim(workspace, "shared", "a", in_manifest=True)
    named.experiment.mkdir(parents=True)
    (named.experiment / "model-step-5.keras").write_bytes(b"x")
    assert listed() == ["model-step-5.keras"]
    # When it has ended it is what the training left, for others go on.
    named.experiment_copy.mkdir(parents=True)
    (named.experiment_copy / "model-step-9.keras").write_bytes(b"x")
    (named.experiment / "model-step-50.keras").write_bytes(b"x")
    assert listed() == ["model-step-9.keras"]
    shutil.rmtree(named.experiment_copy)
    named.experiment_copy.symlink_to(workspace)
    assert listed() == []


@pytest.mark.parametrize("name", ["others", "..", "a/b", "", 5, ["x"], "x" * 300])
def test_checkpoints_of_anothers_experiment_are_not_shown(workspace, client, name):
    made = kept(workspace, "a", "r", {"state": "running", "step": "train"})
    for dag_id in ("others", "."):
        (workspace / "experiments" / dag_id).mkdir(parents=True, exist_ok=True)
        (workspace / "experiments" / dag_id / "secret.keras").write_bytes(b"x")
    (workspace / "secret.keras").write_bytes(b"x")
    (workspace / "experiments" / ".owners").mkdir()
    (workspace / "experiments" / ".owners" / "others.json").write_text('{"b": true}')
    said = json.loads((made.kept / "record.json").read_text())
    said["run"]["experiment"] = name
    (made.kept / "record.json").write_text(json.dumps(said))
    answer = client.get("/about/a/r")
    assert (answer.status_code, answer.json()["checkpoints"]) == (200, [])


def test_what_made_it_is_told_without_what_is_long():
    told = facts(
        {
            "dataset": {"uri": "s3://b", "fingerprint": "sha256:1", "listing": [1] * 1000},
            "environment": {"launcher": "local", "hosts": ["a"], "other": 1},
            "code": "none",
        }
    )
    assert told == {
        "dataset": {"uri": "s3://b", "fingerprint": "sha256:1"},
        "environment": {"launcher": "local", "hosts": ["a"]},
    }


def test_what_is_long_is_cut_and_what_differs_in_that_still_differs():
    def told(parameters):
        return facts({"run": {"parameters": parameters}})["run"]["parameters"]

    one, other = (told({"text": "x" * 5000 + end})["text"] for end in "ab")
    assert one != other and "5,001 characters" in one and len(one) < 2100
    assert told({"layers": [8] * 1500})["layers"][-1].startswith("… and 500 more (sha256:")
    many, deep = dict.fromkeys(map(str, range(1500)), 1), [[[[{"a": 1}]]]]
    for one, other in (
        ([8] * 1500, [8] * 1499 + [9]),
        (many, many | {"1499": 2}),
        (deep, [[[[{"a": 2}]]]]),
        ({"x" * 300 + "a": 1}, {"x" * 300 + "b": 1}),
    ):
        assert told({"it": one}) == told({"it": one}) != told({"it": other})
    whole = {"text": "x" * 2000, "layers": [8, [9]]}
    assert told(whole) == whole


# --- all of them ----------------------------------------------------------------------------------


def kept(workspace, dag_id, run_id, outcome, of="", **sections):
    from datetime import UTC, datetime

    from ddl_airflow.site import training_of

    made = RunLayout(workspace, dag_id, training_of(dag_id, run_id), of)
    made.create()
    at = datetime(2026, 11, 20, tzinfo=UTC)
    run = Run(dag_id=dag_id, run_id=run_id, type="manual", due=at, started=at)
    for section, said in sections.items():
        write_part(made, section, said)
    keep_so_far(made, run, outcome)
    return made


@pytest.fixture
def trainings(workspace):
    from ddl_airflow.plugin.trainings import Trainings

    known = Trainings()
    return lambda may=lambda asked: set(asked): known.read(workspace, may)[0]


def test_a_line_for_each_training_that_may_be_read(workspace, trainings):
    assert trainings() == []
    done = {"metrics": {"loss": 0.5}, "goodput": {"held_s": 9.5, "steps_per_held_s": 40.0}}
    of = {"dataset": {"uri": "s3://b/d", "fingerprint": "sha256:1", "listing": []}}
    publication = {"state": "published", "step": "upload_results", "publication": "file:///r/t/c"}
    kept(workspace, "a", "one", publication, stage_data=of, train={"result": done})
    failed = kept(workspace, "b", "two", {"state": "failed", "step": "train", "error": "JobFailed"})
    fail(failed, "rank 1 on vm raised ValueError at train.py:5: no.")
    (workspace / "runs" / "a" / "odd").mkdir()
    lines = {line["dag_id"]: line for line in trainings()}
    assert set(lines) == {"a", "b"}
    assert (lines["a"]["state"], lines["a"]["metrics"]) == ("published", {"loss": 0.5})
    assert (lines["a"]["held_s"], lines["a"]["steps_per_s"]) == (9.5, 40.0)
    assert lines["a"]["facts"]["dataset"]["fingerprint"] == "sha256:1"
    assert lines["b"]["failure"] == "rank 1 on vm raised ValueError at train.py:5: no."
    assert [line["dag_id"] for line in trainings(lambda asked: {"b", "c"})] == ["b"]
    # What changes is read again.
    failed.failure.unlink()
    kept(workspace, "b", "two", {"state": "running", "step": "train"})
    assert {line["dag_id"]: line["state"] for line in trainings()}["b"] == "running"
    assert {line["dag_id"]: line["failure"] for line in trainings()}["b"] is None


def by_hand(workspace, run_id, **outcome):
    """A run of ``ddl-airflow run`` as its record has it, all of whose files are a day old."""
    made = kept(workspace, "digits", run_id, {"state": "running", "step": "train"} | outcome)
    path = made.kept / "record.json"
    said = json.loads(path.read_text())
    said["run"]["type"] = "by_hand"
    path.write_text(json.dumps(said))
    made.heartbeat.touch()
    progress(made, {"t": 1.0, "step": 5, "steps": 10})
    for one in (path, made.heartbeat, made.progress):
        os.utime(one, (A_DAY_AGO, A_DAY_AGO))
    return made


def test_a_run_without_airflow_that_was_killed_is_not_said_to_run(workspace, client):
    """No task of Airflow's stands for it: its record would say for ever that it runs."""
    killed = by_hand(workspace, "killed", at_work=True)
    by_hand(workspace, "one-step")  # that alone was asked for, and has ended
    by_hand(workspace, "failed", state="failed", at_work=True)
    scheduled = by_hand(workspace, "submitted", at_work=True)  # its ranks run elsewhere
    os.utime(scheduled.progress)
    running = kept(workspace, "digits", "airflow's", {"state": "running", "step": "train"})
    os.utime(running.kept / "record.json", (A_DAY_AGO, A_DAY_AGO))

    def states():
        told = {}
        for line in client.get("/trainings").json()["trainings"]:
            about = client.get(f"/about/digits/{line['run_id']}").json()
            run = client.get(f"/graph/digits/{line['run_id']}").json()["nodes"][-1]
            shown = {line["state"], about["state"], dict(run["facts"])["state"]}
            assert line["signed"] == about["signed"]
            assert line["signed"] in (None, pytest.approx(A_DAY_AGO, abs=1))
            told[line["run_id"]] = shown.pop() if not shown - {line["state"]} else shown
        return told

    expected = {
        **{"killed": "no_sign_of_life", "one-step": "ended", "failed": "failed"},
        **{"submitted": "running", "airflow's": "running"},
    }
    assert states() == expected
    # It was its host that was away, or somebody goes on with it.
    os.utime(killed.heartbeat)
    assert states() == expected | {"killed": "running"}
    os.utime(killed.heartbeat, (A_DAY_AGO, A_DAY_AGO))
    assert states() == expected


def test_the_metric_of_a_line_is_the_one_of_the_page(workspace, trainings):
    """What the sample says of a name goes before what the training did."""
    known = {"metric": "accuracy", "value": 0.99, "source": "training"}
    trained = {"metrics": {"accuracy": 0.99}, "measurements": [known]}
    formed = {"accuracy": 0.5, "sample": "x.npz", "rows": 8}
    sections = {"train": {"result": trained}, "transform": {"result": formed}}
    made = kept(workspace, "a", "one", {"state": "published"}, **sections)
    assert [line["metrics"] for line in trainings()] == [{"accuracy": 0.5}]
    assert read_measurements(made, training.read_record(made))[0]["value"] == 0.5
    # As an earlier version of ours wrote it.
    path = made.kept / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"result": trained | formed}))
    assert [line["metrics"] for line in trainings()] == [{"accuracy": 0.5}]


def test_the_list_of_streamed_data_is_not_read_for_what_was_measured(
    workspace, client, monkeypatch
):
    """It may be of millions of objects, and the page asks every 2 seconds."""
    listing = [{"key": f"{n}.png", "size": 1} for n in range(1000)]
    loss = {"metric": "loss", "value": 0.5, "source": "training"}
    trained = {"metrics": {"loss": 0.5}, "measurements": [loss]}
    sections = {
        "train": {"dataset": {"listing": listing}, "result": trained},
        "transform": {"result": {"accuracy": 0.75, "sample": "x.npz", "rows": 8}},
    }
    made = kept(workspace, "a", "r", {"state": "running", "step": "transform"}, **sections)
    path = made.kept / "lineage" / "train.json"
    os.utime(path, (1, 1))
    read, looked = unchanged.read_object, []

    def counted(path, *limits):
        looked.extend([path] if path.name == "train.json" else [])
        return read(path, *limits)

    for module in (training, unchanged, sys.modules[write_part.__module__]):
        monkeypatch.setattr(module, "read_object", counted)

    def values():
        told = client.get("/about/a/r").json()["measurements"]
        return {one["metric"]: one["value"] for one in told}

    assert values() == values() == {"loss": 0.5, "accuracy": 0.75}
    assert looked == []
    # What evaluate said of it before it began again is in the record until it has ended.
    path_of_record = made.kept / "record.json"
    whole = json.loads(path_of_record.read_text())
    whole["result"]["measurements"].append({"metric": "f1", "value": 1.0, "source": "command"})
    path_of_record.write_text(json.dumps(whole))
    assert values() == {"loss": 0.5, "accuracy": 0.75}
    # An earlier version of ours kept no record so far.
    path_of_record.unlink()
    assert values() == values() == {"loss": 0.5, "accuracy": 0.75}
    assert looked == [path]
    # Of what is larger still nothing is shown.
    monkeypatch.setattr(training, "_MOST_OF_LINEAGE", 1000)
    path.write_text(path.read_text() + " ")
    assert values() == {}
    drop_parts(made, "train")
    assert values() == {}


@pytest.fixture
def client(workspace, monkeypatch):
    """Asks the plugin's app, as who may read all; what it does not answer raises."""
    from fastapi.testclient import TestClient

    from ddl_airflow.plugin import api

    monkeypatch.setattr(api, "readers_of_task_logs", lambda: lambda: None)
    monkeypatch.setattr(api, "rights_over_dag", lambda: lambda: {})
    monkeypatch.setattr(api, "readers_among_dags", lambda: lambda: lambda asked: set(asked))
    return TestClient(api.app())


def test_a_training_that_cannot_be_read_takes_none_of_the_others(workspace, client, monkeypatch):
    """Its files are another user's, or the file system has lost them."""
    from ddl_airflow.plugin import curves, logs, trainings

    made = [kept(workspace, name, "r", {"state": "running", "step": "train"}) for name in "ab"]
    for layout in made:
        progress(layout, {"t": 1.0, "step": 1, "steps": 4, "loss": 0.5})
        (layout.logs / "rank-0.log").write_text("said")

    def lost(path, *more):
        if path.is_relative_to(made[1].root):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return open_beneath(path, *more)

    for module in (training, curves, logs):
        monkeypatch.setattr(module, "open_beneath", lost)
    lines = client.get("/trainings").json()["trainings"]
    assert {one["dag_id"]: one["pace"]["step"] for one in lines} == {"a": 1, "b": None}
    assert client.get("/about/b/r").json()["pace"]["step"] is None
    known = client.get("/curves/a/r").json()["cursor"]
    told = client.get(f"/curves/b/r?cursor={known}").json()
    assert (told["curves"], told["cursor"], told["again"]) == ([], known, False)
    answer = client.get("/log-part/0/b/r")
    assert answer.status_code == 503 and "Stale file handle" in answer.json()["detail"]
    # Whatever it is that is wrong with one.
    read = trainings._read_line
    monkeypatch.setattr(trainings, "_read_line", lambda of: 1 / (of.dag_id != "b") and read(of))
    made[1].failure.write_text("{}")
    lines = client.get("/trainings").json()["trainings"]
    assert [one["dag_id"] for one in lines] == ["a"]


def test_what_is_kept_of_trainings_has_an_end(workspace, monkeypatch):
    """Of those of a few DAGs, the last that somebody looked at: an api-server runs for months."""
    from ddl_airflow.plugin import trainings as listed

    monkeypatch.setattr(listed, "_MOST_KNOWN", 3, raising=False)
    read, reads = listed._read_line, []
    monkeypatch.setattr(
        listed, "_read_line", lambda one: reads.append(one.training_id) or read(one)
    )
    for dag_id in ("one", "two", "three"):
        for run_id in ("a", "b"):
            kept(workspace, dag_id, run_id, {"state": "published"})
    known = listed.Trainings()

    def look(dag_id):
        reads.clear()
        lines, _ = known.read(workspace, set, dag_id)
        assert {one["run_id"] for one in lines} == {"a", "b"}
        return len(reads)

    assert [look("one"), look("one"), look("two"), look("two")] == [2, 0, 2, 0]
    assert look("three") == 2 and look("one") == 2 and look("one") == 0
    assert len(known._known) <= 3


def test_the_trainings_of_a_dag_are_not_cut_for_those_of_others(workspace, client, monkeypatch):
    from ddl_airflow.plugin import trainings

    monkeypatch.setattr(trainings, "_MOST", 3)
    of = {"code": {"digest": "c", "files": ["train.py"] * 1000}}
    ranks = {"environment": {"launcher": "ssh", "settings": {"A": "1"}, "versions": {"keras": "3"}}}
    old = kept(workspace, "weekly", "old", {"state": "published"}, stage_data=of, train=ranks)
    os.utime(old.kept, (1, 1))
    for number in range(5):
        kept(workspace, "sweep", f"r{number}", {"state": "published"})
    whole = client.get("/trainings").json()
    assert {line["dag_id"] for line in whole["trainings"]} == {"sweep"}
    assert (len(whole["trainings"]), whole["left_out"]) == (3, 3)
    answer = client.get("/trainings?dag_id=weekly").json()
    (line,) = answer["trainings"]
    assert (line["run_id"], answer["left_out"]) == ("old", 0)
    # What the table does not show is not sent for each of them.
    assert line["facts"] == {"code": {"digest": "c"}}
    assert client.get("/trainings?dag_id=..").json()["trainings"] == []


def test_where_there_is_no_workspace_it_is_said(workspace, client):
    workspace.mkdir(exist_ok=True)
    assert client.get("/trainings").json()["no_workspace"] == ""
    workspace.rmdir()
    for path in ("/trainings", "/about/digits/run"):
        said = client.get(path).json()["no_workspace"]
        assert str(workspace) in said and "[ddl] workspace" in said


def test_a_passing_error_of_a_record_shows_nothing_that_was_before(
    workspace, client, trainings, monkeypatch
):
    made = kept(workspace, "a", "r", {"state": "failed", "step": "train"})
    whole = json.loads((made.kept / "record.json").read_text())
    del whole["outcome"]
    (made.kept / "lineage.json").write_text(json.dumps(whole))
    read, stale = training.read_object, [True]

    def passing(path, *limits):
        if path.name == "record.json" and stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path, *limits)

    monkeypatch.setattr(training, "read_object", passing)
    assert trainings() == []
    said = client.get("/about/a/r")
    assert said.status_code == 503 and "record.json" in said.json()["detail"]
    stale.clear()
    assert [line["state"] for line in trainings()] == ["failed"]
    assert client.get("/about/a/r").json()["state"] == "failed"


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *(("a field", value) for value in NONSENSE),
        *(("a section", value) for value in NONSENSE[6:15]),
        *(("what is in a field", value) for value in NONSENSE[:13]),
    ],
    ids=lambda one: one[:20],
)
def test_a_training_that_says_nonsense_takes_none_of_the_others(workspace, client, what, value):
    kept(workspace, "a", "r", {"state": "running", "step": "train"})
    of = {"dataset": {"listing": []}}
    made = kept(workspace, "b", "r", {"state": "running"}, stage_data=of, train={"result": {}})
    write_nonsense(made, what, value)
    lines = client.get("/trainings").json()["trainings"]
    said = {one["dag_id"]: one for one in lines}
    assert said["a"]["state"] == "running"
    # Of the types that the page knows, whatever it is.
    if line := said.get("b"):
        assert {type(line[name]) for name in ("run_id", "state", "step")} == {str}
        assert isinstance(line["started"], str | None)
        assert all(isinstance(one, str) for of in line["facts"].values() for one in of.values())
        assert all(isinstance(one, int | float | str) for one in line["metrics"].values())
        assert len(json.dumps(line)) < 20_000
    for path in ("about", "graph", "curves"):
        answer = client.get(f"/{path}/b/r")
        assert answer.status_code == 200, (path, answer.text)
        assert len(answer.content) < 2_000_000
    about = client.get("/about/b/r").json()
    assert isinstance(about["state"], str)
    assert all(isinstance(one, dict) for one in about["facts"].values())
    nodes = client.get("/graph/b/r").json()["nodes"]
    assert {type(one["title"]) for one in nodes} == {str}


def test_a_pointer_that_is_damaged_is_not_known_until_it_is_mended(tmp_path, monkeypatch):
    from ddl_airflow.lineage.production import PRODUCTION, point
    from ddl_airflow.plugin import graph
    from ddl_airflow.storage.stores import open_store

    monkeypatch.setattr(graph, "_FRESH_S", 0.0)
    name = f"t-one/{'0' * 16}-{'1' * 8}"
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "_SUCCESS").write_text("{}")
    point(open_store(tmp_path.as_uri()), "digits", PRODUCTION, name, {"loss": 1.0})
    pointer = tmp_path / "digits" / f"{PRODUCTION}.json"
    sound = pointer.read_text()
    known, place = graph.Pointers(), {"uri": tmp_path.as_uri()}

    def told():
        return known.read(place, "digits", patience_s=60)

    assert told()["production"]["publication"] == name
    pointer.write_text(json.dumps(json.loads(sound) | {"history": {"0": 1}}))
    assert "does not say" in told()["unknown"] and "does not say" in told()["unknown"]
    pointer.write_text(sound)
    assert told()["production"]["publication"] == name


def test_who_is_in_production_is_what_the_pointer_says(workspace, tmp_path, client):
    from ddl_airflow.lineage.production import LATEST, PRODUCTION, point
    from ddl_airflow.storage.stores import open_store

    results = tmp_path / "results"
    store = open_store(results.as_uri())
    for run in ("one", "two"):
        name = f"t-{run}/{'0' * 16}-{'1' * 8}"
        (results / name).mkdir(parents=True)
        (results / name / "_SUCCESS").write_text("{}")
        outcome = {"state": "published", "step": "upload_results"}
        place = {"publication": f"{results.as_uri()}/{name}", "results": {"uri": results.as_uri()}}
        kept(workspace, "digits", run, outcome | place)
        for pointer in (LATEST, PRODUCTION)[: 2 if run == "one" else 1]:
            point(store, "digits", pointer, name, {"loss": 1.0})

    def in_production():
        lines = client.get("/trainings").json()["trainings"]
        return {line["run_id"]: line["production"] for line in lines}

    until(lambda: None not in in_production().values(), 20)
    assert in_production() == {"one": True, "two": False}
    graph = client.get("/graph/digits/one").json()
    kinds = {node["id"]: node["kind"] for node in graph["nodes"]}
    assert kinds == {"run": "run", "model": "model", "production": "pointer", "latest": "pointer"}
    assert graph["edges"] == [["run", "model"], ["model", "production"]]
    edges = client.get("/graph/digits/two").json()["edges"]
    assert edges == [["run", "model"], ["model", "latest"]]
    assert graph["production"]["publication"].startswith("t-one/")


def test_a_store_that_is_away_delays_and_hides_no_other(workspace, client, monkeypatch):
    from ddl_airflow.plugin import graph

    back, reading = threading.Event(), []

    def read(uri, conn_id, dag_id):
        if uri != "file:///srv/near/published":
            reading.append(dag_id)
            back.wait(60)
        return {"production": {"publication": "t-one/1"}, "latest": None}

    monkeypatch.setattr(graph, "_read", read)

    def published(dag_id, results):
        place = {"publication": f"{results['uri']}/t-one/1", "results": results}
        kept(workspace, dag_id, "one", {"state": "published", "step": "upload_results"} | place)

    def in_production():
        lines = client.get("/trainings").json()["trainings"]
        return {line["dag_id"]: line["production"] for line in lines}

    published("near", {"uri": "file:///srv/near/published"})
    for number in range(10):
        published(f"folder-{number}", {"uri": f"file:///mnt/away/{number}/published"})
        published(f"bucket-{number}", {"uri": f"s3://away/{number}", "conn_id": "s3"})
    try:
        began = time.monotonic()
        in_production()
        assert time.monotonic() - began < within(2)
        until(lambda: in_production()["near"], 20)
        assert len(reading) == 4  # two of each store
        assert [told for told in in_production().values() if told is not None] == [True]
    finally:
        back.set()
    until(lambda: set(in_production().values()) == {True}, 20)


def test_after_a_decision_the_stores_of_its_dag_alone_are_asked_anew(
    workspace, tmp_path, client, monkeypatch
):
    """A page could have all stores asked again and again, for everybody."""
    from ddl_airflow.plugin import graph

    asked = []

    def read(uri, conn_id, dag_id):
        asked.append(dag_id)
        return {"production": None, "latest": None}

    monkeypatch.setattr(graph, "_read", read)
    for dag_id in ("digits", "letters"):
        place = {"publication": f"file:///r/{dag_id}/c", "results": {"uri": "file:///r"}}
        kept(workspace, dag_id, "one", {"state": "published", "step": "upload_results"} | place)

    def asks(*paths):
        asked.clear()
        for path in paths:
            assert client.get(path).json()["unknown"] == ""
        return sorted(asked)

    both = ("/graph/digits/one", "/graph/letters/one")
    assert asks(*both) == ["digits", "letters"] and asks(*both) == []
    assert asks("/graph/digits/one?fresh=true", *both) == ["digits"]


def tags_of(answer):
    return "".join(tag for _, tag, _ in answer.json()["parts"])


def test_of_a_list_what_has_changed_is_sent_again(workspace, client):
    """A page asks every 2 seconds, and of 2000 trainings that is megabytes."""
    runs = [f"r{number}" for number in range(200)]
    made = {run: kept(workspace, "digits", run, {"state": "failed"}) for run in runs}
    first = client.get("/trainings")
    known = tags_of(first)
    assert {line["run_id"] for line in first.json()["trainings"]} == set(runs)
    assert first.headers["Cache-Control"] == "no-cache"

    def news(of="", known=known):
        said = client.get(f"/trainings{of}", headers={"DDL-Known-Parts": known}).json()
        assert sum(many for *_, many in said["parts"]) == len(said["trainings"])
        return {line["run_id"] for line in said["trainings"]}

    assert news() == set()
    fail(made["r7"], "rank 1 on vm raised ValueError at train.py:5: no.")
    assert "r7" in news() and len(news()) < 10
    kept(workspace, "digits", "new", {"state": "failed", "step": "train"})
    assert {"r7", "new"} <= news() and len(news()) < 20
    shutil.rmtree(made["r9"].root)
    parts = client.get("/trainings", headers={"DDL-Known-Parts": known}).json()["parts"]
    assert 1 <= len(parts) <= 3 and "r9" not in news()
    # Of a page of an earlier version of ours, of another DAG's, or of nonsense: all.
    for other in ("", "x" * 3, known[::-1]):
        assert len(news(known=other)) == 200
    assert news("?dag_id=others") == set()


def test_a_list_that_has_not_changed_costs_little(workspace, client, monkeypatch):
    """Of 2000 trainings it took a fifth of a second of each poll of each page."""
    from ddl_airflow.plugin import trainings as listed

    made = [kept(workspace, "digits", f"r{n}", {"state": "published"}) for n in range(20)]
    for one in made:
        os.utime(one.kept, (1000, 1000))
    runs = kept(workspace, "digits", "runs", {"state": "running", "step": "train"})
    first = client.get("/trainings")
    looked, written = [], []
    stamp, sendable = listed._stamp, listed.sendable
    monkeypatch.setattr(listed, "_stamp", lambda path: looked.append(str(path)) or stamp(path))
    monkeypatch.setattr(listed, "sendable", lambda one: written.append(one) or sendable(one))

    def poll():
        looked.clear(), written.clear()
        return client.get("/trainings", headers={"DDL-Known-Parts": tags_of(first)})

    assert poll().json()["trainings"] == []
    assert {path.split("/")[-3] for path in looked} == {runs.training_id} and written == []
    # Only what has changed is made again.
    fail(made[3], "rank 1 on vm raised ValueError at train.py:5: no.")
    lines = poll().json()["trainings"]
    assert [line["failure"] for line in lines if line["run_id"] == "r3"] != [None]
    assert [line["run_id"] for line in written] == ["r3"]
    progress(runs, {"t": 5.0, "step": 7})
    lines = poll().json()["trainings"]
    assert [line["pace"]["step"] for line in lines if line["run_id"] == "runs"] == [7]
    assert [line["run_id"] for line in written] == ["runs"]


def test_a_list_says_what_changed_within_the_grain_of_a_clock(workspace, client):
    """The folder's time may be the same as before it."""
    made = kept(workspace, "digits", "one", {"state": "failed", "step": "train"})
    at = os.stat(made.kept).st_mtime_ns
    assert client.get("/trainings").json()["trainings"][0]["failure"] is None
    fail(made, "rank 1 on vm raised ValueError at train.py:5: no.")
    os.utime(made.kept, ns=(at, at))
    assert client.get("/trainings").json()["trainings"][0]["failure"] is not None


def test_whose_pointer_is_not_known_is_said(layout):
    from ddl_airflow.plugin.graph import Pointers, read_graph

    known = Pointers()
    place = {"uri": "s3://nowhere", "endpoint_url": "https://127.0.0.1:1"}
    assert "conn_id" in known.read(place, "digits")["unknown"]
    assert "unknown" in known.read(None, "digits")
    slow = known.read({"uri": "none://slow"}, "digits", patience_s=0)
    assert slow.get("pending") or "does not say" in slow["unknown"]
    assert "unknown" in known.read({"uri": "none://x"}, "digits", patience_s=20)
    graph = read_graph(layout, known)
    assert [node["id"] for node in graph["nodes"]] == ["run"] and graph["edges"] == []


def test_what_a_store_said_stays_while_it_is_asked_again(monkeypatch):
    from ddl_airflow.plugin import graph

    asked, answers = [], threading.Event()

    def slow(uri, *_):
        if uri != "s3://asked-again":  # of another test's, whose question has waited
            return {}
        asked.append(uri)
        if len(asked) > 1:
            answers.wait(60)
        return {"production": {"publication": f"t/{len(asked)}"}}

    monkeypatch.setattr(graph, "_read", slow)
    monkeypatch.setattr(graph, "_FRESH_S", 0.0)
    known, place = graph.Pointers(), {"uri": "s3://asked-again", "conn_id": "s3"}
    assert known.read(place, "digits", patience_s=60)["production"]["publication"] == "t/1"
    assert known.read(place, "digits", patience_s=0)["production"]["publication"] == "t/1"
    until(lambda: len(asked) == 2, 20)
    monkeypatch.setattr(graph, "_STALE_S", 0.0)
    assert known.read(place, "digits", patience_s=0)["pending"]
    monkeypatch.setattr(graph, "_FRESH_S", 60.0)
    answers.set()
    assert known.read(place, "digits", patience_s=60)["production"]["publication"] == "t/2"
