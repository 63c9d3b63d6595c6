"""The package as others install it: a wheel in an environment of its own, away from this tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import pathlib, sys
import tensorflow as tf
import ddl, ddl_ops
assert pathlib.Path(ddl_ops.__file__).is_relative_to(sys.argv[1]), ddl_ops.__file__
total = ddl.allreduce_n([tf.constant([1.0 + ddl.rank(), 10.0])], average=False)
print("rank", ddl.rank(), "of", ddl.size(), total[0].numpy().tolist())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment that has the wheel, and this one's other packages."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    # What git knows, not what lies around: a file that is not committed must not be needed.
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    # The objects that were compiled of the same sources: another two minutes show nothing more.
    objects = Path("build", "ops_lib")
    if (ROOT / objects).is_dir():
        shutil.copytree(ROOT / objects, source / objects)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site_packages = next(venv.glob("lib/python*/site-packages"))
    install = ["install", "--no-deps", "--no-index", "--prefix", str(venv), str(wheel)]
    subprocess.run([*pip, "--python", str(venv / "bin" / "python"), *install], check=True)
    # The big packages come from here; a .pth path comes after the environment's own folder.
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (venv / "bin" / "mpirun").symlink_to(Path(sys.executable).parent / "mpirun")
    return wheel, venv


def test_wheel_holds_the_compiled_ops_and_no_sources_of_them(environment):
    wheel, _ = environment
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ddl_ops/_ddl_ops.so", "ddl_ops/_loopback.so"} <= set(names)
    assert "ddl_ops/startup/sitecustomize.py" in names
    assert "ddl_ops/tf1/overlay/examples/tutorials/mnist/input_data.py" in names
    learn = "ddl_ops/tf1/overlay/contrib/learn/python/learn"
    assert {f"{learn}/experiment.py", f"{learn}/estimators/iris.csv"} <= set(names)
    assert "mpi_collectives/python/ops/mpi_ops.py" in names
    assert {"dl_comm/__init__.py", "ml_comm/__init__.py"} <= set(names)
    assert "ddl_airflow/plugin/training.html" in names
    assert not [n for n in names if n.endswith((".cc", ".h")) or n.startswith("tests")]


def test_installed_commands_run_ranks(environment, tmp_path):
    _, venv = environment
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    env.pop("PYTHONPATH", None)
    said = subprocess.run(
        [venv / "bin" / "ddl-run", "--np", "2", "python", "script.py", str(venv)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert sorted(said.stdout.splitlines()) == [
        "[rank 0] rank 0 of 2 [3.0, 20.0]",
        "[rank 1] rank 1 of 2 [3.0, 20.0]",
    ]


def test_installed_ddl_airflow_validates(environment):
    _, venv = environment
    manifest = ROOT / "dags" / "mnist-tf1" / "manifest.yml"
    said = subprocess.run(
        [venv / "bin" / "ddl-airflow", "validate", manifest], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    assert "DAG mnist-tf1, 2 ranks" in said.stdout
