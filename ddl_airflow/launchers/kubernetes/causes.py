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
from datetime import UTC, datetime
from typing import Any

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.core.job import JobHandle, JobState, JobStatus, RankFailure
from ddl_airflow.launchers.job_preflight import unwell
from ddl_airflow.launchers.kubernetes.api import Refused
from ddl_airflow.launchers.kubernetes.facts import (
    ENDED_BECAUSE,
    SETTLE_S,
    annotations_of,
    began_at,
    condition_of,
    containers_of,
    created,
    delay_of,
    end_of,
    ended_at,
    failure_of,
    has_finished,
    holds_its_place,
    host_of,
    images_of,
    is_alive,
    is_begun,
    is_deleted,
    is_overdue,
    message_of,
    missing_hosts,
    name_in,
    over_since,
    place_of,
    role_of,
    runs,
    seconds,
    workers_of,
)
from ddl_airflow.launchers.kubernetes.objects import START_TIMEOUT, workers_prefix
from ddl_airflow.launchers.kubernetes.operators import KEEP_FINISHED
from ddl_airflow.launchers.records import is_consequence, killed_on, ranks_status, run_folder

# What is told of a job that cannot be looked at: why, and whether that may pass.
SILENT, AGAIN = "silent", "again"
# What Kubeflow Trainer's webhook says of a TrainJob whose runtime it does not know, or not yet.
NOT_KNOWN = "must be created before"
# Written on it while it waits for its time: what is to be done then.
WAITS = "ddl-airflow/waits"
# When it could not begin, the last time, and why: a verdict. Somebody looks at it.
TRIED = "ddl-airflow/tried"

# Of pod.py.
_UNUSABLE, _LAUNCHER_LOST = 69, 75
_KILLED, _ASKED_TO_END = 137, 143  # a rank, by SIGKILL and SIGTERM
# For a pod that has its node, to run; in which a registry or a volume may be away.
_START_S = 600.0
# More than a submission takes.
_SUBMITTED_S = 600.0
# Longer than all triggerers are away: a job whose time has come, and which none lets start.
_LET_START_S = 86400.0
# For so long it is looked at where its ranks are.
_EARLY_S = 600.0

_Object = Mapping[str, Any]
# Waiting that no time mends. Source: kubelet's images/types.go.
_NEVER = frozenset(("InvalidImageName", "ErrImageNeverPull"))
_PULLING = frozenset(("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"))
_NO_IMAGE = re.compile(
    "not found|manifest unknown|unauthorized|denied|forbidden|does not exist|invalid reference",
    re.IGNORECASE,
)
_OF_PULL = frozenset(("Pulling", "Pulled", "Failed", "BackOff"))
_NOT_STARTED = frozenset(("StartError", "ContainerCannotRun", "RunContainerError"))
# Of a pod's status, for which it was ended from outside.
_ROOM = frozenset(("Preempting", "NodeShutdown", "Terminated", "Shutdown"))
# What an event says about a pod before it runs, that its status does not.
_OF_START = frozenset(("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"))
# That a node does not answer, and that a taint has its pods deleted: of a node that does not
# answer, minutes after the first, or one that somebody has put there.
_SILENT_NODE, _TAINT = "NodeNotReady", "TaintManagerEviction"
# What is forbidden for a while: of a quota that is used up, or not yet counted; by a server that
# has just started; of an account that is being made.
_PASSES = re.compile(
    "exceeded quota|status unknown for quota|not yet ready|error looking up service account"
)
_DENIED_S = 60.0
# What an event says of a job whose pods are not made.
_NOT_MADE = frozenset(
    ("FailedCreate", "ValidationError", "MPIJobFailed", "TrainJobResourcesCreationFailed")
)


@dataclass(frozen=True)
class Verdict:
    """What happened to a job, as far as its ranks do not know it."""

    state: JobState
    reason: str
    permanent: bool = False
    pod: str = ""

    def dump(self, at: float = 0.0) -> str:
        """As the job keeps it from that time on, in unix seconds."""
        said = {"state": self.state.value, "reason": self.reason, "pod": self.pod, "at": at}
        return json.dumps(said | {"permanent": self.permanent})

    @staticmethod
    def load(said: str) -> Verdict:
        """What ``dump`` returned."""
        told = json.loads(said)
        return Verdict(JobState(told["state"]), told["reason"], told["permanent"], told["pod"])


