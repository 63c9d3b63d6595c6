"""Folders of manifests as Airflow's DAG processor and its workers see them through the bundle."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import time
from configparser import ConfigParser
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path

import airflow.settings
import msgspec
import pytest
from airflow.configuration import conf
from airflow.dag_processing.bundles.base import BundleVersion
from airflow.dag_processing.dagbag import BundleDagBag, sync_bag_to_db
from airflow.models import DagModel, DagRun
from airflow.models.asset import (
    AssetActive,
    AssetModel,
    AssetWatcherModel,
    DagScheduleAssetReference,
)
from airflow.models.dagbundle import DagBundleModel
from airflow.models.dagcode import DagCode
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException
from airflow.sdk.execution_time.supervisor import BlockedDBSession
from airflow.serialization.serialized_objects import DagSerialization
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunType
from sqlalchemy import create_engine, delete, select, text
from sqlalchemy.orm import sessionmaker

import ddl_airflow.bundle
import ddl_airflow.core.manifest.folder
import ddl_airflow.dag
from ddl_airflow.bundle import ManifestBundle
from ddl_airflow.core.manifest.folder import yaml_files
from ddl_airflow.core.real_path import place_of

pytestmark = pytest.mark.filterwarnings("ignore:.*a key is written out")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the manifests are."""
    path = tmp_path / "manifests"
    path.mkdir()
    return path


@pytest.fixture
def make_bundle(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """make_bundle(version=, host=): the bundle as a process of Airflow gets it, not initialised."""

    def make(version: str | None = None, host: str = "a") -> ManifestBundle:
        storage = tmp_path / f"storage-{host}"
        monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH", str(storage))
        return ManifestBundle(name="trainings", path=str(folder), version=version)

    return make


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """runs(dag_id, state): Airflow's database has such a run, and no other of that DAG."""
    engine = create_engine(f"sqlite:///{tmp_path / 'airflow.db'}")
    # What is asked for of it; the rest has to do with all of Airflow.
    with engine.begin() as database:
        database.execute(text("create table dag_run (dag_id text, state text, run_type text)"))
        database.execute(
            text(
                "create table dag (dag_id text, bundle_name text, relative_fileloc text, "
                "max_active_runs integer, exceeds_max_non_backfill boolean, is_stale boolean)"
            )
        )
    monkeypatch.setattr("airflow.settings.NonScopedSession", sessionmaker(engine))

    def make(dag_id: str, state: str) -> None:
        with engine.begin() as database:
            database.execute(text("delete from dag_run where dag_id = :dag"), {"dag": dag_id})
            database.execute(
                text("insert into dag_run values (:dag, :state, 'manual')"),
                {"dag": dag_id, "state": state},
            )

    yield make
    engine.dispose()


@pytest.fixture
def bundle(make_bundle) -> ManifestBundle:
    """The DAG processor's."""
    made = make_bundle()
    made.initialize()
    return made


def stubs(bundle: ManifestBundle) -> dict[str, Path]:
    """What the DAG processor finds: paths below the bundle's."""
    try:
        from airflow.utils.file import list_py_file_paths
    except ImportError:  # since 3.4 importers list them
        from airflow.sdk.importers import get_importer_registry

        listed = get_importer_registry(bundle.name).list_dag_definitions(bundle, safe_mode=True)
        found = [definition.path for _, definition in listed]
    else:
        found = [Path(path) for path in list_py_file_paths(bundle.path, safe_mode=True)]
    return {path.relative_to(bundle.path).as_posix(): path for path in found}


def parsed(bundle: ManifestBundle) -> dict[str, DAG | str]:
    """For each stub, parsed on its own, its DAG; or the text of its import error.

    Of a stub that has more, those under its name with the DAG's.
    """
    result: dict[str, DAG | str] = {}
    for name, path in stubs(bundle).items():
        bag = BundleDagBag(
            dag_folder=str(path),
            bundle_path=bundle.path,
            bundle_name=bundle.name,
            load_op_links=False,
        )
        alone = len(bag.dags) + len(bag.import_errors) == 1
        for dag in bag.dags.values():
            DagSerialization.to_dict(dag)
            assert dag.relative_fileloc == name
            # Since 3.4 Airflow stores as code what the bag has, not what is in fileloc's file.
            of_bag = getattr(bag, "dag_source_codes", {}).get(dag.dag_id)
            assert of_bag is None or of_bag.source_code == Path(dag.fileloc).read_text()
            result[name if alone else f"{name} {dag.dag_id}"] = dag
        for filed_under, error in bag.import_errors.items():
            # An error of the file would be one of its other DAGs.
            assert filed_under == (name if alone else name.removesuffix(".py"))
            result[name if alone else f"{name} {filed_under}"] = error
    return result


def version_of(bundle: ManifestBundle) -> str:
    current = bundle.get_current_version()
    assert isinstance(current, BundleVersion)
    return current.version


def identities(bundle: ManifestBundle) -> dict[str, tuple[int, int]]:
    """What tells Airflow that a stub changed, and whether it was written again."""
    return {n: (p.stat().st_mtime_ns, p.stat().st_ino) for n, p in stubs(bundle).items()}


def test_each_manifest_is_a_file_of_its_own_to_airflow(bundle, folder, write_manifest):
    write_manifest(folder / "one", "first")
    write_manifest(folder / "deep" / "two", "second").rename(folder / "deep/two/weekly.yaml")
    bad = write_manifest(folder / "bad", "third")
    bad.write_text(bad.read_text().replace("command:", "comand:"))
    (folder / "compose.yml").write_text("services: {}\n")
    bundle.refresh()
    found = parsed(bundle)
    error = found.pop("bad/manifest.yml.py")
    assert {name: dag.dag_id for name, dag in found.items()} == {
        "one/manifest.yml.py": "first",
        "deep/two/weekly.yaml.py": "second",
    }
    assert error == (
        "bad/manifest.yml:5: model_definition.execution.comand: unknown field. "
        "Did you mean command?"
    )


def test_scripts_and_folders_are_those_beside_the_manifest(bundle, folder, write_manifest):
    write_manifest(folder / "one", "first")
    bundle.refresh()
    dag = parsed(bundle)["one/manifest.yml.py"]
    assert dag.get_task("stage_data").code == str(folder / "one")
    assert dag.get_task("stage_data").dataset == {"uri": (folder / "one" / "data").as_uri()}


def test_only_what_changed_is_written_again(bundle, folder, write_manifest):
    path = write_manifest(folder / "one", "first", more="retries: {attempts: 0}\n")
    write_manifest(folder / "two", "second")
    bundle.refresh()
    before, version = identities(bundle), version_of(bundle)
    assert "retries.attempts: is 0" in parsed(bundle)["one/manifest.yml.py"]

    bundle.refresh()
    assert (identities(bundle), version_of(bundle)) == (before, version)
    path.touch()
    write_manifest(folder / "elsewhere", "x").rename(folder / "elsewhere" / "notes.txt")
    bundle.refresh()
    assert (identities(bundle), version_of(bundle)) == (before, version)

    path.write_text(path.read_text().replace("attempts: 0", "attempts: 1"))
    # An older time than any that Airflow has seen: a copy with its times kept, a moved file.
    os.utime(path, (1e9, 1e9))
    bundle.refresh()
    after = identities(bundle)
    assert version_of(bundle) != version
    assert after["two/manifest.yml.py"] == before["two/manifest.yml.py"]
    assert after["one/manifest.yml.py"][0] / 1e9 > time.time() - 60
    assert parsed(bundle)["one/manifest.yml.py"].dag_id == "first"


def test_what_changed_is_parsed_once_more_when_airflow_would_store_it(
    bundle, folder, write_manifest, monkeypatch
):
    """A parse may come too soon after the one before; see ManifestBundle._touch_again."""
    path = write_manifest(folder / "one", "first")
    write_manifest(folder / "two", "second")
    bundle.refresh()
    path.write_text(path.read_text() + "schedule: '@daily'\n")
    bundle.refresh()
    before = identities(bundle)
    for wait_s, touched in ((30, set()), (6, set(before)), (3600, set())):
        now = time.time() + wait_s
        monkeypatch.setattr(time, "time", lambda now=now: now)
        bundle.refresh()
        after = identities(bundle)
        assert {name for name in after if after[name] != before[name]} == touched
        before = after


def test_what_airflow_goes_on_holding_back_is_parsed_again(bundle, folder, write_manifest, runs):
    """See airflow_internals.held_back: no event and no schedule would start a run of it."""
    for name in ("one", "two", "three"):
        write_manifest(folder / name, name)
    bundle.refresh()
    with airflow.settings.NonScopedSession() as database:
        for name, of, held in (
            ("one", "trainings", True),
            ("two", "trainings", False),
            ("three", "others", True),
        ):
            row = {"name": name, "of": of, "stub": f"{name}/manifest.yml.py", "held": held}
            database.execute(text("insert into dag values (:name, :of, :stub, 1, :held, 0)"), row)
        database.commit()
    before = identities(bundle)
    runs("one", "running")
    bundle.refresh()
    assert identities(bundle) == before  # rightly so
    runs("one", "success")
    runs("two", "success")
    bundle.refresh()
    after = identities(bundle)
    assert {name for name in after if after[name] != before[name]} == {"one/manifest.yml.py"}


@pytest.mark.parametrize("restarted", [False, True])
def test_an_edit_that_is_undone_after_a_full_disk_is_not_run(
    bundle, make_bundle, folder, write_manifest, monkeypatch, restarted
):
    write_manifest(folder / "one", "first", "python train.py --until 1")
    bundle.refresh()
    write_manifest(folder / "one", "first", "python train.py --until 2")
    write = import_module("ddl_airflow.bundle")._write

    def full(path, *content):
        if path.suffix == ".py":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, *content)

    with monkeypatch.context() as patched:
        patched.setattr("ddl_airflow.bundle._write", full)
        with pytest.raises(OSError, match="No space left"):
            bundle.refresh()
    write_manifest(folder / "one", "first", "python train.py --until 1")
    bundle = make_bundle() if restarted else bundle
    bundle.refresh()
    train = parsed(bundle)["one/manifest.yml.py"].get_task("train")
    assert train.command == "python train.py --until 1"


