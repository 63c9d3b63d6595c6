"""How a model was made, as an in-toto statement with SLSA's provenance, by in-toto-attestation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from ddl_airflow.evidence.names import MODEL, NOT_INDEXED, hexadecimal

PREDICATE = "https://slsa.dev/provenance/v1"
BUILD = "urn:ddl-airflow:training:1"
BUILDER = "urn:ddl-airflow"


def statement(record: Mapping[str, Any]) -> str:
    """The statement as JSON. Its subjects are the model's files; what else the training left are
    byproducts.

    Args:
        record: as ``lineage.json`` has it.

    Raises:
        ValueError: in-toto or SLSA has no such statement.
    """
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
    from in_toto_attestation.v1.statement import Statement

    files = record["result"]["files"]
    try:
        told = json_format.ParseDict(_provenance(record), provenance_pb2.Provenance())
    except json_format.ParseError as error:
        raise ValueError(str(error)) from error
    made = Statement(
        [
            ResourceDescriptor(name=file["key"], digest={"sha256": file["sha256"]}).pb
            for file in files
            if file["key"].startswith(MODEL)
        ],
        PREDICATE,
        json_format.MessageToDict(told),
    )
    made.validate()
    as_json = json_format.MessageToDict(made.pb)
    return json.dumps(as_json, indent=2, sort_keys=True) + "\n"


def problems_of(text: str, record: Mapping[str, Any]) -> list[str]:
    """What in-toto and SLSA have against a statement, and what is not as the record says."""
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.statement import Statement

    try:
        parsed = json_format.Parse(text, statement_pb2.Statement())
        Statement.copy_from_pb(parsed).validate()
        predicate = json_format.MessageToDict(parsed.predicate)
        json_format.ParseDict(predicate, provenance_pb2.Provenance())
    except (ValueError, json_format.ParseError) as error:
        return [f"it is no in-toto statement of provenance: {error}"]
    found = []
    if parsed.predicate_type != PREDICATE:
        found.append(f"it states {parsed.predicate_type!r}, not {PREDICATE}")
    recorded = {f["key"]: f["sha256"] for f in record["result"]["files"]}
    stated = {one.name: one.digest.get("sha256") for one in parsed.subject}
    if stated != {key: sha256 for key, sha256 in recorded.items() if key.startswith(MODEL)}:
        found.append("its subjects are not the model's files in lineage.json")
    return found


def _provenance(record: Mapping[str, Any]) -> dict[str, Any]:
    run, manifest, environment = record["run"], record["manifest"], record["environment"]
    versions = environment.get("versions", {})
    return {
        "buildDefinition": {
            "buildType": BUILD,
            "externalParameters": {
                "manifest": dict(manifest),
                "parameters": run["parameters"],
                "dag": run["dag_id"],
            },
            "internalParameters": {
                name: environment[name]
                for name in ("launcher", "world_size", "nodes", "slots", "settings")
                if name in environment
            },
            "resolvedDependencies": list(_dependencies(record)),
        },
        "runDetails": {
            "builder": {
                "id": BUILDER,
                "version": {
                    name: str(versions[name])
                    for name in ("ddl-airflow", "apache-airflow")
                    if name in versions
                },
            },
            "metadata": {
                "invocationId": record["training_id"],
                **({"startedOn": run["started"]} if run.get("started") else {}),
            },
            "byproducts": [
                {"name": file["key"], "digest": {"sha256": file["sha256"]}}
                for file in record["result"]["files"]
                if not file["key"].startswith(MODEL)
            ],
        },
    }


def _dependencies(record: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """What the training was made of. Digests of ours have names of ours: they are of listings."""
    data, code = record["dataset"], record["code"]
    yield {
        "name": "dataset",
        "uri": data["uri"],
        "digest": {"ddlListing": hexadecimal(data["fingerprint"])},
    }
    digests = {"ddlScripts": hexadecimal(code["digest"])}
    if code.get("git_commit"):
        digests["gitCommit"] = code["git_commit"]
    yield {"name": "code", "digest": digests}
    for name, version in sorted(record["environment"].get("versions", {}).items()):
        package = {"name": name, "annotations": {"version": str(version)}}
        if name not in NOT_INDEXED:
            package["uri"] = f"pkg:pypi/{quote(name)}@{quote(str(version))}"
        yield package
