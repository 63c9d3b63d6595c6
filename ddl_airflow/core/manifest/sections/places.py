"""training_data_reference and training_results_reference: places, and what opens them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, SecretStr

from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.values import AnyText, Prefix, Secret, Text

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
SECRET_FIELDS = ("access_key_id", "secret_access_key")
# Variables that ``${NAME}`` may read where the site says nothing else.
MANIFEST_VARIABLES = ("DDL_*", "S3_*")
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
        for name, value in self:
            text = value.get_secret_value() if isinstance(value, SecretStr) else value or ""
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


class Location(Section):
    """A place in an object store (bucket, prefix), or in the file system (path)."""

    bucket: Text | None = Field(
        default=None, description="Bucket, for type s3.", examples=["mnist-training"]
    )
    prefix: Prefix = Field(
        default="", description="Folder in the bucket; all of it by default.", examples=["mnist/v1"]
    )
    path: Text | None = Field(
        default=None,
        description="Folder, for type fs; absolute, or relative to the manifest.",
        examples=["./data"],
    )


class _Reference(Section):
    """What data and results have in common."""

    name: AnyText = Field(default="", description="A title for people.", examples=["MNIST images"])
    connection: Connection | None = Field(
        default=None,
        description="Access to the object store, for type s3.",
        examples=[{"conn_id": "my_s3"}],
    )
    type: Literal["s3", "fs"] = Field(
        description="s3: an object store; fs: a folder.", examples=["s3"]
    )


class DataReference(_Reference):
    """Where the training data is."""

    source: Location = Field(
        description="Where the data is.", examples=[{"bucket": "mnist-training-data"}]
    )

    @property
    def place(self) -> Location:
        """Where: the same name for data and results."""
        return self.source


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
def location_fits_type(at: str, kind: str, location: Location) -> Findings:
    if kind == "s3":
        if location.bucket is None:
            yield Finding(
                f"{at}.bucket", "is missing, type s3 needs it", "Write bucket: my-bucket."
            )
        if location.path is not None:
            yield Finding(f"{at}.path", "is not for type s3", "Use bucket and prefix, or type: fs.")
        return
    if location.path is None:
        yield Finding(f"{at}.path", "is missing, type fs needs it", "Write path: ./folder.")
    for name in ("bucket", "prefix"):
        if getattr(location, name):
            yield Finding(f"{at}.{name}", "is not for type fs", "Use path, or type: s3.")


@_rule("training_data_reference.source")
@_rule("training_results_reference.target")
def location_is_legal(at: str, location: Location) -> Findings:
    bucket, path = location.bucket, location.path
    if bucket is not None and (
        # Stores no longer make buckets with an underscore, but those of FfDL's days have it.
        not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", bucket)
        or ".." in bucket
        or re.fullmatch(r"[0-9]+(\.[0-9]+){3}", bucket)
    ):
        fix = (
            "Use 3 to 63 of a-z, 0-9, dot, dash and _, starting and ending with a letter or digit."
        )
        yield Finding(f"{at}.bucket", f"{bucket[:70]!r} is not a bucket name", fix)
    if location.prefix and not {"", ".", ".."}.isdisjoint(location.prefix.split("/")):
        fix = "Write it like a/b: no leading or double slash, no dots as a folder."
        yield Finding(f"{at}.prefix", f"{location.prefix[:70]!r} is not a key prefix", fix)
    if path is not None and ".." in PurePosixPath(path).parts:
        yield Finding(f"{at}.path", "has `..` in it", "Write the folder's absolute path.")


@_rule("training_data_reference.type", "training_data_reference.connection")
@_rule("training_results_reference.type", "training_results_reference.connection")
def connection_fits_type(at: str, kind: str, connection: Connection | None) -> Findings:
    if kind == "s3" and connection is None:
        fix = "Write connection: {conn_id: my_s3}, with the id of an Airflow connection."
        yield Finding(at, "is missing, type s3 needs it", fix)
    if kind == "fs" and connection is not None:
        yield Finding(at, "is not for type fs", "Delete it, or use type: s3.")


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
    data, results = place_of(source), place_of(target)
    if data is None or results is None or results[: len(data)] != data:
        return
    where = "are the same place as" if results == data else "lie inside"
    fix = "Give the results a place of their own: what is written there would become data."
    yield Finding(f"{at}.target", f"the results {where} the training data", fix)


def place_of(reference: Reference) -> tuple[str, ...] | None:
    """Returns store, bucket and folders, so that a place inside another starts with it."""
    location, connection = reference.place, reference.connection
    if reference.type == "fs":
        return ("fs", *PurePosixPath(location.path).parts) if location.path else None
    if location.bucket is None or connection is None:
        return None
    store = connection.conn_id or (connection.endpoint_url or "").lower().rstrip("/")
    return ("s3", store, location.bucket, *filter(None, location.prefix.split("/")))


@_rule("training_data_reference.connection", warning=True)
@_rule("training_results_reference.connection", warning=True)
def keys_are_not_literal(at: str, connection: Connection | None) -> Findings:
    for name in SECRET_FIELDS:
        secret: SecretStr | None = getattr(connection, name, None)
        if secret and not REFERENCE.fullmatch(secret.get_secret_value()):
            fix = "Put the keys into an Airflow connection and write conn_id: its id."
            yield Finding(f"{at}.{name}", "a key is written out in the manifest", fix)
            return


def leaves_its_folder(path: str) -> bool:
    return path.startswith(("/", "~")) or ".." in PurePosixPath(path).parts