def test_a_change_that_keeps_size_and_second_is_seen(bundle, folder, write_manifest):
    path = write_manifest(folder, "name-a")
    for name in ("name-b", "name-c", "name-d"):
        path.write_text(path.read_text().replace("name-", "NAME-").replace("NAME-", "name-"))
        write_manifest(folder, name)
        bundle.refresh()
        assert parsed(bundle)["manifest.yml.py"].dag_id == name


def test_deleted_and_renamed_manifests_go(bundle, folder, write_manifest):
    write_manifest(folder / "one", "first")
    write_manifest(folder / "two", "second")
    bundle.refresh()
    (folder / "one" / "manifest.yml").unlink()
    (folder / "two").rename(folder / "three")
    bundle.refresh()
    assert {n: dag.dag_id for n, dag in parsed(bundle).items()} == {
        "three/manifest.yml.py": "second"
    }
    # Whoever parses leaves what Python compiled.
    there = [p for p in bundle.path.rglob("*") if "__pycache__" not in p.parts]
    assert sorted(p.name for p in there) == [
        "manifest.yml",
        "manifest.yml.py",
        "three",
    ]
    # A file where a folder was, and the other way round.
    (folder / "three" / "manifest.yml").rename(folder / "x.yml")
    (folder / "three" / "train.py").unlink()
    (folder / "three").rmdir()
    bundle.refresh()
    (folder / "x.yml").unlink()
    write_manifest(folder / "x.yml", "third")
    write_manifest(folder, "fourth").rename(folder / "three")
    (folder / "three").rename(folder / "three.yml")
    bundle.refresh()
    assert {n: dag.dag_id for n, dag in parsed(bundle).items()} == {
        "x.yml/manifest.yml.py": "third",
        "three.yml.py": "fourth",
    }


class TwoBundles:
    """Two bundles, a and b, in Airflow's database as its DAG processor has them there."""

    def __init__(self, database, folder: Path) -> None:
        self.database, self._folder = database, folder
        self.bundles: dict[str, ManifestBundle] = {}
        with database() as session:
            session.add_all([DagBundleModel(name=name) for name in "ab"])
        for name in "ab":
            (folder / name).mkdir()
            (folder / name / "any").touch()
            self.start(name)

    def start(self, name: str, version: str | None = None) -> ManifestBundle:
        made = ManifestBundle(name=name, path=str(self._folder / name), version=version)
        if version is None:
            self.bundles[name] = made
        return made

    def turn(self, *names: str) -> dict[str, str]:
        """Refreshes those, and parses what they have; returns the import errors."""
        errors = {}
        for name in names:
            bundle = self.bundles[name]
            bundle.refresh()
            with self.database() as session:
                DagModel.deactivate_deleted_dags(name, [*stubs(bundle)], session=session)
            for path in stubs(bundle).values():
                bag = BundleDagBag(
                    dag_folder=str(path),
                    bundle_path=bundle.path,
                    bundle_name=name,
                    load_op_links=False,
                )
                sync_bag_to_db(bag, name, version_of(bundle))
                errors |= {f"{name}: {file}": text for file, text in bag.import_errors.items()}
        return errors

    def has(self, dag_id: str) -> tuple[str, str] | None:
        """The bundle that has the DAG, and its schedule; None if none has it."""
        with self.database() as session:
            found = session.get(DagModel, dag_id)
            stale = found is None or found.is_stale
            return None if stale else (found.bundle_name, found.timetable_summary)

    @contextmanager
    def open_run(self, dag_id: str):
        with self.database() as session:
            run = DagRun(dag_id, "open", run_type=DagRunType.MANUAL, state=DagRunState.RUNNING)
            run.run_after = datetime.now(UTC)
            session.add(run)
        yield
        with self.database() as session:
            session.scalar(select(DagRun)).state = DagRunState.SUCCESS


@pytest.fixture
def two(tmp_path: Path, runs, airflow_database, monkeypatch: pytest.MonkeyPatch) -> TwoBundles:
    storage = str(tmp_path / "storage")
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH", storage)
    monkeypatch.setenv("AIRFLOW__CORE__MIN_SERIALIZED_DAG_UPDATE_INTERVAL", "0")
    (tmp_path / "teams").mkdir()
    return TwoBundles(airflow_database, tmp_path / "teams")


def claimed(two, write_manifest, tmp_path):
    """One DAG id in both bundles, of which a had it first; returns the manifest of b."""
    write_manifest(tmp_path / "teams/a/x", "same", more="schedule: '0 3 * * *'\n")
    assert two.turn("a", "b") == {}
    return write_manifest(tmp_path / "teams/b/y", "same", more="schedule: '0 5 * * *'\n")


def test_a_dag_of_another_bundle_is_not_taken_from_it(two, tmp_path, write_manifest, monkeypatch):
    claimed(two, write_manifest, tmp_path)
    write_manifest(tmp_path / "teams/b/z", "other")
    for names in ("b", "ab", "ba"):
        errors = two.turn(*names)
        assert list(errors) == ["b: y/manifest.yml.py"]
        (said,) = errors.values()
        assert "the DAG id 'same' is also claimed by x/manifest.yml of bundle a" in said
        assert two.has("same") == ("a", "0 3 * * *")
        assert two.has("other")[0] == "b"
    # It stays so while nobody can be asked; a task of a run without a version may not ask.
    with monkeypatch.context() as away:
        away.setattr("airflow.settings.NonScopedSession", None)
        two.bundles["b"].refresh()
        two.start("b").refresh()
    assert "bundle a" in (two.bundles["b"].path / "y/manifest.yml.py").read_text()
    assert two.turn("b") == errors
    (tmp_path / "teams/a/x/manifest.yml").unlink()
    assert two.turn("a", "b") == {}
    assert two.has("same") == ("b", "0 5 * * *")


def test_a_worker_makes_a_version_whoever_has_its_dags(two, tmp_path, write_manifest, monkeypatch):
    """It may not ask the database; and one manifest must not stop the others."""
    claimed(two, write_manifest, tmp_path)
    two.turn("b")
    version = version_of(two.bundles["b"])
    other = str(tmp_path / "storage-of-worker")
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH", other)
    monkeypatch.setattr("airflow.settings.NonScopedSession", None)
    worker = two.start("b", version)
    worker.initialize()
    assert (worker.path / "y/manifest.yml.py").exists()


@pytest.mark.parametrize(
    "facts", [{"active": False}, {"last_refreshed": datetime.now(UTC) - timedelta(days=2)}]
)
def test_a_bundle_that_is_configured_no_more_has_no_dags(two, tmp_path, write_manifest, facts):
    """It stays active where each DAG processor looks at one bundle alone."""
    claimed(two, write_manifest, tmp_path)
    with two.database() as session:
        for name, value in facts.items():
            setattr(session.get(DagBundleModel, "a"), name, value)
    assert two.turn("b") == {}
    assert two.has("same") == ("b", "0 5 * * *")


def test_a_manifest_that_moves_to_another_bundle_takes_its_dag_along_when_runs_have_ended(
    two, tmp_path, write_manifest
):
    write_manifest(tmp_path / "teams/a/x", "same", more="schedule: '0 3 * * *'\n")
    two.turn("a", "b")
    with two.open_run("same"):
        (tmp_path / "teams/a/x").rename(tmp_path / "teams/b/x")
        for names in ("b", "a", "ab"):
            errors = two.turn(*names)
            assert list(errors) == (["b: x/manifest.yml.py"] if "b" in names else [])
            assert two.has("same")[0] == "a"
        assert two.has("same")[1] != "0 3 * * *"  # no run begins by itself
    assert two.turn("a", "b") == {}
    assert two.has("same") == ("b", "0 3 * * *")
    assert not stubs(two.bundles["a"])


