"""What a cluster says of a job's pods, in words that a person understands, with what to do.

Pure: from the objects as the API server has them. A pod that is deleted while its job is not was
ended to make room, by the scheduler, by who drains its node or by hand: the job is preempted. One
that took more than it had asked for has failed: it would do so again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.core.job import JobHandle, JobState, JobStatus
from ddl_airflow.launchers.base import ranks_status
from ddl_airflow.launchers.kubernetes.api import Refused
from ddl_airflow.launchers.kubernetes.objects import NODES, ROLE_LABEL, START_TIMEOUT, worker_name

SILENT = "silent"
# Written on the Job when it was ended because it could not go on: why.
ENDED_BECAUSE = "ddl-airflow/ended-because"

# Of pod.py.
_UNUSABLE, _LAUNCHER_LOST = 69, 75
_KILLED = 137
# In which the pods of a job that has ended have ended, too; and more than the grace of one that is
# deleted, after which its node does not answer.
_SETTLE_S = 15.0
_OVERDUE_S = 75.0
# For a pod that has its node, to run; in which a registry or a volume may be away.
_START_S = 600.0
# For so long it is looked at where its ranks are.
_EARLY_S = 600.0

_Object = Mapping[str, Any]
# Waiting that no time mends. Source: kubelet's images/types.go.
_NEVER = frozenset(("InvalidImageName", "ErrImageNeverPull"))
_PULLING = frozenset(("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"))
_NO_IMAGE = re.compile(
    "not found|no such host|manifest unknown|unauthorized|denied|forbidden|does not exist|"
    "invalid reference",
    re.IGNORECASE,
)
_NOT_STARTED = frozenset(("StartError", "ContainerCannotRun", "RunContainerError"))
# Of a pod's status, for which it was ended from outside.
_ROOM = frozenset(("Preempting", "NodeShutdown", "Terminated", "Shutdown"))
# What an event says about a pod before it runs, that its status does not.
_OF_START = frozenset(("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"))
_OF_NODE = frozenset(("TaintManagerEviction", "NodeNotReady"))
# Exceptions and codes of ranks that may only have seen what happened to a pod.
_CONSEQUENCES = frozenset(("AbortedError", "FailedPreconditionError", "UnavailableError"))


@dataclass(frozen=True)
class Verdict:
    """What happened to a job, as far as its ranks do not know it."""

    state: JobState
    reason: str
    permanent: bool = False
    pod: str = ""

    def dump(self) -> str:
        """As the Job keeps it."""
        said = {"state": self.state.value, "reason": self.reason, "pod": self.pod}
        return json.dumps(said | {"permanent": self.permanent})

    @staticmethod
    def load(said: str) -> Verdict:
        """What ``dump`` returned."""
        told = json.loads(said)
        return Verdict(JobState(told["state"]), told["reason"], told["permanent"], told["pod"])


def slim(one: _Object) -> dict[str, Any]:
    """What of an object is looked at here."""
    if "involvedObject" in one:
        of = one["involvedObject"]
        return {"of": of.get("name", ""), **{name: one.get(name) for name in ("reason", "message")}}
    kept = (
        *("name", "uid", "labels", "annotations", "generateName"),
        *("creationTimestamp", "deletionTimestamp"),
    )
    spec = ("nodeName", "parallelism", "completions")
    return {
        "metadata": {name: one["metadata"][name] for name in kept if name in one["metadata"]},
        "spec": {name: one["spec"][name] for name in spec if name in one["spec"]},
        "status": one.get("status", {}),
    }


def needs_events(job: _Object | None, pods: Sequence[_Object]) -> bool:
    """Whether the objects alone do not tell how the job stands."""
    if job is None or _deleted(job):
        return False
    if _condition(job, "Complete"):
        return False
    plain = all(pod["status"].get("phase") == "Running" and not _deleted(pod) for pod in pods)
    return bool(_condition(job, "Failed") or _missing(job, pods) or not pods or not plain)


def judged(handle: JobHandle, facts: Mapping[str, Any], now: float) -> JobStatus:
    """The status of a job.

    Args:
        handle: the job's.
        facts: ``job``, ``pods`` and ``events``, each slim; no job if there is none.
        now: when that was so, in unix seconds.
    """
    job, pods, events = facts["job"], facts["pods"], facts["events"]
    if job is None:
        gone = "Kubernetes has no such job any more: it was cancelled, or somebody deleted it."
        return _ended(handle, Verdict(JobState.LOST, gone))
    if _deleted(job):
        late = [pod for pod in pods if _overdue(pod, now)]
        if late:
            return _ended(handle, _node_lost(late[0]))
        return JobStatus(JobState.RUNNING, reason="is being ended")
    if _finished(job):
        since = now - _finished_at(job)
        if since < _SETTLE_S and any(_alive(pod) for pod in _workers(pods)):
            return JobStatus(JobState.RUNNING, reason="is ending")
        return _ended(handle, why_ended(facts))
    created = job["metadata"]["creationTimestamp"]
    if job["spec"].get("parallelism") == 0:
        never = "was never submitted as a whole: who submitted it was ended meanwhile"
        return JobStatus(JobState.FAILED, reason=f"The job {never}.", permanent=True)
    status = _on_the_way(job, pods, events, now)
    if status.state is JobState.RUNNING and now - _time(created) < _EARLY_S:
        # Whether mpirun has used the hosts shows soon; reading all records takes its time.
        early = ranks_status(handle, running=True)
        return early if early.ended else status
    return status


def dead(facts: Mapping[str, Any], now: float) -> Verdict | None:
    """Why a job that is there cannot go on, so that it is to be ended; None if it can."""
    job, pods, events = facts["job"], facts["pods"], facts["events"]
    if job is None or _deleted(job) or _finished(job) or job["spec"].get("parallelism") == 0:
        return None
    ended = [pod for pod in _workers(pods) if not _alive(pod)]
    # The launcher notices by itself, and ends all within seconds.
    if any(now - _ended_at(pod, now) > _SETTLE_S for pod in ended) or _missing(job, pods):
        return _of_pods(job, pods, events) or Verdict(
            JobState.LOST, "A worker's pod ended before the job did, and nothing says why."
        )
    return None


def left_over(facts: Mapping[str, Any], now: float) -> list[_Object]:
    """The pods that outlive their job: those that its launcher never came to hold."""
    job = facts["job"]
    if job is None or not _finished(job) or now - _finished_at(job) < _SETTLE_S:
        return []
    return [one for one in _workers(facts["pods"]) if _alive(one) and not _deleted(one)]


def _ended(handle: JobHandle, verdict: Verdict | None) -> JobStatus:
    status = ranks_status(handle, running=False)
    if status.state is JobState.SUCCEEDED or status.permanent or verdict is None:
        return status
    failure = status.failure
    if failure is None:
        return JobStatus(verdict.state, reason=verdict.reason, permanent=verdict.permanent)
    # What a rank did by itself says more than that the rest was ended.
    consequence = (
        failure.exit_code in (None, _KILLED, 128 + 9, 128 + 15)
        or failure.exception in _CONSEQUENCES
    )
    if not consequence or (verdict.state is JobState.LOST and not verdict.pod):
        return status
    if verdict.state is JobState.FAILED and verdict.pod == failure.host:
        return replace(status, failure=replace(failure, reason=verdict.reason))
    return JobStatus(verdict.state, reason=verdict.reason, permanent=verdict.permanent)


def _on_the_way(
    job: _Object, pods: Sequence[_Object], events: Sequence[_Object], now: float
) -> JobStatus:
    asked = job["metadata"].get("annotations", {}).get(START_TIMEOUT)
    patience_s = float(asked) if asked else _START_S
    waits = ""
    for pod in pods:
        if pod["status"].get("phase") != "Pending":
            continue
        why, never, placed = _waits(pod, events)
        name = pod["metadata"]["name"]
        since = now - _time(pod["metadata"]["creationTimestamp"])
        if not never and since > patience_s and (asked or placed):
            never = f"{why} That has been so for {patience_s:.0f} s (launcher.start_timeout)."
        if never:
            reason = f"Pod {name} will not start: {never}"
            return JobStatus(JobState.FAILED, reason=reason, permanent=True)
        waits = waits or f"pod {name} {why}"
    if not any(_role(pod) == "launcher" for pod in pods):
        said = [one["message"] for one in events if one["reason"] == "FailedCreate"]
        since = now - _time(job["metadata"]["creationTimestamp"])
        if said and asked and since > patience_s:
            return JobStatus(
                JobState.FAILED, reason=f"The job will not start: {said[-1]}.", permanent=True
            )
        waits = waits or (f"waits to be made: {said[-1]}" if said else "waits to be made")
    if waits:
        return JobStatus(JobState.PENDING, reason=waits)
    nodes = sorted({pod["spec"].get("nodeName", "?") for pod in _workers(pods)})
    shown = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    return JobStatus(JobState.RUNNING, reason=f"on {shown}")


def _waits(pod: _Object, events: Sequence[_Object]) -> tuple[str, str, bool]:
    """Why a pod does not run yet, why it never will, and whether it has its node."""
    scheduled = _condition(pod, "PodScheduled", "False")
    if scheduled:
        said = str(scheduled.get("message", "")).rstrip(".")
        if scheduled.get("reason") == "SchedulingGated":
            return "waits in Kueue's queue.", "", False
        if re.search(r"persistentvolumeclaim .*not found", said):
            return said, f"{said}. Correct launcher.volumes.", False
        return f"waits for room: {said}.{_cure_of_room(said)}", "", False
    for status in pod["status"].get("containerStatuses", ()):
        waiting = status.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), str(waiting.get("message", ""))
        image = status.get("image", "")
        if reason in _PULLING or reason in _NEVER:
            said = _pull_error(_name_of(pod), events) or message
            why = f"image {image} cannot be pulled ({reason}): {said.rstrip('.')}."
            cure = (
                " Correct launcher.image; for a registry that asks who pulls, set "
                "launcher.image_pull_secrets."
            )
            if reason in _NEVER or _NO_IMAGE.search(said):
                return why, why + cure, True
            return why, "", True
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return f"cannot be made ({reason}): {message.rstrip('.')}.", "", True
    mine = [one for one in events if one["of"] == _name_of(pod) and one["reason"] in _OF_START]
    if mine:
        return f"is being made ({mine[-1]['reason']}): {mine[-1]['message']}.", "", True
    return "is being made.", "", bool(pod["spec"].get("nodeName"))


def _pull_error(name: str, events: Sequence[_Object]) -> str:
    """What the registry said: of an image whose pull is being put off the status does not."""
    said = [
        str(one["message"])
        for one in events
        if one["of"] == name and one["reason"] == "Failed" and "pull" in str(one["message"])
    ]
    return said[-1] if said else ""


def _cure_of_room(said: str) -> str:
    cures = {
        "Insufficient nvidia.com/gpu": "launcher.slots or another compute_configuration.name",
        "Insufficient memory": "launcher.resources.memory",
        "Insufficient cpu": "launcher.resources.cpu",
        "node selector": "launcher.node_selector",
        "node affinity": "launcher.node_selector",
        "taint": "launcher.tolerations",
    }
    found = [cure for words, cure in cures.items() if words in said]
    return f" If there never is, change {' or '.join(found)}." if found else ""


def why_ended(facts: Mapping[str, Any]) -> Verdict | None:
    """Why a job has failed, as far as the cluster knows."""
    job, pods, events = facts["job"], facts["pods"], facts["events"]
    if kept := job["metadata"].get("annotations", {}).get(ENDED_BECAUSE):
        return Verdict.load(kept)
    if _condition(job, "Complete"):
        return _of_pods(job, pods, [])
    failed = _condition(job, "Failed")
    if failed.get("reason") == "DeadlineExceeded":
        return Verdict(
            JobState.LOST,
            "Kubernetes ended the job: it took longer than launcher.time_limit. Raise that; or let "
            "it be tried again, if the script goes on from its checkpoints.",
            pod="all",
        )
    return _of_pods(job, pods, events)


def _of_pods(job: _Object, pods: Sequence[_Object], events: Sequence[_Object]) -> Verdict | None:
    """What happened to one of its pods that explains the job's end; what says most comes first."""
    found = [one for pod in pods if (one := _of_pod(pod, events))]
    found += [_of_missing(name, events) for name in _missing(job, pods)]
    order = (JobState.PREEMPTED, JobState.FAILED, JobState.LOST)
    found.sort(key=lambda one: order.index(one.state))
    if found:
        return found[0]
    for pod in pods:
        end = _end_of(pod)
        message = _message(end)
        lost = next((one for one in pods if _name_of(one) == message.get("pod")), None)
        if lost is not None:
            return _node_lost(lost)
        launcher = next((one for one in pods if _role(one) == "launcher"), None)
        if _role(pod) == "worker" and end.get("exitCode") == _LAUNCHER_LOST and launcher:
            return _node_lost(launcher)
        if end.get("reason") and message.get("said"):
            return Verdict(JobState.LOST, f"{_where(pod)}: {message['said']}.")
    return None


