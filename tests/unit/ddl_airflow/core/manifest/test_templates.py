from __future__ import annotations

import pytest

from ddl_airflow.core.manifest.templates import OF_A_NOTIFICATION, is_template, strange_names


@pytest.mark.parametrize(
    "text",
    [
        "python train.py --rate {{ params.rate }} --until {{ ds }}",
        "{% if dag_run.conf.fast %}--fast{% endif %}",
        "{% for part in params.parts %}{{ part }} {% endfor %}",
        "{{ macros.ds_add(ds, -7) }}",
    ],
)
def test_values_of_the_run_may_be_named(text):
    assert is_template(text)
    assert list(strange_names(text)) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{{ conn.mydb.password }}", "conn"),
        ("{{ var.value.key }}", "var"),
        ("{{ ti.get_template_context()['conn'] }}", "ti"),
        ("{% set c = conn %}{{ c.mydb.password }}", "conn"),
        ("{% if task %}x{% endif %}", "task"),
    ],
)
def test_what_leads_to_more_than_a_run_may_not(text, named):
    ((message, fix),) = strange_names(text)
    assert message == f"names {named!r} in a template"
    assert "params" in fix
    assert list(strange_names(text, OF_A_NOTIFICATION))


def test_a_notification_may_name_its_task_and_the_error():
    text = "{{ dag.dag_id }}: {{ ti.task_id }}, try {{ ti.try_number }}: {{ error }}"
    assert list(strange_names(text, OF_A_NOTIFICATION)) == []
    assert len(list(strange_names(text))) == 3
    ((message, _),) = strange_names("{{ ti.task_id }} {{ ti.log_url }}", OF_A_NOTIFICATION)
    assert "'ti'" in message


@pytest.mark.parametrize("text", ["echo ${#list}", "{{ params.x", "{% for %}"])
def test_what_jinja_cannot_read_is_said(text):
    assert is_template(text)
    ((message, _),) = strange_names(text)
    assert message.startswith("is not a template that Jinja reads")


@pytest.mark.parametrize(
    "text", ["{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}"]
)
def test_no_other_file_is_taken_in(text):
    ((message, _),) = strange_names(text)
    assert message == "takes in another template"


def test_a_command_without_marks_is_no_template():
    assert not is_template("python train.py --map '{a: 1}' && echo ${x}")