def test_no_dag_is_held_that_another_bundle_has(two, tmp_path, write_manifest):
    """As releases before left it: who was parsed last had the DAG."""
    write_manifest(tmp_path / "teams/a/x", "same")
    write_manifest(tmp_path / "teams/b/x", "same", more="schedule: '0 5 * * *'\n")
    two.turn("b")
    (error,) = two.turn("a").values()
    assert "is also claimed by x/manifest.yml of bundle b" in error
    with two.open_run("same"):
        (tmp_path / "teams/a/x/manifest.yml").unlink()
        assert two.turn("a", "b") == {}
        assert not stubs(two.bundles["a"])
    assert two.turn("a", "b") == {}
    assert two.has("same") == ("b", "0 5 * * *")


def test_data_are_watched_as_the_switch_of_the_dag_says(two, tmp_path, write_manifest):
    """Airflow sees to it where the file is parsed, which may be an hour later."""
    for name in ("watched", "other"):
        data_change = "schedule: {on_data_change: true}\n"
        write_manifest(tmp_path / "teams/a" / name, name, more=data_change)
    two.turn("a")

    def switch(*, paused: bool) -> None:
        with two.database() as session:
            session.get(DagModel, "watched").is_paused = paused

    def touched() -> set[str]:
        before = identities(two.bundles["a"])
        two.bundles["a"].refresh()
        return {name for name, seen in identities(two.bundles["a"]).items() if seen != before[name]}

    def watchers() -> list[str]:
        with two.database() as session:
            return [*session.scalars(select(AssetWatcherModel.name))]

    assert not touched() and not watchers()  # Airflow pauses new DAGs
    switch(paused=False)
    assert touched() == {"watched/manifest.yml.py"}
    two.turn("a")
    assert watchers() == ["watched data"] and not touched()
    switch(paused=True)
    assert touched() == {"watched/manifest.yml.py"}
    two.turn("a")
    assert not watchers() and not touched()


def test_nothing_is_parsed_again_and_again_for_what_airflow_does_not_watch(
    two, tmp_path, write_manifest
):
    """An asset is not active where another one has its name; one of a Python DAG as well stays."""
    data_change = "schedule: {on_data_change: true}\n"
    write_manifest(tmp_path / "teams/a", "watched", more=data_change)
    two.turn("a")
    with two.database() as session:
        session.get(DagModel, "watched").is_paused = False
        session.execute(delete(AssetActive))
    before = identities(two.bundles["a"])
    two.bundles["a"].refresh()
    assert identities(two.bundles["a"]) == before

    with two.database() as session:
        asset = session.scalar(select(AssetModel))
        session.add(AssetActive.for_asset(asset))
    two.turn("a")
    with two.database() as session:
        session.get(DagModel, "watched").is_paused = True
        python = DagModel(dag_id="python", bundle_name="b", is_paused=False, is_stale=False)
        session.add(python)
        session.flush()
        session.add(DagScheduleAssetReference(dag_id="python", asset_id=asset.id))
    two.turn("a")
    with two.database() as session:
        assert session.scalar(select(AssetWatcherModel.name)) == "watched data"
    before = identities(two.bundles["a"])
    two.bundles["a"].refresh()
    assert identities(two.bundles["a"]) == before


@pytest.mark.parametrize("state", ["running", "queued"])
@pytest.mark.parametrize(
    "change", ["deleted", "renamed", "broken", "no DAG", "claimed", "another id"]
)
def test_a_dag_with_open_runs_stays_until_they_have_ended(
    bundle, make_bundle, folder, write_manifest, runs, change, state
):
    path = write_manifest(folder / "one", "first")
    path.write_text(path.read_text() + "schedule: '@daily'\n")
    write_manifest(folder / "two", "second")
    bundle.refresh()
    runs("first", state)
    runs("second", "success")
    if change == "deleted":
        path.unlink()
        (folder / "two" / "manifest.yml").unlink()
        (folder / "any").touch()
    elif change == "renamed":  # the file: then the DAG is in another, and needs no stub of its own
        path.rename(path.with_name("other.yml"))
    elif change == "broken":
        path.write_text(path.read_text() + "no_field: 1\n")
    elif change == "no DAG":  # what only this Airflow can tell
        path.write_text(path.read_text().replace("'@daily'", "{timetable: no.Where}"))
    elif change == "claimed":
        write_manifest(folder / "three", "first")
    else:
        path.write_text(path.read_text().replace("first", "third"))
    for again in (bundle, make_bundle()):
        for _ in range(2):
            again.refresh()
            dags = [dag for dag in parsed(again).values() if isinstance(dag, DAG)]
            (dag,) = [dag for dag in dags if dag.dag_id == "first"]
            # There the tasks of its runs look for it, in the version that they began with.
            assert dag.relative_fileloc == "one/manifest.yml.py"
            assert dag.get_task("stage_data").code == str(folder / "one")
            gone = change != "renamed"
            assert ("goes when its open runs have ended" in dag.doc_md) is gone
            assert (dag.schedule is None) is gone
            broken = [error for error in parsed(again).values() if isinstance(error, str)]
            assert len(broken) == {"broken": 1, "no DAG": 1, "claimed": 2}.get(change, 0)
            assert {d.dag_id for d in dags} == {
                *("first",),
                *([] if change == "deleted" else ["second"]),
                *(["third"] if change == "another id" else []),
            }
    runs("first", "failed")
    again.refresh()
    left = {dag.dag_id: dag for dag in parsed(again).values() if isinstance(dag, DAG)}
    assert ("first" in left) is (change == "renamed")
    if change == "renamed":
        assert left["first"].relative_fileloc == "one/other.yml.py"
    assert not list(again.path.rglob(".was-*"))


def test_no_link_takes_the_manifest_of_another_folder(bundle, folder, write_manifest):
    """Its place, and with it the scripts that are run, would be the link's owner's to choose."""
    write_manifest(folder / "vision", "vision")
    (folder / "a guest’s 100%").mkdir()
    for name, to in (("a", "../vision"), ("b", ".."), ("c", "c"), ("d", "nowhere"), ("e", "../e")):
        (folder / "a guest’s 100%" / name).symlink_to(to)
    (folder / "e").symlink_to("a guest’s 100%")
    bundle.refresh()
    found = parsed(bundle)
    assert list(found) == ["vision/manifest.yml.py"]
    assert found["vision/manifest.yml.py"].get_task("stage_data").code == str(folder / "vision")


def sync(link: Path, to: Path) -> None:
    """Turns a link, as git-sync does."""
    link.with_name(".new-link").symlink_to(os.path.relpath(to, link.parent))
    link.with_name(".new-link").replace(link)


def test_a_synced_repository_has_the_name_of_its_own_link(bundle, folder, write_manifest):
    """``repo -> .worktrees/<commit>``; others may link to what they know of it."""
    teams = folder / "teams"
    for commit in ("1", "2"):
        write_manifest(teams / ".worktrees" / commit / "vision", "vision")
    (teams / "repo").symlink_to(".worktrees/1")
    for guest in ("a", "z"):
        (folder / guest).mkdir()
        (folder / guest / "a").symlink_to("../teams/.worktrees/1/vision")
        (folder / guest / "b").symlink_to("../teams/repo")
    bundle.refresh()
    before = identities(bundle)
    assert list(parsed(bundle)) == ["teams/repo/vision/manifest.yml.py"]
    sync(teams / "repo", teams / ".worktrees" / "2")
    shutil.rmtree(teams / ".worktrees" / "1")
    version = version_of(bundle)
    bundle.refresh()
    assert (identities(bundle), version_of(bundle)) == (before, version)


@pytest.fixture
def teams(folder, write_manifest, monkeypatch):
    """Folders of two teams; only that of vision has a right, to the connection vision_s3."""
    write_manifest(folder / "vision", "vision")
    rights = {"rights": {str(folder / "vision"): {"connections": ["vision_s3"]}}}
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps(rights))
    return folder


def of_vision(path: Path) -> None:
    """Has a manifest name the connection that is vision's alone."""
    data = "{type: s3, connection: {conn_id: vision_s3}, source: {bucket: some-bucket}}"
    text = re.sub(
        r"(?s)(training_data_reference:).*(training_results)", rf"\1 {data}\n\2", path.read_text()
    )
    path.write_text(text)


NO_RIGHT = "'vision_s3' is not a connection for this manifest"


