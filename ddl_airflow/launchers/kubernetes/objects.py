"""The objects that a job on Kubernetes is made of. Pure: what they are, not how they come there.

Of plain objects, where no operator is to make the pods; ``operators`` has the others, and takes the
pods from here::

    Job        <name>             mpirun, in a pod of its own without GPUs; owns all that follows
    ConfigMap  <name>             hostfile, settings of ssh and sshd, pod.py
    Secret     <name>-keys        keys made for this job alone
    Secret     <name>-env         what ranks find in their environment
    Service    <name>             headless: gives the workers names
    Pod        <name>-worker-<n>  sshd, and under it the ranks of node n

Workers are plain pods, and not a StatefulSet: that would start a pod again that was evicted or
preempted, under its name, and with it take away why; it would keep GPUs after the job's end, which
nobody but a controller can see; and Kueue admits plain pods of one group together or not at all.

mpirun reads our own hostfile. Open MPI 5 does not read the variables of which operators tell it the
hosts by, and then runs all ranks where it is itself (kubeflow/trainer 4028, mpi-operator 842).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddl_airflow.core.job import JobSpec
from ddl_airflow.launchers import job_preflight
from ddl_airflow.launchers.local import on_nodes
from ddl_airflow.launchers.mpirun import OpenMpi

MANAGED = {"app.kubernetes.io/managed-by": "ddl-airflow"}
JOB_LABEL = "ddl-airflow/job"
JOB_ID = "ddl-airflow/job-id"
ROLE_LABEL = "ddl-airflow/role"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
WORKLOAD_LABEL = "kueue.x-k8s.io/prebuilt-workload-name"
_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
_GROUP_SIZE = "kueue.x-k8s.io/pod-group-total-count"
_GROUP_RETRIES = "kueue.x-k8s.io/retriable-in-group"
START_TIMEOUT = "ddl-airflow/start-timeout-s"
DELAY = "ddl-airflow/delay-s"
# Of a Job that is to wait, whose deadline is set when it begins.
TIME_LIMIT = "ddl-airflow/time-limit-s"
NODES = "ddl-airflow/nodes"
GPUS = "nvidia.com/gpu"
POD_PROGRAM = Path(__file__).with_name("pod.py")

# What ours are called: Kubeflow Trainer wants a launcher named node.
CONTAINERS = frozenset(("launcher", "ranks", "node"))
# The proxy of a mesh would not end with ours, so that the Job never completes.
_ALONE = {"sidecar.istio.io/inject": "false", "kuma.io/sidecar-injection": "disabled"}
_NOTES = {
    "linkerd.io/inject": "disabled",
    "consul.hashicorp.com/connect-inject": "false",
    # An autoscaler evicts pods to pack nodes closer: a job would begin again each time.
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
_PORT = 2222
_HOSTFILE = "/etc/ddl/hostfile"
# A pod that JobSet makes of it has 18 letters more, and 63 at most.
_LONGEST_SLUG = 28
# What the launcher's pod asks for: mpirun without ranks, and two ssh for each worker; in MiB.
_LAUNCHER_MIB, _FOR_WORKER_MIB = 128, 16
# A worker that has answered is looked for where it was then: pod.py includes the addresses. A cut
# link is seen after some 10 s, at either end. Source: what mpirun does without is in
# docs/kubernetes.md.
_SSH_CONFIG = """\
Include /tmp/ddl/addresses
Host {workers}*
  HostName %h.{name}
  Port {port}
  User ddl
  IdentityFile /tmp/ddl/id_ed25519
  IdentitiesOnly yes
  BatchMode yes
  HostKeyAlias ddl-worker
  UserKnownHostsFile /etc/ddl/known_hosts
  StrictHostKeyChecking yes
  ConnectTimeout 5
  ServerAliveInterval 3
  ServerAliveCountMax 3
  LogLevel ERROR
