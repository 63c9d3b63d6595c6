"""The kinds of launcher: one file each, and those of packages that the site has installed.

A file here names its class ``KIND``. A package has an entry point of the group
``ddl_airflow.launchers``: the kind's name, and where its class is. Entry points are only looked up
for a kind that has no file here: that takes tens of milliseconds, and most sites have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BeforeValidator, ConfigDict, SerializeAsAny

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, nearest, registering
from ddl_airflow.core.manifest.sections.base import ByKind
from ddl_airflow.core.manifest.sections.checkpoints import Checkpoints
from ddl_airflow.core.manifest.sections.launcher import Launcher

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "ddl_airflow.launchers"
RULES: list[Rule] = []
_rule = registering(RULES)


class _Unknown(Launcher):
    """Of a kind that nobody knows, or that is not available: what it would be asked is unknown."""

    model_config = ConfigDict(extra="ignore")
    kind_name = ""


@cache
def own_kinds() -> Mapping[str, type[Launcher]]:
    """The kinds of this package by name, in the order of their names."""
    kinds = [import_module(f"{__name__}.{one.name}").KIND for one in iter_modules(__path__)]
    return {kind.kind_name: kind for kind in kinds}


@cache
def _entry_points() -> Mapping[str, EntryPoint]:
    from importlib.metadata import entry_points  # slow, and rarely needed

    return {one.name: one for one in entry_points(group=GROUP)}


def site_kinds() -> tuple[str, ...]:
    """The names of the kinds that installed packages have."""
    return tuple(sorted(_entry_points().keys() - own_kinds().keys()))


def offered_kinds() -> tuple[str, ...]:
    """The names of this package's kinds that manifests may name."""
    own = own_kinds()
    return tuple(name for name, kind in own.items() if kind.implementation and kind.in_manifests)


def launcher_kind(name: str) -> type[Launcher] | None:
    """Returns the kind of that name, this package's or the site's; None if there is none.

    Raises:
        SubmitFailed: a package has it, and it cannot be loaded.
    """
    if name in own_kinds():
        return own_kinds()[name]
    entry = _entry_points().get(name)
    return None if entry is None else _loaded(entry)


@cache
def _loaded(entry: EntryPoint) -> type[Launcher]:
    name = entry.name
    package = entry.dist.name if entry.dist else entry.module
    try:
        kind = entry.load()
    except Exception as error:  # it is not our code: whatever it raises is said to the author
        message = f"launcher {name!r} of {package} cannot be loaded: {error}"
        raise SubmitFailed(f"{message}. Correct or remove it.", retryable=False) from error
    if not (isinstance(kind, type) and issubclass(kind, Launcher) and kind.kind_name == name):
        message = f"launcher {name!r} of {package} is no Launcher with that kind_name"
        raise SubmitFailed(f"{message}. Correct or remove it.", retryable=False)
    return kind


def _section(value: Mapping[str, Any]) -> type[Launcher]:
    name = value.get("kind", Launcher.model_fields["kind"].default)
    if not isinstance(name, str):
        return _Unknown
    try:
        kind = launcher_kind(name.strip()) or own_kinds().get(nearest(name, offered_kinds()) or "")
    except SubmitFailed:  # the rule on launcher.kind says so
        kind = None
    return kind if kind and kind.implementation else _Unknown


@cache
def _others() -> Mapping[str, str]:
    of: dict[str, list[str]] = {}
    for name in offered_kinds():
        for field in own_kinds()[name].own_fields():
            of.setdefault(field, []).append(name)
    return {field: " or ".join(kinds) for field, kinds in of.items()}


def _read(value: Any) -> Any:
    """Returns the launcher that a mapping is; before pydantic looks at it."""
    if not isinstance(value, dict):
        return value  # no section, or read already
    kind = _section(value)
    misplaced = (
        set() if kind is _Unknown else (_others().keys() & value.keys()) - kind.model_fields.keys()
    )
    launcher = kind.model_validate({n: one for n, one in value.items() if n not in misplaced})
    # One that is left empty says nothing.
    launcher._misplaced = tuple(
        name for name in value if name in misplaced and value[name] is not None
    )
    return launcher


LauncherOfKind: TypeAlias = Annotated[
    Launcher, ByKind(_section, _others), BeforeValidator(_read), SerializeAsAny()
]


def _either(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


@_rule("launcher.kind")
def launcher_is_available(at: str, kind: str) -> Findings:
    wrong, fix = "", ""
    try:
        found = launcher_kind(kind)
    except SubmitFailed as error:
        wrong = str(error).rstrip(".")
    else:
        if found is None or not found.in_manifests:
            wrong = f"{kind[:40]!r} is not known"
            planned = [name for name, one in own_kinds().items() if not one.implementation]
            fix = f" Not available yet: {', '.join(planned)}." if planned else ""
        elif not found.implementation:
            wrong = f"{kind} is not available in this release"
    if wrong:
        yield Finding(at, wrong, f"Use {_either((*offered_kinds(), *site_kinds()))}.{fix}")


@_rule("launcher")
def options_fit_their_kind(at: str, launcher: Launcher) -> Findings:
    for name in launcher._misplaced:
        message = f"is for kind {_others()[name]} only"
        fix = launcher.not_here.get(name, "Delete it, or set the kind.")
        yield Finding(f"{at}.{name}", message, fix)
    yield from launcher.findings(at)


@_rule("launcher", "model_definition.execution.compute_configuration.nodes")
def there_are_nodes(at: str, launcher: Launcher, nodes: int) -> Findings:
    yield from launcher.findings_of_nodes(at, nodes)


@_rule("launcher", "distribution")
def parameter_servers_have_a_launcher(at: str, launcher: Launcher, distribution: str) -> Findings:
    if distribution != "parameter_server" or isinstance(launcher, _Unknown):
        return
    if not launcher.can_run_parameter_servers:
        can = [name for name in offered_kinds() if own_kinds()[name].can_run_parameter_servers]
        fix = f"Set launcher.kind: {_either(can)}, or distribution: mpi."
        yield Finding(at, f"parameter_server does not run on {launcher.kind}", fix)


@_rule("launcher", "training_data_reference.stream")
def who_streams_has_a_launcher(at: str, launcher: Launcher, stream: bool) -> Findings:
    if stream and not isinstance(launcher, _Unknown) and not launcher.can_stream:
        yield Finding(at, *cannot_stream(launcher.kind))


@_rule("launcher", "checkpoints")
def who_saves_has_a_launcher(at: str, launcher: Launcher, asked: Checkpoints | None) -> Findings:
    if asked is not None and not isinstance(launcher, _Unknown) and not launcher.can_stream:
        yield Finding(f"{at}.upload_every", *cannot_save(launcher.kind))


def cannot_save(kind: str) -> tuple[str, str]:
    """What is wrong with checkpoints that go while the ranks of that kind run, and what to do."""
    can = [name for name in offered_kinds() if own_kinds()[name].can_stream]
    wrong = f"checkpoints cannot go while ranks of launcher {kind} run: no step is there meanwhile"
    fix = "its workspace is on a file system that outlives a node"
    return wrong, f"Delete it: {fix}; or set launcher.kind: {_either(can)}."


def cannot_stream(kind: str) -> tuple[str, str]:
    """What is wrong with data that come while the ranks of that kind run, and what to do."""
    can = [name for name in offered_kinds() if own_kinds()[name].can_stream]
    wrong = f"data cannot come while ranks of launcher {kind} run: no step is there meanwhile"
    return wrong, f"Delete it, or set launcher.kind: {_either(can)}."
