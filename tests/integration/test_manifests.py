"""Manifests that people edit while Airflow runs: by bundle, loader file and importer."""

from __future__ import annotations

import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.limits import within

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
MANIFEST = """\
model_definition:
  name: {name}
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: {command}
    compute_configuration: {{name: cpu}}
training_data_reference:
  type: fs
  source: {{path: ./data}}
training_results_reference:
  type: fs
  target: {{path: ./results}}
retries: {{attempts: 1}}
"""
# Trains until it is told to end.
WAITS = """\
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""


def write(folder: Path, name: str, command: str = "python train.py") -> Path:
    """A manifest with a script and data beside it."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "numbers").write_text("1 2 3")
    (folder / "train.py").write_text(WAITS)
    path = folder / "manifest.yml"
    path.write_text(MANIFEST.format(name=name, command=command))
    return path


def import_errors(site) -> dict[str, str]:
    found = site.call("GET", "/importErrors", params={"limit": 100})["import_errors"]
    return {e["filename"]: e["stack_trace"] for e in found}


def dags(site, start: str) -> list[str]:
    """The active DAGs whose id starts so."""
    found = site.call("GET", "/dags", params={"dag_id_pattern": start, "limit": 1000})["dags"]
    return sorted(d["dag_id"] for d in found if not d["is_stale"])


def soon(what, limit_s: float = 60) -> None:
    """Waits until what() is true."""
    deadline = time.monotonic() + within(limit_s)
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.25)


def test_edits_are_picked_up_and_errors_come_and_go(site, dags_folder):
    folder = dags_folder / "edited"
    first = write(folder / "one", "edited-one")
    write(folder / "two", "edited-two")
    broken = write(folder / "three", "edited-three")
    good = broken.read_text()
    broken.write_text(good.replace("command:", "comand:"))
    file = "edited/three/manifest.yml.py"
    soon(lambda: file in import_errors(site))
    # Its words and nothing else: no traceback, no other file.
    assert import_errors(site)[file].strip() == (
        "edited/three/manifest.yml:5: model_definition.execution.comand: unknown field. "
        "Did you mean command?"
    )
    soon(lambda: dags(site, "edited-") == ["edited-one", "edited-two"])

    broken.write_text(good)
    soon(lambda: file not in import_errors(site) and "edited-three" in dags(site, "edited-"))

    # Two of one name: errors in both, which end when one of them is renamed.
    first.write_text(first.read_text().replace("edited-one", "edited-two"))
    both = {"edited/one/manifest.yml.py", "edited/two/manifest.yml.py"}
    soon(lambda: both <= set(import_errors(site)))
    assert "is also claimed by edited/two/manifest.yml." in import_errors(site)[min(both)]
    first.write_text(first.read_text().replace("edited-two", "edited-uno"))
    soon(lambda: not both & set(import_errors(site)))
    soon(lambda: "edited-uno" in dags(site, "edited-"))

    (folder / "two").rename(folder / "zwei")
    (folder / "three" / "manifest.yml").unlink()
    soon(lambda: "edited-three" not in dags(site, "edited-"))
    soon(lambda: "edited-two" in dags(site, "edited-"))
    found = site.call("GET", "/dags/edited-two/details")
    assert found["relative_fileloc"] == "edited/zwei/manifest.yml.py"
    # What nobody touched was left alone all the while.
    assert site.call("GET", "/dags/mnist-tf1")["is_stale"] is False


def test_a_run_ends_with_the_manifest_that_it_began_with(site, dags_folder, tmp_path):
    folder, go = dags_folder / "versions", tmp_path / "go"
    command = f"python train.py {go} ; echo I am the {{}} one"
    path = write(folder, "versions", command.format("first"))
    site.wait_for_dag("versions")
    run_id = site.trigger("versions")
    soon(lambda: site.task_instances("versions", run_id)["train"]["state"] == "running")
    path.write_text(path.read_text().replace("the first", "the second"))

    def code(version: int) -> str:
        found = site.call("GET", "/dagSources/versions", params={"version_number": version})
        return str(found["content"])

    def versions() -> int:
        return int(site.call("GET", "/dags/versions/dagVersions")["total_entries"])

    soon(lambda: versions() == 2)
    assert "the first" in code(1) and "the second" in code(2)
    assert code(2) == path.read_text()
    go.touch()
    # It trains nothing, so it ends in an error; but not before its own second command has run.
    assert site.wait_for_run("versions", run_id, 60) == "failed"
    assert "I am the first one" in site.task_log("versions", run_id, "transform")
    run_id = site.trigger("versions")
    assert site.wait_for_run("versions", run_id, 60) == "failed"
    assert "I am the second one" in site.task_log("versions", run_id, "transform")


