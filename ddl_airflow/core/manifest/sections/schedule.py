"""schedule: when a training runs by itself."""

from __future__ import annotations

import functools
import re
import time
from typing import Annotated, Any
from urllib.parse import urldefrag, urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BeforeValidator, Field, SecretStr

from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering, suggestion
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.sections.definition import slug
from ddl_airflow.core.manifest.sections.places import (
    REFERENCE,
    SECRET_FIELDS,
    Connection,
    ResultsReference,
    place_of,
)
from ddl_airflow.core.manifest.values import Moment, Text, Whole, truth

PRESETS = ("@once", "@hourly", "@daily", "@weekly", "@monthly", "@quarterly", "@yearly")
RULES: list[Rule] = []
_rule = registering(RULES)

# With the DAG's id after it: the URI that is updated when the data of its trainings have changed.
DATA_CHANGE = "ddl-data-change://"
_OWN_MODEL = (
    "is this training's own model",
    "Delete it; its runs would start each other for ever.",
)


def _schedule(value: Any) -> Any:
    """``schedule: "@daily"`` is short for ``schedule: {cron: "@daily"}``."""
    return {"cron": value} if isinstance(value, str) else value


class Schedule(Section):
    """When the training runs by itself."""

    cron: Text | None = Field(
        default=None, description="Cron expression or preset.", examples=["0 3 * * 0"]
    )
    timetable: Text | None = Field(
        default=None,
        description="Class path of a timetable that a plugin of the site registers; instead of "
        "cron.",
        examples=["site_calendar.AfterWorkday"],
    )
    timezone: Text | None = Field(
        default=None,
        description="Time zone of cron and start; UTC by default.",
        examples=["Europe/Berlin"],
    )
    start: Moment | None = Field(
        default=None,
        description="Nothing is due before it; a date, or date and time.",
        examples=["2026-01-31"],
    )
    catchup: Annotated[bool, BeforeValidator(truth)] = Field(
        default=False,
        description="Whether every time since start is made up for, not only the last one.",
        examples=[True],
    )
    on_data_change: Annotated[bool, BeforeValidator(truth)] = Field(
        default=False,
        description="Whether it runs when the training data has changed.",
        examples=[True],
    )
    assets: tuple[Text, ...] = Field(
        default=(),
        description="URIs or names of assets of other DAGs; it runs once all of them were updated.",
        examples=[["s3://mnist-training-models/mnist-keras"]],
    )
    max_active_runs: Whole = Field(
        default=1,
        ge=1,
        le=16,
        description="Runs at the same time; what is due meanwhile waits.",
        examples=[1],
    )


ScheduleOrShort = Annotated[Schedule, BeforeValidator(_schedule)]


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
    own = results.store.fixed_uri(results.place) if place_of(results) else None
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
        elif own and uri == f"{own}/{slug(name)}":
            yield Finding(field, *_OWN_MODEL)
        seen.add(uri)


def assets_are_of_others(given: Schedule | None, own: str) -> Findings:
    """Yields the training's own model, where it is known what that is called.

    Args:
        given: as loaded.
        own: URI of its models, which is an asset.
    """
    for i, asset in enumerate(given.assets if given else ()):
        if urldefrag(asset).url.rstrip("/") == own:
            yield Finding(f"schedule.assets[{i}]", *_OWN_MODEL)


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