"""
_SSHD_CONFIG = """\
Port {port}
HostKey /tmp/ddl/ssh_host_ed25519_key
AuthorizedKeysFile /etc/ddl/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
X11Forwarding no
AllowTcpForwarding no
PermitTTY no
ClientAliveInterval 3
ClientAliveCountMax 3
MaxStartups 256
"""
# sshd and ssh ask who the user is, whom the image need not know. sshd under root wants its own.
_ACCOUNTS = """\
ddl:*:{user}:{group}::/tmp:/bin/sh
sshd:*:65533:65533::/run/sshd:/bin/false
"""
_SETTINGS = {
    "PRTE_MCA_plm_ssh_args": "-F /etc/ddl/ssh_config",
    # Only the launcher has the key with which one may log in.
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    # Its connections last as long as the ranks: with more workers than this it would wait for ever.
    "PRTE_MCA_plm_ssh_num_concurrent": "10000",
    "PRTE_MCA_prte_default_hostfile": _HOSTFILE,
    "PRTE_MCA_oob_tcp_keepalive_time": "5",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "2",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Wanted:
    """What the manifest asks for; see ``sections.launchers.kubernetes``. Times are in seconds."""

    image: str
    python: str
    user: int
    group: int
    operator: str = "none"
    image_pull_policy: str = ""
    image_pull_secrets: Sequence[str] = ()
    service_account: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()
    priority_class: str = ""
    queue: str = ""
    resources: Mapping[str, str] = field(default_factory=dict)
    volumes: Sequence[Mapping[str, Any]] = ()
    start_timeout_s: float | None = None
    time_limit_s: float | None = None
    grace_s: float = 30.0
    keep_finished_s: float = 3600.0
    preflight: bool = True


def name_of(job_id: str) -> str:
    """The name of a job's objects: one that a person knows, and that no other job has."""
    slug = re.sub(r"[^a-z0-9]+", "-", job_id.lower()).strip("-")[:_LONGEST_SLUG].strip("-")
    digest = hashlib.sha256(job_id.encode()).hexdigest()[:10]
    return f"ddl-{slug}-{digest}" if slug else f"ddl-{digest}"


def worker_name(name: str, node: int, operator: str = "none") -> str:
    """The hostname of a node's pod; its name, too, but where the Trainer makes it."""
    return f"{workers_prefix(name, operator)}{node}"


def workers_prefix(name: str, operator: str) -> str:
    """What all workers' hostnames begin with."""
    return f"{name}-node-0-" if operator == "trainer" else f"{name}-worker-"


def objects(job: JobSpec, wanted: Wanted) -> list[dict[str, Any]]:
    """All objects of the job, its Job first. Nothing in them is secret: see ``completed``."""
    name = name_of(job.job_id)
    found = [_launcher(job, wanted, name), *shared(job, wanted), _service(job, name)]
    return found + [_worker(job, wanted, name, node) for node in range(job.nodes)]


def shared(job: JobSpec, wanted: Wanted) -> list[dict[str, Any]]:
    """What the pods find in files and in their environment, whoever makes them."""
    name = name_of(job.job_id)
    return [
        object_of(job, "v1", "ConfigMap", name, data=_files(job, wanted, name)),
        object_of(job, "v1", "Secret", f"{name}-keys", type="Opaque"),
        object_of(job, "v1", "Secret", f"{name}-env", type="Opaque"),
    ]


def completed(
    one: Mapping[str, Any], env: Mapping[str, str], keys: Mapping[str, str]
) -> dict[str, Any]:
    """The object with what is not shown: the environment, the keys; and ``pod.py``."""
    name = str(one["metadata"]["name"])
    if one["kind"] == "Secret":
        return {**one, "stringData": dict(env if name.endswith("-env") else keys)}
    if one["kind"] == "ConfigMap":
        return {**one, "data": {**one["data"], "pod.py": POD_PROGRAM.read_text("utf-8")}}
    return dict(one)


def object_of(job: JobSpec, version: str, kind: str, name: str, **rest: Any) -> dict[str, Any]:
    """One object of the job, which says of which."""
    labels = {**MANAGED, JOB_LABEL: name_of(job.job_id)}
    metadata = {"name": name, "labels": labels, "annotations": {JOB_ID: job.job_id}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _files(job: JobSpec, wanted: Wanted, name: str) -> dict[str, str]:
    workers = workers_prefix(name, wanted.operator)
    hosts = [f"{workers}{node} slots={job.slots}\n" for node in range(job.nodes)]
    return {
        "hostfile": "".join(hosts),
        "ssh_config": _SSH_CONFIG.format(name=name, workers=workers, port=_PORT),
        "sshd_config": _SSHD_CONFIG.format(port=_PORT),
        "passwd": _ACCOUNTS.format(user=wanted.user, group=wanted.group),
    }


def _service(job: JobSpec, name: str) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB_LABEL: name, ROLE_LABEL: "worker"},
        "ports": [{"name": "ssh", "port": _PORT}],
    }
    return object_of(job, "v1", "Service", name, spec=spec)


