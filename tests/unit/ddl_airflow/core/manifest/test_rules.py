"""The rules' edges; what they say is in the golden files of test_load."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from ddl_airflow.core.compute import Compute
from ddl_airflow.core.errors import ManifestInvalid
from ddl_airflow.core.manifest import sections
from ddl_airflow.core.manifest.load import load_manifest_text, redacted_text
from ddl_airflow.core.manifest.rules import RULES

VALID = Path(__file__).parents[4] / "fixtures" / "manifests" / "valid"


def _fields(name: str, old: str, new: str) -> list[str]:
    """Returns the fields found wrong once old is replaced by new."""
    text = (VALID / f"{name}.yml").read_text(encoding="utf-8")
    assert old in text
    try:
        load_manifest_text(text.replace(old, new), "m.yml")
    except ManifestInvalid as error:
        return [issue.field for issue in error.issues]
    return []


def test_fields_of_another_launcher_hide_nothing_else() -> None:
    folders = (VALID / "folders.yml").read_text(encoding="utf-8")
    text = f"{folders}launcher: {{kind: local, partition: gpu, account: }}\n"
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(text.replace("name: cpu2", "name: cpuu"), "m.yml")
    assert {issue.field for issue in caught.value.issues} == {
        "model_definition.execution.compute_configuration.name",
        "launcher.partition",
    }


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("2", True),
        ("2.21", True),
        ("2.21.0", True),
        ("2.21-py3-ddl", True),
        ("2.21.0rc1", True),
        ('"10.1"', True),
        ("1.15", True),
        ("1.13-py3-ddl", True),
        ("0", False),
        ("0.12", False),
        ("two", False),
        ("2..1", False),
        ("v2", False),
    ],
)
def test_framework_version(version: str, good: bool) -> None:
    fields = _fields("folders", '"2.21"', version)
    assert fields == ([] if good else ["model_definition.framework.version"])


@pytest.mark.parametrize(
    ("schedule", "good"),
    [
        ("'*/5 0-6 1,15 jan-mar mon'", True),
        ("'@daily'", True),
        ("'@once'", True),
        ("null", True),
        ("0 3 * * 0", True),
        ("'@continuous'", False),
        ("daily", False),
        ("'* * * * * *'", False),
        ("'* * * *'", False),
        ("'60 * * * *'", False),
        ("'0 0 31 4 *'", False),
        ("'R 3 * * *'", False),
        ("'H 3 * * *'", False),
        ("'*/0 * * * *'", False),
        ("{on_data_change: true}", True),
        ("{cron: '@daily', on_data_change: true}", True),
        ("{cron: '@once', on_data_change: true}", False),
        ("{on_data_change: false}", False),
        ("{}", False),
        ("'" + "0," * 200 + "0 * * * *'", False),
        ("{cron: '@daily', timezone: Europe/Berlin, start: 2026-01-31, catchup: true}", True),
        ("{cron: '@daily', start: '2026-01-31T03:00', max_active_runs: 2}", True),
        ("{max_active_runs: 4}", True),
        ("{max_active_runs: 4, start: 2026-01-31}", False),
        ("{max_active_runs: 0}", False),
        ("{max_active_runs: 1}", False),
        ("{start: 2026-01-31}", False),
        ("{cron: '@daily', start: 2026-02-31}", False),
        ("{cron: '@daily', start: 1026-01-31}", False),
        ("{cron: '@daily', start: tomorrow}", False),
        ("{cron: '@daily', catchup: true}", False),
        ("{on_data_change: true, start: 2026-01-31, catchup: true}", False),
        ("{cron: '@daily', timezone: Europe/Berln}", False),
        ("{cron: '@daily', timezone: Europe}", False),
        ("{cron: '@daily', timezone: ../../etc/passwd}", False),
        ("{timetable: site_calendar.AfterWorkday}", True),
        ("{timetable: AfterWorkday}", False),
        ("{timetable: 'os.system(1)'}", False),
        ("{timetable: site_calendar.AfterWorkday, cron: '@daily'}", False),
        ("{assets: [s3://other/model, features]}", True),
        ("{assets: [features], on_data_change: true, cron: '@daily'}", True),
        ("{assets: [features], cron: '@once'}", False),
        ("{assets: []}", False),
        ("{assets: [features, features]}", False),
        ("{assets: ['s3://', x]}", False),
        ("{assets: ['s3://key:secret@host/model']}", False),
        ("{assets: ['airflow://x']}", False),
        ("{assets: [Größe]}", False),
    ],
)
def test_schedule(schedule: str, good: bool) -> None:
    fields = _fields("conn_id", '"@weekly"', schedule)
    assert [field.partition(".")[0] for field in fields] == ([] if good else ["schedule"])


@pytest.mark.parametrize("path", ["~", "~/results", "~somebody/results"])
def test_a_folder_is_not_below_a_home(path: str) -> None:
    said = "path: begins with ~, which is nobody's home here. Write the folder's absolute path."
    text = (VALID / "folders.yml").read_text(encoding="utf-8")
    for place, field in (("./data", "data_reference.source"), ("/srv/models", "target")):
        with pytest.raises(ManifestInvalid, match=re.escape(f"{field}.{said}")):
            load_manifest_text(text.replace(place, f"'{path}'"), "m.yml")


@pytest.mark.parametrize(
    ("notifications", "wrong"),
    [
        ("{on_failure: [ml@example.com], on_success: [a.b.Notifier]}", []),
        ("{on_failure: [{notifier: a.b.C, arguments: {to: [x, y], n: 3, on: true}}]}", []),
        ("{on_failure: [somebody]}", ["notifications.on_failure[0].notifier"]),
        ("{on_approval: [ml@example.com]}", ["notifications.on_approval"]),
        (
            "{on_success: [{arguments: {to: a@b, smtp_password: x, webhook_url: y, "
            "integration_key: z, routing_key: z, dedup_key: z}}]}",
            [
                "notifications.on_success[0].arguments.integration_key",
                "notifications.on_success[0].arguments.routing_key",
                "notifications.on_success[0].arguments.smtp_password",
                "notifications.on_success[0].arguments.webhook_url",
            ],
        ),
        ("{on_success: [{arguments: {to: {a: b}}}]}", ["notifications.on_success[0].arguments.to"]),
    ],
)
def test_notifications(notifications: str, wrong: list[str]) -> None:
    more = f'"@weekly"\nnotifications: {notifications}'
    assert _fields("conn_id", '"@weekly"', more) == wrong


def test_a_training_does_not_wait_for_its_own_model() -> None:
    text = (VALID / "conn_id.yml").read_text(encoding="utf-8")
    manifest = load_manifest_text(text, "m.yml")
    place = manifest.training_results_reference.place
    uri = "/".join(filter(None, ("s3:/", place.bucket, place.prefix, manifest.dag_id)))
    fields = _fields("conn_id", '"@weekly"', f"{{assets: [{uri}/]}}")
    assert fields == ["schedule.assets[0]"]
    assert _fields("conn_id", '"@weekly"', f"{{assets: [{uri}2]}}") == []


@pytest.mark.parametrize(
    ("bucket", "good"),
    [
        ("abc", True),
        ("a.b-c.1", True),
        ("123", True),
        ("ab", False),
        ("a" * 63, True),
        ("a" * 64, False),
        ("-abc", False),
        ("abc.", False),
        ("a..b", False),
        ("A-bucket", False),
        ("a_b", True),
        ("_ab", False),
        ("1.2.3.4", False),
        ("a/b", False),
    ],
)
def test_bucket(bucket: str, good: bool) -> None:
    fields = _fields("conn_id", "digits-data", bucket)
    assert fields == ([] if good else ["training_data_reference.source.bucket"])


@pytest.mark.parametrize(
    ("prefix", "good"),
    [("a", True), ("a/b/", True), ("a.b/..c", True), ("/a", False), ("a//b", False)]
    + [("../a", False), ("a/..", False), ("./a", False), ("/", True)],
)
def test_prefix(prefix: str, good: bool) -> None:
    fields = _fields("conn_id", "prefix: weekly", f"prefix: {prefix}")
    assert fields == ([] if good else ["training_results_reference.target.prefix"])


@pytest.mark.parametrize(
    ("target", "good"),
    [
        ("bucket: digits-data", False),
        ("bucket: digits-data, prefix: models", False),
        ("bucket: digits-data2", True),
    ],
)
def test_results_may_not_become_data(target: str, good: bool) -> None:
    fields = _fields("conn_id", "bucket: digits-models, prefix: weekly", target)
    assert fields == ([] if good else ["training_results_reference.target"])


@pytest.mark.parametrize(
    ("path", "good"),
    [("./data", False), ("data/models", False), ("database", True), ("./", True)]
    + [("data/../models", False)],
)
def test_result_folders(path: str, good: bool) -> None:
    assert (_fields("folders", "/srv/models", path) == []) is good


def test_data_inside_the_results_place_is_fine() -> None:
    assert _fields("full", "prefix: models", "prefix: ''") == []
    assert _fields("full", "prefix: models", "prefix: data/v2/models") != []
    assert _fields("full", "prefix: models", "prefix: data/v22") == []


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://localhost:9000", True),
        ("https://s3.eu-de.example.com/", True),
        ("http://[::1]:9000", True),
        ("${ANY_NAME}", True),
        ("https://", False),
        ("s3://bucket", False),
        ("http://host:99999", False),
        ("http://[::1", False),
        ("http://${HOST}:9000", False),
        ("https://user:pw@host", False),
        ("https://host?key=1", False),
        ("${a-b}", False),
    ],
)
def test_endpoint(url: str, good: bool) -> None:
    fields = _fields("full", "${STORE_URL}", f'"{url}"')
    wrong = [f"training_{what}_reference.connection.endpoint_url" for what in ("data", "results")]
    assert fields == ([] if good else wrong)


@pytest.mark.parametrize(
    ("regex", "good"),
    [
        ("Loss= ([0-9.]+)", True),
        ("(?:a|b)(c)", True),
        ("(?P<value>c)", True),
        ("Loss", False),
        ("(a)(b)", False),
        ("(a", False),
        ("(a){99999999999}", False),
        ("(" * 240 + "a" + ")" * 240, False),
        ("(a)" + "b" * 500, False),
    ],
)
def test_metric_regex(regex: str, good: bool) -> None:
    fields = _fields("full", "Loss= ([0-9.]+)", regex)
    assert fields == ([] if good else ["metrics[0].regex"])


@pytest.mark.parametrize("name", ["x" * 201, "...", "!"])
def test_name_without_a_dag_id(name: str) -> None:
    assert _fields("folders", "digits-local", f'"{name}"') == ["model_definition.name"]


def test_compute_must_be_known_unless_slots_are_given() -> None:
    field = "model_definition.execution.compute_configuration.name"
    assert _fields("full", "  slots: 2\n", "") == [field]
    assert _fields("folders", "cpu2", "v100x4") == []
    assert _fields("folders", "cpu2", "cpu3") == [field]


@pytest.mark.parametrize(
    ("name", "warned"), [("a100x8", True), ("gpu", False), ("cpu", False), ("v100x4", False)]
)
def test_that_ranks_on_a_kind_of_node_that_is_not_known_get_no_gpu_is_said(
    name: str, warned: bool
) -> None:
    text = (VALID / "folders.yml").read_text(encoding="utf-8")
    text = f"{text.replace('cpu2', name)}launcher: {{kind: local, slots: 8}}\n"
    manifest = load_manifest_text(text, "m.yml")
    assert manifest.slots == 8
    assert manifest.compute.gpu == name.startswith(("gpu", "v100"))
    found = [issue for issue in manifest.warnings if "GPU" in issue.message]
    assert [issue.field for issue in found] == (
        ["model_definition.execution.compute_configuration.name"] if warned else []
    )
    assert all("Write name: gpu" in issue.fix for issue in found)
    known = {name: Compute(name, 8, gpu=False)}
    assert not load_manifest_text(text, "m.yml", known).warnings


@pytest.mark.parametrize(
    ("inputs", "wrong"),
    [
        ("{a: x, b: y}", []),
        ("{a: x, b: x}", ["transform.inputs.b"]),
        ('{a: "x:0", b: x, c: "x:1"}', ["transform.inputs.b"]),
    ],
)
def test_a_model_is_fed_each_input_once(inputs: str, wrong: list[str]) -> None:
    text = (VALID / "folders.yml").read_text(encoding="utf-8")
    assert "transform:" not in text
    end = f"transform: {{inputs: {inputs}, outputs: {{one: y, two: y}}}}\n"
    assert _fields("folders", text, text + end) == wrong


@pytest.mark.parametrize(
    ("step", "good"),
    [("latest", True), ("0", True), ("-1", False), ("1.5", False), ("best", False)]
    + [('"200"', False), ("010", False), ("9" * 30, False), ("[1]", False), ("", False)],
)
def test_checkpoint(step: str, good: bool) -> None:
    fields = _fields("full", "checkpoint: 200", f"checkpoint: {step}")
    assert fields == ([] if good else ["transform.checkpoint"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("code", "../code"),
        ("code", "/code"),
        ("code", "~/code"),
        ("transform.sample", "/etc/x.npy"),
        ("transform.sample", "a/../../x.npy"),
        ("transform.sample", "x.png"),
    ],
)
def test_paths_stay_inside(field: str, value: str) -> None:
    old = {"code": "./scripts", "transform.sample": "t10k-images-idx3-ubyte.gz"}[field]
    assert _fields("full", old, value) == [field]


def test_sound_fields_are_checked_although_others_are_broken() -> None:
    fields = _fields("full", "code: ./scripts", "cod: 1\nschedule2: 1\n")
    assert fields == ["cod", "schedule2"]
    text = (VALID / "full.yml").read_text(encoding="utf-8")
    text = text.replace("code: ./", "cod: ./").replace("kind: slurm", "kind: lsf")
    text = text.replace("name: site-special, nodes: 3", "name: site-special, nodes: 0")
    text = text.replace("30 3 *", "30 30 *").replace("name: loss", "name: step")
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(text, "m.yml")
    assert [issue.field for issue in caught.value.issues] == [
        "model_definition.execution.compute_configuration.nodes",
        "schedule",
        "launcher.kind",
        "metrics[1].name",
        "cod",
    ]


def test_the_rules_of_every_section_are_looked_at() -> None:
    names = [f"{sections.__name__}.{found.name}" for found in iter_modules(sections.__path__)]
    of_sections = [getattr(import_module(name), "RULES", []) for name in names]
    assert sum(map(bool, of_sections)) == 10
    assert all(rule in RULES for rules in of_sections for rule in rules)


@pytest.mark.parametrize(
    ("schedule", "command", "evaluation", "warned"),
    [
        ("{on_data_change: true}", "--until {{ ds }}", "", ["model_definition.execution.command"]),
        ("{assets: [a]}", "", "--on {{ logical_date | ts }}", ["evaluation.command"]),
        (
            *("{assets: [a]}", "--until {{ dag_run.logical_date | ds }}", ""),
            ["model_definition.execution.command"],
        ),
        (
            *("{assets: [a]}", "", "--on {{ dag_run['data_interval_end'] }}"),
            ["evaluation.command"],
        ),
        ("{cron: '@daily'}", "--until {{ ds }}", "--on {{ ds }}", []),
        ("{on_data_change: true}", "--until {{ dag_run.run_after | ds }}", "--on {{ run_id }}", []),
        ("{on_data_change: true}", "--until {{ ds | default(run_id) }}", "", []),
        ("{on_data_change: true}", "{% if ds is defined %}--on {{ ds }}{% endif %}", "", []),
    ],
)
def test_dates_that_a_run_of_changed_data_has_not_are_warned_of(
    schedule: str, command: str, evaluation: str, warned: list[str]
) -> None:
    text = (VALID / "folders.yml").read_text("utf-8")
    text = re.sub(r"command: .*", f'command: "python train.py {command}"', text, count=1)
    bounds = "metric: f1, minimum: 1"
    text = text.replace("schedule:", f"schedule: {schedule}")
    text += f'evaluation: {{{bounds}, command: "python evaluate.py {evaluation}"}}\n'
    warnings = load_manifest_text(text, "m.yml").warnings
    found = [issue for issue in warnings if "no logical date" in issue.message]
    assert [issue.field for issue in found] == warned
    assert all("{{ dag_run.run_after | ds }}" in issue.fix for issue in found)


@pytest.mark.parametrize(
    ("schedule", "subject", "warned"),
    [
        ("{on_data_change: true}", "training of {{ ds }} failed", True),
        ("{assets: [a]}", "training of {{ dag_run.logical_date | ds }} failed", True),
        ("{on_data_change: true}", "training of {{ dag_run.run_after | ds }} failed", False),
        ("{cron: '@daily'}", "training of {{ ds }} failed", False),
    ],
)
def test_a_mail_that_names_dates_that_its_run_has_not_is_warned_of(
    schedule: str, subject: str, warned: bool
) -> None:
    text = (VALID / "folders.yml").read_text("utf-8").replace("schedule:", f"schedule: {schedule}")
    mail = f'{{arguments: {{to: ml@example.com, subject: "{subject}"}}}}'
    text += f"notifications: {{on_failure: [{mail}]}}\n"
    warnings = load_manifest_text(text, "m.yml").warnings
    found = [issue.field for issue in warnings if "no logical date" in issue.message]
    assert found == ["notifications.on_failure[0].arguments.subject"] * warned


@pytest.mark.parametrize(
    ("words", "secret"),
    [
        ("AWS_SECRET_ACCESS_KEY=planted python train.py", True),
        ("AWS_ACCESS_KEY_ID='planted' python train.py", True),
        ("python train.py --password=planted", True),
        ("HF_TOKEN=planted python train.py", True),
        ("python train.py --tokenizer=planted --max-tokens=5", False),
        ("HF_TOKEN=$HF_TOKEN python train.py --password=${P}", False),
        ("python train.py --password={{ ds }}", False),
    ],
)
def test_a_secret_that_a_command_sets_is_warned_of_and_not_shown(words: str, secret: bool) -> None:
    text = (VALID / "folders.yml").read_text("utf-8")
    text = re.sub(r"command: .*", f'command: "{words}"', text)
    manifest = load_manifest_text(text, "m.yml")
    warned = [issue.field for issue in manifest.warnings if "may hold a secret" in issue.message]
    assert warned == (["model_definition.execution.command"] if secret else [])
    shown = redacted_text(text)
    assert ("planted" not in shown) if secret else (shown == text)
    assert load_manifest_text(shown, "m.yml").dag_id == manifest.dag_id


@pytest.mark.parametrize(
    ("arguments", "good"),
    [
        ("{url: 'https://hooks.example.com/a:b@c'}", True),
        ("{url: 'https://me:planted@hooks.example.com'}", False),
        ("{to: [a@b.c, 'amqp://:planted@host']}", False),
        ("{pwd: planted}", False),
    ],
)
def test_a_notification_holds_no_password(arguments: str, good: bool) -> None:
    text = (VALID / "folders.yml").read_text("utf-8")
    text += f"\nnotifications: {{on_failure: [{{arguments: {arguments}}}]}}\n"
    try:
        load_manifest_text(text, "m.yml")
        said = ""
    except ManifestInvalid as error:
        said = str(error)
    assert ("may hold a secret" in said) is not good and "planted" not in said


@pytest.mark.parametrize(
    ("parameters", "command", "said"),
    [
        ("{token: {secret: true}}", "python train.py", []),
        ("{token: {secret: true, conn_id: hub}}", "python train.py", []),
        ("{token: {secret: false, default: 1}}", "python train.py", []),
        ("{token: {secret: true, default: planted}}", "python train.py", ["token.default"]),
        ("{token: {secret: true, choices: [planted]}}", "python train.py", ["token.choices"]),
        ("{rate: {conn_id: hub, default: 1}}", "python train.py", ["rate.conn_id"]),
        ("{rate: {description: x}}", "python train.py", ["rate.default"]),
        (
            "{token: {secret: true}}",
            "python train.py {{ params.token }}",
            ["model_definition.execution.command"],
        ),
    ],
)
def test_a_secret_parameter_is_a_connections_and_in_no_command(
    parameters: str, command: str, said: list[str]
) -> None:
    text = (VALID / "folders.yml").read_text("utf-8") + f"\nparameters: {parameters}\n"
    text = re.sub(r"command: .*", f'command: "{command}"', text)
    try:
        load_manifest_text(text, "m.yml")
        found = []
    except ManifestInvalid as error:
        assert "planted" not in str(error)
        found = [issue.field.removeprefix("parameters.") for issue in error.issues]
    assert found == said


@pytest.mark.parametrize(
    ("name", "default", "warned"),
    [
        ("hub_token", "x", True),
        ("api_key", "x", True),
        ("tokenizer", "x", False),
        ("token", 5, False),
        ("optimizer", "adam", False),
    ],
)
def test_a_parameter_that_is_named_like_a_secret_is_warned_of(
    name: str, default: object, warned: bool
) -> None:
    text = (VALID / "folders.yml").read_text("utf-8") + f"\nparameters: {{{name}: {default}}}\n"
    warnings = load_manifest_text(text, "m.yml").warnings
    found = [one for one in warnings if one.field == f"parameters.{name}"]
    assert bool(found) is warned and all("secret: true" in one.fix for one in found)


@pytest.mark.parametrize(
    ("written", "truth"),
    [
        *[("on", "true"), ("Yes", "true"), ("off", "false"), ("{default: NO}", "false")],
        *[("'on'", None), ("true", None), ("one", None), ("{default: no, choices: [no]}", None)],
    ],
)
def test_what_older_yaml_takes_for_true_or_false_is_said_to_be_text(
    written: str, truth: str | None
) -> None:
    text = (VALID / "folders.yml").read_text("utf-8") + f"\nparameters: {{augment: {written}}}\n"
    manifest = load_manifest_text(text, "m.yml")
    assert isinstance(manifest.parameters["augment"].default, bool) is (written == "true")
    found = [one for one in manifest.warnings if one.field.startswith("parameters.augment")]
    assert [one.fix.split()[1].rstrip(",;") for one in found] == ([truth] if truth else [])


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("|", "ends in |"),
        ("||", "ends in ||"),
        ("&&", "ends in &&"),
        ("|&", "ends in |&"),
        ("| # tee log", "ends in |"),
        ("'", "has a ' that never closes"),
        (">| log", None),
    ],
)
def test_the_command_of_the_evaluation_ends_as_that_of_the_training_may(
    end: str, said: str | None
) -> None:
    text = (VALID / "folders.yml").read_text("utf-8")
    text += f'\nevaluation: {{metric: a, minimum: 1, command: "python e.py {end}"}}\n'
    if said is None:
        assert load_manifest_text(text, "m.yml").evaluation
        return
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(text, "m.yml")
    (issue,) = caught.value.issues
    assert (issue.field, issue.message) == ("evaluation.command", said)
    assert issue.line == len(text.splitlines()) and issue.fix.startswith("Close or complete it")


@pytest.mark.parametrize(
    "given",
    [
        "18446744073709551616",
        "18446744073709551617",
        "100000000000000000000",
        "-9223372036854775809",
        "{default: 1, maximum: 18446744073709551617}",
        "{default: 1, choices: [1, 18446744073709551617]}",
    ],
)
def test_a_whole_number_that_no_run_could_be_given_is_refused(given: str) -> None:
    text = (VALID / "folders.yml").read_text("utf-8") + f"\nparameters: {{seed: {given}}}\n"
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(text, "m.yml")
    (issue,) = caught.value.issues
    assert issue.field.startswith("parameters.seed.") and "in quotes, as text" in issue.fix
    good = text.replace("18446744073709551617", "18446744073709551615")
    if good != text:
        load_manifest_text(good, "m.yml")


@pytest.mark.parametrize(
    ("seed", "warned"),
    [
        ("9007199254740991", False),
        ("9007199254740993", True),
        ("-9007199254740993", True),
        ("'12345678901234567890'", False),
        ("1e300", False),
        ("{default: 1, choices: [1, 9007199254740993]}", True),
    ],
)
def test_a_whole_number_that_a_browser_rounds_is_warned_of(seed: str, warned: bool) -> None:
    text = (VALID / "folders.yml").read_text("utf-8") + f"\nparameters: {{seed: {seed}}}\n"
    warnings = load_manifest_text(text, "m.yml").warnings
    assert ("parameters.seed" in [one.field for one in warnings]) is warned


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ("retries: {delay: 24h}", []),
        ("retries: {delay: 25h}", ["retries.delay"]),
        ("retries: {delay: 2d, backoff: fixed}", []),
        ("steps: {train: {delay: 25h}, transform: {delay: 1h}}", ["steps.train.delay"]),
        ("retries: {backoff: fixed}\nsteps: {train: {delay: 25h}}", []),
    ],
)
def test_a_pause_that_airflow_cuts_short_is_warned_of(given: str, warned: list[str]) -> None:
    text = (VALID / "folders.yml").read_text("utf-8") + f"\n{given}\n"
    found = [one for one in load_manifest_text(text, "m.yml").warnings if "24 h" in one.message]
    assert [one.field for one in found] == warned
    assert all("backoff: fixed" in one.fix for one in found)


def test_what_no_parameter_says_of_secrets_is_not_in_the_digest() -> None:
    text = (VALID / "folders.yml").read_text("utf-8")
    digests = {
        load_manifest_text(f"{text}\nparameters: {{a: {given}}}\n", "m.yml").digest
        for given in ("1", "{default: 1}", "{default: 1, secret: false}")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("schedule", "experiment", "warned"),
    [
        ("{on_data_change: true}", "{name: wide, when_busy: skip}", True),
        ("{on_data_change: true}", "{name: wide, when_busy: wait}", False),
        ("{on_data_change: true}", "wide", False),
        ("'@daily'", "{name: wide, when_busy: skip}", False),
    ],
)
def test_a_change_of_data_that_would_be_skipped_is_warned_of(
    schedule: str, experiment: str, warned: bool
) -> None:
    text = (VALID / "conn_id.yml").read_text(encoding="utf-8")
    assert (weekly := 'schedule: "@weekly"') in text
    text = text.replace(weekly, f"schedule: {schedule}\nexperiment: {experiment}")
    warnings = load_manifest_text(text, "m.yml").warnings
    found = [issue.field for issue in warnings if issue.field.startswith("experiment")]
    assert found == (["experiment.when_busy"] if warned else [])


def _with_command(command: str) -> str:
    text = (VALID / "folders.yml").read_text("utf-8")
    return re.sub(r"command: .*", lambda _: f"command: {json.dumps(command)}", text, count=1)


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("A=1; python train.py", "export A=1 && python train.py"),
        ("A='x y' B=; python train.py", "export A='x y' B= && python train.py"),
        ("export X=1; python train.py", "export X=1 && python train.py"),
        ("cd src\npython train.py", "cd src && python train.py"),
        ("set -e; python train.py", "set -e && python train.py"),
        (". venv/bin/activate; python train.py", ". venv/bin/activate && python train.py"),
        ("cd src || exit 1; python train.py", "cd src || exit 1 && python train.py"),
        ("python train.py; cd out; python export.py", "cd out && python export.py"),
        ("A=1", "python train.py"),
        ("A=1 && B=2; python train.py", "NAME=value python train.py"),
        ("cd src && export A=1", "NAME=value python train.py"),
        ("python train.py; cd out", "NAME=value python train.py"),
        ("declare -x A=1; python train.py", "declare -x A=1 && python train.py"),
        ("python train.py; A=1", "python train.py"),
        *(
            (command, "a script")
            for command in (
                "(python a.py; python b.py)",
                "A=$(date; true) python a.py",
                "{ python a.py; python b.py; }",
                "for i in 1 2; do python a.py; done",
                "for i in 1 2\ndo\n  python a.py\ndone",
                "if test -d a; then python a.py; fi",
                "python a.py; while true; do sleep 1; done",
                "test -d a && { python a.py; python b.py; }",
                "case $A in x) python a.py ;; esac",
                "python - <<'EOF'\nprint(1)\nEOF",
            )
        ),
    ],
)
def test_a_command_that_only_the_next_one_would_complete_is_refused(command: str, fix: str) -> None:
    """Each runs in a shell of its own: the first one alone was the training, and did nothing."""
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(_with_command(command), "m.yml")
    (issue,) = caught.value.issues
    assert issue.field == "model_definition.execution.command"
    assert fix in issue.fix


@pytest.mark.parametrize(
    ("command", "joined"),
    [
        ("pip install x; python train.py", "pip install x && python train.py"),
        (
            "pip3 install keras; python3 -m pip install a; python3 train.py; python3 export.py",
            "pip3 install keras && python3 -m pip install a && python3 train.py",
        ),
        ("unzip a.zip\n./train.sh", "unzip a.zip && ./train.sh"),
        ("cd src && mkdir -p out; bash run.sh", "cd src && mkdir -p out && bash run.sh"),
        ("sudo apt-get install a; python a.py", "sudo apt-get install a && python a.py"),
        ("A=1 /usr/bin/env | sort; python a.py", "A=1 /usr/bin/env | sort && python a.py"),
        ('echo "a; b"; nvidia-smi; time python a.py', 'echo "a; b" && nvidia-smi && time python'),
        ("conda install a; chmod +x a; ./a", "conda install a && chmod +x a && ./a"),
        ("python --version; python train.py", "python --version && python train.py"),
    ],
)
def test_what_trains_is_the_first_command(command: str, joined: str) -> None:
    """Else `pip` would be the training, and the script run once, on Airflow's worker, after it."""
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(_with_command(command), "m.yml")
    (issue,) = caught.value.issues
    assert issue.field == "model_definition.execution.command"
    assert "would be the training" in issue.message
    assert f"Join them with &&: {joined}" in issue.fix


