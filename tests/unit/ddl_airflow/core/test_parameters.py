from __future__ import annotations

import math
import shlex
import subprocess

import pytest

from ddl_airflow.core.errors import SettingInvalid, SettingUnknown
from ddl_airflow.core.parameters import (
    check_settings,
    filled_in,
    parameter_environment,
    word_of,
)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (True, "true"),
        (3, "3"),
        (1e-05, "1e-05"),
        ("adam", "adam"),
        ("", "''"),
        ("a b; rm -rf $HOME", "'a b; rm -rf $HOME'"),
        ("it's", "'it'\"'\"'s'"),
        ("LD_PRELOAD=x", "'LD_PRELOAD=x'"),
        ("a,b", "'a,b'"),
        ("ß", "'ß'"),
    ],
)
def test_a_value_is_one_word_of_the_command(value, word):
    assert word_of(value) == word
    assert len(shlex.split(word)) == 1


@pytest.mark.parametrize("value", ["a\0b", "\ud800"])
def test_what_no_process_can_be_given_is_refused(value):
    with pytest.raises(SettingInvalid, match=r"setting of the run is '.*': it has .* U\+"):
        word_of(value)
    with pytest.raises(SettingInvalid, match=r"^note is '.*': it has .* Leave it out\.$"):
        parameter_environment({"note": value})


def test_a_value_is_as_long_as_linux_takes():
    most = parameter_environment({"note": "x" * 131_060})
    subprocess.run(["/bin/true"], env=most, check=True)
    with pytest.raises(SettingInvalid, match="note has 131,061 bytes"):
        parameter_environment({"note": "x" * 131_061})
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["/bin/true"], env={"PARAM_NOTE": "x" * 131_061}, check=True)


def test_a_template_that_gives_none_is_named():
    command = "python train.py{% for one in params.parts %} {{ one }}{% endfor %} {{ params.day }}"
    with pytest.raises(SettingInvalid) as caught:
        filled_in(command, {"parts": ["a"], "day": None})
    assert f"{command!r}: {{{{ params.day }}}} has no value in this run" in str(caught.value)
    with pytest.raises(SettingInvalid, match="a template of it has no value in this run"):
        filled_in(command, {"parts": [None], "day": 1})


def test_scripts_find_them_in_their_environment():
    parameters = {"learning_rate": 0.5, "augment": False, "note": "a b"}
    assert parameter_environment(parameters) == {
        "PARAM_LEARNING_RATE": "0.5",
        "PARAM_AUGMENT": "false",
        "PARAM_NOTE": "a b",
    }


def test_a_setting_that_no_form_has_is_named_with_the_nearest_one():
    check_settings({"epochs": 3}, ["epochs", "nodes"])
    check_settings({"whatever": math.nan}, None)
    with pytest.raises(SettingUnknown, match="'epoch' is not known. Did you mean epochs?"):
        check_settings({"nodes": 1, "epoch": 3}, ["epochs", "nodes"])
    with pytest.raises(SettingUnknown, match="There is: epochs, nodes."):
        check_settings({"xyz": 1}, ["nodes", "epochs"])
    with pytest.raises(SettingUnknown, match="'xyz' is not known. The manifest has no parameters."):
        check_settings({"xyz": 1}, [])
