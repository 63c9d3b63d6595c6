"""What a template in a manifest may say. Source: Jinja's own parser.

Airflow gives templates all of a task's context, connections and modules among it. Who writes a
manifest is not always somebody who may read those, so names, attributes, functions, filters and
syntax are those listed here and no others. Where a value may stand in a command is in
``ddl_airflow.core.manifest.shell``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from ddl_airflow.core.manifest.rule import Finding, Findings

if TYPE_CHECKING:
    from jinja2 import nodes

# Those of the logical date, which a run that changed data or an asset have started has not.
DATES = frozenset(
    (
        *("logical_date", "data_interval_start", "data_interval_end"),
        *("ds", "ds_nodash", "ts", "ts_nodash", "ts_nodash_with_tz"),
    )
)
WITHOUT_DATES = "Take dag_run.run_after, which each run has: {{ dag_run.run_after | ds }}."
# Plain values of a run.
VALUES = DATES | {"params", "run_id"}
# Objects that hold more than a template may have, and what it may have of them.
ATTRIBUTES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "dag_run": frozenset(
            (
                *("conf", "run_id", "dag_id", "run_type", "logical_date", "start_date"),
                *("run_after", "data_interval_start", "data_interval_end"),
            )
        ),
        "macros": frozenset(
            (
                *("datetime", "timedelta", "ds_add", "ds_format", "ds_format_locale"),
                "datetime_diff_for_humans",
            )
        ),
    }
)
NAMES = VALUES | ATTRIBUTES.keys()
# In a notification there are these too, by object and attribute; no attribute: all of it.
OF_A_NOTIFICATION = frozenset(
    (("dag", "dag_id"), ("ti", "task_id"), ("ti", "try_number"), ("error", ""))
)
METHODS = frozenset(
    (
        *("strftime", "strptime", "isoformat", "fromisoformat", "date", "timestamp", "now"),
        *("add", "subtract", "start_of", "end_of", "in_timezone", "total_seconds", "get"),
        *("to_date_string", "to_datetime_string", "to_iso8601_string", "lower", "upper", "strip"),
        *("split", "startswith", "endswith"),
    )
)
# Pure, and none whose result grows beyond what goes in.
FILTERS = frozenset(
    (
        *("abs", "capitalize", "count", "d", "default", "ds", "ds_nodash", "e", "escape", "first"),
        *("float", "int", "last", "length", "list", "lower", "max", "min", "reverse", "round"),
        *("sort", "string", "sum", "title", "tojson", "trim", "ts", "ts_nodash"),
        *("ts_nodash_with_tz", "unique", "upper", "urlencode"),
    )
)
_SYNTAX = frozenset(
    (
        *("Template", "Output", "TemplateData", "If", "For", "Name", "Const", "Getattr", "Getitem"),
        *("Call", "Keyword", "Filter", "Test", "Compare", "Operand", "And", "Or", "Not", "Neg"),
        *("Pos", "Add", "Sub", "Div", "FloorDiv", "Concat", "CondExpr", "Tuple", "List", "Slice"),
    )
)
# Jinja's parser recurses, and so does what walks its tree.
MAX_CHARACTERS = 10_000
_MAX_DEPTH = 40


def is_template(text: str) -> bool:
    """Returns whether Jinja would change it, or fail over it."""
    return any(mark in text for mark in ("{{", "{%", "{#"))


def parse_template(text: str) -> nodes.Template:
    """Returns a template's tree.

    Raises:
        ValueError: message and fix, as two arguments.
    """
    from jinja2 import Environment, TemplateSyntaxError

    fix = "Close what {{, {% or {# opens; text that has them is {% raw %}text{% endraw %}."
    if len(text) > MAX_CHARACTERS:
        message = f"has {len(text)} characters with a template among them, at most "
        raise ValueError(f"{message}{MAX_CHARACTERS} are read", "Shorten it.")
    try:
        tree = Environment(autoescape=True).parse(text)
        too_deep = _is_deeper(tree, _MAX_DEPTH)
    except TemplateSyntaxError as error:
        message = f"is not a template that Jinja reads: {str(error.message)[:200]}"
        raise ValueError(message, fix) from None
    except RecursionError:
        too_deep = True
    except ValueError:  # for instance a number with more digits than Python reads
        raise ValueError("is not a template that Jinja reads: a number in it", fix) from None
    if too_deep:
        message = "has a template that nests too deeply"
        raise ValueError(message, "Write fewer brackets in each other.")
    return tree


def _is_deeper(tree: nodes.Node, depth: int) -> bool:
    level: list[nodes.Node] = [tree]
    for _ in range(depth):
        level = [below for node in level for below in node.iter_child_nodes()]
        if not level:
            return False
    return True


def strange_names(
    text: str, also: frozenset[tuple[str, str]] = frozenset()
) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a template, and how to mend it.

    Args:
        text: the template.
        also: what it may name besides ``NAMES``, as object and attribute; no attribute: all of it.
    """
    try:
        tree = parse_template(text)
    except ValueError as error:
        yield error.args[0], error.args[1]
        return
    yield from dict.fromkeys(
        [*_syntax(tree)] or [*_names(tree, also)] or [*_uses(tree)],
    )


def _syntax(tree: nodes.Template) -> Iterator[tuple[str, str]]:
    from jinja2 import nodes

    for node in _walk(tree):
        kind = type(node).__name__
        if isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            yield "takes in another template", "Write it out."
        elif kind not in _SYNTAX:
            fix = "Use values, if and for; compute the rest in the script."
            yield f"uses {kind} in a template, which is not among what it may do", fix
        elif isinstance(node, nodes.For) and node.recursive:
            yield "has a recursive loop in a template", "Use a plain one."
        elif isinstance(node, nodes.For) and any(
            inner is not node for inner in node.find_all(nodes.For)
        ):
            yield "has a loop within a loop in a template", "Use one."


