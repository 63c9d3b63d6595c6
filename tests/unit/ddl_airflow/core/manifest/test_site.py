from __future__ import annotations

import json
import os

import pytest

from ddl_airflow.core.compute import COMPUTE, Compute, Place
from ddl_airflow.core.errors import ManifestInvalid, ManifestSyntaxError
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.core.plan import plan

TABLE = """\
compute:
  a100x8:
    slots: 8
    gpu: true
    nodes: 2
    pool: a100
    queue: gpu
    executor: CeleryExecutor
    priority_weight: 10
    other_steps: {queue: cpu, pool: transfers}
  v100x2: {pool: v100, queue: old-gpu}
"""


def test_no_setting_is_the_built_in_table():
    assert compute_table("  ") is COMPUTE


def test_a_file_adds_names_and_changes_built_in_ones(tmp_path):
    path = tmp_path / "compute.yml"
    path.write_text(TABLE)
    table = compute_table(str(path))
    assert table["a100x8"] == Compute(
        "a100x8",
        slots=8,
        gpu=True,
        nodes=2,
        train=Place("a100", "gpu", "CeleryExecutor", 10),
        # What is not said of the other steps keeps them beside the training.
        other_steps=Place("transfers", "cpu", "CeleryExecutor", 1),
    )
    v100x2 = table["v100x2"]
    assert (v100x2.slots, v100x2.gpu, v100x2.nodes) == (2, True, None)
    assert v100x2.other_steps == Place(queue="old-gpu")
    assert table["cpu4"] is COMPUTE["cpu4"]


def test_the_setting_may_be_the_table_itself():
    table = compute_table(json.dumps({"compute": {"tpu": {"slots": 4}}}))
    assert table["tpu"] == Compute("tpu", 4, gpu=False)


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path):
    path = tmp_path / "compute.yml"
    path.write_text(TABLE)
    first = compute_table(str(path))
    assert compute_table(str(path)) is first
    path.write_text(TABLE.replace("slots: 8", "slots: 4"))
    os.utime(path, ns=(1, 1))
    assert compute_table(str(path))["a100x8"].slots == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("compute:\n  a: {slot: 8}\n", ":2: compute.a.slot: unknown field. Did you mean slots?"),
        ("compute:\n  a: {slots: 0}\n", ":2: compute.a.slots: is 0, wanted at least 1."),
        ("compute:\n  a: {pool: x}\n", ":2: compute.a: says no slots. Add slots:"),
        ("compute:\n  cpu:\n    gpu: perhaps\n", ":3: compute.cpu.gpu: is neither true nor false."),
        ("compute:\n  cpu: {pool: ''}\n", ":2: compute.cpu.pool: is empty."),
        (f"compute:\n  cpu: {{queue: {'q' * 257}}}\n", ".queue: has 257 characters, at most 256"),
        ("compute:\n  cpu: {other_steps: {slots: 1}}\n", ".other_steps.slots: unknown field."),
        ("a100: {slots: 8}\n", ":1: a100: unknown field. Known: compute."),
        ("- a100\n", "compute: is missing. Add it: compute:"),
    ],
)
def test_what_is_wrong_is_said_with_file_field_and_fix(tmp_path, text, said):
    path = tmp_path / "compute.yml"
    path.write_text(text)
    with pytest.raises(ManifestInvalid) as caught:
        compute_table(str(path))
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_a_table_that_is_not_there_or_no_yaml_says_so(tmp_path):
    gone = tmp_path / "gone.yml"
    with pytest.raises(ManifestSyntaxError, match=r"gone.yml: cannot be read: .*Correct \[ddl\]"):
        compute_table(str(gone))
    with pytest.raises(ManifestSyntaxError, match=r"\[ddl\] compute:2: is not YAML"):
        compute_table('{"compute": ')


def write_for(folder, write_manifest, compute: str):
    path = write_manifest(folder)
    path.write_text(path.read_text().replace("{name: cpu, nodes: 2}", compute))
    return path


def test_a_manifest_takes_what_the_site_has(tmp_path, write_manifest):
    table = compute_table(json.dumps({"compute": {"a100x8": {"slots": 8, "nodes": 2}}}))
    path = write_for(tmp_path, write_manifest, "{name: a100x8, nodes: 2}")
    manifest = load_manifest(path, compute=table)
    assert (manifest.slots, manifest.world_size) == (8, 16)
    with pytest.raises(ManifestInvalid, match="'a100x8' is not known"):
        load_manifest(path)
    path = write_for(tmp_path / "more", write_manifest, "{name: a100x8, nodes: 3}")
    with pytest.raises(ManifestInvalid, match=r"nodes: is 3, and this site has 2 of a100x8\."):
        load_manifest(path, compute=table)


def test_a_training_takes_a_slot_of_its_pool_for_each_rank(tmp_path, write_manifest):
    table = compute_table(TABLE_INLINE)
    path = write_for(tmp_path, write_manifest, "{name: gpu4, nodes: 3}")
    steps = plan(load_manifest(path, compute=table), path)
    assert (steps.train_on.pool, steps.pool_slots) == ("gpus", 12)
    path.write_text(path.read_text() + "launcher: {slots: 2}\n")
    assert plan(load_manifest(path, compute=table), path).pool_slots == 6
    path = write_manifest(tmp_path / "free")
    assert plan(load_manifest(path, compute=table), path).pool_slots == 1


TABLE_INLINE = json.dumps({"compute": {"gpu4": {"slots": 4, "gpu": True, "pool": "gpus"}}})
