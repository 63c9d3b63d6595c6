"""What is looked for in a text before a slow search finds all that the search would find."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddl_airflow.core.manifest import values
from ddl_airflow.core.manifest.document import Plain, read_document

_PIECES = st.sampled_from(
    [
        *("secret", "TOKEN", "password", "Passwd", "pwd", "credential", "credentials", "key"),
        *("api", "access", "_", "-", "id", "Id", "=", "==", "'", '"', "$", "{", " ", "\n", ";"),
        *("x", "abc/DEF", "\u212aey", "\u017fecret", "\u0130d", "ı", "é"),
    ]
)


@given(st.lists(_PIECES, max_size=12).map("".join))
@example("\u017fecret=x")
@example("api\u212aey=x")
@example("credent\u0130als=x")
@example("api-key-ID=x")
def test_the_first_test_lets_no_written_secret_pass(text):
    written = values._WRITTEN_SECRET
    assert values.has_written_secret(text) is (written.search(text) is not None)
    assert values.without_written_secrets(text) == written.sub(r"\1***", text)


@pytest.mark.parametrize("name", ["token", "API_KEY", "secret-key_id", "credentials", "PwdId"])
@pytest.mark.parametrize("before", ["", "python train.py --seed=3 --", "export X=1; "])
def test_a_written_secret_is_found(name, before):
    text = f"{before}{name}=abc7 --epochs=3"
    assert values.has_written_secret(text)
    assert values.without_written_secrets(text) == text.replace("abc7", "***")


def test_most_texts_are_not_searched(monkeypatch):
    monkeypatch.setattr(values, "_WRITTEN_SECRET", None)
    text = "command: python train.py --seed=3 --monkey 4\nregex: 'loss= ([0-9.]+)'\nkey: =\n"
    assert not values.has_written_secret(text)
    assert values.without_written_secrets(text) is text


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *[("True", True), ("TRUE", True), ("False", False), ("FALSE", False), ("tRue", "tRue")],
        *[(".5", 0.5), ("-.5", -0.5), ("+.5e3", 500.0), (".", "."), (".e3", ".e3")],
        ("12345678901234567890", 12345678901234567890),
        ("-9223372036854775807", -9223372036854775807),
        ("18446744073709551615", 18446744073709551615),
        ("1e20", 1e20),
    ],
)
def test_what_an_unquoted_value_of_open_type_is(written, read):
    value = values._value(Plain(written))
    assert (value, type(value)) == (read, type(read))
    assert values._value(written) == written


@pytest.mark.parametrize(
    "written", ["18446744073709551616", "-9223372036854775809", "+100000000000000000000"]
)
def test_a_whole_number_of_more_than_64_bits_becomes_no_other(written):
    with pytest.raises(ValueError, match="whole number of more than 64 bits"):
        values._value(Plain(written))
    assert values._value(written) == written
    # A bound of an evaluation is a fraction in any case.
    assert values.number(Plain(written)) == float(written)


@pytest.mark.parametrize("written", [".inf", "-.INF", "+.Inf", ".nan", ".NaN"])
def test_what_yaml_writes_for_no_number_is_no_text_by_itself(written):
    """A script that is given it as text reads no number: float(".inf") is an error."""
    with pytest.raises(values.Unusable, match=f"is {re.escape(written)}, which no run can be"):
        values._value(Plain(written))
    assert values._value(written) == written
    assert values._value(Plain("inf")) == "inf"


@pytest.mark.parametrize("text", ["\t", " ", ", ", " lead", "true ", "a\n", ""])
def test_text_in_quotes_stays_as_it_is(text):
    fields = read_document(f"a: {json.dumps(text)}\nb: &b [x, {json.dumps(text)}]", "m.yml").value
    assert values._value(fields["a"]) == text
    assert values._argument(fields["b"]) == ("x", text)


@pytest.mark.parametrize("style", ["|", ">", "|+", "|-", "!!str |"])
@pytest.mark.parametrize("more", ["", "\nb: *a"])
def test_a_block_ends_in_no_newline(style, more):
    text = f"a: {'&a ' if more else ''}{style}\n  --epochs 3\n{more}"
    assert values._value(read_document(text, "m.yml").value["a"]) == "--epochs 3"
