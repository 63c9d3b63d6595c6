"""`python -m tests.soak.elastic`: elastic trainings under a manifest, whose ranks are killed.

Each training has 2 to 4 ranks and is started by `ddl-airflow run`, and again by its `--step train`,
as retries of a task start it. SIGKILL comes to a random rank at a random moment: while it starts,
after a step, while rank 0 writes a commit. At the end the training has done each step, began each
time with the last commit or a newer one, has the bits of one that nobody killed and of one that
ends by itself after the same commits, and has left nothing: no process, no file of Open MPI,
nothing half written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.limits import within
from tests.soak.driver import REPOSITORY, clean_environment
from tests.soak.kills import _marked

SCRIPT = Path(__file__).with_name("elastic_training.py")
STEPS = 24
MOMENTS = ("start", "step", "commit")
_MOST_S = 240.0  # of one start
MANIFEST = """\
model_definition:
  name: elastic
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: python elastic_training.py {told} {steps}
    compute_configuration: {{name: cpu, nodes: {ranks}}}
training_data_reference: {{type: fs, source: {{path: ./data}}}}
training_results_reference: {{type: fs, target: {{path: ./published}}}}
"""


@dataclass
class Figures:
    """What was tried and seen.

    Attributes:
        killed: by moment, and by the number of ranks of the job.
        late: the job had ended before.
        trainings: that have come to their end.
        done_again: steps, at each start.
        seconds: from each kill to the end of the job, and of the step.
        faults: sentences.
    """

    killed: Counter[str] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    late: int = 0
    trainings: int = 0
    done_again: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Trained:
    """One training, in a folder of its own."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.told, self.ranks = folder, folder / "told", ranks
        for name in ("told", "data", "sessions", "segments"):
            (folder / name).mkdir(parents=True)
        (folder / "data" / "rows").touch()
        shutil.copy(SCRIPT, folder)
        text = MANIFEST.format(told=self.told, steps=STEPS, ranks=ranks)
        (folder / "manifest.yml").write_text(text)
        self._environment = clean_environment(
            PYTHONPATH=os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "ops_lib" / "python"))),
            TF_CPP_MIN_LOG_LEVEL="3",
            TMPDIR=str(folder / "sessions"),
            OMPI_MCA_btl_sm_backing_directory=str(folder / "segments"),
        )

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """A command of ours in the folder; what it says goes to `log`."""
        for path in self.told.glob("pid-*"):
            path.unlink()
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", *words],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, *, again: bool) -> subprocess.Popen[bytes]:
        call = "import sys; from ddl_airflow.cli import main; sys.exit(main())"
        return self.start(call, "run", "manifest.yml", *(("--step", "train") if again else ()))

    def undisturbed(self) -> set[str]:
        """The digests of ranks that nobody kills, without a manifest."""
        call = "import sys; from ddl_airflow.run import main; sys.exit(main())"
        words = ("--np", str(self.ranks), "python", str(SCRIPT), str(self.told), str(STEPS))
        assert self.start(call, *words).wait(within(_MOST_S)) == 0, self.said()
        return self.finals()

    def stopped(self, commits: set[int]) -> set[str]:
        """The digests of one that ends by itself after these commits, each time started again."""
        (self.told / "stops").write_text(" ".join(map(str, sorted(commits))))
        for number in range(len(commits) + 1):
            self.run(again=number > 0).wait(within(_MOST_S))
        assert self.ended() and self.begins() == [0, *sorted(commits)], self.said()
        return self.finals()

    def finals(self) -> set[str]:
        return {path.read_text() for path in self.told.glob("final-*")}

    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def lines(self) -> list[tuple[str, int]]:
        path = self.told / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(line.split()[0], int(line.split()[1])) for line in lines]

    def begins(self) -> list[int]:
        """After how many steps each start went on."""
        return [number for word, number in self.lines() if word == "begin"]

    def steps(self) -> int:
        return sum(word == "step" for word, _ in self.lines())

    def ended(self) -> bool:
        """Whether the step `train` has ended well."""
        return any(self.folder.glob(".ddl-run/runs/*/*/airflow/lineage/train.json"))

    def checkpoints(self) -> list[Path]:
        return list(self.folder.glob(".ddl-run/runs/*/*/result/checkpoints/*"))

    def writing(self) -> bool:
        """Whether rank 0 writes a commit now."""
        return any(self.folder.glob(".ddl-run/runs/*/*/result/checkpoints/.horovod-*.partial"))


def _until(
    what: Callable[[], object], job: subprocess.Popen[bytes], limit_s: float = _MOST_S
) -> bool:
    """False if the job ended before, or it took too long."""
    ends = time.monotonic() + within(limit_s)
    while not what():
        if job.poll() is not None or time.monotonic() > ends:
            return False
        time.sleep(0.001)
    return True


