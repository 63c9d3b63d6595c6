"""Who makes the pods of a job: we, or an operator that the cluster has, from one object.

With an operator the pods, the keys, the hostfile and what runs in the pods are those of
``objects``; only who makes the pods differs::

    none      Job       <name>  and the plain objects beside it
    mpi       MPIJob    <name>  the MPI operator makes the pods and a Service
    trainer   TrainJob  <name>  Kubeflow Trainer makes a JobSet of the TrainingRuntime <name>, and
                                JobSet the pods and a Service

Each is suspended until all that it needs is there. The operators make a hostfile, keys and
variables of their own beside ours. Nothing reads them: Open MPI 5 does not know those variables,
and what goes by them runs every rank in the launcher's pod.

Sources: the operators' controllers and webhooks, mpi-operator 0.8 and trainer 2.3, which say what
names they give to pods, and which names are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddl_airflow.core.job import JobSpec
from ddl_airflow.launchers.kubernetes import objects as plain
from ddl_airflow.launchers.kubernetes.objects import (
    QUEUE_LABEL,
    Wanted,
    launcher_pod,
    name_of,
    object_of,
    worker_pod,
)

# On the object of an operator, when all that it needs is there.
BEGUN = "ddl-airflow/begun"
# How its queue's name is kept until then: Kueue would admit it before.
QUEUE = "ddl-airflow/queue"
KEEP_FINISHED = "ddl-airflow/keep-finished-s"
# Of its own, which nothing of ours reads; where they are in no image's way.
_SSH_OF_OPERATOR = "/etc/mpi-operator"
_TRAINER = "trainer.kubeflow.org"

_Object = Mapping[str, Any]


@dataclass(frozen=True)
class Operator:
    """Who makes pods.

    Attributes:
        key: what the manifest calls it.
        kind, version: of the object that stands for a job, and owns all others.
        resources: what the cluster must have of that version; nothing where every cluster has it.
        name: as people know it.
        objects: all of a job.
        end: the change by which a job's pods are ended while its object stays.
        path: where of its spec the object says that it is suspended.
    """

    key: str
    kind: str
    version: str
    objects: Callable[[JobSpec, Wanted], list[dict[str, Any]]]
    resources: tuple[str, ...] = ()
    name: str = ""
    path: tuple[str, ...] = ()
    end: Mapping[str, Any] = field(default_factory=dict)

    def begin(self, job: _Object) -> dict[str, Any]:
        """The change by which a job starts, all of whose objects are there."""
        if not self.path:
            return {"spec": {"parallelism": 1}}
        said: dict[str, Any] = {"annotations": {BEGUN: "true"}}
        if queue := job["metadata"]["annotations"].get(QUEUE):
            return {"metadata": {**said, "labels": {QUEUE_LABEL: queue}}}  # Kueue lets it start
        return {"metadata": said, **self.suspended(False)}

    def suspended(self, yes: bool) -> dict[str, Any]:
        """The part of the object that says whether it is."""
        said: Any = yes
        for word in reversed(("spec", *self.path)):
            said = {word: said}
        return {"spec": said["spec"]}

    def as_job(self, one: _Object) -> dict[str, Any]:
        """The object as if it were a Job, and ``operator``: what ``causes`` judges."""
        if not self.path:
            # By Kueue alone, which may manage jobs that name no queue.
            return {**one, "operator": "", "suspended": one["spec"].get("suspend") is True}
        about = one["metadata"]
        begun = BEGUN in about.get("annotations", {})
        held: Any = one["spec"]
        for word in self.path:
            held = held.get(word, {})
        status = one.get("status", {})
        conditions = []
        for said in status.get("conditions") or ():
            kind = "Complete" if said["type"] == "Succeeded" else said["type"]
            # The MPI operator says so of one whose worker was evicted while mpirun still runs.
            early = self.kind == "MPIJob" and "completionTime" not in status
            if kind in ("Complete", "Failed") and not early:
                conditions.append({**said, "type": kind})
        return {
            "metadata": about,
            "spec": {"parallelism": int(begun)},
            "status": {"conditions": conditions},
            "operator": self.key,
            "suspended": held is True,
        }


def _first(
    job: JobSpec, wanted: Wanted, operator: Operator, spec: Mapping[str, Any]
) -> dict[str, Any]:
    made = object_of(job, operator.version, operator.kind, name_of(job.job_id), spec=spec)
    keep = {KEEP_FINISHED: f"{wanted.keep_finished_s:g}"}
    queue = {QUEUE: wanted.queue} if wanted.queue else {}
    made["metadata"]["annotations"] |= plain.notes(job, wanted) | keep | queue
    return made


def _mpi_job(job: JobSpec, wanted: Wanted) -> list[dict[str, Any]]:
    def replicas(count: int, template: dict[str, Any]) -> dict[str, Any]:
        del template["spec"]["restartPolicy"]  # the operator warns of it there
        return {"replicas": count, "restartPolicy": "Never", "template": template}

    policy: dict[str, Any] = {
        "suspend": True,
        "backoffLimit": 0,
        "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": int(wanted.keep_finished_s),
    }
    if wanted.time_limit_s:
        policy["activeDeadlineSeconds"] = max(1, int(wanted.time_limit_s))
    spec = {
        "runPolicy": policy,
        "slotsPerWorker": job.slots,
        "mpiImplementation": "OpenMPI",
        "sshAuthMountPath": _SSH_OF_OPERATOR,
        "mpiReplicaSpecs": {
            "Launcher": replicas(1, launcher_pod(job, wanted)),
            "Worker": replicas(job.nodes, worker_pod(job, wanted)),
        },
    }
    return [_first(job, wanted, OPERATORS["mpi"], spec), *plain.shared(job, wanted)]


def _train_job(job: JobSpec, wanted: Wanted) -> list[dict[str, Any]]:
    name = name_of(job.job_id)
    launcher = launcher_pod(job, wanted)
    launcher["spec"]["containers"][0]["name"] = "node"  # its webhook wants one of that name
    mpi = {
        "mpiImplementation": "OpenMPI",
        "numProcPerNode": job.slots,
        "runLauncherAsNode": False,
        "sshAuthMountPath": _SSH_OF_OPERATOR,
    }
    workers = {
        **{"parallelism": job.nodes, "completions": job.nodes, "completionMode": "Indexed"},
        **{"backoffLimit": 0, "template": worker_pod(job, wanted)},
    }
    jobs = [
        {"name": "node", "replicas": 1, "template": {"spec": workers}},
        {
            **{"name": "launcher", "replicas": 1},
            "dependsOn": [{"name": "node", "status": "Ready"}],
            "template": {
                "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
                "spec": {"backoffLimit": 0, "template": launcher},
            },
        },
    ]
    template = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
        "failurePolicy": {"maxRestarts": 0},
        "ttlSecondsAfterFinished": int(wanted.keep_finished_s),
        "replicatedJobs": jobs,
    }
    runtime = object_of(
        *(job, OPERATORS["trainer"].version, "TrainingRuntime", name),
        # So many launchers: the number of the pods called node is the TrainJob's.
        spec={"mlPolicy": {"numNodes": 1, "mpi": mpi}, "template": {"spec": template}},
    )
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": name},
        "suspend": True,
        "trainer": {"numNodes": job.nodes, "numProcPerNode": job.slots},
    }
    if wanted.time_limit_s:
        spec["activeDeadlineSeconds"] = max(1, int(wanted.time_limit_s))
    # Its webhook refuses a TrainJob whose runtime is not there.
    made = _first(job, wanted, OPERATORS["trainer"], spec)
    return [runtime, made, *plain.shared(job, wanted)]


OPERATORS = {
    "none": Operator(
        "none",
        "Job",
        "batch/v1",
        plain.objects,
        # Its deadline ends the launcher's pod, and what that holds; the Job stays.
        end={"spec": {"activeDeadlineSeconds": 1}},
    ),
    "mpi": Operator(
        "mpi",
        "MPIJob",
        "kubeflow.org/v2beta1",
        _mpi_job,
        ("mpijobs",),
        "the MPI operator",
        ("runPolicy", "suspend"),
        # It must not be admitted again.
        {"metadata": {"labels": {QUEUE_LABEL: None}}, "spec": {"runPolicy": {"suspend": True}}},
    ),
    "trainer": Operator(
        "trainer",
        "TrainJob",
        f"{_TRAINER}/v1alpha1",
        _train_job,
        ("trainjobs", "trainingruntimes"),
        "Kubeflow Trainer",
        ("suspend",),
        {"metadata": {"labels": {QUEUE_LABEL: None}}, "spec": {"suspend": True}},
    ),
}
