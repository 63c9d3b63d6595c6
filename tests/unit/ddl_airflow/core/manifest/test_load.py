"""Texts in, manifests or exact messages out. ``UPDATE_GOLDEN=1`` rewrites the messages."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddl_airflow.core.errors import ManifestError, ManifestInvalid, ManifestSyntaxError
from ddl_airflow.core.manifest.convert import converted
from ddl_airflow.core.manifest.load import (
    load_manifest,
    load_manifest_text,
    looks_like_manifest,
    redacted_text,
)
from tests.documents import with_real_connection, wml_document
from tests.limits import within

FIXTURES = Path(__file__).parents[4] / "fixtures" / "manifests"
VALID = sorted((FIXTURES / "valid").glob("*.yml"))
INVALID = sorted((FIXTURES / "invalid").glob("*.yml"))


def _text(name: str) -> str:
    return (FIXTURES / "valid" / f"{name}.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid_manifest_loads(path: Path) -> None:
    manifest = load_manifest(path, source=path.name)
    assert manifest.source == path.name
    assert manifest.folder == path.parent


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid_manifest_gives_exactly_these_messages(path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        load_manifest(path, source=path.name)
    golden = path.with_suffix(".txt")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(f"{caught.value}\n", encoding="utf-8")
    assert f"{caught.value}\n" == golden.read_text(encoding="utf-8")
    assert "hunter2" not in f"{caught.value!r}{caught.value.__context__!r}"


def test_messages_are_valid_after_following_the_fix() -> None:
    text = (FIXTURES / "invalid" / "template.yml").read_text(encoding="utf-8")
    with pytest.raises(ManifestInvalid):
        load_manifest_text(text, "m.yml")
    fixed = text.replace("0.12", "2.21").replace("<auth-url>", "${S3_ENDPOINT_URL}")
    fixed = fixed.replace("<username>", "${S3_KEY}").replace("<password>", "${S3_SECRET}")
    assert load_manifest_text(fixed, "m.yml").world_size == 1


def test_the_wml_documents_manifest_loads_once_its_connection_is_filled_in() -> None:
    printed = wml_document().manifest
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(printed, "m.yml")
    assert {issue.field.rpartition(".")[2] for issue in caught.value.issues} == {
        "endpoint_url",
        "access_key_id",
        "secret_access_key",
    }
    manifest = load_manifest_text(with_real_connection(printed), "m.yml")
    assert (manifest.dag_id, manifest.tf1, manifest.world_size) == ("tf-mnist", True, 2)
    assert manifest.commands == ("python mnist-train-ddl.py", "python transform.py")


OF_THEN = """\
model_definition:
  name: tf-mnist
  author: {{name: DL Developer, email: ""}}
  framework:
    name: tensorflow
    version: "1.5"
    runtimes:
    - name: python
      version: "3.5"
  execution:
    command: {command}
    compute_configuration: {{name: {name}, nodes: 2}}
training_data_reference:
  name: training_data_reference_name
  connection:
    endpoint_url: https://s3.example.com
    aws_access_key_id: AKIAEXAMPLE
    aws_secret_access_key: "0123456789"
  source: {{bucket: lake}}
  type: s3
  exclude: [/results/]
training_results_reference:
  connection:
    endpoint_url: https://s3.example.com
    aws_access_key_id: ${{S3_ACCESS_KEY_ID}}
    aws_secret_access_key: ${{S3_SECRET_ACCESS_KEY}}
  target: {{bucket: lake, prefix: results}}
  type: s3