def _mpirun(job: JobSpec, wanted: Wanted) -> list[str]:
    mpi = OpenMpi("mpirun")
    program, *words = on_nodes(mpi, job, wanted.python)
    argv = [program, "--hostfile", _HOSTFILE, *words]
    if job.lock is not None:
        keep = ["--keep", *map(str, job.keep)] if job.keep else []
        locked = [wanted.python, "-m", "ddl_ops.locked", *keep, str(job.lock), job.job_id, "--"]
        argv = [*locked, *argv]
    if wanted.preflight and job.nodes > 1:
        look = job_preflight.words(wanted.python, job.record_dir, job.slots, _HOSTFILE)
        argv = [*look, *argv]
    return argv


def launcher_pod(job: JobSpec, wanted: Wanted) -> dict[str, Any]:
    """The template of the pod that mpirun is in."""
    name = name_of(job.job_id)
    settings = _SETTINGS | (_AS_ROOT if wanted.user == 0 else {})
    container = _container(job, wanted, name) | {
        "name": "launcher",
        "command": _literal(
            *(wanted.python, "/etc/ddl/pod.py", "launcher"),
            *("--workers", str(job.nodes), "--prefix", workers_prefix(name, wanted.operator)),
            *("--grace", _in_pod(wanted), "--log", str(job.log_dir / "launcher.log")),
            *(("--patience", _number(wanted.start_timeout_s)) if wanted.start_timeout_s else ()),
            *("--", *_mpirun(job, wanted)),
        ),
        "workingDir": str(job.folder),
        "env": [{"name": key, "value": value} for key, value in settings.items()],
        "resources": _for_launcher(job.nodes),
    }
    given = [_from_map(name, "hostfile", "ssh_config", "passwd", "pod.py")]
    given.append(_from_secret(name, "id_ed25519", "known_hosts"))
    return {
        "metadata": {"labels": _labels(name, "launcher") | _ALONE, "annotations": dict(_NOTES)},
        "spec": _pod(wanted, container, given),
    }


def _for_launcher(workers: int) -> dict[str, Any]:
    asked = _LAUNCHER_MIB + _FOR_WORKER_MIB * workers
    # A namespace's quota may want a limit, too.
    limit = {"memory": f"{4 * asked}Mi"}
    return {"requests": {"cpu": "100m", "memory": f"{asked}Mi"}, "limits": limit}


def worker_pod(job: JobSpec, wanted: Wanted) -> dict[str, Any]:
    """The template of a pod that ranks are in."""
    name = name_of(job.job_id)
    requests = dict(wanted.resources)
    limits = {"memory": wanted.resources["memory"]} if "memory" in wanted.resources else {}
    if job.gpu:
        limits[GPUS] = requests[GPUS] = str(job.slots)
    asked = {"requests": requests, "limits": limits}
    container = _container(job, wanted, name) | {
        "name": "ranks",
        "command": _literal(wanted.python, "/etc/ddl/pod.py", "worker", "--grace", _in_pod(wanted)),
        "ports": [{"name": "ssh", "containerPort": _PORT}],
        "resources": {key: value for key, value in asked.items() if value},
    }
    given = [_from_map(name, "sshd_config", "passwd", "pod.py")]
    given.append(_from_secret(name, "ssh_host_ed25519_key", "authorized_keys"))
    pod = _pod(wanted, container, given) | {"affinity": _apart(name)}
    about = {"labels": _labels(name, "worker") | _ALONE, "annotations": dict(_NOTES)}
    return {"metadata": about, "spec": pod}


def notes(job: JobSpec, wanted: Wanted) -> dict[str, str]:
    """What of the job its first object keeps for who asks how it stands."""
    found = {NODES: str(job.nodes)}
    if job.delay_s:
        found[DELAY] = _number(job.delay_s)
    if wanted.start_timeout_s:
        found[START_TIMEOUT] = _number(wanted.start_timeout_s)
    return found


