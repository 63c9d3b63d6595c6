"""What every section is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section: frozen, and closed to fields that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True
    )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Itself: it never changes. Else pydantic copies each default for each manifest."""
        return self

    @classmethod
    def example(cls, field: str, written: Any) -> Any:
        """An example for a field that is missing beside what is written; None: the field's own."""
        return None


@dataclass(frozen=True)
class ByKind:
    """Of a field whose section is of one of several classes, as what is written there says.

    Such a field is annotated with it, for the loader's messages, and with what makes the section.
    A union of pydantic's would put the class into the path of each error, and would have to know
    all classes when the manifest's own is made.

    Attributes:
        section: the class for a mapping as it was written.
        others: the fields that not every class has, each with the kinds that have it.
    """

    section: Callable[[Any], type[Section]]
    others: Callable[[], Mapping[str, str]]