# It may have ended before it was removed: then only its ranks' records say how.
_GONE = Verdict(
    JobState.LOST,
    "Kubernetes has no such job any more: it was cancelled, or somebody deleted it.",
)


def slim(one: _Object) -> dict[str, Any]:
    """What of an object is looked at here."""
    if "involvedObject" in one:
        of = one["involvedObject"]
        said = {name: one.get(name) for name in ("reason", "message")}
        return {"of": of.get("name", ""), "uid": of.get("uid", ""), **said}
    kept = (
        *("name", "uid", "labels", "annotations", "generateName", "ownerReferences"),
        *("creationTimestamp", "deletionTimestamp", "resourceVersion"),
    )
    spec = ("nodeName", "hostname", "parallelism", "completions")
    return {
        **{name: one[name] for name in ("operator", "suspended") if name in one},
        "metadata": {name: one["metadata"][name] for name in kept if name in one["metadata"]},
        "spec": {name: one["spec"][name] for name in spec if name in one["spec"]},
        "status": one.get("status", {}),
    }


def needs_events(job: _Object | None, pods: Sequence[_Object]) -> bool:
    """Whether the objects alone do not tell how the job stands."""
    if job is None or is_deleted(job):
        return False
    if condition_of(job, "Complete"):
        # All ranks may have saved because one had to make room: for whom, an event says.
        return bool(missing_hosts(job, pods)) or any(map(is_deleted, pods))
    plain = all(
        pod["status"].get("phase") == "Running" and is_alive(pod) and not is_deleted(pod)
        for pod in pods
    )
    unmade = is_begun(job) and not _has_launcher(pods)
    return bool(failure_of(job) or missing_hosts(job, pods) or unmade or not plain)


def waits_as(job: _Object, pods: Sequence[_Object]) -> str:
    """How a job waits whose events say no more than for what; empty where they may say more."""
    # Where the launcher's pod is not made, events alone say why.
    if has_finished(job) or missing_hosts(job, pods) or "launcher" not in map(role_of, pods):
        return ""
    states = []
    for pod in pods:
        status = pod["status"]
        if not is_alive(pod) or is_deleted(pod):
            return ""
        reasons = [condition_of(pod, "PodScheduled", "False").get("reason")]
        for one in status.get("containerStatuses", ()):
            reasons.append(one.get("state", {}).get("waiting", {}).get("reason"))
        states.append([name_in(pod), status["phase"], *reasons])
    return json.dumps(states)


def judged(handle: JobHandle, facts: Mapping[str, Any], now: float) -> JobStatus:
    """The status of a job.

    Args:
        handle: the job's.
        facts: ``job``, ``pods`` and ``events``, each slim, the newest event last; no job if there
            is none. ``held``: why one that has waited for its time could not begin.
        now: when that was so, in unix seconds.
    """
    job, pods = facts["job"], facts["pods"]
    if job is None:
        # One that is deleted in the background is gone at once, and its pods, which are deleted
        # after it, have their grace.
        left = [pod for pod in pods if is_deleted(pod) or "ownerReferences" in pod["metadata"]]
        if any(is_alive(pod) and not is_overdue(pod, now) for pod in left):
            return JobStatus(JobState.RUNNING, reason="is being ended")
        return _ended(handle, _GONE, pods)
    if is_deleted(job):
        late = [pod for pod in pods if is_overdue(pod, now)]
        if lost := [pod for pod in late if is_alive(pod) and "nodeName" in pod["spec"]]:
            return _ended(handle, _node_lost(lost[0]), pods)
        # A finalizer, such as Kueue's, may keep others that are late, and with them the job.
        alive = [pod for pod in pods if is_alive(pod) and pod not in late]
        if alive or (over_since(job) is None and not late):
            return JobStatus(JobState.RUNNING, reason="is being ended")
        # Its pods are deleted with it, which explains nothing.
        return _ended(handle, _said_by(job) or _GONE, pods)
    if over_since(job) is not None:
        if _is_ending(facts, now):
            return JobStatus(JobState.RUNNING, reason="is ending")
        return _ended(handle, why_ended(facts), pods)
    began = began_at(job)
    if WAITS in annotations_of(job):
        until = datetime.fromtimestamp(began, UTC).strftime("%H:%M:%S UTC")
        held = facts.get("held")
        return JobStatus(JobState.PENDING, reason=held or f"is not to start before {until}")
    if job["spec"].get("parallelism") == 0:
        never = "was never submitted as a whole: who submitted it was ended meanwhile"
        return JobStatus(JobState.FAILED, reason=f"The job {never}.", permanent=True)
    status = _on_the_way(handle, facts, now)
    if status.state is JobState.RUNNING and now - began < _EARLY_S:
        # Whether mpirun has used the hosts shows soon; reading all records takes its time.
        early = ranks_status(handle, running=True)
        return early if early.ended else status
    return status


