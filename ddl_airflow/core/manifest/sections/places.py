"""training_data_reference and training_results_reference: places, and what opens them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.sections.store import StoreKind
from ddl_airflow.core.manifest.sections.stores import store_kinds
from ddl_airflow.core.manifest.values import AnyText, Prefix, Secret, Text, truth
from ddl_airflow.core.selection import Selection, wrong_patterns

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
SECRET_FIELDS = ("access_key_id", "secret_access_key")
# As boto3 has them; Watson Machine Learning took both.
OF_AWS = {f"aws_{name}": name for name in SECRET_FIELDS}
# All names of fields that hold keys: to be masked, whatever else is wrong.
WRITTEN_SECRET_FIELDS = (*SECRET_FIELDS, *OF_AWS)
# Variables that ``${NAME}`` may read where the site says nothing else.
MANIFEST_VARIABLES = ("DDL_*", "S3_*")
UNPACKED_AND_STREAMED = (
    "archives cannot be unpacked while ranks wait for their files: which those are is known at "
    "the end of each",
    "Delete it, or stream; or upload the files themselves.",
)
# What a DAG's folder among the results has: ddl_airflow.lineage.production writes them.
_POINTERS = ("latest.json", "production.json", "rejected.json")
POINTERS = (*_POINTERS, *(f"{name}.conditions" for name in _POINTERS))
RULES: list[Rule] = []
_rule = registering(RULES)


@dataclass(frozen=True)
class Credentials:
    """What opens an object store. The keys are text here, but never part of a repr."""

    endpoint_url: str
    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    region_name: str | None = None


class Connection(Section):
    """Access to an object store: an Airflow connection, or an endpoint and keys.

    Each of endpoint_url, access_key_id, secret_access_key and region_name may be ``${NAME}``: the
    environment variable of the machine that runs the task, read when it runs. The site says which
    variables may be read so: all others are not the manifest's.
    """

    conn_id: Text | None = Field(
        default=None, description="Airflow connection; nothing else then.", examples=["my_s3"]
    )
    endpoint_url: Text | None = Field(
        default=None,
        description="Address of the object store.",
        examples=["https://s3.example.com"],
    )
    access_key_id: Secret | None = Field(
        default=None, description="Access key.", examples=["${S3_ACCESS_KEY_ID}"]
    )
    secret_access_key: Secret | None = Field(
        default=None, description="Secret key.", examples=["${S3_SECRET_ACCESS_KEY}"]
    )
    region_name: Text | None = Field(
        default=None, description="Region, where the store asks for it.", examples=["eu-de"]
    )

    @model_validator(mode="before")
    @classmethod
    def _of_aws(cls, written: Any) -> Any:
        """What is named twice stays, and is an unknown field."""
        if not isinstance(written, dict):
            return written
        return {
            name if (own := OF_AWS.get(name)) is None or own in written else own: value
            for name, value in written.items()
        }

    def references(self) -> dict[str, str]:
        """Returns the fields as written, to be stored. Raises ValueError if a key is among them."""
        values: dict[str, str] = {}
        for name, value in self:
            text = value.get_secret_value() if isinstance(value, SecretStr) else value
            if isinstance(value, SecretStr) and not REFERENCE.fullmatch(str(text)):
                raise ValueError(f"{name} is written out")
            if text is not None:
                values[name] = text
        return values

    def _texts(self) -> Iterator[tuple[str, str]]:
        for name, value in self:
            yield name, value.get_secret_value() if isinstance(value, SecretStr) else value or ""

    def variables(self) -> Iterator[tuple[str, str]]:
        """Each field that is a ``${NAME}``, and the variable's name."""
        for name, text in self._texts():
            if reference := REFERENCE.fullmatch(text):
                yield name, reference[1]

    def resolve(
        self, environ: Mapping[str, str], may_read: Sequence[str] = MANIFEST_VARIABLES
    ) -> Credentials:
        """Returns the values themselves, with every ``${NAME}`` replaced from environ.

        Args:
            environ: variables by name.
            may_read: names of those that a manifest may read; ``*`` is any text. Never Airflow's.

        Raises:
            ConnectionInvalid: variables that may not be read, are not set, or are empty (all of
                them are named); a variable that holds no address or region, without what it
                holds; or a connection by conn_id, which only Airflow can look up.
        """
        if self.conn_id is not None:
            raise ConnectionInvalid(f"conn_id: {self.conn_id}: only Airflow knows its values.")
        values: dict[str, str] = {}
        wrong: list[str] = []
        for name, text in self._texts():
            if reference := REFERENCE.fullmatch(text):
                variable = f"environment variable {reference[1]}"
                if not _may_be_read(reference[1], may_read):
                    wrong.append(f"{name}: {variable} is not one that manifests may read")
                elif not (text := environ.get(reference[1], "").strip()):
                    wrong.append(f"{name}: {variable} is not set")
                elif name == "endpoint_url" and any(_url_findings("", text)):
                    wrong.append(
                        f"{name}: {variable} does not hold an address such as https://host"
                    )
                elif name == "region_name" and not re.fullmatch(r"[A-Za-z0-9-]{1,63}", text):
                    wrong.append(f"{name}: {variable} does not hold a region")
            values[name] = text
        if wrong:
            fix = (
                f"Manifests may read {', '.join(may_read) or 'none'} ([ddl] manifest_variables), "
                "where the task runs; or use conn_id."
            )
            raise ConnectionInvalid(f"{'; '.join(wrong)}. {fix}")
        return Credentials(
            values["endpoint_url"],
            values["access_key_id"],
            values["secret_access_key"],
            values["region_name"] or None,
        )


