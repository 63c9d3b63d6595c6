"""A stand-in for the MPI operator, and for Kubeflow Trainer with JobSet, on the cluster of
tests/integration/kubernetes.py: no operator runs there.

It makes of an MPIJob and of a TrainJob the pods that the operators would make, with the names,
variables and mounts that they give them, and tells of their end as they do; nothing else of what
they do. The definitions of the kinds are of our own: the fields that we use. With TESTS_CRDS, a
folder with the operators' own, those are installed in their place.
"""

from __future__ import annotations

import copy
import json
import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddl_airflow.launchers.kubernetes.api import Cluster, Refused
from tests.integration.kubernetes import SPACE, KubernetesCluster
from tests.limits import until

_EVERY_S = 0.4
_STRING, _NUMBER, _YES = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
# The API server looks at pods when they are made.
_ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
# What of the launcher's command an operator's user would not have written: all that we do about
# hosts. What is left goes by the operator's variables, and so by none.
_BLIND = """\
import os, sys, tempfile
words = sys.argv[sys.argv.index("--") + 1 :]
for name in [one for one in os.environ if one.startswith("PRTE_MCA_")]:
    del os.environ[name]
folder = tempfile.mkdtemp()
with open(f"{folder}/mpirun", "w") as file:
    file.write(f"#!{sys.executable}\\n")
    file.write(f"import os, sys; real = {os.path.dirname(sys.executable)!r} + '/mpirun'\\n")
    file.write("words = sys.argv[1:]\\n")
    file.write("for option in ('--hostfile', '--host', '--map-by'):\\n")
    file.write("    if option in words:\\n")
    file.write("        at = words.index(option); del words[at : at + 2]\\n")
    file.write("os.execv(real, [real, '--map-by', ':OVERSUBSCRIBE', *words])\\n")
os.chmod(f"{folder}/mpirun", 0o700)
os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
os.execvp(words[0], words)
"""
_HOSTFILE = "/etc/mpi/hostfile"
_OF_OPEN_MPI = {
    "OMPI_MCA_orte_default_hostfile": _HOSTFILE,
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_set_default_slots": "1",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}

_Object = dict[str, Any]


def _fields(required: tuple[str, ...] = (), **fields: Any) -> _Object:
    """A schema of these fields; others are pruned."""
    said: _Object = {"type": "object", "properties": fields}
    return said | ({"required": list(required)} if required else {})


def _list_of(one: _Object) -> _Object:
    return {"type": "array", "items": one}


def _one_of(*words: str) -> _Object:
    return {"type": "string", "enum": list(words)}


_REPLICAS = _fields(replicas=_NUMBER, restartPolicy=_one_of("Never", "OnFailure"), template=_ANY)
_MPI_JOB = _fields(
    ("mpiReplicaSpecs",),
    runPolicy=_fields(
        suspend=_YES,
        backoffLimit=_NUMBER,
        cleanPodPolicy=_one_of("None", "Running", "All"),
        ttlSecondsAfterFinished=_NUMBER,
        activeDeadlineSeconds=_NUMBER,
    ),
    slotsPerWorker=_NUMBER,
    mpiImplementation=_one_of("OpenMPI", "Intel", "MPICH"),
    sshAuthMountPath=_STRING,
    mpiReplicaSpecs=_fields(("Launcher",), Launcher=_REPLICAS, Worker=_REPLICAS),
)
_TRAIN_JOB = _fields(
    ("runtimeRef",),
    runtimeRef=_fields(("name",), apiGroup=_STRING, kind=_STRING, name=_STRING),
    suspend=_YES,
    activeDeadlineSeconds=_NUMBER,
    trainer=_fields(numNodes=_NUMBER, numProcPerNode=_NUMBER),
)
_JOB_SET = _fields(
    network=_fields(enableDNSHostnames=_YES, publishNotReadyAddresses=_YES),
    successPolicy=_fields(operator=_one_of("All", "Any"), targetReplicatedJobs=_list_of(_STRING)),
    failurePolicy=_fields(maxRestarts=_NUMBER),
    ttlSecondsAfterFinished=_NUMBER,
    replicatedJobs=_list_of(
        _fields(
            ("name", "template"),
            name=_STRING,
            replicas=_NUMBER,
            dependsOn=_list_of(_fields(name=_STRING, status=_one_of("Ready", "Complete"))),
            template=_ANY,
        )
    ),
)
_RUNTIME = _fields(
    mlPolicy=_fields(
        numNodes=_NUMBER,
        mpi=_fields(
            mpiImplementation=_one_of("OpenMPI"),
            numProcPerNode=_NUMBER,
            runLauncherAsNode=_YES,
            sshAuthMountPath=_STRING,
        ),
    ),
    template=_fields(spec=_JOB_SET),
)
_KINDS = {
    "MPIJob": ("kubeflow.org", "v2beta1", _MPI_JOB),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", _TRAIN_JOB),
    "TrainingRuntime": ("trainer.kubeflow.org", "v1alpha1", _RUNTIME),
}


def _definition(kind: str) -> _Object:
    group, version, spec = _KINDS[kind]
    plural = f"{kind.lower()}s"
    one = {
        **{"name": version, "served": True, "storage": True, "subresources": {"status": {}}},
        "schema": {"openAPIV3Schema": _fields(spec=spec, status=_ANY)},
    }
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    return {
        **{"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"},
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [one]},
    }


