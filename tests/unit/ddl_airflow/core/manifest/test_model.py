"""What a loaded manifest means."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from ddl_airflow.core.compute import Compute
from ddl_airflow.core.errors import ConnectionInvalid, ManifestInvalid
from ddl_airflow.core.manifest.convert import converted
from ddl_airflow.core.manifest.load import load_manifest, load_manifest_text
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.sections.definition import slug, split_commands
from ddl_airflow.core.manifest.sections.experiment import Experiment
from ddl_airflow.core.manifest.sections.outcome import Transform
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.manifest.sections.tries import Retries
from ddl_airflow.core.plan import plan

TESTS = Path(__file__).parents[4]
VALID = TESTS / "fixtures" / "manifests" / "valid"
# Of each manifest the digests of all versions, today's first.
DIGESTS = json.loads((TESTS / "golden" / "digests.json").read_text())


def _load(name: str) -> Manifest:
    return load_manifest(VALID / f"{name}.yml")


def test_wml_dialect_keeps_the_text_of_numbers() -> None:
    manifest = _load("wml")
    framework = manifest.model_definition.framework
    assert framework.version == "2.10-py3-ddl"
    assert framework.runtimes is not None and framework.runtimes.version == "3.10"
    assert _load("full").model_definition.framework.version == "2.10"
    connection = manifest.training_data_reference.connection
    assert connection is not None
    assert connection.resolve({}).access_key_id == "0123456789"
    assert manifest.commands == ("python train.py --steps 200", 'python "export; once.py"')
    assert (manifest.slots, manifest.world_size, manifest.dialect) == (2, 4, "wml")


def test_literal_keys_warn_and_are_never_shown() -> None:
    manifest = _load("wml")
    assert [(issue.line, issue.field) for issue in manifest.warnings] == [
        (23, "training_data_reference.connection.access_key_id"),
        (32, "training_results_reference.connection.access_key_id"),
    ]
    assert all("conn_id" in issue.fix for issue in manifest.warnings)
    connection = manifest.training_data_reference.connection
    assert connection is not None
    shown = f"{manifest!r}{manifest}{manifest.model_dump_json()}{connection.resolve({})!r}"
    assert "not/A+real=key" not in shown and "0123456789" not in shown
    kinds = {"site-special": Compute("site-special", 2, gpu=False)}
    full = load_manifest(VALID / "full.yml", compute=kinds)
    assert not full.warnings and not _load("conn_id").warnings


def test_full_manifest_has_everything() -> None:
    manifest = _load("full")
    assert manifest.dag_id == "Digits-v2-Keras"
    assert (manifest.slots, manifest.world_size) == (2, 6)
    assert manifest.retries.delay == timedelta(seconds=90)
    assert (manifest.steps.train.attempts, manifest.steps.train.timeout) == (9, timedelta(hours=36))
    assert manifest.training_data_reference.place.prefix == "data/v2"
    assert manifest.training_results_reference.place.prefix == "models"
    assert manifest.distribution == "mpi"
    assert manifest.experiment == Experiment(name="digits-wide", when_busy="wait")
    assert manifest.transform.checkpoint == 200
    assert manifest.transform.inputs == {"images": "x:0"}
    assert [metric.name for metric in manifest.metrics] == ["loss", "step"]
    assert manifest.line_of("metrics[1].regex") == 47
    assert manifest.line_of("metrics[1].nothing.such") == 47
    assert manifest.line_of("nothing") == 2


def test_defaults() -> None:
    manifest = _load("folders")
    assert manifest.schedule is None and manifest.code == "./" and manifest.metrics == ()
    assert (manifest.retries.attempts, manifest.retries.delay) == (3, timedelta(seconds=30))
    assert manifest.transform.checkpoint == "latest" and manifest.launcher.kind == "local"
    assert (manifest.distribution, manifest.experiment) == ("mpi", None)
    assert manifest.training_data_reference.place.path == "./data"
    assert manifest.world_size == 2


@pytest.mark.parametrize(("nodes", "slots", "world_size"), [(1, 1, 4), (1, 4, 4), (3, 4, 14)])
def test_ranks_of_a_cluster_are_all_its_tasks(nodes: int, slots: int, world_size: int) -> None:
    text = (VALID / "folders.yml").read_text() + "distribution: parameter_server\n"
    text += f"launcher: {{slots: {slots}}}\n"
    text = text.replace("{name: cpu2}", f"{{name: cpu2, nodes: {nodes}}}")
    manifest = load_manifest_text(text, "m.yml")
    assert (manifest.slots, manifest.world_size) == (slots, world_size)


def test_independent_ranks_are_as_many_as_those_of_mpi() -> None:
    text = (VALID / "folders.yml").read_text()
    mpi = load_manifest_text(text, "m.yml")
    manifest = load_manifest_text(text + "distribution: independent\n", "m.yml")
    assert (manifest.world_size, mpi.world_size) == (2, 2)
    assert manifest.digest != mpi.digest
    made = plan(manifest, VALID / "folders.yml")
    assert (made.train.distribution, made.experiments) == ("independent", False)
    assert "distribution: independent" in converted(manifest).splitlines()
    slurm = text + "distribution: independent\nlauncher: {kind: slurm}\n"
    assert load_manifest_text(slurm, "m.yml").launcher.kind == "slurm"


def test_references_are_read_from_the_environment_given() -> None:
    connection = _load("full").training_data_reference.connection
    assert connection is not None
    environ = {"STORE_URL": "http://store:1", "STORE_KEY": "k", "STORE_SECRET": "s"}
    keys = connection.resolve(environ, ["STORE_*"])
    assert (keys.endpoint_url, keys.access_key_id) == ("http://store:1", "k")
    assert (keys.secret_access_key, keys.region_name) == ("s", "eu-de")
    with pytest.raises(ConnectionInvalid, match="STORE_KEY.*STORE_SECRET") as caught:
        connection.resolve({"STORE_URL": "http://store:1", "STORE_SECRET": " "}, ["STORE_*"])
    assert "STORE_URL" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "may_read"),
    [
        ("DB_URL", ["S3_*"]),
        ("DB_URL", []),
        ("AIRFLOW__CORE__FERNET_KEY", ["*"]),
        ("AIRFLOW_CONN_MYDB", ["AIRFLOW_CONN_MYDB"]),
        ("airflow_home", ["*"]),
        ("s3_key", ["S3_*"]),
    ],
)
def test_variables_that_are_not_the_manifests_are_not_read(variable, may_read) -> None:
    connection = Connection(
        endpoint_url="http://127.0.0.1:9",
        access_key_id=f"${{{variable}}}",
        secret_access_key="x",
    )
    with pytest.raises(ConnectionInvalid, match=f"{variable} is not one that manifests may") as no:
        connection.resolve({variable: "planted-value"}, may_read)
    assert "planted-value" not in str(no.value)


@pytest.mark.parametrize("field", ["endpoint_url", "region_name"])
def test_no_value_of_a_variable_is_in_a_message(field) -> None:
    values = {"endpoint_url": "http://127.0.0.1:9", "access_key_id": "x", "secret_access_key": "x"}
    connection = Connection(**{**values, field: "${S3_X}"})
    with pytest.raises(ConnectionInvalid, match=f"{field}: .* S3_X does not hold") as no:
        connection.resolve({"S3_X": "planted value"})
    assert "planted" not in str(no.value)


def test_a_value_that_looks_like_a_reference_after_resolving_stays() -> None:
    connection = _load("full").training_data_reference.connection
    assert connection is not None
    environ = {"STORE_URL": "http://store:1", "STORE_KEY": "${HOME}", "STORE_SECRET": "s"}
    assert connection.resolve(environ, ["STORE_*"]).access_key_id == "${HOME}"


def test_conn_id_cannot_be_resolved_without_airflow() -> None:
    connection = _load("conn_id").training_data_reference.connection
    assert connection is not None
    with pytest.raises(ConnectionInvalid, match="my_s3"):
        connection.resolve({})


def test_digest_of_a_launcher_is_of_what_is_written() -> None:
    """Whatever class of section it is: a run is never another one after an upgrade."""

    def loaded(launcher: str) -> Manifest:
        folders = (VALID / "folders.yml").read_text(encoding="utf-8")
        return load_manifest_text(f"{folders}{launcher}\n", "m.yml")

    for same in ("launcher: {}", "launcher: {kind: local}", "launcher: {partition: }"):
        assert loaded(same).digest == loaded("").digest
    slurm = loaded(
        "launcher: {kind: slurm, partition: gpu, time_limit: 2h, options: [--mem=4G], slots: 2}"
    )
    assert slurm.digest == (
        "sha256:v2:4c6d854b550b50ea198edbc65af4d9d1a918bb2fce2a979c91a8648feebcd924"
    )
    assert slurm.earlier_digests == (
        "162a78db64e6ff5372b16bce60546a3e55ac6775c731c7ef2f126660f94f1b3a",
    )


@pytest.mark.parametrize("path", sorted(DIGESTS))
def test_digests_of_every_version_stay(path: str) -> None:
    """Others than these make every site train again: never edit a line, add a version."""
    manifest = load_manifest(TESTS.parent / path)
    assert [manifest.digest, *manifest.earlier_digests] == DIGESTS[path]


def test_digest_is_of_what_a_manifest_says_whatever_the_defaults() -> None:
    class FilteredTransform(Transform):
        keep_rows: int = 8

    class Tomorrow(Manifest):
        pruning: Literal["none", "magnitude"] = "none"
        transform: FilteredTransform = FilteredTransform()
        retries: Retries = Retries(attempts=5)

    said = yaml.safe_load((VALID / "folders.yml").read_text())
    for more in ({}, {"transform": {"checkpoint": 200}}, {"retries": {"delay": "1m"}}):
        today, tomorrow = Manifest(**said, **more), Tomorrow(**said, **more)
        assert tomorrow.model_dump() != today.model_dump()
        assert tomorrow.digest == today.digest
        assert tomorrow.earlier_digests == today.earlier_digests
    for spelled_out in (
        {"pruning": "none"},
        {"transform": {"keep_rows": 8}},
        {"retries": {"attempts": 5}},
        {"approval": {"required": False, "timeout": "7d"}},
    ):
        assert Tomorrow(**said, **spelled_out).digest == Tomorrow(**said).digest
    others: list[dict[str, Any]] = [
        {},
        {"pruning": "magnitude"},
        {"transform": {"keep_rows": 9}},
        {"retries": {"attempts": 3}},
        {"approval": {}},
    ]
    assert len({Tomorrow(**said, **other).digest for other in others}) == len(others)


def test_digest_ignores_order_comments_defaults_and_keys() -> None:
    text = (VALID / "wml.yml").read_text(encoding="utf-8")
    digest = load_manifest_text(text, "a.yml").digest
    reordered = yaml.safe_load(
        text.replace("2.10-", "'2.10-").replace("-ddl\n    run", "-ddl'\n    run")
    )
    reordered = dict(reversed(reordered.items()))
    reordered["training_data_reference"]["connection"]["access_key_id"] = "another"
    reordered["training_results_reference"]["connection"]["access_key_id"] = "another"
    reordered["model_definition"]["framework"]["runtimes"]["version"] = "3.10"
    reordered["retries"] = {"attempts": 3}
    reordered["schedule"] = None
    other = "# a comment\n" + yaml.safe_dump(reordered, sort_keys=False)
    assert load_manifest_text(other, "b.yml").digest == digest
    assert re.fullmatch("sha256:v2:[0-9a-f]{64}", digest)


def test_digest_is_that_of_data_that_are_staged_though_they_come_while_it_trains() -> None:
    text = (VALID / "folders.yml").read_text(encoding="utf-8")
    place = "source: {path: ./data}\n"
    streams = load_manifest_text(text.replace(place, f"{place}  stream: true\n"), "m.yml")
    assert streams.training_data_reference.stream
    assert streams.digest == load_manifest_text(text, "m.yml").digest
    assert "stream" not in streams.said["training_data_reference"]


def test_digest_is_the_same_whether_checkpoints_go_to_the_store_while_it_trains() -> None:
    text = (VALID / "folders.yml").read_text(encoding="utf-8")
    saves = load_manifest_text(f"{text}checkpoints: {{upload_every: 5m}}\n", "m.yml")
    assert saves.checkpoints.upload_every.total_seconds() == 300
    assert saves.digest == load_manifest_text(text, "m.yml").digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nodes: 2", "nodes: 3"),
        ("--steps 200", "--steps 201"),
        ("digits-models", "digits-models2"),
        ("https://s3", "https://s4"),
        ("code: x", "code: y"),
    ],
)
def test_digest_changes_with_the_training(old: str, new: str) -> None:
    text = (VALID / "wml.yml").read_text(encoding="utf-8") + "code: x\n"
    assert (
        load_manifest_text(text, "m.yml").digest
        != load_manifest_text(text.replace(old, new), "m.yml").digest
    )


def test_manifest_is_frozen_and_copies() -> None:
    manifest = _load("full")
    with pytest.raises(ValidationError):
        manifest.code = "x"
    for other in (copy.deepcopy(manifest), pickle.loads(pickle.dumps(manifest))):
        assert other.digest == manifest.digest
        assert other.line_of("code") == manifest.line_of("code")


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("a b;c", ("a b", "c")),
        (" a ; ; b ; ", ("a", "b")),
        ("a 'x;y' \"p;q\" r\\;s; t", ("a 'x;y' \"p;q\" r\\;s", "t")),
        ("a \\\n  b\nc", ("a    b", "c")),
        ("a '\\';b", ("a '\\'", "b")),
        ('a "\\";b"', ('a "\\";b"',)),
        ("a | b && c > d", ("a | b && c > d",)),
        ("a |\n b", ("a | b",)),
        ("a &&\nb; c", ("a && b", "c")),
        ("a || # why\n\n  b\nc", ("a ||  b", "c")),
        ("a 2>&1 |&\\\n\nb", ("a 2>&1 |&  b",)),
        ("a \\|\nb '|'\nc &\nd", ("a \\|", "b '|'", "c &", "d")),
        (";", ()),
        ("# a\npython x.py\n# b", ("python x.py",)),
        ("# don't; stop \\\npython x.py  # twice; or not", ("python x.py",)),
        ("a;# b\nc", ("a", "c")),
        ("a \\\n# b\nc", ("a", "c")),
        (
            "a b#c '# d' \"# e\" \\# ''# \\ # $# ${#f}",
            ("a b#c '# d' \"# e\" \\# ''# \\ # $# ${#f}",),
        ),
        ("{# a note #} a", ("{# a note #} a",)),
        ("{# see issue #12; b #} a b{# #3 #} # c", ("{# see issue #12; b #} a b{# #3 #}",)),
        ("a {# open #12 #\n{# b #}", ("a {# open", "{# b #}")),
    ],
)
def test_split_commands(text: str, commands: tuple[str, ...]) -> None:
    assert split_commands(text) == commands


@pytest.mark.parametrize("text", ["a 'b", 'a "b; c', "a \\"])
def test_split_commands_refuses_what_is_not_closed(text: str) -> None:
    with pytest.raises(ValueError, match="never closes|backslash"):
        split_commands(text)


@pytest.mark.parametrize(
    ("text", "end"), [("a |", "|"), ("a | # b\n", "|"), ("a ||; b", "||"), ("b\na &&", "&&")]
)
def test_split_commands_refuses_what_lacks_its_last_command(text: str, end: str) -> None:
    with pytest.raises(ValueError, match=f"^ends in {re.escape(end)}$"):
        split_commands(text)


@pytest.mark.parametrize(("name", "good"), [("__file__", False), ("__a", True), ("a__", True)])
def test_no_dag_has_the_name_of_what_python_has_in_each_module(name: str, good: bool) -> None:
    text = (VALID / "folders.yml").read_text(encoding="utf-8").replace("digits-local", name)
    if good:
        assert load_manifest_text(text, "m.yml").dag_id == name
        return
    with pytest.raises(ManifestInvalid, match="m.yml:2: model_definition.name: gives the DAG id"):
        load_manifest_text(text, "m.yml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tf-mnist", "tf-mnist"),
        ("MNIST (v1.2)!", "MNIST-v1.2"),
        ("a/../b", "a-..-b"),
        ("..", ""),
        ("日本", ""),
        ("Größe 1", "Gr-e-1"),
    ],
)
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected


def _sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield section
    for field in section.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _sections(kind)


def test_every_field_is_described_with_an_example_that_is_valid() -> None:
    for section in set(_sections(Manifest)):
        assert section.__doc__
        for name, field in section.model_fields.items():
            assert field.description and field.description.endswith("."), (section, name)
            assert field.examples, (section, name)
            kind: Any = Annotated[field.annotation, None, *field.metadata]
            TypeAdapter(kind).validate_python(field.examples[0])