def _launcher(job: JobSpec, wanted: Wanted, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = {
        # Its pod starts when all that it needs is there: see ``KubernetesLauncher.submit``.
        "parallelism": 0,
        "completions": 1,
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": int(wanted.keep_finished_s),
        "template": launcher_pod(job, wanted),
    }
    made = object_of(job, "batch/v1", "Job", name, spec=spec)
    made["metadata"]["annotations"] |= notes(job, wanted)
    # A deadline counts from the Job's creation, and an operator's from the end of its suspension.
    if wanted.time_limit_s and job.delay_s:
        made["metadata"]["annotations"][TIME_LIMIT] = _number(wanted.time_limit_s)
    elif wanted.time_limit_s:
        spec["activeDeadlineSeconds"] = max(1, int(wanted.time_limit_s))
    return made


def _worker(job: JobSpec, wanted: Wanted, name: str, node: int) -> dict[str, Any]:
    template = worker_pod(job, wanted)
    made = object_of(job, "v1", "Pod", worker_name(name, node))
    for kind in ("labels", "annotations"):
        made["metadata"][kind] |= template["metadata"][kind]
    if wanted.queue:
        made["metadata"]["labels"] |= {QUEUE_LABEL: wanted.queue, _GROUP_LABEL: name}
        # No pod comes in place of one that failed: Kueue is to let go of what has ended.
        group = {_GROUP_SIZE: str(job.nodes), _GROUP_RETRIES: "false"}
        made["metadata"]["annotations"] |= group
    made["spec"] = template["spec"] | {"hostname": worker_name(name, node), "subdomain": name}
    return made


def _apart(name: str) -> dict[str, Any]:
    """Nodes of their own where there are as many."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": _labels(name, "worker")},
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _labels(name: str, role: str) -> dict[str, str]:
    return {**MANAGED, JOB_LABEL: name, ROLE_LABEL: role}


def _literal(*words: str) -> list[str]:
    """A command's words as a pod has to have them.

    Kubernetes puts a variable's value in place of ``$(NAME)``, also between a shell's quotes, and
    ``$`` in place of ``$$``.
    """
    return [word.replace("$", "$$") for word in words]


def _container(job: JobSpec, wanted: Wanted, name: str) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "ddl", "mountPath": "/etc/ddl", "readOnly": True},
        {"name": "ddl", "mountPath": "/etc/passwd", "subPath": "passwd", "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    for number, one in enumerate(wanted.volumes):
        mount = {"name": f"volume-{number}", "mountPath": one["mount_path"]}
        if one.get("sub_path"):
            mount["subPath"] = one["sub_path"]
        if one.get("read_only"):
            mount["readOnly"] = True
        mounts.append(mount)
    security: dict[str, Any] = {"allowPrivilegeEscalation": False}
    if wanted.user:
        security["capabilities"] = {"drop": ["ALL"]}
    policy = {"imagePullPolicy": wanted.image_pull_policy} if wanted.image_pull_policy else {}
    return {
        "image": wanted.image,
        **policy,
        "envFrom": [{"secretRef": {"name": f"{name}-env"}}],
        "volumeMounts": mounts,
        "securityContext": security,
    }


def _pod(
    wanted: Wanted, container: dict[str, Any], given: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        # Read by a user whose number the cluster may choose; the pod has no other.
        {"name": "ddl", "projected": {"defaultMode": 0o444, "sources": list(given)}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    for number, one in enumerate(wanted.volumes):
        if one.get("claim"):
            claim = {"claimName": one["claim"], "readOnly": bool(one.get("read_only"))}
            volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": claim})
        else:
            path = {"path": one["host_path"], "type": "Directory"}
            volumes.append({"name": f"volume-{number}", "hostPath": path})
    security: dict[str, Any] = {"runAsUser": wanted.user, "runAsGroup": wanted.group}
    if wanted.user:
        security |= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    said: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(1, round(wanted.grace_s)),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security,
        "containers": [container],
        "volumes": volumes,
    }
    if wanted.image_pull_secrets:
        said["imagePullSecrets"] = [{"name": one} for one in wanted.image_pull_secrets]
    if wanted.service_account:
        said["serviceAccountName"] = wanted.service_account
    if wanted.node_selector:
        said["nodeSelector"] = dict(wanted.node_selector)
    if wanted.priority_class:
        said["priorityClassName"] = wanted.priority_class
    if wanted.tolerations:
        said["tolerations"] = [
            {**one, "operator": "Equal" if "value" in one else "Exists"}
            for one in wanted.tolerations
        ]
    return said


def _from_map(name: str, *files: str) -> dict[str, Any]:
    return {"configMap": {"name": name, "items": [{"key": one, "path": one} for one in files]}}


def _from_secret(name: str, *files: str) -> dict[str, Any]:
    items = [{"key": one, "path": one} for one in files]
    return {"secret": {"name": f"{name}-keys", "items": items}}


def _in_pod(wanted: Wanted) -> str:
    """What of the grace is for ranks: the pod itself ends before Kubernetes kills it."""
    return _number(max(0.5, wanted.grace_s - 1.0))


def _number(value: float) -> str:
    return f"{value:g}"