def _may_be_read(variable: str, may_read: Sequence[str]) -> bool:
    if variable.upper().startswith("AIRFLOW"):
        return False
    return any(fnmatchcase(variable, pattern) for pattern in may_read)


if TYPE_CHECKING:
    StoreType: TypeAlias = str
else:
    StoreType = Literal[tuple(store_kinds())]


def _with(field: str) -> list[StoreKind]:
    """The kinds of store that have a field of a location."""
    return [kind for kind in store_kinds().values() if field in kind.fields]


def _types(kinds: Iterable[StoreKind]) -> str:
    return " or ".join(kind.kind_name for kind in kinds)


def _with_connection() -> str:
    return _types(kind for kind in store_kinds().values() if kind.needs_connection)


class Location(Section):
    """A place in a store; which of the fields there are is said by its kind."""

    bucket: Text | None = Field(
        default=None,
        description=f"Bucket, for type {_types(_with('bucket'))}.",
        examples=["mnist-training"],
    )
    prefix: Prefix = Field(
        default="", description="Folder in the bucket; all of it by default.", examples=["mnist/v1"]
    )
    path: Text | None = Field(
        default=None,
        description=f"Folder, for type {_types(_with('path'))}; absolute, or relative to the "
        "manifest.",
        examples=["./data"],
    )


class _Reference(Section):
    """What data and results have in common."""

    name: AnyText = Field(default="", description="A title for people.", examples=["MNIST images"])
    connection: Connection | None = Field(
        default=None,
        description=f"Access to the object store, for type {_with_connection()}.",
        examples=[{"conn_id": "my_s3"}],
    )
    type: StoreType = Field(
        description=f"{'; '.join(f'{name}: {kind.is_a}' for name, kind in store_kinds().items())}.",
        examples=["s3"],
    )

    @classmethod
    def example(cls, field: str, written: Any) -> Any:
        """Of the place: one in that kind of store."""
        kind = store_kinds().get(str(written.get("type")))
        return kind.examples.get(field) if kind else None

    @property
    def store(self) -> StoreKind:
        """The kind of store."""
        return store_kinds()[self.type]


class DataReference(_Reference):
    """Where the training data is."""

    source: Location = Field(
        description="Where the data is.", examples=[{"bucket": "mnist-training-data"}]
    )
    stream: Annotated[bool, BeforeValidator(truth)] = Field(
        default=False,
        description="Whether the ranks start with the first file, while the others still come; the "
        "script waits for each by ddl.data.files().",
        examples=[True],
    )
    include: tuple[Text, ...] = Field(
        default=(),
        description="Patterns of the keys below source that are the data, as .gitignore has them; "
        "all by default.",
        examples=[["train/*.tfrecord"]],
    )
    exclude: tuple[Text, ...] = Field(
        default=(),
        description="Patterns of keys that are not, also where include has them.",
        examples=[["*.tmp", "/old/"]],
    )

    unpack: Annotated[bool, BeforeValidator(truth)] = Field(
        default=False,
        description="Whether archives become folders of what is in them, named as they are without "
        "their suffix: .tar, .tar.gz, .tgz, .tar.bz2, .tar.xz, .zip.",
        examples=[True],
    )

    @property
    def place(self) -> Location:
        """Where: the same name for data and results."""
        return self.source

    @property
    def selection(self) -> Selection:
        """Which of the objects there."""
        return Selection(self.include, self.exclude)


