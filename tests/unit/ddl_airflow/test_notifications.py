from __future__ import annotations

import html
import json
import re
from types import SimpleNamespace
from uuid import uuid4

import pytest
import structlog
from airflow.api_fastapi.execution_api.datamodels.taskinstance import TaskInstance
from airflow.callbacks.callback_requests import TaskCallbackRequest
from airflow.dag_processing.processor import _execute_task_callbacks
from airflow.providers.smtp.notifications.smtp import SmtpNotifier
from airflow.sdk.log import mask_secret
from airflow.serialization.serialized_objects import DagSerialization

from ddl_airflow.core.errors import ManifestInvalid
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.manifest.sections.notifications import SMTP_NOTIFIER
from ddl_airflow.dag import BrokenManifest, ManifestProblem, dags_from
from ddl_airflow.manifest_dag import dag_from
from ddl_airflow.notifications import say_error

HTTP_NOTIFIER = "airflow.providers.http.notifications.HttpNotifier"


def dag_of(tmp_path, write_manifest, more):
    path = write_manifest(tmp_path, more=more)
    return dag_from(load_manifest(path), path)


def test_each_event_is_said_by_the_task_that_knows_it(tmp_path, write_manifest):
    dag = dag_of(
        tmp_path,
        write_manifest,
        "approval: {required: true}\n"
        "notifications: {on_failure: [a@b.c], on_success: [d@e.f], on_approval: [g@h.i]}\n",
    )
    for task in dag.tasks:
        first, mail = task.on_failure_callback
        assert first is say_error
        assert (mail.to, mail.subject) == ("a@b.c", "{{ dag.dag_id }}: {{ ti.task_id }} failed")
        succeeded = [mail.to for mail in task.on_success_callback]
        assert succeeded == (["d@e.f"] if task.task_id == "upload_results" else [])
    assert [mail.to for mail in dag.get_task("approve").notifiers] == ["g@h.i"]
    DagSerialization.to_dict(dag)


def test_nobody_is_told_unless_asked(tmp_path, write_manifest):
    for task in dag_of(tmp_path, write_manifest, "").tasks:
        assert not task.on_failure_callback and not task.on_success_callback


def test_a_notifier_gets_its_arguments(tmp_path, write_manifest):
    arguments = "{to: [a@b.c, d@e.f], smtp_conn_id: mail, subject: '{{ ti.task_id }}'}"
    dag = dag_of(
        tmp_path,
        write_manifest,
        f"notifications: {{on_failure: [{{notifier: {SMTP_NOTIFIER}, arguments: {arguments}}}]}}\n",
    )
    _, mail = dag.get_task("train").on_failure_callback
    assert (mail.to, mail.smtp_conn_id) == (["a@b.c", "d@e.f"], "mail")
    assert mail.subject == "{{ ti.task_id }}" and "run {{ run_id" in mail.html_content


@pytest.mark.parametrize(
    ("entry", "field", "said"),
    [
        (SMTP_NOTIFIER + "s", ".notifier", f"Did you mean {SMTP_NOTIFIER}?"),
        ("os.system", ".notifier", "no provider of this Airflow has the notifier os.system"),
        (SMTP_NOTIFIER, "", "missing 1 required positional argument: 'to'"),
        ("{arguments: {to: a@b.c, too: 1}}", "", "unexpected keyword argument 'too'"),
        # A notifier opens these as Airflow, and sends them to whom the manifest names.
        *(
            (f"{{arguments: {{to: a@b.c, {name}: {value}}}}}", f".arguments.{name}", "names a file")
            for name, value in (
                ("files", "[/proc/self/environ]"),
                ("template", "/opt/airflow/airflow.cfg"),
                ("attach", "/opt/airflow/airflow.cfg"),
            )
        ),
    ],
)
def test_what_is_no_notifier_is_an_error_of_the_manifest(
    tmp_path, write_manifest, entry, field, said
):
    path = write_manifest(tmp_path, more=f"notifications:\n  on_success:\n    - {entry}\n")
    (dag,) = dags_from(tmp_path).values()
    assert isinstance(dag, BrokenManifest)
    with pytest.raises(ManifestProblem) as problem:
        DagSerialization.to_dict(dag)
    line = path.read_text().count("\n")
    assert f"manifest.yml:{line}: notifications.on_success[0]{field}: " in str(problem.value)
    assert said in str(problem.value)


@pytest.mark.parametrize(
    ("arguments", "right", "said"),
    [
        ("", "team_*", "'http_default' is not a connection for this manifest"),
        ("http_conn_id: other", "team_*", "'other' is not a connection for this manifest"),
        ("http_conn_id: team_hook", "team_*", ""),
        ("", "http_default", ""),
    ],
)
def test_a_connection_that_a_notifier_takes_by_itself_is_one_that_the_manifest_names(
    tmp_path, write_manifest, monkeypatch, arguments, right, said
):
    rights = {"rights": {str(tmp_path): {"connections": [right]}}}
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps(rights))
    http = f"notifier: {HTTP_NOTIFIER}, arguments: {{{arguments}}}"
    more = f"notifications:\n  on_success:\n    - {{{http}}}\n    - a@b.c\n"
    if not said:
        assert dag_of(tmp_path, write_manifest, more).get_task("upload_results")
        return
    with pytest.raises(ManifestInvalid, match=said) as caught:
        dag_of(tmp_path, write_manifest, more)
    (issue,) = caught.value.issues  # none of the mail's smtp_default
    assert issue.field == "notifications.on_success[0].arguments.http_conn_id"
    assert issue.line


