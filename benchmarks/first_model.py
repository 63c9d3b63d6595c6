"""From wheels to the first trained model: `python -m benchmarks.first_model DIST [PYTHON ...]`.

For each Python (a path, or a version that uv finds or fetches; this one by default): an empty
environment; both wheels and all that they need, installed into it from a folder by uv, or by pip,
which writes bytecode at once; and dags/mnist-keras trained there by ddl-run, on two ranks.
Downloads come before, and do not count.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddl_airflow.demo.digits import write_digits

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).parent / "uv"
MANIFEST = ROOT / "dags" / "mnist-keras" / "manifest.yml"
# As requirements/lock.txt has it, and without the 600 MB that only GPUs need.
_CPU_ALONE = 'tensorflow ; sys_platform == "never"\n'


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_model")
    parser.add_argument("dist", type=Path, help="folder with both wheels")
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--pip", action="store_true", help="install with pip, not with uv")
    options = parser.parse_args()
    wheels = sorted(options.dist.resolve().glob("ddl_*.whl"))
    with tempfile.TemporaryDirectory(prefix="ddl-first-model-") as folder:
        write_digits(Path(folder, "digits"))
        for number, python in enumerate(options.pythons):
            place = Path(folder, str(number))
            place.mkdir()
            print(_first_model(place, python, wheels, Path(folder, "digits"), options.pip))
    return 0


def _first_model(
    folder: Path, python: str, wheels: Sequence[Path], data: Path, by_pip: bool
) -> str:
    """One line on how long it took.

    Raises subprocess.CalledProcessError if a step fails; it has said why.
    """
    bin_ = folder / "env" / "bin"
    _run([UV, "venv", "--quiet", "--seed", "--python", python, bin_.parent])
    pip = [bin_ / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    packages = folder / "packages"
    needed = folder / "needed.txt"
    needed.write_text(_resolved(folder, bin_ / "python", wheels))
    _run([*pip, "download", "--no-deps", "--dest", packages, "--requirement", needed])
    # Where it is 1, as images set it, nobody leaves bytecode, and each import compiles.
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": f"{bin_}:{os.defpath}"}
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"):
        env.pop(name, None)

    uv = [UV, "pip", "install", "--quiet", "--no-cache", "--python", bin_ / "python"]
    install = [*pip, "install"] if by_pip else uv
    begun, cpu = time.monotonic(), _cpu_s()
    _run([*install, "--no-index", "--no-deps", *wheels, *sorted(packages.iterdir())], env)
    installed = time.monotonic()
    said = _run([bin_ / "ddl-run", "--manifest", MANIFEST, "--data", data], env, folder)
    trained, cpu = time.monotonic(), _cpu_s() - cpu

    version = _run([bin_ / "python", "--version"]).strip()
    accuracy = re.search(r"test accuracy= ([\d.]+)", said)
    count = len(needed.read_text().splitlines())
    return (
        f"{version}: both wheels and {count} packages installed by {'pip' if by_pip else 'uv'} in "
        f"{installed - begun:.1f} s, "
        f"mnist-keras trained on 2 ranks in {trained - installed:.1f} s "
        f"(accuracy {accuracy[1] if accuracy else 'not said'}); "
        f"from wheels to the first model {trained - begun:.1f} s, {cpu:.0f} of CPU"
    )


def _resolved(folder: Path, python: Path, wheels: Sequence[Path]) -> str:
    """The pinned packages that the wheels need there: those of the lock file."""
    override = folder / "override.txt"
    override.write_text(_CPU_ALONE)
    asked = folder / "asked.txt"
    asked.write_text("\n".join([*map(str, wheels), "tensorflow-cpu"]))
    constraints = ["--constraints", ROOT / "requirements" / "lock.txt", "--overrides", override]
    options = ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url", "--python", python]
    options += ["--no-emit-find-links"]
    said = _run([UV, "pip", "compile", *options, *constraints, asked])
    return "".join(f"{line}\n" for line in said.splitlines() if "ddl_" not in line)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(
    command: Sequence[str | Path], env: Mapping[str, str] | None = None, folder: Path | None = None
) -> str:
    done = subprocess.run(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
