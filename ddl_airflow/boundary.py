"""The one place where our errors become Airflow's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from ddl_airflow.core.errors import DdlError


@contextmanager
def airflow_errors(attempts_left: bool = True) -> Iterator[None]:
    """Raises what Airflow understands.

    Airflow logs them with all that led to them. So what they say is not said once more as their
    cause; what caused ours is.

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
        if error.retryable and not attempts_left:
            raise AirflowFailException(
                f"{kind}: {error} (Not retried: this run was given no more attempts.)"
            ) from error.__cause__
        if error.retryable:
            raise AirflowException(f"{kind}: {error}") from error.__cause__
        raise AirflowFailException(
            f"{kind}: {error} (Not retried: the same again would fail the same way.)"
        ) from error.__cause__
