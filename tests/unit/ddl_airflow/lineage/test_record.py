from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.errors import SourceMissing, StagingError
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.lineage.record import (
    LINEAGE,
    SCHEMA,
    SO_FAR,
    assemble,
    check_files,
    fix_run,
    keep_so_far,
    read_part,
    write_lineage,
    write_part,
)
from ddl_airflow.operators.base import run_of
from ddl_airflow.storage.filesystem import FolderStore

PARTS = {
    "stage_data": {
        "dataset": {"uri": "file:///d", "fingerprint": "sha256:f"},
        "code": {"digest": "sha256:c"},
        "tries": {"stage_data": 1},
    },
    "train": {
        "environment": {"world_size": 2, "versions": {"tensorflow": "2.21.0"}},
        "result": {
            "metrics": {"loss": 0.5, "accuracy": 0.99},
            "measurements": [
                {"metric": "loss", "value": 0.5, "source": "output"},
                {"metric": "accuracy", "value": 0.99, "source": "training"},
            ],
            "steps": 40,
        },
        "tries": {"train": 3},
    },
    "transform": {
        "result": {"checkpoint_step": 40, "accuracy": 0.875, "sample": "x.npz", "rows": 8},
        "tries": {"transform": 2},
    },
}


@pytest.fixture
def layout(tmp_path):
    """A run whose three first steps have left their parts."""
    layout = RunLayout(tmp_path / "workspace", "mnist", "mnist-1")
    layout.create()
    for step, facts in PARTS.items():
        write_part(layout, step, facts)
    return layout


@pytest.fixture
def files(tmp_path):
    """Two files to publish, by key."""
    made = {}
    for key, body in {"model/saved_model.pb": b"graph", "logs/rank-0.log": b"said\n"}.items():
        path = tmp_path / "out" / key
        path.parent.mkdir(parents=True)
        path.write_bytes(body)
        made[key] = path
    return made


def test_what_could_not_be_read_again_is_not_written(layout, monkeypatch):
    """Digests have made it larger than what the listing let expect."""
    before = read_part(layout, "stage_data")
    monkeypatch.setattr("ddl_airflow.lineage.record.MOST_BYTES", 10_000)
    listing = [{"key": f"{number}", "size": 1, "etag": "e"} for number in range(200)]
    with pytest.raises(
        StagingError, match="stage_data.json .* bytes, more than 9,375: .* Pack"
    ) as refused:
        write_part(layout, "stage_data", {"dataset": {"listing": listing}})
    assert not refused.value.retryable
    assert read_part(layout, "stage_data") == before


def test_parts_come_together_with_the_run_and_the_files(layout, files, context_of):
    manifest = {"name": "mnist", "digest": "d", "dialect": "wml"}
    record = assemble(layout, manifest, run_of(context_of("mnist", 4, epochs=3)), files, tries=4)
    assert record["schema"] == SCHEMA
    assert record["training_id"] == "mnist-1"
    assert record["manifest"] == manifest
    assert record["dataset"] == PARTS["stage_data"]["dataset"]
    assert record["code"] == PARTS["stage_data"]["code"]
    assert record["environment"]["world_size"] == 2
    versions = record["environment"]["versions"]
    assert versions["tensorflow"] == "2.21.0" and versions["apache-airflow"].startswith("3.")
    assert record["run"] == {
        "dag_id": "mnist",
        "run_id": "manual__2026-11-20T20:15:00+00:00",
        "type": "manual",
        "triggered_by": "a tester",
        "logical_date": "2026-11-20T20:15:00+00:00",
        "due": "2026-11-20T20:15:00+00:00",
        "started": "2026-11-20T20:16:00+00:00",
        "parameters": {"epochs": 3},
        "experiment": "mnist-1",
        "tries": {"stage_data": 1, "train": 3, "transform": 2, "upload_results": 4},
    }
    assert record["result"] == {
        "metrics": {"loss": 0.5, "accuracy": 0.875},
        "measurements": [
            *PARTS["train"]["result"]["measurements"],
            {
                **{"metric": "accuracy", "value": 0.875, "source": "sample"},
                **{"file": "x.npz", "rows": 8},
            },
        ],
        "steps": 40,
        **PARTS["transform"]["result"],
        "files": [
            {"key": "logs/rank-0.log", "size": 5, "sha256": hashlib.sha256(b"said\n").hexdigest()},
            {
                "key": "model/saved_model.pb",
                "size": 5,
                "sha256": hashlib.sha256(b"graph").hexdigest(),
            },
        ],
    }
    write_lineage(layout, record)
    assert json.loads((layout.kept / LINEAGE).read_text()) == record


def test_a_run_without_dates_or_a_person_has_null(layout, files, context_of):
    context = context_of("mnist")
    context["dag_run"] = SimpleNamespace(
        dag_id="mnist",
        run_id="scheduled__1",
        run_type="scheduled",
        triggering_user_name=None,
        logical_date=None,
        data_interval_end=None,
        run_after=datetime(2026, 11, 20, tzinfo=UTC),
        start_date=None,
    )
    context["params"] = {}
    run = assemble(layout, {}, run_of(context), files, tries=1)["run"]
    assert (run["type"], run["triggered_by"], run["logical_date"]) == ("scheduled", None, None)
    assert run["parameters"] == {}


def test_a_retry_replaces_its_part(layout, files, context_of):
    again = PARTS["train"] | {"tries": {"train": 4}, "result": {"metrics": {}, "steps": 80}}
    write_part(layout, "train", again)
    record = assemble(layout, {}, run_of(context_of("mnist")), files, tries=1)
    assert record["run"]["tries"]["train"] == 4
    assert record["result"]["steps"] == 80
    assert sorted(p.name for p in (layout.kept / "lineage").iterdir()) == [
        "stage_data.json",
        "train.json",
        "transform.json",
    ]


