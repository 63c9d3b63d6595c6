"""Elastic states of scripts for Horovod: what is committed outlives the job. Real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ddl_airflow.core.job import JobState
from tests.limits import until, within
from tests.parallel.conftest import OPS_LIB, SCRIPTS, rank_environment
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
    left = sorted(path.name for path in (training.folder / "checkpoints").iterdir())
    assert left == [f"horovod-{n}.commit" for n in ("1-5", "1-6", "2-2", "2-3")], left


def test_a_state_of_a_session(run_alone, tmp_path: Path):
    stand_in = OPS_LIB / "python" / "ddl_ops" / "stand_in"
    done = run_alone(
        *("elastic.py", "session", str(tmp_path)),
        CHECKPOINT_DIR=str(tmp_path),
        PYTHONPATH=os.pathsep.join(map(str, (OPS_LIB / "python", stand_in))),
    )
    assert done.returncode == 0 and "gone on\n" in done.output, done.output
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["horovod-1-1.commit", "horovod-1-2.commit"]


def horovodrun(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Starts it, for twelve steps of restarts.py."""
    (folder / "told").touch()
    call = [sys.executable, "-c", "from ddl_ops.horovodrun import main; raise SystemExit(main())"]
    return subprocess.Popen(
        [*call, *words, "python", str(SCRIPTS / "restarts.py"), str(folder), "12"],
        cwd=folder,
        env=rank_environment() | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
    told = tmp_path / "told"
    until(lambda: "step 9" in told.read_text() or process.poll() is not None, 90)
    (tmp_path / "slots").write_text("localhost:4\n")
    out, err = process.communicate(timeout=within(90))
    assert process.returncode == 0, err
    assert told.read_text().splitlines() == [
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
    _, err = process.communicate(timeout=within(90))
    assert process.returncode == 128 + 9
    *_, limit, kept = err.splitlines()
    assert limit == (
        "ddl-run: It has started again as often as --reset-limit 0 allows. Not started again."
    )
    (folder,) = (tmp_path / ".ddl-run").iterdir()
    assert kept == f"ddl-run: To go on from what was committed, set CHECKPOINT_DIR={folder}."
    again = horovodrun(tmp_path, "-np", "1", CHECKPOINT_DIR=str(folder))
    _, err = again.communicate(timeout=within(90))
    assert again.returncode == 0, err
    told = (tmp_path / "told").read_text().splitlines()
    assert told[4].startswith("begin 2 1 ") and told[-1] == "end 12 1", told
