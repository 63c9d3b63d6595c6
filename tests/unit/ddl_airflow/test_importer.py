"""Folders of manifests and other YAML as Airflow 3.4 sees them through the importer."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import airflow
import pytest
from airflow.dag_processing.dagbag import BundleDagBag
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException
from airflow.serialization.serialized_objects import DagSerialization

from ddl_airflow.core.manifest.folder import ManifestText, read_manifest
from tests.limits import until, within

OURS = "ddl_airflow.importer.ManifestImporter"
AIRFLOWS = """\
$schema: https://airflow.apache.org/schemas/dag/2026-10-30.json
dag_id: of-airflow
tasks:
  - id: hello
    uses: airflow.providers.standard.operators.empty.EmptyOperator
"""
NONE = f"Airflow {airflow.__version__} has no DAG importers; make test-airflow VERSION=3.4.0b2 has"

pytestmark = pytest.mark.filterwarnings("ignore:.*a key is written out")
needs_importers = pytest.mark.skipif(find_spec("airflow.sdk.importers") is None, reason=NONE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle's folder."""
    path = tmp_path / "dags"
    path.mkdir()
    return path


class Site:
    """The registry of importers as the configuration has Airflow make it, and what it does."""

    def __init__(self, folder: Path) -> None:
        from airflow.dag_processing.bundles.local import LocalDagBundle

        self.bundle = LocalDagBundle(name="trainings", path=str(folder))

    @property
    def importer(self):
        return self.registry.get_importer("manifest.yml")

    @property
    def registry(self):
        from airflow.sdk.importers import get_importer_registry

        return get_importer_registry("trainings")

    def listed(self, *, safe_mode: bool = True) -> list[str]:
        """What the DAG processor would parse, each file in a process of its own."""
        found = self.registry.list_dag_definitions(self.bundle, safe_mode=safe_mode)
        return sorted(one.get_relative_loc(self.bundle.path) for _, one in found)

    def bag(self, name: str) -> BundleDagBag:
        path = self.bundle.path
        return BundleDagBag(
            dag_folder=str(path / name),
            bundle_path=path,
            bundle_name="trainings",
            load_op_links=False,
        )

    def parsed(self) -> dict[str, DAG | str]:
        """For each listed file its DAG, or the text of its import error."""
        result: dict[str, DAG | str] = {}
        for name in self.listed():
            bag = self.bag(name)
            for dag in bag.dags.values():
                DagSerialization.to_dict(dag)
                assert dag.relative_fileloc == name
                result[name] = dag
            for filed_under, error in bag.import_errors.items():
                assert filed_under == name
                result[name] = error
        return result

    def ids(self) -> dict[str, str]:
        return {n: d if isinstance(d, str) else d.dag_id for n, d in self.parsed().items()}