def _is_ending(facts: Mapping[str, Any], now: float) -> bool:
    """Whether pods of a job that is over may be at work: ranks that save, or write how they end."""
    job = facts["job"]
    over = over_since(job)
    there = [one for one in facts["pods"] if holds_its_place(one) and not is_overdue(one, now)]
    if over is not None and now - over < SETTLE_S:
        return bool(workers_of(there))
    # A launcher's pod has its grace where its node is drained, or where an operator removes it. It
    # ends when all ranks have. A worker's may be on a node that is cut off.
    if not failure_of(job) and ENDED_BECAUSE not in annotations_of(job):
        return False
    return any(role_of(one) == "launcher" and is_deleted(one) for one in filter(is_alive, there))


def dead(facts: Mapping[str, Any], now: float) -> Verdict | None:
    """Why a job that is there does not go on, so that it is to be ended; None if it does.

    One that has done its work has no reason: then its ranks' records say how it ended.
    """
    job, pods, events = facts["job"], facts["pods"], facts["events"]
    if job is None or is_deleted(job) or over_since(job) is not None or not is_begun(job):
        return None
    for pod in pods:
        # It would hold its pod for ever, and with it the job: a container that others put there.
        if role_of(pod) == "launcher" and holds_its_place(pod) and end_of(pod):
            if now - ended_at(pod, now) <= SETTLE_S:
                return None
            return _of_pods(job, pods, events) or Verdict(JobState.LOST, "")
    ended = [pod for pod in workers_of(pods) if not is_alive(pod)]
    # The launcher notices by itself, and ends all within seconds.
    if any(now - ended_at(pod, now) > SETTLE_S for pod in ended) or missing_hosts(job, pods):
        return _of_pods(job, pods, events) or Verdict(
            JobState.LOST, "A worker's pod ended before the job did, and nothing says why."
        )
    return None


def left_over(facts: Mapping[str, Any], now: float) -> list[_Object]:
    """The pods that outlive their job: those that its launcher never came to hold."""
    over = facts["job"] and over_since(facts["job"])
    if over is None or now - over < SETTLE_S or _is_ending(facts, now):
        return []
    there = filter(holds_its_place, workers_of(facts["pods"]))
    return [one for one in there if not is_deleted(one)]


def due(job: _Object | None, now: float) -> bool:
    """Whether a job has waited for as long as it is to."""
    if job is None or is_deleted(job) or over_since(job) is not None:
        return False
    since = now - seconds(job["metadata"]["creationTimestamp"])
    return WAITS in annotations_of(job) and since >= delay_of(job)


def taken_back(handle: JobHandle, job: _Object | None) -> Verdict | None:
    """Why a job that has run is suspended again, so that it is to be ended; None if it is not.

    It would start a second time when Kueue lets it: that is for Airflow to say.
    """
    if job is None or not job.get("suspended") or not is_begun(job) or over_since(job) is not None:
        return None
    if not _has_ranks(handle):
        return None  # it never began
    return Verdict(JobState.PREEMPTED, "Kueue took its place back: the job was suspended.")