class ResultsReference(_Reference):
    """Where the results go."""

    target: Location = Field(
        description="Where the results go.", examples=[{"bucket": "mnist-training-models"}]
    )

    @property
    def place(self) -> Location:
        """Where: the same name for data and results."""
        return self.target


Reference: TypeAlias = DataReference | ResultsReference


@_rule("training_data_reference.type", "training_data_reference.source")
@_rule("training_results_reference.type", "training_results_reference.target")
def location_fits_type(at: str, type_name: str, location: Location) -> Findings:
    kind = store_kinds()[type_name]
    for name, example in kind.required.items():
        if not getattr(location, name):
            message = f"is missing, type {type_name} needs it"
            yield Finding(f"{at}.{name}", message, f"Write {name}: {example}.")
    for name, value in location:
        if value and name not in kind.fields:
            fix = f"Use {' and '.join(kind.fields)}, or type: {_types(_with(name))}."
            yield Finding(f"{at}.{name}", f"is not for type {type_name}", fix)
    yield from kind.findings(at, location)


@_rule("training_data_reference.source")
@_rule("training_results_reference.target")
def location_is_legal(at: str, location: Location) -> Findings:
    """Also where the type is broken: what is wrong for all kinds that have the field."""
    wrong: dict[Finding, None] = {}
    for name, value in location:
        if value:
            first, *others = (list(kind.findings(at, location)) for kind in _with(name))
            wrong |= dict.fromkeys(one for one in first if all(one in more for more in others))
    yield from wrong


@_rule("training_data_reference.type", "training_data_reference.connection")
@_rule("training_results_reference.type", "training_results_reference.connection")
def connection_fits_type(at: str, type_name: str, connection: Connection | None) -> Findings:
    kind = store_kinds()[type_name]
    fix = f"Write connection: {{conn_id: my_{type_name}}}, with the id of an Airflow connection."
    if kind.needs_connection and connection is None:
        yield Finding(at, f"is missing, type {type_name} needs it", fix)
    elif not kind.needs_connection and connection is not None:
        fix = f"Delete it, or use type: {_with_connection()}."
        yield Finding(at, f"is not for type {type_name}", fix)
    elif connection is not None and not connection.conn_id and not kind.has_keys:
        yield Finding(at, f"has no conn_id, type {type_name} needs it", fix)


@_rule("training_data_reference.connection")
@_rule("training_results_reference.connection")
def connection_is_complete(at: str, connection: Connection | None) -> Findings:
    if connection is None:
        return
    wanted = ("endpoint_url", *SECRET_FIELDS)
    given = [name for name in (*wanted, "region_name") if getattr(connection, name) is not None]
    if connection.conn_id is not None:
        for name in given:
            fix = "Keep conn_id alone, or delete it."
            yield Finding(f"{at}.{name}", "is given beside conn_id, which has it all", fix)
        return
    for name in wanted:
        if name not in given:
            fix = f"Add {name}, or give conn_id: my_s3 alone."
            yield Finding(f"{at}.{name}", "is missing", fix)


@_rule("training_data_reference.connection")
@_rule("training_results_reference.connection")
def connection_values_are_real(at: str, connection: Connection | None) -> Findings:
    # No message here shows a value: any of them may be, or hold, a secret.
    for name, value in connection or ():
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if text is None or REFERENCE.fullmatch(text):
            continue
        field, variable = f"{at}.{name}", f"${{S3_{name.upper()}}}"
        if re.fullmatch(r"<.*>", text):
            fix = f"Write the real value, {variable} to read it from the environment, or conn_id."
            yield Finding(field, "is still the placeholder of the template", fix)
        elif text.startswith("${"):
            fix = f"Write it as {variable}, with nothing around it."
            yield Finding(field, "is not a reference to an environment variable", fix)
        elif name == "endpoint_url":
            yield from _url_findings(field, text)


