"""The bill of materials of a model: CycloneDX 1.6, by cyclonedx-python-lib."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ddl_airflow import __version__
from ddl_airflow.evidence.names import CARD, MODEL, NOT_INDEXED, hexadecimal

# Of the model: who checks a bill compares each component with each. lineage.json has all.
_MOST_FILES = 500

if TYPE_CHECKING:
    from cyclonedx.model import Property
    from cyclonedx.model.component import Component
    from cyclonedx.validation.json import JsonStrictValidator


def bill(record: Mapping[str, Any]) -> str:
    """The bill as JSON: the model with its files, the data and scripts it was made of, and the
    packages, processors and images that computed. The same record gives the same bill.

    Args:
        record: as ``lineage.json`` has it.
    """
    from cyclonedx.model import ExternalReference, ExternalReferenceType, XsUri
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output.json import JsonV1Dot6

    run, environment = record["run"], record["environment"]
    files = [file for file in record["result"]["files"] if file["key"].startswith(MODEL)]
    left_out = len(files) - _MOST_FILES
    model = Component(
        name=record["manifest"].get("name") or run["dag_id"],
        version=record["training_id"],
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="model",
        components=[_file(file["key"], file["sha256"]) for file in files[:_MOST_FILES]],
        external_references=[
            ExternalReference(
                type=ExternalReferenceType.MODEL_CARD, url=XsUri(CARD.rpartition("/")[2])
            )
        ],
        properties=_properties(
            *(("metric:" + name, value) for name, value in record["result"]["metrics"].items()),
            *(("parameter:" + name, value) for name, value in run["parameters"].items()),
            ("manifest", record["manifest"]["digest"]),
            ("run", run["run_id"]),
            ("files_only_in_lineage", left_out if left_out > 0 else None),
        ),
    )
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    tool = Component(name="ddl-airflow", version=__version__, type=ComponentType.APPLICATION)
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, digest),
        metadata=BomMetaData(
            component=model, tools=ToolRepository(components=[tool]), timestamp=_started(run)
        ),
        components=[
            _data(record["dataset"]),
            _scripts(record["code"]),
            *_packages(environment.get("versions", {})),
            *_devices(environment),
            *_images(environment),
        ],
    )
    bom.register_dependency(model, list(bom.components))
    written: str = JsonV1Dot6(bom).output_as_string(indent=2)
    return written + "\n"


def problems_of(text: str) -> list[str]:
    """What CycloneDX's own schema has against a bill.

    Raises:
        ModuleNotFoundError: it cannot be asked here.
    """
    from cyclonedx.exception import MissingOptionalDependencyException

    try:
        error = _validator().validate_str(text)
    except MissingOptionalDependencyException as missing:  # of the library's own extra
        name = getattr(missing.__cause__, "name", None) or "jsonschema"
        raise ModuleNotFoundError(f"no module {name!r}", name=name) from missing
    return [] if error is None else [f"it is no CycloneDX 1.6: {str(error.data)[:200]}"]


@cache
def _validator() -> JsonStrictValidator:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6)


def _file(key: str, sha256: str) -> Component:
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType

    hashed = HashType(alg=HashAlgorithm.SHA_256, content=sha256)
    return Component(name=key, type=ComponentType.FILE, bom_ref=f"file:{key}", hashes=[hashed])


def _data(data: Mapping[str, Any]) -> Component:
    from cyclonedx.model import ExternalReference, ExternalReferenceType, XsUri
    from cyclonedx.model.component import Component, ComponentType

    # That of a folder is quoted; of a bucket it has the keys as they are, which XsUri leaves so.
    uri = data["uri"] if data["uri"].startswith("file:") else quote(data["uri"], safe=":/")
    return Component(
        name=data["uri"],
        version=hexadecimal(data["fingerprint"]),
        type=ComponentType.DATA,
        bom_ref="dataset",
        external_references=[
            ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(uri))
        ],
        properties=_properties(
            ("fingerprint", data["fingerprint"]),
            ("files", data.get("files")),
            ("bytes", data.get("bytes")),
        ),
    )


def _scripts(code: Mapping[str, Any]) -> Component:
    from cyclonedx.model.component import Component, ComponentType

    return Component(
        name="scripts",
        version=code.get("git_commit") or hexadecimal(code["digest"]),
        type=ComponentType.APPLICATION,
        bom_ref="code",
        properties=_properties(("digest", code["digest"])),
    )


def _packages(versions: Mapping[str, Any]) -> Iterable[Component]:
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    for name, version in sorted(versions.items()):
        indexed = name not in NOT_INDEXED
        yield Component(
            name=name,
            version=str(version),
            type=ComponentType.PLATFORM if name == "python" else ComponentType.LIBRARY,
            bom_ref=f"package:{name}",
            purl=PackageURL("pypi", None, name, str(version)) if indexed else None,
        )


def _devices(environment: Mapping[str, Any]) -> Iterable[Component]:
    from cyclonedx.model.component import Component, ComponentType

    named = {*environment.get("processors", ()), *environment.get("devices", ())}
    for name in sorted(map(str, named)):
        yield Component(name=name, type=ComponentType.DEVICE, bom_ref=f"device:{name}")


def _images(environment: Mapping[str, Any]) -> Iterable[Component]:
    from cyclonedx.model.component import Component, ComponentType

    for image in sorted(map(str, environment.get("images", ()))):
        name, _, digest = image.partition("@")
        yield Component(
            name=name,
            version=digest or None,
            type=ComponentType.CONTAINER,
            bom_ref=f"image:{image}",
        )


def _properties(*pairs: tuple[str, Any]) -> list[Property]:
    from cyclonedx.model import Property

    return [Property(name=f"ddl:{name}", value=str(v)) for name, v in pairs if v is not None]


def _started(run: Mapping[str, Any]) -> datetime:
    """When the run did, or was due: the same for whoever writes the bill again."""
    return datetime.fromisoformat(run.get("started") or run["due"])