def test_a_folder_that_becomes_a_link_gives_no_other_rights(
    make_bundle, bundle, teams, write_manifest
):
    of_vision(write_manifest(teams / "guests" / "sub", "guest"))
    bundle.refresh()
    began_with = version_of(bundle)
    assert NO_RIGHT in parsed(bundle)["guests/sub/manifest.yml.py"]
    (teams / "guests" / "sub").rename(teams / "guests" / "before")
    (teams / "guests" / "sub").symlink_to(teams / "vision")
    pinned = make_bundle(began_with)
    pinned.initialize()
    for one in (bundle, pinned):
        error = parsed(one)["guests/sub/manifest.yml.py"]
        assert isinstance(error, str) and "Wait until the bundle is refreshed; for a run" in error
        said = (
            f"guests/sub/manifest.yml: its folder leads to {teams}/vision now, and not where its "
        )
        assert f"{said}rights ([ddl] manifest_rights) were looked up when it was read" in error
    bundle.refresh()
    assert "guests/sub/manifest.yml.py" not in stubs(bundle)
    assert NO_RIGHT in parsed(bundle).pop("guests/before/manifest.yml.py")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_folder_that_is_swapped_while_its_manifest_is_read_gives_no_other_rights(
    bundle, teams, write_manifest, monkeypatch, when
):
    """By the time its text has been read, its name may lead elsewhere."""
    path = write_manifest(teams / "guests" / "sub", "guest")
    of_vision(path)
    read = ddl_airflow.bundle.read_manifest

    def swapped(path: Path):
        """Its text is of the folder that is there at that moment, not before or after."""
        sub = path.parent
        if sub.name != "sub":
            return read(path)
        if when == "before":
            sub.rename(aside := sub.with_name(".aside"))
            other = sub.with_name(".other")
            shutil.copytree(aside, other)
            sub.symlink_to(".other")
        found = read(path)
        if when == "before":
            sub.unlink()
        else:
            sub.rename(sub.with_name(".other"))
        sub.symlink_to(teams / "vision")
        return found

    monkeypatch.setattr(ddl_airflow.bundle, "read_manifest", swapped)
    bundle.refresh()
    error = parsed(bundle)["guests/sub/manifest.yml.py"]
    assert isinstance(error, str) and f"its folder leads to {teams}/vision now" in error


def test_a_folder_that_is_swapped_during_the_parse_gives_no_other_rights(
    bundle, teams, write_manifest, monkeypatch
):
    """Whenever that is: where it lies is looked for once, and what is opened is held to that."""
    of_vision(write_manifest(teams / "guests" / "sub", "guest"))
    write_manifest(teams / "guests" / "plain", "plain")
    bundle.refresh()
    look = ddl_airflow.dag._place_of_stub

    def swapped(folder, path, *more):
        found = look(folder, path, *more)
        sub = Path(folder, path).parent
        if sub.parent.name == "guests":
            sub.rename(sub.with_name(f".{sub.name}"))
            sub.symlink_to("../vision")
        return found

    monkeypatch.setattr(ddl_airflow.dag, "_place_of_stub", swapped)
    found = parsed(bundle)
    assert NO_RIGHT in found["guests/sub/manifest.yml.py"]
    said = f"{teams}/vision/data is not a folder for manifests in {teams}/guests/plain"
    assert said in found["guests/plain/manifest.yml.py"]


@pytest.mark.parametrize("link", ["repo", "all/repo", "far/repo", "."])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("has_rights", [True, False])
def test_a_synced_repository_keeps_its_rights_for_the_newest_stubs_and_for_open_runs(
    make_bundle, tmp_path, folder, write_manifest, monkeypatch, runs, link, kept, has_rights
):
    """The link lies in the bundle's folder, deeper, behind another link, or is that folder."""
    turned = folder / link
    if link == "far/repo":
        (tmp_path / "far").mkdir()
        (folder / "far").symlink_to(tmp_path / "far")
        turned = tmp_path / "far" / "repo"
    elif link == ".":
        folder.rmdir()
    turned.parent.mkdir(exist_ok=True)
    states = turned.parent / ".worktrees"
    for commit in ("1", "2"):
        path = write_manifest(states / commit / "vision", "released")
        of_vision(path)
        os.utime(path, (1e9, 1e9))
    sync(turned, states / "1")
    if has_rights:
        rights = {"rights": {str(folder / link / "vision"): {"connections": ["vision_s3"]}}}
        monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps(rights))
    bundle = make_bundle()
    bundle.initialize()
    began_with, before = version_of(bundle), identities(bundle)
    assert [dag.dag_id for dag in parsed(bundle).values()] == ["released"]
    runs("released", "running")
    sync(turned, states / "2")
    if not kept:
        shutil.rmtree(states / "1")

    def check() -> None:
        pinned = make_bundle(began_with)
        pinned.initialize()
        for one in (bundle, pinned):
            (dag,) = parsed(one).values()
            assert dag.get_task("stage_data").code == str(states / "2" / "vision")

    check()
    bundle.refresh()
    assert (version_of(bundle), identities(bundle)) == (began_with, before)
    check()


@pytest.mark.parametrize("link", [".", "repo"])
def test_a_link_that_is_turned_while_manifests_are_read_leaves_them_their_rights(
    make_bundle, tmp_path, folder, write_manifest, monkeypatch, link
):
    if link == ".":
        folder.rmdir()
    states, turned = tmp_path / ".worktrees", folder / link
    for commit in ("1", "2"):
        for name in ("a", "b"):
            of_vision(write_manifest(states / commit / name, name))
    sync(turned, states / "1")
    rights = {"rights": {str(turned): {"connections": ["vision_s3"]}}}
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps(rights))
    read, turns = ddl_airflow.bundle.read_manifest, []
    bundle = make_bundle()
    bundle.initialize()
    version = version_of(bundle)

    def turning(path):
        found = read(path)
        if not turns:
            turns.append(path)
            sync(turned, states / "2")
        return found

    monkeypatch.setattr(ddl_airflow.bundle, "read_manifest", turning)
    for path in (states / "1").rglob("*.yml"):
        os.utime(path, (1e9, 1e9))
    bundle.refresh()
    assert turns and version_of(bundle) == version
    shutil.rmtree(states / "1")
    pinned = make_bundle(version_of(bundle))
    pinned.initialize()
    for one in (bundle, pinned):
        assert sorted(dag.dag_id for dag in parsed(one).values()) == ["a", "b"]


def test_links_of_who_owns_what_they_lead_to_name_it_as_they_did(bundle, folder, write_manifest):
    """Each release would else move the DAGs behind ``current -> releases/5``."""
    for name in ("5", "6"):
        write_manifest(folder / "team" / "releases" / name, f"r{name}")
    (folder / "team" / "current").symlink_to("releases/5")
    bundle.refresh()
    first = ["team/current/manifest.yml.py", "team/releases/6/manifest.yml.py"]
    assert sorted(stubs(bundle)) == first
    sync(folder / "team" / "current", folder / "team" / "releases" / "6")
    bundle.refresh()
    other = ["team/current/manifest.yml.py", "team/releases/5/manifest.yml.py"]
    assert sorted(stubs(bundle)) == other


def test_a_link_that_is_turned_between_names_of_one_file_is_looked_up_anew(
    bundle, tmp_path, folder, write_manifest, monkeypatch
):
    """As ``rsync --link-dest`` makes a release: nothing of the file itself tells."""
    path = write_manifest(tmp_path / "1", "released")
    os.utime(path, (1e9, 1e9))
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / path.name).hardlink_to(path)
    monkeypatch.setattr("ddl_airflow.core.manifest.folder._SETTLED_S", -1)
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", '{"rights": {}}')
    (folder).mkdir(exist_ok=True)
    sync(folder / "current", tmp_path / "1")
    bundle.refresh()
    sync(folder / "current", tmp_path / "2")
    assert isinstance(parsed(bundle)["current/manifest.yml.py"], str)
    bundle.refresh()
    assert parsed(bundle)["current/manifest.yml.py"].dag_id == "released"


def test_listings_of_manifests_without_links_are_read_by_an_earlier_state(
    bundle, folder, write_manifest, monkeypatch
):
    write_manifest(folder / "a", "a")
    write_manifest(folder / ".b", "b")
    (folder / "b").symlink_to(".b")
    bundle.refresh()
    assert {len(entry) for entry in listing_of(bundle).values()} == {5}
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", '{"rights": {}}')
    version = version_of(bundle)
    bundle.refresh()
    assert {name: len(one) for name, one in listing_of(bundle).items()} == {
        "a/manifest.yml": 5,
        "b/manifest.yml": 6,
    }
    assert version_of(bundle) != version


def listing_of(bundle: ManifestBundle) -> dict[str, list[object]]:
    path = bundle.base_dir / "listings" / f"{version_of(bundle)}.json"
    return json.loads(path.read_bytes())


def test_a_link_that_leads_to_another_folder_takes_its_rights_at_the_next_refresh(
    bundle, teams, write_manifest
):
    """No state of a repository: as ``guests/now`` leads to one folder, then to another."""
    path = write_manifest(teams / "guests" / ".old", "guest")
    of_vision(path)
    (teams / "vision" / ".hidden").mkdir()
    shutil.copy2(path, teams / "vision" / ".hidden")
    (teams / "guests" / "now").symlink_to(teams / "guests" / ".old")
    bundle.refresh()
    assert NO_RIGHT in parsed(bundle)["guests/now/manifest.yml.py"]
    sync(teams / "guests" / "now", teams / "vision" / ".hidden")
    assert isinstance(parsed(bundle)["guests/now/manifest.yml.py"], str)
    version = version_of(bundle)
    bundle.refresh()
    assert version_of(bundle) != version
    assert parsed(bundle)["guests/now/manifest.yml.py"].dag_id == "guest"


