"""Manifests that are made to take long: each is read, refused or masked within a second or two."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from ddl_airflow.core.errors import ManifestError
from ddl_airflow.core.manifest.load import load_manifest_text, redacted_text, without_keys

_GOOD = (Path(__file__).parents[4] / "fixtures/manifests/valid/full.yml").read_text("utf-8")
_COMMAND = "model_definition: {name: x, execution: {command: %s, compute_configuration: {name: a}}}"
_SIZE = 200_000
_LIMIT_S = 10.0  # of CPU; what it was before took minutes


@pytest.mark.parametrize(
    "text",
    [
        f"{_GOOD}\n{'#' * _SIZE}",
        f"{_GOOD}\n# {'access_key_id ' * (_SIZE // 14)}",
        f"{_GOOD}\n{'# access_key_id' * (_SIZE // 15)}",
        f"{_GOOD}\n# access_key_id{' ' * _SIZE}x",
        f"{_GOOD}\n" + "# access_key_id:\n" * (_SIZE // 17),
        "a: [" + "{access_key_id: x}, " * 2400 + "]",
        _COMMAND % ("'" + "{{ " * (_SIZE // 3) + "'"),
        _COMMAND % ("'python train.py " + "{{ params.x }} " * (_SIZE // 15) + "'"),
        _COMMAND % ("'" + "x" * _SIZE + "'"),
        _COMMAND % ('"' + "a;" * (_SIZE // 2) + '"'),
        _COMMAND % ('"{{ ' + "(" * 500 + "1" + ")" * 500 + ' }}"'),
        _COMMAND % ("'{{ params[" + " " * _SIZE + "'"),
        "model_definition: {name: " + "x" * _SIZE + "}",
        "training_data_reference: {type: s3, source: {prefix: " + "a/" * (_SIZE // 2) + "}}",
        "schedule: {cron: " + "'" + "* " * (_SIZE // 2) + "'}",
        "metrics: [{name: a, regex: '" + "(a+)+" * 90 + "(b)'}]",
        "retries: {delay: " + "1" * _SIZE + "s}",
    ],
    ids=lambda text: f"{text[-60:-40]!r}",
)
def test_long_texts_take_linear_time(text):
    began = time.process_time()
    with contextlib.suppress(ManifestError):
        load_manifest_text(text, "hostile.yml")
    read_s = time.process_time() - began
    with contextlib.suppress(ManifestError):
        redacted_text(text)
    assert (read_s < _LIMIT_S, time.process_time() - began - read_s < _LIMIT_S) == (True, True)


def nested(levels: int) -> str:
    """Lists in lists, in a line for each."""
    lines = [f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, levels)]
    return f"a0: &a0 [x]\n{''.join(lines)}access_key_id: *a{levels - 1}\n"


def test_aliases_are_nested_no_deeper_than_what_is_written_out():
    assert "access_key_id: *a17" in redacted_text(nested(18))
    for levels in (20, 1200):
        with pytest.raises(ManifestError, match=r"is nested more than 20 levels deep"):
            redacted_text(nested(levels))
        assert without_keys(nested(levels).encode()) == b""  # nobody else's bundle stops for it


@pytest.mark.parametrize(
    ("comment", "masked"),
    [
        ("# access_key_id: AKID", "# access_key_id: '***'"),
        ("  # secret_access_key = AKID # x", "  # secret_access_key = '***'"),
        ("#access_key_id:\n#   AKID", "#access_key_id:\n# '***'"),
        ("# access_key_id:\n\n  #AKID", "# access_key_id:\n\n  # '***'"),
        ('# "password" : AKID', "# \"password\" : '***'"),
        ("# aws_secret_access_key: AKID", "# aws_secret_access_key: '***'"),
        ("# AWS_SECRET_ACCESS_KEY : AKID", "# AWS_SECRET_ACCESS_KEY : '***'"),
        ("# {secretAccessKey: AKID}", "# {secretAccessKey: '***'"),
        ("#  aws_session_token:\n#    AKID", "#  aws_session_token:\n# '***'"),
        ("#   integration_key: AKID", "#   integration_key: '***'"),
        ("# my-api-key: AKID", "# my-api-key: '***'"),
        ("# api_key_of: AKID", "# api_key_of: AKID"),
        ("# username: of whom to ask", "# username: of whom to ask"),
        ("# the access_key_id is elsewhere", "# the access_key_id is elsewhere"),
        ("# access_key_id:\nmetrics: []", "# access_key_id:\nmetrics: []"),
    ],
)
def test_keys_in_comments_are_masked(comment, masked):
    assert redacted_text(f"a: 1\n{comment}\n") == f"a: 1\n{masked}\n"