def _kill(
    trained: Trained, job: subprocess.Popen[bytes], moment: str, chance: random.Random
) -> bool:
    """Kills a rank; False if the job had ended."""
    victim = chance.randrange(trained.ranks)
    pid = trained.told / f"pid-{victim}"
    if not _until(lambda: pid.exists() and pid.read_text(), job):
        return False
    if moment == "start":
        time.sleep(chance.random() * 6)  # most of it is the import of TensorFlow
    elif moment == "step":
        wanted = trained.steps() + chance.randint(1, 9)
        if not _until(lambda: trained.steps() >= wanted, job):
            return False
        time.sleep(chance.random() * 0.05)
    else:
        before = trained.steps()
        more = chance.randint(1, 7)
        if not _until(lambda: trained.steps() >= before + more and trained.writing(), job):
            return False
        time.sleep(chance.random() * 0.03)
    try:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _train(
    trained: Trained, kills: int, expected: set[str], chance: random.Random, to: Figures
) -> None:
    """Has it trained to its end, with so many kills."""
    again = False
    while not trained.ended():
        job = trained.run(again=again)
        again = True
        killed = None
        try:
            if kills > 0:
                moment = chance.choices(MOMENTS, (2, 4, 4))[0]
                if not _kill(trained, job, moment, chance):
                    to.late += 1
                else:
                    killed = time.monotonic()
                    kills -= 1
                    to.killed[moment] += 1
                    to.ranks[trained.ranks] += 1
            code = job.wait(within(_MOST_S))
        except subprocess.TimeoutExpired:
            to.faults.append(
                f"a start did not end within {within(_MOST_S):.0f} s: {trained.said()}"
            )
            return
        finally:
            if job.poll() is None:
                job.terminate()  # which ends its ranks
                job.wait(60)
        if killed is not None:
            to.seconds.append(time.monotonic() - killed)
            if trained.ended():  # the rank had done all that counts
                to.faults += [] if trained.finals() == expected else ["ended well without a rank"]
        elif code and not trained.ended():
            to.faults.append(f"a start that nobody disturbed failed: {trained.said()}")
            return
    _look(trained, expected, to)


def _look(trained: Trained, expected: set[str], to: Figures) -> None:
    """At the end of a training."""
    committed = at = 0
    for word, number in trained.lines():
        if word == "begin":
            if number < committed:
                to.faults.append(f"began with {number}, and {committed} had been committed")
            to.done_again.append(max(0, at - number))
            at = number
        elif word == "step":
            if number != at + 1:
                to.faults.append(f"step {number} after {at}")
            at = number
        else:
            committed = number
    if at != STEPS:
        to.faults.append(f"ended after step {at} of {STEPS}")
    if trained.finals() != expected:
        to.faults.append(f"other bits: {trained.finals()}, and not {expected}")
    left = [path.name for path in trained.checkpoints() if not path.name.endswith(".commit")]
    names = sorted(path.name for path in trained.checkpoints())
    if left or len(names) != 2:
        to.faults.append(f"there are {names}")
    ends = time.monotonic() + 10
    while (processes := _marked(str(trained.folder))) and time.monotonic() < ends:
        time.sleep(0.1)
    others = [*(trained.folder / "segments").rglob("*"), *(trained.folder / "sessions").rglob("*")]
    if processes or others:
        to.faults.append(f"left over: processes {processes}, files {others}")
    to.trainings += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.elastic", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the default: the time")
    parser.add_argument("--limit-s", type=float, default=3600, help="begins no training after that")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that jobs are ended on the way out
    chance = random.Random(arguments.seed)
    figures = Figures()
    print(f"seed {arguments.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddl-soak-") as place:
        expected: dict[int, set[str]] = {}
        while (done := figures.killed.total()) < arguments.kills:
            if time.monotonic() - began > arguments.limit_s:
                print(f"out of time after {done} kills")
                break
            ranks = 2 + (arguments.seed + figures.trainings) % 3
            folder = Path(place) / f"{figures.trainings}-{len(figures.faults)}"
            if ranks not in expected:
                alone = Trained(folder.with_name(f"undisturbed-{ranks}"), ranks)
                expected[ranks] = alone.undisturbed()
                assert len(expected[ranks]) == 1, expected
                shutil.rmtree(alone.folder)
            trained = Trained(folder, ranks)
            before = len(figures.faults)
            kills = min(chance.randint(4, 7), arguments.kills - done)
            _train(trained, kills, expected[ranks], chance, figures)
            if len(figures.faults) == before:
                scripted = Trained(folder.with_name(f"{folder.name}-scripted"), ranks)
                if scripted.stopped({*trained.begins()} - {0}) != trained.finals():
                    figures.faults.append("other bits than of one that ended at these commits")
                shutil.rmtree(scripted.folder)
            for fault in figures.faults[before:]:
                print(f"  FAULT: {fault}", flush=True)
            print(
                f"{ranks} ranks: {figures.killed.total()} kills so far, "
                f"{time.monotonic() - began:.0f} s, {len(figures.faults)} faults",
                flush=True,
            )
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
    seconds = figures.seconds or [0.0]
    print(
        f"{figures.killed.total()} kills ({dict(figures.killed)}; of jobs of so many ranks: "
        f"{dict(sorted(figures.ranks.items()))}) in {figures.trainings} trainings; "
        f"{figures.late} came too late; steps done again: {sum(figures.done_again)}, at most "
        f"{max(figures.done_again, default=0)} at once; from a kill to the end of the step "
        f"{statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s"
    )
    print(f"{len(figures.faults)} faults")
    return 1 if figures.faults or figures.killed.total() < arguments.kills else 0


if __name__ == "__main__":
    sys.exit(main())