@pytest.mark.parametrize("has_rights", [True, False])
def test_a_host_whose_links_lead_elsewhere_makes_the_same_version(
    make_bundle, tmp_path, folder, write_manifest, monkeypatch, has_rights
):
    if has_rights:
        rights = {"rights": {str(folder / "shared"): {}}}
        monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps(rights))
    for host in ("a", "b"):
        write_manifest(tmp_path / f"mount-{host}" / "jobs", "job")
    (folder / "shared").symlink_to(tmp_path / "mount-a")
    bundle = make_bundle()
    bundle.initialize()
    sync(folder / "shared", tmp_path / "mount-b")
    other = make_bundle(version_of(bundle), "b")
    other.initialize()
    (dag,) = parsed(other).values()
    assert dag.get_task("stage_data").code == str(tmp_path / "mount-b" / "jobs")


def test_stubs_of_before_there_were_domains_have_the_rights_of_their_own_path_alone(
    make_bundle, folder, write_manifest, monkeypatch, tmp_path
):
    """As open runs have them after the upgrade, or since the site has had a table."""
    for name in ("plain", ".releases/1"):
        of_vision(write_manifest(folder / name, name.strip("./").replace("/", "-")))
    (folder / "current").symlink_to(".releases/1")
    bundle = make_bundle()
    bundle.initialize()
    began_with = version_of(bundle)
    assert "domain" not in "".join(map(str, identities(bundle)))
    (line,) = {
        line
        for path in bundle.path.rglob("*.py")
        for line in path.read_text().splitlines()
        if "current/" in line
    }
    assert "domain=" not in line
    entry = {"connections": ["vision_s3"]}
    rights = {"rights": {str(folder / name): entry for name in ("plain", "current")}}
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps(rights))
    found = parsed(bundle)
    assert found["plain/manifest.yml.py"].dag_id == "plain"
    assert "were looked up when it was read" in found["current/manifest.yml.py"]
    bundle.refresh()
    assert all(not isinstance(one, str) for one in parsed(bundle).values())
    pinned = make_bundle(began_with)
    pinned.initialize()
    assert "were looked up when it was read" in parsed(pinned)["current/manifest.yml.py"]


@pytest.mark.parametrize("how", ["gone", "closed"])
def test_a_dag_behind_a_link_keeps_its_rights_while_its_manifest_is_away(
    bundle, teams, write_manifest, runs, monkeypatch, how
):
    """It is gone, and has open runs; or the folder of the link cannot be searched."""
    (teams / "guests" / "x").mkdir(parents=True)
    of_vision(write_manifest(teams / "vision" / ".b", "b"))
    (teams / "guests" / "x" / "b").symlink_to(teams / "vision" / ".b")
    bundle.refresh()
    assert parsed(bundle)["guests/x/b/manifest.yml.py"].dag_id == "b"
    runs("b", "running")
    if how == "gone":
        (teams / "vision" / ".b" / "manifest.yml").unlink()
    else:
        scandir = os.scandir

        def refused(opened):
            if isinstance(opened, int) and place_of(opened) == teams / "guests" / "x":
                raise PermissionError(errno.EACCES, "Permission denied", opened)
            return scandir(opened)

        monkeypatch.setattr("os.scandir", refused)
    bundle.refresh()
    assert parsed(bundle)["guests/x/b/manifest.yml.py"].dag_id == "b"


def test_a_table_that_cannot_be_read_for_a_moment_leaves_links_as_they_were(
    make_bundle, bundle, teams, write_manifest, monkeypatch
):
    (teams / "guests").mkdir()
    of_vision(write_manifest(teams / "vision" / ".b", "b"))
    (teams / "guests" / "b").symlink_to(teams / "vision" / ".b")
    bundle.refresh()
    version = version_of(bundle)
    with monkeypatch.context() as patch:
        patch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", str(teams / "gone.yml"))
        bundle.refresh()
        assert "gone.yml" in parsed(bundle)["guests/b/manifest.yml.py"]
    assert version_of(bundle) == version
    assert parsed(bundle)["guests/b/manifest.yml.py"].dag_id == "b"


@pytest.mark.parametrize("how", ["above", "committed"])
def test_no_link_that_is_turned_makes_what_others_have_a_manifests_own(
    make_bundle, folder, write_manifest, monkeypatch, how
):
    """To a folder above, of which a part has another entry; or one in a synced repository."""
    write_manifest(folder / "teams" / "vision", "vision")
    teams = {str(folder / "teams"): {}, str(folder / "teams" / "vision"): {}}
    link, repo = folder / "teams" / "guest" / "l", folder / "guest"
    if how == "above":
        path = write_manifest(folder / "teams" / "guest" / ".w1", "guest")
        sync(link, path.parent)
    else:
        path = write_manifest(folder / ".worktrees" / "1" / "sub", "guest")
        (folder / ".worktrees" / "2").mkdir()
        (folder / ".worktrees" / "2" / "sub").symlink_to("../../teams")
        sync(repo, folder / ".worktrees" / "1")
    path.write_text(path.read_text().replace("./data", "./vision/data"))
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps({"rights": teams}))
    bundle = make_bundle()
    bundle.initialize()
    name = "teams/guest/l/manifest.yml.py" if how == "above" else "guest/sub/manifest.yml.py"
    assert parsed(bundle)[name].dag_id == "guest"
    if how == "above":
        sync(link, folder / "teams")
    else:
        sync(repo, folder / ".worktrees" / "2")
    assert f"its folder leads to {folder}/teams now" in parsed(bundle)[name]


def test_a_link_within_a_folder_without_an_entry_is_turned_within_that_alone(
    bundle, folder, write_manifest, monkeypatch
):
    """Else who has the folder would have the scripts, data and results of others."""
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", '{"rights": {}}')
    for name in ("guest/.1", "guest/.2", "audio"):
        write_manifest(folder / name, name[-1])
    link = folder / "guest" / "jobs"
    sync(link, folder / "guest" / ".1")
    bundle.refresh()
    sync(link, folder / "guest" / ".2")
    assert parsed(bundle)["guest/jobs/manifest.yml.py"].dag_id == "1"
    sync(link, folder / "audio")
    assert f"leads to {folder}/audio now" in parsed(bundle)["guest/jobs/manifest.yml.py"]


def test_a_folder_behind_a_link_that_cannot_be_searched_says_why(
    bundle, teams, tmp_path, write_manifest, monkeypatch
):
    """And not that it leads elsewhere, which would end never."""
    write_manifest(tmp_path / "far" / "in", "far")
    (teams / "guests").mkdir()
    (teams / "guests" / "b").symlink_to(tmp_path / "far")
    scandir = os.scandir

    def refused(opened):
        if isinstance(opened, int) and place_of(opened) == tmp_path / "far" / "in":
            raise PermissionError(errno.EACCES, "Permission denied", opened)
        return scandir(opened)

    with monkeypatch.context() as patch:
        patch.setattr("os.scandir", refused)
        bundle.refresh()
    error = parsed(bundle)["guests/b/in.py"]
    assert error == "guests/b/in: cannot be read: Permission denied. Correct its permissions."


def test_the_error_of_a_manifest_with_open_runs_stays(bundle, folder, write_manifest, runs):
    """It is filed under the manifest, which is no file to Airflow: at the bundle's next version
    Airflow deletes it, until the stub is parsed again.
    """
    for name in ("one", "two", "three"):
        write_manifest(folder / name, name)
    bundle.refresh()
    runs("one", "running")
    path = folder / "one" / "manifest.yml"
    path.write_text(path.read_text() + "no_field: 1\n")
    bundle.refresh()
    before = identities(bundle)
    bundle.refresh()
    assert identities(bundle) == before  # there is no other version
    write_manifest(folder / "two", "two", command="python train.py --more")
    bundle.refresh()
    after = identities(bundle)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"one/manifest.yml.py", "two/manifest.yml.py"}


def test_a_place_that_another_manifest_has_taken_is_its_own(bundle, folder, write_manifest, runs):
    for name in ("first", "second"):
        write_manifest(folder / name, name)
    bundle.refresh()
    runs("first", "running")
    (folder / "second").rename(folder / "x")
    (folder / "first").rename(folder / "second")
    (folder / "x").rename(folder / "first")
    bundle.refresh()
    assert {name: dag.dag_id for name, dag in parsed(bundle).items()} == {
        "first/manifest.yml.py": "second",
        "second/manifest.yml.py": "first",
    }