def test_the_error_is_said_without_secrets():
    # With no secret of another test in it: of these Airflow would mask whichever is first.
    mask_secret("h7Qv2MxLw9")
    context = {"exception": ValueError("rank 3 printed h7Qv2MxLw9")}
    say_error(context)
    assert context["error"] == "rank 3 printed ***"


def test_the_mail_of_a_task_whose_worker_was_lost_says_so(tmp_path, write_manifest, monkeypatch):
    """Airflow's DAG processor sends it, in the task's place, and knows no error."""
    dag = dag_of(tmp_path, write_manifest, "notifications: {on_failure: [a@b.c]}\n")
    sent = []
    monkeypatch.setattr(SmtpNotifier, "notify", lambda mail, context: sent.append(vars(mail)))
    bag = SimpleNamespace(dags={"small": dag})
    for run_id in ("first", "second"):  # with its host several runs may be lost
        task = {"id": uuid4(), "dag_version_id": uuid4(), "dag_id": "small", "task_id": "train"}
        request = TaskCallbackRequest(
            filepath="manifest.yml.py",
            bundle_name="trainings",
            bundle_version=None,
            msg="killed",
            ti=TaskInstance(**task, run_id=run_id, try_number=1, map_index=-1),
            task_callback_type="failed",
        )
        _execute_task_callbacks(bag, request, structlog.get_logger())
    for mail, run_id in zip(sent, ("first", "second"), strict=True):
        assert f">run {run_id}</a>" in mail["html_content"]
        assert mail["subject"] == "small: train failed"
        assert "its worker was killed, as for want of memory, or lost" in mail["html_content"]


@pytest.mark.parametrize("argument", ["subject", "html_content"])
def test_a_mail_that_cannot_be_filled_in_says_so_in_the_one_of_ours(
    tmp_path, workspace, write_manifest, run_task, monkeypatch, argument
):
    """As one with a date, of a run that changed data have started: nobody would hear of it."""
    text = "training of {{ ds }} <failed>"
    more = f"{{to: '{{{{ run_id }}}}@example.com', {argument}: '{text}'}}"
    dag = dag_of(
        tmp_path, write_manifest, f"notifications: {{on_failure: [{{arguments: {more}}}]}}\n"
    )
    sent = []
    monkeypatch.setattr(SmtpNotifier, "notify", lambda mail, context: sent.append(vars(mail)))
    assert run_task(dag.get_task("stage_data"), told=True).state == "failed"
    (mail,) = sent
    assert mail["to"].endswith("@example.com") and "{{" not in mail["to"]
    assert mail["subject"] == "small: stage_data failed"
    said = html.unescape(mail["html_content"])
    assert "/dags/small/runs/" in said
    assert f"notifications.on_failure[0].arguments.{argument}: {text!r} cannot be filled in" in said
    assert "'ds' is undefined" in said and "{{ dag_run.run_after | ds }}" in said
    assert "<failed>" not in mail["html_content"]


def test_a_mail_that_can_be_filled_in_is_sent_as_it_is(
    tmp_path, workspace, write_manifest, run_task, monkeypatch
):
    more = "{arguments: {to: a@b.c, subject: '{{ dag_run.run_after | ds }}', html_content: It is.}}"
    dag = dag_of(tmp_path, write_manifest, f"notifications: {{on_failure: [{more}]}}\n")
    sent = []
    monkeypatch.setattr(SmtpNotifier, "notify", lambda mail, context: sent.append(vars(mail)))
    run_task(dag.get_task("stage_data"), told=True)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", sent[0]["subject"])
    assert sent[0]["html_content"] == "It is."


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("{arguments: {to: b@b.c, html_content: Ask.}}", "ConnectionRefusedError: it is away"),
        (
            f"{{notifier: {HTTP_NOTIFIER}, arguments: {{data: '{{{{ ds }}}}'}}}}",
            "'ds' is undefined",
        ),
    ],
)
def test_a_run_waits_for_approval_whoever_cannot_be_told(
    tmp_path, workspace, write_manifest, run_task, monkeypatch, capsys, entry, why
):
    after = "{arguments: {to: a@b.c, html_content: Ask.}}"
    more = f"approval: {{required: true}}\nnotifications: {{on_approval: [{entry}, {after}]}}\n"
    task = dag_of(tmp_path, write_manifest, more).get_task("approve")
    task.body = ""
    told = []

    def notify(mail, context):
        if mail.to != "a@b.c":
            raise ConnectionRefusedError("it is away")
        told.append(mail.to)

    monkeypatch.setattr(SmtpNotifier, "notify", notify)
    ended = run_task(task)
    assert ended.state == "awaiting_input", ended.error
    assert told == ["a@b.c"]
    logged = capsys.readouterr().out
    assert "this notification was not sent" in logged and "Traceback" in logged and why in logged
