"""YAML text -> plain values, with the line of every field. Knows YAML, not manifests.

Reads less than YAML allows, on purpose: one document, text keys, no tags but the scalar ones, and
every scalar stays the text that was written, so that ``version: 2.10`` is not 2.1 and
``access_key_id: 0123`` keeps its zero. The field decides what the text means.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import yaml
import yaml.reader
from yaml import (
    DocumentStartEvent,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from ddl_airflow.core.errors import ManifestIssue, ManifestSyntaxError

# A manifest is about 2 kB, 50 values, 5 levels. The limits stop YAML bombs before they cost.
MAX_BYTES = 256 * 1024
MAX_VALUES = 5_000
MAX_DEPTH = 20

_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FIXED_WORDS = _LOADER is not yaml.SafeLoader
_TAG = "tag:yaml.org,2002:"
_NULL = ("", "~", "null", "Null", "NULL")
_BLOCKS = ("|", ">")
_NEWLINE = re.compile(r"\r\n|[\r\n]")


class Plain(str):
    """A scalar written without quotes, so it may also be meant as a number."""


class Block(str):
    """A scalar written as a block, after ``|`` or ``>``: it ends in a newline that nobody meant."""


class Scalar(NamedTuple):
    """A value at characters [start, end) of the text."""

    value: str | None
    line: int
    start: int
    end: int
    anchor: str | None


class Listing(NamedTuple):
    items: list[Node]
    line: int


class Table(NamedTuple):
    pairs: list[tuple[Scalar, Node]]
    line: int


Node: TypeAlias = "Scalar | Listing | Table"


class Lines(dict[str, int]):
    """Dotted path (``metrics[0].name``; "" for the whole) -> line, from 1."""

    def of(self, path: str) -> int:
        """Returns the line of the field, or of the nearest parent that was written."""
        while path and path not in self:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.get(path, 1)


@dataclass
class Document:
    """What a YAML text says.

    Attributes:
        value: None, text, list or dict, nested; text is Plain where it was not quoted, or Block.
        lines: where each field is.
        issues: fields that are given twice.
    """

    value: Any = field(default=None, repr=False)
    lines: Lines = field(default_factory=Lines)
    issues: list[ManifestIssue] = field(default_factory=list)


def child(path: str, key: str | int) -> str:
    """Returns the dotted path of a field or of a list item, always short and in one line."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    name = key if key.isprintable() and len(key) <= 60 else ascii(key[:60])
    return f"{path}.{name}" if path else name


def decode(text: str | bytes, source: str) -> str:
    """Returns the text without byte order mark.

    Raises:
        ManifestSyntaxError: too large, not UTF-8, or with characters that YAML forbids.
    """
    if len(text) > MAX_BYTES:
        message = f"is larger than {MAX_BYTES // 1024} KiB"
        raise _refusal(source, 0, message, "Keep the manifest small; put code and tables in files")
    try:
        # A str may hold surrogates, from a file that was read with surrogateescape.
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        text = raw.decode("utf-8")
    except UnicodeError as error:
        start = error.start if isinstance(error, UnicodeDecodeError) else 0
        line = raw.count(b"\n", 0, start) + 1 if start else 0
        raise _refusal(source, line, "is not UTF-8", "Save the file as UTF-8") from None
    text = text.removeprefix("\ufeff")
    if odd := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, odd.start()) + 1
        message = f"has the character U+{ord(odd.group()):04X}, which YAML forbids"
        raise _refusal(source, line, message, "Delete it, or save the file again as UTF-8")
    return text


def read_document(text: str, source: str) -> Document:
    """Returns the values of decoded text, with their lines.

    Raises:
        ManifestSyntaxError: not the YAML described at the top of this module.
    """
    if (plain := _read_plainly(text)) is not None:
        return plain
    document, budget = Document(), MAX_VALUES

    def walk(node: Node, path: str) -> Any:
        # An alias brings the same node again, so what counts is visits, not nodes.
        nonlocal budget
        budget -= 1
        if budget < 0:
            message = f"has more than {MAX_VALUES} values once its aliases are expanded"
            raise _refusal(source, node.line, message, "Write fewer values")
        document.lines.setdefault(path, node.line)
        if isinstance(node, Scalar):
            return node.value
        if isinstance(node, Listing):
            return [walk(item, child(path, i)) for i, item in enumerate(node.items)]
        table: dict[str, Any] = {}
        for key, item in node.pairs:
            name = key.value or ""
            at = child(path, name)
            if name in table:
                message = f"is given twice, first in line {document.lines[at]}"
                document.issues.append(ManifestIssue(key.line, at, message, "Keep one of the two."))
                continue
            document.lines[at] = key.line
            table[name] = walk(item, at)
        return table

    document.value = walk(_compose(text, source), "")
    return document


