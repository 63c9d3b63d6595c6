"""Ranks in pods of a Kubernetes cluster, of plain objects or of an operator's.

What must be so: the workspace is a volume that all pods and Airflow see under the same path; the
image has a Python with ddl-ops, Open MPI 5 and sshd. What the objects are is in
``objects``, and who makes the pods in ``operators``; what runs in the pods in ``pod``; what the
cluster says of them, in words, in ``causes``.

Nothing is started again by the cluster: that would be a second layer of retries. The job's objects
belong to its first one, a Job, MPIJob or TrainJob, and go with it.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddl_airflow.core.connections import AirflowConnection, FindConnection, own_connection
from ddl_airflow.core.environment import DEFAULT_OPTIONS, of_job
from ddl_airflow.core.errors import ConnectionInvalid, LaunchError, SubmitFailed
from ddl_airflow.core.job import JobHandle, JobSpec, JobStatus, Submission
from ddl_airflow.launchers import run_as
from ddl_airflow.launchers.base import Told
from ddl_airflow.launchers.kubernetes.api import Cluster, Refused
from ddl_airflow.launchers.kubernetes.causes import (
    AGAIN,
    NOT_KNOWN,
    SILENT,
    WAITS,
    abandoned,
    judged,
    needs_events,
    outdated,
    refused,
    slim,
    waits_as,
)
from ddl_airflow.launchers.kubernetes.facts import (
    created,
    is_deleted,
    made_at,
    name_in,
    over_since,
    seconds,
    told_at,
)
from ddl_airflow.launchers.kubernetes.objects import (
    JOB_ID,
    JOB_LABEL,
    MANAGED,
    Wanted,
    completed,
    name_of,
)
from ddl_airflow.launchers.kubernetes.operators import OPERATORS, Operator
from ddl_airflow.launchers.kubernetes.place import Place, owner_of
from ddl_airflow.launchers.local import inherited, make_folders, share_lock

# Of this host, not of the image.
_NOT_THERE = frozenset(
    """
    PATH HOME USER LOGNAME SHELL TMPDIR LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV KERAS_HOME
    CUDA_VISIBLE_DEVICES CUDA_HOME CUDA_PATH CUDA_CACHE_PATH NVIDIA_VISIBLE_DEVICES
    NVIDIA_DRIVER_CAPABILITIES
    """.split()
)
# How long what is left of a job that has ended may take to go, and how often things are looked at.
_REMOVED_S = 60.0
_LOOK_S = 0.5
# In which Kubeflow Trainer knows a runtime that has been made.
_KNOWN_S = 10.0
# All events of a namespace are asked for: so often for a job that only waits.
_EVENTS_S = 15.0
# Of a job, beside the words of an error that is none of ours: its traceback.
_ODD = "odd"
_OURS = ",".join(f"{name}={value}" for name, value in MANAGED.items())


class KubernetesLauncher:
    """See ``ddl_airflow.launchers.base.Scheduler``. Keeps nothing that others lack: any instance
    knows any job. Where that is, its handle says, whatever becomes the default meanwhile.

    Args:
        image: of the pods; without it no job can be rendered, and every job found.
        python: the ranks' interpreter, in the image.
        context, namespace: where the pods are; empty for the kubeconfig's own.
        connection: id of an Airflow connection that has the kubeconfig; empty for none.
        operator: who makes the pods, a key of ``operators.OPERATORS``.
        others: as ``objects.Wanted`` has them.

    Raises:
        SubmitFailed: the id of the connection has a slash in it.
    """

    kind = "kubernetes"

    def __init__(
        self,
        image: str = "",
        python: str = "python",
        context: str = "",
        namespace: str = "",
        connection: str = "",
        operator: str = "none",
        **others: Any,
    ) -> None:
        self._image = image
        self._python = python
        self._operator = OPERATORS[operator]
        self._namespace = namespace
        if "/" in connection:  # its place would be that of another connection
            said = f"launcher.connection: {connection[:60]!r} has a slash in it"
            raise SubmitFailed(f"{said}. Give the connection an id without one.", retryable=False)
        # What any other launcher finds the job by: [operator:]namespace[@connection]/context. A
        # namespace has neither : nor @ in its name.
        self._place = _place_of(operator, namespace, connection, context)
        self._resolved = bool(namespace and context)
        self._find: FindConnection = own_connection
        self._others = others
        # By context and id of a connection, with what that was when it was looked up.
        self._clusters: dict[tuple[str, str], tuple[AirflowConnection | None, Cluster]] = {}
        # How a job waited when events were asked for, when that was, and what they said of it.
        self._kept: dict[JobHandle, tuple[str, float, list[dict[str, Any]]]] = {}

    def find_connections(self, find: FindConnection) -> None:
        """As ``ddl_airflow.launchers.base.Connecting``."""
        self._find = find

    def connection_of(self, handle: JobHandle) -> str:
        """The id of the connection by which a job is reached; empty for none."""
        return handle.place.partition("/")[0].partition("@")[2]

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
            operator=self._operator.key,
            **self._others,
        )
        own = inherited(os.environ)
        env = {name: value for name, value in own.items() if name not in _NOT_THERE} | of_job(job)
        if job.cluster is None:
            env.setdefault("DDL_OPTIONS", DEFAULT_OPTIONS)
        script = _as_yaml(self._operator.objects(job, wanted))
        place = ["--namespace", self._namespace] if self._namespace else []
        return Submission(job, ("kubectl", *place, "create", "-f", "-"), env, script)

    def expected(self, job: JobSpec) -> JobHandle:
        """Its name in the cluster follows from the ``job_id``; its place is as it is found now.

        Raises:
            SubmitFailed: there is no way to reach a cluster.
        """
        grace_s = self._others.get("grace_s", Wanted.grace_s)
        handle = replace(job.handle(self.kind, 0, job.nodes), place=self._place, grace_s=grace_s)
        if not self._resolved:
            # Another process, or this one later, may have other defaults: it would find no job
            # there, and take it for one that has ended.
            cluster, namespace, operator = self._where(handle)
            conn_id = self.connection_of(handle)
            self._place = _place_of(operator.key, namespace, conn_id, cluster.context)
            self._resolved = True
        return replace(handle, place=self._place)

    def submit(self, submission: Submission) -> JobHandle:
        """Creates the objects, and last of all lets the job start.

        That is at once, or when ``ask`` finds that the job has waited for as long as it is to.

        Raises:
            SubmitFailed: the cluster refuses one, cannot be reached, or has not the operator.
        """
        import yaml

        job = submission.job
        handle = self.expected(job)
        cluster, namespace, operator = self._where(handle)
        self._must_have(cluster, operator)
        made = list(yaml.safe_load_all(submission.script))
        first = next(one for one in made if one["kind"] == operator.kind)
        ahead, rest = made[: made.index(first)], made[made.index(first) + 1 :]
        keys = make_keys()
        make_folders(job)
        share_lock(job)
        created: list[dict[str, Any]] = []
        try:
            for one in [*ahead, first]:
                created.append(_made_anew(cluster, namespace, operator, one))
            owner = owner_of(operator, created[-1]["metadata"])
            for one in ahead:
                # What it waits for is not to wait for it.
                owned = {"ownerReferences": [{**owner, "blockOwnerDeletion": False}]}
                name = one["metadata"]["name"]
                cluster.patch(namespace, one["kind"], name, {"metadata": owned})
            pods = [one for one in rest if one["kind"] == "Pod"] if job.delay_s else []
            for one in rest:
                if one not in pods:
                    one["metadata"]["ownerReferences"] = [owner]
                    cluster.create(namespace, completed(one, submission.env, keys))
            change = operator.begin(first)
            if job.delay_s:
                kept = json.dumps({"pod": pods[0] if pods else None, "change": change})
                change = {"metadata": {"annotations": {WAITS: kept}}}
            one = first
            cluster.patch(namespace, operator.kind, owner["name"], change)
        except LaunchError as error:
            for left in reversed(created):
                about = left["metadata"]
                with suppress(LaunchError):
                    cluster.delete(namespace, left["kind"], about["name"], about["uid"])
            if isinstance(error, Refused):
                raise refused(error, namespace, one) from error
            if len(created) <= len(ahead):
                raise  # it may be there all the same
            raise SubmitFailed(str(error)) from error
        return replace(handle, number=_number(owner["uid"]))

    def _must_have(self, cluster: Cluster, operator: Operator) -> None:
        if not operator.resources:
            return
        try:
            missing = set(operator.resources) - cluster.has(operator.version)
        except Refused:
            return  # who may not ask hears of it when the object is made
        if missing:
            raise SubmitFailed(
                f"launcher.operator is {operator.key}, and this cluster has no {operator.kind} "
                f"({operator.version}: {', '.join(sorted(missing))}). Have {operator.name} "
                "installed there; or set launcher.operator: none, which needs no operator.",
                retryable=False,
            )

    def find(self, handle: JobHandle) -> JobHandle:
        """Asks for the job by its name, if its number is not known.

        Raises:
            LaunchError: the cluster does not answer.
        """
        if handle.number:
            return handle
        cluster, namespace, operator = self._where(handle)
        job = cluster.read(namespace, operator.kind, name_of(handle.job_id))
        if job is None or not _is(job, handle.job_id):
            return handle
        return replace(handle, number=_number(job["metadata"]["uid"]))

    def ask(self, handles: Sequence[JobHandle]) -> list[Told]:
        """One list of jobs and one of pods for each namespace; events where one is in trouble.

        A job that cannot go on, because a worker's pod is gone, is ended, and keeps why: the
        cluster itself would let the others wait. A cluster that does not answer, or whose answers
        nobody has foreseen, is so for its own jobs only, and what is refused of a job for that job
        only.
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
                told |= {handle: _silent(error) for handle in those}
            except Exception as error:  # of one cluster, or of how one is reached
                if len(places) == 1:
                    raise
                odd = {
                    SILENT: f"{type(error).__name__}: {error}",
                    _ODD: "".join(traceback.format_exception(error)),
                }
                told |= dict.fromkeys(those, odd)
        return [told[handle] for handle in handles]

    def _ask(self, handles: Sequence[JobHandle]) -> dict[JobHandle, Told]:
        cluster, namespace, operator = self._where(handles[0])
        jobs = cluster.list(namespace, operator.kind, labelSelector=_OURS)
        pods: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for pod in cluster.list(namespace, "Pod", labelSelector=_OURS):
            pods[pod["metadata"]["labels"].get(JOB_LABEL, "")].append(slim(pod))
        named = {job["metadata"]["name"]: slim(operator.as_job(job)) for job in jobs}
        found: dict[JobHandle, dict[str, Any]] = {}
        for handle in handles:
            job = named.get(name := name_of(handle.job_id))
            if job is not None and not _is(job, handle.job_id):
                job = None
            if job is not None and handle.number not in (0, _number(job["metadata"]["uid"])):
                job = None  # another one, under that name
            # Of another job under that name they are no word on this.
            mine = pods[name] if job or name not in named else []
            found[handle] = {"job": job, "pods": mine, "events": []}
        self._add_events(cluster, namespace, found)
        now = time.time()
        place = Place(cluster, namespace, operator)
        told: dict[JobHandle, Told] = {}
        for handle, facts in found.items():
            told[handle] = {"facts": json.dumps(facts), "now": str(now)}
            try:
                place.look_after(handle, facts, now)
            except SubmitFailed as error:  # it is begun at another look
                told[handle] = {"facts": json.dumps({**facts, "held": str(error)}), "now": str(now)}
            except LaunchError as error:
                # It is gone, or another process was first: the next answer says so.
                if not isinstance(error, Refused) or error.code not in (404, 409):
                    told[handle] = _silent(error)
        # What nobody else removes, who looks at other jobs does.
        asked = {name_of(handle.job_id) for handle in handles}
        for name, job in named.items():
            if name not in asked and (outdated(job, now) or abandoned(job, now)):
                with suppress(LaunchError):
                    place.delete(operator.kind, job)
        return told

    def _add_events(
        self, cluster: Cluster, namespace: str, found: Mapping[JobHandle, dict[str, Any]]
    ) -> None:
        """Where they are needed; of jobs that only wait, those of before for a while."""
        asking = {
            handle: waits_as(one["job"], one["pods"])
            for handle, one in found.items()
            if needs_events(one["job"], one["pods"])
        }
        now = time.monotonic()
        kept = {of: one for of, one in self._kept.items() if now - one[1] < _EVENTS_S}
        self._kept = kept
        if all(how and of in kept and kept[of][0] == how for of, how in asking.items()):
            for handle in asking:
                found[handle]["events"] = kept[handle][2]
            return
        # The server lists them by their names.
        events = sorted(cluster.list(namespace, "Event"), key=told_at)
        for handle, one in found.items():
            if one["job"]:
                one["events"] = [slim(event) for event in events if _about(event, one["job"])]
                kept[handle] = (asking.get(handle, ""), now, one["events"])

    def conclude(self, handle: JobHandle, told: Told) -> JobStatus:
        """What the cluster says while it lives; then what the ranks' records say.

        Raises:
            LaunchError: the cluster has not answered.
            RuntimeError: it has, in a way that nobody has foreseen.
        """
        if _ODD in told:
            unforeseen = RuntimeError(told[SILENT])
            unforeseen.add_note(told[_ODD])
            raise unforeseen
        if SILENT in told:
            raise LaunchError(told[SILENT], retryable=AGAIN in told)
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
        cluster, namespace, operator = self._where(handle)
        job = cluster.read(namespace, operator.kind, name_of(handle.job_id))
        if job is None or not _is(job, handle.job_id):
            return
        uid = job["metadata"]["uid"]
        if handle.number in (0, _number(uid)):
            cluster.delete(namespace, operator.kind, job["metadata"]["name"], uid)

    def log(self, handle: JobHandle, rank: int) -> Path:
        """The rank's own file."""
        return handle.log_dir / f"rank-{rank}.log"

    def _where(self, handle: JobHandle) -> tuple[Cluster, str, Operator]:
        place, _, context = handle.place.partition("/")
        where, _, conn_id = place.partition("@")
        operator, _, namespace = where.rpartition(":")
        try:
            connection = self._find(conn_id) if conn_id else None
        except ConnectionInvalid as error:
            said = f"launcher.connection: {error}"
            raise SubmitFailed(said, retryable=error.retryable) from error
        key = (context, conn_id)
        if key not in self._clusters or self._clusters[key][0] != connection:
            self._clusters[key] = connection, Cluster(context, connection)
        cluster = self._clusters[key][1]
        return cluster, namespace or cluster.namespace, OPERATORS[operator or "none"]


