"""The site's table of compute: ``[ddl] compute``, over the built-in one; and how such are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from ddl_airflow.core.compute import COMPUTE, Compute, Place
from ddl_airflow.core.errors import ManifestIssue, ManifestSyntaxError
from ddl_airflow.core.manifest.load import read_fields
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.values import Text, Whole, truth

_INLINE = "[ddl] compute"
_Parsed = TypeVar("_Parsed")
# Columns of Airflow's database.
_MAX_NAME = 256


def _short_enough(name: str) -> str:
    if len(name) > _MAX_NAME:
        raise ValueError(f"has {len(name)} characters, at most {_MAX_NAME} fit")
    return name


_Name = Annotated[Text, AfterValidator(_short_enough)]


class _Place(Section):
    pool: _Name | None = Field(default=None, description="Airflow's pool.", examples=["a100"])
    queue: _Name | None = Field(default=None, description="Queue of workers.", examples=["gpu"])
    executor: _Name | None = Field(
        default=None,
        description="One of those in Airflow's [core] executor.",
        examples=["CeleryExecutor"],
    )
    priority_weight: Whole = Field(
        default=1, ge=1, le=10_000, description="Above others that wait.", examples=[10]
    )

    def place(self) -> Place:
        return Place(self.pool or "", self.queue or "", self.executor or "", self.priority_weight)


class _Compute(_Place):
    slots: Whole | None = Field(
        default=None, ge=1, le=4096, description="Ranks per node, one for each GPU.", examples=[8]
    )
    gpu: Annotated[bool, BeforeValidator(truth)] | None = Field(
        default=None, description="Whether each rank expects a GPU.", examples=[True]
    )
    nodes: Whole | None = Field(
        default=None, ge=1, le=4096, description="How many the site has.", examples=[4]
    )
    other_steps: _Place | None = Field(
        default=None,
        description="Where the steps around the training run.",
        examples=[{"queue": "default"}],
    )

    def compute(self, name: str) -> Compute:
        known = COMPUTE.get(name)
        train = self.place()
        # Where nothing else is said they stay with the training, as a local workspace needs it.
        near = Place(queue=train.queue, executor=train.executor)
        return Compute(
            name,
            self.slots or (known.slots if known else 0),
            bool(known and known.gpu) if self.gpu is None else self.gpu,
            self.nodes,
            train,
            near if self.other_steps is None else _over(near, self.other_steps),
        )


def _over(near: Place, said: _Place) -> Place:
    place = said.place()
    return Place(
        place.pool,
        place.queue or near.queue,
        place.executor or near.executor,
        place.priority_weight,
    )


class _Table(Section):
    compute: Mapping[str, _Compute] = Field(
        description="Kinds of node, by the name that manifests write.",
        examples=[{"a100x8": {"slots": 8, "gpu": True, "pool": "a100"}}],
    )


def _slots_are_known(at: str, table: Mapping[str, _Compute]) -> Findings:
    for name, entry in table.items():
        if entry.slots is None and name not in COMPUTE:
            fix = "Add slots:, the ranks of one node; only built-in names have them already."
            yield Finding(f"{at}.{name}", "says no slots", fix)


_RULES = (Rule(("compute",), _slots_are_known, warning=False),)


def compute_table(setting: str) -> Mapping[str, Compute]:
    """Every kind of node that manifests may name.

    Args:
        setting: ``[ddl] compute``: a path, or the table itself where it begins with a brace; empty
            for the built-in table alone.

    Raises:
        ManifestError: the table cannot be read, or says what cannot be; with file, field and fix.
    """
    setting = setting.strip()
    return read_setting(setting, _INLINE, _parsed) if setting else COMPUTE


def read_setting(setting: str, name: str, parsed: Callable[[bytes, str], _Parsed]) -> _Parsed:
    """A table of the site's. A file is read once, and again when it has changed.

    Args:
        setting: a path, or the table itself where it begins with a brace.
        name: of the setting, as messages have it.
        parsed: text and its source to the table; keeps what it made last.

    Raises:
        ManifestError: the file cannot be read, or as ``parsed``.
    """
    if setting.startswith("{"):
        return parsed(setting.encode(), name)
    path = Path(os.path.expanduser(setting))
    try:
        found = path.stat()
        table: _Parsed = _read(path, found.st_mtime_ns, found.st_size, parsed)
        return table
    except OSError as error:
        fix = f"Correct {name} in Airflow's configuration, or the rights of the file."
        issue = ManifestIssue(0, "", f"cannot be read: {error.strerror}", fix)
        raise ManifestSyntaxError(os.fspath(path), [issue]) from error


@lru_cache(4)  # more than there are settings
def _read(
    path: Path, changed_ns: int, size: int, parsed: Callable[[bytes, str], _Parsed]
) -> _Parsed:
    return parsed(path.read_bytes(), os.fspath(path))


@lru_cache(1)
def _parsed(text: bytes, source: str) -> Mapping[str, Compute]:
    table = read_fields(_Table, text, source, _RULES)
    ours = {name: entry.compute(name) for name, entry in table.compute.items()}
    return MappingProxyType({**COMPUTE, **ours})
