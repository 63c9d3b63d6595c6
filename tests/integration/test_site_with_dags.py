"""Sites that have DAGs of their own: what installing ours there does to them.

No server runs: Airflow's own commands over SQLite, each once.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.limits import within

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PYTHON_DAG = """\
from airflow.sdk import DAG

dag = DAG("{name}", schedule=None)
"""


@dataclass
class Site:
    """An Airflow that is there already: its configuration and database, and two Python DAGs.

    Attributes:
        folder: stands for the host's ``/``; ``airflow`` in it is AIRFLOW_HOME.
    """

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "airflow"

    def airflow(self, *words: str) -> str:
        """One command, which must succeed; returns what it says."""
        env = {name: text for name, text in os.environ.items() if not name.startswith("AIRFLOW")}
        env |= {"AIRFLOW_HOME": str(self.home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
        command = [sys.executable, "-m", "airflow", *words]
        done = subprocess.run(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=within(120),
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def parse(self) -> None:
        """Airflow's DAG processor, until it has parsed each file once."""
        self.airflow("dag-processor", "--num-runs", "1")

    def configure(self, written: str) -> None:
        """What a person does who is told to set this in airflow.cfg; folders are below ours."""
        told, configuration = ConfigParser(interpolation=None), ConfigParser(interpolation=None)
        told.read_string(written)
        configuration.read(self.home / "airflow.cfg")
        for section in told.sections():
            for name, text in told[section].items():
                configuration[section][name] = text.replace("/srv/", f"{self.folder}/srv/")
        with (self.home / "airflow.cfg").open("w") as file:
            configuration.write(file)

    def ask(self, question: str) -> list[tuple]:
        """The rows of Airflow's database."""
        with sqlite3.connect(self.home / "airflow.db") as database:
            return database.execute(question).fetchall()

    def active(self) -> list[tuple[str, str]]:
        """Bundle and id of each DAG that Airflow would run."""
        return self.ask("select bundle_name, dag_id from dag where not is_stale order by 1, 2")

    def import_errors(self) -> dict[str, str]:
        """By file."""
        return dict(self.ask("select filename, stacktrace from import_error"))


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A site as Airflow makes it, with its own airflow.cfg."""
    site = Site(tmp_path_factory.mktemp("host"))
    site.airflow("db", "migrate")
    for name in ("daily_report", "hourly_report"):
        (site.home / "dags").mkdir(exist_ok=True)
        (site.home / "dags" / f"{name}.py").write_text(PYTHON_DAG.format(name=name))
    site.parse()
    return site


@pytest.fixture
def site(migrated: Site, tmp_path: Path) -> Site:
    """One for each test."""
    copy = Site(tmp_path / "host")
    shutil.copytree(migrated.folder, copy.folder)
    configuration = copy.home / "airflow.cfg"
    text = configuration.read_text()
    configuration.write_text(text.replace(str(migrated.folder), str(copy.folder)))
    return copy


@pytest.fixture
def write(site: Site) -> Callable[[Path, str], Path]:
    """write(folder, name): the manifest of a training, below the host's /."""

    def write(folder: Path, name: str) -> Path:
        (site.folder / folder).mkdir(parents=True, exist_ok=True)
        text = (ROOT / "dags" / "mnist-keras" / "manifest.yml").read_text()
        path = site.folder / folder / "manifest.yml"
        path.write_text(text.replace("name: mnist-keras", f"name: {name}", 1))
        return path

    return write


def readme_snippet() -> str:
    """What the README has people set in airflow.cfg."""
    (written,) = re.findall(r"^```ini\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    return written


OWN = [("dags-folder", "daily_report"), ("dags-folder", "hourly_report")]


def test_what_the_readme_configures_leaves_the_dags_of_the_site_active(site, write):
    assert site.active() == OWN
    write(Path("srv/trainings/first"), "first")
    site.configure(readme_snippet())
    site.parse()
    assert site.active() == [*OWN, ("trainings", "first")]
    assert site.import_errors() == {}
    # Versions of manifests lie where they stay.
    assert (site.folder / "srv" / "airflow-bundles" / "trainings" / "latest").is_dir()


def misspell(path: Path) -> None:
    """Breaks a manifest, as people do."""
    path.write_text(path.read_text().replace("command:", "comand:", 1))


def test_broken_manifests_keep_no_other_dag_from_being_stored_whoever_serialises(site, write):
    """In hostile company: broken, unreadable, of one DAG id with another manifest or a DAG."""
    dags = site.home / "dags"
    (dags / "broken.py").write_text("from airflow.sdk import DAG\nraise ValueError('no table')\n")
    (dags / "a_report.py").write_text(PYTHON_DAG.format(name="loader-report"))
    loader = dags / "trainings" / "load_manifests.py"
    for folder, kind in (("srv/trainings", "bundle"), ("airflow/dags/trainings", "loader")):
        for name in ("first", "report"):
            write(Path(folder, name), f"{kind}-{name}")
        misspell(write(Path(folder, "bad"), f"{kind}-bad"))
        for name in ("one", "two"):
            write(Path(folder, name), f"{kind}-twice")
        closed = write(Path(folder, "closed"), f"{kind}-closed")
        closed.unlink()
        closed.symlink_to("/proc/self/mem")
    shutil.copy(ROOT / "dags" / "load_manifests.py", loader)
    site.configure(readme_snippet())

    said = site.airflow("dags", "reserialize")
    assert site.active() == [
        ("dags-folder", "daily_report"),
        ("dags-folder", "hourly_report"),
        ("dags-folder", "loader-first"),
        ("dags-folder", "loader-report"),
        ("trainings", "bundle-first"),
        ("trainings", "bundle-report"),
    ]
    errors = site.import_errors()
    # Of two DAGs of one id Airflow keeps the one that it finds first.
    assert "'loader-report' is also claimed by a_report.py" in errors.pop("report/manifest.yml")
    # By a name that tells them apart: those of the bundle are files of their own.
    names = [f"{name}/manifest.yml" for name in ("bad", "closed", "one", "two")]
    assert errors.keys() == {"broken.py", *names, *(f"{name}.py" for name in names)}
    assert "ValueError: no table" in errors.pop("broken.py")
    misspelt = "model_definition.execution.comand: unknown field. Did you mean command?"
    assert errors["bad/manifest.yml"] == f"bad/manifest.yml:12: {misspelt}"
    assert errors["bad/manifest.yml.py"] == errors["bad/manifest.yml"]
    assert "closed/manifest.yml: cannot be read" in errors["closed/manifest.yml.py"]
    assert "'bundle-twice' is also claimed by two/manifest.yml" in errors["one/manifest.yml.py"]
    assert "'loader-twice' is also claimed by one/manifest.yml" in errors["two/manifest.yml"]
    assert [error for error in errors.values() if error not in said] == []


def test_of_manifests_that_are_all_broken_only_what_has_open_runs_stays(site, write):
    paths = [write(Path("srv/trainings", name), name) for name in ("idle", "runs")]
    site.configure(readme_snippet())
    site.airflow("dags", "reserialize")
    assert site.active() == [*OWN, ("trainings", "idle"), ("trainings", "runs")]
    site.airflow("dags", "trigger", "runs")
    for path in paths:
        misspell(path)
    site.airflow("dags", "reserialize")
    assert site.active() == [*OWN, ("trainings", "runs")]
    assert site.import_errors().keys() == {"idle/manifest.yml.py", "runs/manifest.yml"}
