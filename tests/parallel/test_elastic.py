"""Elastic states of scripts for Horovod: what is committed outlives the job. Real ranks."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ddl_airflow.core.job import JobState
from tests.limits import output, until, within
from tests.parallel.conftest import HOROVOD_PATHS, SCRIPTS, rank_environment
from tests.parallel.test_preemption import Training


def test_a_script_goes_on_from_its_last_commit_in_each_start_of_the_job(
    mpirun, run_command, tmp_path: Path
):
    training = Training(run_command, tmp_path / "run", 2, "phases", script="elastic.py")
    asked = training.job(0)
    # Asked at step 5, and committed by all at step 6, where they ask each other for the 4th time.
    assert (asked.state, asked.step) == (JobState.PREEMPTED, 4), training.said
    assert training.steps() == [1, 2, 3, 4, 5, 6]
    lost = training.job(1)
    assert lost.state is JobState.FAILED, training.said
    assert training.steps()[6:] == [7, 8, 101, 102, 103, 104, 105]
    assert training.job(2).state is JobState.SUCCEEDED, training.said
    # The second epoch was not committed, and is done again. Nothing else is.
    assert training.steps()[13:] == [104, 105, 106, 107, 108, 109], training.said
    assert training.said.count(": the weights are the same\n") == 2
    left = numbers(training.folder / "checkpoints")
    assert sorted(left.values()) == [[2, 3], [5, 6]], left


def test_a_state_of_a_session(run_alone, tmp_path: Path):
    done = run_alone(
        *("elastic.py", "session", str(tmp_path)),
        CHECKPOINT_DIR=str(tmp_path),
        PYTHONPATH=HOROVOD_PATHS,
    )
    assert done.returncode == 0 and "gone on\n" in done.output, done.output
    (left,) = numbers(tmp_path).values()
    assert left == [1, 2]


@pytest.mark.parametrize("keras", ["3", "2"])
def test_an_optimizer_of_some_weights_or_in_another_order_goes_on(
    run_alone, tmp_path: Path, keras: str
):
    if keras == "2" and importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras not installed: pip install -r requirements/legacy.txt")
    done = run_alone(
        *("elastic.py", "optimizers", str(tmp_path)),
        PYTHONPATH=HOROVOD_PATHS,
        TF_USE_LEGACY_KERAS=str(int(keras == "2")),
    )
    assert done.returncode == 0, done.output
    unfit = "hvd.elastic: the optimizer trains variables that are no weights of the state's model"
    # When it is committed, and when it is to be gone on from; where that is done, in both starts.
    assert done.output.count(unfit) == 4, done.output
    assert done.output.count("No later start will go on from what is committed.") == 1
    without = "The next start goes on without the values of those variables."
    assert done.output.count(without) == 2, done.output


def test_a_state_goes_on_where_rank_0_alone_has_its_optimizers_variables(run_ranks, tmp_path: Path):
    done = run_ranks(
        *("elastic.py", 2, "ahead", str(tmp_path)),
        CHECKPOINT_DIR=str(tmp_path),
        PYTHONPATH=HOROVOD_PATHS,
    )
    assert done.returncode == 0 and done.output.count("gone on\n") == 2, done.output


@pytest.mark.parametrize(
    "way", ["joins-session", "joins-inline", "joins-eagerly", "joins-function"]
)
def test_a_rank_that_has_joined_in_a_graph_makes_room_with_the_others(
    mpirun, run_command, tmp_path: Path, way: str
):
    training = Training(run_command, tmp_path / "run", 2, way, script="elastic.py")
    asked = training.job(0)
    assert (asked.state, asked.step) == (JobState.PREEMPTED, 4), training.said
    assert "the op has failed" not in training.said
    assert training.job(1).state is JobState.SUCCEEDED, training.said
    assert training.steps() == [1, 2, 3, 4, 5, 6], training.said


def numbers(folder: Path) -> dict[str, list[int]]:
    """Of the commits there, which are all that is there, by state."""
    found: dict[str, list[int]] = {}
    for path in folder.iterdir():
        _, state, number = path.stem.split("-")
        found.setdefault(state, []).append(int(number))
    return {state: sorted(numbers) for state, numbers in found.items()}


def horovodrun(
    folder: Path, *words: str, script: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen[str]:
    """Starts it; by default for twelve steps of restarts.py."""
    (folder / "told").touch()
    call = [sys.executable, "-c", "from ddl_ops.horovodrun import main; raise SystemExit(main())"]
    return subprocess.Popen(
        [*call, *words, *(script or python("restarts.py", str(folder), "12"))],
        cwd=folder,
        env=rank_environment() | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def python(name: str, *words: str) -> tuple[str, ...]:
    return ("python", str(SCRIPTS / name), *words)


def told(process: subprocess.Popen[str], folder: Path) -> tuple[str, list[str]]:
    """What it has said, and what its ranks have, when all has ended well."""
    out, err = output(process, 90)
    assert process.returncode == 0, out + err
    return out + err, (folder / "told").read_text().splitlines()


def steps(*numbers: int) -> list[str]:
    return [f"step {number}" for number in numbers]


def test_horovodrun_starts_again_where_ranks_are_lost_and_where_slots_come(mpirun, tmp_path: Path):
    """A rank is killed; then the host has another slot; then the training goes to its end."""
    here = os.uname().nodename[:16]
    (tmp_path / "5").write_text("1")
    (tmp_path / "9").write_text("wait")
    (tmp_path / "slots").write_text("localhost:2\n")
    script = f"cat {tmp_path}/slots"
    words = ("-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", script)
    process = horovodrun(tmp_path, *words, "--output-filename", "out")
    place = tmp_path / "told"
    until(lambda: "step 9" in place.read_text() or process.poll() is not None, 90)
    (tmp_path / "slots").write_text("localhost:4\n")
    out, err = output(process, 90)
    assert process.returncode == 0, err
    assert place.read_text().splitlines() == [
        f"begin 0 2 {here},{here}",
        *steps(1, 2, 3, 4, 5),
        f"begin 4 2 {here},{here}",  # the fifth had not been committed
        *steps(5, 6, 7, 8, 9, 10),
        f"begin 10 3 {here},{here},{here}",
        *steps(11, 12),
        "end 12 3",
    ]
    assert "rank 1 of 2 on" in err and "was ended by SIGKILL" in err
    assert "ddl-run: Hosts have come or gone; all ranks have committed. Starts again (2).\n" in err
    assert "ddl-run: 3 ranks on localhost:3.\n" in err
    made_room = "ddl: asked to make room: saved after step 5, all ranks end"
    assert f"[rank 0] {made_room}\n" in out
    assert (tmp_path / "out" / "rank.0" / "stdout").read_text().splitlines() == [made_room]
    assert not (tmp_path / ".ddl-run").exists()


def test_what_was_committed_stays_where_it_may_not_start_again(mpirun, tmp_path: Path):
    (tmp_path / "3").write_text("0")
    process = horovodrun(tmp_path, *("-np", "2", "--min-np", "2", "--reset-limit", "0"))
    _, err = output(process, 90)
    assert process.returncode == 128 + 9
    *_, limit, kept = err.splitlines()
    assert limit == (
        "ddl-run: It has started again as often as --reset-limit 0 allows. Not started again."
    )
    (folder,) = (tmp_path / ".ddl-run").iterdir()
    assert kept == f"ddl-run: To go on from what was committed, set CHECKPOINT_DIR={folder}."
    again = horovodrun(tmp_path, "-np", "1", CHECKPOINT_DIR=str(folder))
    _, err = output(again, 90)
    assert again.returncode == 0, err
    lines = (tmp_path / "told").read_text().splitlines()
    assert lines[4].startswith("begin 2 1 ") and lines[-1] == "end 12 1", lines


@pytest.mark.parametrize("again", [True, False], ids=["min-np", "plain"])
def test_no_stage_of_a_command_goes_on_from_another_one(mpirun, tmp_path: Path, again: bool):
    stages = (python("stages.py", str(tmp_path), "stage", name) for name in ("first", "second"))
    command = ("sh", "-c", " && ".join(map(shlex.join, stages)))
    folder = {} if again else {"CHECKPOINT_DIR": str(tmp_path / "commits")}
    flags = ("-np", "2", *(("--min-np", "2") if again else ()))
    said, begins = told(horovodrun(tmp_path, *flags, script=command, **folder), tmp_path)
    assert begins == ["first 0", "second 0"], said
    assert "begins anew: " in said and "of another script, or with other arguments\n" in said


@pytest.mark.parametrize(
    ("way", "killed", "begins"),
    [
        ("skips", "finetune", ["pretrain 0", "finetune 0", "finetune 1"]),
        (
            *("shared", "finetune"),
            ["pretrain 0", "finetune 0", "pretrain 3", "finetune 1", "finetune 3"],
        ),
        ("folds", "fold-1", ["fold-0 0", "fold-1 0", "fold-0 3", "fold-1 1", "fold-2 0"]),
    ],
)
def test_each_state_of_a_script_goes_on_from_its_own(
    mpirun, tmp_path: Path, way: str, killed: str, begins: list[str]
):
    (tmp_path / "kill").write_text(killed)
    script = python("stages.py", str(tmp_path), way)
    process = horovodrun(tmp_path, "-np", "2", "--min-np", "2", script=script)
    said, begun = told(process, tmp_path)
    assert begun == begins, said
    assert "begins anew" not in said


def test_rank_0_trains_with_the_objects_of_the_script(mpirun, tmp_path: Path):
    script = python("stages.py", str(tmp_path), "alias")
    said, (losses,) = told(horovodrun(tmp_path, "-np", "2", script=script), tmp_path)
    assert losses == "[0, 1, 2]", said


@pytest.mark.parametrize(
    ("first", "second"),
    [("min-np", "plain"), ("plain", "min-np"), ("plain", "plain")],
)
def test_a_second_job_does_not_commit_where_one_does(
    mpirun, tmp_path: Path, first: str, second: str
):
    (tmp_path / "wait").touch()
    flags = {"plain": ("-np", "1"), "min-np": ("-np", "1", "--min-np", "1")}
    commits = {"CHECKPOINT_DIR": str(tmp_path / "commits")}
    script = python("stages.py", str(tmp_path), "stage", "one")
    running = horovodrun(tmp_path, *flags[first], script=script, **commits)
    until(lambda: (tmp_path / "told").read_text() or running.poll() is not None, 90)
    refused = horovodrun(tmp_path, *flags[second], script=script, **commits)
    out, err = output(refused, 90)
    assert refused.returncode, out + err
    assert f"another job commits in {tmp_path}/commits: process " in out + err
    assert f" on {os.uname().nodename}. Give each job a CHECKPOINT_DIR of its own" in out + err
    (tmp_path / "wait").unlink()
    said, begun = told(running, tmp_path)
    assert begun == ["one 0"], said
    assert [*numbers(tmp_path / "commits").values()] == [[2, 3]]


def test_a_try_of_a_manifest_waits_for_no_rank_that_is_cut_off(mpirun, tmp_path: Path):
    (tmp_path / "commits").mkdir()
    script = python("stages.py", str(tmp_path), "stage", "one")
    job = {"CHECKPOINT_DIR": str(tmp_path / "commits"), "DDL_JOB_ID": "t/train-2"}
    with (tmp_path / "commits" / ".horovod-lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said, begun = told(horovodrun(tmp_path, "-np", "1", script=script, **job), tmp_path)
    assert begun == ["one 0"], said


def test_what_fails_in_the_same_way_again_and_again_is_not_started_for_ever(mpirun, tmp_path: Path):
    script = python("stages.py", str(tmp_path), "fails")
    process = horovodrun(tmp_path, "-np", "2", "--min-np", "2", script=script)
    _, err = output(process, 90)
    assert process.returncode == 1, err
    *_, why, kept = err.splitlines()
    assert why == (
        "ddl-run: 3 starts in a row have failed in this way, which only --reset-limit TIMES "
        "allows. Not started again."
    )
    assert kept.startswith("ddl-run: To go on from what was committed, set CHECKPOINT_DIR=")
    assert (tmp_path / "told").read_text().split() == ["all", "0", "all", "3", "all", "3"]


@pytest.mark.parametrize(
    ("way", "left", "starts"), [("logs", "train.log", 3), ("saves", "model.ckpt-0.index", 4)]
)
def test_a_script_that_gets_no_further_is_not_started_for_ever(
    mpirun, tmp_path: Path, way: str, left: str, starts: int
):
    """It writes to its log, or saves the step at which it begins, and is lost."""
    script = python("stages.py", str(tmp_path), way)
    folder = {"CHECKPOINT_DIR": str(tmp_path / "commits")}
    words = ("-np", "1", "--min-np", "1", "--reset-limit", "5")
    process = horovodrun(tmp_path, *words, script=script, **folder)
    _, err = output(process, 90)
    assert process.returncode == 128 + 9, err
    assert f"Starts again ({starts - 1})." in err and f"Starts again ({starts})." not in err, err
    assert err.splitlines()[-1] == (
        "ddl-run: 3 starts in a row have committed nothing. Not started again."
    )
    assert (tmp_path / "commits" / left).exists()


@pytest.mark.parametrize(
    ("way", "flags"), [("fails", ("--reset-limit", "4")), ("exits", ())], ids=["limit", "exit-code"]
)
def test_what_may_get_on_is_started_as_often_as_it_is_asked_for(
    mpirun, tmp_path: Path, way: str, flags: tuple[str, ...]
):
    """A rank that raises, where a limit is given; and one that ends without saying why."""
    script = python("stages.py", str(tmp_path), way)
    process = horovodrun(tmp_path, *("-np", "2", "--min-np", "2", *flags), script=script)
    _, err = output(process, 120)
    assert "Starts again (4)." in err, err
    assert process.returncode == (1 if flags else 0), err


def test_a_folder_that_the_script_names_itself_is_where_it_commits(mpirun, tmp_path: Path):
    """Not the one of the caller, which is the only one that who starts it has locked."""
    script = python("stages.py", str(tmp_path), "own")
    folder = {"CHECKPOINT_DIR": str(tmp_path / "of-the-caller")}
    flags = ("-np", "1", "--min-np", "1")
    said, begun = told(horovodrun(tmp_path, *flags, script=script, **folder), tmp_path)
    assert begun == ["own 0", ".horovod-lock"], said
    assert [*numbers(tmp_path / "own").values()] == [[2, 3]]
    assert not any((tmp_path / "of-the-caller").iterdir())


def test_a_script_that_was_mended_or_moved_goes_on(mpirun, tmp_path: Path):
    """Two states from lines next to each other."""
    source = SCRIPT_OF_TWO
    commits = {"CHECKPOINT_DIR": str(tmp_path / "commits")}

    def run(folder: str, source: str) -> list[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "two.py").write_text(source)
        command = ("python", str(tmp_path / folder / "two.py"))
        process = horovodrun(tmp_path, "-np", "1", script=command, **commits)
        out, err = output(process, 90)
        assert process.returncode == 0, err
        return [line.removeprefix("[rank 0] ") for line in out.splitlines() if " at " in line]

    assert run("a", source) == ["one is one at 0", "two is two at 0"]
    assert run("a", f"# mended\n{source}") == ["one is one at 1", "two is two at 1"]
    assert run("b", f"# mended\n{source}") == ["one is one at 2", "two is two at 2"]


SCRIPT_OF_TWO = """\
from ddl_ops import lifecycle
from horovod.common.elastic import ObjectState, run_fn
lifecycle.init("two.py")
@run_fn
def train(state, name):
    print(name, "is", state.of, "at", state.step)
    state.step += 1
    state.commit()
