from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddl_airflow.core.compute import COMPUTE, Compute
from ddl_airflow.core.manifest.convert import converted, rewritten
from ddl_airflow.core.manifest.load import load_manifest, load_manifest_text
from ddl_airflow.core.plan import Plan, StoreReference, plan

ROOT = Path(__file__).parents[5]
FIXTURES = ROOT / "tests" / "fixtures" / "manifests" / "valid"
MANIFESTS = [*sorted(FIXTURES.glob("*.yml")), *sorted(ROOT.glob("dags/*/manifest.yml"))]


def _without_keys(steps: Plan) -> tuple[object, ...]:
    """The plan but for the dialect; and the stores as they are shown, with their region."""
    stores: list[StoreReference] = [steps.stage_data.dataset, steps.upload_results.results]
    shown = [
        (store.view(), store.connection.region_name if store.connection else None)
        for store in stores
    ]
    bare, named = StoreReference(""), {**steps.upload_results.manifest, "dialect": ""}
    return (
        replace(
            steps,
            stage_data=replace(steps.stage_data, dataset=bare, results=bare, manifest=named),
            evaluate=steps.evaluate and replace(steps.evaluate, results=bare),
            approve=steps.approve and replace(steps.approve, results=bare),
            upload_results=replace(steps.upload_results, results=bare, manifest=named),
        ),
        shown,
    )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_converted_manifest_gives_the_same_plan(path: Path) -> None:
    kinds = {**COMPUTE, "site-special": Compute("site-special", 2, gpu=False)}
    before = load_manifest(path, compute=kinds)
    text = converted(before)
    after = load_manifest_text(text, path.name, kinds)
    assert _without_keys(plan(after, path)) == _without_keys(plan(before, path))
    assert (after.digest, after.dialect) == (before.digest, "wml")
    # What a command does, it does in any dialect.
    kept = {issue.message for issue in before.warnings if "installs" in issue.message}
    left = {one.message for one in after.warnings if "parameter servers" not in one.message}
    assert left == kept
    assert (after.retries, after.schedule) == (before.retries, before.schedule)
    again = converted(after).splitlines()
    plain = [line.split("  #")[0] for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in again if not line.startswith("#")] == plain or before.launcher.slots


@pytest.mark.parametrize("name", ["wml", "ffdl"])
def test_keys_become_variables(name: str) -> None:
    text = converted(load_manifest(FIXTURES / f"{name}.yml"))
    assert "not/A+real=key" not in text and "0123456789" not in text
    assert text.count("secret_access_key: ${S3_SECRET_ACCESS_KEY}  # set") == 2
    other = (FIXTURES / "wml.yml").read_text().replace("0123456789", "0", 1)
    text = converted(load_manifest_text(other, "m.yml"))
    assert "access_key_id: ${S3_DATA_ACCESS_KEY_ID}" in text
    assert "access_key_id: ${S3_RESULTS_ACCESS_KEY_ID}" in text


def test_variables_and_connection_ids_stay() -> None:
    assert "${STORE_SECRET}" in converted(load_manifest(FIXTURES / "full.yml"))
    assert converted(load_manifest(FIXTURES / "conn_id.yml")).count("conn_id: my_s3") == 2


def test_comments_say_what_a_field_was_and_what_is_not_taken_over() -> None:
    lines = converted(load_manifest(FIXTURES / "ffdl.yml")).splitlines()
    assert "      nodes: 2  # was learners" in lines
    assert "  slots: 2  # was gpus" in lines
    message = "# Not taken over, line 8: memory: is not reserved: ranks take what their host has."
    assert message in lines


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "12",
        "1e3",
        "~",
        "a: b",
        "a #b",
        "- a",
        "ä\u2028b",
        "a\nb",
        "'\"\\",
        "\U0001f600",
        "${A}",
    ],
)
def test_any_text_comes_back_as_it_was(text: str) -> None:
    manifest = load_manifest(FIXTURES / "folders.yml")
    definition = manifest.model_definition.model_copy(update={"description": text})
    other = manifest.model_copy(update={"model_definition": definition})
    after = load_manifest_text(converted(other), "m.yml")
    assert after.model_definition.description == text


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_a_digest_covers_is_the_whole_training(path: Path) -> None:
    """As it is kept in the lineage, with JSON in between: the same digest, and the same plan."""
    manifest = load_manifest(path)
    text = rewritten(json.loads(json.dumps(manifest.said)), "Of a test.\nof two lines")
    again = load_manifest_text(text, "again.yml")
    assert again.digest == manifest.digest
    assert again.said == manifest.said
    assert text.startswith("# Of a test. of two lines\n")


def test_durations_come_back_with_their_units() -> None:
    more = (
        "checkpoints: {upload_every: 90s}\nretries: {delay: 1m}\nsteps: {train: {timeout: 2d}}\n"
        "approval: {timeout: 7d}\n"
    )
    manifest = load_manifest_text((FIXTURES / "wml.yml").read_text("utf-8") + more, "m.yml")
    for text in (converted(manifest), rewritten(json.loads(json.dumps(manifest.said)), "Of it.")):
        again = load_manifest_text(text, "again.yml")
        assert again.said == manifest.said
    again = load_manifest_text(converted(manifest), "m.yml")
    assert (again.approval, again.checkpoints) == (manifest.approval, manifest.checkpoints)


def test_text_that_looks_like_another_value_comes_back_as_text() -> None:
    more = "parameters: {a: '.5', b: 'True', c: '-.5', d: True, e: .5}\n"
    manifest = load_manifest_text((FIXTURES / "wml.yml").read_text("utf-8") + more, "m.yml")
    again = load_manifest_text(converted(manifest), "m.yml")
    defaults = [one.default for one in again.parameters.values()]
    assert defaults == [".5", "True", "-.5", True, 0.5]
