"""What a rule is: what must hold beyond the type of each field, one small function each.

A rule names the fields that it reads and gets their values, typed. It yields what it finds; the
loader adds the lines. Rules whose fields are sound run even when other fields are broken, so that
one look at a manifest shows everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar


class Finding(NamedTuple):
    """What a rule found: the field, what is wrong with it, and what to write instead."""

    field: str
    message: str
    fix: str


Findings = Iterator[Finding]


class Rule(NamedTuple):
    """A check, called with the path of its last field and the values of all its fields."""

    fields: tuple[str, ...]
    check: Callable[..., Findings]
    warning: bool

    def values(self, whole: Any) -> tuple[Any, ...]:
        """The values of its fields in something that has them all."""
        return tuple([getter(whole) for getter in _getters(self.fields)])


@cache  # the fields of rules are few, and each manifest is asked for all of them
def _getters(fields: tuple[str, ...]) -> tuple[Callable[[Any], Any], ...]:
    return tuple(map(attrgetter, fields))


_Check = TypeVar("_Check", bound=Callable[..., Findings])


def registering(rules: list[Rule]) -> Callable[..., Callable[[_Check], _Check]]:
    """Returns the decorator that adds a check to the rules, with the fields that it reads."""

    def rule(*fields: str, warning: bool = False) -> Callable[[_Check], _Check]:
        def register(check: _Check) -> _Check:
            rules.append(Rule(fields, check, warning))
            return check

        return register

    return rule


def nearest(given: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known word that was probably meant; None if none is as near as that.

    Args:
        given: the word.
        known: those that it may be.
        cutoff: how alike they must be, from 0 to 1, which is the same word.
    """
    import difflib  # slow to import, and rarely needed

    words = list(known)
    # What is much longer than all of them costs time and is none of them.
    longest = max(60, *map(len, words)) if words else 60
    near = difflib.get_close_matches(given[:longest], words, n=1, cutoff=cutoff)
    return near[0] if near else None


def suggestion(given: str, known: Iterable[str]) -> str:
    """Returns the fix for a word that is not among the known ones: the nearest, or all."""
    words = list(known)
    near = nearest(given, words)
    return f"Did you mean {near}?" if near else f"Known: {', '.join(words)}."