def _of_pod(pod: _Object, events: Sequence[_Object]) -> Verdict | None:
    name, status = _name_of(pod), pod["status"]
    reason, message = status.get("reason", ""), str(status.get("message", ""))
    if reason == "Evicted":
        return _evicted(pod, message)
    if reason in _ROOM:
        why = f"{_where(pod)} was ended to make room ({reason}): {message}"
        return Verdict(JobState.PREEMPTED, why, pod=name)
    if reason == "NodeLost" or (_condition(pod, "Ready", "False") and _alive(pod) and _up(pod)):
        return _node_lost(pod)
    if _deleted(pod):
        return _of_missing(name, events, _where(pod))
    end = _end_of(pod)
    if end.get("reason") == "OOMKilled":
        return Verdict(
            JobState.FAILED,
            f"was killed: its pod {name} took more memory than its limit (OOMKilled). Raise "
            "launcher.resources.memory, or give each rank a smaller batch.",
            pod=name,
        )
    if end.get("reason") in _NOT_STARTED:
        why = (
            f"{_where(pod)} could not start its program: {end.get('message', '')}. The image must "
            "have the Python that launcher.python names, by default python."
        )
        return Verdict(JobState.FAILED, why, permanent=True, pod=name)
    if end.get("exitCode") == _UNUSABLE and (said := _message(end).get("said")):
        return Verdict(JobState.FAILED, f"{_where(pod)}: {said}.", permanent=True, pod=name)
    return None


