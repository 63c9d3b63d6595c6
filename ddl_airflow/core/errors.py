"""Every error that the product raises on purpose, in one tree.

::

    DdlError
    ├── ManifestError            the manifest, with every issue found in it
    │   ├── ManifestSyntaxError  not YAML, or not text
    │   └── ManifestInvalid      YAML, but not a manifest
    ├── StagingError             objects in or out
    │   ├── SourceMissing        no such bucket, key or folder          permanent
    │   ├── ObjectArchived       only restoring it makes it readable    permanent
    │   ├── AccessDenied         wrong keys, or keys without the right  permanent
    │   ├── ConnectionInvalid    endpoint or credentials not usable     permanent
    │   ├── TransferCorrupt      bytes that arrived are not those listed
    │   │   └── FileChanged      somebody writes to a file that is being published
    │   ├── FileRefused          a link, or the like, that a training left  permanent
    │   ├── PlaceTaken           another training works there
    │   └── NoSpace              the disk or the store is full
    ├── LaunchError              starting and watching ranks
    │   ├── CommandInvalid       command or script does not exist       permanent
    │   ├── SubmitFailed         the launcher could not start anything
    │   ├── JobFailed            a rank failed
    │   ├── TrainedApart         all ended well, and averaged nothing   permanent
    │   ├── TrainedOnPart        all ended well, before all data came   permanent
    │   └── JobLost              nobody knows how the ranks ended
    │       └── JobPreempted     they had to make room
    ├── EvaluationError          the model against what is asked of it
    │   ├── EvaluationInvalid    nobody measured what may decide        permanent
    │   └── QualityTooLow        measured, and not good enough          permanent
    ├── NoSuchModel              to be put into production              permanent
    ├── TimedOut                 a step took longer than it may
    ├── SettingUnknown           a run was given what its form has not  permanent
    ├── SettingInvalid           a run was given an unusable value      permanent
    └── TransformError           checkpoint to SavedModel
        ├── CheckpointMissing    no checkpoint, or not at that step     permanent
        └── ModelRejected        written, reloaded, and does not predict

``retryable`` says whether trying again, with nothing changed by a person, can help. The Airflow
layer (``ddl_airflow.boundary``) turns it into "fail at once" or "retry with backoff".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class DdlError(Exception):
    """Base of all. ``retryable`` is a class default that an instance may override."""

    retryable: bool = False

    def __init__(self, message: str, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        if retryable is not None:
            self.retryable = retryable


@dataclass(frozen=True, order=True)
class ManifestIssue:
    """One thing wrong in a manifest.

    Attributes:
        line: line in the file, from 1; 0 when the whole file is meant.
        field: dotted path of the field, e.g. ``training_data_reference.source.bucket``.
        message: what is wrong.
        fix: what to write instead; a sentence with its full stop.
    """

    line: int
    field: str
    message: str
    fix: str

    def render(self, source: str) -> str:
        """``file:line: field: message. fix``: one line, clickable in most terminals."""
        where = f"{source}:{self.line}" if self.line else source
        field = f"{self.field}: " if self.field else ""
        return f"{where}: {field}{self.message}. {self.fix}"


class ManifestError(DdlError):
    """A manifest that cannot become a DAG.

    Attributes:
        source: the file as the reader named it.
        issues: everything that is wrong, in line order.
    """

    def __init__(self, source: str, issues: Sequence[ManifestIssue]) -> None:
        self.source = source
        self.issues = tuple(sorted(issues))
        super().__init__("\n".join(issue.render(source) for issue in self.issues))


class ManifestSyntaxError(ManifestError):
    """Not YAML, or not text at all."""


class ManifestInvalid(ManifestError):
    """YAML, but with unknown, missing or wrong fields."""


class StagingError(DdlError):
    """Objects could not be brought in or out."""

    retryable = True


class SourceMissing(StagingError):
    """No such bucket, key or folder. What went since it was listed may be tried again."""

    retryable = False


class ObjectArchived(StagingError):
    """The object is in an archive, out of which somebody must restore it before it can be read."""

    retryable = False


class AccessDenied(StagingError):
    """The store refuses the keys, or the keys lack the right."""

    retryable = False


class ConnectionInvalid(StagingError):
    """The endpoint or the credentials cannot be used as they are written.

    That cannot pass; what may is that Airflow does not tell them.
    """

    retryable = False


class TransferCorrupt(StagingError):
    """The bytes that arrived are not the bytes that were listed."""


class FileChanged(TransferCorrupt):
    """A file is not what it was when its digest was made: somebody still writes to it."""


class NoSpace(StagingError):
    """The disk, or the store, is full."""


class FileRefused(StagingError):
    """What a training left where a file of its own should be is not opened."""

    retryable = False


class PlaceTaken(StagingError):
    """Another training works where one was to begin.

    Attributes:
        holder: which, and on which host.
    """

    def __init__(self, message: str, *, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class LaunchError(DdlError):
    """Ranks could not be started or watched."""

    retryable = True


class CommandInvalid(LaunchError):
    """The command or the script does not exist, or is not valid code."""

    retryable = False


class SubmitFailed(LaunchError):
    """The launcher could not start anything.

    Attributes:
        refused: whether the scheduler said so; else it may have the job, and its answer was lost.
    """

    def __init__(
        self, message: str, *, retryable: bool | None = None, refused: bool = False
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.refused = refused or self.retryable is False


class JobFailed(LaunchError):
    """A rank failed.

    Attributes:
        rank: the first rank that failed, None when no rank can be blamed.
        host: where it ran.
        exit_code: as a shell would show it; 128 + signal for a signal.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str = "",
        exit_code: int | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.rank = rank
        self.host = host
        self.exit_code = exit_code