@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A bundle with the importer."""
    from airflow.sdk.importers import reset_importer_registry

    reset_importer_registry()
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_IMPORTER_CONFIGS", json.dumps([OURS]))
    yield Site(folder)
    reset_importer_registry()


@pytest.mark.skipif(find_spec("airflow.sdk.importers") is not None, reason="there are importers")
def test_an_airflow_without_importers_is_one_sentence():
    with pytest.raises(ImportError) as caught:
        import ddl_airflow.importer  # noqa: F401
    assert str(caught.value) == (
        "ddl_airflow.importer needs Airflow 3.4, the first that has DAG importers; in an older one "
        "ddl_airflow.bundle.ManifestBundle makes DAGs of manifests."
    )


@needs_importers
def test_each_manifest_is_a_dag_and_other_yaml_is_handed_on(site, folder, write_manifest):
    write_manifest(folder / "one", "first")
    write_manifest(folder / "deep" / "two", "second").rename(folder / "deep/two/weekly.yaml")
    bad = write_manifest(folder / "bad", "third")
    bad.write_text(bad.read_text().replace("command:", "comand:"))
    (folder / "compose.yml").write_text("services: {}\n")
    (folder / "broken.yml").write_text("a: [\n")
    (folder / "native.yaml").write_text(AIRFLOWS)
    (folder / "python.py").write_text("from airflow.sdk import DAG\ndag = DAG('of-python')\n")
    assert site.ids() == {
        "bad/manifest.yml": "bad/manifest.yml:5: model_definition.execution.comand: unknown field. "
        "Did you mean command?",
        "deep/two/weekly.yaml": "second",
        "native.yaml": "of-airflow",
        "one/manifest.yml": "first",
        "python.py": "of-python",
    }


@needs_importers
def test_all_of_a_folder_at_once_are_the_same(site, folder, write_manifest):
    """As for `airflow dags reserialize`."""
    write_manifest(folder / "one", "first")
    (folder / "bad").mkdir()
    (folder / "bad" / "manifest.yml").write_text("model_definition: [\n")
    (folder / "native.yaml").write_text(AIRFLOWS)
    bag = site.bag("")
    assert sorted(bag.dags) == ["first", "of-airflow"]
    assert list(bag.import_errors) == ["bad/manifest.yml"]


@needs_importers
def test_its_dag_is_that_of_the_bundle(site, folder, tmp_path, write_manifest, monkeypatch):
    from ddl_airflow.bundle import ManifestBundle

    write_manifest(folder, "first", more='schedule: "@daily"\n')
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH", str(tmp_path / "kept"))
    bundle = ManifestBundle(name="same", path=str(folder))
    bundle.initialize()
    stub = bundle.path / "manifest.yml.py"
    bag = BundleDagBag(dag_folder=str(stub), bundle_path=bundle.path, bundle_name="same")
    theirs, ours = bag.dags["first"], site.parsed()["manifest.yml"]
    assert ours.get_task("stage_data").code == theirs.get_task("stage_data").code == str(folder)
    assert ours.doc_md == theirs.doc_md
    places = {"fileloc", "relative_fileloc", "_processor_dags_folder", "bundle_name"}
    one, other = (DagSerialization.to_dict(dag)["dag"] for dag in (ours, theirs))
    assert {k: v for k, v in one.items() if k not in places} == {
        k: v for k, v in other.items() if k not in places
    }


@needs_importers
def test_warnings_are_the_dags_and_keys_are_not_shown(site, folder, literal_keys):
    text, keys = literal_keys
    (folder / "manifest.yml").write_text(text)
    bag = site.bag("manifest.yml")
    (warning,) = bag.dag_warnings
    assert (warning.dag_id, warning.warning_type) == ("literal", "ddl:manifest")
    assert warning.message.startswith("manifest.yml:11: ") and "key is written" in warning.message
    code = bag.dag_source_codes["literal"]
    assert code.language == "yaml" and "access_key_id: '***'" in code.source_code
    shown = [
        code.source_code,
        warning.message,
        json.dumps(DagSerialization.to_dict(*bag.dags.values())),
    ]
    assert not [key for key in keys for one in shown if key in one]


@needs_importers
def test_keys_of_what_is_no_yaml_any_more_are_not_shown(site, folder, literal_keys):
    from airflow.sdk.importers import FilesystemDagDefinition

    path = folder / "manifest.yml"
    path.write_text(literal_keys[0] + "more: [\n")
    assert site.importer.get_source_code(FilesystemDagDefinition(path)).source_code == ""
    path.unlink()
    assert site.importer.get_source_code(FilesystemDagDefinition(path)).source_code == ""


@needs_importers
def test_one_dag_id_in_two_files_is_an_error_in_both(site, folder, write_manifest):
    write_manifest(folder / "a", "same name")
    write_manifest(folder / "b", "same-name")
    write_manifest(folder / "c", "another")
    found = site.ids()
    assert found.pop("c/manifest.yml") == "another"
    assert "also claimed by b/manifest.yml" in found["a/manifest.yml"]
    assert "also claimed by a/manifest.yml" in found["b/manifest.yml"]
    # Seen before the next listing, which may take minutes.
    write_manifest(folder / "a", "its-own")
    assert site.bag("b/manifest.yml").dags.keys() == {"same-name"}
    assert site.ids() == {
        "a/manifest.yml": "its-own",
        "b/manifest.yml": "same-name",
        "c/manifest.yml": "another",
    }


@needs_importers
def test_a_tasks_process_goes_on_whoever_else_claims_its_dag(site, folder, write_manifest):
    write_manifest(folder / "a", "same")
    write_manifest(folder / "b", "same")
    assert site.bag("a/manifest.yml").dags.keys() == {"same"}


@needs_importers
def test_renamed_and_deleted_manifests_are_not_listed(site, folder, write_manifest):
    path = write_manifest(folder / "a", "first")
    write_manifest(folder / "b", "second")
    assert site.listed() == ["a/manifest.yml", "b/manifest.yml"]
    path.rename(path.with_name("other.yml"))
    assert site.listed() == ["a/other.yml", "b/manifest.yml"]
    (folder / "b" / "manifest.yml").unlink()
    assert site.listed() == ["a/other.yml"]


@needs_importers
def test_only_what_changed_is_read_again(site, folder, write_manifest, monkeypatch):
    import ddl_airflow.importer as module

    paths = [write_manifest(folder / name, name) for name in ("a", "b")]
    for path in paths:
        os.utime(path, (1e9, 1e9))
    monkeypatch.setattr("ddl_airflow.core.manifest.folder._SETTLED_S", -1)
    read, read_manifest = [], module.read_manifest
    monkeypatch.setattr(module, "read_manifest", lambda p: (read.append(p), read_manifest(p))[1])
    site.listed()
    assert sorted(set(read)) == paths
    read.clear()
    assert site.listed() == ["a/manifest.yml", "b/manifest.yml"] and read == []
    write_manifest(folder / "b", "changed")
    site.listed()
    assert set(read) == {paths[1]}


@needs_importers
def test_listing_has_a_limit_that_takes_no_dag_with_it(
    site, folder, write_manifest, monkeypatch, caplog
):
    import ddl_airflow.importer as module

    config = [{"classpath": OURS, "kwargs": {"listing_timeout": 0.2}}]
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_IMPORTER_CONFIGS", json.dumps(config))
    for number in range(10):
        os.utime(write_manifest(folder / f"{number}", f"m{number}"), (1e9, 1e9))
    monkeypatch.setattr("ddl_airflow.core.manifest.folder._SETTLED_S", -1)
    read_manifest = module.read_manifest

    def slow(path):
        time.sleep(0.05)  # as a file server far away
        return read_manifest(path)

    monkeypatch.setattr(module, "read_manifest", slow)
    began = time.monotonic()
    with pytest.raises(AirflowException, match="the DAGs stay as they were: .* longer than 0.2 s"):
        site.listed()
    assert time.monotonic() - began < within(1)
    tries = 1
    while tries < 10:  # what was read is not read again
        tries += 1
        try:
            found = site.listed()
            break
        except AirflowException:
            pass
    assert len(found) == 10 and tries > 2


@contextmanager
def held(path: Path) -> Iterator[None]:
    """A file whose reading hangs meanwhile, as on a file server that does not answer."""
    import ddl_airflow.importer as module

    read, answers = module.read_manifest, threading.Event()

    def hanging(one: Path) -> ManifestText | None:
        if one == path:
            answers.wait()
        return read(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_manifest", hanging)
        yield
        answers.set()


@needs_importers
def test_a_file_that_hangs_takes_no_dag_with_it(site, folder, write_manifest, monkeypatch):
    config = [{"classpath": OURS, "kwargs": {"listing_timeout": 0.2}}]
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_IMPORTER_CONFIGS", json.dumps(config))
    write_manifest(folder / "a", "first")
    path = write_manifest(folder / "b", "second")
    assert site.listed() == ["a/manifest.yml", "b/manifest.yml"]
    write_manifest(folder / "b", "changed")
    said = f"stay as they were: .* hangs at {re.escape(str(path))}. "
    with held(path):
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(AirflowException, match=said):
                site.listed()
            assert time.monotonic() - began < within(5)
    until(lambda: not any(one.name == "ddl-listing" for one in threading.enumerate()), 10)
    assert site.listed() == ["a/manifest.yml", "b/manifest.yml"]


@needs_importers
@pytest.mark.parametrize("limit", [0, -1, "1", True, None])
def test_a_limit_that_is_none_is_refused(limit):
    from ddl_airflow.importer import ManifestImporter

    with pytest.raises((ValueError, TypeError), match="listing_timeout|not supported"):
        ManifestImporter(listing_timeout=limit)


@needs_importers
def test_a_folder_that_is_away_takes_no_dag_with_it(site, folder, write_manifest):
    write_manifest(folder / "a", "first")
    assert site.listed() == ["a/manifest.yml"]
    folder.rename(folder.with_name("away"))
    with pytest.raises(AirflowException, match="stay as they were: .* is not there. Mount it"):
        site.listed()
    folder.mkdir()
    with pytest.raises(AirflowException, match="is empty, as a mount point is .* 1 manifests"):
        site.listed()
    (folder / ".empty").touch()
    assert site.listed() == []


@needs_importers
@pytest.mark.parametrize("calls", [["os.scandir", "os.stat"], ["os.scandir"]])
def test_a_folder_that_cannot_be_searched_keeps_what_is_in_it(
    site, folder, write_manifest, monkeypatch, calls
):
    write_manifest(folder / "near", "first")
    write_manifest(folder / "far" / "deep", "second")
    (folder / "far" / "native.yaml").write_text(AIRFLOWS)
    assert len(site.listed()) == 3

    def stale(call):
        def asked(path, *args, **kwargs):
            if str(path).startswith(str(folder / "far")):
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return call(path, *args, **kwargs)

        return asked

    with monkeypatch.context() as patch:
        for name in calls:
            patch.setattr(name, stale(getattr(os, name.removeprefix("os."))))
        found = site.listed()
    assert found == ["far/deep/manifest.yml", "far/native.yaml", "near/manifest.yml"]
    assert site.listed() == found


@needs_importers
def test_airflowignore_and_hidden_files_are_left_alone(site, folder, write_manifest):
    write_manifest(folder / "shown", "first")
    write_manifest(folder / "ignored", "second")
    write_manifest(folder / ".git", "third")
    write_manifest(folder / "__pycache__", "fourth")
    write_manifest(folder / "shown" / "swap", "fifth").rename(folder / "shown/.manifest.yml")
    (folder / ".airflowignore").write_text("ignored\n")
    assert site.listed() == ["shown/manifest.yml"]


@needs_importers
def test_copies_of_a_manifest_bundle_are_its_own(
    site, folder, tmp_path, write_manifest, monkeypatch
):
    """An importer for all bundles sees them too."""
    from ddl_airflow.bundle import ManifestBundle

    write_manifest(tmp_path / "manifests", "first")
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH", str(folder))
    bundle = ManifestBundle(name="theirs", path=str(tmp_path / "manifests"))
    bundle.initialize()
    site.bundle = bundle
    assert site.listed() == ["manifest.yml.py"]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{one}: &{one} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, one in zip("abcdefgh", "bcdefghi", strict=True)
)


@needs_importers
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"model_definition: [\n", "manifest.yml:2"),
        (b"\xff\xfe", "not UTF-8"),
        (b"# " + b"x" * 3_000_000, "256 KiB"),
        (BOMB.encode(), "manifest.yml:"),
        (b"", "manifest.yml"),
        (b"x: !!python/object/apply:os.system [exit]\n", "manifest.yml"),
    ],
)
def test_what_is_no_manifest_is_an_error_of_its_own(site, folder, write_manifest, content, said):
    write_manifest(folder / "good", "good")
    (folder / "manifest.yml").write_bytes(content)
    began = time.monotonic()
    found = site.ids()
    assert time.monotonic() - began < within(5)
    assert found.pop("good/manifest.yml") == "good"
    assert said in found["manifest.yml"] and "Traceback" not in found["manifest.yml"]


@needs_importers
@pytest.mark.filterwarnings("ignore:.*is not used, nor was it by FfDL")
def test_an_ffdl_manifest_is_one(site, folder):
    valid = Path(__file__).parents[2] / "fixtures" / "manifests" / "valid"
    (folder / "manifest.yml").write_bytes((valid / "ffdl.yml").read_bytes())
    assert isinstance(site.parsed()["manifest.yml"], DAG)


@needs_importers
def test_what_cannot_be_read_is_an_error_of_its_own(site, folder, write_manifest, monkeypatch):
    path = write_manifest(folder / "bad", "bad")
    opening = os.open

    def refusing(name, *args, **kwargs):
        if name == path.name and "dir_fd" in kwargs:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return opening(name, *args, **kwargs)

    monkeypatch.setattr("os.open", refusing)
    said = "bad/manifest.yml: cannot be read: Permission denied. Correct its permissions."
    assert site.ids() == {"bad/manifest.yml": said}


@needs_importers
def test_a_folder_that_becomes_a_link_during_the_parse_gives_no_other_rights(
    site, folder, write_manifest, monkeypatch
):
    rights = {"rights": {str(folder / "vision"): {"connections": ["vision_s3"]}}}
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps(rights))
    secret = "parameters: {key: {secret: true, conn_id: vision_s3}}\n"
    for name in ("guest", "vision"):
        write_manifest(folder / name, name, more=secret)
    assert site.ids()["vision/manifest.yml"] == "vision"

    def swapped(path):
        found = read_manifest(path)
        path.parent.rename(folder / ".before")
        path.parent.symlink_to("vision")
        return found

    monkeypatch.setattr("ddl_airflow.core.manifest.rights.read_manifest", swapped)
    error = site.bag("guest/manifest.yml").import_errors["guest/manifest.yml"]
    assert "'vision_s3' is not a connection for this manifest" in error


@needs_importers
def test_links_out_of_the_folder_are_followed_and_pipes_are_not_read(
    site, folder, tmp_path, write_manifest
):
    away = write_manifest(tmp_path / "away", "linked")
    (folder / "manifest.yml").symlink_to(away)
    (folder / "nowhere.manifest.yml").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / "manifest-pipe.yml")
    found = site.parsed()
    assert list(found) == ["manifest.yml"]
    # As for the loader: code is beside the link.
    assert found["manifest.yml"].get_task("stage_data").code == str(folder)


@needs_importers
@pytest.mark.parametrize(
    "name", ["a b", "Größe", "it's", "new\nline", "…", "%s {x}", "x.yml.py", "-rf", "a" * 200]
)
def test_odd_names_are_names(site, folder, write_manifest, name):
    write_manifest(folder / name, "odd")
    assert site.ids() == {f"{name}/manifest.yml": "odd"}


@needs_importers
def test_names_that_airflows_database_does_not_take_are_left_alone(
    site, folder, write_manifest, caplog
):
    write_manifest(folder / "good", "good")
    write_manifest(folder / os.fsdecode(b"latin-\xe9"), "bytes")
    write_manifest(folder.joinpath(*["d" * 200] * 6), "deep")
    assert site.ids() == {"good/manifest.yml": "good"}
    assert "not UTF-8. Rename it." in caplog.text and "more than 1000 char" in caplog.text


@needs_importers
def test_yaml_of_others_is_left_alone_where_airflow_has_no_importer_for_it(
    site, folder, write_manifest, monkeypatch
):
    from airflow.sdk.importers import FilesystemDagDefinition

    monkeypatch.setattr("ddl_airflow.importer.yaml_importer", lambda: None)
    write_manifest(folder / "good", "good")
    path = folder / "native.yaml"
    path.write_text(AIRFLOWS)
    assert site.ids() == {"good/manifest.yml": "good"}
    (error,) = site.importer.import_definition(FilesystemDagDefinition(path), site.bundle).errors
    assert error.message == "is no manifest, and this Airflow has no importer for other YAML"


@needs_importers
def test_a_large_file_of_others_is_not_read_whole(site, folder, caplog):
    with (folder / "data.yml").open("w") as file:
        file.write(AIRFLOWS)
        file.truncate(1_000_000_000)
    assert site.listed() == []
    assert "data.yml is left alone: too large for a DAG" in caplog.text


@needs_importers
def test_what_the_documentation_configures_is_this_importer(monkeypatch):
    from airflow.sdk.importers import get_importer_registry, reset_importer_registry

    from ddl_airflow.importer import ManifestImporter

    page = (Path(__file__).parents[3] / "docs" / "manifests.md").read_text()
    snippets = re.findall(r"^```ini\n(.*?)^```$", page, re.M | re.S)
    (snippet,) = (one for one in snippets if "ManifestImporter" in one)
    written = ConfigParser(interpolation=None)
    written.read_string(snippet)
    bundles = written["dag_processor"]["dag_bundle_config_list"]
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST", bundles)
    reset_importer_registry()
    found = {
        entry["name"]: type(get_importer_registry(entry["name"]).get_importer("x.yml"))
        for entry in json.loads(bundles)
    }
    assert found == {"dags-folder": type(None), "trainings": ManifestImporter}
    reset_importer_registry()
    (everywhere,) = re.findall(r"`dag_importer_configs = (.*?)`", page)
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_IMPORTER_CONFIGS", everywhere)
    assert type(get_importer_registry("dags-folder").get_importer("x.yaml")) is ManifestImporter
    reset_importer_registry()
