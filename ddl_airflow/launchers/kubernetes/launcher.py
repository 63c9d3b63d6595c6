"""Ranks in pods of a Kubernetes cluster, made of plain objects: no operator is needed.

What must be so: the workspace is a volume that all pods and Airflow see under the same path; the
image has a Python with ddl-ops, Open MPI 5 and sshd. What the objects are is in
``objects``; what runs in the pods in ``pod``; what the cluster says of them,
in words, in ``causes``.

Nothing is started again by the cluster: that would be a second layer of retries. The job's objects
belong to its Job, and go with it.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddl_airflow.core.environment import DEFAULT_OPTIONS, of_job
from ddl_airflow.core.errors import LaunchError, SubmitFailed
from ddl_airflow.core.job import JobHandle, JobSpec, JobState, JobStatus, Submission
from ddl_airflow.launchers import run_as
from ddl_airflow.launchers.base import Told
from ddl_airflow.launchers.kubernetes.api import Cluster, Refused
from ddl_airflow.launchers.kubernetes.causes import (
    ENDED_BECAUSE,
    SILENT,
    Verdict,
    dead,
    judged,
    left_over,
    needs_events,
    refused,
    slim,
    why_ended,
)
from ddl_airflow.launchers.kubernetes.objects import (
    JOB_ID,
    JOB_LABEL,
    MANAGED,
    Wanted,
    completed,
    name_of,
    objects,
)
from ddl_airflow.launchers.local import inherited, make_folders

# Of this host, not of the image.
_NOT_THERE = frozenset(
    """
    PATH HOME USER LOGNAME SHELL TMPDIR LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV KERAS_HOME
    CUDA_VISIBLE_DEVICES CUDA_HOME CUDA_PATH CUDA_CACHE_PATH NVIDIA_VISIBLE_DEVICES
    NVIDIA_DRIVER_CAPABILITIES
    """.split()
)
_OURS = ",".join(f"{name}={value}" for name, value in MANAGED.items())


class KubernetesLauncher:
    """See ``ddl_airflow.launchers.base.Scheduler``. Keeps nothing: any instance knows any job.

    Args:
        image: of the pods; without it no job can be rendered, and every job found.
        python: the ranks' interpreter, in the image.
        context, namespace: where the pods are; empty for the kubeconfig's own.
        others: as ``objects.Wanted`` has them.
    """

    kind = "kubernetes"

    def __init__(
        self,
        image: str = "",
        python: str = "python",
        context: str = "",
        namespace: str = "",
        **others: Any,
    ) -> None:
        self._image = image
        self._python = python
        self._place = f"{namespace}/{context}" if namespace or context else ""
        self._others = others
        self._clusters: dict[str, Cluster] = {}

    def render(self, job: JobSpec) -> Submission:
        """The objects, as ``kubectl create`` takes them. No value of the environment is in them.

        Raises:
            SubmitFailed: no image is named.
        """
        if not self._image:
            raise SubmitFailed(
                "no image is named for the pods. Set launcher.kind: kubernetes in the manifest, "
                "and launcher.image.",
                retryable=False,
            )
        of = run_as.account(job.user)
        wanted = Wanted(
            image=self._image,
            python=self._python,
            user=of.pw_uid if of else os.geteuid(),
            group=of.pw_gid if of else os.getegid(),
            **self._others,
        )
        own = inherited(os.environ)
        env = {name: value for name, value in own.items() if name not in _NOT_THERE} | of_job(job)
        env.setdefault("DDL_OPTIONS", DEFAULT_OPTIONS)
        script = _as_yaml(objects(job, wanted))
        place = ["--namespace", self._namespace_said] if self._namespace_said else []
        return Submission(job, ("kubectl", *place, "create", "-f", "-"), env, script)

    @property
    def _namespace_said(self) -> str:
        return self._place.partition("/")[0]

    def expected(self, job: JobSpec) -> JobHandle:
        """Its name in the cluster follows from the ``job_id``."""
        return replace(job.handle(self.kind, 0, job.nodes), place=self._place)

    def submit(self, submission: Submission) -> JobHandle:
        """Creates the objects, and last of all lets the launcher's pod start.

        Raises:
            SubmitFailed: the cluster refuses one, or cannot be reached.
        """
        import yaml

        job = submission.job
        handle = self.expected(job)
        cluster, namespace = self._where(handle)
        first, *rest = yaml.safe_load_all(submission.script)
        keys = make_keys()
        make_folders(job)
        try:
            made = cluster.create(namespace, first)
        except Refused as error:
            raise refused(error, namespace, first) from error
        owner = {
            **{"apiVersion": first["apiVersion"], "kind": "Job", "blockOwnerDeletion": True},
            **{"name": made["metadata"]["name"], "uid": made["metadata"]["uid"]},
        }
        one = first
        try:
            for one in rest:
                one["metadata"]["ownerReferences"] = [owner]
                cluster.create(namespace, completed(one, submission.env, keys))
            cluster.patch(namespace, "Job", owner["name"], {"spec": {"parallelism": 1}})
        except LaunchError as error:
            with suppress(LaunchError):
                cluster.delete(namespace, "Job", owner["name"], owner["uid"])
            if isinstance(error, Refused):
                raise refused(error, namespace, one) from error
            raise SubmitFailed(str(error)) from error
        return replace(handle, number=_number(owner["uid"]))

    def find(self, handle: JobHandle) -> JobHandle:
        """Asks for the job by its name, if its number is not known.

        Raises:
            LaunchError: the cluster does not answer.
        """
        if handle.number:
            return handle
        cluster, namespace = self._where(handle)
        job = cluster.read(namespace, "Job", name_of(handle.job_id))
        if job is None or not _is(job, handle.job_id):
            return handle
        return replace(handle, number=_number(job["metadata"]["uid"]))

    def ask(self, handles: Sequence[JobHandle]) -> list[Told]:
        """One list of jobs and one of pods for each namespace; events where one is in trouble.

        A job that cannot go on, because a worker's pod is gone, is ended, and keeps why: the
        cluster itself would let the others wait. A cluster that does not answer says so for its
        own jobs only.
        """
        told: dict[JobHandle, Told] = {}
        places: dict[str, list[JobHandle]] = defaultdict(list)
        for handle in handles:
            places[handle.place].append(handle)
        for those in places.values():
            try:
                told |= self._ask(those)
            except LaunchError as error:
                if not error.retryable and len(places) == 1:
                    raise
                told |= {handle: {SILENT: str(error)} for handle in those}
        return [told[handle] for handle in handles]

    def _ask(self, handles: Sequence[JobHandle]) -> dict[JobHandle, Told]:
        cluster, namespace = self._where(handles[0])
        jobs = cluster.list(namespace, "Job", labelSelector=_OURS)
        pods: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for pod in cluster.list(namespace, "Pod", labelSelector=_OURS):
            pods[pod["metadata"]["labels"].get(JOB_LABEL, "")].append(slim(pod))
        named = {job["metadata"]["name"]: slim(job) for job in jobs}
        found: dict[JobHandle, dict[str, Any]] = {}
        for handle in handles:
            job = named.get(name := name_of(handle.job_id))
            if job is not None and not _is(job, handle.job_id):
                job = None
            if job is not None and handle.number not in (0, _number(job["metadata"]["uid"])):
                job = None  # another one, under that name
            # Of another job under that name they are no word on this.
            found[handle] = {"job": job, "pods": pods[name] if job else [], "events": []}
        if any(needs_events(one["job"], one["pods"]) for one in found.values()):
            events = cluster.list(namespace, "Event")
            for one in found.values():
                if one["job"]:
                    name = one["job"]["metadata"]["name"]
                    one["events"] = [slim(event) for event in events if _about(event, name)]
        now = time.time()
        for facts in found.values():
            if verdict := dead(facts, now):
                # Its deadline ends the launcher's pod, and what that holds; the Job stays.
                change = {"spec": {"activeDeadlineSeconds": 1}}
                self._note(cluster, namespace, facts, verdict, change)
            for left in left_over(facts, now):
                self._note(cluster, namespace, facts, why_ended(facts), {})
                about = left["metadata"]
                cluster.delete(namespace, "Pod", about["name"], about["uid"])
        return {
            handle: {"facts": json.dumps(one), "now": str(now)} for handle, one in found.items()
        }

    def _note(
        self,
        cluster: Cluster,
        namespace: str,
        facts: Mapping[str, Any],
        verdict: Verdict | None,
        change: Mapping[str, Any],
    ) -> None:
        """Has the Job keep why it ended, which its pods tell no more when they are gone."""
        about = facts["job"]["metadata"]
        if ENDED_BECAUSE not in about["annotations"]:
            note = (verdict or Verdict(JobState.LOST, "")).dump()
            said = {"metadata": {"annotations": {ENDED_BECAUSE: note}}, **change}
            cluster.patch(namespace, "Job", about["name"], said)
            about["annotations"][ENDED_BECAUSE] = note

    def conclude(self, handle: JobHandle, told: Told) -> JobStatus:
        """What the cluster says while it lives; then what the ranks' records say.

        Raises:
            LaunchError: the cluster has not answered.
        """
        if SILENT in told:
            raise LaunchError(told[SILENT])
        facts: Mapping[str, Any] = json.loads(told["facts"])
        return judged(handle, facts, float(told["now"]))

    def status(self, handle: JobHandle) -> JobStatus:
        """As ``ask`` and ``conclude`` say. Waits for the cluster's answer.

        Raises:
            LaunchError: the cluster does not answer. The job may run on.
        """
        return self.conclude(handle, self.ask([handle])[0])

    def cancel(self, handle: JobHandle, grace_s: float = 0.0) -> None:
        """Deletes the job and all that belongs to it: SIGTERM, and SIGKILL after its ``grace``.

        Does not wait for it: the Job is there until its last pod has ended.

        Raises:
            LaunchError: the cluster does not answer.
        """
        cluster, namespace = self._where(handle)
        job = cluster.read(namespace, "Job", name_of(handle.job_id))
        if job is None or not _is(job, handle.job_id):
            return
        uid = job["metadata"]["uid"]
        if handle.number in (0, _number(uid)):
            cluster.delete(namespace, "Job", job["metadata"]["name"], uid)

    def log(self, handle: JobHandle, rank: int) -> Path:
        """The rank's own file."""
        return handle.log_dir / f"rank-{rank}.log"

    def _where(self, handle: JobHandle) -> tuple[Cluster, str]:
        namespace, _, context = handle.place.partition("/")
        if context not in self._clusters:
            self._clusters[context] = Cluster(context)
        cluster = self._clusters[context]
        return cluster, namespace or cluster.namespace


def make_keys() -> dict[str, str]:
    """Keys for one job: who may log in, and by which key the workers are known."""
    # Airflow needs it itself.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    def pair() -> tuple[str, str]:
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        return private.decode(), public.decode()

    user, host = pair(), pair()
    return {
        "id_ed25519": user[0],
        "authorized_keys": f"{user[1]} ddl\n",
        "ssh_host_ed25519_key": host[0],
        "known_hosts": f"ddl-worker {host[1]}\n",
    }


def _as_yaml(said: Sequence[Mapping[str, Any]]) -> str:
    """As people write it: texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    whole: str = yaml.dump_all(said, Dumper=Dumper, sort_keys=False, width=100)
    return whole


def _is(job: Mapping[str, Any], job_id: str) -> bool:
    return bool(job["metadata"].get("annotations", {}).get(JOB_ID) == job_id)


def _about(event: Mapping[str, Any], name: str) -> bool:
    of = str(event["involvedObject"].get("name", ""))
    return of == name or of.startswith(f"{name}-")


def _number(uid: str) -> int:
    """A number of a uid that JSON holds exactly; 0 would mean that none is known."""
    return int(uid.replace("-", "")[:12], 16) or 1
