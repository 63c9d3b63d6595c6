"""What a template in a manifest may name. Source: Jinja's own parser.

Airflow gives templates all of a task's context, connections and variables among it. Who writes a
manifest is not always somebody who may read those.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddl_airflow.core.manifest.rule import Finding, Findings

# All are plain values, or make some.
NAMES = frozenset(
    (
        *("params", "run_id", "dag_run", "logical_date", "data_interval_start"),
        *("data_interval_end", "ds", "ds_nodash", "ts", "ts_nodash", "ts_nodash_with_tz", "macros"),
    )
)
# Of objects that can do more, by object and attribute: in a notification there are these too.
OF_A_NOTIFICATION = frozenset(
    (("dag", "dag_id"), ("ti", "task_id"), ("ti", "try_number"), ("error", ""))
)


def is_template(text: str) -> bool:
    """Returns whether Jinja would change it, or fail over it."""
    return any(mark in text for mark in ("{{", "{%", "{#"))


def strange_names(
    text: str, also: frozenset[tuple[str, str]] = frozenset()
) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a template, and how to mend it.

    Args:
        text: the template.
        also: what it may name besides ``NAMES``, as object and attribute; no attribute: all of it.
    """
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.meta import find_undeclared_variables

    try:
        tree = Environment(autoescape=True).parse(text)
    except TemplateSyntaxError as error:
        fix = "Close what {{, {% or {# opens; as text they are {{ '{{' }} and so on."
        yield f"is not a template that Jinja reads: {error.message}", fix
        return
    others = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    if any(isinstance(node, others) for node in tree.find_all(nodes.Node)):
        yield "takes in another template", "Write it out."
    fine = {
        id(found.node)
        for found in tree.find_all(nodes.Getattr)
        if isinstance(found.node, nodes.Name) and (found.node.name, found.attr) in also
    }
    known = NAMES | {name for name, attribute in also if not attribute}
    undeclared = find_undeclared_variables(tree) - known
    strange = {
        node.name
        for node in tree.find_all(nodes.Name)
        if node.name in undeclared and id(node) not in fine
    }
    shown = [f"{name}.{attribute}" for name, attribute in also if attribute]
    fix = f"There is: {', '.join(sorted([*known, *shown]))}."
    for name in sorted(strange):
        yield f"names {name[:60]!r} in a template", fix


def template_findings(
    at: str, text: str, also: frozenset[tuple[str, str]] = frozenset()
) -> Findings:
    if is_template(text):
        for message, fix in strange_names(text, also):
            yield Finding(at, message, fix)