def outdated(job: _Object, now: float) -> bool:
    """Whether a job of an operator ended so long ago that its objects are to go."""
    over = None if is_deleted(job) else over_since(job)
    return over is not None and now - over > float(annotations_of(job).get(KEEP_FINISHED, "inf"))


def abandoned(job: _Object, now: float) -> bool:
    """Whether who submitted a job, or was to let it start, is gone: nothing ends what there is."""
    if is_begun(job) or is_deleted(job):
        return False
    if WAITS not in annotations_of(job):
        return now - created(job) > _SUBMITTED_S
    tried = json.loads(annotations_of(job).get(TRIED, "{}")).get("at", 0.0)
    return bool(now - max(created(job) + delay_of(job), tried) > _LET_START_S)


def _ended(handle: JobHandle, verdict: Verdict | None, pods: Sequence[_Object]) -> JobStatus:
    status = ranks_status(handle, running=False)
    if status.state is JobState.LOST:
        on = {host_of(pod): place_of(pod) for pod in pods}
        if said := unwell(handle.record_dir, run_folder(handle), on):
            return JobStatus(JobState.LOST, reason=said)
    if status.state is JobState.SUCCEEDED:
        return replace(status, images=images_of(pods))
    if status.permanent:
        return status
    if verdict is None or not verdict.reason:
        return status
    # All ranks saved, whoever removed it: the next job goes on from there.
    if status.state is JobState.PREEMPTED and verdict is _GONE:
        return status
    failure = status.failure
    # The first that failed may only have seen the end of those in the pod.
    seen = failure is None or _may_be_consequence(failure)
    if seen and verdict.state is JobState.FAILED and verdict.pod:
        failure = killed_on(handle, verdict.pod) or failure
    if failure is None:
        if status.step is not None and verdict.state is JobState.PREEMPTED:
            why = f"{verdict.reason.rstrip('.')}; {status.reason}."
            return replace(status, reason=why)
        return JobStatus(verdict.state, reason=verdict.reason, permanent=verdict.permanent)
    # What a rank did by itself says more than that the rest was ended.
    if not _may_be_consequence(failure) or (verdict.state is JobState.LOST and not verdict.pod):
        return status
    if verdict.state is JobState.FAILED and verdict.pod == failure.host:
        killed = "" if verdict.reason.startswith("was ") else "was killed: "
        return JobStatus(JobState.FAILED, replace(failure, reason=killed + verdict.reason))
    return JobStatus(verdict.state, reason=verdict.reason, permanent=verdict.permanent)


def _may_be_consequence(failure: RankFailure) -> bool:
    # One that a signal ended may only have seen what happened to a pod.
    return is_consequence(failure) or failure.exit_code in (_KILLED, _ASKED_TO_END)


def _has_ranks(handle: JobHandle) -> bool:
    return any(handle.record_dir.glob("rank-*.json"))


def _has_launcher(pods: Iterable[_Object]) -> bool:
    return any(role_of(pod) == "launcher" for pod in pods)