def _names(tree: nodes.Template, also: frozenset[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    from jinja2 import nodes

    allowed: dict[str, frozenset[str]] = dict(ATTRIBUTES)
    for name, attribute in also:
        if attribute:
            allowed[name] = allowed.get(name, frozenset()) | {attribute}
    plain = VALUES | {name for name, attribute in also if not attribute}
    fine = set()
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        assert isinstance(node, (nodes.Getattr, nodes.Getitem))
        of = node.node
        if isinstance(of, nodes.Name) and (_key(node) or "") in allowed.get(of.name, ()):
            fine.add(id(of))
    shown = [f"{name}.{one}" for name, ones in allowed.items() for one in ones]
    fix = f"There is: {', '.join(sorted([*plain, *shown]))}."
    for strange in _named(tree, plain):
        if id(strange) not in fine:
            yield f"names {strange.name[:60]!r} in a template", fix


def _named(node: nodes.Node, known: frozenset[str]) -> Iterator[nodes.Name]:
    """Yields the names that are neither known nor the variable of a loop around them."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        if node.ctx != "load" or node.name not in known:
            yield node
        return
    if isinstance(node, nodes.For):
        targets = [node.target, *node.target.find_all(nodes.Name)]
        inner = known | {"loop", *(one.name for one in targets if isinstance(one, nodes.Name))}
        for outside in (node.iter, *node.else_):
            yield from _named(outside, known)
        for inside in (*node.body, *filter(None, [node.test])):
            yield from _named(inside, inner)
        return
    for below in node.iter_child_nodes():
        yield from _named(below, known)


def _uses(tree: nodes.Template) -> Iterator[tuple[str, str]]:
    from jinja2 import nodes

    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call, nodes.Filter)):
        if isinstance(node, nodes.Filter):
            if node.name not in FILTERS:
                fix = f"There is: {', '.join(sorted(FILTERS))}."
                yield f"uses the filter {node.name[:60]!r} in a template", fix
        elif isinstance(node, nodes.Call):
            if not _is_known(node.node):
                fix = f"Use macros, or one of {', '.join(sorted(METHODS))}."
                yield "calls what no template may call", fix
        elif isinstance(node, (nodes.Getattr, nodes.Getitem)):
            key = _key(node)
            if key is None or key.startswith("_"):
                asked = "what is computed" if key is None else repr(key[:60])
                yield f"asks for {asked} of a value in a template", "Name it plainly."


def _walk(tree: nodes.Node) -> Iterator[nodes.Node]:
    from jinja2 import nodes

    yield tree
    yield from tree.find_all(nodes.Node)


def _key(node: nodes.Getattr | nodes.Getitem) -> str | None:
    """Returns what is asked for; empty for a number or a slice, None if the run decides it."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node.arg, nodes.Const):
        return node.arg.value if isinstance(node.arg.value, str) else ""
    return "" if isinstance(node.arg, nodes.Slice) else None


def _is_known(called: nodes.Node) -> bool:
    from jinja2 import nodes

    if not isinstance(called, nodes.Getattr):
        return False
    of_macros = isinstance(called.node, nodes.Name) and called.node.name == "macros"
    return called.attr in (ATTRIBUTES["macros"] if of_macros else METHODS)


def dates_in(text: str) -> list[str]:
    """The names of ``DATES`` that a template asks for in each run, also of ``dag_run``.

    Empty where it decides by a value, or says what to take for one that is missing.
    """
    from jinja2 import nodes

    if not any(date in text for date in DATES) or not is_template(text):
        return []
    try:
        tree = parse_template(text)
    except ValueError:  # said by another rule
        return []
    decides = (nodes.If, nodes.CondExpr, nodes.And, nodes.Or, nodes.Test, nodes.Filter)
    for node in tree.find_all(decides):
        if not isinstance(node, nodes.Filter) or node.name in ("d", "default"):
            return []
    found = [one.name for one in tree.find_all(nodes.Name) if one.ctx == "load"]
    for one in tree.find_all((nodes.Getattr, nodes.Getitem)):
        assert isinstance(one, (nodes.Getattr, nodes.Getitem))
        # Where it is missing, dag_run has None, which a command would take for a word.
        if isinstance(one.node, nodes.Name) and one.node.name == "dag_run" and _key(one) in DATES:
            found.append(f"dag_run.{_key(one)}")
    return list(dict.fromkeys(name for name in found if name.removeprefix("dag_run.") in DATES))


def differs_by_run(command: str) -> bool:
    """Whether a template in it names more than the run's parameters, as ``{{ ds }}`` does."""
    if not is_template(command):
        return False
    try:
        return any(_named(parse_template(command), frozenset({"params"})))
    except ValueError:  # said by another rule
        return True


def template_findings(
    at: str, text: str, also: frozenset[tuple[str, str]] = frozenset()
) -> Findings:
    if is_template(text):
        for message, fix in strange_names(text, also):
            yield Finding(at, message, fix)


def command_findings(at: str, commands: Iterable[str]) -> Findings:
    """Yields what is wrong with the templates of commands, each one command: names and places."""
    from ddl_airflow.core.manifest.shell import misplaced_values

    for command in filter(is_template, commands):
        wrong = list(strange_names(command)) or list(misplaced_values(parse_template(command)))
        for message, fix in dict.fromkeys(wrong):
            yield Finding(at, message, fix)
