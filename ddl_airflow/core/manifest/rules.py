"""What must hold beyond the type of each field: one small function per rule.

A rule names the fields that it reads and gets their values, typed. It yields what it finds; the
loader adds the lines. Rules whose fields are sound run even when other fields are broken, so that
one look at a manifest shows everything.
"""

from __future__ import annotations

import functools
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import PurePosixPath
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import SecretStr

from ddl_airflow.core.compute import Compute
from ddl_airflow.core.layout import is_experiment
from ddl_airflow.core.manifest.document import child
from ddl_airflow.core.manifest.model import (
    REFERENCE,
    RUN_SETTINGS,
    SECRET_FIELDS,
    TYPES,
    Approval,
    Connection,
    DataReference,
    Evaluation,
    Launcher,
    Location,
    Metric,
    Notifications,
    Parameter,
    Reference,
    ResultsReference,
    Schedule,
    Steps,
    slug,
    split_commands,
)
from ddl_airflow.core.manifest.templates import OF_A_NOTIFICATION, is_template, strange_names

LAUNCHER_KINDS = ("local", "slurm")
PLANNED_LAUNCHER_KINDS = ("ssh", "kubernetes")
SLURM_FIELDS = ("partition", "account", "time_limit", "options")
# Set by ours, or what would make of one job another: several, one that waits, one that repeats.
RESERVED_OPTIONS = frozenset(
    """
    account array batch chdir clusters error export export-file get-user-env help hold input
    job-name kill-on-invalid-dep no-kill nodefile nodes no-requeue ntasks ntasks-per-node open-mode
    output parsable partition quiet requeue tasks-per-node test-only time uid usage version wait
    wrap
    """.split()
)
PRESETS = ("@once", "@hourly", "@daily", "@weekly", "@monthly", "@quarterly", "@yearly")
MAX_DAG_ID = 200
SAMPLE_ENDINGS = (".npy", ".npz", "-ubyte", "-ubyte.gz")


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


_Check = TypeVar("_Check", bound=Callable[..., Findings])


def registering(rules: list[Rule]) -> Callable[..., Callable[[_Check], _Check]]:
    """Returns the decorator that adds a check to the rules, with the fields that it reads."""

    def rule(*fields: str, warning: bool = False) -> Callable[[_Check], _Check]:
        def register(check: _Check) -> _Check:
            rules.append(Rule(fields, check, warning))
            return check

        return register

    return rule


