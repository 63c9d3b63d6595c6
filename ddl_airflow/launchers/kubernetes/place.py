"""Where jobs are that are made in one way: what is done there for those that were submitted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddl_airflow.core.job import JobHandle, JobState
from ddl_airflow.launchers.kubernetes.api import Cluster, Refused
from ddl_airflow.launchers.kubernetes.causes import (
    TRIED,
    WAITS,
    Verdict,
    dead,
    due,
    left_over,
    refused,
    taken_back,
    why_ended,
)
from ddl_airflow.launchers.kubernetes.facts import (
    ENDED_BECAUSE,
    annotations_of,
    created,
    delay_of,
)
from ddl_airflow.launchers.kubernetes.objects import (
    NODES,
    START_TIMEOUT,
    TIME_LIMIT,
    worker_name,
)
from ddl_airflow.launchers.kubernetes.operators import Operator


@dataclass(frozen=True)
class Place:
    """Where jobs are that are made in one way."""

    cluster: Cluster
    namespace: str
    operator: Operator

    def look_after(self, handle: JobHandle, facts: Mapping[str, Any], now: float) -> None:
        """Starts a job whose time has come, ends one that cannot go on, removes what it left.

        Raises:
            SubmitFailed: a job whose time has come cannot begin yet.
            LaunchError: the cluster does not answer, or refuses it.
        """
        if due(facts["job"], now):
            self.begin(facts)
        elif verdict := dead(facts, now) or taken_back(handle, facts["job"]):
            self.note(facts, verdict, self.operator.end)
        for left in left_over(facts, now):
            self.note(facts, why_ended(facts), {})
            self.delete("Pod", left)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Lets a job start that was to wait. Another process may do so at the same time.

        Raises:
            SubmitFailed: not now, and at another look.
            LaunchError: the cluster does not answer, or refuses the change.
        """
        job = facts["job"]
        about = job["metadata"]
        kept = json.loads(about["annotations"][WAITS])
        try:
            for pod in workers_by(kept["pod"], job) if kept["pod"] else ():
                pod["metadata"]["ownerReferences"] = [owner_of(self.operator, about)]
                self._create(pod)
        except Refused as error:
            cause = refused(error, self.namespace, kept["pod"])
            # For room it waits as long as a pod may that is there.
            asked = annotations_of(job).get(START_TIMEOUT, "inf")
            late = time.time() - created(job) - delay_of(job) > float(asked)
            if cause.retryable and not (late and not error.retryable):
                tried = {"metadata": {"annotations": {TRIED: str(time.time())}}}
                self.cluster.patch(self.namespace, self.operator.kind, about["name"], tried)
                raise cause from error  # it is begun at another look
            self.note(facts, Verdict(JobState.FAILED, str(cause), not cause.retryable), {})
            return
        change = kept["change"]
        if limit := annotations_of(job).get(TIME_LIMIT):
            deadline = max(1, int(time.time() - created(job) + float(limit)))
            change["spec"]["activeDeadlineSeconds"] = deadline
        said = change.get("metadata", {})
        annotations = {**said.get("annotations", {}), WAITS: None}
        whole = {**change, "metadata": {**said, "annotations": annotations}}
        self.cluster.patch(self.namespace, self.operator.kind, about["name"], whole)

    def _create(self, one: Mapping[str, Any]) -> None:
        try:
            self.cluster.create(self.namespace, one)
        except Refused as error:
            if error.reason != "AlreadyExists":
                raise

    def note(
        self, facts: Mapping[str, Any], verdict: Verdict | None, change: Mapping[str, Any]
    ) -> None:
        """Has the job keep why it ended, which its pods tell no more when they are gone."""
        about = facts["job"]["metadata"]
        if ENDED_BECAUSE in about["annotations"]:
            return
        note = (verdict or Verdict(JobState.LOST, "")).dump(time.time())
        said = {"metadata": {"annotations": {ENDED_BECAUSE: note}}}
        merged = {**change, "metadata": {**change.get("metadata", {}), **said["metadata"]}}
        self.cluster.patch(self.namespace, self.operator.kind, about["name"], merged)
        about["annotations"][ENDED_BECAUSE] = note

    def delete(self, kind: str, one: Mapping[str, Any]) -> None:
        """That very object."""
        about = one["metadata"]
        self.cluster.delete(self.namespace, kind, about["name"], about["uid"])


def owner_of(operator: Operator, about: Mapping[str, Any]) -> dict[str, Any]:
    """What the job's other objects say whose they are."""
    kind = {"apiVersion": operator.version, "kind": operator.kind}
    return {**kind, "name": about["name"], "uid": about["uid"], "blockOwnerDeletion": True}


def workers_by(first: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All workers' pods, which differ by their names alone."""
    name = job["metadata"]["name"]
    said = json.dumps(first)
    for node in range(int(job["metadata"]["annotations"][NODES])):
        yield json.loads(said.replace(worker_name(name, 0), worker_name(name, node)))