def _evicted(pod: _Object, message: str) -> Verdict:
    # More than its own limit, or than it had asked for while the node had too little.
    too_much = re.search(r"exceeds the (total )?limit|exceeded its|exceeds its request", message)
    why = f"{_where(pod)} was evicted: {message.strip().rstrip('.')}."
    if too_much:
        cure = "Ask for as much as it takes, with launcher.resources, or write less."
        return Verdict(JobState.FAILED, f"{why} {cure}", pod=_name_of(pod))
    return Verdict(JobState.PREEMPTED, why, pod=_name_of(pod))


def _of_missing(name: str, events: Iterable[_Object], where: str = "") -> Verdict:
    mine = [one for one in events if one["of"] == name]
    pod = where or f"Pod {name}"
    for one in mine:
        if one["reason"] == "Preempted":
            why = f"{pod} had to make room for one of higher priority: {one['message']}."
            return Verdict(JobState.PREEMPTED, why, pod=name)
        if one["reason"] in _OF_NODE:
            why = f"{pod} was given up: its node does not answer ({one['reason']})."
            return Verdict(JobState.LOST, why, pod=name)
    why = f"{pod} was deleted while the job ran: its node is being drained, or by hand."
    return Verdict(JobState.PREEMPTED, why, pod=name)


def _node_lost(pod: _Object) -> Verdict:
    why = (
        f"{_where(pod)} does not answer any more: the node is down, or cut off. Nothing is known "
        "of its ranks."
    )
    return Verdict(JobState.LOST, why, pod=_name_of(pod))