@pytest.mark.parametrize("change", ["deleted", "renamed"])
def test_a_run_ends_though_its_manifest_is_gone(site, dags_folder, tmp_path, change):
    folder, go, name = dags_folder / f"was-{change}", tmp_path / "go", f"was-{change}"
    path = write(folder, name, f"python train.py {go} ; echo to the end")
    site.wait_for_dag(name)
    run_id = site.trigger(name)
    soon(lambda: site.task_instances(name, run_id)["train"]["state"] == "running")
    if change == "deleted":
        path.unlink()
        shown = "goes when its open runs have ended"
        soon(lambda: shown in site.call("GET", f"/dags/{name}/details")["doc_md"])
    else:
        path.rename(path.with_name("other.manifest.yml"))
        time.sleep(6)  # for a refresh, of which nothing is to be seen
    go.touch()
    # It trains nothing, so it ends in an error, after its last command.
    assert site.wait_for_run(name, run_id, 60) == "failed"
    assert "to the end" in site.task_log(name, run_id, "transform")
    if change == "deleted":
        soon(lambda: dags(site, name) == [])
    else:
        file = f"{name}/other.manifest.yml.py"
        soon(lambda: site.call("GET", f"/dags/{name}/details")["relative_fileloc"] == file)


def test_a_loader_file_does_without_the_bundle(site, loader_folder):
    """For installations that cannot change Airflow's configuration."""
    loader = loader_folder / "load_manifests.py"
    path = write(loader_folder / "good", "loaded", "python train.py . ; echo I was loaded")
    broken = write(loader_folder / "bad", "loaded-too")
    broken.write_text(broken.read_text().replace("command:", "comand:"))
    shutil.copy(ROOT / "dags" / "load_manifests.py", loader)
    soon(lambda: "bad/manifest.yml" in import_errors(site))
    assert (
        "bad/manifest.yml:5: model_definition.execution.comand: unknown field"
        in (import_errors(site)["bad/manifest.yml"])
    )
    site.wait_for_dag("loaded")
    run_id = site.trigger("loaded")
    assert site.wait_for_run("loaded", run_id, 60) == "failed"
    assert "I was loaded" in site.task_log("loaded", run_id, "transform")
    found = site.call("GET", "/dagSources/loaded")
    assert found["content"] == loader.read_text()
    assert path.read_text() in site.call("GET", "/dags/loaded/details")["doc_md"]
    broken.unlink()
    loader.touch()
    soon(lambda: site.call("GET", "/dags/loaded")["is_stale"] is False)


@pytest.mark.skipif(
    find_spec("airflow.sdk.importers") is None,
    reason="this Airflow has no DAG importers; make test-airflow VERSION=3.4.0b2 runs this",
)
def test_an_importer_does_without_the_bundle(site, importer_folder):
    """With Airflow's own YAML beside manifests."""
    path = write(importer_folder / "good", "imported", "python train.py . ; echo I was imported")
    broken = write(importer_folder / "bad", "imported-too")
    good = broken.read_text()
    broken.write_text(good.replace("command:", "comand:"))
    for name in ("one", "two"):
        write(importer_folder / name, "imported-twice")
    (importer_folder / "native.yaml").write_text(
        "$schema: https://airflow.apache.org/schemas/dag/2026-10-30.json\n"
        "dag_id: imported-native\n"
        "tasks: [{id: hello, uses: airflow.providers.standard.operators.empty.EmptyOperator}]\n"
    )
    (importer_folder / "compose.yml").write_text("services: {}\n")
    errors = {"bad/manifest.yml", "one/manifest.yml", "two/manifest.yml"}
    soon(lambda: errors <= set(import_errors(site)))
    found = import_errors(site)
    assert found["bad/manifest.yml"] == (
        "bad/manifest.yml:5: model_definition.execution.comand: unknown field. "
        "Did you mean command?"
    )
    assert "is also claimed by two/manifest.yml." in found["one/manifest.yml"]
    assert "compose.yml" not in found
    soon(lambda: dags(site, "imported") == ["imported", "imported-native"])
    site.wait_for_dag("imported")
    run_id = site.trigger("imported")
    assert site.wait_for_run("imported", run_id, 60) == "failed"
    assert "I was imported" in site.task_log("imported", run_id, "transform")
    found = site.call("GET", "/dagSources/imported")
    assert found["content"] == path.read_text()
    assert site.call("GET", "/dags/imported/details")["relative_fileloc"] == "good/manifest.yml"

    broken.write_text(good)
    (importer_folder / "two" / "manifest.yml").unlink()
    (importer_folder / "one" / "manifest.yml").touch()  # else when Airflow parses it again
    path.rename(path.with_name("weekly.manifest.yml"))
    soon(lambda: not errors & set(import_errors(site)))
    soon(lambda: "imported-twice" in dags(site, "imported"))
    renamed = "good/weekly.manifest.yml"
    details = "/dags/imported/details"
    soon(lambda: site.call("GET", details)["relative_fileloc"] == renamed)