class _NotPlain(Exception):
    """There is something in the text that ``_read_plainly`` does not read."""


def _read_plainly(text: str) -> Document | None:
    """Returns what most manifests say, read in one go; None for a text with more to it.

    More are anchors, tags, names given twice, all that is refused, and no text at all. It is twice
    as fast as making a tree first; what is said of such a text, the tree tells.
    """
    lines, left = Lines(), MAX_VALUES
    loader = _LOADER(text)
    next_event = loader.get_event

    def read(event: Any, path: str, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth == 0 or event.anchor is not None or event.tag is not None:
            raise _NotPlain
        if path not in lines:
            lines[path] = event.start_mark.line + 1
        if isinstance(event, ScalarEvent):
            return scalar(event)
        if isinstance(event, SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := next_event(), SequenceEndEvent):
                items.append(read(event, f"{path}[{len(items)}]", depth - 1))
            return items
        table: dict[str, Any] = {}
        while not isinstance(event := next_event(), MappingEndEvent):
            if not isinstance(event, ScalarEvent) or event.anchor or event.tag is not None:
                raise _NotPlain
            name = scalar(event) or ""
            if name in table:
                raise _NotPlain
            at = child(path, name)
            started: Any = event.start_mark
            lines[at] = started.line + 1
            table[name] = read(next_event(), at, depth - 1)
        return table

    def scalar(event: Any) -> str | None:
        value: str = event.value
        if event.implicit[0]:
            return None if value in _NULL else Plain(value)
        return Block(value) if event.style in _BLOCKS else value

    try:
        next_event()  # stream start
        if not isinstance(next_event(), DocumentStartEvent):
            return None
        value = read(next_event(), "", MAX_DEPTH)
        next_event()  # document end
        return Document(value, lines) if isinstance(next_event(), StreamEndEvent) else None
    except (_NotPlain, yaml.YAMLError):
        return None
    finally:
        loader.dispose()


def mask_fields(text: str, source: str, names: Collection[str], keep: re.Pattern[str]) -> str:
    """Returns the text with ``'***'`` in place of every value of the named fields.

    Works on the marks of the parsed values, so quotes, blocks and aliases are all covered. Line
    numbers stay as they are, and the result is YAML again.

    Args:
        names: fields, wherever they are; what is nested in them is masked too.
        keep: values that match as a whole stay.

    Raises:
        ManifestSyntaxError: as read_document.
    """
    hidden: dict[int, Scalar] = {}
    visited: set[tuple[int, bool]] = set()  # an alias may bring one node a million times

    def walk(node: Node, secret: bool) -> None:
        if (id(node), secret) in visited:
            return
        visited.add((id(node), secret))
        if isinstance(node, Scalar):
            if secret and node.value and not keep.fullmatch(node.value):
                hidden[node.start] = node
        elif isinstance(node, Listing):
            for item in node.items:
                walk(item, secret)
        else:
            for key, item in node.pairs:
                walk(item, secret or key.value in names)

    walk(_compose(text, source), False)
    pieces, done = [], 0
    for start in sorted(hidden):
        scalar = hidden[start]
        breaks = "".join(_NEWLINE.findall(text, start, scalar.end))
        anchor = f"&{scalar.anchor} " if scalar.anchor else ""
        pieces += [text[done:start], f"{anchor}'***'{breaks}"]
        done = scalar.end
    return "".join([*pieces, text[done:]])


def _compose(text: str, source: str) -> Node:
    """Returns the only document in the text as a tree; an alias is its anchor's node itself.

    Goes from parser events and not ``yaml.compose``, which recurses as deep as the text tells it.
    """
    loader = _LOADER(text)
    try:
        events = iter(loader.get_event, None)
        next(events)  # stream start
        if isinstance(next(events), StreamEndEvent):
            return Scalar(None, 1, 0, 0, None)
        tree = _Tree(events, source).node(next(events), MAX_DEPTH)
        next(events)  # document end
        if not isinstance(following := next(events), StreamEndEvent):
            line = following.start_mark.line + 1
            fix = "Write one manifest per file; delete the `---` in between"
            raise _refusal(source, line, "a second document starts here", fix)
        return tree
    except yaml.MarkedYAMLError as error:
        raise _syntax_refusal(error, text, source) from None
    finally:
        loader.dispose()


@dataclass
class _Tree:
    events: Iterator[Any]
    source: str
    anchors: dict[str, tuple[Node, int]] = field(default_factory=dict)  # with the levels of each
    budget: int = 2 * MAX_VALUES  # keys count as well here
    levels: int = 0  # of the node that was read last

    def node(self, event: Any, depth: int) -> Node:
        node: Node
        line = event.start_mark.line + 1
        self.budget -= 1
        if self.budget < 0:
            raise _refusal(
                self.source, line, f"has more than {MAX_VALUES} values", "Write fewer values"
            )
        if depth == 0:
            raise self._too_deep(line)
        if isinstance(event, yaml.AliasEvent):
            # An anchor counts once its node is complete: no node can contain itself.
            if event.anchor not in self.anchors:
                fix = "Define it above with `&`, or put the value in quotes if it starts with `*`"
                raise _refusal(self.source, line, "an alias refers to no anchor above", fix)
            node, self.levels = self.anchors[event.anchor]
            if self.levels > depth:  # of aliases in aliases, a few lines are a thousand levels
                raise self._too_deep(line)
            return node
        levels = 0
        if isinstance(event, ScalarEvent):
            node = self._scalar(event, line)
        elif isinstance(event, SequenceStartEvent):
            self._only_tag(event, line, "seq")
            items = []
            for item in self._until_end():
                items.append(self.node(item, depth - 1))
                levels = max(levels, self.levels)
            node = Listing(items, line)
        else:
            self._only_tag(event, line, "map")
            pairs = []
            for key in self._until_end():
                pairs.append(self._pair(key, depth - 1))
                levels = max(levels, self.levels)
            node = Table(pairs, line)
        self.levels = levels + 1
        if event.anchor:
            self.anchors[event.anchor] = node, self.levels
        return node

    def _until_end(self) -> Iterator[Any]:
        while not isinstance(event := next(self.events), yaml.CollectionEndEvent):
            yield event

    def _too_deep(self, line: int) -> ManifestSyntaxError:
        message = f"is nested more than {MAX_DEPTH} levels deep"
        return _refusal(self.source, line, message, "Close the brackets, or indent less")

    def _pair(self, event: Any, depth: int) -> tuple[Scalar, Node]:
        key = self.node(event, depth)
        if not isinstance(key, Scalar):
            fix = "Write `name: value`; put text that starts with [ or { in quotes"
            raise _refusal(self.source, key.line, "the name of a field is not text", fix)
        return key, self.node(next(self.events), depth)

    def _scalar(self, event: Any, line: int) -> Scalar:
        plain = event.implicit[0]
        if event.tag not in (None, "!", _TAG + "str"):
            self._only_tag(event, line, "int", "float", "bool", "null")
            plain = True
        value = None if plain and event.value in _NULL else event.value
        if value is not None and plain:
            value = Plain(value)
        elif value is not None and event.style in _BLOCKS:
            value = Block(value)
        return Scalar(value, line, event.start_mark.index, event.end_mark.index, event.anchor)

    def _only_tag(self, event: Any, line: int, *kinds: str) -> None:
        if event.tag not in (None, "!", *(_TAG + kind for kind in kinds)):
            fix = "Delete the tag; put text that starts with `!` in quotes"
            raise _refusal(self.source, line, "a YAML tag is not allowed here", fix)


def _refusal(source: str, line: int, message: str, fix: str) -> ManifestSyntaxError:
    return ManifestSyntaxError(source, [ManifestIssue(line, "", message, f"{fix}.")])


_FIXES = (
    (
        "mapping values are not allowed",
        "Write `name: value`, with colon and space, also in the line above; indent a level alike; "
        "quote text with `: `",
    ),
    ("cannot start any token", "Put the value in quotes"),
    ("undefined tag handle", "Put text that starts with `!` in quotes"),
    ("end of stream", "Close the quotes or brackets opened above"),
    ("expected ',' or", "Close the brackets opened above"),
)


def _syntax_refusal(error: yaml.MarkedYAMLError, text: str, source: str) -> ManifestSyntaxError:
    mark = error.problem_mark or error.context_mark
    before = _NEWLINE.split(text[: mark.index + 1])[-1] if mark else ""
    line = mark.line + 1 if mark else 0
    if "\t" in before and not before.strip():
        return _refusal(source, line, "a tab is used to indent", "Indent with spaces")
    # libyaml has fixed words; the pure Python parser may quote the text, which may be a secret.
    problem = (error.problem if _FIXED_WORDS else None) or "something unexpected is written here"
    fix = next((fix for words, fix in _FIXES if words in problem), "Check quotes and indentation")
    return _refusal(source, line, f"is not YAML: {problem}", fix)