def _place_of(operator: str, namespace: str, conn_id: str, context: str) -> str:
    where = namespace if operator == "none" else f"{operator}:{namespace}"
    where += f"@{conn_id}" if conn_id else ""
    return f"{where}/{context}" if where or context else ""


def _silent(error: LaunchError) -> Told:
    """Of a job, in place of what the cluster says."""
    return {SILENT: str(error)} | ({AGAIN: "yes"} if error.retryable else {})


def _made_anew(
    cluster: Cluster, namespace: str, operator: Operator, one: Mapping[str, Any]
) -> dict[str, Any]:
    """The object, also where one of its name is left that nobody needs."""
    try:
        return _made(cluster, namespace, one)
    except Refused as error:
        if error.reason != "AlreadyExists" or not _make_way(cluster, namespace, operator, one):
            raise
    return _made(cluster, namespace, one)


def _made(cluster: Cluster, namespace: str, one: Mapping[str, Any]) -> dict[str, Any]:
    """The object, also where what it refers to has been made a moment ago."""
    until = time.monotonic() + _KNOWN_S
    while True:
        try:
            return cluster.create(namespace, one)
        except Refused as error:
            if NOT_KNOWN not in error.said or time.monotonic() > until:
                raise
        time.sleep(_LOOK_S)


def _make_way(cluster: Cluster, namespace: str, operator: Operator, one: Mapping[str, Any]) -> bool:
    """Removes what has an object's name; False if it is needed, or is not gone in time.

    It is of a submission that was cut off before the object had owners; or of a job that has ended,
    of a run that was deleted and is made again under its id.
    """
    about, deadline = one["metadata"], time.monotonic() + _REMOVED_S
    while (found := cluster.read(namespace, one["kind"], about["name"])) is not None:
        if time.monotonic() > deadline:
            return False
        kind = one["kind"]
        if "ownerReferences" in found["metadata"]:
            kind = operator.kind
            found = cluster.read(namespace, kind, about["name"])
        if found is not None and not is_deleted(found):
            if kind == operator.kind and not (
                _is(found, about["annotations"][JOB_ID])
                and over_since(slim(operator.as_job(found))) is not None
            ):
                return False
            cluster.delete(namespace, kind, about["name"], found["metadata"]["uid"])
        time.sleep(_LOOK_S)
    return True


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


def _about(event: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    of, name = str(event["involvedObject"].get("name", "")), name_in(job)
    made = made_at(event)
    if made and seconds(made) < created(job):
        return False  # of an earlier one of that name: they are kept for an hour
    return of == name or of.startswith(f"{name}-")


def _number(uid: str) -> int:
    """A number of a uid that JSON holds exactly; 0 would mean that none is known."""
    return int(uid.replace("-", "")[:12], 16) or 1