def refused(error: Refused, namespace: str, one: _Object) -> SubmitFailed:
    """What the API server does not take of a job, with what to change."""
    said, what = error.said.rstrip("."), f"{one['kind']} {one['metadata']['name']}"
    cures = {
        "exceeded quota": "Ask for less, or for a larger quota of the namespace",
        "no PriorityClass": "Correct launcher.priority_class; `kubectl get priorityclasses` lists",
        "service account": "Correct launcher.service_account",
        "PodSecurity": "The namespace allows less: no host_path; no root, see [ddl] run_ranks_as",
        "cannot set blockOwnerDeletion": "It lacks a right that docs/kubernetes.md lists",
        "cannot create": "Its account lacks a right that docs/kubernetes.md lists",
        "cannot patch": "Its account lacks a right that docs/kubernetes.md lists",
        "namespaces": "Correct launcher.namespace, or have it made",
    }
    cure = next((f" {cure}." for words, cure in cures.items() if words in said), "")
    # Room comes back.
    again = error.retryable or "exceeded quota" in said or error.reason == "AlreadyExists"
    message = f"Kubernetes does not take {what} in namespace {namespace}: {said}.{cure}"
    return SubmitFailed(message, retryable=again)


def _workers(pods: Iterable[_Object]) -> list[_Object]:
    return [pod for pod in pods if _role(pod) == "worker"]


