"""A text is read in one go where that is enough, and says the same as its tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddl_airflow.core.errors import ManifestSyntaxError
from ddl_airflow.core.manifest import document
from ddl_airflow.core.manifest.document import MAX_DEPTH, MAX_VALUES, read_document

FIXTURES = Path(__file__).parents[4] / "fixtures" / "manifests"
TEXTS = {
    f"{path.parent.name}/{path.name}": path.read_bytes().decode("utf-8", "replace")
    for folder in ("valid", "invalid")
    for path in sorted((FIXTURES / folder).glob("*.yml"))
}


def in_full(value: Any) -> Any:
    """A value with the types in it: Plain text equals text."""
    if isinstance(value, dict):
        return [(type(name), name, in_full(item)) for name, item in value.items()]
    if isinstance(value, list):
        return [in_full(item) for item in value]
    return type(value), value


def told(text: str) -> Any:
    """All that is read of a text, or what is said of it."""
    try:
        read = read_document(text, "m.yml")
    except ManifestSyntaxError as error:
        return str(error)
    return in_full(read.value), list(read.lines.items()), read.issues


def told_by_the_tree(text: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "_read_plainly", lambda text: None)
        return told(text)


@pytest.mark.parametrize("name", TEXTS)
def test_manifests_are_read_alike(name):
    assert told(TEXTS[name]) == told_by_the_tree(TEXTS[name])


@pytest.mark.parametrize("name", [name for name in TEXTS if name.startswith("valid/")])
def test_each_line_that_is_lost_is_read_alike(name):
    lines = TEXTS[name].splitlines(keepends=True)
    for i in range(len(lines)):
        for text in ("".join(lines[:i] + lines[i + 1 :]), "".join(lines[: i + 1])):
            assert told(text) == told_by_the_tree(text)


_SCALARS = ["a", "b.c", "0123", "2.10", "~", "''", '"x"', "null", "'~'", "é", "a[0]", "!!str 1"]
_MARKS = [
    *("- ", "  ", "\n", ": ", ":\n", ":\n  ", ", ", "[", "]", "{", "}", "---\n", "...\n", "? "),
    *("&x ", "*x", "<<: *x\n", "!t ", "!!int ", "! ", "|\n", ">-\n", "# c\n", "\t", "%YAML 1.1\n"),
]


@given(st.lists(st.sampled_from([*_SCALARS, *_MARKS]), max_size=25).map("".join))
@example("a: 1\na: 2\n")
@example("a: {b: 1}\na.b: 2\n")
@example("a.b: 2\na: {b: 1}\n")
@example("~: 1\n'': 2\n")
@example("x: &x {a: 1}\ny: *x\n")
@example("x: &x {a: 1}\n<<: *x\n")
@example("[a]: 1\n")
@example("? a\n? b\n")
@example("a: 1\n---\nb: 2\n")
@example("--- a\n...\n")
@example("'a' : !!int 1\n")
@example("")
@example("# c\n")
def test_any_text_is_read_alike(text):
    assert told(text) == told_by_the_tree(text)


@pytest.mark.parametrize("levels", range(MAX_DEPTH - 2, MAX_DEPTH + 2))
@pytest.mark.parametrize("shape", ["[{}]", "{{a: {}}}"])
def test_limits_of_depth_are_the_same(shape, levels):
    text = "x"
    for _ in range(levels):
        text = shape.format(text)
    assert told(text) == told_by_the_tree(text)


@pytest.mark.parametrize("count", range(MAX_VALUES - 2, MAX_VALUES + 2))
def test_limits_of_values_are_the_same(count):
    for text in ("- a\n" * count, "".join(f"a{i}: b\n" for i in range(count))):
        assert told(text) == told_by_the_tree(text)


def test_what_people_write_needs_no_tree(monkeypatch):
    monkeypatch.setattr(document, "_compose", None)
    for name in ("valid/conn_id.yml", "valid/full.yml", "valid/ffdl_conn_id.yml"):
        if "&" not in TEXTS[name]:
            assert isinstance(read_document(TEXTS[name], name).value, dict)
    assert "&" not in TEXTS["valid/conn_id.yml"]