@pytest.mark.parametrize("back", [False, True])
def test_a_manifest_that_becomes_a_folder_keeps_its_open_runs(
    bundle, folder, write_manifest, runs, back
):
    """And a folder that becomes a manifest: both are below one place, as a file and as a folder."""
    (folder / "any").touch()
    ids = ["first", "second"]
    for made in range(2):
        shutil.rmtree(folder / "m 100%.yml", ignore_errors=True)
        (folder / "m 100%.yml").unlink(missing_ok=True)
        if back is bool(made):
            write_manifest(folder, ids[made]).rename(folder / "m 100%.yml")
        else:
            write_manifest(folder / "m 100%.yml", ids[made])
        bundle.refresh()
        if made == 0:
            runs("first", "running")
    found = {dag.dag_id: dag for dag in parsed(bundle).values()}
    assert set(found) == {"first", "second"}
    place = "m 100%.yml/manifest.yml.py" if back else "m 100%.yml.py"
    assert found["first"].relative_fileloc == place
    where = found["second"].relative_fileloc
    assert where.startswith("odd-names/" if back else "m 100%.yml/")
    runs("first", "failed")
    runs("second", "running")
    bundle.refresh()
    (dag,) = parsed(bundle).values()
    assert dag.relative_fileloc == where  # its run looks for it there
    runs("second", "failed")
    write_manifest(folder / "other", "other")
    bundle.refresh()
    assert len(parsed(bundle)) == 2


def test_a_manifest_that_comes_back_is_its_dags_again(bundle, folder, write_manifest, runs):
    path = write_manifest(folder, "first")
    (folder / "any").touch()
    bundle.refresh()
    runs("first", "running")
    content = path.read_text()
    path.unlink()
    bundle.refresh()
    path.write_text(content)
    bundle.refresh()
    assert [dag.relative_fileloc for dag in parsed(bundle).values()] == ["manifest.yml.py"]


def test_no_dag_goes_while_nobody_knows_its_runs(
    bundle, folder, write_manifest, monkeypatch, caplog
):
    write_manifest(folder, "first").rename(folder / "a.yml")
    (folder / "any").touch()
    bundle.refresh()
    (folder / "a.yml").unlink()
    (folder / "manifest.yml").unlink(missing_ok=True)
    monkeypatch.setattr("airflow.settings.NonScopedSession", BlockedDBSession)
    bundle.refresh()
    assert [dag.dag_id for dag in parsed(bundle).values()] == ["first"]
    assert "cannot ask which runs are open, so no DAG goes" in caplog.text


def test_a_broken_manifest_claims_no_dag_id_by_its_path(two, tmp_path, write_manifest):
    """Neither in its bundle nor of another's DAG."""
    folder = tmp_path / "teams/a"
    broken = write_manifest(folder / "x", "another")
    broken = broken.rename(folder / "digits.yml")
    broken.write_text(broken.read_text().replace("command:", "comand:"))
    write_manifest(folder / "copy", "digits.yml")
    write_manifest(tmp_path / "teams/b/x", "elsewhere.yml")
    shutil.copy(broken, folder / "elsewhere.yml")
    two.turn("b")
    errors = two.turn("a")
    assert sorted(errors) == ["a: digits.yml.py", "a: elsewhere.yml.py"]
    assert all("comand: unknown field" in error for error in errors.values())
    assert two.has("digits.yml")[0] == "a"


def test_one_dag_id_in_two_files_is_an_error_in_both(bundle, folder, write_manifest):
    write_manifest(folder / "a", "same name")
    b = write_manifest(folder / "b", "same-name")
    write_manifest(folder / "c", "another")
    broken = write_manifest(folder / "d", "another")
    broken.write_text(broken.read_text().replace("command:", "comand:"))
    bundle.refresh()
    found = parsed(bundle)
    assert found["a/manifest.yml.py"] == (
        "a/manifest.yml:2: model_definition.name: the DAG id 'same-name' is also claimed by "
        "b/manifest.yml. Give each manifest its own name."
    )
    assert "b/manifest.yml:2" in found["b/manifest.yml.py"]
    assert "also claimed by a/manifest.yml." in found["b/manifest.yml.py"]
    assert found["c/manifest.yml.py"].dag_id == "another"  # a broken one claims nothing
    before = identities(bundle)["a/manifest.yml.py"]
    b.write_text(b.read_text().replace("same-name", "its own"))
    bundle.refresh()
    found = parsed(bundle)
    assert [found[f"{n}/manifest.yml.py"].dag_id for n in "abc"] == [
        "same-name",
        "its-own",
        "another",
    ]
    assert identities(bundle)["a/manifest.yml.py"] != before


def test_a_run_keeps_its_version_and_shows_its_code(bundle, make_bundle, folder, write_manifest):
    path = write_manifest(folder, "first", command="python train.py --old")
    bundle.refresh()
    version = version_of(bundle)
    path.write_text(path.read_text().replace("--old", "--new"))
    bundle.refresh()
    old = make_bundle(version)
    old.initialize()
    for one, word, other in ((old, "--old", "--new"), (bundle, "--new", "--old")):
        dag = parsed(one)["manifest.yml.py"]
        assert dag.get_task("train").command == f"python train.py {word}"
        assert dag.get_task("stage_data").code == str(folder)
        code = DagCode.get_code_from_file(dag.fileloc)
        assert word in code and other not in code and code.startswith("model_definition:")
    assert (version_of(old), old.path.name) == (version, version)
    # Airflow deletes versions that no task has used for a while; a run may still come back to it.
    shutil.rmtree(old.path)
    make_bundle(version).initialize()
    assert parsed(old)["manifest.yml.py"].get_task("train").command == "python train.py --old"
    with pytest.raises(AirflowException, match="cannot be refreshed"):
        old.refresh()


def test_another_host_makes_the_version_it_has_and_refuses_others(
    bundle, make_bundle, folder, write_manifest
):
    path = write_manifest(folder, "first")
    bundle.refresh()
    version = version_of(bundle)
    there = make_bundle(version, host="b")
    there.initialize()
    assert parsed(there)["manifest.yml.py"].dag_id == "first"
    path.write_text(path.read_text() + "# edited\n")
    with pytest.raises(AirflowException, match="share .dag_processor. dag_bundle_storage_path"):
        make_bundle(version, host="c").initialize()
    there.initialize()  # it is there now


def test_keys_are_not_shown_as_code(bundle, folder, literal_keys):
    text, keys = literal_keys
    (folder / "manifest.yml").write_text(text)
    bundle.refresh()
    dag = parsed(bundle)["manifest.yml.py"]
    code = DagCode.get_code_from_file(dag.fileloc)
    assert "access_key_id: '***'" in code
    assert not [key for key in keys if key in code + stubs(bundle)["manifest.yml.py"].read_text()]
    (folder / "manifest.yml").write_text(text.replace(keys[0], "${A}").replace(keys[1], "${B}"))
    bundle.refresh()
    dag = parsed(bundle)["manifest.yml.py"]
    assert "access_key_id: ${A}" in DagCode.get_code_from_file(dag.fileloc)


def test_keys_that_come_during_a_parse_are_not_shown_as_code(bundle, folder, literal_keys):
    text, keys = literal_keys
    path = folder / "manifest.yml"
    path.write_text(text.replace(keys[0], "${A}").replace(keys[1], "${B}"))
    bundle.refresh()
    dag = parsed(bundle)["manifest.yml.py"]
    path.write_text(text)
    bundle.refresh()
    # Airflow's DAG processor reads the code when the process that parsed the stub has ended.
    code = DagCode.get_code_from_file(dag.fileloc)
    assert "access_key_id: ${A}" in code and not [key for key in keys if key in code]


def test_a_full_disk_shows_no_keys_as_code(bundle, folder, literal_keys, monkeypatch):
    text, keys = literal_keys
    path, write = folder / "manifest.yml", ddl_airflow.bundle._write
    path.write_text(text)
    bundle.refresh()
    written = []

    def full(place, *content):
        if len(written) == fits:
            raise OSError(errno.ENOSPC, "No space left on device", str(place))
        written.append(place)
        write(place, *content)

    monkeypatch.setattr(ddl_airflow.bundle, "_write", full)
    for fits in range(6):
        written.clear()
        path.write_text(f"{text}# edit {fits}\n")
        with suppress(OSError):
            bundle.refresh()
        code = DagCode.get_code_from_file(parsed(bundle)["manifest.yml.py"].fileloc)
        assert not [key for key in keys if key in code]
    assert f"# edit {fits}" in code  # the last had room


def test_copies_are_as_private_as_the_manifest(bundle, folder, literal_keys):
    path = folder / "manifest.yml"
    path.write_text(literal_keys[0])
    path.chmod(0o600)
    bundle.refresh()
    private = [p for p in bundle.base_dir.rglob("*") if p.is_file() and p.stat().st_mode & 0o77]
    holding = [p for p in private if literal_keys[1][0] in p.read_text()]
    assert holding == []