def _url_findings(field: str, text: str) -> Findings:
    fix = "Write for example https://s3.example.com, or ${S3_ENDPOINT_URL}."
    try:
        url = urlsplit(text)
        sound = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        sound = False
    if not sound or re.search(r"[\s$<>]", text):
        yield Finding(field, "is not the address of an object store", fix)
    elif "@" in url.netloc or url.query or url.fragment:
        yield Finding(field, "carries more than the address", f"Keep keys out of it. {fix}")


@_rule("training_data_reference", "training_results_reference")
def places_differ(at: str, source: DataReference, target: ResultsReference) -> Findings:
    yield from _inside(source, place_of(source), place_of(target))


def folders_differ(data: DataReference, results: ResultsReference, beside: Path) -> Findings:
    """Yields results inside the data, where those are folders and it is known where they start.

    Args:
        data, results: as loaded.
        beside: the manifest's folder.
    """
    source, target = (one.store.folder(one.place, beside) for one in (data, results))
    if source is not None and target is not None:
        yield from _inside(data, source.parts, target.parts)


def pointers_are_no_data(
    data: DataReference, results: ResultsReference, dag_id: str, beside: Path
) -> Findings:
    """Yields pointers to the newest models that are among the data: each publication writes them.

    Args:
        data, results: as loaded.
        dag_id: the manifest's.
        beside: its folder.
    """
    source, target = (_where(one, beside) for one in (data, results))
    # Results inside the data are said by another rule.
    if source is None or target is None or (*target, dag_id) != source:
        return
    if not all(data.selection.leaves_out(name) for name in POINTERS):
        message = f"the pointers to its newest models, {target[-1]}/{dag_id}, lie in the training"
        fix = "Give the results a place of their own: what is written there would become data."
        yield Finding("training_results_reference.target", f"{message} data", fix)


def _where(reference: Reference, beside: Path) -> tuple[str, ...] | None:
    folder = reference.store.folder(reference.place, beside)
    return place_of(reference) if folder is None else folder.parts


def _inside(
    reference: DataReference, data: tuple[str, ...] | None, results: tuple[str, ...] | None
) -> Findings:
    if data is None or results is None or results[: len(data)] != data:
        return
    within = "/".join(results[len(data) :])
    if within and reference.selection.leaves_out_below(within):
        return
    where = "lie inside" if within else "are the same place as"
    fix = (
        "Give the results a place of their own: what is written there would become data. One "
        "inside is fine if it is left out of the data: "
        f"exclude: [/{within or 'results'}/] beside source."
    )
    said = f"the results {where} the training data"
    yield Finding("training_results_reference.target", said, fix)


def place_of(reference: Reference) -> tuple[str, ...] | None:
    """Returns store, bucket and folders, so that a place inside another starts with it."""
    return reference.store.place(reference.place, reference.connection)


@_rule("training_data_reference.connection", warning=True)
@_rule("training_results_reference.connection", warning=True)
def keys_are_not_literal(at: str, connection: Connection | None) -> Findings:
    for name in SECRET_FIELDS:
        secret: SecretStr | None = getattr(connection, name, None)
        if secret and not REFERENCE.fullmatch(secret.get_secret_value()):
            fix = "Put the keys into an Airflow connection and write conn_id: its id."
            yield Finding(f"{at}.{name}", "a key is written out in the manifest", fix)
            return


@_rule("training_data_reference.include")
@_rule("training_data_reference.exclude")
def patterns_are_some(at: str, patterns: Sequence[str]) -> Findings:
    for number, wrong, fix in wrong_patterns(patterns):
        yield Finding(f"{at}.{number}", f"{patterns[number][:70]!r} {wrong}", fix)


@_rule("training_data_reference.stream", "training_data_reference.unpack")
def archives_do_not_come_meanwhile(at: str, stream: bool, unpack: bool) -> Findings:
    if stream and unpack:
        yield Finding(at, *UNPACKED_AND_STREAMED)


def leaves_its_folder(path: str) -> bool:
    return path.startswith(("/", "~")) or ".." in PurePosixPath(path).parts
