"""What Airflow shows as a DAG's documentation: how it trains, and where its models are.

The manifest itself is what the Code tab shows.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddl_airflow.core.manifest.load import redacted_text
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.markdown import block, code, escaped, table
from ddl_airflow.core.plan import Plan
from ddl_airflow.steps.evaluate import wanted

_KINDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
}
# Of a default, and of parameters in the example of a command.
_LONGEST = 100
_MOST_GIVEN = 3


def documentation(manifest: Manifest, steps: Plan, path: Path, text: str = "") -> str:
    """The DAG's documentation, in Markdown. Whatever a manifest says is text there.

    Args:
        manifest: as loaded.
        steps: its plan.
        path: the manifest's file.
        text: the manifest as written, where the Code tab does not show it.
    """
    parts = [*_warnings(manifest, path), *_parameters(manifest), *_again(manifest, steps)]
    parts += [*_when(steps), *_quality(steps), *_places(steps)]
    if text:
        parts += ["### Manifest", block(redacted_text(text), "yaml")]
    return "\n\n".join(parts) + "\n"


def _warnings(manifest: Manifest, path: Path) -> Iterator[str]:
    if manifest.warnings:
        yield "\n".join(f"- ⚠ {escaped(one.render(path.name))}" for one in manifest.warnings)


def _parameters(manifest: Manifest) -> Iterator[str]:
    if not manifest.parameters:
        return
    rows = [
        (code(name, in_table=True), _default(one), _allowed(one, name), escaped(one.description))
        for name, one in manifest.parameters.items()
    ]
    yield "### Parameters"
    yield table(("parameter", "default", "may be", "what it is"), rows)


def _default(one: Any) -> str:
    if one.secret:
        return ""
    text = one.default if isinstance(one.default, str) else json.dumps(one.default)
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return code(short, in_table=True)


def _allowed(one: Any, name: str) -> str:
    if one.secret:
        connection = code(one.conn_id or name, in_table=True)
        return f"secret: the password of connection {connection}"
    if one.choices:
        return escaped(", ".join(map(str, one.choices)))
    kind = _KINDS[one.type]
    if one.minimum is not None and one.maximum is not None:
        return escaped(f"{kind} from {one.minimum} to {one.maximum}")
    if one.minimum is not None:
        return escaped(f"{kind}, at least {one.minimum}")
    return escaped(kind if one.maximum is None else f"{kind}, at most {one.maximum}")


def _again(manifest: Manifest, steps: Plan) -> Iterator[str]:
    yield "### Train again"
    yield (
        "Trigger the DAG. Its form asks for the parameters, and for nodes, checkpoint, attempts "
        "and a dry run. Or:"
    )
    given = dict(list(steps.train.parameters.items())[:_MOST_GIVEN])
    conf = f" --conf {shlex.quote(json.dumps(given))}" if given else ""
    yield block(f"airflow dags trigger {steps.dag_id}{conf}", "sh")
    yield "A run goes on with a mended script when its `stage-data` is cleared with *downstream*."


def _when(steps: Plan) -> Iterator[str]:
    asked = steps.schedule
    times = [code(time) for time in (asked.cron, asked.timetable) if time]
    ways = [f"at {time} ({escaped(asked.timezone)})" for time in times]
    if asked.on_data_change:
        ways.append("when its data changes")
    if asked.assets:
        ways.append(f"when {', '.join(map(code, asked.assets))} were updated")
    yield "### When it trains"
    if not ways:
        yield "Only when somebody triggers it."
        return
    since = f", from {escaped(asked.start)} on" if asked.start else ""
    yield (
        f"By itself, {'; '.join(ways)}{since}. A run that nobody triggered is skipped where data, "
        "code, manifest and parameters are those of the newest model."
    )


def _quality(steps: Plan) -> Iterator[str]:
    asked, person = steps.evaluate, steps.approve
    said = []
    if asked is not None and asked.metric:
        bounds = wanted(asked.minimum, asked.maximum, not_worse=asked.not_worse)
        of = f", of source {asked.source}," if asked.source else ""
        said.append(f"{escaped(asked.metric)}{of} is {bounds}")
    if person is not None:
        said.append("a person approves it")
    if said:
        yield "### What is published"
        yield f"A model goes to production if {', and '.join(said)}; else nothing is published."


def _places(steps: Plan) -> Iterator[str]:
    results, dag = steps.upload_results.results.uri, steps.dag_id
    places = [
        ("data", steps.stage_data.dataset.uri),
        ("each model, with its lineage", f"{results}/<training id>/<name>/"),
        ("which was published last", f"{results}/{dag}/latest.json"),
    ]
    if steps.upload_results.promote:
        places.append(("which is in production", f"{results}/{dag}/production.json"))
    yield "### Where it is"
    yield "\n".join(f"- {what}: {code(where)}" for what, where in places)
    yield "Which data, code and run made a model, and which is in production:"
    commands = [f"ddl-airflow lineage {shlex.quote(f'{results}/TRAINING')}"]
    if steps.upload_results.promote:
        place = shlex.quote(f"{results}/{dag}")
        commands += [f"ddl-airflow production {place}", f"ddl-airflow rollback {place}"]
    yield block("\n".join(commands), "sh")
