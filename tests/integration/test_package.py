"""The packages as others install them: wheels, each alone in an environment without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ddl_airflow import __version__

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# Without TensorFlow in Python, whose first import writes bytecode for 15 s.
AVERAGE = """\
import pathlib, sys
import dl_comm, numpy
assert pathlib.Path(dl_comm.__file__).is_relative_to(sys.argv[1]), dl_comm.__file__
dl_comm.init(1, 1, 2)
values = numpy.array([1.0 + dl_comm.get_rank(), 10.0], numpy.float32)
dl_comm.average(values)
print("rank", dl_comm.get_rank(), "of", dl_comm.get_nranks(), values.tolist())
dl_comm.finalize()
"""
MANIFEST = """\
model_definition:
  name: line
  framework: {name: tensorflow, version: "2.21"}
  execution: {command: python train.py, compute_configuration: {name: cpu, nodes: 2}}
training_data_reference: {type: fs, source: {path: ./data}}
training_results_reference: {type: fs, target: {path: ./results}}
parameters: {steps: 40}
"""
# Each rank has one point, and only both have one line: y = 3 x + 1.
TRAIN = """\
import os
import tensorflow as tf
import ddl

total = ddl.allreduce_n([tf.constant([1.0 + ddl.rank(), 10.0])], average=False)
print("rank", ddl.rank(), "of", ddl.size(), total[0].numpy().tolist())
x = 1.0 - 2.0 * ddl.rank()
w, b = tf.Variable(0.0), tf.Variable(0.0)
for step in range(int(os.environ["PARAM_STEPS"])):
    with tf.GradientTape() as tape:
        loss = (w * x + b - (3.0 * x + 1.0)) ** 2
    pairs = zip(tape.gradient(loss, [w, b]), [w, b])
    for gradient, variable in ddl.grads_reduce(pairs):
        variable.assign_sub(0.3 * gradient)
print("line", round(float(w), 3), round(float(b), 3))
if ddl.rank() == 0:
    tf.train.Checkpoint(w=w, b=b).save(os.path.join(os.environ["RESULT_DIR"], "line"))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """What `make wheels` builds, by the name of the distribution."""
    source = tmp_path_factory.mktemp("wheels") / "source"
    # What git knows, not what lies around: a file that is not committed must not be needed.
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    # The objects that were compiled of the same sources: another two minutes show nothing more.
    objects = Path("build", "ops_lib")
    if (ROOT / objects).is_dir():
        shutil.copytree(ROOT / objects, source / objects)
    tools = Path("build", "wheel-tools")
    (ROOT / tools).mkdir(parents=True, exist_ok=True)
    (source / tools).parent.mkdir(exist_ok=True)
    (source / tools).symlink_to(ROOT / tools)
    built = subprocess.run(
        [source / "scripts" / "wheels", BIN, "dist"], cwd=source, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    found = {path.name.partition("-")[0]: path for path in (source / "dist").iterdir()}
    assert set(found) == {"ddl_airflow", "ddl_ops"}
    return found


def environment(folder: Path, wheel: Path, *more: str) -> Path:
    """A virtual environment with one wheel, and what it asks for in the lock file's versions.

    Returns its folder of programs.
    """
    uv, python = BIN / "uv", folder / "env" / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder / "env"], check=True)
    override = folder / "override.txt"
    override.write_text('tensorflow ; sys_platform == "never"\n')  # the lock file's has no GPUs
    install = [uv, "pip", "install", "-q", "--python", python, wheel, *more]
    install += ["--constraints", ROOT / "requirements" / "lock.txt", "--overrides", override]
    # What scripts/install has fetched is in uv's cache; it may have been emptied since.
    cached = subprocess.run([*install, "--offline"], capture_output=True)
    if cached.returncode != 0:
        subprocess.run(install, check=True)
    return python.parent


@pytest.fixture(scope="module")
def airflow_alone(wheels, tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("airflow"), wheels["ddl_airflow"])


@pytest.fixture(scope="module")
def ops_alone(wheels, tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("ops"), wheels["ddl_ops"], "tensorflow-cpu")


