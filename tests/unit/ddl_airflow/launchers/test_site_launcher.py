"""A launcher that a site brings as a package: no file of ours knows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

# What a package has to have; its jobs are processes of this host, one after another.
MODULE = '''
import subprocess
from pydantic import Field
from ddl_airflow.core.manifest.rule import Finding
from ddl_airflow.core.manifest.sections.launcher import Launcher
from ddl_airflow.core.manifest.values import Text
from ddl_airflow.launchers.fake import FakeLauncher

class Pbs(Launcher):
    """How the ranks start: in a job of PBS."""
    kind_name = "pbs"
    runs_on = "a job of PBS"
    implementation = "site_pbs:PbsLauncher"
    queue: Text | None = Field(default=None, description="Queue.", examples=["workq"])

    def findings(self, at):
        if self.queue == "closed":
            yield Finding(f"{at}.queue", "is closed", "Choose another one.")

class PbsLauncher(FakeLauncher):
    kind = "pbs"

    def __init__(self, queue=""):
        super().__init__()
        self.queue = queue

    def render(self, job):
        self.command = ["sh", "-c", job.command]
        return super().render(job)

    def submit(self, submission):
        self.output = subprocess.run(self.command, capture_output=True, text=True).stdout
        return super().submit(submission)
'''
BROKEN = {
    "site_pbs.py": "import a_scheduler_that_is_not_there",
    "site_no_kind.py": "Pbs = object",
}
MANIFEST = """\
model_definition:
  name: at-a-site
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: echo trained
    compute_configuration: {name: cpu, nodes: 2}
training_data_reference:
  type: fs
  source: {path: ./data}
training_results_reference:
  type: fs
  target: {path: ./results}
launcher: {kind: pbs, queue: gpu, slots: 2}
"""
RUN = """
import json, sys
from pathlib import Path
from ddl_airflow.core.job import JobSpec
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.manifest.rights import RightsTable
from ddl_airflow.core.plan import plan
from ddl_airflow.launchers.registry import launcher

path = Path(sys.argv[1])
train = plan(load_manifest(path), path).train
chosen = launcher(train.launcher, train.scheduler)
folder = path.parent
job = JobSpec(
    job_id="a/train-1", command=train.command, nodes=train.nodes, slots=train.slots,
    python=sys.executable, folder=folder, record_dir=folder / "records", log_dir=folder / "logs",
    env={},
)
handle = chosen.submit(chosen.render(job))
RightsTable.read('{"rights": {"/": {"launchers": ["pbs"]}}}')
print(json.dumps({
    "queue": chosen.queue, "kind": handle.kind, "state": chosen.status(handle).state.name,
    "logs": [chosen.log(handle, rank).read_text() for rank in range(job.world_size)],
}))
"""
ERRORS = """
import sys
from pathlib import Path
from ddl_airflow.core.errors import ManifestError
from ddl_airflow.core.manifest.load import load_manifest
try:
    load_manifest(Path(sys.argv[1]), source="m.yml")
except ManifestError as error:
    print(error)
"""


def installed(tmp_path: Path, module: str, target: str = "site_pbs:Pbs") -> Path:
    """The folder into which pip has installed a wheel with the launcher."""
    wheel = tmp_path / "site_pbs-1-py3-none-any.whl"
    about = "site_pbs-1.dist-info"
    files = {
        f"{target.partition(':')[0]}.py": module,
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: site-pbs\nVersion: 1\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": f"[ddl_airflow.launchers]\npbs = {target}\n",
    }
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
        record = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
        packed.writestr(f"{about}/RECORD", record)
    folder = tmp_path / "installed"
    # An Airflow in an environment of its own may have no pip; the ranks' Python has.
    python = os.environ.get("AIRFLOW__DDL__PYTHON", sys.executable)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--target", folder, wheel], check=True)
    return folder


def said(code: str, path: Path, site: Path | None = None) -> str:
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[4]), str(site or "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = [sys.executable, "-c", code, str(path)]
    return subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "manifest.yml"
    path.write_text(MANIFEST)
    return path


def test_a_manifest_with_a_launcher_of_the_sites_validates_plans_and_runs(tmp_path, manifest):
    site = installed(tmp_path, MODULE)
    assert json.loads(said(RUN, manifest, site)) == {
        **{"queue": "gpu", "kind": "pbs", "state": "SUCCEEDED"},
        "logs": ["trained\n"] * 4,
    }
    manifest.write_text(MANIFEST.replace("queue: gpu", "queue: closed, quue: x"))
    assert said(ERRORS, manifest, site).splitlines() == [
        "m.yml:13: launcher.quue: unknown field. Did you mean queue?",
    ]
    manifest.write_text(MANIFEST.replace("queue: gpu", "queue: closed"))
    closed = "m.yml:13: launcher.queue: is closed. Choose another one."
    assert said(ERRORS, manifest, site).splitlines() == [closed]
    servers = MANIFEST + "distribution: parameter_server\n"
    manifest.write_text(servers)
    assert said(ERRORS, manifest, site).splitlines() == [
        "m.yml:14: distribution: parameter_server does not run on pbs. Set launcher.kind: "
        "kubernetes, local, slurm or ssh, or distribution: mpi."
    ]
    manifest.write_text(MANIFEST.replace("kind: pbs", "kind: pbss"))
    assert "Use kubernetes, local, slurm, ssh or pbs." in said(ERRORS, manifest, site)


def test_without_the_package_the_kind_is_not_known(manifest):
    assert said(ERRORS, manifest).splitlines() == [
        "m.yml:13: launcher.kind: 'pbs' is not known. Use kubernetes, local, slurm or ssh."
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("site_pbs.py", "cannot be loaded: No module named 'a_scheduler_that_is_not_there'"),
        ("site_no_kind.py", "is no Launcher with that kind_name"),
    ],
)
def test_a_package_that_is_broken_is_named(tmp_path, manifest, name, says):
    site = installed(tmp_path, BROKEN[name], f"{name.removesuffix('.py')}:Pbs")
    assert said(ERRORS, manifest, site).splitlines() == [
        f"m.yml:13: launcher.kind: launcher 'pbs' of site-pbs {says}. Correct or remove it. "
        "Use kubernetes, local, slurm, ssh or pbs."
    ]


def test_a_manifest_for_a_launcher_of_ours_looks_for_no_packages(manifest):
    manifest.write_text(MANIFEST.replace("kind: pbs, queue: gpu", "kind: slurm, partition: gpu"))
    code = (
        "import sys; from pathlib import Path; import importlib.metadata as metadata\n"
        "from ddl_airflow.core.manifest.load import load_manifest\n"
        "def looked(**group): raise AssertionError(group)\n"
        "metadata.entry_points = looked\n"
        "from ddl_airflow.launchers.registry import launcher\n"
        "launcher(load_manifest(Path(sys.argv[1])).launcher.kind)\n"
        "print([one for one in sys.modules if one == 'ddl_airflow.launchers.local'])"
    )
    # Slurm's launcher shares the ranks' environment with local's; a parse needs neither.
    assert said(code.replace("launcher(load", "(load"), manifest).strip() == "[]"
    assert said(code, manifest).strip() != "[]"
