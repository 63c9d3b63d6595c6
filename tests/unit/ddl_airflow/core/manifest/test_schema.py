"""The JSON Schema: published as the model makes it, and saying what a schema can say."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from ddl_airflow.core.errors import ManifestError
from ddl_airflow.core.manifest.load import load_manifest, load_manifest_text
from ddl_airflow.core.manifest.schema import json_schema
from tests.unit.ddl_airflow.core.manifest.test_load import OF_THEN

ROOT = Path(__file__).parents[5]
PUBLISHED = ROOT / "docs" / "manifest.schema.json"
FIXTURES = ROOT / "tests" / "fixtures" / "manifests"
GOOD = [*sorted((FIXTURES / "valid").glob("*.yml")), *sorted(ROOT.glob("dags/*/manifest.yml"))]
# Not YAML to anybody; or, for the bomb, more of it than memory holds.
NOT_YAML = set(
    "alias bomb colon complex_key deep latin1 open_bracket tab tag two_documents".split()
)
# What is wrong there lies between fields, or in the meaning of a text.
NOT_FOR_A_SCHEMA = set(
    "checkpoints connection evaluation_rules ffdl_rules ffdl_stores ffdl_volume ffdl_volume_path "
    "kubernetes kubernetes_image parameters patterns rules same_place slurm steps_rules stream "
    "unpack cloud_bucket template approval_time approval_then folder_address folder_variable "
    "evaluation_command evaluation_output evaluation_sample evaluation_validation "
    "wml_swift".split()
)


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    schema = json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def test_published_schema_is_that_of_the_model() -> None:
    """After a change of the model: UPDATE_GOLDEN=1."""
    text = json.dumps(json_schema(), indent=2) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        PUBLISHED.write_text(text, "utf-8")
    assert PUBLISHED.read_text("utf-8") == text


@pytest.mark.parametrize("path", GOOD, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_good_manifests_are_good_to_an_editor(validator, path) -> None:
    assert [e.message for e in validator.iter_errors(yaml.safe_load(path.read_text()))] == []


def test_what_watson_machine_learning_wrote_is_good_to_an_editor(validator) -> None:
    text = OF_THEN.format(command="python train.py", name="small")
    for author in ('{name: DL Developer, email: ""}', "DL Developer"):
        written = yaml.safe_load(text.replace('{name: DL Developer, email: ""}', author))
        assert [e.message for e in validator.iter_errors(written)] == []


def test_bad_manifests_are_bad_to_an_editor_where_a_schema_can_know() -> None:
    names = {path.stem for path in (FIXTURES / "invalid").glob("*.yml")}
    assert names >= NOT_YAML | NOT_FOR_A_SCHEMA
    validator = jsonschema.Draft7Validator(json_schema())
    accepted = {
        name
        for name in names - NOT_YAML
        if validator.is_valid(yaml.safe_load((FIXTURES / "invalid" / f"{name}.yml").read_text()))
    }
    assert accepted == NOT_FOR_A_SCHEMA


def test_examples_in_the_schema_are_what_it_accepts(validator) -> None:
    """And defaults: an editor completes with them."""
    seen, sections = 0, json_schema()["$defs"]
    for section in sections.values():
        for field in section.get("properties", {}).values():
            resolved = validator.evolve(schema={**field, "$defs": sections})
            for value in [
                *field.get("examples", []),
                *([field["default"]] if "default" in field else []),
            ]:
                assert resolved.is_valid(value), (field, value)
                seen += 1
    assert seen > 80


def test_every_field_can_be_completed_with_its_description() -> None:
    sections = json_schema()["$defs"]
    for name, section in sections.items():
        assert section["additionalProperties"] is False, name
        for field in section["properties"].values():
            # Of a section that says the same, the field's is left out.
            around = sections.get(field.get("$ref", "").rpartition("/")[2], {})
            assert {**around, **field}["description"].endswith("."), (name, field)


def test_examples_name_a_schema_that_is_there() -> None:
    for path in ROOT.glob("dags/*/manifest.yml"):
        (named,) = re.findall(r"^# yaml-language-server: \$schema=(.*)$", path.read_text(), re.M)
        assert (path.parent / named).resolve() == PUBLISHED


@pytest.mark.parametrize("value", ["9", "true", "''", "[]", "{a: 1}", "~", "1.5", "-1"])
def test_who_is_refused_by_the_schema_is_refused_by_us(validator, value) -> None:
    """An editor must not mark what works; any field, and any kind of value in it."""
    lines = (FIXTURES / "valid" / "full.yml").read_text().splitlines()
    for i, line in enumerate(lines):
        if match := re.match(r"( *[a-z_]+: )[^#{[|>&*]+$", line):
            text = "\n".join([*lines[:i], match[1] + value, *lines[i + 1 :]])
            try:
                document = yaml.safe_load(text)
            except yaml.YAMLError:
                continue
            try:
                load_manifest_text(text, "m.yml")
            except ManifestError as error:
                assert all(issue.line for issue in error.issues)
            else:
                assert validator.is_valid(document), text


def test_good_fixtures_are_good() -> None:
    for path in GOOD:
        load_manifest(path)