"""


@pytest.mark.parametrize(("name", "ranks"), [("small", 2), ("medium", 4), ("large", 8)])
def test_manifests_of_watson_machine_learning_load_as_they_were_written(name, ranks) -> None:
    """Keys as boto3 has them, runtimes as a list, an empty address, sizes for GPUs, one bucket."""
    text = OF_THEN.format(command="python train.py", name=name)
    manifest = load_manifest_text(text, "m.yml")
    assert (manifest.dag_id, manifest.world_size) == ("tf-mnist", ranks)
    assert str(manifest.model_definition.author) == "DL Developer"
    runtimes = manifest.model_definition.framework.runtimes
    assert runtimes is not None and runtimes.version == "3.5"
    opened = manifest.training_data_reference.connection
    assert opened is not None
    assert opened.resolve({}).secret_access_key == "0123456789"
    shown = redacted_text(text)
    assert "AKIAEXAMPLE" not in shown and "0123456789" not in shown
    assert "aws_access_key_id: ${S3_ACCESS_KEY_ID}" in shown
    (said,) = [issue for issue in manifest.warnings if "written out" in issue.message]
    assert said.field == "training_data_reference.connection.access_key_id"
    alone = text.replace('author: {name: DL Developer, email: ""}', "author: DL Developer")
    assert str(load_manifest_text(alone, "m.yml").model_definition.author) == "DL Developer"
    for empty in ('{name: "", email: ""}', '""'):
        none = text.replace('{name: DL Developer, email: ""}', empty)
        assert load_manifest_text(none, "m.yml").model_definition.author is None


def test_a_key_that_is_named_twice_is_an_unknown_field() -> None:
    text = OF_THEN.format(command="python train.py", name="small").replace(
        "    aws_access_key_id: AKIA", "    access_key_id: B\n    aws_access_key_id: AKIA"
    )
    with pytest.raises(ManifestInvalid, match="aws_access_key_id: unknown field"):
        load_manifest_text(text, "m.yml")
    assert "AKIA" not in redacted_text(text)


def test_results_inside_the_data_are_left_out_of_it_as_a_whole() -> None:
    text = OF_THEN.format(command="python train.py", name="small")
    for pattern in ("/result/", '"*.json"', "/results/a/"):
        with pytest.raises(ManifestInvalid, match=r"lie inside the .*exclude: ./results/. beside"):
            load_manifest_text(text.replace("[/results/]", f"[{pattern}]"), "m.yml")


def test_servers_that_find_each_other_are_told_of_tf_config() -> None:
    command = "PS_HOSTS_COUNT=1 ./launcher.py python mnist_dist.py"
    text = OF_THEN.format(command=command, name="small")
    (said,) = [
        one for one in load_manifest_text(text, "m.yml").warnings if "servers" in one.message
    ]
    assert said.field == "model_definition.execution.command" and said.line == 11
    assert said.fix == "Write distribution: parameter_server, and read TF_CONFIG."
    text += "distribution: independent\n"
    assert not [
        one for one in load_manifest_text(text, "m.yml").warnings if "servers" in one.message
    ]


def test_a_command_that_begins_with_an_option_starts_no_program() -> None:
    text = OF_THEN.format(command="-x NCCL_DEBUG=INFO python train.py", name="small")
    with pytest.raises(ManifestInvalid, match=r"command: '-x NCCL_DEBUG=INFO .* begins with an op"):
        load_manifest_text(text, "m.yml")


@pytest.mark.parametrize(
    ("version", "tf1"), [("1.13", True), ("1", True), ("1.13-py3-ddl", True), ("10.1", False)]
)
def test_a_version_below_2_is_a_script_for_tensorflow_1(version: str, tf1: bool) -> None:
    text = _text("folders").replace('"2.21"', f'"{version}"')
    assert load_manifest_text(text, "m.yml").tf1 == tf1


def test_missing_field_points_at_its_section() -> None:
    text = _text("folders").replace("    command: python train.py\n", "")
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(text, "m.yml")
    (issue,) = caught.value.issues
    assert (issue.line, issue.field) == (4, "model_definition.execution.command")


def test_field_behind_an_alias_points_at_where_it_is_written() -> None:
    text = _text("full").replace("region_name: eu-de", "region: eu-de")
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(text, "m.yml")
    assert [issue.line for issue in caught.value.issues] == [19, 19]


def test_unreadable_file_is_a_manifest_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yml", tmp_path):
        with pytest.raises(ManifestSyntaxError, match="cannot be read"):
            load_manifest(path)


def test_bytes_text_byte_order_mark_and_line_ends_are_all_the_same() -> None:
    text = _text("conn_id")
    digest = load_manifest_text(text, "m.yml").digest
    for other in (text.encode(), "\ufeff" + text, text.replace("\n", "\r\n").encode("utf-8-sig")):
        assert load_manifest_text(other, "m.yml").digest == digest


def test_surrogates_of_a_file_that_is_not_utf8_are_refused() -> None:
    text = b"model_definition:\n  name: \xe9\n".decode("utf-8", "surrogateescape")
    with pytest.raises(ManifestSyntaxError, match=r"^m.yml:2: is not UTF-8"):
        load_manifest_text(text, "m.yml")
    with pytest.raises(ManifestSyntaxError, match="is not UTF-8"):
        load_manifest_text("a: \ud800", "m.yml")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "- " * 100_000,
        "a: {b: " * 30_000,
        "x\n" * 200_000,
        "- x\n" * 60_000,
        "? " * 100_000,
        "a: 'x" + "y" * 200_000,
        "k" * 200_000 + ": 1",
        '"' + "\\n" * 100_000 + '": 1',
        "a: &a [*a, *a]",
        "<<: &m {<<: *m}",
        "a: " + "9" * 200_000,
        "\x00",
        "a: \x07b",
        "%YAML 9.9\n---\na: 1",
        "%TAG ! tag:evil,2000:\n---\na: !x 1",
        "\ufeff\ufeff",
        "...\n...\n",
        ": :",
        "null",
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_hostile_text_is_refused_fast(text: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ManifestError) as caught:
        load_manifest_text(text, "m.yml")
    assert time.perf_counter() - start < within(2)
    assert all(len(line) < 1000 for line in str(caught.value).splitlines())


def test_aliases_cannot_multiply_into_memory() -> None:
    text = (FIXTURES / "invalid" / "bomb.yml").read_text(encoding="utf-8")
    assert redacted_text(text) == text


def test_random_damage_only_ever_gives_manifest_errors() -> None:
    chance = random.Random(20)
    texts = [path.read_bytes() for path in VALID]
    words = (b":", b"- ", b"\t", b"{", b"]", b"&a ", b"*a", b"'", b'"', b"|", b">", b"#", b"!!int ")
    words += (b"null", b"-1", b"\xff", b"\n", b"\n  ", b"---\n", b"?", b"${", b"1e999", b"<<: ")
    refused = 0
    for _ in range(1500):
        damaged = bytearray(chance.choice(texts))
        for _ in range(chance.randint(1, 4)):
            start = chance.randrange(len(damaged))
            end = start + chance.choice((0, 0, 1, 5, 40))
            damaged[start:end] = chance.choice((b"", *words, damaged[end : end + 30]))
        try:
            load_manifest_text(bytes(damaged), "m.yml")
            assert "not/A+real=key" not in redacted_text(damaged.decode())
        except ManifestError as error:
            refused += 1
            assert error.issues
            assert len(str(error).splitlines()) == len(error.issues)
            assert "not/A+real=key" not in str(error)
    assert 500 < refused < 1500


def test_every_scalar_may_be_replaced_by_any_other_kind() -> None:
    lines = _text("full").splitlines()
    for i, line in enumerate(lines):
        name, colon, _ = line.partition(": ")
        # Others: test_schema.py, test_who_is_refused_by_the_schema_is_refused_by_us.
        for value in ("", "[1]", "2024-01-01"):
            text = "\n".join([*lines[:i], f"{name}: {value}", *lines[i + 1 :]])
            if colon:
                try:
                    load_manifest_text(text, "m.yml")
                except ManifestError as error:
                    assert all(issue.line for issue in error.issues)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("hunter2", "'***'"),
        ("'hunter''2' # hunter", "'***' # hunter"),
        ('"hunter\\\n      2"', "'***'\n"),
        ("|-\n      hunter2\n", "'***'\n\n"),
        (">\n      hunter\n      2\n", "'***'\n\n\n"),
        ("&k hunter2", "&k '***'"),
        ("!!str 0x7", "'***'"),
        ("hunter\n      2", "'***'\n"),
        ("é𝄞 hunter2", "'***'"),
        ("${SECRET}", "${SECRET}"),
    ],
)
def test_redacted_text_hides_a_key_however_it_is_written(written: str, shown: str) -> None:
    text = _text("wml").replace("Digit images", "Zahlen ä𝄞")
    text = text.replace("secret_access_key: not/A+real=key", f"secret_access_key: {written}", 1)
    redacted = redacted_text(text)
    assert f"secret_access_key: {shown}" in redacted
    assert len(redacted.splitlines()) == len(text.splitlines())
    assert "hunter2" not in redacted and "not/A+real=key" not in redacted
    assert "0123456789" not in redacted
    again = load_manifest_text(redacted, "m.yml")
    assert again.digest == load_manifest_text(text, "m.yml").digest


def test_redacted_text_hides_keys_in_flow_style_and_behind_aliases() -> None:
    text = "a: &s hunter2\nb: {access_key_id: one, secret_access_key: *s, c: d}\n"
    assert redacted_text(text) == (
        "a: &s '***'\nb: {access_key_id: '***', secret_access_key: *s, c: d}\n"
    )
    assert redacted_text("secret_access_key: [x, {y: z}]") == (
        "secret_access_key: ['***', {y: '***'}]"
    )


def test_redacted_text_hides_a_secret_of_a_command_in_flow_style() -> None:
    text = "execution: {command: python train.py --password=abc, secret_access_key: xyz}\n"
    assert redacted_text(text) == (
        "execution: {command: python train.py --password=*** secret_access_key: '***'}\n"
    )
    text = "execution: {command: python train.py --password=abc}\n"
    assert redacted_text(text) == "execution: {command: python train.py --password=***\n"


def test_redacted_text_hides_the_keys_of_ffdl() -> None:
    redacted = redacted_text(_text("ffdl") + "#  password: hunter2\n")
    assert "user_name: '***'" in redacted and "password: '***'" in redacted
    assert not [key for key in ("0123456789", "not/A+real=key", "hunter2") if key in redacted]


def test_redacted_text_hides_keys_that_are_commented_out() -> None:
    text = "a: 1\n# secret_access_key: hunter2\nb: 2 #access_key_id : hunter2\n"
    assert redacted_text(text) == (
        "a: 1\n# secret_access_key: '***'\nb: 2 #access_key_id : '***'\n"
    )


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("manifest.yml", "", True),
        ("a/b/manifest-v2.yaml", "", True),
        ("digits.manifest.yml", "", True),
        ("manifest.json", "", False),
        ("my-manifest.yml", "", False),
        ("x.yml", "# hi\ntraining_data_reference:\n  a: 1", True),
        ("x.yml", "model_definition:", True),
        ("x.yml", "name: a\ndata_stores:\n  - id: b", True),
        ("x.yml", "  model_definition: nested", False),
        ("x.yml", "services:\n  web: {}", False),
    ],
)
def test_foreign_yaml_is_told_apart(name: str, text: str, expected: bool) -> None:
    assert looks_like_manifest(name, text) is expected


def test_importing_stays_light() -> None:
    code = (
        "import sys, ddl_airflow.core.manifest.load as m\n"
        "from pathlib import Path\n"
        f"m.load_manifest(Path({str(VALID[0])!r}))\n"
        "heavy = {'airflow', 'tensorflow', 'boto3'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=within(60))


@pytest.mark.parametrize(
    ("framework", "wrong"),
    [
        ("tensorflow-horovod", ""),  # of Watson Machine Learning, as the next ones
        (
            "pytorch",
            "is pytorch, and what trains here is TensorFlow: ranks would not average PyTorch's "
            "gradients, and its models are not published. Port the script to TensorFlow or Keras, "
            "and write name: tensorflow. Or train with torchrun and DistributedDataParallel, "
            "without a manifest.",
        ),
        (
            "caffe",
            "is caffe, and what trains here is TensorFlow. Port the script to TensorFlow or Keras, "
            "and write name: tensorflow.",
        ),
        (
            "keras",
            "is keras, and the framework beneath it is named here. Write name: tensorflow, and its "
            "version; it brings Keras.",
        ),
        (
            "tensorfow",
            "is text 'tensorfow', wanted tensorflow or tensorflow-ddl or tensorflow-horovod. "
            "Write for example name: tensorflow-ddl.",
        ),
    ],
)
def test_frameworks_of_then(framework: str, wrong: str) -> None:
    text = (FIXTURES / "valid" / "wml.yml").read_text().replace("tensorflow-ddl", framework)
    if not wrong:
        assert load_manifest_text(text, "m.yml").model_definition.framework.name == framework
        return
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(text, "m.yml")
    assert str(caught.value) == f"m.yml:9: model_definition.framework.name: {wrong}"


def test_a_manifest_of_2017_is_read_as_the_one_of_2018() -> None:
    manifest = load_manifest(FIXTURES / "valid" / "wml_2017.yml")
    assert (manifest.world_size, manifest.warnings) == (2, ())
    assert manifest.training_data_reference.type == "s3"
    assert manifest.training_data_reference.source.bucket == "shapes-drawn"
    assert manifest.training_results_reference.target.bucket == "shapes-trained"
    assert load_manifest_text(converted(manifest), "now.yml").digest == manifest.digest


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        # On the lines where it was written.
        ("bucket: shapes-drawn", "bucket: A B", "10: training_data_reference.source.bucket"),
        ("resource: medium", "resource: huge", "26: model_definition.execution.compute_conf"),
        ("    type: s3\n", "    type: s4\n", "11: training_data_reference.type"),
        ("  target:", "  source:", "2: training_results_reference.target: is missing"),
        (
            "model_definition:",
            "- source: {bucket: more}\nmodel_definition:",
            "8: training_data_reference: is a list, wanted a mapping of fields",
        ),
        (
            "resource: medium",
            "resource: medium\n    compute_configuration: {name: v100}",
            "26: model_definition.execution.resource: unknown field",
        ),
    ],
)
def test_what_is_wrong_in_a_manifest_of_2017(written: str, instead: str, said: str) -> None:
    text = _text("wml_2017").replace(written, instead, 1)
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(text, "m.yml")
    assert f"m.yml:{said}" in str(caught.value)