def _on_the_way(handle: JobHandle, facts: Mapping[str, Any], now: float) -> JobStatus:
    job, pods, events = facts["job"], facts["pods"], facts["events"]
    asked = annotations_of(job).get(START_TIMEOUT)
    patience_s = float(asked) if asked else _START_S
    limit = " (launcher.start_timeout)" if asked else "; launcher.start_timeout allows more"
    waits = "waits in Kueue's queue." if job.get("suspended") else ""
    if waits and job.get("operator"):  # its pods come when Kueue lets it go
        return JobStatus(JobState.PENDING, reason=waits)
    for pod in pods:
        if pod["status"].get("phase") != "Pending":
            continue
        wait = _waits(pod, events)
        name, never = name_in(pod), wait.never
        # Without start_timeout it may wait for a node for as long as it takes.
        has_node = {} if asked else condition_of(pod, "PodScheduled")
        began = has_node.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"]
        if not never and now - seconds(began) > patience_s and (asked or wait.counts):
            never = f"{wait.why} That has been so for {patience_s:.0f} s{limit}."
        if never:
            return _will_not(f"Pod {name} will not start: {never}", permanent=not wait.passes)
        waits = waits or f"pod {name} {wait.why}{_held_by(pods, wait, asked)}"
    if not _has_launcher(pods):
        said = [waits] if waits.startswith("waits in Kueue") else []
        said = said or [one["message"] for one in events if one["reason"] in _NOT_MADE]
        if not said and job.get("operator") and not pods:
            said = ["its operator has made no pods of it. Does it run?"]
        since = now - began_at(job)
        # An operator may wait for the workers first. Where ranks were, it is one that has ended.
        tells = said or not job.get("operator")
        held = not job.get("operator") and any("nodeName" in pod["spec"] for pod in pods)
        # An API server that has just started forbids what it allows a moment later.
        denied = (
            bool(said)
            and "forbidden" in said[-1]
            and not _PASSES.search(said[-1])
            and since > _DENIED_S
        )
        late = (asked or held) and tells and since > patience_s
        if (denied or late) and not _has_ranks(handle):
            words = [said[-1].rstrip(".")] if said else []
            if not denied:
                unmade = f"its launcher's pod is not made after {patience_s:.0f} s"
                words.append(f"{unmade}{limit}")
            reason = f"The job will not start: {'; '.join(words)}."
            return _will_not(reason + "".join(map(_cure, said[-1:])), permanent=denied)
        waits = waits or (f"waits to be made: {said[-1]}" if said else "waits to be made")
    if waits:
        return JobStatus(JobState.PENDING, reason=waits)
    nodes = sorted({pod["spec"].get("nodeName", "?") for pod in workers_of(pods)})
    shown = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    return JobStatus(JobState.RUNNING, reason=f"on {shown}{_different_images(pods)}")


def _will_not(reason: str, *, permanent: bool) -> JobStatus:
    """Of a job that is there all the same, and would start."""
    return JobStatus(JobState.FAILED, reason=reason, permanent=permanent, waits=True)


def _different_images(pods: Sequence[_Object]) -> str:
    """What is said of workers whose nodes have other images under one tag."""
    ran = [one for pod in workers_of(pods) for one in containers_of(pod)]
    # An image that a node did not pull has no digest.
    found = sorted(
        {one["imageID"].partition("@")[2] for one in ran if "@" in one.get("imageID", "")}
    )
    if len(found) < 2:
        return ""
    return (
        f". Its workers have different images under {ran[0].get('image')} ({', '.join(found)}). "
        "Name it by its digest, or set launcher.image_pull_policy: Always"
    )


def _held_by(pods: Sequence[_Object], wait: _Wait, asked: str | None) -> str:
    """What is said of workers that have room while another has none, and no end was asked for."""
    workers = workers_of(pods)
    held = sum("nodeName" in pod["spec"] for pod in workers)
    if asked or not held or not wait.why.startswith("waits for room"):
        return ""
    return (
        f" {held} of {len(workers)} workers hold their nodes meanwhile: set "
        "launcher.start_timeout, or launcher.queue where there is Kueue."
    )


@dataclass(frozen=True)
class _Wait:
    """Why a pod does not run yet.

    Attributes:
        never: why it never will; empty where it may.
        counts: whether it is bounded where no time was asked for.
        passes: whether another try, which waits anew, may have it.
    """

    why: str
    never: str = ""
    counts: bool = True
    passes: bool = False