def test_airflow_may_read_its_copies_whatever_the_manifests_owner_may(
    bundle, folder, write_manifest, literal_keys
):
    write_manifest(folder / "open", "first").chmod(0o044)
    (folder / "manifest.yml").write_text(literal_keys[0])
    (folder / "manifest.yml").chmod(0o004)
    bundle.refresh()
    files = [path for path in bundle.base_dir.rglob("*") if path.is_file()]
    assert [path for path in files if not path.stat().st_mode & 0o400] == []
    found = parsed(bundle)
    assert {dag.dag_id for dag in found.values()} == {"first", "literal"}


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_keys_are_on_disk_as_private_as_the_manifest_from_the_first_byte(
    bundle, folder, literal_keys, monkeypatch, umask
):
    path = folder / "manifest.yml"
    path.write_text(literal_keys[0])
    path.chmod(0o600)
    open_to_others = []

    def looking(change):
        def changed(what, mode, **more):
            found = os.fstat(what) if isinstance(what, int) else os.stat(what)
            open_to_others.append(found.st_size and found.st_mode & 0o77 and mode & 0o77 == 0)
            change(what, mode, **more)

        return changed

    monkeypatch.setattr(os, "chmod", looking(os.chmod))
    monkeypatch.setattr(os, "fchmod", looking(os.fchmod))
    before = os.umask(umask)
    try:
        bundle.refresh()
    finally:
        os.umask(before)
    assert open_to_others and not any(open_to_others)


def test_a_text_with_keys_is_kept_for_a_day_after_its_change(
    bundle, make_bundle, folder, literal_keys, write_manifest, monkeypatch
):
    def kept() -> list[str]:
        return [path.read_text() for path in (bundle.base_dir / "manifests").iterdir()]

    text, keys = literal_keys
    (folder / "manifest.yml").write_text(text)
    write_manifest(folder / "a", "first")
    os.utime(folder / "manifest.yml", (1e9, 1e9))
    bundle.refresh()
    version = version_of(bundle)
    (folder / "manifest.yml").write_text(text.replace(*keys))
    write_manifest(folder / "a", "second")
    bundle.refresh()
    assert len(kept()) == 4 and text in kept()  # a run may go on with it
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    bundle.refresh()
    assert len(kept()) == 3 and text not in kept() and text.replace(*keys) in kept()
    old = make_bundle(version)
    old.initialize()
    found = parsed(old)
    assert found["a/manifest.yml.py"].dag_id == "first"
    assert "cannot be read: keys were written out in it" in str(found["manifest.yml.py"])


def test_a_version_that_a_task_used_keeps_no_keys_for_longer(
    bundle, make_bundle, folder, literal_keys, write_manifest, monkeypatch
):
    text, keys = literal_keys
    (folder / "manifest.yml").write_text(text)
    write_manifest(folder / "a", "first")
    bundle.refresh()
    old = make_bundle(version_of(bundle))
    old.initialize()
    (folder / "manifest.yml").write_text(text.replace(keys[0], "${A}").replace(keys[1], "${B}"))
    bundle.refresh()
    assert parsed(old)["manifest.yml.py"].dag_id == "literal"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    bundle.refresh()
    files = [path.read_text() for path in bundle.base_dir.rglob("*") if path.is_file()]
    assert not [key for key in keys if key in "".join(files)]
    found = parsed(old)
    assert found["a/manifest.yml.py"].dag_id == "first"
    assert "cannot be read: keys were written out in it" in str(found["manifest.yml.py"])


def test_a_worker_with_its_own_storage_keeps_what_open_runs_began_with(
    bundle, make_bundle, folder, literal_keys
):
    def on_the_worker_days_later(text: str) -> None:
        for path in (folder.parent / "storage-b").rglob("*"):
            os.utime(path, (path.stat().st_mtime - 3 * 24 * 3600,) * 2)
        (folder / "manifest.yml").write_text(text)
        bundle.refresh()
        make_bundle(version_of(bundle), host="b").initialize()

    text, keys = literal_keys
    on_the_worker_days_later(text)
    old = make_bundle(version_of(bundle), host="b")
    on_the_worker_days_later(text.replace(*keys))
    assert parsed(old)["manifest.yml.py"].dag_id == "literal"
    on_the_worker_days_later(text.replace(keys[0], "${A}"))
    assert "keys were written out in it" in str(parsed(old)["manifest.yml.py"])


def test_a_task_that_is_killed_while_it_makes_its_version_leaves_no_keys(
    bundle, make_bundle, folder, literal_keys, monkeypatch
):
    text, keys = literal_keys
    (folder / "manifest.yml").write_text(text)
    bundle.refresh()
    old = make_bundle(version_of(bundle))
    if (task := os.fork()) == 0:
        monkeypatch.setattr(Path, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        old.initialize()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]) == -signal.SIGKILL
    (folder / "manifest.yml").write_text(text.replace(keys[0], "${A}").replace(keys[1], "${B}"))
    bundle.refresh()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    bundle.refresh()
    files = [path for path in bundle.base_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if any(key in path.read_text() for key in keys)]
    old.initialize()


def test_what_cannot_be_read_is_an_error_of_its_own(bundle, folder, write_manifest):
    write_manifest(folder / "good", "first")
    (folder / "bad").mkdir()
    (folder / "bad" / "manifest.yml").symlink_to("/proc/self/mem")
    (folder / "bad" / "pipe.yml").touch()
    (folder / "bad" / "pipe.yml").unlink()
    os.mkfifo(folder / "bad" / "pipe.yml")
    bundle.refresh()
    found = parsed(bundle)
    assert found.pop("good/manifest.yml.py").dag_id == "first"
    assert list(found) == ["bad/manifest.yml.py"]
    assert "bad/manifest.yml: cannot be read" in found["bad/manifest.yml.py"]


def test_a_pipe_that_takes_the_place_of_a_manifest_is_not_waited_for(
    bundle, folder, write_manifest, monkeypatch
):
    """Just when it is opened: whoever may write there could stop all DAGs."""
    write_manifest(folder / "good", "first")
    os.mkfifo(folder / "manifest.yml")
    monkeypatch.setattr("ddl_airflow.core.manifest.folder.may_be_read", lambda _: True)

    def waited(*_):
        pytest.fail("it is waited for")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(10)
    try:
        bundle.refresh()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert list(parsed(bundle)) == ["good/manifest.yml.py"]


def test_a_folder_that_cannot_be_searched_is_an_error_of_its_own(bundle, folder, write_manifest):
    write_manifest(folder / "good", "first")
    here = os.open(folder, os.O_RDONLY)
    for _ in range(20):  # deeper than a path can say
        os.mkdir("d" * 250, dir_fd=here)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    bundle.refresh()
    found = parsed(bundle)
    assert found.pop("good/manifest.yml.py").dag_id == "first"
    ((name, error),) = found.items()
    assert name.startswith("odd-names/") and "cannot be read: File name too long" in error
    assert len(error) < 500


def test_a_thousand_folders_in_each_other_stop_no_refresh(bundle, folder, write_manifest):
    write_manifest(folder / "good", "first")
    path = write_manifest(folder, "deep")
    deepest = folder
    try:
        for _ in range(1100):
            deepest = deepest / "d"
            deepest.mkdir()
        path.rename(deepest / "manifest.yml")
        bundle.refresh()
    finally:
        # What removes the folders of tests calls itself for each.
        subprocess.run(["rm", "-rf", folder / "d"], check=True)
    good, odd = sorted(stubs(bundle))
    assert good == "good/manifest.yml.py" and odd.startswith("odd-names/")


def test_a_folder_that_becomes_a_link_while_it_is_searched_is_one(
    bundle, folder, write_manifest, monkeypatch
):
    write_manifest(folder / "vision", "vision")
    write_manifest(folder / "a" / "sub", "guest")
    look = ddl_airflow.core.manifest.folder._is_folder

    def swapped(entry):
        found = look(entry)
        if entry.name == "sub":
            (folder / "a" / "sub").rename(folder / "a" / ".before")
            (folder / "a" / "sub").symlink_to(folder / "vision")
        return found

    monkeypatch.setattr("ddl_airflow.core.manifest.folder._is_folder", swapped)
    bundle.refresh()
    assert list(parsed(bundle)) == ["vision/manifest.yml.py"]


def test_a_folder_that_may_not_be_read_is_closed_by_each_name(write_manifest, trainer):
    folder = trainer.place / "dags"
    write_manifest(folder / "vision", "vision")
    write_manifest(folder / "closed", "second")
    (folder / "a").symlink_to("closed")
    (folder / "closed").chmod(0o711)
    closed: list[OSError] = []
    with trainer.acting():
        found = [path.parent.name for path, _ in yaml_files(folder, closed)]
    assert found == ["vision"]
    assert {Path(one.filename).name for one in closed} == {"closed", "a"}


def test_a_folder_that_cannot_be_searched_keeps_its_manifests_also_where_a_link_leads_to_them(
    bundle, folder, write_manifest, monkeypatch
):
    write_manifest(folder / "z" / "sub", "job")
    (folder / "y").mkdir()
    (folder / "y" / "l").symlink_to("../z/sub")
    bundle.refresh()
    scandir = os.scandir

    def refused(opened):
        if isinstance(opened, int) and place_of(opened) == folder / "z":
            raise PermissionError(errno.EACCES, "Permission denied", opened)
        return scandir(opened)

    monkeypatch.setattr("os.scandir", refused)
    for _ in range(2):
        bundle.refresh()
        monkeypatch.setattr("os.scandir", scandir)
        found = parsed(bundle)
        monkeypatch.setattr("os.scandir", refused)
        assert found.pop("z/sub/manifest.yml.py").dag_id == "job"
        assert list(found) == ["z.py"]