@pytest.mark.parametrize(
    ("command", "warned"),
    [
        ("pip install x && python train.py", True),
        ("pip3.11 -q install x && python train.py", True),
        ("python train.py; python -m pip install x && python export.py", True),
        ("python train.py --install pip", False),
        ("python pip.py install x", False),
    ],
)
def test_what_installs_packages_is_warned_of(command: str, warned: bool) -> None:
    """The Python is the site's, and others' trainings run in it."""
    found = load_manifest_text(_with_command(command), "m.yml").warnings
    assert any("installs packages at each start" in issue.message for issue in found) == warned


def test_a_refused_command_shows_no_secret() -> None:
    with pytest.raises(ManifestInvalid) as caught:
        load_manifest_text(_with_command("HF_TOKEN=planted; python train.py"), "m.yml")
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        "python train.py; python export.py",
        "A=1 python train.py; B=2 python export.py",
        "cd src && python train.py; cd src && python export.py",
        "export A=1 && python train.py | tee log; python export.py",
        "pip install x && python train.py; python export.py",
        "env A=1 nice python train.py; python export.py",
        "conda run python train.py; mkdir out; python export.py",
        "unzip a.zip | ./train; python export.py",
        "python -m train; echo done",
        "mkdir out; echo done",
        "(cd src && python train.py); python export.py",
        "if (test -d a) then (python a.py) fi; python b.py",
        "bash -c 'set -e; for i in 1 2; do python a.py; done'; python b.py",
        "python train.py --re '(' --to \\) --n $((1 << 2)) \"{\"; python export.py",
        "python train.py {# see (1 #} {% if params.nodes %}--x{% endif %}; python export.py",
        "time python train.py; ! test -e a && python export.py",
        "python train.py <<< word; python export.py",
        "A=1 $PROGRAM; python export.py",
        "python train.py ${A%)} $[1<<N]; python export.py",
        "cd src && . train.sh",
    ],
)
def test_a_command_that_is_complete_by_itself_is_good(command: str) -> None:
    assert load_manifest_text(_with_command(command), "m.yml")