def _role(pod: _Object) -> str:
    return str(pod["metadata"].get("labels", {}).get(ROLE_LABEL, ""))


def _name_of(one: _Object) -> str:
    return str(one["metadata"]["name"])


def _where(pod: _Object) -> str:
    node = pod["spec"].get("nodeName")
    return f"Pod {_name_of(pod)} on node {node}" if node else f"Pod {_name_of(pod)}"


def _missing(job: _Object, pods: Sequence[_Object]) -> list[str]:
    """Workers that are not there any more: all were, before the launcher was let start."""
    there = {_name_of(pod) for pod in pods}
    size = int(job["metadata"].get("annotations", {}).get(NODES, 0))
    names = [worker_name(_name_of(job), node) for node in range(size)]
    return [name for name in names if name not in there]


def _deleted(one: _Object) -> bool:
    return "deletionTimestamp" in one["metadata"]


def _overdue(pod: _Object, now: float) -> bool:
    # It is the time when its grace is over.
    return _deleted(pod) and now - _time(pod["metadata"]["deletionTimestamp"]) > _OVERDUE_S


def _alive(pod: _Object) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def _up(pod: _Object) -> bool:
    return any("running" in one.get("state", {}) for one in _containers(pod))


def _containers(pod: _Object) -> Sequence[_Object]:
    found: Sequence[_Object] = pod["status"].get("containerStatuses", ())
    return found


def _end_of(pod: _Object) -> _Object:
    for one in _containers(pod):
        if ended := one.get("state", {}).get("terminated"):
            found: _Object = ended
            return found
    return {}


def _ended_at(pod: _Object, default: float) -> float:
    at = _end_of(pod).get("finishedAt")
    return _time(at) if at else default - 2 * _SETTLE_S


def _message(end: _Object) -> dict[str, Any]:
    try:
        told = json.loads(end.get("message") or "{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _condition(one: _Object, kind: str, status: str = "True") -> dict[str, Any]:
    for condition in one["status"].get("conditions") or ():
        if condition["type"] == kind and condition["status"] == status:
            return dict(condition)
    return {}


def _finished(job: _Object) -> bool:
    return bool(_condition(job, "Complete") or _condition(job, "Failed"))


def _finished_at(job: _Object) -> float:
    condition = _condition(job, "Complete") or _condition(job, "Failed")
    return _time(condition["lastTransitionTime"])


def _time(said: str) -> float:
    return datetime.fromisoformat(said).timestamp()
