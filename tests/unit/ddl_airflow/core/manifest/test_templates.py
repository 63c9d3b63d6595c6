from __future__ import annotations

import time

import pytest

from ddl_airflow.core.manifest.templates import (
    OF_A_NOTIFICATION,
    differs_by_run,
    is_template,
    strange_names,
)
from tests.limits import within


@pytest.mark.parametrize(
    "text",
    [
        "python train.py --rate {{ params.rate }} --until {{ ds }}",
        "{% if dag_run.conf.fast %}--fast{% endif %}",
        "{% for part in params.parts %}{{ part }} {% endfor %}",
        "{{ macros.ds_add(ds, -7) }} {{ logical_date.strftime('%Y') }} {{ ds | ds_nodash }}",
        "{{ dag_run['conf'].parts[0] }} {{ params.note | default('none') | upper }}",
        "{{ (macros.datetime.now() - macros.timedelta(days=1)).isoformat() }}",
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
        ("{% if conn %}{{ conn.mydb.password }}{% endif %}", "conn"),
        ("{% if task %}x{% endif %}", "task"),
    ],
)
def test_what_leads_to_more_than_a_run_may_not(text, named):
    ((message, fix),) = strange_names(text)
    assert message == f"names {named!r} in a template"
    assert "params" in fix
    assert list(strange_names(text, OF_A_NOTIFICATION))


@pytest.mark.parametrize(
    "text",
    [
        "{{ macros.uuid.os.environ['AIRFLOW_CONN_MYDB'] }}",
        "{{ macros.uuid.os.popen('id').read() }}",
        "{{ macros['uuid'].os }}",
        "{{ macros[params.x] }}",
        "{{ (macros if ds else macros).uuid }}",
        "{{ [macros][0].uuid }}",
        "{% for m in [macros] %}{{ m.uuid }}{% endfor %}",
        "{{ macros | attr('uuid') }}",
        "{{ [macros] | map(attribute='uuid') | list }}",
        "{{ macros.ds_add.__globals__ }}",
        "{{ params['__class__'] }}",
        "{{ dag_run.get_task_instances() }}",
        "{{ dag_run }}",
        "{{ params.update() }}",
        "{{ cycler.x }}",
        "{% for conn in [1] %}{% endfor %}{{ conn.mydb.password }}",
        "{% for x in [1] if conn.mydb %}{% endfor %}",
        "{{ ds | no_such_filter }}",
        "{{ self }}",
        "{% set x = ds %}{{ x }}",
        "{% macro f() %}{% endmacro %}",
        "{% filter upper %}x{% endfilter %}",
        "{{ 'x' * 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for a in ds %}{% for b in ds %}x{% endfor %}{% endfor %}",
    ],
)
def test_neither_modules_nor_what_leads_to_them_nor_endless_work(text):
    assert list(strange_names(text))
    assert list(strange_names(text, OF_A_NOTIFICATION))


@pytest.mark.parametrize(
    "text",
    [
        "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
        "{{ " + "not " * 2000 + "1 }}",
        "{{ " + "-" * 5000 + "1 }}",
        "{{ ds" + ".a" * 3000 + " }}",
        "{% if ds %}" * 300 + "{% endif %}" * 300,
        "{{ " + "1" * 5000 + " }}",
        "{{ ds }}" * 5000,
        "{{ '" + "x" * 300_000 + "' }}",
    ],
    ids=lambda text: text[:20],
)
def test_deep_or_long_templates_are_refused_soon(text):
    began = time.process_time()
    ((message, _),) = strange_names(text)
    assert any(word in message for word in ("deeply", "number", "at most 10000"))
    assert time.process_time() - began < within(2)


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


@pytest.mark.parametrize(
    ("command", "differs"),
    [
        ("python train.py", False),
        ("python train.py {{ params.epochs }} {{params['rate']}}", False),
        ("python train.py {{ params.epochs | int }} {{- params.rate -}}", False),
        ("python train.py {{ params.part or 'all' }} {{ params.epochs * 2 }}", False),
        ("python train.py {% if params.epochs %}-v{% endif %}{# as it was #}", False),
        ("python train.py {% for one in params.parts %}{{ one ~ loop.index }} {% endfor %}", False),
        ("python train.py --until {{ ds }}", True),
        ("python train.py {{ params.epochs ~ ds }}", True),
        ("python train.py {{ params.until | default(ds) }}", True),
        ("python train.py {% if params.epochs %}{{ run_id }}{% endif %}", True),
        ("python train.py {{ macros.datetime.now() }}", True),
        ("python train.py {{ dag_run.conf.get('day') or 'all' }}", True),
        ("python train.py {% for one in params.parts %}{{ ts }}{% endfor %}", True),
        ("python train.py {{ params.epochs", True),
    ],
)
def test_a_command_differs_by_run_if_it_uses_more_than_parameters(command, differs):
    assert differs_by_run(command) is differs