@pytest.mark.parametrize(
    "name",
    [
        b"manifest-\xff.yml",
        b"manifest\n.yml",
        b"manifest '\"\\{}.yml",
        "manifest-日本.yml".encode(),
        b"manifest" + b"x" * 240 + b".yml",
        b"a.yml.py/manifest.yml",
        b"a.yml.redacted/manifest.yml",
        b"manifest.yaml",
        b"manifest .yml",
    ],
)
def test_odd_names_are_names(bundle, folder, write_manifest, name):
    path = Path(os.fsdecode(os.path.join(os.fsencode(folder), name)))
    path.parent.mkdir(exist_ok=True)
    write_manifest(path.parent, "odd").rename(path)
    write_manifest(folder / "a.yml", "first").rename(folder / "b.yml")
    bundle.refresh()
    found = parsed(bundle)
    assert sorted(dag.dag_id for dag in found.values()) == ["first", "odd"]
    for stub, dag in found.items():
        stub.encode()  # a database takes it
        assert len(stub) < 600 and stub.isprintable()
        # As the process that parses hands it on; what fails there is lost without a word.
        msgspec.msgpack.encode(DagSerialization.to_dict(dag))
    path.write_text("learners: 0\n")
    bundle.refresh()
    (error,) = [one for one in parsed(bundle).values() if isinstance(one, str)]
    error.encode()
    assert all(line.isprintable() for line in error.splitlines())


def test_a_folder_whose_name_is_no_text_is_an_error_of_its_own(bundle, folder, write_manifest):
    """Airflow's messages are UTF-8, and the scripts' path is in them."""
    write_manifest(folder / "good", "first")
    write_manifest(folder / os.fsdecode(b"bad-\xff"), "second")
    bundle.refresh()
    found = parsed(bundle)
    assert found.pop("good/manifest.yml.py").dag_id == "first"
    (error,) = found.values()
    assert "manifest.yml: works with a folder whose name is not UTF-8: " in error
    assert r"/bad-\udcff. Rename it." in error


def test_a_folder_that_is_gone_takes_no_dag_with_it(bundle, folder, write_manifest):
    write_manifest(folder, "first")
    bundle.refresh()
    folder.rename(folder.with_name("away"))
    with pytest.raises(AirflowException, match="is not there. Mount it"):
        bundle.refresh()
    assert parsed(bundle)["manifest.yml.py"].dag_id == "first"
    folder.with_name("away").rename(folder)
    bundle.refresh()


@pytest.mark.parametrize("restarted", [False, True])
def test_an_empty_mount_point_takes_no_dag_with_it(
    bundle, make_bundle, folder, write_manifest, restarted
):
    write_manifest(folder, "first")
    write_manifest(folder / "below", "second")
    bundle.refresh()
    folder.rename(folder.with_name("away"))
    folder.mkdir()
    again = make_bundle() if restarted else bundle
    with pytest.raises(AirflowException, match=r"the DAGs stay .* is empty, as a mount .* 2 manif"):
        again.refresh()
    assert {dag.dag_id for dag in parsed(again).values()} == {"first", "second"}
    (folder / ".empty").touch()
    again.refresh()
    assert parsed(again) == {}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_folder_that_cannot_be_read_keeps_what_is_in_it(
    bundle, make_bundle, folder, write_manifest, monkeypatch, caplog, restarted
):
    """As on a file server that is away."""
    write_manifest(folder / "near", "first")
    write_manifest(folder / "far", "second")
    bundle.refresh()
    scandir, dead = os.scandir, folder / "far"

    def stale(opened):
        if isinstance(opened, int) and place_of(opened) == dead:
            raise OSError(errno.ESTALE, "Stale file handle", opened)
        return scandir(opened)

    monkeypatch.setattr("os.scandir", stale)
    again = make_bundle() if restarted else bundle
    again.refresh()
    found = parsed(again)
    assert found.pop("near/manifest.yml.py").dag_id == "first"
    assert found.pop("far/manifest.yml.py").dag_id == "second"
    assert "far: cannot be read: Stale file handle" in found.pop("far.py") and not found
    assert "its 1 manifests stay as they were" in caplog.text
    dead = folder
    with pytest.raises(AirflowException, match="the DAGs stay as they were.*Stale file handle"):
        again.refresh()
    monkeypatch.undo()


def test_a_restart_writes_nothing_again(bundle, make_bundle, folder, write_manifest):
    write_manifest(folder, "first")
    bundle.refresh()
    before = identities(bundle)
    again = make_bundle()
    again.initialize()
    assert (identities(again), version_of(again)) == (before, version_of(bundle))


def test_listings_of_a_month_ago_are_forgotten(bundle, make_bundle, folder, write_manifest):
    def kept(what: str) -> set[str]:
        return {path.name for path in (bundle.base_dir / what).iterdir()}

    for name in ("first", "second", "third"):
        write_manifest(folder / "a", name)
        write_manifest(folder / "b", "always")
        bundle.refresh()
    versions, texts = kept("listings"), kept("manifests")
    assert (len(versions), len(texts)) == (4, 4)  # one of the empty folder
    current = f"{version_of(bundle)}.json"

    def a_month_later(name: str) -> None:
        for path in (bundle.base_dir / "listings").iterdir():
            os.utime(path, (time.time() - 32 * 24 * 3600,) * 2)
        write_manifest(folder / "a", name)
        bundle.refresh()

    def texts_of(*listings: str) -> set[str]:
        read = [json.loads((bundle.base_dir / "listings" / one).read_text()) for one in listings]
        return {text for listing in read for text, *_ in listing.values()}

    a_month_later("fourth")
    # Runs that began a moment ago go on with the version that was the newest for so long.
    fourth = f"{version_of(bundle)}.json"
    assert kept("listings") == {current, fourth}
    assert kept("manifests") == texts_of(current, fourth)
    make_bundle(current.removesuffix(".json")).initialize()
    a_month_later("fifth")
    fifth = f"{version_of(bundle)}.json"
    assert kept("listings") == {fourth, fifth}
    assert kept("manifests") == texts_of(fourth, fifth)
    assert len(parsed(bundle)) == 2


@pytest.mark.parametrize("left", [b"", bytes(100)])
def test_what_a_lost_host_left_empty_is_written_again(
    bundle, make_bundle, folder, write_manifest, left
):
    path = write_manifest(folder, "first")
    os.utime(path, (1e9, 1e9))
    bundle.refresh()
    for file in [path for path in bundle.base_dir.rglob("*") if path.is_file()]:
        if file.parent.name in ("listings", "manifests", "latest"):
            file.write_bytes(left)
    again = make_bundle()
    again.initialize()
    assert parsed(again)["manifest.yml.py"].dag_id == "first"
    version = version_of(again)
    (again.base_dir / "listings" / f"{version}.json").write_bytes(left)
    of_a_task = make_bundle(version)
    of_a_task.initialize()
    assert parsed(of_a_task)["manifest.yml.py"].dag_id == "first"


def test_what_is_kept_is_on_disk_before_it_has_its_name(
    bundle, folder, write_manifest, monkeypatch
):
    synced = []

    def sync(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")))

    monkeypatch.setattr(os, "fsync", sync)
    write_manifest(folder, "first")
    bundle.refresh()
    assert {path.parent.name for path in synced} == {"manifests", "listings"}


def test_a_text_that_somebody_cleaned_away_is_kept_again(bundle, folder, write_manifest):
    path = write_manifest(folder / "a", "first")
    os.utime(path, (1e9, 1e9))
    bundle.refresh()
    for kept in (bundle.base_dir / "manifests").iterdir():
        kept.unlink()
    write_manifest(folder / "b", "second")
    bundle.refresh()
    assert len(list((bundle.base_dir / "manifests").iterdir())) == 2


@pytest.mark.parametrize("page", ["README.md", "docs/manifests.md"])
def test_what_the_documentation_configures_is_this_bundle_beside_airflows_own(page):
    text = (Path(__file__).parents[3] / page).read_text()
    written = ConfigParser(interpolation=None)
    snippets = re.findall(r"^```ini\n(.*?)^```$", text, re.M | re.S)
    (snippet,) = (one for one in snippets if "ManifestBundle" in one)
    written.read_string(snippet)
    *others, entry = json.loads(written["dag_processor"]["dag_bundle_config_list"])
    unset = conf.get_default_value("dag_processor", "dag_bundle_config_list")
    assert others == json.loads(unset)
    module, _, name = entry["classpath"].rpartition(".")
    made = getattr(import_module(module), name)(name=entry["name"], **entry["kwargs"])
    assert type(made) is ManifestBundle
    assert made.refresh_interval == 30
