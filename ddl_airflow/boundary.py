"""The one place where our errors become Airflow's."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from ddl_airflow.core.errors import DdlError

_log = logging.getLogger(__name__)


@contextmanager
def airflow_errors(attempts_left: bool = True) -> Iterator[None]:
    """Raises what Airflow understands.

    Airflow logs an error first, and what it was raised from after it: the last words of a log would
    be those of a library. So what caused ours is logged before, and ours is raised from nothing.

    Args:
        attempts_left: whether this run may try again.

    Raises:
        AirflowFailException: a DdlError that trying again cannot mend, or that came in the last
            attempt; the task fails at once.
        AirflowException: any other DdlError; the task's retries apply.
    """
    try:
        yield
    except DdlError as error:
        kind = type(error).__name__
        _log_cause(error)
        if error.retryable and not attempts_left:
            raise AirflowFailException(
                f"{kind}: {error} (Not retried: this run was given no more attempts.)"
            ) from None
        if error.retryable:
            raise AirflowException(f"{kind}: {error}") from None
        raise AirflowFailException(
            f"{kind}: {error} (Not retried: the same again would fail the same way.)"
        ) from None


def _log_cause(error: DdlError) -> None:
    if error.__cause__ is None:
        return
    # Line by line: Airflow masks secrets in texts.
    _log.error("::group::what caused %s", type(error).__name__)
    for line in "".join(traceback.format_exception(error.__cause__)).splitlines():
        _log.error("%s", line)
    _log.error("::endgroup::")
