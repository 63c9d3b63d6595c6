"""Kinds of values in a manifest: what a scalar, kept as text by the document, means in a field."""

from __future__ import annotations

import math
import re
import warnings
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    Strict,
    WithJsonSchema,
)

from ddl_airflow.core.manifest.document import Block, Plain
from ddl_airflow.core.units import parse_duration

_TRUTHS = ("true", "True", "TRUE", "false", "False", "FALSE")
_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
# Such as a seed. What Airflow's processes say to each other has no other whole numbers.
LEAST_WHOLE, MOST_WHOLE = -(2**63), 2**64 - 1
# Which one a run may choose.
CHECKPOINT = "(latest|0|[1-9][0-9]*)"
_NO_NUMBER = re.compile(r"[+-]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MOMENT = "[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2})?)?"


# NAME=value and --name=value of a secret in a command; what a shell or a template puts in is none.
_WRITTEN_SECRET = re.compile(
    r"((?:secret|token|password|passwd|pwd|credentials?|(?:api|access|secret)[_-]?key)"
    r"(?:[_-]?id)?=[\"']?)"
    r"(?![\s$\"'{]|\Z)[^\s\"';]+",
    re.IGNORECASE,
)
# What stands before the = then, in small ASCII letters.
_SECRET_ENDS = tuple(
    f"{name}{more}"
    for name in ("secret", "token", "password", "passwd", "pwd", "credential", "credentials", "key")
    for more in ("", "id", "_id", "-id")
)


class Unusable(ValueError):
    """A value for which there is something better to write than the field's example.

    Args:
        message: what is wrong with it.
        fix: what to write instead; a sentence with its full stop.
    """

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


_IN_QUOTES = "Write it in quotes, if the text is meant."
_TOO_LONG = "Write it in quotes, as text; or with an exponent, such as 1e20, if it may be rounded."


def _may_have_written_secret(text: str) -> bool:
    """Whether the search, which tries twelve words at each character, could find one."""
    if not text.isascii():
        return True  # to a search without regard to case, K is also the sign of Kelvin
    before = text.lower().split("=")
    before.pop()
    return any(piece.endswith(_SECRET_ENDS) for piece in before)


def has_written_secret(text: str) -> bool:
    """Returns whether a secret's value is written out in a command, or in a text with commands."""
    return _may_have_written_secret(text) and _WRITTEN_SECRET.search(text) is not None


def without_written_secrets(text: str) -> str:
    """Returns the text with ``***`` for each such value."""
    return _WRITTEN_SECRET.sub(r"\1***", text) if _may_have_written_secret(text) else text


def regex(text: str) -> re.Pattern[str]:
    """Returns a regular expression as Python reads it.

    Raises:
        ValueError: it does not, or says that it will read it otherwise one day.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of a set such as [a--b]
        try:
            return re.compile(text)
        except (re.error, OverflowError, RecursionError, FutureWarning) as error:
            raise ValueError(f"is not a regular expression: {error}") from None


def _tidy(value: Any) -> Any:
    """Text without surrounding space: a block scalar brings a newline that nobody meant."""
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("has a NUL character")
        return value.strip()
    return value


def _unquoted_whole(value: Any) -> Any:
    if isinstance(value, Plain) and re.fullmatch(r"[+-]?(0|[1-9][0-9]{0,17})", value):
        return int(value)
    return value


def _duration(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise ValueError("is not a duration")
    return parse_duration(value)


def _moment(value: Any) -> datetime:
    if isinstance(value, str) and re.fullmatch(_MOMENT, value.strip()):
        value = datetime.fromisoformat(value.strip())
    if not isinstance(value, datetime):
        raise ValueError("is not a date such as 2026-01-31 or 2026-01-31T03:00")
    if not 2000 <= value.year < 2100:
        raise ValueError("is not in the years from 2000 to 2099")
    return value


def _checkpoint(value: Any) -> int | str:
    step = _unquoted_whole(value)
    if step == "latest" or (type(step) is int and step >= 0):
        return str(step) if isinstance(step, str) else step
    raise ValueError("is neither latest nor a step, from 0")


def _value(value: Any) -> bool | int | float | str:
    """What a scalar means where its type is open: only an unquoted one may be no text."""
    if isinstance(value, Plain):
        if value in _TRUTHS:  # as in YAML 1.2
            return value.lower() == "true"
        if _NO_NUMBER.fullmatch(value):
            raise Unusable(f"is {value}, which no run can be given as a number", _IN_QUOTES)
        short = _unquoted_whole(value)
        if not isinstance(short, Plain):
            return int(short)
        if _NUMBER.fullmatch(value[:400]):
            number = float(value)
            if math.isinf(number):
                raise ValueError("is no number that a computer can hold")
            if re.fullmatch("[+-]?[0-9]+", value):
                if not LEAST_WHOLE <= int(value) <= MOST_WHOLE:
                    message = f"is {value[:40]}, a whole number of more than 64 bits"
                    raise Unusable(message, _TOO_LONG)
                if int(number) != int(value):
                    return int(value)
            return number
    if isinstance(value, str):
        tidy: str = _tidy(value)
        return tidy if isinstance(value, (Plain, Block)) else value
    if isinstance(value, (bool, int, float)):
        return value
    raise ValueError("is neither a number, true or false, nor text")


def _argument(value: Any) -> Any:
    return tuple(map(_value, value)) if isinstance(value, (list, tuple)) else _value(value)


def number(value: Any) -> Any:
    """Validates a number; ValueError for anything else."""
    number = value
    if isinstance(value, Plain):
        try:
            number = _value(value)
        except Unusable:  # where a fraction is wanted it is the one that is nearest
            number = float(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError("is not a number")
    return number


def truth(value: Any) -> Any:
    """Validates true or false; ValueError for anything else."""
    truth = _value(value) if isinstance(value, Plain) else value
    if not isinstance(truth, bool):
        raise ValueError("is neither true nor false")
    return truth


AnyText = Annotated[str, BeforeValidator(_tidy)]
Text = Annotated[str, BeforeValidator(_tidy), Field(min_length=1)]
Secret = Annotated[SecretStr, BeforeValidator(_tidy), Field(min_length=1)]
AnySecret = Annotated[SecretStr, BeforeValidator(_tidy)]
Whole = Annotated[int, Strict(), BeforeValidator(_unquoted_whole)]
Duration = Annotated[
    timedelta,
    PlainValidator(_duration),
    PlainSerializer(lambda value: value.total_seconds()),
    WithJsonSchema({"type": "string", "pattern": "^ *[0-9.]+ ?[a-z]+ *$"}),
]
Moment = Annotated[
    datetime,
    PlainValidator(_moment),
    PlainSerializer(datetime.isoformat),
    WithJsonSchema({"type": "string", "pattern": f"^ *{_MOMENT} *$"}),
]
Checkpoint = Annotated[
    int | str,
    PlainValidator(_checkpoint),
    WithJsonSchema({"anyOf": [{"const": "latest"}, {"type": "integer", "minimum": 0}]}),
]
Value = Annotated[
    bool | int | float | str,
    PlainValidator(_value),
    WithJsonSchema({"type": ["boolean", "number", "string"]}),
]
Argument = Annotated[
    bool | int | float | str | tuple[bool | int | float | str, ...],
    PlainValidator(_argument),
    WithJsonSchema({"type": ["boolean", "number", "string", "array"]}),
]
Prefix = Annotated[str, BeforeValidator(_tidy), AfterValidator(lambda text: text.rstrip("/"))]
