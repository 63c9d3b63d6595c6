from __future__ import annotations

from pathlib import Path

import pytest

from ddl_airflow.core.manifest.load import load_manifest, load_manifest_text
from ddl_airflow.core.plan import Tries, confined, plan

VALID = Path(__file__).parents[3] / "fixtures" / "manifests" / "valid"


def planned(name: str):
    return plan(load_manifest(VALID / name), VALID / name)


def test_full_manifest_fills_every_step():
    steps = planned("full.yml")
    assert steps.dag_id == "Digits-v2-Keras"
    assert steps.upload_results.manifest["file"] == "full.yml"
    assert steps.upload_results.manifest["dialect"] == "wml"
    assert steps.stage_data.dataset.uri == "s3://digits/data/v2"
    assert steps.stage_data.code == VALID / "scripts"
    train = steps.train
    assert train.command == "python train.py --epochs 3"
    assert (train.nodes, train.slots, train.launcher) == (3, 2, "slurm")
    assert train.scheduler == {
        "partition": "gpu",
        "account": "vision",
        "time_limit_s": 5400.0,
        "options": ["--qos=high", "--comment=of the night"],
    }
    assert train.gpu is False
    assert (train.python, train.framework) == ("/opt/train/bin/python", "tensorflow 2.10")
    assert train.metrics == (
        {"name": "loss", "regex": "Loss= ([0-9.]+)"},
        {"name": "step", "regex": r"Step (\d+)"},
    )
    transform = steps.transform
    assert (transform.commands, transform.checkpoint) == ((), "200")
    assert (transform.inputs, transform.outputs) == ({"images": "x:0"}, {"logits": "scores:0"})
    assert transform.sample == "t10k-images-idx3-ubyte.gz"
    assert transform.python == train.python
    assert steps.upload_results.results.uri == "s3://digits/models"
    assert train.prove and steps.stage_data.prove and not steps.upload_results.with_code
    assert "lineage" not in steps.stage_data.manifest["said"]


def test_the_python_of_an_image_is_for_the_ranks_alone(tmp_path):
    """All other steps run on Airflow's hosts, which have no such path: it ended trained runs."""
    text = (VALID / "folders.yml").read_text("utf-8")
    text += "\nlauncher: {kind: kubernetes, image: trainer, python: /opt/train/bin/python}\n"
    steps = plan(load_manifest_text(text, "m.yml"), tmp_path / "m.yml")
    assert steps.train.scheduler["python"] == "/opt/train/bin/python"
    assert steps.train.python == steps.transform.python == steps.stage_data.python == ""


def test_a_step_is_tried_as_it_says_and_else_as_all_are():
    tries = planned("full.yml").tries
    assert tries["train"] == Tries(9, 7200.0, "fixed", 129600.0)
    assert tries["stage_data"] == Tries(5, 90.0, "fixed", 7200.0)
    assert tries["evaluate"] == Tries(1, 90.0, "fixed", None)
    assert tries["upload_results"] == tries["transform"] == Tries(5, 90.0, "fixed", None)
    assert planned("folders.yml").tries == {
        name: Tries(3, 30.0, "exponential", None)
        for name in ("stage_data", "train", "transform", "upload_results")
    }


def test_first_command_trains_and_the_rest_transform():
    steps = planned("wml.yml")
    assert steps.train.command == "python train.py --steps 200"
    assert steps.transform.commands == ('python "export; once.py"',)


def test_folders_become_absolute_uris_beside_the_manifest():
    steps = planned("folders.yml")
    assert steps.stage_data.dataset.uri == (VALID / "data").as_uri()
    assert steps.upload_results.results.uri == "file:///srv/models"
    assert steps.stage_data.dataset.connection is None


@pytest.mark.parametrize("stream", [True, False])
def test_train_has_the_data_that_come_meanwhile(tmp_path, stream):
    text = (VALID / "folders.yml").read_text()
    place = "source: {path: ./data}\n"
    written = text.replace(place, f"{place}  stream: {str(stream).lower()}\n")
    steps = plan(load_manifest_text(written, "m.yml"), tmp_path / "m.yml")
    assert (steps.train.stream, steps.train.dataset) == (
        (True, steps.stage_data.dataset) if stream else (False, None)
    )
    # Keys may be others at the next try; that the data come is what the run began with.
    assert "dataset" not in steps.train.fixed() and steps.train.fixed()["stream"] is stream
    inside = confined(steps, (tmp_path,))
    assert inside.train.dataset == (inside.stage_data.dataset if stream else None)


def test_train_saves_checkpoints_where_the_results_go(tmp_path):
    text = (VALID / "folders.yml").read_text()
    saves = f"{text}checkpoints: {{upload_every: 5m}}\n"
    steps = plan(load_manifest_text(saves, "m.yml"), tmp_path / "m.yml")
    assert steps.train.upload_every_s == 300.0
    assert steps.train.results == steps.upload_results.results
    # A person may want it of a run that has begun.
    assert not {"results", "upload_every_s"} & steps.train.fixed().keys()
    assert confined(steps, (tmp_path,)).train.results.within == (tmp_path,)
    without = plan(load_manifest_text(text, "m.yml"), tmp_path / "m.yml").train
    assert (without.upload_every_s, without.results) == (None, None)


def test_uri_of_a_folder_with_a_slash_at_the_end_has_none(tmp_path):
    text = (VALID / "folders.yml").read_text().replace("./data", "./da ta/")
    steps = plan(load_manifest_text(text, "m.yml"), tmp_path / "m.yml")
    assert steps.stage_data.dataset.uri == tmp_path.as_uri() + "/da%20ta"


@pytest.mark.parametrize("name", ["conn_id.yml", "folders.yml", "full.yml", "wml.yml"])
def test_same_manifest_gives_the_same_plan(name):
    assert planned(name) == planned(name)


def test_views_show_the_place_and_never_a_key():
    assert planned("conn_id.yml").stage_data.dataset.view() == {
        "uri": "s3://digits-data",
        "conn_id": "my_s3",
    }
    assert planned("folders.yml").upload_results.results.view() == {"uri": "file:///srv/models"}
    assert planned("wml.yml").stage_data.dataset.view() == {
        "uri": "s3://digits-data",
        "endpoint_url": "https://s3.example.com",
        "access_key_id": "***",
        "secret_access_key": "***",
    }


def test_repr_of_a_plan_with_literal_keys_shows_none(literal_keys, tmp_path):
    text, keys = literal_keys
    shown = repr(plan(load_manifest_text(text, "m.yml"), tmp_path / "m.yml"))
    assert "s3://some-data" in shown
    assert not [key for key in keys if key in shown]
