from __future__ import annotations

import json
from pathlib import Path

import pytest
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import ParamValidationError

from ddl_airflow.core.manifest.load import load_manifest, load_manifest_text
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.core.plan import plan
from ddl_airflow.form import form

FULL = Path(__file__).parents[2] / "fixtures" / "manifests" / "valid" / "full.yml"


@pytest.fixture
def fields() -> ParamsDict:
    manifest = load_manifest(FULL)
    return ParamsDict(form(manifest, plan(manifest, FULL)))


def test_the_scripts_parameters_come_first_then_the_runs_settings(fields):
    ours = ["nodes", "launcher", "checkpoint", "attempts", "experiment_id", "dry_run"]
    assert list(fields) == ["learning_rate", "optimizer", "augment", "note", *ours]
    assert fields.dump() == {
        **{"learning_rate": 0.01, "optimizer": "adam", "augment": True, "note": "0123"},
        **{"nodes": 3, "launcher": "slurm", "checkpoint": "200"},
        **{"attempts": 9, "dry_run": False},
        "experiment_id": "digits-wide",
    }
    rate = fields.get_param("learning_rate")
    assert rate.description == "Of the optimizer"
    assert (rate.schema["type"], rate.schema["minimum"], rate.schema["maximum"]) == ("number", 0, 1)
    types = {name: fields.get_param(name).schema["type"] for name in fields}
    assert types["augment"] == "boolean" and types["note"] == "string"


def test_nodes_are_bounded_by_what_was_set_aside_and_by_what_there_is():
    def nodes(**more: object):
        table = compute_table(
            json.dumps({"compute": {"site-special": {"slots": 1, "nodes": 5, **more}}})
        )
        manifest = load_manifest(FULL, compute=table)
        return ParamsDict(form(manifest, plan(manifest, FULL))).get_param("nodes")

    assert nodes().schema["maximum"] == 5
    pooled = nodes(pool="gpus")
    assert (pooled.value, pooled.schema["maximum"]) == (3, 3)
    assert "takes 6 slot(s) of the pool gpus whatever is entered" in pooled.description


def test_who_triggers_chooses_no_more_than_the_manifest_and_the_site_allow(tmp_path):
    path = FULL.with_name("folders.yml")
    manifest = load_manifest(path)
    asked = plan(manifest, path).train.nodes

    def fields(*launchers: str) -> ParamsDict:
        return ParamsDict(form(manifest, plan(manifest, path), launchers))

    nodes = fields().get_param("nodes")
    assert nodes.schema["maximum"] == asked and "At most the manifest's" in nodes.description
    for name, value in (("nodes", 4096), ("launcher", "slurm")):
        with pytest.raises(ParamValidationError):
            fields().update({name: value})
    taken = fields("slurm", "local")
    taken.update({"launcher": "slurm"})
    assert taken.validate()["launcher"] == "slurm"
    assert fields("slurm").get_param("launcher").schema["enum"] == ["local", "slurm"]


@pytest.mark.parametrize("path", sorted(FULL.parent.glob("*.yml")), ids=lambda path: path.name)
def test_defaults_are_what_airflow_allows(path):
    # Which a parse does not ask it.
    manifest = load_manifest(path)
    defaults = ParamsDict(form(manifest, plan(manifest, path)))
    assert defaults.validate() == defaults.dump()


def test_what_is_empty_by_default_may_be_left_empty():
    """To Airflow's form a text that wants a value and has none is a mistake, whoever wrote it."""
    text = FULL.read_text().replace("choices: [adam, sgd]", "choices: [adam, sgd, '']")
    text = text.replace("default: adam", "default: ''")
    manifest = load_manifest_text(text, "m.yml")
    fields = ParamsDict(form(manifest, plan(manifest, FULL)))
    assert fields.get_param("optimizer").schema["type"] == ["null", "string"]
    for conf in ({}, {"optimizer": None}, {"optimizer": "sgd"}):
        fields.update(conf)
        assert conf.items() <= fields.validate().items()


@pytest.mark.parametrize(
    "conf",
    [
        {"learning_rate": 1},
        {"optimizer": "sgd"},
        {"augment": False},
        {"nodes": 1, "launcher": "slurm", "checkpoint": "latest"},
        {"attempts": 1, "dry_run": True, "launcher": "slurm"},
        {"checkpoint": "0"},
        {"experiment_id": "digits-2_b.c"},
        {"experiment_id": None},
    ],
)
def test_what_the_manifest_allows_is_taken(fields, conf):
    fields.update(conf)
    assert conf.items() <= fields.validate().items()


@pytest.mark.parametrize(
    "conf",
    [
        {"learning_rate": 1.5},
        {"learning_rate": "0.1"},
        {"optimizer": "adamw"},
        {"augment": "yes"},
        {"nodes": 0},
        {"launcher": "fake"},
        {"launcher": "local"},
        {"nodes": 4},
        {"nodes": 1.5},
        {"checkpoint": "newest"},
        {"checkpoint": "1; rm"},
        {"attempts": 10},
        {"dry_run": "true"},
        {"experiment_id": "../x"},
        {"experiment_id": "x\n"},
        {"checkpoint": "latest\n"},
        {"experiment_id": ""},
    ],
)
def test_what_it_does_not_allow_is_refused_by_airflow(fields, conf):
    with pytest.raises(ParamValidationError):
        fields.update(conf)
        fields.validate()


@pytest.mark.parametrize("seed", ["1", "{default: 1, minimum: 0}", "{default: 1, maximum: 9}"])
def test_a_whole_number_of_more_than_64_bits_is_refused_by_airflow(seed):
    """Its processes can give each other no such number."""
    path = FULL.with_name("folders.yml")
    text = path.read_text("utf-8") + f"parameters: {{seed: {seed}}}\n"
    manifest = load_manifest_text(text, "m.yml")
    for wrong in (2**64, -(2**63) - 1, float(2**64)):
        fields = ParamsDict(form(manifest, plan(manifest, path)))
        with pytest.raises(ParamValidationError):
            fields.update({"seed": wrong})
            fields.validate()
    if seed == "1":
        for good in (2**64 - 1, -(2**63)):
            fields = ParamsDict(form(manifest, plan(manifest, path)))
            fields.update({"seed": good})
            assert fields.validate()["seed"] == good


def test_experiment_is_asked_for_where_scripts_have_one():
    path = FULL.with_name("folders.yml")
    alone = load_manifest(path)
    assert "experiment_id" not in form(alone, plan(alone, path))
    text = path.read_text() + "distribution: parameter_server\n"
    servers = load_manifest_text(text, path.name)
    fields = ParamsDict(form(servers, plan(servers, path)))
    assert fields["experiment_id"] is None
    assert "launcher" not in fields
    assert "a master, two workers" in fields.get_param("nodes").description
