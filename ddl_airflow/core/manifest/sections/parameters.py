"""parameters: values that a run may change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from ddl_airflow.core.manifest.document import child
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering, suggestion
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.templates import MAX_CHARACTERS
from ddl_airflow.core.manifest.values import AnyText, Value

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
RULES: list[Rule] = []
_rule = registering(RULES)


def _parameter(value: Any) -> Any:
    """``name: 0.1`` is short for ``name: {default: 0.1}``."""
    return value if isinstance(value, (Mapping, BaseModel)) else {"default": value}


class Parameter(Section):
    """A value that a run may change: in the trigger form, in the command, in the environment.

    Whatever is given for a run has the type of the default.
    """

    default: Value = Field(description="Without another word this is it.", examples=[0.001])
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

    @property
    def type(self) -> str:
        """``boolean``, ``integer``, ``number`` or ``string``, as JSON Schema has them.

        A whole default is a number if a bound or a choice is none.
        """
        given = [self.default, *self.choices, self.minimum, self.maximum]
        if isinstance(self.default, int) and any(isinstance(one, float) for one in given):
            return "boolean" if isinstance(self.default, bool) else "number"
        return TYPES[type(self.default)]


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
        yield from _parameter_findings(child(at, name), one)


def _parameter_findings(at: str, one: Parameter) -> Findings:
    kind = one.type
    wanted = {kind, "integer"} if kind == "number" else {kind}
    for i, choice in enumerate(one.choices):
        if TYPES[type(choice)] not in wanted:
            yield Finding(
                f"{at}.choices[{i}]", f"is not {_WORDS[kind]}, as the default is", _SAME_TYPE
            )
    if one.choices and one.default not in one.choices:
        yield Finding(f"{at}.default", "is not among the choices", "Add it there.")
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


@_rule("parameters", "model_definition.execution.command")
def command_uses_known_parameters(
    at: str, parameters: Mapping[str, Parameter], command: str
) -> Findings:
    known = {*parameters, *RUN_SETTINGS}
    if len(command) > MAX_CHARACTERS:
        return  # said by another rule, if there is a template in it
    for expression in re.findall(r"\{\{.*?\}\}", command, re.DOTALL):
        for name in re.findall(r"\bparams(?:\.|\[\s*['\"])(\w+)", expression):
            if name not in known:
                message = f"{{{{ params.{name[:60]} }}}} is not among the parameters"
                yield Finding(at, message, suggestion(name, sorted(known)))
