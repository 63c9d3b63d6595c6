"""What the objects of a job say, as the API server has them, or ``causes.slim`` of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ddl_airflow.launchers.kubernetes.objects import (
    CONTAINERS,
    DELAY,
    NODES,
    ROLE_LABEL,
    worker_name,
)

# Written on the job when it was ended because it could not go on: why.
ENDED_BECAUSE = "ddl-airflow/ended-because"
# When a job that was to wait was let start.
BEGAN = "ddl-airflow/began"
# In which the pods of a job that has ended have ended, too; and more than the grace of one that is
# deleted, after which its node does not answer.
SETTLE_S = 15.0
_OVERDUE_S = 75.0

_Object = Mapping[str, Any]


def workers_of(pods: Iterable[_Object]) -> list[_Object]:
    """The pods that ranks are in."""
    return [pod for pod in pods if role_of(pod) == "worker"]


def role_of(pod: _Object) -> str:
    """``launcher`` or ``worker``; empty if it does not say."""
    return str(pod["metadata"].get("labels", {}).get(ROLE_LABEL, ""))


def name_in(one: _Object) -> str:
    """Its name."""
    return str(one["metadata"]["name"])


def host_of(pod: _Object) -> str:
    """What its ranks call their host."""
    return str(pod["spec"].get("hostname") or name_in(pod))


def place_of(pod: _Object) -> str:
    """A pod and its node, in words."""
    node = pod["spec"].get("nodeName")
    return f"Pod {name_in(pod)} on node {node}" if node else f"Pod {name_in(pod)}"


def missing_hosts(job: _Object, pods: Sequence[_Object]) -> list[str]:
    """Workers' hosts that are not there any more: all were, before the launcher was let start."""
    there = {host_of(pod) for pod in pods}
    operator = job.get("operator", "")
    if operator:
        # It makes the workers first, and one anew that was deleted.
        made = [created(one) for one in pods if role_of(one) == "launcher"]
        if not made:
            return []
        there -= {host_of(one) for one in workers_of(pods) if created(one) > made[0]}
    size = int(annotations_of(job).get(NODES, 0))
    hosts = [worker_name(name_in(job), node, operator) for node in range(size)]
    return [host for host in hosts if host not in there]


def created(one: _Object) -> float:
    """When it was made, in unix seconds."""
    return seconds(one["metadata"]["creationTimestamp"])


def annotations_of(job: _Object) -> _Object:
    """What is noted on a job."""
    found: _Object = job["metadata"].get("annotations", {})
    return found


def delay_of(job: _Object) -> float:
    """Seconds that a job is to wait before it starts."""
    return float(annotations_of(job).get(DELAY, 0))


def began_at(job: _Object) -> float:
    """When a job was let start, or is to be; in unix seconds."""
    waited = annotations_of(job).get(BEGAN)
    return float(waited) if waited else created(job) + delay_of(job)


def is_begun(job: _Object) -> bool:
    """Whether a job was let start, all of whose objects are there."""
    return bool(job["spec"].get("parallelism") != 0)


def over_since(job: _Object) -> float | None:
    """When a job has ended, or was ended by us; None: it has not."""
    if has_finished(job):
        return finished_at(job)
    kept = annotations_of(job).get(ENDED_BECAUSE)
    # A Job that was begun fails by itself soon after, unless it is suspended.
    if kept and (job.get("operator") or job.get("suspended") or not is_begun(job)):
        return float(json.loads(kept)["at"])
    return None


def is_deleted(one: _Object) -> bool:
    """Whether it is to go, and may be there until something else has gone."""
    return "deletionTimestamp" in one["metadata"]


def is_overdue(pod: _Object, now: float) -> bool:
    """Whether a pod should have been gone for long."""
    # It is the time when its grace is over.
    return is_deleted(pod) and now - seconds(pod["metadata"]["deletionTimestamp"]) > _OVERDUE_S


def is_alive(pod: _Object) -> bool:
    """Whether what we run in a pod has not ended."""
    return holds_its_place(pod) and not end_of(pod)


def holds_its_place(pod: _Object) -> bool:
    """Whether a pod takes room on its node: also one in which only a container of others runs."""
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def runs(pod: _Object) -> bool:
    """Whether a container of a pod runs, as far as its node has told."""
    return any("running" in one.get("state", {}) for one in containers_of(pod))


def containers_of(pod: _Object) -> Sequence[_Object]:
    """How the containers of a pod are, but for those that others put beside ours."""
    return [one for one in pod["status"].get("containerStatuses", ()) if one["name"] in CONTAINERS]


def images_of(pods: Iterable[_Object]) -> tuple[str, ...]:
    """What the containers of pods run, ``name@digest`` as their nodes pulled it.

    Of an image that came to a node by other ways there is only its name, and perhaps an id.
    Source: Kubernetes API reference, ContainerStatus.
    """
    found = set()
    for one in (one for pod in pods for one in containers_of(pod)):
        image, by_digest = one.get("image", ""), one.get("imageID", "").rpartition("://")[2]
        if "@" in by_digest:
            found.add(by_digest)
        elif image:
            found.add(f"{image} ({by_digest})" if by_digest else image)
    return tuple(sorted(found))


def end_of(pod: _Object) -> _Object:
    """How the container of a pod ended; empty if it has not."""
    for one in containers_of(pod):
        if ended := one.get("state", {}).get("terminated"):
            found: _Object = ended
            return found
    return {}


def ended_at(pod: _Object, default: float) -> float:
    """When that was, in unix seconds; long before the default if that is not known."""
    at = end_of(pod).get("finishedAt")
    return seconds(at) if at else default - 2 * SETTLE_S


def message_of(end: _Object) -> dict[str, Any]:
    """What ``pod.py`` left word of: ``said`` and ``pod``."""
    try:
        told = json.loads(end.get("message") or "{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def condition_of(one: _Object, kind: str, status: str = "True") -> dict[str, Any]:
    """The condition of that type, if it has that status; else empty."""
    for condition in one["status"].get("conditions") or ():
        if condition["type"] == kind and condition["status"] == status:
            return dict(condition)
    return {}


def failure_of(job: _Object) -> dict[str, Any]:
    """The condition by which a job has failed, or will when its pods have ended; else empty."""
    # Since 1.31 the second comes first, and the first when no pod of the Job is left.
    return condition_of(job, "Failed") or condition_of(job, "FailureTarget")


def has_finished(job: _Object) -> bool:
    """Whether a job has ended, as the cluster sees it, but for pods that are being ended."""
    return bool(condition_of(job, "Complete") or failure_of(job))


def finished_at(job: _Object) -> float:
    """When it did, in unix seconds."""
    condition = condition_of(job, "Complete") or failure_of(job)
    return seconds(condition["lastTransitionTime"])


def told_at(event: _Object) -> float:
    """When an event was told last, in unix seconds; 0 where it does not say."""
    again = (event.get("series") or {}).get("lastObservedTime")
    said = again or event.get("lastTimestamp") or event.get("eventTime") or made_at(event)
    return seconds(said) if said else 0.0


def made_at(event: _Object) -> str:
    """When an event was told first, by the API server's clock; empty where it does not say."""
    return str(event.get("metadata", {}).get("creationTimestamp") or "")


def seconds(said: str) -> float:
    """Unix seconds of a time as Kubernetes writes it."""
    return datetime.fromisoformat(said).timestamp()