def said_by(bin_: Path, *words: str | Path, cwd: Path, code: int = 0, **env: str) -> str:
    """Standard output of a command that finds programs of one environment, and no others."""
    env |= {"PATH": str(bin_), "HOME": str(cwd), "TF_CPP_MIN_LOG_LEVEL": "3"}
    assert shutil.which("g++", path=str(bin_)) is None
    # Its bytecode is written: Airflow and TensorFlow are imported more than once.
    done = subprocess.run(
        [bin_ / words[0], *words[1:]], cwd=cwd, env=env, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def importable(bin_: Path, cwd: Path, names: str) -> set[str]:
    code = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"
    return set(said_by(bin_, "python", "-c", code, *names.split(), cwd=cwd).split())


def test_one_wheel_is_pure_python_and_the_other_for_any_python_of_this_platform(wheels):
    assert wheels["ddl_airflow"].name == f"ddl_airflow-{__version__}-py3-none-any.whl"
    tag = rf"ddl_ops-{re.escape(__version__)}-py3-none-manylinux_2_\d+_\w+\.whl"
    assert re.fullmatch(tag, wheels["ddl_ops"].name), wheels["ddl_ops"].name


@pytest.mark.parametrize("package", ["ddl_airflow", "ops_lib/python/ddl_ops"])
def test_a_module_that_is_gone_is_not_installed_again(package, tmp_path):
    """As by a second ``pip install .``, after a pull: setuptools has the first one's copies."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "source")], check=True)
    module = tmp_path / "source" / package / "of_before.py"
    module.touch()
    distribution = tmp_path / "source" / ("ops_lib" if "ops_lib" in package else "")
    build = [BIN / "python", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    for name in ("first", "second"):
        words = [*build, "--wheel-dir", tmp_path / name, distribution]
        subprocess.run(words, env={**os.environ, "DDL_BUILD_OPS": "0"}, check=True)
        module.unlink(missing_ok=True)
    for name, there in (("first", True), ("second", False)):
        (wheel,) = (tmp_path / name).iterdir()
        assert (f"{module.parent.name}/of_before.py" in zipfile.ZipFile(wheel).namelist()) is there


def test_no_file_is_in_both_wheels_and_nothing_else_of_the_tree(wheels):
    names = {name: set(zipfile.ZipFile(path).namelist()) for name, path in wheels.items()}
    assert not names["ddl_airflow"] & names["ddl_ops"]
    top = {name: {one.partition("/")[0] for one in of} for name, of in names.items()}
    information = {name: f"{name}-{__version__}.dist-info" for name in names}
    assert top["ddl_airflow"] == {"ddl_airflow", information["ddl_airflow"]}
    packages = {"ddl", "ddl_ops", "dl_comm", "ml_comm", "mpi_collectives"}
    assert top["ddl_ops"] == {*packages, information["ddl_ops"]}
    page = ("index.html", "licenses.txt", "assets/page.js", "assets/page.css")
    assert {f"ddl_airflow/plugin/built/{name}" for name in page} <= set(names["ddl_airflow"])
    assert {"ddl_ops/_ddl_ops.so", "ddl_ops/_loopback.so"} <= names["ddl_ops"]
    for name in ("sitecustomize", "ddl_tensorflow_finder"):
        assert f"ddl_ops/startup/{name}.py" in names["ddl_ops"]
    assert "ddl_ops/tf1/overlay/examples/tutorials/mnist/input_data.py" in names["ddl_ops"]
    learn = "ddl_ops/tf1/overlay/contrib/learn/python/learn"
    assert {f"{learn}/experiment.py", f"{learn}/estimators/iris.csv"} <= names["ddl_ops"]
    # Not at the top, where an installed Horovod is.
    modules = ROOT / "ops_lib" / "python"
    stand_in = (modules / "ddl_ops" / "stand_in").rglob("*.py")
    assert {str(path.relative_to(modules)) for path in stand_in} <= names["ddl_ops"]
    for name, of in names.items():
        assert f"{information[name]}/licenses/LICENSE" in of
        assert not [one for one in of if re.search(r"\.(cc|h|o|pyc|stamp)$|/tests?/", one)]


def test_wheels_do_not_say_where_they_were_built(wheels):
    places = {str(ROOT), str(wheels["ddl_ops"].parents[1]), sys.prefix, sys.base_prefix}
    places -= {"/usr"}  # of Debian's Python: anybody's
    for wheel in wheels.values():
        packed = zipfile.ZipFile(wheel)
        for name in packed.namelist():
            content = packed.read(name)
            assert not [place for place in places if place.encode() in content], name


def test_ddl_airflow_alone_has_no_tensorflow_no_mpi_and_makes_dags(airflow_alone, tmp_path):
    lacking = "tensorflow keras mpi4py numpy ddl ddl_ops dl_comm mpi_collectives"
    assert importable(airflow_alone, tmp_path, f"{lacking} airflow") == {"airflow"}
    assert not {"mpirun", "mpicc", "ddl-run"} & {path.name for path in airflow_alone.iterdir()}
    manifests = sorted((ROOT / "dags").glob("*/manifest.yml"))
    good = said_by(airflow_alone, "ddl-airflow", "validate", *manifests, cwd=tmp_path)
    assert "DAG mnist-tf1, 2 ranks" in good
    code = """
        import importlib, runpy, sys
        from airflow.providers_manager import ProvidersManager
        from airflow.sdk import DAG
        from ddl_airflow import provider_info
        assert "ddl-airflow" in ProvidersManager().providers
        for row in provider_info.get_provider_info()["operators"]:
            for module in row["python-modules"]:
                importlib.import_module(module)
        loaded = runpy.run_path(sys.argv[1])
        print(*sorted(value.dag_id for value in loaded.values() if isinstance(value, DAG)))
    """
    words = ("python", "-c", re.sub("^ {8}", "", code, flags=re.MULTILINE))
    home = {"AIRFLOW_HOME": str(tmp_path / "airflow")}
    loader = ROOT / "dags" / "load_manifests.py"
    dags = said_by(airflow_alone, *words, loader, cwd=tmp_path, **home).splitlines()[-1]
    assert dags.split() == [path.parent.name for path in manifests]


def test_ddl_airflow_alone_says_what_ranks_need(airflow_alone, tmp_path):
    home = {"AIRFLOW_HOME": str(tmp_path / "airflow")}
    found = subprocess.run(
        [airflow_alone / "ddl-airflow", "doctor"],
        env={**home, "PATH": str(airflow_alone)},
        capture_output=True,
        text=True,
    ).stdout
    assert f"mpirun is neither beside the ranks' Python, {airflow_alone}/python, nor" in found
    assert f"Install ddl-ops there, `{airflow_alone}/python -m pip install ./ops_lib`" in found


def test_ddl_ops_alone_has_no_airflow_and_its_ranks_average(ops_alone, tmp_path):
    assert importable(ops_alone, tmp_path, "airflow ddl_airflow boto3 ddl mpi4py") == {
        "ddl",
        "mpi4py",
    }
    assert "ddl-airflow" not in {path.name for path in ops_alone.iterdir()}
    (tmp_path / "script.py").write_text(AVERAGE)
    words = ("ddl-run", "--np", "2", "python", "script.py", str(ops_alone.parent))
    assert sorted(said_by(ops_alone, *words, cwd=tmp_path).splitlines()) == [
        "[rank 0] rank 0 of 2 [1.5, 10.0]",
        "[rank 1] rank 1 of 2 [1.5, 10.0]",
    ]
    script = "import json, os; print(json.loads(os.environ['TF_CONFIG'])['task'])"
    words = ("ddl-run", "--tf-config", "master=1", "python", "-c", script)
    assert "master" in said_by(ops_alone, *words, cwd=tmp_path)


def test_ddl_ops_alone_trains_from_a_manifest(ops_alone, tmp_path):
    (tmp_path / "manifest.yml").write_text(MANIFEST)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "data").mkdir()
    words = ("ddl-run", "--manifest", "manifest.yml", "--set", "steps=30")
    assert sorted(said_by(ops_alone, *words, cwd=tmp_path).splitlines()) == [
        "[rank 0] line 3.0 1.0",
        "[rank 0] rank 0 of 2 [3.0, 20.0]",
        "[rank 1] line 3.0 1.0",
        "[rank 1] rank 1 of 2 [3.0, 20.0]",
    ]
    assert list(tmp_path.glob(".ddl-run/runs/line/*/result/line-1.index"))
