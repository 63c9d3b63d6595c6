from __future__ import annotations

import pytest

from ddl_airflow.core import errors
from ddl_airflow.core.errors import DdlError, JobFailed, ManifestInvalid, ManifestIssue

RETRYABLE = {
    "DdlError": False,
    "ManifestError": False,
    "ManifestSyntaxError": False,
    "ManifestInvalid": False,
    "StagingError": True,
    "SourceMissing": False,
    "ObjectArchived": False,
    "AccessDenied": False,
    "ConnectionInvalid": False,
    "TransferCorrupt": True,
    "FileChanged": True,
    "NoSpace": True,
    "FileRefused": False,
    "PlaceTaken": True,
    "LaunchError": True,
    "CommandInvalid": False,
    "SubmitFailed": True,
    "JobFailed": True,
    "JobLost": True,
    "JobPreempted": True,
    "TrainedApart": False,
    "TrainedOnPart": False,
    "EvaluationError": False,
    "EvaluationInvalid": False,
    "QualityTooLow": False,
    "FormOutdated": False,
    "NotApproved": False,
    "NoSuchModel": False,
    "TimedOut": True,
    "SettingUnknown": False,
    "SettingInvalid": False,
    "TensorBoardRefused": False,
    "TransformError": False,
    "CheckpointMissing": False,
    "ModelRejected": False,
}


def test_every_error_is_in_the_tree_and_says_whether_a_retry_can_help():
    found = {
        name: kind.retryable
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert found == RETRYABLE
    assert all(issubclass(getattr(errors, name), DdlError) for name in found)


@pytest.mark.parametrize("retryable", [True, False])
def test_one_error_may_differ_from_its_class(retryable):
    assert errors.SubmitFailed("x", retryable=retryable).retryable is retryable
    assert errors.SubmitFailed("x").retryable is True


def test_manifest_error_shows_all_issues_in_line_order():
    later = ManifestIssue(9, "schedule", "is empty", "Delete the line.")
    first = ManifestIssue(2, "", "is twice", "Delete one.")
    whole = ManifestIssue(0, "", "cannot be read", "Check it.")
    error = ManifestInvalid("a/m.yml", [later, first, whole])
    assert error.issues == (whole, first, later)
    assert str(error).splitlines() == [
        "a/m.yml: cannot be read. Check it.",
        "a/m.yml:2: is twice. Delete one.",
        "a/m.yml:9: schedule: is empty. Delete the line.",
    ]


def test_job_failed_carries_its_facts():
    error = JobFailed("m", rank=3, host="n2", exit_code=137, retryable=False)
    assert (error.rank, error.host, error.exit_code, error.retryable) == (3, "n2", 137, False)
    assert (JobFailed("m").rank, JobFailed("m").exit_code) == (None, None)
