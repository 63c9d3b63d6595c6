"""FfDL's manifests in our dialect; the words of refusals are in the golden files of test_load."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddl_ops.command_line import command_argv

from ddl_airflow.core.compute import COMPUTE, Compute
from ddl_airflow.core.errors import ManifestError
from ddl_airflow.core.manifest.convert import converted
from ddl_airflow.core.manifest.ffdl import is_ffdl
from ddl_airflow.core.manifest.load import load_manifest, load_manifest_text, redacted_text
from ddl_airflow.core.manifest.model import Manifest

VALID = Path(__file__).parents[4] / "fixtures" / "manifests" / "valid"
STORE = """\
data_stores:
  - type: mount_cos
    training_data: {container: digits-data}
    training_results: {container: digits-models}
    connection: {conn_id: my_s3}
"""
SMALL = f"""\
name: digits
{STORE}framework: {{name: tensorflow, version: "2.21", command: python train.py}}
"""


def _load(name: str) -> Manifest:
    return load_manifest(VALID / f"{name}.yml")


def _regex(regex: str) -> str:
    groups = f"{{g: {{regex: '{regex}', scalars: {{x: {{type: FLOAT, value: $x}}}}}}}}"
    text = f"{SMALL}evaluation_metrics: {{type: regex, groups: {groups}}}\n"
    (metric,) = load_manifest_text(text, "m.yml").metrics
    return metric.regex


def test_learners_may_be_allowed_not_to_average() -> None:
    text = SMALL + "learners: 2\n"
    assert load_manifest_text(text, "m.yml").distribution == "mpi"
    allowed = load_manifest_text(text + "distribution: independent\n", "m.yml")
    assert (allowed.dialect, allowed.distribution, allowed.world_size) == ("ffdl", "independent", 2)
    assert "distribution: independent" in converted(allowed).splitlines()
    with pytest.raises(ManifestError, match="m.yml:9: distribution: "):
        load_manifest_text(text + "distribution: parameter_server\n", "m.yml")


def test_a_custom_image_is_set_aside_and_its_token_never_shown() -> None:
    where = (
        "{registry: r.example.com, namespace: mine, access_token: hunter2, email: a@example.com}"
    )
    text = SMALL.replace("python train.py}", f"python train.py, image_location: {where}}}")
    manifest = load_manifest_text(text, "m.yml")
    assert [f"{one.field}: {one.message}" for one in manifest.warnings] == [
        "framework.image_location: is not used: no container is started"
    ]
    assert "hunter2" not in redacted_text(text) + converted(manifest) + repr(manifest)
    # Of a registry that is open to all, as templates leave them.
    for empty in ("hunter2", "a@example.com"):
        load_manifest_text(text.replace(empty, '""'), "m.yml")
    with pytest.raises(ManifestError, match="image_location.tag: unknown field") as caught:
        load_manifest_text(text.replace("email:", "tag:"), "m.yml")
    assert "hunter2" not in str(caught.value)


def test_every_field_arrives_where_it_belongs() -> None:
    manifest = _load("ffdl")
    assert (manifest.dialect, manifest.dag_id) == ("ffdl", "digits-ffdl")
    assert (manifest.slots, manifest.world_size) == (2, 4)
    definition = manifest.model_definition
    assert definition.description == "Digits with two convolutional layers"
    assert (definition.framework.name, definition.framework.version) == (
        "tensorflow",
        "2.10-gpu-py3",
    )
    assert manifest.commands == (
        "python train.py --images ${DATA_DIR}/train-images-idx3-ubyte.gz --steps 200",
    )
    data, results = manifest.training_data_reference, manifest.training_results_reference
    assert (data.name, data.type, data.source.bucket) == ("object-store", "s3", "digits_data")
    assert results.target.bucket == "digits_models"
    assert data.connection == results.connection is not None
    keys = data.connection.resolve({})
    assert (keys.endpoint_url, keys.region_name) == ("https://s3.example.com", "eu-de")
    assert (keys.access_key_id, keys.secret_access_key) == ("0123456789", "not/A+real=key")


def test_lines_are_those_of_the_file() -> None:
    manifest = _load("ffdl")
    lines = (VALID / "ffdl.yml").read_text().splitlines()
    for path, written in {
        "model_definition.name": "name: digits-ffdl",
        "model_definition.execution.compute_configuration.nodes": "learners: 2",
        "launcher.slots": "gpus: 2",
        "training_results_reference.target.bucket": "container: digits_models",
        "training_data_reference.connection.secret_access_key": "password: not/A+real=key",
        "metrics[0].name": "loss: {type: FLOAT, value: $loss}",
    }.items():
        assert lines[manifest.line_of(path) - 1].strip() == written


@pytest.mark.parametrize(
    ("fields", "name", "slots", "nodes"),
    [
        ("", "cpu", 1, 1),
        ("gpus: 0\nlearners: 3\n", "cpu", 1, 3),
        ("gpus: 1\nlearners: 2\n", "gpu", 1, 2),
        ("gpus: 3\n", "gpu", 3, 1),
        ("cpus: 8\nlearners: 2\n", "cpu", 1, 2),
    ],
)
def test_learners_are_nodes_and_gpus_are_ranks(
    fields: str, name: str, slots: int, nodes: int
) -> None:
    manifest = load_manifest_text(SMALL + fields, "m.yml")
    compute = manifest.model_definition.execution.compute_configuration
    assert (compute.name, compute.nodes, manifest.slots) == (name, nodes, slots)


@pytest.mark.parametrize(("gpus", "name"), [(0, "cpu"), (1, "gpu")])
def test_a_node_has_the_ranks_of_gpus_whatever_the_site_gives_it(gpus: int, name: str) -> None:
    text = SMALL + f"gpus: {gpus}\nlearners: 2\n"
    site = {**COMPUTE, name: Compute(name, 8, gpu=gpus > 0)}
    manifest = load_manifest_text(text, "m.yml", compute=site)
    assert (manifest.slots, manifest.world_size, manifest.compute.name) == (1, 2, name)
    assert load_manifest_text(text, "m.yml").launcher.slots is None  # as before: it is digested


def _command(text: str) -> str:
    fields = SMALL.replace("command: python train.py", f"command: {json.dumps(text)}")
    (command,) = load_manifest_text(fields, "m.yml").commands
    return command


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("python a.py\n  --b c\r\n  --d e\n", "python a.py   --b c   --d e"),
        ("python a.py \\\n  --b c", "python a.py    --b c"),
        ("pip install x && python a.py", "pip install x && python a.py"),
        ("python a.py;", "python a.py;"),
        ("python a.py 'b; c'", "python a.py 'b; c'"),
    ],
)
def test_lines_are_one_command(text: str, command: str) -> None:
    assert _command(text).rstrip(";") == command.rstrip(";")


@pytest.mark.parametrize("text", ["a; b; c d", "a 'x y'; b \"it's\"", "source env\n; python a.py"])
def test_commands_are_a_text_for_bash_on_each_learner(text: str) -> None:
    assert shlex.split(_command(text)) == ["bash", "-c", text.replace("\n", " ")]


def test_each_part_of_a_pipe_of_such_a_text_is_looked_at(tmp_path: Path) -> None:
    argv = command_argv(_command("cd .; (exit 3) | tee 'a log'"))
    assert subprocess.run(argv, cwd=tmp_path, check=False).returncode == 3


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        ("python a.py\n  --b c", 0),
        ("pip install x\npython a.py", 2),
        ("a; b", 1),
        ("a; {{ ds }}", None),
        ("python a.py {{ ds }}", 0),
    ],
)
def test_what_commands_mean_here_is_said(text: str, warnings: int | None) -> None:
    fields = SMALL.replace("command: python train.py", f"command: {json.dumps(text)}")
    if warnings is None:
        with pytest.raises(ManifestError, match="framework.command: has 2 commands and a template"):
            load_manifest_text(fields, "m.yml")
        return
    issues = load_manifest_text(fields, "m.yml").warnings
    assert [issue.field for issue in issues] == ["framework.command"] * warnings


@pytest.mark.parametrize(
    ("tag", "version"),
    [
        ("latest", "2"),
        ("latest-gpu-py3", "2"),
        ("nightly-py3", "2"),
        ("1.5.0-gpu-py3", "1.5.0-gpu-py3"),
        ("2.0.0a0-py3", "2.0.0a0-py3"),
        ("newest", None),
        ("latest and greatest", None),
    ],
)
def test_tag_of_an_image_is_the_tensorflow_that_is_there(tag: str, version: str | None) -> None:
    fields = SMALL.replace('"2.21"', json.dumps(tag))
    if version is None:
        with pytest.raises(ManifestError, match="framework.version: .* not a version"):
            load_manifest_text(fields, "m.yml")
        return
    manifest = load_manifest_text(fields, "m.yml")
    assert manifest.model_definition.framework.version == version
    assert [issue.field for issue in manifest.warnings] == ["framework.version"] * (tag != version)


@pytest.mark.parametrize(
    ("tag", "version"),
    [("0.13.10-tf1.9.0-torch0.4.0-py2.7", "1.9.0"), ("0.28.1", "2")],
)
def test_a_training_of_horovod_is_one_of_the_tensorflow_in_its_image(tag: str, version: str):
    fields = SMALL.replace('"2.21"', json.dumps(tag)).replace("name: tensorflow", "name: horovod")
    framework = load_manifest_text(fields, "m.yml").model_definition.framework
    assert (framework.name, framework.version) == ("tensorflow", version)


def test_results_may_be_left_to_the_store() -> None:
    manifest = _load("ffdl_shell")
    assert manifest.training_results_reference.target.bucket == "dlaas-trained-models"
    assert _load("ffdl_servers").training_results_reference.target.path == (
        "/srv/cosdata/dlaas-trained-models"
    )
    missing = [i for i in manifest.warnings if i.field == "data_stores[0].training_results"]
    assert [issue.line for issue in missing] == [8]


@pytest.mark.parametrize("name", ["ffdl_folded", "ffdl_servers", "ffdl_shell"])
def test_what_becomes_of_ffdls_shapes(name: str, golden: Callable[[str, str], None]) -> None:
    manifest = _load(name)
    warned = "".join(f"# {issue.render(f'{name}.yml')}\n" for issue in manifest.warnings)
    golden(f"converted_{name}.yml", f"{warned}{converted(manifest)}")


# FfDL's TensorFlow manifests, and what of each is refused here.
THEIRS = {
    "etc/examples/tf-model/manifest.yml": (),
    "etc/examples/tf-model/gpu-manifest.yml": (),
    "etc/examples/tf-model/manifest-hostmount.yml": (),
    "etc/examples/tf-model/manifest-for-test.yml": ("data_stores[0].connection.auth_url",),
    "etc/examples/tf-summary-model/manifest.yml": (),
    "etc/examples/tf-summary-model/gpu-manifest.yml": (),
    "etc/examples/tf-distributed/manifest.yml": (),
    "etc/examples/keras-test/manifest-py3.yml": (),
    "demos/fashion-mnist-training/fashion-train/manifest.yml": (),
    "demos/fashion-mnist-training/fashion-train/manifest-cpu.yml": (),
}


@pytest.mark.parametrize("name", THEIRS)
def test_ffdls_own_manifests(name: str) -> None:
    folder = os.environ.get("DDL_FFDL")
    if not folder:
        pytest.skip("DDL_FFDL names no copy of github.com/IBM/FfDL: its manifests are not read")
    try:
        manifest = load_manifest(Path(folder, name))
    except ManifestError as error:
        assert tuple(issue.field for issue in error.issues) == THEIRS[name]
        return
    assert THEIRS[name] == ()
    assert len(manifest.commands) == 1
    again = load_manifest_text(converted(manifest), "converted.yml")
    assert (again.digest, again.warnings) == (manifest.digest, ())


def test_volume_is_a_folder() -> None:
    manifest = _load("ffdl_volume")
    assert manifest.training_data_reference.type == "fs"
    assert manifest.training_data_reference.source.path == "/srv/cosdata/digits-data"
    assert manifest.training_results_reference.target.path == "/srv/cosdata/digits-models"


@pytest.mark.parametrize(
    ("regex", "line", "found"),
    [
        ("x=(?P<x>[0-9.]+)", "x=1.5", "1.5"),
        ("x=(?P<x>[0-9.]+)", "max=1.5", None),  # FfDL matches from the start of a line
        (".*x=(?P<x>[0-9.]+)", "max=1.5", "1.5"),
        (r"(?P<n>\d+) (a|b) (?:c) (?P<x>\d+)", "1 b c 2", "2"),
        (r"\((?P<n>[(\]]) [^)(]*(?P<x>\d)\)", "(( ab3)", "3"),
        (r"[](]+(?P<x>\d)", "](4", "4"),
        (r"a|(?i:B)(?P<x>\d)", "b7", "7"),
        (r"(?i)Loss=(?P<x>\d)", "LOSS=7", "7"),
        (r"^a|b(?P<x>\d)", "b7", "7"),
        (r"^a|b(?P<x>\d)", "zzz b7", None),
    ],
)
def test_one_group_of_a_regex_is_kept(regex: str, line: str, found: str | None) -> None:
    kept = re.compile(_regex(regex))
    match = kept.search(line)
    assert kept.groups == 1
    assert (match[1] if match else None) == found


def test_regex_that_python_will_read_otherwise_is_refused() -> None:
    with pytest.raises(ManifestError, match="is not a regular expression: Possible set difference"):
        _regex("[a--b](?P<x>[0-9])")


def test_metrics_of_one_name_get_their_groups_name_and_progress_is_read_once() -> None:
    names = [metric.name for metric in _load("ffdl").metrics]
    assert names == ["loss", "train_accuracy", "step", "test_accuracy"]


def test_names_that_the_translation_makes_do_not_meet() -> None:
    def group(*names: str) -> str:
        value = "{type: FLOAT, value: $x}"
        values = ", ".join(f"{name}: {value}" for name in names)
        etimes = f"{{iteration: {value}}}"
        return f"{{regex: 'x=(?P<x>[0-9])', scalars: {{{values}}}, etimes: {etimes}}}"

    groups = f"{{train: {group('loss', 'step')}, test: {group('loss', 'train_loss')}}}"
    text = f"{SMALL}evaluation_metrics: {{type: regex, groups: {groups}}}\n"
    names = [metric.name for metric in load_manifest_text(text, "m.yml").metrics]
    assert names == ["train_loss_", "step", "test_loss", "train_loss"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"framework": {"command": "a"}, "learners": 1}, True),
        ({"data_stores": []}, True),
        ({"gpus": 1}, True),
        ({"model_definition": {}, "framework": {}}, False),
        ({"training_data_reference": {}, "framework": {}}, False),
        ({"name": "a"}, False),
        ({}, False),
    ],
)
def test_dialects_are_told_apart(value: dict[str, Any], expected: bool) -> None:
    assert is_ffdl(value) is expected


# --- no field is passed over -----------------------------------------------------------------


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path


def _with(path: tuple[str | int, ...], change: Any) -> str:
    value = yaml.load((VALID / "ffdl.yml").read_text(encoding="utf-8"), yaml.BaseLoader)
    *around, last = path
    section = value
    for key in around:
        section = section[key]
    if change is None:
        del section[last]
    else:
        section[last] = change
    # Texts as they are: numbers must stay without quotes.
    return re.sub(r"'([0-9.]+)'", r"\1", yaml.safe_dump(value))


def _outcome(text: str) -> tuple[str, dict[str, str]]:
    """The training with its keys and the warnings by field, or "refused" and the errors."""
    try:
        manifest = load_manifest_text(text, "m.yml")
    except ManifestError as error:
        return "refused", {issue.field: issue.message for issue in error.issues}
    connection = manifest.training_data_reference.connection
    keys = connection.resolve({}).__dict__ if connection else None
    warnings = {issue.field: issue.message for issue in manifest.warnings}
    return f"{manifest.model_dump_json()} {keys}", warnings


@pytest.mark.parametrize(
    "path",
    list(_leaves(yaml.load((VALID / "ffdl.yml").read_text(encoding="utf-8"), yaml.BaseLoader))),
    ids=lambda path: ".".join(map(str, path)),
)
def test_no_field_is_passed_over(path: tuple[str | int, ...]) -> None:
    training, warnings = _outcome(_with(("name",), "digits-ffdl"))
    at = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:]
    aside = [field for field, message in warnings.items() if "written out" not in message]
    if any(at == field or at.startswith((f"{field}.", f"{field}[")) for field in aside):
        return  # and a warning says so
    if path[-1] == "type":  # decides what the others mean
        refused, issues = _outcome(_with(path, "nonsense"))
        assert refused == "refused" and at in issues
        return
    assert _outcome(_with(path, None))[0] != training
    assert _outcome(_with(path, "7"))[0] != training


def test_type_of_a_connection_has_to_fit_its_store() -> None:
    path = ("data_stores", 0, "connection", "type")
    outcome = _outcome(_with(path, "host_mount"))
    message = "is host_mount, but the store is mount_cos"
    assert outcome == ("refused", {"data_stores[0].connection.type": message})


@pytest.mark.parametrize("around", [(), ("framework",), ("data_stores", 0, "connection")])
def test_field_that_ffdl_does_not_have_is_refused(around: tuple[str | int, ...]) -> None:
    refused, issues = _outcome(_with((*around, "qqq"), "x"))
    assert refused == "refused" and list(issues.values()) == ["unknown field"]
