"""Where jobs are that are made in one way: what is done there for those that were submitted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ddl_airflow.core.errors import LaunchError, SubmitFailed
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
    BEGAN,
    ENDED_BECAUSE,
    annotations_of,
    began_at,
    created,
    is_alive,
    is_deleted,
    name_in,
    place_of,
    workers_of,
)
from ddl_airflow.launchers.kubernetes.objects import (
    NODES,
    START_TIMEOUT,
    TIME_LIMIT,
    WORKLOAD_LABEL,
    worker_name,
)
from ddl_airflow.launchers.kubernetes.operators import Operator

# Pods that are made and not kept may have made others go, of lower priority.
_TRY_AGAIN_S = 60.0


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
        held = [*workers_of(facts["pods"])]  # of a look that was cut off
        # For room it waits as long as a pod may that is there.
        asked = annotations_of(job).get(START_TIMEOUT, "inf")
        late = time.time() - began_at(job) > float(asked)
        if ended := [pod for pod in held if is_deleted(pod) or not is_alive(pod)]:
            why = f"waits for {place_of(ended[0])} of an earlier attempt to be gone."
            self._put_off(job, SubmitFailed(why, retryable=True), ended, ends=late, noted=False)
            return
        tried = json.loads(annotations_of(job).get(TRIED, "{}"))
        if time.time() - tried.get("at", 0.0) < _TRY_AGAIN_S:
            self._let_go(held)
            raise SubmitFailed(tried["reason"], retryable=True)
        there = {name_in(pod) for pod in held}
        try:
            for pod in workers_by(kept["pod"], job) if kept["pod"] else ():
                if name_in(pod) in there:
                    continue  # a full quota would refuse it
                pod["metadata"]["ownerReferences"] = [owner_of(self.operator, about)]
                if made := self._create(pod):
                    held.append(made)
        except Refused as error:
            cause = refused(error, self.namespace, kept["pod"])
            ends = not cause.retryable or (late and not error.retryable)
            self._put_off(job, cause, held, ends=ends)
            return
        change = kept["change"]
        if limit := annotations_of(job).get(TIME_LIMIT):
            deadline = max(1, int(time.time() - created(job) + float(limit)))
            change["spec"]["activeDeadlineSeconds"] = deadline
        said = change.get("metadata", {})
        began = {WAITS: None, BEGAN: str(time.time())}
        annotations = said.get("annotations", {}) | began
        self._patch(about, {**change, "metadata": {**said, "annotations": annotations}})

    def _put_off(
        self,
        job: Mapping[str, Any],
        cause: SubmitFailed,
        workers: Sequence[Mapping[str, Any]],
        *,
        ends: bool,
        noted: bool = True,
    ) -> None:
        """Notes why a job does not begin, and lets its workers go.

        Args:
            job: that is to begin.
            cause: why it does not.
            workers: that are there already.
            ends: whether that ends it.
            noted: whether it is noted where it does not.

        Raises:
            SubmitFailed: the cause, if that does not end it.
        """
        state, name = (JobState.FAILED, ENDED_BECAUSE) if ends else (JobState.PENDING, TRIED)
        if ends or noted:
            note = Verdict(state, str(cause), ends and not cause.retryable).dump(time.time())
            self._patch(job["metadata"], {"metadata": {"annotations": {name: note}}})
        self._let_go(workers)
        if not ends:
            raise cause

    def _let_go(self, workers: Sequence[Mapping[str, Any]]) -> None:
        for pod in workers:
            with suppress(LaunchError):  # another look does it
                self.delete("Pod", pod)

    def _patch(self, about: Mapping[str, Any], change: Mapping[str, Any]) -> None:
        """Changes the job; refused where another process has, since it was looked at."""
        seen = {**change["metadata"], "resourceVersion": about["resourceVersion"]}
        whole = {**change, "metadata": seen}
        self.cluster.patch(self.namespace, self.operator.kind, about["name"], whole)

    def _create(self, one: Mapping[str, Any]) -> dict[str, Any] | None:
        """The object; None if it is there."""
        try:
            return self.cluster.create(self.namespace, one)
        except Refused as error:
            if error.reason != "AlreadyExists":
                raise
            return None

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
        try:
            self.cluster.patch(self.namespace, self.operator.kind, about["name"], merged)
        except Refused as error:
            if "default queue" not in error.said:
                raise
            # Kueue leaves no job there without a queue. One that is to have a workload which is not
            # there does not start either; in another queue it would, where it was admitted before.
            labels = {WORKLOAD_LABEL: f"{about['name']}-ended"}
            kept = {**merged, "metadata": {**merged["metadata"], "labels": labels}}
            self.cluster.patch(self.namespace, self.operator.kind, about["name"], kept)
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