def test_an_evaluation_is_one_command_for_one_shell() -> None:
    text = (VALID / "folders.yml").read_text("utf-8")
    text += '\nevaluation: {metric: a, minimum: 1, command: "cd src; A=1; python e.py $A"}\n'
    assert load_manifest_text(text, "m.yml").evaluation


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("epochs", None),
        ("nodes", None),
        ("epohcs", "{{ params.epohcs }} is not among the parameters. Did you mean epochs?"),
        ("token", "{{ params.token }} is secret, and a command is in the process list"),
    ],
)
def test_the_command_of_the_evaluation_names_parameters_that_there_are(
    name: str, said: str | None
) -> None:
    text = (VALID / "folders.yml").read_text("utf-8")
    text += "\nparameters: {epochs: 3, token: {secret: true}}\n"
    text += (
        f'evaluation: {{metric: a, minimum: 1, command: "python e.py {{{{ params.{name} }}}}"}}\n'
    )
    if said is None:
        assert load_manifest_text(text, "m.yml").evaluation
        return
    with pytest.raises(ManifestInvalid, match=re.escape(f"evaluation.command: {said}")) as caught:
        load_manifest_text(text, "m.yml")
    assert [issue.field for issue in caught.value.issues] == ["evaluation.command"]


@pytest.mark.parametrize(
    ("command", "transform", "warned"),
    [
        ("python a.py; python b.py", "{checkpoint: latest}", ["checkpoint"]),
        (
            *("python a.py; python b.py", '{inputs: {x: "x:0"}, outputs: {y: "y:0"}}'),
            ["inputs", "outputs"],
        ),
        ("python a.py; python b.py", "{sample: sample.npy}", []),
        ("python a.py", '{checkpoint: 3, inputs: {x: "x:0"}, outputs: {y: "y:0"}}', []),
        ("bash -c 'python a.py; python b.py'", "{checkpoint: 3}", []),
    ],
)
def test_what_only_the_built_in_transform_reads_is_warned_of_beside_another(
    command: str, transform: str, warned: list[str]
) -> None:
    manifest = load_manifest_text(_with_command(command) + f"\ntransform: {transform}\n", "m.yml")
    said = [one for one in manifest.warnings if one.field.startswith("transform")]
    assert [issue.field for issue in said] == [f"transform.{name}" for name in warned]
    for issue in said:
        assert "the command after ; takes its place" in issue.message
        assert issue.fix == "Delete it, or that command."