RULES: list[Rule] = []
_rule = registering(RULES)


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Returns the known word that was probably meant."""
    import difflib  # slow to import, and rarely needed

    near = difflib.get_close_matches(given[:60], list(known), n=1)
    return near[0] if near else None


def suggestion(given: str, known: Iterable[str]) -> str:
    """Returns the fix for a word that is not among the known ones: the nearest, or all."""
    words = list(known)
    near = nearest(given, words)
    return f"Did you mean {near}?" if near else f"Known: {', '.join(words)}."


@_rule("model_definition.name")
def name_gives_a_dag_id(at: str, name: str) -> Findings:
    length = len(slug(name))
    if length == 0:
        yield Finding(at, "has no letter or digit to make a DAG id of", "Use A-Z, a-z, 0-9.")
    elif length > MAX_DAG_ID:
        yield Finding(at, f"has {length} characters, at most {MAX_DAG_ID} fit", "Shorten it.")


@_rule("model_definition.framework.version")
def version_is_known(at: str, version: str) -> Findings:
    match = re.fullmatch(r"([0-9]{1,4})(\.[0-9]+)*([-+.]?[A-Za-z][\w.+-]*)?", version)
    if match is None:
        yield Finding(at, f"is {version[:40]!r}, not a version", 'Write for example "2.21".')
    elif int(match[1]) == 0:
        fix = 'Port the script to the API of 1.x and write "1.15", or to 2.x and write "2.21".'
        yield Finding(at, f"is {version}, older than TensorFlow 1", fix)


@_rule("model_definition.execution.command")
def command_can_be_split(at: str, command: str) -> Findings:
    try:
        commands = split_commands(command)
    except ValueError as error:
        yield Finding(at, str(error), "Close it, or put \\ before a character meant as it is.")
        return
    if not commands or not all(shlex.split(one)[0] for one in commands):
        yield Finding(at, "is empty", 'Write for example "python train.py".')


def compute_rules(table: Mapping[str, Compute]) -> tuple[Rule, ...]:
    """Returns the rules that depend on which kinds of node there are."""

    def compute_is_known(at: str, launcher: Launcher, name: str) -> Findings:
        if launcher.slots is None and name not in table:
            fix = f"{suggestion(name, table)} Or set launcher.slots to the ranks per node."
            yield Finding(at, f"{name[:40]!r} is not known", fix)

    def there_are_as_many(at: str, name: str, nodes: int) -> Findings:
        there_are = table[name].nodes if name in table else None
        if there_are and nodes > there_are:
            yield Finding(at, f"is {nodes}, and this site has {there_are} of {name}", "Lower it.")

    asked = "model_definition.execution.compute_configuration"
    return (
        Rule(("launcher", f"{asked}.name"), compute_is_known, warning=False),
        Rule((f"{asked}.name", f"{asked}.nodes"), there_are_as_many, warning=False),
    )


@_rule("launcher.kind")
def launcher_is_available(at: str, kind: str) -> Findings:
    if kind in PLANNED_LAUNCHER_KINDS:
        fix = f"Use {' or '.join(LAUNCHER_KINDS)}."
        yield Finding(at, f"{kind} is not available in this release", fix)
    elif kind not in LAUNCHER_KINDS:
        known, planned = " or ".join(LAUNCHER_KINDS), ", ".join(PLANNED_LAUNCHER_KINDS)
        fix = f"Use {known}. Not available yet: {planned}."
        yield Finding(at, f"{kind[:40]!r} is not known", fix)


@_rule("launcher")
def slurm_alone_is_asked_for_more(at: str, launcher: Launcher) -> Findings:
    other = launcher.kind in LAUNCHER_KINDS and launcher.kind != "slurm"
    for name in SLURM_FIELDS:
        if other and getattr(launcher, name) is not None:
            yield Finding(f"{at}.{name}", "is for kind slurm only", "Delete it, or set the kind.")
    # What sbatch reads line by line cannot hold the end of one.
    for name in ("partition", "account"):
        if re.search(r"[^!-~]", getattr(launcher, name) or ""):
            yield Finding(f"{at}.{name}", "is no name that Slurm could have", "Correct it.")
    if launcher.time_limit is not None and not launcher.time_limit:
        yield Finding(f"{at}.time_limit", "is no time at all", "Write for example 12h.")
    for i, option in enumerate(launcher.options or ()):
        found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[ -~]*)?", option)
        if found is None:
            fix = "Write --name or --name=value, for example --qos=high."
            yield Finding(f"{at}.options[{i}]", f"{option[:40]!r} is no option of sbatch", fix)
        # sbatch takes any beginning of a name that is only one's.
        elif any(name.startswith(found[1]) for name in RESERVED_OPTIONS):
            fix = "Delete it; partition, account, time_limit and nodes have fields of their own."
            yield Finding(f"{at}.options[{i}]", f"{found[1]} cannot be set here", fix)


@_rule("launcher", "distribution")
def parameter_servers_are_local(at: str, launcher: Launcher, distribution: str) -> Findings:
    if launcher.kind == "slurm" and distribution == "parameter_server":
        fix = "Set launcher.kind: local, or distribution: mpi."
        yield Finding("distribution", "parameter_server does not run on slurm", fix)


@_rule("schedule")
def schedule_is_cron_or_preset(at: str, given: Schedule | None) -> Findings:
    if given is not None and given.cron == "@once" and (given.on_data_change or given.assets):
        with_it = "on_data_change" if given.on_data_change else "assets"
        yield Finding(f"{at}.cron", f"@once cannot go with {with_it}", "Delete one of them.")
    if given is None or given.cron is None or given.cron in PRESETS:
        return
    schedule = given.cron
    if schedule.startswith("@"):
        yield Finding(at, f"{schedule[:40]!r} is not a preset", suggestion(schedule, PRESETS))
        return
    fix = 'Write minute, hour, day, month, weekday, for example "0 3 * * 0", or a preset: @daily.'
    fields = schedule.split()
    # H and R (hashed, random) would give another schedule at each parse.
    if len(schedule) > 100 or len(fields) != 5 or any(f[0] in "hHrR" for f in fields):
        yield Finding(at, f"{schedule[:40]!r} is not a cron expression of five fields", fix)
        return
    if problem := _cron_problem(schedule):
        yield Finding(at, f"{schedule!r} {problem}", fix)


@functools.lru_cache(1000)  # thousands of manifests have some dozens of schedules
def _cron_problem(schedule: str) -> str:
    # Airflow itself reads schedules with croniter, so it is there and it is the judge.
    from croniter import CroniterBadDateError, CroniterError, croniter

    try:
        croniter(schedule, time.time()).get_next(float)
    except CroniterBadDateError:
        return "names a date that never comes"
    except CroniterError:
        return "is not a cron expression"
    return ""


@_rule("schedule")
def schedule_says_when(at: str, given: Schedule | None) -> Findings:
    if given is None:
        return
    time = given.cron or given.timetable
    if not (time or given.on_data_change or given.assets):
        # Alone it is for those who trigger several runs at once.
        if given.max_active_runs == 1 or given.timezone or given.start or given.catchup:
            yield Finding(at, "names no time", "Add cron:, assets: or on_data_change: true.")
        return
    if given.cron and given.timetable:
        yield Finding(f"{at}.timetable", "is given beside cron", "Delete one of them.")
    if given.timetable and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", given.timetable):
        fix = "Write its module and class, such as site_calendar.AfterWorkday."
        yield Finding(f"{at}.timetable", f"{given.timetable[:60]!r} is no class path", fix)
    if given.catchup and not (time and given.start):
        fix = "Add cron and start, or delete catchup: each run trains on the data as it is now."
        yield Finding(f"{at}.catchup", "needs a time and a start to count from", fix)
    if given.timezone is not None:
        yield from _timezone_findings(f"{at}.timezone", given.timezone)


def _timezone_findings(at: str, name: str) -> Findings:
    try:
        if len(name) < 100 and re.fullmatch(r"[A-Za-z][\w+-]*(/[\w+-]+)*", name, re.ASCII):
            ZoneInfo(name)
            return
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    yield Finding(
        at, f"{name[:60]!r} is not a time zone", "Write for example Europe/Berlin, or UTC."
    )


@_rule("training_results_reference", "model_definition.name", "schedule")
def schedule_waits_for_assets_of_others(
    at: str, results: ResultsReference, name: str, given: Schedule | None
) -> Findings:
    own = _place(results)
    seen: set[str] = set()
    for i, asset in enumerate(given.assets if given else ()):
        field, uri = f"{at}.assets[{i}]", asset.rstrip("/")
        fix = "Write an asset's name, or its URI such as s3://bucket/prefix."
        if len(asset) > 1500 or not asset.isascii() or not asset.isprintable():
            yield Finding(field, "is longer than 1500 characters, or not all ASCII", fix)
        elif problem := _asset_problem(asset):
            yield Finding(field, problem, fix)
        elif uri in seen:
            yield Finding(field, f"{uri[:60]!r} is there twice", "Delete one of them.")
        elif own and own[0] == "s3" and uri == "s3://" + "/".join((*own[2:], slug(name))):
            fix = "Delete it; its runs would start each other for ever."
            yield Finding(field, "is this training's own model", fix)
        seen.add(uri)


def _asset_problem(uri: str) -> str:
    if "://" not in uri:
        return ""
    try:
        url = urlsplit(uri)
    except ValueError:
        return "is not a URI"
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", url.scheme) or url.scheme == "airflow":
        return "has a scheme that no asset has"
    if "@" in url.netloc:
        return "carries more than a place"
    return "" if url.netloc or url.path else "names no place"


@_rule("experiment")
def experiment_is_a_folder_name(at: str, experiment: str | None) -> Findings:
    if experiment is not None and not is_experiment(experiment):
        fix = "Use up to 200 of A-Z, a-z, 0-9, _, dot and dash, with a letter or digit first."
        yield Finding(at, f"{experiment[:40]!r} cannot be the name of a folder", fix)


@_rule("schedule", "training_data_reference.connection")
def watched_data_has_no_literal_keys(
    at: str, schedule: Schedule | None, connection: Connection | None
) -> Findings:
    if schedule is None or not schedule.on_data_change or connection is None:
        return
    for name in SECRET_FIELDS:
        secret: SecretStr | None = getattr(connection, name)
        if secret and not REFERENCE.fullmatch(secret.get_secret_value()):
            fix = "Put the keys into an Airflow connection and write conn_id: its id."
            message = "is written out, and schedule.on_data_change would store it in the database"
            yield Finding(f"{at}.{name}", message, fix)


@_rule("metrics")
def metrics_have_one_group(at: str, metrics: tuple[Metric, ...]) -> Findings:
    fix = "Put ( ) around the number alone; write (?: ) for other groups."
    for i, metric in enumerate(metrics):
        field = f"{at}[{i}].regex"
        if len(metric.regex) > 500:
            yield Finding(field, "is longer than 500 characters", "Match less of the line.")
            continue
        try:
            groups = re.compile(metric.regex).groups
        except (re.error, OverflowError, RecursionError) as error:
            yield Finding(field, f"is not a regular expression: {error}", "Escape ( [ { + * ? .")
            continue
        if groups != 1:
            yield Finding(field, f"has {groups} groups, wanted exactly one", fix)


@_rule("metrics")
def metrics_have_unique_names(at: str, metrics: tuple[Metric, ...]) -> Findings:
    first: dict[str, int] = {}
    for i, metric in enumerate(metrics):
        field = f"{at}[{i}].name"
        if metric.name in ("t", "source"):  # keys of every progress record
            yield Finding(field, f"{metric.name} is reserved", "Choose another name.")
        elif first.setdefault(metric.name, i) != i:
            message = f"{metric.name[:40]!r} is also the name of {at}[{first[metric.name]}]"
            yield Finding(field, message, "Choose another name.")


@_rule("evaluation")
def evaluation_asks_for_something(at: str, evaluation: Evaluation | None) -> Findings:
    if evaluation is None:
        return
    low, high = evaluation.minimum, evaluation.maximum
    if low is None and high is None and not evaluation.not_worse_than_production:
        fix = "Add minimum: 0.95, maximum: or not_worse_than_production: true."
        yield Finding(at, "asks for nothing", fix)
    if low is not None and high is not None and low > high:
        yield Finding(f"{at}.minimum", f"is above the maximum {high:g}", "Swap them.")


@_rule("evaluation", "approval", "steps")
def steps_are_there_and_have_time(
    at: str, evaluation: Evaluation | None, approval: Approval, steps: Steps
) -> Findings:
    if "evaluate" in steps.model_fields_set and evaluation is None and not approval.required:
        fix = "Delete it, or add evaluation:."
        yield Finding(f"{at}.evaluate", "is for a step that this training does not have", fix)
    for name, step in steps:
        if step.timeout is not None and step.timeout <= timedelta(0):
            fix = "Write for example 12h, or delete it for no limit."
            yield Finding(f"{at}.{name}.timeout", "leaves no time at all", fix)


@_rule("approval", "notifications")
def notifications_have_a_reason_and_no_secret(
    at: str, approval: Approval, notifications: Notifications
) -> Findings:
    if notifications.on_approval and not approval.required:
        fix = "Add approval: {required: true}, or delete it."
        yield Finding(f"{at}.on_approval", "is given, and nobody is asked for approval", fix)
    for event, entries in notifications:
        for i, one in enumerate(entries):
            field = f"{at}.{event}[{i}]"
            if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", one.notifier):
                fix = "Write a mail address, or module and class of a notifier."
                message = f"{one.notifier[:60]!r} is neither a mail address nor a class path"
                yield Finding(f"{field}.notifier", message, fix)
            for name in one.arguments:
                if re.search(r"passw|secret|token|api_?key|credential|webhook_url", name, re.I):
                    fix = "Put it into an Airflow connection, and give the notifier its id."
                    yield Finding(child(f"{field}.arguments", name), "may hold a secret", fix)


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


_SAME_TYPE = "Write it like the default: text in quotes, numbers without."
_WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
}
# Jinja finds these before it looks for a parameter.
_METHODS = {name for name in dir(dict) if not name.startswith("_")} | {"dump", "validate"}


@_rule("parameters", "model_definition.execution.command")
def command_uses_known_parameters(
    at: str, parameters: Mapping[str, Parameter], command: str
) -> Findings:
    known = {*parameters, *RUN_SETTINGS}
    for expression in re.findall(r"\{\{.*?\}\}", command, re.DOTALL):
        for name in re.findall(r"\bparams(?:\.|\[\s*['\"])(\w+)", expression):
            if name not in known:
                message = f"{{{{ params.{name[:60]} }}}} is not among the parameters"
                yield Finding(at, message, suggestion(name, sorted(known)))


@_rule("model_definition.execution.command")
def command_names_what_templates_may(at: str, command: str) -> Findings:
    yield from _template_findings(at, command)


@_rule("evaluation")
def evaluation_names_what_templates_may(at: str, evaluation: Evaluation | None) -> Findings:
    if evaluation is not None and evaluation.command:
        yield from _template_findings(f"{at}.command", evaluation.command)


@_rule("notifications")
def notifications_name_what_templates_may(at: str, notifications: Notifications) -> Findings:
    for event, entries in notifications:
        for i, one in enumerate(entries):
            for name, value in one.arguments.items():
                field = child(f"{at}.{event}[{i}].arguments", name)
                for text in value if isinstance(value, tuple) else (value,):
                    if isinstance(text, str):
                        yield from _template_findings(field, text, OF_A_NOTIFICATION)


def _template_findings(
    at: str, text: str, also: frozenset[tuple[str, str]] = frozenset()
) -> Findings:
    if is_template(text):
        for message, fix in strange_names(text, also):
            yield Finding(at, message, fix)


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
    data, results = _place(source), _place(target)
    if data is None or results is None or results[: len(data)] != data:
        return
    where = "are the same place as" if results == data else "lie inside"
    fix = "Give the results a place of their own: what is written there would become data."
    yield Finding(f"{at}.target", f"the results {where} the training data", fix)


def _place(reference: Reference) -> tuple[str, ...] | None:
    """Returns store, bucket and folders, so that a place inside another starts with it."""
    location, connection = reference.place, reference.connection
    if reference.type == "fs":
        return ("fs", *PurePosixPath(location.path).parts) if location.path else None
    if location.bucket is None or connection is None:
        return None
    store = connection.conn_id or (connection.endpoint_url or "").lower().rstrip("/")
    return ("s3", store, location.bucket, *filter(None, location.prefix.split("/")))


@_rule("transform.sample")
def sample_is_a_readable_file(at: str, sample: str | None) -> Findings:
    if sample is None:
        return
    if _leaves_its_folder(sample):
        yield Finding(at, "is not a file inside DATA_DIR", "Write its name relative to DATA_DIR.")
    elif not sample.endswith(SAMPLE_ENDINGS):
        fix = f"Use a file that ends in {', '.join(SAMPLE_ENDINGS)}."
        yield Finding(at, f"{sample[:70]!r} has no format that can be read", fix)


@_rule("code")
def code_is_beside_the_manifest(at: str, code: str) -> Findings:
    if _leaves_its_folder(code):
        fix = "Write a folder beside or below the manifest, such as ./src."
        yield Finding(at, "is outside the manifest's folder", fix)


def _leaves_its_folder(path: str) -> bool:
    return path.startswith(("/", "~")) or ".." in PurePosixPath(path).parts


@_rule("training_data_reference.connection", warning=True)
@_rule("training_results_reference.connection", warning=True)
def keys_are_not_literal(at: str, connection: Connection | None) -> Findings:
    for name in SECRET_FIELDS:
        secret: SecretStr | None = getattr(connection, name, None)
        if secret and not REFERENCE.fullmatch(secret.get_secret_value()):
            fix = "Put the keys into an Airflow connection and write conn_id: its id."
            yield Finding(f"{at}.{name}", "a key is written out in the manifest", fix)
            return