def _waits(pod: _Object, events: Sequence[_Object]) -> _Wait:
    scheduled = condition_of(pod, "PodScheduled", "False")
    if scheduled:
        said = str(scheduled.get("message", "")).rstrip(".")
        if scheduled.get("reason") == "SchedulingGated":
            return _Wait("waits in Kueue's queue.", counts=False, passes=True)
        if re.search(r"persistentvolumeclaim .*not found", said):
            return _Wait(said, f"{said}. Correct launcher.volumes.")
        why = f"waits for room: {said}.{_cure_of_room(said)}"
        return _Wait(why, counts=False, passes=True)
    mine = [one for one in events if one["of"] == name_in(pod)]
    pulls = [one for one in mine if one["reason"] in _OF_PULL]
    if pulls and pulls[-1]["reason"] == "Pulling":
        # For as long as its node pulls it: an image may be of many gigabytes.
        return _Wait(f"is being made: {pulls[-1]['message']}.", counts=False, passes=True)
    for status in pod["status"].get("containerStatuses", ()):
        waiting = status.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), str(waiting.get("message", ""))
        image = status.get("image", "")
        if reason in _PULLING or reason in _NEVER:
            said = _pull_error(mine) or message
            why = f"image {image} cannot be pulled ({reason}): {said.rstrip('.')}."
            cure = (
                " Correct launcher.image; for a registry that asks who pulls, set "
                "launcher.image_pull_secrets."
            )
            # But for its name, in which there may be such words.
            words = re.sub('"[^"]*"', "", said).replace(image or " ", " ")
            if reason in _NEVER or _NO_IMAGE.search(words):
                return _Wait(why, why + cure)
            return _Wait(why, passes=True)
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return _Wait(f"cannot be made ({reason}): {message.rstrip('.')}.")
    if starts := [one for one in mine if one["reason"] in _OF_START]:
        newest = starts[-1]
        return _Wait(f"is being made ({newest['reason']}): {newest['message']}.")
    return _Wait("is being made.", counts=bool(pod["spec"].get("nodeName")), passes=True)


