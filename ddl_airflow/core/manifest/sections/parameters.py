"""parameters: values that a run may change."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from ddl_airflow.core.errors import SettingInvalid
from ddl_airflow.core.manifest.document import Plain, child
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering, suggestion
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.sections.outcome import Evaluation
from ddl_airflow.core.manifest.templates import MAX_CHARACTERS
from ddl_airflow.core.manifest.values import (
    LEAST_WHOLE,
    MOST_WHOLE,
    AnyText,
    Text,
    Value,
    truth,
)
from ddl_airflow.core.parameters import check_settings, text_of

# Names in the trigger form that are ours.
RUN_SETTINGS = ("nodes", "launcher", "checkpoint", "attempts", "experiment_id", "dry_run")
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_SAME_TYPE = "Write it like the default: text in quotes, numbers without."
_WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
}
# Jinja finds these before it looks for a parameter.
_METHODS = {name for name in dir(dict) if not name.startswith("_")} | {"dump", "validate"}
_SECRET_NAME = re.compile(
    r"(.*_)?(secret|token|password|passwd|pwd|credentials?|(api|access|secret|private)_?key)"
)
_OLD_TRUTHS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
# A browser's whole numbers. Source: ECMAScript, Number.MAX_SAFE_INTEGER
_MOST_WHOLE = 2**53 - 1
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
RULES: list[Rule] = []
_rule = registering(RULES)


def _parameter(value: Any) -> Any:
    """``name: 0.1`` is short for ``name: {default: 0.1}``."""
    return value if isinstance(value, (Mapping, BaseModel)) else {"default": value}


def _secret(value: Any) -> Any:
    return (value is not None and truth(value)) or None


class Parameter(Section):
    """A value that a run may change: in the trigger form, in the command, in the environment.

    Whatever is given for a run has the type of the default. A secret one is in the environment
    only, and no run may change it: Airflow keeps what its form is given, in clear.
    """

    # None only where it is not written, as in a secret one: an empty value is a mistake.
    default: Value = Field(  # type: ignore[assignment]
        default=None, description="Without another word this is it.", examples=[0.001]
    )
    description: AnyText = Field(
        default="", description="Shown in the trigger form.", examples=["Of the optimizer"]
    )
    minimum: Value | None = Field(
        default=None, description="Least number, itself allowed.", examples=[0]
    )
    maximum: Value | None = Field(
        default=None, description="Largest number, itself allowed.", examples=[1]
    )
    choices: tuple[Value, ...] = Field(
        default=(), description="The only values there are.", examples=[["adam", "sgd"]]
    )
    secret: Annotated[
        Literal[True] | None, BeforeValidator(_secret), WithJsonSchema({"type": "boolean"})
    ] = Field(
        default=None,
        description="Whether the value is the password of an Airflow connection, which only the "
        "scripts find in their environment.",
        examples=[True],
    )
    conn_id: Text | None = Field(
        default=None,
        description="The connection of a secret one; by default that of the parameter's name.",
        examples=["hugging_face"],
    )

    @property
    def type(self) -> str:
        """``boolean``, ``integer``, ``number`` or ``string``, as JSON Schema has them.

        A whole default is a number if a bound or a choice is none.
        """
        if self.default is None:
            return "string"
        given = [self.default, *self.choices, self.minimum, self.maximum]
        if isinstance(self.default, int) and any(isinstance(one, float) for one in given):
            return "boolean" if isinstance(self.default, bool) else "number"
        return TYPES[type(self.default)]


def values_of(parameters: Mapping[str, Parameter], given: Mapping[str, str]) -> dict[str, Any]:
    """The value of each parameter that is no secret: the default, or what is given as text.

    Raises:
        SettingUnknown: there is no such parameter.
        SettingInvalid: the text is no value of the parameter's type, or one that it does not allow.
    """
    check_settings(given, parameters)
    values = {name: one.default for name, one in parameters.items() if not one.secret}
    for name, text in given.items():
        one = parameters[name]
        if one.secret:
            raise SettingInvalid(
                f"{name} is secret, and a command line is in the list of processes. Set "
                f"PARAM_{name.upper()} in the environment."
            )
        values[name] = _value(name, one, text)
    return values


def _value(name: str, one: Parameter, text: str) -> bool | int | float | str:
    kind, value = one.type, _read(one.type, text)
    if value is None:
        raise SettingInvalid(f"{name} is {ascii(text[:60])}, wanted {_WORDS[kind]}.")
    text_of(value, name)  # raises for what no script can be given
    if type(value) is int and not LEAST_WHOLE <= value <= MOST_WHOLE:
        # As a trigger form says it: a run by hand is to be one that Airflow could do.
        more = " of at most 64 bits" if kind == "integer" else "; a whole one of at most 64 bits"
        raise SettingInvalid(f"{name} is {text[:60]}, wanted {_WORDS[kind]}{more}.")
    if one.choices and value not in one.choices:
        known = " or ".join(map(text_of, one.choices))
        raise SettingInvalid(f"{name} is {ascii(text[:60])}, wanted {known}.")
    for bound, of in (("minimum", one.minimum), ("maximum", one.maximum)):
        if of is not None and _beyond(float(value), bound, float(of)):
            raise SettingInvalid(f"{name} is {text}, beyond the {bound} {of}.")
    return value


def _read(kind: str, text: str) -> bool | int | float | str | None:
    if kind == "string":
        return text
    if kind == "boolean":
        return {"true": True, "false": False}.get(text.lower())
    if re.fullmatch(r"[+-]?[0-9]{1,300}", text):
        return int(text)
    # ``float`` reads 1_0.5 as 10.5, and more that a manifest has as text.
    if kind != "number" or not _DECIMAL.fullmatch(text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


ParameterOrShort = Annotated[Parameter, BeforeValidator(_parameter)]


@_rule("parameters")
def parameters_have_usable_names(at: str, parameters: Mapping[str, Parameter]) -> Findings:
    for name in parameters:
        field = child(at, name)
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name):
            fix = "Use a letter and then a-z, 0-9 and _, at most 60, for example learning_rate."
            yield Finding(field, "cannot be the name of a parameter", fix)
        elif name in RUN_SETTINGS:
            fix = "Choose another name, for example my_" + name + "."
            yield Finding(field, "is a setting that every trigger form has", fix)
        elif name in _METHODS:
            fix = "Choose another name, for example my_" + name + "."
            yield Finding(field, f"would hide behind a method: {{{{ params.{name} }}}}", fix)


@_rule("parameters")
def parameters_keep_their_own_bounds(at: str, parameters: Mapping[str, Parameter]) -> Findings:
    for name, one in parameters.items():
        if one.secret:
            yield from _secret_findings(child(at, name), one)
        else:
            yield from _parameter_findings(child(at, name), one)


def _secret_findings(at: str, one: Parameter) -> Findings:
    for name in ("default", "minimum", "maximum", "choices"):
        if getattr(one, name) not in (None, ()):
            fix = "Delete it, and enter the value as the password of the connection."
            yield Finding(f"{at}.{name}", "is given for a secret parameter", fix)


def _parameter_findings(at: str, one: Parameter) -> Findings:
    if one.conn_id is not None:
        fix = "Add secret: true, or delete it."
        yield Finding(f"{at}.conn_id", "is given for a parameter that is no secret", fix)
    if one.default is None:
        fix = "Add default: 0.001, say; or secret: true, for the password of a connection."
        yield Finding(f"{at}.default", "is missing", fix)
        return
    kind = one.type
    wanted = {kind, "integer"} if kind == "number" else {kind}
    for i, choice in enumerate(one.choices):
        if TYPES[type(choice)] not in wanted:
            yield Finding(
                f"{at}.choices[{i}]", f"is not {_WORDS[kind]}, as the default is", _SAME_TYPE
            )
    if one.choices and one.default not in one.choices:
        shown = ", ".join(map(repr, one.choices))
        yield Finding(f"{at}.default", f"is not among the choices {shown[:200]}", "Add it there.")
    bounds = {"minimum": one.minimum, "maximum": one.maximum}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if given and one.choices:
        fix = "Keep the bounds or the choices."
        yield Finding(f"{at}.choices", "are given beside bounds", fix)
    for name, bound in given.items():
        if kind not in ("integer", "number"):
            fix = "Delete it, or give a number as default."
            yield Finding(f"{at}.{name}", f"is for numbers, and the default is {_WORDS[kind]}", fix)
        elif TYPES[type(bound)] not in wanted:
            yield Finding(f"{at}.{name}", f"is not {_WORDS[kind]}, as the default is", _SAME_TYPE)
        elif _beyond(float(one.default), name, float(bound)):
            fix = f"Choose a default that is allowed, or another {name}."
            yield Finding(f"{at}.default", f"is {one.default}, beyond the {name} {bound}", fix)


def _beyond(value: float, name: str, bound: float) -> bool:
    return value < bound if name == "minimum" else value > bound


def old_truths(written: Any) -> Findings:
    """Yields defaults that mean true or false to readers of YAML 1.1, and are text here.

    Args:
        written: the document's ``parameters``: only there it is known what has no quotes.
    """
    for name, one in written.items() if isinstance(written, Mapping) else ():
        at, given = child("parameters", name), one
        if isinstance(one, Mapping):
            if "choices" in one:
                continue
            at, given = f"{at}.default", one.get("default")
        if isinstance(given, Plain) and (truth := _OLD_TRUTHS.get(given.lower())):
            fix = f"Write {truth}; or '{given}' in quotes, if the text is meant."
            yield Finding(at, f"is the text {str(given)!r}", fix)


@_rule("parameters", warning=True)
def parameters_hold_no_secret(at: str, parameters: Mapping[str, Parameter]) -> Findings:
    for name, one in parameters.items():
        if not one.secret and one.type == "string" and _SECRET_NAME.fullmatch(name):
            message = "may hold a secret; its value is in Airflow's form and database, and in logs"
            fix = f"Write {name}: {{secret: true}}, and the value into an Airflow connection."
            yield Finding(child(at, name), message, fix)


@_rule("parameters", warning=True)
def parameters_survive_the_form(at: str, parameters: Mapping[str, Parameter]) -> Findings:
    for name, one in parameters.items():
        given = (one.default, *one.choices)
        if any(type(value) is int and abs(value) > _MOST_WHOLE for value in given):
            message = (
                "is rounded by Airflow's form: a run that a person triggers has another number"
            )
            fix = "Write it in quotes, as text."
            yield Finding(child(at, name), message, fix)


@_rule("parameters", "model_definition.execution.command")
def command_uses_known_parameters(
    at: str, parameters: Mapping[str, Parameter], command: str
) -> Findings:
    secret = {name for name, one in parameters.items() if one.secret}
    known = {*parameters, *RUN_SETTINGS}
    if len(command) > MAX_CHARACTERS:
        return  # said by another rule, if there is a template in it
    for expression in re.findall(r"\{\{.*?\}\}", command, re.DOTALL):
        for name in re.findall(r"\bparams(?:\.|\[\s*['\"])(\w+)", expression):
            if name in secret:
                message = f"{{{{ params.{name} }}}} is secret, and a command is in the process list"
                yield Finding(at, message, f"Have the script read $PARAM_{name.upper()}.")
            elif name not in known:
                message = f"{{{{ params.{name[:60]} }}}} is not among the parameters"
                yield Finding(at, message, suggestion(name, sorted(known)))


@_rule("parameters", "evaluation")
def evaluation_uses_known_parameters(
    at: str, parameters: Mapping[str, Parameter], evaluation: Evaluation | None
) -> Findings:
    if evaluation is not None and evaluation.command:
        yield from command_uses_known_parameters(f"{at}.command", parameters, evaluation.command)