@pytest.mark.parametrize("again", ["the same", "other weights", "another result"])
def test_another_model_of_a_run_does_not_start_when_the_first_did(
    layout, files, context_of, tmp_path, again
):
    """A run that is cleared weeks later, or deleted and made again with the same id."""

    def evidence(record):
        record["evidence"] = {"made": ["evidence/card"], "not_made": {}}
        (tmp_path / "card").write_text(record["run"]["started"])
        return {"evidence/card": tmp_path / "card"}

    context = context_of("mnist")
    first = assemble(layout, {}, run_of(context), files, tries=2, evidence=evidence)
    write_lineage(layout, first)
    sha256 = hashlib.sha256((layout.kept / LINEAGE).read_bytes()).hexdigest()
    markers = [{"files": [{"key": LINEAGE, "sha256": sha256}]}]
    context["dag_run"].start_date += timedelta(days=30)
    if again == "other weights":
        files["model/saved_model.pb"].write_bytes(b"GRAPH")
    elif again == "another result":
        write_part(layout, "train", PARTS["train"] | {"result": {"metrics": {}, "steps": 80}})
    record = assemble(
        layout, {}, run_of(context), files, tries=1, published=markers, evidence=evidence
    )
    is_first = again == "the same"
    assert record["run"]["started"] == f"2026-{'11' if is_first else '12'}-20T20:16:00+00:00"
    assert record["run"]["tries"]["upload_results"] == (2 if is_first else 1)


@pytest.fixture
def published(layout, files, context_of, tmp_path):
    """A record, and a store that holds its files."""
    record = assemble(layout, {}, run_of(context_of("mnist")), files, tries=1)
    store = FolderStore(tmp_path / "store")
    for key, path in files.items():
        store.put_bytes(key, path.read_bytes())
    return record, store


def test_what_is_known_so_far_is_no_longer_for_more_data(layout, context_of):
    """The page reads it every two seconds; it reads no file above 16 MiB."""
    listing = [{"key": f"images/{n:07}.png", "size": 1, "etag": "e" * 32} for n in range(150_000)]
    staged = read_part(layout, "stage_data")
    write_part(layout, "stage_data", staged | {"dataset": staged["dataset"] | {"listing": listing}})
    keep_so_far(layout, run_of(context_of("mnist", 1)), {"state": "failed", "step": "train"})
    known = read_object(layout.kept / SO_FAR, layout.workspace)
    assert known["dataset"] == {k: v for k, v in staged["dataset"].items() if k != "listing"}
    assert (layout.kept / SO_FAR).stat().st_size < 10_000


def test_what_is_known_so_far_has_the_metrics_of_the_whole(layout, files, context_of):
    """Of one name that of the sample, which came after the training's."""
    known = {"metric": "accuracy", "value": 0.99, "source": "training"}
    trained = PARTS["train"]["result"] | {"metrics": {"accuracy": 0.99}, "measurements": [known]}
    write_part(layout, "train", PARTS["train"] | {"result": trained})
    run = run_of(context_of("mnist", 1))
    keep_so_far(layout, run, {"state": "published", "step": "upload_results"})
    told = read_object(layout.kept / SO_FAR, layout.workspace)["result"]
    whole = assemble(layout, {}, run, files, tries=1)["result"]
    assert told["metrics"] == whole["metrics"] == {"accuracy": 0.875}
    assert told["measurements"] == whole["measurements"] and len(told["measurements"]) == 2


def made_of(**others):
    return {"dataset": "sha256:f", "code": "sha256:c", "manifest": "d", "parameters": {}, **others}


@pytest.mark.parametrize("stage_at_work", [True, False])
def test_a_training_that_was_made_of_something_else_is_not_known_so_far(
    layout, context_of, stage_at_work
):
    """stage_data was cleared, and has brought other data; train is still to begin, or has failed
    before it did.
    """
    fix_run(layout, "run", made_of(), {})
    for step, facts in PARTS.items():
        write_part(layout, step, facts)
    run = run_of(context_of("mnist", 2))
    outcome = {"state": "failed", "step": "train"}
    keep_so_far(layout, run, outcome)
    assert read_object(layout.kept / SO_FAR, layout.workspace)["result"]["steps"] == 40
    if stage_at_work:
        outcome = {"state": "running", "step": "stage_data", "at_work": True}
    else:
        fix_run(layout, "run", made_of(dataset="sha256:other"), {})
        write_part(layout, "stage_data", PARTS["stage_data"])
    keep_so_far(layout, run, outcome)
    told = read_object(layout.kept / SO_FAR, layout.workspace)
    assert "result" not in told and "environment" not in told
    assert told["run"]["tries"] == ({} if stage_at_work else {"stage_data": 1})
    assert ("dataset" in told) is not stage_at_work


def test_files_as_recorded_have_no_problem(published):
    record, store = published
    store.put_bytes("another", b"that nobody recorded")
    assert check_files(record, store) == []


def test_a_file_that_is_gone_or_changed_is_named(published):
    record, store = published
    store.put_bytes("model/saved_model.pb", b"GRAPH")  # the same size
    store.delete(["logs/rank-0.log"])
    assert check_files(record, store) == [
        f"{store.uri}/logs/rank-0.log is gone",
        f"{store.uri}/model/saved_model.pb is not the file that was published",
    ]


def test_a_store_that_is_gone_is_an_error(published, tmp_path):
    record, _ = published
    with pytest.raises(SourceMissing):
        check_files(record, FolderStore(tmp_path / "nowhere"))
