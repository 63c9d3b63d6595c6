"""Bad manifests that nobody would write: always listed errors, soon, and in little memory.

A few hundred here; ``make fuzz`` makes 10,000, and DDL_SEED makes others. Most are made from a good
manifest of either dialect, so that they go as deep as they can before they are refused.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from ddl_airflow.core.errors import ManifestError
from ddl_airflow.core.manifest.folder import may_have_dag_id
from ddl_airflow.core.manifest.load import load_manifest_text, redacted_text
from ddl_airflow.core.manifest.sections.definition import slug
from ddl_airflow.core.plan import plan

VALID = Path(__file__).parents[4] / "fixtures" / "manifests" / "valid"
GOOD = {path.stem: path.read_text("utf-8") for path in sorted(VALID.glob("*.yml"))}
COUNT = int(os.environ.get("DDL_GENERATED", "300"))
SEED = int(os.environ.get("DDL_SEED", "20"))
_LIMIT_S = 1.0
_LIMIT_BYTES = 200 * 2**20

# --- values that are wrong somewhere --------------------------------------------------------

_numbers = st.one_of(
    st.integers(),
    st.sampled_from([10**30, -(10**400), 2**63, 2**64, 0, -1, 1e308, 5e-324]),
    st.floats(),
)
_paths = st.sampled_from(
    [
        *("..", "../..", "/", "~", "~root", "a/../../b", "/etc/passwd", "//x", "./.", "a//b"),
        *("a\\..\\b", "C:\\x", "x" * 5000, "a/" * 3000, "%2e%2e/", "s3://b", "file:///etc"),
        *("a\0b", "\0", "a\nb", "-rf", "$(id)", "`id`", "${HOME}", "a;b", "{{ 1 }}", "\u202e"),
    ]
)
_regexes = st.sampled_from(["(" * 500, "(a" * 200, "(?P<a>x)(?P<a>y)", "[", "(a{99999})", "\\"])
_texts = st.one_of(st.text(max_size=40), _paths, _regexes, st.sampled_from([*"@&*!|>%{}[]#,?:-"]))
_scalars = st.one_of(st.none(), st.booleans(), _numbers, _texts, st.dates(), st.binary(max_size=9))
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)


def _places(value: object, path: tuple = ()) -> list[tuple]:
    found = [path] if path else []
    if isinstance(value, dict):
        items: list = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for key, item in items:
        found += _places(item, (*path, key))
    return found


@st.composite
def changed_values(draw) -> bytes:
    """A good manifest with other values, unknown names, and without some fields."""
    document = yaml.safe_load(draw(st.sampled_from(list(GOOD.values()))))
    for _ in range(draw(st.integers(1, 4))):
        places = _places(document)
        if not places:
            break
        *around, last = draw(st.sampled_from(places))
        parent = document
        for key in around:
            parent = parent[key]
        what = draw(st.sampled_from(["other", "other", "gone", "renamed"]))
        if what == "other":
            parent[last] = draw(_values)
        elif what == "gone":
            del parent[last]
        elif isinstance(parent, dict):
            parent[draw(st.text(min_size=1, max_size=300))] = parent.pop(last)
    style = draw(st.sampled_from([None, '"', "'", "|"]))
    flow = draw(st.sampled_from([None, True, False]))
    text = yaml.dump(document, default_style=style, default_flow_style=flow, allow_unicode=True)
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged_text(draw) -> bytes:
    """A good manifest with pieces cut out, put in, or written in another encoding."""
    text = draw(st.sampled_from(list(GOOD.values())))
    encoding = draw(st.sampled_from(["utf-8"] * 5 + ["utf-16", "utf-32", "latin-1", "utf-8-sig"]))
    content = bytearray(text.encode(encoding, "replace"))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(content)))
        end = start + draw(st.integers(0, 60))
        content[start:end] = draw(
            st.one_of(
                st.binary(max_size=20),
                st.sampled_from(
                    [
                        *(
                            b"",
                            b"\0",
                            b"\t",
                            b"\xff\xfe",
                            b"\xef\xbb\xbf",
                            b"&a ",
                            b"*a",
                            b"<<: *a",
                        ),
                        *(b"---\n", b"...\n", b"!!python/object:os.system ", b"!!binary ", b"? "),
                        *(b"%YAML 1.1\n", b"%TAG ! !\n", b"\xed\xa0\x80", b"\xc2\x85", b"\r"),
                        *(b"{", b"[" * 30, b"- " * 30, b"a: " * 30, b"'", b'"', b"|\n", b">9\n"),
                    ]
                ),
            )
        )
    return bytes(content)


@st.composite
def bombs(draw) -> bytes:
    """Little text that means much: aliases of aliases, deep nesting, huge scalars and files."""
    kind = draw(st.sampled_from("aliases merges deep long_number long_text long_key many".split()))
    n = draw(st.integers(1, 60))
    wide = draw(st.integers(1, 300_000))
    if kind == "aliases":
        lines = ["a0: &a0 [x, x]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, n)]
        bomb = "\n".join(lines)
    elif kind == "merges":
        lines = ["b0: &b0 {x: 1}"]
        lines += [f"b{i}: &b{i} {{<<: [{', '.join([f'*b{i - 1}'] * 9)}]}}" for i in range(1, n)]
        bomb = "\n".join(lines)
    elif kind == "deep":
        piece = draw(st.sampled_from(["[", "{a: ", "- ", "? ", "a:\n ", "!!map {b: ", "&x ["]))
        bomb = "code: " + piece * (wide // len(piece))
    elif kind == "long_number":
        bomb = f"retries: {{attempts: {draw(st.sampled_from('189-+.e_x'))}{'9' * wide}}}"
    elif kind == "long_text":
        bomb = f"schedule: {draw(st.sampled_from(['', '@', '* ']))}{'a' * wide}"
    elif kind == "long_key":
        bomb = f"{'k' * wide}: 1"
    else:
        bomb = "metrics: [" + "{name: a, regex: b}, " * (wide // 21) + "]"
    good = draw(st.sampled_from(list(GOOD.values())))
    return draw(st.sampled_from([bomb, f"{good}\n{bomb}", f"{bomb}\n{good}"])).encode()


_most = {"s": 0.0, "bytes": 0}


def _memory(name: str) -> int:
    (line,) = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(name)]
    return int(line.split()[1]) * 1024


@seed(SEED)
@settings(
    max_examples=COUNT,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
@given(st.one_of(changed_values(), changed_values(), damaged_text(), bombs(), st.binary()))
def refuses_or_reads(content: bytes) -> None:
    """Each is a manifest, down to its plan, or an error with a list; in no time."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    before, started = _memory("VmRSS"), time.process_time()
    try:
        manifest = load_manifest_text(content, "m.yml")
    except ManifestError as error:
        assert error.issues
        said = str(error)
        assert len(said.splitlines()) == len(error.issues)
        assert all(line.startswith("m.yml") and len(line) < 1000 for line in said.splitlines())
        said.encode()  # a database takes it
        assert "\0" not in said
    else:
        steps = plan(manifest, Path("/manifests/m.yml"))
        assert steps.dag_id == slug(steps.dag_id) and 0 < len(steps.dag_id) <= 200
        assert may_have_dag_id(content, steps.dag_id)
        assert redacted_text(content.decode("utf-8-sig"))
    _most["s"] = max(_most["s"], time.process_time() - started)
    _most["bytes"] = max(_most["bytes"], _memory("VmHWM") - before)