class TrainedApart(LaunchError):
    """All ranks ended well, and each trained a model of its own."""

    retryable = False


class TrainedOnPart(LaunchError):
    """All ranks ended well, and none has read all of the data that came meanwhile."""

    retryable = False


# Of a try of a task.
WORKER_LOST = "ended and did not say why: its worker was killed, as for want of memory, or lost"


class JobLost(LaunchError):
    """Nobody knows how the ranks ended."""


class JobPreempted(JobLost):
    """It had to make room for others. Tried again without one of Airflow's attempts.

    Attributes:
        step: at which all its ranks have saved; None: they did not, or not all.
    """

    def __init__(self, message: str, *, step: int | None) -> None:
        super().__init__(message)
        self.step = step


class EvaluationError(DdlError):
    """A model that is not to be published."""


class EvaluationInvalid(EvaluationError):
    """Its quality is not known: nobody measured the metric on what the model has not learnt."""


class QualityTooLow(EvaluationError):
    """Its quality is known, and below what the manifest asks for."""


class FormOutdated(EvaluationError):
    """A person would be asked about another model than the one that is to be published."""


class NotApproved(EvaluationError):
    """A person was to approve of it, and has not."""


class NoSuchModel(DdlError):
    """A model that was to be put into production again is not there."""


class TimedOut(DdlError):
    """A try of a step took longer than the manifest allows."""

    retryable = True


class SettingUnknown(DdlError):
    """A run was given a parameter or setting that its trigger form does not have."""


class SettingInvalid(DdlError):
    """A run was given a value that cannot be used."""


class TensorBoardRefused(DdlError):
    """TensorBoard cannot be shown: not here, not now, or not of this training."""


class TransformError(DdlError):
    """A checkpoint could not be made a SavedModel."""


class CheckpointMissing(TransformError):
    """There is no checkpoint, or none at the step that the manifest names."""


class ModelRejected(TransformError):
    """The SavedModel was written and reloaded, and does not predict."""


# What parsing and looking into somebody else's JSON may raise; ArithmeticError: where infinity, or
# a number of hundreds of digits, is to be one of ours.
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError)