def _pull_error(events: Sequence[_Object]) -> str:
    """What the registry said: of an image whose pull is being put off the status does not."""
    said = [
        str(one["message"])
        for one in events
        if one["reason"] == "Failed" and "pull" in str(one["message"])
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
    return _said_by(job) or _of_pods(job, pods, events)


def _said_by(job: _Object) -> Verdict | None:
    """Why a job has ended, as far as it says so itself."""
    if kept := annotations_of(job).get(ENDED_BECAUSE):
        return Verdict.load(kept)
    if failure_of(job).get("reason") == "DeadlineExceeded":
        return Verdict(
            JobState.LOST,
            "Kubernetes ended the job: it took longer than launcher.time_limit. Raise that; or let "
            "it be tried again, if the script goes on from its checkpoints.",
            pod="all",
        )
    return None


def _of_pods(job: _Object, pods: Sequence[_Object], events: Sequence[_Object]) -> Verdict | None:
    """What happened to one of its pods that explains the job's end; what says most comes first."""
    # An operator removes pods of a job that has ended: nothing follows from that alone.
    cleaned = bool(job.get("operator")) and has_finished(job)
    found = [one for pod in pods if (one := _of_pod(pod, events, cleaned))]
    found += [
        _of_missing(host, events)
        for host in missing_hosts(job, pods)
        if not cleaned or _told(host, events)
    ]
    order = (JobState.PREEMPTED, JobState.FAILED, JobState.LOST)
    found.sort(key=lambda one: order.index(one.state))
    if found := found or _of_launcher(job, pods, events):
        return found[0]
    for pod in pods:
        end = end_of(pod)
        message = message_of(end)
        if silent := str(message.get("pod", "")):
            lost = next((one for one in pods if host_of(one) == silent), None)
            if lost is not None and (runs(lost) or not cleaned):
                return _node_lost(lost)
            if cleaned:
                return _of_missing(silent, events)
        launcher = next((one for one in pods if role_of(one) == "launcher"), None)
        if role_of(pod) == "worker" and end.get("exitCode") == _LAUNCHER_LOST and launcher:
            return _node_lost(launcher)
        if end.get("reason") and message.get("said"):
            removed = bool(pod["metadata"].get("deletionTimestamp"))
            if removed and cleaned:
                continue
            if removed and not is_deleted(job):
                return _of_missing(name_in(pod), events, pod)
            return Verdict(JobState.LOST, f"{place_of(pod)}: {message['said']}.")
    if cleaned and (said := condition_of(job, "Failed").get("message")):
        # JobSet ends all when a worker's pod has: and none of them says that it failed.
        if workers_prefix(name_in(job), job["operator"]).rstrip("-") in said:
            why = f"A worker's pod was deleted while the job ran: {said}."
            return Verdict(JobState.PREEMPTED, why, pod="one")
        return Verdict(JobState.LOST, f"The job's operator ended it: {str(said).rstrip('.')}.")
    return None


def _of_pod(pod: _Object, events: Sequence[_Object], cleaned: bool) -> Verdict | None:
    name, status = host_of(pod), pod["status"]
    reason, message = status.get("reason", ""), str(status.get("message", ""))
    if reason == "Evicted":
        return _evicted(pod, message)
    # The pod's status says so once its containers have ended, which on a busy node is later than
    # what its ranks' end does to the job. The event is made before.
    for one in events:
        if one["of"] == name_in(pod) and one["reason"] == "Evicted":
            return _evicted(pod, str(one["message"]))
    if reason in _ROOM:
        why = f"{place_of(pod)} was ended to make room ({reason}): {message}"
        return Verdict(JobState.PREEMPTED, why, pod=name)
    disrupted = condition_of(pod, "DisruptionTarget")
    if disrupted.get("reason") == "PreemptionByScheduler":
        return _made_room(place_of(pod), name, disrupted.get("message", ""))
    if disrupted.get("reason") == "EvictionByEvictionAPI":
        why = f"{place_of(pod)} was evicted: its node is being drained."
        return Verdict(JobState.PREEMPTED, why, pod=name)
    removed = cleaned and is_deleted(pod)
    silent = condition_of(pod, "Ready", "False") and is_alive(pod) and runs(pod)
    if reason == "NodeLost" or (silent and not removed):
        return _node_lost(pod)
    if is_deleted(pod) and (not removed or _told(name, events)):
        return _of_missing(name, events, pod)
    end = end_of(pod)
    if end.get("reason") == "OOMKilled" and role_of(pod) == "launcher":
        why = (
            f"{place_of(pod)}, in which mpirun is, took more memory than its limit (OOMKilled), "
            "which follows from the number of nodes. launcher.log has what it said last."
        )
        return Verdict(JobState.LOST, why, pod=name)
    if end.get("reason") == "OOMKilled":
        return Verdict(
            JobState.FAILED,
            f"was killed: its pod {name} took more memory than its limit (OOMKilled). Raise "
            "launcher.resources.memory, or give each rank a smaller batch.",
            pod=name,
        )
    if end.get("reason") in _NOT_STARTED:
        why = (
            f"{place_of(pod)} could not start its program: {end.get('message', '')}. The image "
            "must have the Python that launcher.python names, by default python."
        )
        return Verdict(JobState.FAILED, why, permanent=True, pod=name)
    if end.get("exitCode") == _UNUSABLE and (said := message_of(end).get("said")):
        return Verdict(JobState.FAILED, f"{place_of(pod)}: {said}.", permanent=True, pod=name)
    if reason and not end and not is_alive(pod):
        # Its kubelet: the node had less than the scheduler knew, or a device is broken.
        words = message.strip().rstrip(".")
        why = f"{place_of(pod)} was not taken by its node ({reason}): {words}."
        return Verdict(JobState.LOST, why, pod=name)
    return None


def _evicted(pod: _Object, message: str) -> Verdict:
    # More than its own limit, or than it had asked for while the node had too little; that in the
    # words of older and of newer kubelets.
    too_much = re.search(
        r"exceeds the (total )?limit|exceeded its|exceeds its request|has larger consumption of",
        message,
    )
    why = f"{place_of(pod)} was evicted: {message.strip().rstrip('.')}."
    # mpirun's pod asks for what we say.
    if too_much and role_of(pod) != "launcher":
        cure = "Raise launcher.resources.memory, or give each rank a smaller batch."
        if "ephemeral" in message:
            cure = "Write less to the pod's own disk, such as /tmp, or write to the workspace."
        return Verdict(JobState.FAILED, f"{why} {cure}", pod=host_of(pod))
    return Verdict(JobState.PREEMPTED, why, pod=host_of(pod))


def _of_missing(
    name: str, events: Iterable[_Object], pod: _Object | None = None, where: str = ""
) -> Verdict:
    uid = pod["metadata"].get("uid", "") if pod else ""
    mine = [one for one in events if _is_of(one, name) and uid in ("", one.get("uid", uid))]
    where = where or (place_of(pod) if pod else f"Pod {name}")
    told = _why_gone(mine)
    if told and told["reason"] == "Preempted":
        return _made_room(where, name, told["message"])
    if told and any(one["reason"] == _SILENT_NODE for one in mine):
        why = f"{where} was given up: its node does not answer ({told['reason']})."
        return Verdict(JobState.LOST, why, pod=name)
    by = "its node was given a taint" if told else "its node is being drained, or by hand"
    why = f"{where} was deleted while the job ran: {by}."
    return Verdict(JobState.PREEMPTED, why, pod=name)


def _made_room(where: str, name: str, message: Any) -> Verdict:
    why = f"{where} had to make room for one of higher priority: {str(message).rstrip('.')}."
    return Verdict(JobState.PREEMPTED, why, pod=name)


def _of_launcher(job: _Object, pods: Sequence[_Object], events: Sequence[_Object]) -> list[Verdict]:
    """What happened to a launcher's pod that is gone: of one that ended, Kubernetes keeps it."""
    failed = failure_of(job).get("reason") == "BackoffLimitExceeded"
    if job.get("operator") or not failed or _has_launcher(pods):
        return []
    name = name_in(job)
    workers = workers_prefix(name, "none")
    mine = [one for one in events if not str(one["of"]).startswith(workers)]
    return [_of_missing(name, mine, where=f"The launcher's pod of {name}")]


def _is_of(event: _Object, host: str) -> bool:
    # What JobSet makes has a suffix.
    return bool(event["of"] == host or event["of"].startswith(f"{host}-"))


def _why_gone(events: Sequence[_Object]) -> _Object | None:
    """Of a pod's events, the newest last, that which says why it is gone; None if none does."""
    for one in events:
        if one["reason"] == "Preempted":
            return one
    for one in reversed(events):
        if one["reason"] == "Killing":  # its node answers, whatever was before
            return None
        if one["reason"] in (_SILENT_NODE, _TAINT):
            return one
    return None


def _told(host: str, events: Iterable[_Object]) -> bool:
    """Whether an event says why a pod is gone."""
    return _why_gone([one for one in events if _is_of(one, host)]) is not None


def _node_lost(pod: _Object) -> Verdict:
    why = (
        f"{place_of(pod)} does not answer any more: the node is down, or cut off. Nothing is known "
        "of its ranks."
    )
    return Verdict(JobState.LOST, why, pod=host_of(pod))


def _cure(said: str) -> str:
    """What to change, of what an API server refuses, as a sentence; empty: nobody knows."""
    cures = {
        "exceeded quota": "Ask for less, or for a larger quota of the namespace",
        "must specify limits.memory": "Set launcher.resources.memory",
        "must specify": "Have a LimitRange with defaults made in the namespace",
        "no PriorityClass": "Correct launcher.priority_class; `kubectl get priorityclasses` lists",
        "service account": "Correct launcher.service_account",
        "PodSecurity": "The namespace allows less: no host_path; no root, see [ddl] run_ranks_as",
        "cannot set blockOwnerDeletion": "It lacks a right that docs/kubernetes.md lists",
        "cannot create": "Its account lacks a right that docs/kubernetes.md lists",
        "cannot patch": "Its account lacks a right that docs/kubernetes.md lists",
        "already exists": "It is of an earlier run of this id, and has not ended, or is not gone. "
        "Wait for its end, or delete it with kubectl",
        "namespaces": "Correct launcher.namespace, or have it made",
        "Kueue's queue": "Have a LocalQueue called default made in the namespace, or Kueue leave "
        "jobs without a queue alone",
    }
    return next((f" {cure}." for words, cure in cures.items() if words in said), "")


def refused(error: Refused, namespace: str, one: _Object) -> SubmitFailed:
    """What the API server does not take of a job, with what to change."""
    said, what = error.said.rstrip("."), f"{one['kind']} {one['metadata']['name']}"
    # Room comes back, and a webhook hears of what there is.
    passes = "exceeded quota" in said or NOT_KNOWN in said
    again = error.retryable or passes or error.reason == "AlreadyExists"
    message = f"Kubernetes does not take {what} in namespace {namespace}: {said}.{_cure(said)}"
    return SubmitFailed(message, retryable=again)
