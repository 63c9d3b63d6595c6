"""Which objects of a place are a dataset: patterns of their keys, as ``.gitignore`` has them.

Each part of a key is compared by itself, and the parts one after the other: whatever a pattern and
a key say, the time is their lengths', also in a triggerer, which looks at other people's data with
their patterns. One regular expression of the whole, as packages for this make it, takes hours for
a pattern of some asterisks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Protocol, TypeVar

from ddl_airflow.core.errors import SourceMissing, StagingError

_ANY = "**"
_LONGEST = 1024  # bytes, as of keys


class Keyed(Protocol):
    """What has a key, parts separated by "/"."""

    @property
    def key(self) -> str:
        """The key."""


One = TypeVar("One", bound=Keyed)


class Pattern:
    """A pattern of keys.

    ``*`` and ``?`` stand for any text and any character, but a slash; ``[a-z]`` and ``[!a-z]`` for
    one character; ``**`` between slashes for any number of folders. A pattern with a slash before
    its end is one from the first folder on, any other matches in each folder. What matches a folder
    matches all that is below it; with a slash at its end a pattern matches nothing else.

    Args:
        text: as it is written. Raises ValueError, which says what is wrong with it.
    """

    def __init__(self, text: str) -> None:
        wrong = wrong_with(text)
        if wrong is not None:
            raise ValueError(f"{text!r} {wrong[0]}. {wrong[1]}")
        self.text = text
        parts = [part for part in text.split("/") if part]
        if "/" not in text.rstrip("/"):
            parts.insert(0, _ANY)
        self._below = text.endswith("/")
        if parts[-1] == _ANY:
            parts.append("*")  # "a/**" is what is below a
        # None: any number of parts. No part has a slash, so "*" never goes beyond one.
        self._parts = [None if p == _ANY else re.compile(translate(p)).match for p in parts]
        self._end, self._all = len(parts), parts[-1] == "*" and not self._below
        # Of the last folder, in which the next key most likely is as well.
        self._folder, self._at = "", self._behind({0})

    def matches(self, key: str) -> bool:
        """Whether it matches the key, or a folder above."""
        folder, slash, name = key.rpartition("/")
        if self._end in self._in(folder + slash):  # a folder above
            return True
        return not self._below and self._end in self._next(self._at, name)

    def covers(self, folder: str) -> bool:
        """Whether it matches all keys below a folder."""
        at = self._in(f"{folder}/")
        return self._end in at or (self._all and self._end - 1 in at)

    def reaches(self, folder: str) -> bool:
        """Whether it may match a key below a folder."""
        return bool(self._in(f"{folder}/"))

    def _in(self, folder: str) -> frozenset[int]:
        """How many parts of it match a folder, which ends in a slash; empty: the first one."""
        if folder != self._folder:
            self._folder, self._at = folder, self._behind({0})
            for part in folder.split("/")[:-1]:
                if self._end not in self._at:
                    self._at = self._next(self._at, part)
        return self._at

    def _next(self, at: frozenset[int], part: str) -> frozenset[int]:
        """How many parts of it match the parts of a key, with one more."""
        reached = set()
        for place in at:
            if (match := self._parts[place]) is None:
                reached.add(place)
            elif match(part):
                reached.add(place + 1)
        return self._behind(reached)

    def _behind(self, places: set[int]) -> frozenset[int]:
        """Adds the places behind what may stand for no part."""
        for place in list(places):
            while place < self._end and self._parts[place] is None:
                place += 1
                places.add(place)
        return frozenset(places)


def wrong_with(text: str) -> tuple[str, str] | None:
    """What is wrong with a pattern, and the fix; None: nothing."""
    if not text.strip("/ "):
        return "is no pattern", "Write for example train/*.tfrecord."
    if len(text.encode("utf-8", "surrogatepass")) > _LONGEST:
        return f"is longer than {_LONGEST} bytes, as no key is", "Write a shorter one."
    if text.startswith("!"):
        return "begins with !, which reverses nothing here", "Write it under exclude, without !."
    if "\\" in text:
        return "has a backslash, which takes the meaning from nothing", "Write [*] for an asterisk."
    parts = text.strip("/").split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        return "has a part that no key has", "Write it like a/b: no double slash, no dots alone."
    if any(_ANY in part and part != _ANY for part in parts):
        return "has ** beside other text", "Write ** between slashes, or one *."
    return None


@dataclass(frozen=True)
class Selection:
    """The objects that match one of ``include``, or all, without those that match ``exclude``."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @cached_property
    def _included(self) -> list[Pattern]:
        return _patterns("include", self.include)

    @cached_property
    def _excluded(self) -> list[Pattern]:
        return _patterns("exclude", self.exclude)

    def of(
        self,
        objects: Iterable[One],
        uri: str,
        warn: Callable[[str], object] = lambda said: None,
    ) -> list[One]:
        """Those of some objects, in their order.

        Args:
            objects: all that lie there.
            uri: of the place, for messages.
            warn: gets what may be a mistake: a pattern of ``exclude`` that matches none. It need
                not be one, since what is left out may come and go.

        Raises:
            SourceMissing: a pattern of ``include`` matches none, or ``exclude`` leaves none.
            StagingError: something is no pattern, which the rules of a manifest say before.
        """
        every = list(objects)
        if not every or not (self.include or self.exclude):
            return every
        taken = every
        if self.include:
            idle = set(range(len(self._included)))
            taken = [one for one in every if _match(self._included, one.key, idle)]
            if idle:
                raise SourceMissing(
                    f"{uri}: training_data_reference.include: {self._named(self.include, idle)} "
                    f"none of its {len(every):,} objects, such as {every[0].key!r}. Correct the "
                    "pattern, or upload the data."
                )
        idle = set(range(len(self._excluded)))
        out = {one.key for one in every if _match(self._excluded, one.key, idle)}
        left = [one for one in taken if one.key not in out]
        if idle:
            warn(
                f"{uri}: training_data_reference.exclude: {self._named(self.exclude, idle)} none "
                "of its objects"
            )
        if not left:
            raise SourceMissing(
                f"{uri}: training_data_reference.exclude: {', '.join(self.exclude)} leave nothing "
                f"of {len(taken):,} objects, such as {taken[0].key!r}. Correct the patterns."
            )
        return left

    def leaves_out(self, key: str) -> bool:
        """Whether an object with the key is none of it."""
        if any(one.matches(key) for one in self._excluded):
            return True
        return bool(self.include) and not any(one.matches(key) for one in self._included)

    def leaves_out_below(self, folder: str) -> bool:
        """Whether no key below a folder is of it, whichever there are."""
        if any(one.covers(folder) for one in self._excluded):
            return True
        return bool(self.include) and not any(one.reaches(folder) for one in self._included)

    @staticmethod
    def _named(patterns: tuple[str, ...], numbers: set[int]) -> str:
        named = [repr(patterns[number]) for number in sorted(numbers)]
        return f"{' and '.join(named)} {'match' if len(named) > 1 else 'matches'}"


ALL = Selection()


def _patterns(field: str, texts: Iterable[str]) -> list[Pattern]:
    try:
        return [Pattern(text) for text in texts]
    except ValueError as error:
        said = f"training_data_reference.{field}: {error}"
        raise StagingError(said, retryable=False) from error


def _match(patterns: list[Pattern], key: str, idle: set[int]) -> bool:
    """Whether one of them matches; takes those that do out of ``idle``."""
    matched = False
    for number, pattern in enumerate(patterns):
        # Whoever is still idle is asked also where another has matched.
        if (not matched or number in idle) and pattern.matches(key):
            matched = True
            idle.discard(number)
    return matched


def wrong_patterns(patterns: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """Yields the number of each pattern that is none, what is wrong with it, and the fix."""
    for number, text in enumerate(patterns):
        if (wrong := wrong_with(text)) is not None:
            yield number, *wrong