def _known_to_1_20(said: Any) -> Any:
    """A definition without rules in CEL, and without defaults, some of which 1.20 refuses; so
    lists are no maps, whose keys must have one.
    """
    if isinstance(said, dict):
        # A field may be called so, too: its schema is an object.
        lists = {"x-kubernetes-list-type", "x-kubernetes-list-map-keys"}
        unknown = {"x-kubernetes-validations", "default", *lists}
        return {
            name: _known_to_1_20(one)
            for name, one in said.items()
            if name not in unknown or (isinstance(one, dict) and "type" in one)
        }
    return [_known_to_1_20(one) for one in said] if isinstance(said, list) else said


class StandIn:
    """Started by ``with``: from then on the cluster has the kinds, and pods are made of them.

    Attributes:
        blind: whether mpirun gets what the operators tell it of the hosts, and nothing of ours.
    """

    def __init__(self, cluster: KubernetesCluster) -> None:
        self.blind = False
        self._kubernetes = cluster
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._names: dict[str, list[str]] = {}

    def __enter__(self) -> StandIn:
        definitions = list(map(_definition, _KINDS))
        if folder := os.environ.get("TESTS_CRDS"):
            paths = sorted(Path(folder).glob("*.yaml"))
            definitions = [_known_to_1_20(yaml.safe_load(path.read_text())) for path in paths]
        every = {"apiVersion": "v1", "kind": "List", "items": definitions}
        self._kubernetes.kubectl("create", "-f", "-", given=json.dumps(every))
        for kind, (group, _, _) in _KINDS.items():
            words = ("get", "--raw", f"/apis/{group}/{_KINDS[kind][1]}")
            name = f"{kind.lower()}s"
            until(lambda: name in self._kubernetes.kubectl(*words, check=False), 30)  # noqa: B023
        with pytest.MonkeyPatch.context() as context:
            context.setenv("KUBECONFIG", str(self._kubernetes.kubeconfig))
            self._api = Cluster()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(30)
        names = [f"{kind.lower()}s.{group}" for kind, (group, _, _) in _KINDS.items()]
        self._kubernetes.kubectl("delete", "crd", *names, "--wait=false", check=False)

    def conditions(self, kind: str, name: str) -> set[str]:
        """What the operator says of a job."""
        said = self._kubernetes.kubectl("-n", SPACE, "get", f"{kind}/{name}", "-o", "json")
        conditions = json.loads(said).get("status", {}).get("conditions", ())
        return {one["type"] for one in conditions if one["status"] == "True"}

    def _run(self) -> None:
        while not self._ending.wait(_EVERY_S):
            for kind, look in (("MPIJob", self._mpi_job), ("TrainJob", self._train_job)):
                for one in self._api.list(SPACE, kind):
                    if "deletionTimestamp" not in one["metadata"]:
                        with suppress(Refused):  # it is looked at again
                            look({**one, "kind": kind})

    # --- the MPI operator ------------------------------------------------------------------------

    def _mpi_job(self, one: _Object) -> None:
        name, spec = one["metadata"]["name"], one["spec"]
        workers = [
            f"{name}-worker-{n}" for n in range(spec["mpiReplicaSpecs"]["Worker"]["replicas"])
        ]
        if _ended(one):
            self._remove(*self._alive(workers))
            return
        if spec["runPolicy"].get("suspend"):
            self._remove(*workers)
            self._remove(f"{name}-launcher", kind="Job")
            return
        labels = {"training.kubeflow.org/job-name": name}
        hosts = [f"{worker}.{name}.{SPACE}.svc" for worker in workers]
        self._given(one, labels, hosts, f"{name}-ssh", f"{name}-config")
        template = spec["mpiReplicaSpecs"]["Worker"]["template"]
        for worker in workers:
            self._pod(one, worker, template, labels, worker, f"{name}-ssh", "Never")
        template = spec["mpiReplicaSpecs"]["Launcher"]["template"]
        policy = spec["runPolicy"]
        end = self._launcher(
            one, f"{name}-launcher", template, policy, f"{name}-ssh", f"{name}-config"
        )
        if end:
            kind = "Succeeded" if end["type"] == "Complete" else "Failed"
            self._tell(one, kind, end, completionTime=end["lastTransitionTime"])

    # --- Kubeflow Trainer, and JobSet ------------------------------------------------------------

    def _train_job(self, one: _Object) -> None:
        name, spec = one["metadata"]["name"], one["spec"]
        hosts = [f"{name}-node-0-{n}" for n in range(spec["trainer"]["numNodes"])]
        names = self._names.setdefault(one["metadata"]["uid"], [])
        job = f"{name}-launcher-0"
        if _ended(one):
            self._remove(*self._alive(names))
            return
        if spec.get("suspend"):
            self._remove(*names)
            self._remove(job, kind="Job")
            return
        runtime = self._api.read(SPACE, "TrainingRuntime", spec["runtimeRef"]["name"])
        assert runtime is not None, "its webhook would have refused the TrainJob"
        jobs = {
            said["name"]: said for said in runtime["spec"]["template"]["spec"]["replicatedJobs"]
        }
        ssh, files = f"{name}-mpi-ssh-auth", f"{name}-mpi-hostfile"
        labels = {"jobset.sigs.k8s.io/jobset-name": name}
        self._given(one, labels, [f"{host}.{name}" for host in hosts], ssh, files)
        template = jobs["node"]["template"]["spec"]["template"]
        if not names:
            names += [f"{host}-{uuid.uuid4().hex[:5]}" for host in hosts]
            for host, pod in zip(hosts, names, strict=True):
                # Its container is not called "node": there the keys are not mounted.
                self._pod(one, pod, template, labels, host, "", "")
            return
        spec = jobs["launcher"]["template"]["spec"]
        # What has the label of its trainer: its mpirun, of which there is to be one.
        label = jobs["launcher"]["template"]["metadata"]["labels"]
        assert label == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        spec["parallelism"] = spec["completions"] = runtime["spec"]["mlPolicy"]["numNodes"]
        pods = [self._api.read(SPACE, "Pod", pod) for pod in names]
        end = None
        if self._api.read(SPACE, "Job", job):
            end = self._launcher(one, job, spec["template"], spec, ssh, files)
        if end:
            self._tell(one, end["type"], end)
            return
        if any(pod is None or _phase(pod) == "Failed" for pod in pods):
            self._remove(*self._alive(names))
            self._remove(job, kind="Job")
            said = (
                f"jobset failed due to one or more job failures (first failed job: {name}-node-0)"
            )
            self._tell(one, "Failed", {"reason": "JobSetFailed", "message": said})
            return
        if all(pod and _is_ready(pod) for pod in pods):
            self._launcher(one, job, spec["template"], spec, ssh, files)

    # --- what both do ----------------------------------------------------------------------------

    def _given(
        self, one: _Object, labels: Mapping[str, str], hosts: list[str], ssh: str, files: str
    ) -> None:
        """Service, keys and hostfile. Nothing of ours reads the last two."""
        name = one["metadata"]["name"]
        hostfile = "".join(f"{host} slots=1\n" for host in hosts)
        service = {"clusterIP": "None", "selector": dict(labels), "ports": [{"port": 22}]}
        self._make(one, "v1", "Service", name, spec=service)
        self._make(one, "v1", "ConfigMap", files, data={"hostfile": hostfile})
        self._make(one, "v1", "Secret", ssh, stringData={"ssh-privatekey": "of the operator"})

    def _pod(
        self,
        one: _Object,
        name: str,
        template: _Object,
        labels: Mapping[str, str],
        host: str,
        ssh: str,
        restart: str,
    ) -> None:
        made = copy.deepcopy(template)
        made["spec"] |= {"hostname": host, "subdomain": one["metadata"]["name"]}
        if restart:
            made["spec"]["restartPolicy"] = restart
        if ssh:
            _mount(made, "ssh-auth", self._ssh_path(one), {"secret": {"secretName": ssh}})
        metadata = made.get("metadata", {})
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
        self._make(one, "v1", "Pod", name, metadata, spec=made["spec"])

    def _launcher(
        self, one: _Object, name: str, template: _Object, policy: _Object, ssh: str, files: str
    ) -> _Object | None:
        """Makes the launcher's Job; how it ended, if it has."""
        job = self._api.read(SPACE, "Job", name)
        if job is None:
            made = copy.deepcopy(template)
            made["spec"] |= {"restartPolicy": "Never", "hostname": name}
            made["spec"]["subdomain"] = one["metadata"]["name"]
            container = made["spec"]["containers"][0]
            container["env"] += [{"name": key, "value": said} for key, said in _OF_OPEN_MPI.items()]
            _mount(made, "ssh-auth", self._ssh_path(one), {"secret": {"secretName": ssh}})
            _mount(made, "hosts", os.path.dirname(_HOSTFILE), {"configMap": {"name": files}})
            if self.blind:
                python, *words = container["command"]
                container["command"] = [python, "-c", _BLIND, *words]
            spec = {"backoffLimit": policy["backoffLimit"], "template": made}
            for field in (
                *("activeDeadlineSeconds", "ttlSecondsAfterFinished"),
                *("parallelism", "completions"),
            ):
                if field in policy:
                    spec[field] = policy[field]
            self._make(one, "batch/v1", "Job", name, spec=spec)
            return None
        conditions = job.get("status", {}).get("conditions") or ()
        return next((said for said in conditions if said["type"] in ("Complete", "Failed")), None)

    def _ssh_path(self, one: _Object) -> str:
        if one["kind"] == "MPIJob":
            return str(one["spec"]["sshAuthMountPath"])
        runtime = self._api.read(SPACE, "TrainingRuntime", one["spec"]["runtimeRef"]["name"])
        assert runtime is not None
        return str(runtime["spec"]["mlPolicy"]["mpi"]["sshAuthMountPath"])

    def _make(
        self,
        one: _Object,
        version: str,
        kind: str,
        name: str,
        metadata: _Object | None = None,
        **rest: Any,
    ) -> None:
        about = one["metadata"]
        owner = {
            **{"apiVersion": one["apiVersion"], "kind": one["kind"], "name": about["name"]},
            **{"uid": about["uid"], "controller": True, "blockOwnerDeletion": True},
        }
        whole = {**(metadata or {}), "name": name, "ownerReferences": [owner]}
        with suppress(Refused):  # it is there
            self._api.create(
                SPACE, {"apiVersion": version, "kind": kind, "metadata": whole, **rest}
            )

    def _alive(self, names: list[str]) -> list[str]:
        pods = [(name, self._api.read(SPACE, "Pod", name)) for name in names]
        return [name for name, pod in pods if pod and _phase(pod) in ("Running", "Pending")]

    def _remove(self, *names: str, kind: str = "Pod") -> None:
        for name in names:
            one = self._api.read(SPACE, kind, name)
            if one is not None and "deletionTimestamp" not in one["metadata"]:
                self._api.delete(SPACE, kind, name, one["metadata"]["uid"])

    def _tell(self, one: _Object, kind: str, end: _Object, **more: Any) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        said = {
            **{"type": kind, "status": "True", "lastTransitionTime": now},
            **{"reason": end.get("reason") or kind, "message": end.get("message", "")},
        }
        group, version, _ = _KINDS[one["kind"]]
        about = one["metadata"]
        path = f"/apis/{group}/{version}/namespaces/{SPACE}/{one['kind'].lower()}s/{about['name']}"
        whole = {**one, "status": {"conditions": [said], **more}}
        self._kubernetes.kubectl(
            "replace", "--raw", f"{path}/status", "-f", "-", given=json.dumps(whole), check=False
        )


def _mount(template: _Object, name: str, path: str, source: _Object) -> None:
    template["spec"].setdefault("volumes", []).append({"name": name, **source})
    container = template["spec"]["containers"][0]
    container.setdefault("volumeMounts", []).append({"name": name, "mountPath": path})


def _ended(one: _Object) -> bool:
    conditions = one.get("status", {}).get("conditions", ())
    return any(said["type"] in ("Succeeded", "Complete", "Failed") for said in conditions)


def _phase(pod: _Object) -> str:
    return str(pod["status"].get("phase", ""))


def _is_ready(pod: _Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(said["type"] == "Ready" and said["status"] == "True" for said in conditions)