def state(name):
    return ObjectState(lambda value: value, lambda: 0, step=0, of=name)
train(state("one"), "one")
train(state("two"), "two")
"""

NOTEBOOK = """\
import os, sys
source = open("two.py").read()
kernel = f"/run/user/kernel-{os.getpid()}.json"
words = ("-f", kernel) if "f" in sys.argv else (f"--f={kernel}",)
sys.argv = ["/x/ipykernel_launcher.py", *words]
exec(compile(source, f"/tmp/ipykernel_{os.getpid()}/4242.py", "exec"))
"""


def test_a_notebook_goes_on_in_another_kernel(mpirun, tmp_path: Path):
    (tmp_path / "two.py").write_text(SCRIPT_OF_TWO)
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    commits = {"CHECKPOINT_DIR": str(tmp_path / "commits")}
    for form, done in (("f", 0), ("--f", 1)):
        command = ("python", str(tmp_path / "notebook.py"), form)
        process = horovodrun(tmp_path, "-np", "1", script=command, **commits)
        out, err = output(process, 90)
        assert f"one is one at {done}\n" in out and f"two is two at {done}\n" in out, out + err


CALLER = """\
import os, signal
import horovod

class Options:
    pass

def of(folder, options, several):
    from ddl_ops import lifecycle
    from horovod.common.elastic import ObjectState, run_fn
    lifecycle.init("of")
    def train(state):
        print("begins at", state.step, flush=True)
        while state.step < 4:
            state.step += 1
            state.commit()
            if state.step == 2 and not os.path.exists(f"{folder}/killed"):
                open(f"{folder}/killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return state.step
    return run_fn(train)(ObjectState(lambda value: value, lambda: 0, step=0))

given = (os.getcwd(), Options(), {"alpha", "beta", "gamma", "delta", "epsilon"})
print("returned", horovod.run(of, args=given, np=1, min_num_proc=1))
"""


def test_restarts_of_horovod_run_go_on_whatever_its_arguments_are(
    mpirun, run_command, tmp_path: Path
):
    """Sets of texts, and objects of the main script, are not pickled alike in each process."""
    (tmp_path / "main.py").write_text(CALLER)
    command = ["env", "-C", str(tmp_path), sys.executable, "main.py"]
    ended = run_command(command, {"PYTHONPATH": HOROVOD_PATHS}, within(120))
    assert "returned [4]\n" in ended.output, ended.output
    assert "begins at 0\n" in ended.output and "begins at 2\n" in ended.output, ended.output


def test_a_rank_that_dies_before_the_first_commit_is_the_one_that_is_named(mpirun, tmp_path: Path):
    script = python("stages.py", str(tmp_path), "dies")
    folder = {"CHECKPOINT_DIR": str(tmp_path / "commits")}
    process = horovodrun(tmp_path, "-np", "2", script=script, **folder)
    _, err = output(process, 90)
    assert process.returncode == 128 + 9, err
    assert "RankGoneError: Bcast" in err, err
    assert "ddl-run: rank 1 of 2 on" in err and "was ended by SIGKILL" in err