def test_generated_bad_manifests_are_refused_soon_and_in_little_memory() -> None:
    refuses_or_reads()
    mib = _most["bytes"] / 2**20
    print(f"\n{COUNT} manifests: at most {_most['s'] * 1e3:.0f} ms of CPU and {mib:.1f} MiB each")
    assert 0 < _most["s"] < _LIMIT_S
    assert _most["bytes"] < _LIMIT_BYTES


def test_a_name_with_a_line_end_ends_no_line_of_a_message() -> None:
    text = GOOD["ffdl"].partition("evaluation_metrics:")[0]
    text += 'evaluation_metrics: {type: regex, groups: {"\\r": }}\n'
    with pytest.raises(ManifestError) as caught:
        load_manifest_text(text, "m.yml")
    assert len(str(caught.value).splitlines()) == len(caught.value.issues)


@pytest.mark.parametrize("style", [None, '"', "'", "|", ">"])
def test_no_way_to_write_a_name_hides_its_dag_id(style: str | None) -> None:
    @settings(max_examples=100, deadline=None, database=None)
    @given(st.text(min_size=1, max_size=60))
    def check(name: str) -> None:
        text = yaml.dump({"model_definition": {"name": name}}, default_style=style, width=20)
        if dag_id := slug(name):
            assert may_have_dag_id(text.encode("utf-8", "surrogatepass"), dag_id)

    check()


_PLANTED = "plantedKey7"
_KEYS = st.tuples(
    st.sampled_from(["", "a:\n  ", "  ", "- ", "# ", "#", "x: 1 # "]),
    st.sampled_from(["secret_access_key", "access_key_id", '"secret_access_key"']),
    st.sampled_from([": ", " : ", ":\n  ", ": &k ", ": |\n  ", ": >-\n    "]),
    st.sampled_from([_PLANTED, f"'{_PLANTED}'", f'"{_PLANTED}"', f"[{_PLANTED}]"]),
    st.sampled_from(["\n", " # more\n", "\n\n", "\r\n"]),
).map("".join)
_OTHERS = st.sampled_from(["b: 1\n", "# a comment\n", "- x\n", "\t", "c: *k\n", "#" * 50])


@seed(SEED)
@settings(max_examples=COUNT, deadline=None, database=None)
@given(st.lists(st.one_of(_KEYS, _KEYS, _OTHERS), max_size=8).map("".join))
@example("# secret_access_key: |\n#   plantedKey7\n")
@example("# secret_access_key:\n  plantedKey7 # more\n")
def test_no_generated_key_is_shown_also_where_it_is_commented_out(text: str) -> None:
    began = time.process_time()
    try:
        shown = redacted_text(text)
    except ManifestError:
        shown = ""
    assert _PLANTED not in shown
    assert time.process_time() - began < _LIMIT_S
