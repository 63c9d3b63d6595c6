"""How the launcher asks for many jobs at once, of an API server that refuses some things."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import ConnectionInvalid, LaunchError, SubmitFailed
from ddl_airflow.core.job import JobSpec, JobState
from ddl_airflow.launchers.kubernetes import KubernetesLauncher
from ddl_airflow.launchers.kubernetes import launcher as module
from ddl_airflow.launchers.kubernetes.api import Cluster, Refused
from ddl_airflow.launchers.kubernetes.facts import ENDED_BECAUSE
from ddl_airflow.launchers.kubernetes.objects import (
    DELAY,
    JOB_ID,
    JOB_LABEL,
    ROLE_LABEL,
    name_of,
)
from tests.limits import until, within


def ago(seconds: float) -> str:
    return datetime.fromtimestamp(time.time() - seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class OneServer:
    """An API server that holds what it is given, and refuses what it is told to."""

    namespace, context = "default", ""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict]] = {"Job": [], "Pod": [], "Event": []}
        self.refuses: dict[str, Refused] = {}
        self.patched: list[str] = []
        self.change: dict = {}  # the last one
        self.deleted: list[str] = []

    def list(self, _namespace: str, kind: str, **_query: str) -> list[dict]:
        return self.objects[kind]

    def patch(self, _namespace: str, _kind: str, name: str, change: dict) -> None:
        if name in self.refuses:
            raise self.refuses[name]
        self.patched.append(name)
        self.change = change

    def delete(self, _namespace: str, _kind: str, name: str, _uid: str) -> None:
        if name in self.refuses:
            raise self.refuses[name]
        self.deleted.append(name)

    def job(self, job_id: str, *, workers: int = 1, created: float = 60.0, **spec: object) -> str:
        """A job of one node that runs, or has lost its worker."""
        name = name_of(job_id)
        notes = {JOB_ID: job_id, "ddl-airflow/nodes": "1"}
        about = {"name": name, "uid": "0001-1", "annotations": notes}
        about |= {"creationTimestamp": ago(created), "resourceVersion": "7"}
        one = {"metadata": about, "spec": {"parallelism": 1, **spec}, "status": {}}
        self.objects["Job"].append(one)
        for role, suffix in [("launcher", "x"), ("worker", "worker-0")][: 1 + workers]:
            pod = {"name": f"{name}-{suffix}", "uid": "u", "creationTimestamp": ago(created)}
            pod["labels"] = {JOB_LABEL: name, ROLE_LABEL: role}
            running = {"state": {"running": {"startedAt": ago(created)}}}
            running["name"] = "launcher" if role == "launcher" else "ranks"
            status = {"phase": "Running", "containerStatuses": [running]}
            self.objects["Pod"].append(
                {"metadata": pod, "spec": {"nodeName": "n"}, "status": status}
            )
        return name


@pytest.fixture
def server(monkeypatch):
    one = OneServer()
    monkeypatch.setattr(module, "Cluster", lambda *_: one)
    return one


def job_in(folder: Path, job_id: str) -> JobSpec:
    return JobSpec(
        job_id=job_id,
        command="python train.py",
        nodes=1,
        slots=1,
        python="python",
        folder=folder,
        record_dir=folder / "records",
        log_dir=folder / "logs",
    )


@pytest.fixture
def handle_of(tmp_path: Path):
    for folder in ("records", "logs"):
        (tmp_path / folder).mkdir()

    def handle(job_id: str):
        return KubernetesLauncher().expected(job_in(tmp_path, job_id))

    return handle


@pytest.mark.parametrize("code", [403, 404, 409, 422, 503])
def test_a_job_that_cannot_be_changed_concerns_no_other(server, handle_of, code):
    one = server.job("dead/train-1", workers=0)
    server.job("well/train-1")
    server.refuses[one] = Refused(code, "", "no")
    handles = [handle_of("dead/train-1"), handle_of("well/train-1")]
    launcher = KubernetesLauncher()
    told = launcher.ask(handles)
    assert launcher.conclude(handles[1], told[1]).state is JobState.RUNNING
    if code in (404, 409):  # it has gone, or another process was first: the next answer says
        assert launcher.conclude(handles[0], told[0]).state is JobState.RUNNING
    else:
        with pytest.raises(LaunchError, match="no") as caught:
            launcher.conclude(handles[0], told[0])
        assert caught.value.retryable is (code == 503)


@pytest.mark.parametrize("code", [401, 503])
def test_a_place_that_refuses_says_so_with_whether_that_may_pass(server, handle_of, code):
    def refuse(*_: object, **__: object) -> list[dict]:
        raise Refused(code, "", "no")

    server.list = refuse
    handles = [handle_of("one/train-1"), replace(handle_of("two/train-1"), place="other/")]
    launcher = KubernetesLauncher()
    for handle, told in zip(handles, launcher.ask(handles), strict=True):
        assert json.dumps(dict(told))
        with pytest.raises(LaunchError, match="no") as caught:
            launcher.conclude(handle, told)
        assert caught.value.retryable is (code == 503)


@pytest.mark.parametrize("others", [True, False])
def test_what_nobody_has_foreseen_of_a_place_concerns_no_other(server, handle_of, others):
    """As of a cluster whose objects are not what they should be: no job was watched any more."""
    server.job("well/train-1")
    lists = server.list

    def odd(namespace: str, kind: str, **query: str) -> list[dict]:
        return [{"metadata": {}}] if namespace == "odd" else lists(namespace, kind, **query)

    server.list = odd
    handles = [replace(handle_of("one/train-1"), place="odd/")]
    launcher = KubernetesLauncher()
    if not others:  # its traceback is to be in the log, where nobody else has to hear of it
        with pytest.raises(KeyError, match="labels"):
            launcher.ask(handles)
        return
    handles.append(handle_of("well/train-1"))
    told = launcher.ask(handles)
    assert launcher.conclude(handles[1], told[1]).state is JobState.RUNNING
    assert json.dumps(dict(told[0]))
    # No LaunchError: its trigger outlasts that for a while, and not for ever.
    with pytest.raises(RuntimeError, match="KeyError: 'labels'") as caught:
        launcher.conclude(handles[0], told[0])
    assert "in _ask" in "".join(traceback.format_exception(caught.value))


def test_kueues_label_stays_where_the_namespace_has_a_default_queue(server, handle_of, tmp_path):
    """It would let a job start again that is suspended in another queue, or a queue of no name."""
    name = server.job("dead/train-1", workers=0, runPolicy={"suspend": False})
    server.objects["MPIJob"] = server.objects.pop("Job")
    server.objects["MPIJob"][0]["metadata"]["annotations"]["ddl-airflow/begun"] = "true"
    handle_of("dead/train-1")
    launcher = KubernetesLauncher(operator="mpi")
    handle = launcher.expected(job_in(tmp_path, "dead/train-1"))
    patch, said = server.patch, []

    def refuse(namespace: str, kind: str, name: str, change: dict) -> None:
        said.append(change["metadata"]["labels"])
        if "kueue.x-k8s.io/queue-name" in said[-1]:
            words = "queue-name must not be empty in namespace with default queue"
            raise Refused(403, "Forbidden", words)
        patch(namespace, kind, name, change)

    server.patch = refuse
    launcher.status(handle)
    assert said == [
        {"kueue.x-k8s.io/queue-name": None},
        {"kueue.x-k8s.io/prebuilt-workload-name": f"{name}-ended"},
    ]
    assert server.change["spec"] == {"runPolicy": {"suspend": True}}
    assert "worker-0 was deleted" in server.change["metadata"]["annotations"][ENDED_BECAUSE]


@pytest.mark.parametrize(
    ("about", "left_s", "phase", "ended"),
    [
        ({"ownerReferences": [{"kind": "Job"}]}, None, "Running", False),  # deleted in a moment
        ({}, 60, "Running", False),
        ({}, 60, "Failed", True),
        ({}, -90, "Running", True),  # its node is down
        ({}, None, "Running", True),  # nobody deletes it
    ],
)
def test_a_job_that_is_gone_before_its_pods_has_ended_with_them(
    server, handle_of, about, left_s, phase, ended
):
    """As `kubectl delete job` has it, in the background."""
    server.job("one/train-1")
    server.objects["Job"].clear()
    if left_s is not None:
        about = {"deletionTimestamp": ago(-left_s)}
    for pod in server.objects["Pod"]:
        pod["metadata"] |= about
        pod["status"]["phase"] = phase
    status = KubernetesLauncher().status(handle_of("one/train-1"))
    assert (status.ended, status.reason == "is being ended") == (ended, not ended)


def test_events_are_asked_for_now_and_then_while_a_job_only_waits(server, handle_of, monkeypatch):
    """All of the namespace are asked for, and a job may wait for days."""
    name = server.job("one/train-1")
    status = server.objects["Pod"][1]["status"]
    status["phase"] = "Pending"
    (container,) = status["containerStatuses"]
    container["state"] = {"waiting": {"reason": "ContainerCreating"}}
    event = {"involvedObject": {"name": f"{name}-worker-0"}, "reason": "FailedMount"}
    server.objects["Event"].append(event | {"message": "not there"})
    listed, lists = [], server.list

    def count(namespace: str, kind: str, **query: str) -> list[dict]:
        listed.append(kind)
        return lists(namespace, kind, **query)

    server.list = count
    launcher, handle = KubernetesLauncher(), handle_of("one/train-1")
    for _ in range(3):
        assert "not there" in launcher.status(handle).reason
    assert listed.count("Event") == 1
    container["state"]["waiting"]["reason"] = "ImagePullBackOff"
    launcher.status(handle)
    assert listed.count("Event") == 2
    with monkeypatch.context() as context:
        context.setattr(module, "_EVENTS_S", 0.0)
        launcher.status(handle)
    assert listed.count("Event") == 3
    status["phase"] = "Failed"  # what happened to it is asked at once, and each time
    for _ in range(2):
        launcher.ask([handle])
    assert listed.count("Event") == 5
    status["phase"] = "Running"
    launcher.ask([handle])
    assert listed.count("Event") == 5


def test_events_are_in_the_order_of_their_times(server, handle_of):
    """The server lists them by their names, and those of an earlier job of that name, too."""
    name = server.job("one/train-1", workers=0)
    server.objects["Job"][0]["status"]["conditions"] = [
        {"type": "Failed", "status": "True", "lastTransitionTime": ago(40)}
    ]

    def add(reason: str, made_s: float, **times: object) -> None:
        of = {"name": f"{name}-worker-0", "uid": "u"}
        one = {"involvedObject": of, "reason": reason, "message": f"{reason} it says"}
        about = {"creationTimestamp": ago(made_s)}
        server.objects["Event"].append({"metadata": about, **one, **times})

    launcher, handle = KubernetesLauncher(), handle_of("one/train-1")
    add("Preempted", 90, eventTime=ago(90))  # the job is 60 s old
    add("Killing", 45, lastTimestamp=ago(45))
    add("NodeNotReady", 50, lastTimestamp=ago(50))
    status = launcher.status(handle)
    assert status.state is JobState.PREEMPTED and "is being drained" in status.reason
    # As the scheduler tells them; one that was told again has the time of the last.
    add("NodeNotReady", 55, lastTimestamp=None, series={"lastObservedTime": ago(42)})
    assert launcher.status(handle).state is JobState.LOST
    add("Preempted", 44, lastTimestamp=None, eventTime=ago(44).replace("Z", ".123456Z"))
    status = launcher.status(handle)
    assert status.state is JobState.PREEMPTED and "Preempted it says" in status.reason


def waits_to_begin(server, **notes: str) -> str:
    """A job with one worker whose time has come."""
    name = server.job("one/train-1", workers=0, parallelism=0)
    pod = {"kind": "Pod", "metadata": {"name": f"{name}-worker-0"}}
    waits = json.dumps({"pod": pod, "change": {"spec": {"parallelism": 1}}})
    server.objects["Job"][0]["metadata"]["annotations"] |= {"ddl-airflow/waits": waits, **notes}
    return name


QUOTA = 'pods "one-worker-0" is forbidden: exceeded quota: gpus'
CHANGED = 'Operation cannot be fulfilled on resourcequotas "gpus": the object has been modified'


@pytest.mark.parametrize(
    "refusal",
    [
        Refused(503, "", "shutting down"),
        Refused(429, "", "too many"),
        Refused(403, "Forbidden", QUOTA),
        Refused(409, "Conflict", CHANGED),  # another pod was made in that moment
    ],
)
def test_a_job_that_cannot_be_begun_for_a_moment_is_begun_later(server, handle_of, refusal):
    """It had to make room, which is to use no attempt; and what it has would be left for good."""
    name = waits_to_begin(server)
    refused = [refusal, refusal]

    def create(*_: object) -> None:
        if refused:
            raise refused.pop()

    server.create = create
    launcher, handle = KubernetesLauncher(), handle_of("one/train-1")
    for _ in range(2):
        status = launcher.status(handle)
        assert status.state is JobState.PENDING and refusal.said in status.reason
        tried = json.loads(server.change["metadata"]["annotations"]["ddl-airflow/tried"])
        assert time.time() - tried["at"] < 60.0 and "spec" not in server.change
    launcher.status(handle)
    assert server.patched[-1] == name and server.change["spec"] == {"parallelism": 1}


@pytest.mark.parametrize(
    ("said", "notes"),
    [('User "u" cannot create resource "pods"', {}), (QUOTA, {"ddl-airflow/start-timeout-s": "5"})],
)
def test_a_job_that_cannot_be_begun_at_all_says_so(server, handle_of, said, notes):
    name = waits_to_begin(server, **notes)

    def create(*_: object) -> None:
        raise Refused(403, "Forbidden", said)

    server.create = create
    launcher, handle = KubernetesLauncher(), handle_of("one/train-1")
    launcher.status(handle)
    assert server.patched == [name]  # with why it ended


@pytest.fixture
def half_refused(server, monkeypatch) -> list[tuple[str, str]]:
    """Of a job of two nodes a quota refuses the second; what is deleted, with its uid."""
    waits_to_begin(server, **{"ddl-airflow/nodes": "2"})
    deleted: list[tuple[str, str]] = []

    def create(_namespace: str, pod: dict) -> dict:
        if pod["metadata"]["name"].endswith("-worker-1"):
            raise Refused(403, "Forbidden", QUOTA)
        if any(there["metadata"]["name"] == pod["metadata"]["name"] for there in pods):
            raise Refused(409, "AlreadyExists", "already exists")
        return {**pod, "metadata": {**pod["metadata"], "uid": "made"}}

    pods = server.objects["Pod"]
    pods.clear()
    server.create = create
    server.delete = lambda _namespace, _kind, name, uid: deleted.append((name, uid))
    return deleted


WORKER = f"{name_of('one/train-1')}-worker-0"


def left_worker(server, phase: str = "Running", **about: str) -> None:
    """As a look that was cut off leaves it."""
    labels = {JOB_LABEL: name_of("one/train-1"), ROLE_LABEL: "worker"}
    pod = {"name": WORKER, "uid": "left", "labels": labels, "creationTimestamp": ago(30), **about}
    server.objects["Pod"].append({"metadata": pod, "spec": {}, "status": {"phase": phase}})


@pytest.mark.parametrize("left", [False, True])
def test_a_job_that_can_begin_only_in_part_holds_nothing(server, handle_of, half_refused, left):
    if left:
        left_worker(server)
    status = KubernetesLauncher().status(handle_of("one/train-1"))
    assert status.state is JobState.PENDING and "exceeded quota" in status.reason
    assert half_refused == [(WORKER, "left" if left else "made")]


def test_a_job_all_of_whose_workers_are_there_begins_in_a_full_quota(server, handle_of):
    """A look made them and was cut off. The quota is asked before the name."""
    waits_to_begin(server)
    server.objects["Pod"].clear()
    left_worker(server)

    def create(*_: object) -> None:
        raise Refused(403, "Forbidden", QUOTA)

    server.create = create
    KubernetesLauncher().status(handle_of("one/train-1"))
    assert server.change["spec"] == {"parallelism": 1} and server.deleted == []


@pytest.mark.parametrize("since", [50.0, 70.0])
def test_pods_are_made_in_vain_no_more_than_once_a_minute(server, handle_of, half_refused, since):
    """Each time they may make others go that are of lower priority."""
    tried = json.dumps({"at": time.time() - since, "reason": "exceeded quota, as said"})
    server.objects["Job"][0]["metadata"]["annotations"]["ddl-airflow/tried"] = tried
    status = KubernetesLauncher().status(handle_of("one/train-1"))
    assert status.state is JobState.PENDING and "exceeded quota" in status.reason
    assert len(half_refused) == (since > 60.0)


def test_pods_that_a_vain_begin_left_are_let_go_meanwhile(server, handle_of, half_refused):
    tried = json.dumps({"at": time.time() - 5.0, "reason": "exceeded quota, as said"})
    server.objects["Job"][0]["metadata"]["annotations"]["ddl-airflow/tried"] = tried
    left_worker(server)
    assert KubernetesLauncher().status(handle_of("one/train-1")).state is JobState.PENDING
    assert half_refused == [(WORKER, "left")]


@pytest.mark.parametrize("notes", [{}, {"ddl-airflow/start-timeout-s": "5"}])
def test_a_job_that_another_process_begins_keeps_its_workers(
    server, handle_of, half_refused, notes
):
    server.objects["Job"][0]["metadata"]["annotations"] |= notes

    def patch(_namespace: str, _kind: str, _name: str, change: dict) -> None:
        assert change["metadata"]["resourceVersion"] == "7"
        raise Refused(409, "Conflict", "the object has been modified")

    server.patch = patch
    assert KubernetesLauncher().status(handle_of("one/train-1")).state is JobState.PENDING
    assert half_refused == []


@pytest.mark.parametrize(
    ("phase", "about"), [("Failed", {}), ("Running", {"deletionTimestamp": ago(0)})]
)
def test_a_job_begins_with_no_worker_that_has_ended(server, handle_of, phase, about):
    waits_to_begin(server)
    server.objects["Pod"].clear()
    left_worker(server, phase, **about)
    status = KubernetesLauncher().status(handle_of("one/train-1"))
    assert status.state is JobState.PENDING and f"{WORKER} of an earlier attempt" in status.reason
    assert server.deleted == [WORKER] and server.patched == []
    server.objects["Pod"].clear()
    server.create = lambda *_: {}
    KubernetesLauncher().status(handle_of("one/train-1"))
    assert server.change["spec"] == {"parallelism": 1}
    assert server.change["metadata"]["resourceVersion"] == "7"


def test_a_worker_that_stays_holds_its_job_back_no_longer_than_start_timeout(server, handle_of):
    waits_to_begin(server, **{"ddl-airflow/start-timeout-s": "5"})
    server.objects["Pod"].clear()
    left_worker(server, deletionTimestamp=ago(0))
    KubernetesLauncher().status(handle_of("one/train-1"))
    why = json.loads(server.change["metadata"]["annotations"]["ddl-airflow/ended-because"])
    assert f"waits for Pod {WORKER} of an earlier attempt to be gone" in why["reason"]


def test_a_job_that_waited_has_its_whole_time_limit_when_it_begins(server, handle_of):
    """Its deadline counts from the Job's creation, and it may wait for a quota for long."""
    waits_to_begin(server, **{"ddl-airflow/time-limit-s": "600"})
    server.objects["Job"][0]["metadata"]["creationTimestamp"] = ago(5000)
    server.create = lambda *_: {}
    KubernetesLauncher().status(handle_of("one/train-1"))
    assert server.change["spec"]["parallelism"] == 1
    assert 5600 <= server.change["spec"]["activeDeadlineSeconds"] < 5660
    # What start_timeout counts from then.
    began = float(server.change["metadata"]["annotations"]["ddl-airflow/began"])
    assert time.time() - began < 60


class Gateway(BaseHTTPRequestHandler):
    """In front of an API server that is away."""

    def do_GET(self) -> None:
        self.send_response(302 if self.path.startswith("/moved") else 200)
        self.end_headers()
        self.wfile.write(b"<html>log in</html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("path", ["", "/moved"])
def test_a_page_in_place_of_an_answer_is_none(tmp_path, monkeypatch, path):
    with HTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        about = {
            "current-context": "one",
            "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
            "clusters": [
                {
                    "name": "one",
                    "cluster": {"server": f"http://127.0.0.1:{gateway.server_port}{path}"},
                }
            ],
            "users": [{"name": "one", "user": {"token": "t"}}],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(about))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        with pytest.raises(LaunchError, match="no JSON object.*proxy") as caught:
            Cluster().list("default", "Job")
        gateway.shutdown()
    assert caught.value.retryable


class Other(BaseHTTPRequestHandler):
    """Says what its server is told to, as JSON, whatever it is asked."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.server.lists["said"]).encode())  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "said",
    [
        {"status": "ok"},
        {"items": "none", "metadata": {}},
        {"items": [1], "metadata": {}},
        {"items": [{"spec": {}}], "metadata": {}},
        {"items": [], "metadata": "none"},
        {"resources": [{"kind": "MPIJob"}]},
        {"metadata": "none"},
    ],
)
def test_other_json_in_place_of_an_answer_is_none(tmp_path, monkeypatch, said):
    """As of a gateway; a KeyError of it ended the watching of all jobs, of other clusters too."""
    with named(Other, tmp_path, monkeypatch) as one:
        one.lists["said"] = said  # type: ignore[attr-defined]
        cluster = Cluster()
        asked = [lambda: cluster.list("vision", "Job"), lambda: cluster.read("vision", "Job", "a")]
        if "resources" in said:
            asked.append(lambda: cluster.has("batch/v1"))
        for ask in asked:
            with pytest.raises(LaunchError, match="proxy.*may run on") as caught:
                ask()
            assert caught.value.retryable


class Absent(BaseHTTPRequestHandler):
    """Of all that is asked for there is nothing, which its server has the words for."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()
        self.wfile.write(self.server.lists["said"])  # type: ignore[attr-defined]

    do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def absent(tmp_path, monkeypatch) -> Iterator[HTTPServer]:
    """A server that has nothing, which the kubeconfig names."""
    with named(Absent, tmp_path, monkeypatch) as one:
        yield one


@pytest.mark.parametrize("page", [b"<html>404 page not found</html>", b'{"status": "no route"}'])
def test_a_gateway_that_finds_no_server_is_no_word_on_a_job(absent, tmp_path, page):
    """Whoever cancelled a job heard that all was well, and it ran on."""
    absent.lists["said"] = page  # type: ignore[attr-defined]
    launcher, job = KubernetesLauncher(), job_in(tmp_path, "one/train-1")
    for ask in (
        lambda: launcher.find(launcher.expected(job)),
        lambda: launcher.cancel(launcher.expected(job)),
        lambda: Cluster().delete("vision", "Job", "one", "0001-1"),
    ):
        with pytest.raises(LaunchError, match=r"404.*proxy.*may run on") as caught:
            ask()
        assert caught.value.retryable


def test_a_job_that_is_not_there_is_none(absent, tmp_path):
    said = {"kind": "Status", "reason": "NotFound", "message": "jobs.batch not found"}
    absent.lists["said"] = json.dumps(said).encode()  # type: ignore[attr-defined]
    launcher, job = KubernetesLauncher(), job_in(tmp_path, "one/train-1")
    assert launcher.find(launcher.expected(job)).number == 0
    launcher.cancel(launcher.expected(job))
    Cluster().delete("vision", "Job", "one", "0001-1")


class Discovered(BaseHTTPRequestHandler):
    """An API server as it answers for a path that it has not: in plain text."""

    def do_GET(self) -> None:
        said = self.server.lists.get(self.path)  # type: ignore[attr-defined]
        self.send_response(200 if said else 404)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode() if said else b"404 page not found\n")

    do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass


def groups_of(*versions: str) -> dict[str, Any]:
    """The API server's list of these versions, such as ``batch/v1``."""
    groups = [
        {"name": one.partition("/")[0], "versions": [{"groupVersion": one}]} for one in versions
    ]
    return {"kind": "APIGroupList", "groups": groups}


_MPI = "kubeflow.org/v2beta1"
_RESOURCES = {"kind": "APIResourceList", "groupVersion": _MPI}


@pytest.mark.parametrize(
    "lists",
    [
        {"/apis": groups_of("batch/v1")},
        {
            "/apis": groups_of("batch/v1", _MPI),
            f"/apis/{_MPI}": {**_RESOURCES, "resources": [{"name": "tfjobs"}]},
        },
    ],
    ids=["its-group", "of-its-group-alone"],
)
def test_a_job_of_a_kind_that_the_cluster_has_no_longer_is_none(
    tmp_path, monkeypatch, lists: dict[str, Any]
):
    """It went with the operator's CRD. A cancel asked again without end."""
    with named(Discovered, tmp_path, monkeypatch) as one:
        one.lists |= lists  # type: ignore[attr-defined]
        launcher = KubernetesLauncher()
        handle = replace(launcher.expected(job_in(tmp_path, "one/train-1")), place="mpi:vision/one")
        assert launcher.find(handle).number == 0
        launcher.cancel(handle)
        Cluster().delete("vision", "MPIJob", "one", "0001-1")


@pytest.mark.parametrize(
    "lists",
    [
        {},
        {"/apis": {"status": "ok"}},
        {"/apis": {"kind": "APIGroupList", "groups": "none"}},
        {"/apis": groups_of("batch/v1", _MPI)},
        {"/apis": groups_of("batch/v1", _MPI), f"/apis/{_MPI}": {"resources": []}},
        {
            "/apis": groups_of("batch/v1", _MPI),
            f"/apis/{_MPI}": {**_RESOURCES, "resources": [{"name": "mpijobs"}]},
        },
    ],
)
def test_a_path_that_is_not_found_of_a_kind_that_may_be_there_is_no_word_on_a_job(
    tmp_path, monkeypatch, lists: dict[str, Any]
):
    with named(Discovered, tmp_path, monkeypatch) as one:
        one.lists |= lists  # type: ignore[attr-defined]
        for kind in ("MPIJob", "Job", "Pod"):
            with pytest.raises(LaunchError, match=r"404.*proxy.*may run on") as caught:
                Cluster().delete("vision", kind, "one", "0001-1")
            assert caught.value.retryable


class Paged(BaseHTTPRequestHandler):
    """Gives a list of two pages, and has forgotten its first so many before the second."""

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        left = self.server.lists  # type: ignore[attr-defined]
        code, said = 200, {"items": [{"metadata": {"name": "b"}}], "metadata": {}}
        if "continue" not in asked:
            said = {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "more"}}
        elif left["forgotten"] > 0:
            left["forgotten"] -= 1
            message = "The provided continue parameter is too old"
            code, said = 410, {"kind": "Status", "reason": "Expired", "message": message}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("forgotten", [1, 1000])
def test_a_list_of_which_the_server_forgot_the_rest_is_asked_for_anew(
    tmp_path, monkeypatch, forgotten
):
    with named(Paged, tmp_path, monkeypatch) as one:
        one.lists["forgotten"] = forgotten  # type: ignore[attr-defined]
        if forgotten == 1:
            found = Cluster().list("vision", "Pod")
            assert [pod["metadata"]["name"] for pod in found] == ["a", "b"]
        else:
            with pytest.raises(Refused, match="too old") as caught:
                Cluster().list("vision", "Pod")
            assert caught.value.retryable


class Listed(BaseHTTPRequestHandler):
    """An API server of which only lists are asked; its server has them by their paths."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        said = {"items": self.server.lists.get(path, []), "metadata": {}}  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listing(answers: type[BaseHTTPRequestHandler] = Listed) -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), answers) as one:
        one.lists = {}  # type: ignore[attr-defined]
        thread = threading.Thread(target=one.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield one
        finally:
            one.shutdown()
            thread.join()


def kubeconfig_of(current: str, **contexts: tuple[HTTPServer, str]) -> dict:
    """A kubeconfig of contexts by name, each of one server and one namespace."""
    about = {"current-context": current, "contexts": [], "clusters": [], "users": []}
    for name, (one, namespace) in contexts.items():
        of = {"cluster": name, "user": name, "namespace": namespace}
        server = {"server": f"http://127.0.0.1:{one.server_port}"}
        about["contexts"].append({"name": name, "context": of})
        about["clusters"].append({"name": name, "cluster": server})
        about["users"].append({"name": name, "user": {"token": "t"}})
    return about


@contextmanager
def named(
    answers: type[BaseHTTPRequestHandler], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HTTPServer]:
    """A server that the kubeconfig names."""
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    monkeypatch.delenv("http_proxy", raising=False)
    with listing(answers) as one:
        (folder / "kubeconfig").write_text(json.dumps(kubeconfig_of("one", one=(one, "vision"))))
        monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
        yield one


def test_a_token_that_no_request_can_have_is_told_and_not_shown(monkeypatch):
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    monkeypatch.delenv("http_proxy", raising=False)
    with listing() as one:
        told = kubeconfig_of("one", one=(one, "vision"))
        told["users"][0]["user"] = {"token": "planted\nplanted"}
        cluster = Cluster("", AirflowConnection("gpus", "kubernetes", extra={"kube_config": told}))
        with pytest.raises(LaunchError, match="token") as caught:
            cluster.list("vision", "Job")
    assert caught.value.retryable is False
    assert "planted" not in "".join(traceback.format_exception(caught.value))


@pytest.fixture
def two_clusters(server, monkeypatch) -> Iterator[tuple[HTTPServer, HTTPServer]]:
    """One that has the job one/train-1 in the namespace vision, and one that has none."""
    monkeypatch.setattr(module, "Cluster", Cluster)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    server.job("one/train-1")
    with listing() as here, listing() as there:
        here.lists |= {
            "/apis/batch/v1/namespaces/vision/jobs": server.objects["Job"],
            "/api/v1/namespaces/vision/pods": server.objects["Pod"],
        }
        yield here, there


@pytest.mark.parametrize("change", ["use-context", "set-context --namespace", "unset"])
@pytest.mark.parametrize("by", ["file", "connection"])
def test_a_job_is_looked_for_where_it_was_submitted(
    two_clusters, tmp_path, monkeypatch, change, by
):
    """Where the default had changed, none was found there: it counted as deleted, and ran on."""
    here, there = two_clusters
    kubeconfig = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    told: dict = {}

    def is_now(about: dict) -> None:
        if by == "file":
            kubeconfig.write_text(json.dumps(about))
        else:
            told["one"] = AirflowConnection("gpus", "kubernetes", extra={"kube_config": about})

    is_now(kubeconfig_of("here", here=(here, "vision"), there=(there, "vision")))
    connection = "gpus" if by == "connection" else ""

    def made() -> KubernetesLauncher:
        one = KubernetesLauncher(connection=connection)
        one.find_connections(lambda _: told["one"])
        return one

    for folder in ("records", "logs"):
        (tmp_path / folder).mkdir()
    handle = made().expected(job_in(tmp_path, "one/train-1"))
    assert handle.place == (f"vision@{connection}/here" if connection else "vision/here")
    assert made().connection_of(handle) == connection
    earlier = replace(handle, place=f"@{connection}/" if connection else "")
    assert made().status(earlier).state is JobState.RUNNING
    after = kubeconfig_of("there", here=(here, "vision"), there=(there, "vision"))
    if change == "set-context --namespace":
        after = kubeconfig_of("here", here=(here, "default"))
    elif change == "unset":
        del after["current-context"]
    is_now(after)
    assert made().status(handle).state is JobState.RUNNING
    if change != "unset":  # as an earlier version submitted it: where the default is now
        assert made().status(earlier).state is JobState.LOST


def test_a_job_whose_context_is_not_known_here_is_not_looked_for_elsewhere(
    two_clusters, tmp_path, monkeypatch
):
    here, there = two_clusters
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(kubeconfig_of("here", here=(here, "vision"))))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    handle = KubernetesLauncher().expected(job_in(tmp_path, "one/train-1"))
    kubeconfig.write_text(json.dumps(kubeconfig_of("there", there=(there, "vision"))))
    with pytest.raises(SubmitFailed, match="'?here'?"):
        KubernetesLauncher().cancel(handle)
    kubeconfig.unlink()  # as in a pod, by its service account
    with pytest.raises(SubmitFailed, match="context 'here' .* no kubeconfig"):
        KubernetesLauncher().status(handle)


@pytest.mark.parametrize("passes", [True, False])
def test_a_connection_that_may_be_told_later_is_asked_for_again(tmp_path, passes):
    def find(conn_id: str) -> AirflowConnection:
        raise ConnectionInvalid(f"Airflow has no connection {conn_id!r}.", retryable=passes)

    launcher = KubernetesLauncher(image="trainer:1", connection="gpus")
    launcher.find_connections(find)
    with pytest.raises(SubmitFailed, match="launcher.connection: .*'gpus'") as caught:
        launcher.expected(job_in(tmp_path, "one/train-1"))
    assert caught.value.retryable is passes


def test_what_is_submitted_is_kept_with_its_place(tmp_path, monkeypatch):
    server = FullServer()
    server.namespace, server.context = "vision", "here"
    monkeypatch.setattr(module, "Cluster", lambda *_: server)
    launcher = KubernetesLauncher(image="trainer:1")
    job = job_in(tmp_path, "one/train-1")
    handle = launcher.submit(launcher.render(job))
    assert handle.place == launcher.expected(job).place == "vision/here"
    # Between the two the default may change.
    server.namespace, server.context = "default", "there"
    assert launcher.expected(job).place == "vision/here"


def test_what_a_killed_submission_left_is_removed_when_others_are_looked_at(server, handle_of):
    server.job("well/train-1")
    left = server.job("left/train-1", created=700.0, parallelism=0)
    server.job("being-submitted/train-1", created=60.0, parallelism=0)
    server.job("asked-for/train-1", created=700.0, parallelism=0)  # is its task's to remove
    server.job("waits/train-1", created=700.0, parallelism=0)
    server.objects["Job"][-1]["metadata"]["annotations"]["ddl-airflow/waits"] = "{}"
    # Whoever was to let it start is gone for good, which a triggerer that is away is not.
    forgotten = server.job("forgotten/train-1", created=86400.0 + 700.0, parallelism=0)
    notes = {"ddl-airflow/waits": "{}", DELAY: "600"}
    server.objects["Job"][-1]["metadata"]["annotations"] |= notes
    server.job("late/train-1", created=86400.0 + 500.0, parallelism=0)
    server.objects["Job"][-1]["metadata"]["annotations"] |= notes
    # Another triggerer looks at it, and a quota refuses its pods.
    server.job("held/train-1", created=2 * 86400.0, parallelism=0)
    tried = {"ddl-airflow/tried": json.dumps({"at": time.time() - 60.0})}
    server.objects["Job"][-1]["metadata"]["annotations"] |= notes | tried
    handles = [handle_of("well/train-1"), handle_of("asked-for/train-1")]
    KubernetesLauncher().ask(handles)
    assert server.deleted == [left, forgotten]
    server.refuses[left] = Refused(403, "", "no")
    assert KubernetesLauncher().status(handles[0]).state is JobState.RUNNING


class FullServer(OneServer):
    """One that makes objects, and takes a moment to remove them, with what they own."""

    def __init__(self) -> None:
        super().__init__()
        self.objects |= {"TrainJob": [], "TrainingRuntime": []}
        self.removing: list[str] = []

    def has(self, _version: str) -> set[str]:
        return {"trainjobs", "trainingruntimes"}

    def create(self, namespace: str, one: dict) -> dict:
        name = one["metadata"]["name"]
        if self.read(namespace, one["kind"], name):
            raise Refused(409, "AlreadyExists", f'{one["kind"]} "{name}" already exists')
        about = {**one["metadata"], "uid": "0002-1", "creationTimestamp": ago(0)}
        self.objects.setdefault(one["kind"], []).append(made := {**one, "metadata": about})
        return made

    def read(self, _namespace: str, kind: str, name: str) -> dict | None:
        named = [one for one in self.objects.get(kind, ()) if one["metadata"]["name"] == name]
        if named and name in self.removing and "deletionTimestamp" not in named[0]["metadata"]:
            named[0]["metadata"]["deletionTimestamp"] = ago(0)
        elif named and name in self.removing:
            for left in self.objects.values():
                left[:] = [one for one in left if not one["metadata"]["name"].startswith(name)]
            self.removing.remove(name)
            return None
        return named[0] if named else None

    def delete(self, namespace: str, kind: str, name: str, uid: str) -> None:
        super().delete(namespace, kind, name, uid)
        self.removing.append(name)


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """submitted(operator) -> the server, the launcher, and its second job of the same id."""

    def submit(operator: str, condition: str = ""):
        server = FullServer()
        monkeypatch.setattr(module, "Cluster", lambda *_: server)
        monkeypatch.setattr(module, "_LOOK_S", 0.01, raising=False)
        launcher = KubernetesLauncher(image="trainer:1", operator=operator)
        job = job_in(tmp_path, "one/train-1")
        launcher.submit(launcher.render(job))
        kind = "Job" if operator == "none" else "TrainJob"
        (made,) = server.objects[kind]
        if condition:
            said = {"type": condition, "status": "True", "lastTransitionTime": ago(60)}
            made["status"] = {"conditions": [said]}
        for runtime in server.objects["TrainingRuntime"]:
            runtime["metadata"]["ownerReferences"] = [{"kind": kind}]
        return server, launcher, launcher.render(job)

    return submit


@pytest.mark.parametrize("operator", ["none", "trainer"])
@pytest.mark.parametrize("condition", ["Complete", "Failed"])
def test_a_run_made_again_under_its_id_is_in_no_way_of_what_the_first_left(
    submitted, operator, condition
):
    """The first was deleted within keep_finished."""
    server, launcher, again = submitted(operator, condition)
    launcher.submit(again)
    assert server.deleted == [name_of("one/train-1")]


@pytest.mark.parametrize("operator", ["none", "trainer"])
def test_a_job_that_runs_is_removed_for_none_of_its_id(submitted, operator):
    server, launcher, again = submitted(operator)
    with pytest.raises(SubmitFailed, match=r"already exists\. .* Wait for its end") as caught:
        launcher.submit(again)
    assert caught.value.retryable and server.deleted == []


@pytest.mark.parametrize("refusals", [2, 1000])
def test_a_runtime_that_kubeflow_trainer_does_not_know_yet_is_waited_for(
    tmp_path, monkeypatch, refusals
):
    """Its webhook hears of it a moment later than the API server."""
    server = FullServer()
    said = "not found: specified trainingRuntime must be created before the TrainJob is created"
    left = [Refused(403, "Forbidden", said)] * refusals
    create = server.create

    def late(namespace: str, one: dict) -> dict:
        if one["kind"] == "TrainJob" and left:
            raise left.pop()
        return create(namespace, one)

    server.create = late
    monkeypatch.setattr(module, "Cluster", lambda *_: server)
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_KNOWN_S", 0.1)
    launcher = KubernetesLauncher(image="trainer:1", operator="trainer")
    submission = launcher.render(job_in(tmp_path, "one/train-1"))
    if refusals == 2:
        assert launcher.submit(submission).number
    else:
        with pytest.raises(SubmitFailed, match="must be created before") as caught:
            launcher.submit(submission)
        assert caught.value.retryable and server.deleted == [name_of("one/train-1")]


def test_a_job_that_is_being_removed_is_waited_for(submitted, monkeypatch):
    server, launcher, again = submitted("none")
    name = name_of("one/train-1")
    server.removing.append(name)  # its run was deleted while it ran
    launcher.submit(again)
    assert server.deleted == []
    server.read = lambda *_: {"metadata": {"deletionTimestamp": ago(0)}}
    monkeypatch.setattr(module, "_REMOVED_S", 0.05)
    with pytest.raises(SubmitFailed, match="is not gone"):
        launcher.submit(again)
    assert server.deleted == []


class TokenServer(HTTPServer):
    """A server behind TLS that knows one token, and has no objects."""

    token = "first"
    asked = 0


class Answer(BaseHTTPRequestHandler):
    server: TokenServer

    def do_GET(self) -> None:
        self.server.asked += 1
        known = self.headers["Authorization"] == f"Bearer {self.server.token}"
        said = {"items": [], "metadata": {}} if known else {"message": "Unauthorized"}
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: object) -> None:
        pass


def certify(folder: Path) -> tuple[Path, Path]:
    """A new certificate for a server on this host, and its key."""
    certificate, key = folder / "certificate", folder / "key"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=s -addext".split()
    files = ["subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*words, *files], check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[TokenServer, ssl.SSLContext]]:
    """The server, and what it shows of itself."""
    with TokenServer(("127.0.0.1", 0), Answer) as one:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certify(tmp_path))
        one.socket = context.wrap_socket(one.socket, server_side=True)
        thread = threading.Thread(target=one.serve_forever, args=(0.05,))
        thread.start()
        yield one, context
        one.shutdown()
        thread.join()


def test_credentials_that_were_renewed_are_read_anew(tls, tmp_path, monkeypatch):
    one, context = tls
    server = f"https://127.0.0.1:{one.server_address[1]}"
    kubeconfig = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)

    def write(token: str) -> None:
        authority = base64.b64encode((tmp_path / "certificate").read_bytes()).decode()
        about = {"server": server, "certificate-authority-data": authority}
        contexts = [{"name": "here", "context": {"cluster": "c", "user": "u"}}]
        said = {"current-context": "here", "contexts": contexts}
        said |= {"clusters": [{"name": "c", "cluster": about}]}
        kubeconfig.write_text(
            json.dumps(said | {"users": [{"name": "u", "user": {"token": token}}]})
        )

    write("first")
    cluster = Cluster()
    assert cluster.list("default", "Job") == []
    one.token = "second"
    write("second")
    assert cluster.list("default", "Job") == []
    context.load_cert_chain(*certify(tmp_path))  # of another authority
    write("second")
    assert cluster.list("default", "Job") == []
    one.token, one.asked = "third", 0
    with pytest.raises(Refused, match="Unauthorized"):
        cluster.list("default", "Job")
    assert one.asked == 2


class Knows(BaseHTTPRequestHandler):
    """An API server that knows one token, and for which who shows none is anonymous."""

    def do_GET(self) -> None:
        shown = self.headers["Authorization"]
        code, said = 401, {"reason": "Unauthorized", "message": "Unauthorized"}
        if shown == "Bearer good":
            code, said = 200, {"items": [], "metadata": {}}
        elif shown is None:
            words = 'jobs.batch is forbidden: User "system:anonymous" cannot list resource "jobs"'
            code, said = 403, {"reason": "Forbidden", "message": words}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: object) -> None:
        pass


PLUGIN = """\
#!/bin/sh
cd "$(dirname "$0")"
case $(cat token) in
fails) echo "cannot reach STS" >&2; exit 255;;
hangs) echo $$ > pid; sleep 1000;;
esac
cat << end
{
  "apiVersion": "client.authentication.k8s.io/v1",
  "kind": "ExecCredential",
  "status": {"token": "$(cat token)"}
}
end
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """plugin(does): what the credential plugin of the kubeconfig does from now on; its file."""
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    monkeypatch.delenv("http_proxy", raising=False)
    program = tmp_path / "plugin" / "aws-like"
    program.parent.mkdir()
    program.write_text(PLUGIN)
    program.chmod(0o755)

    def does(what: str) -> Path:
        (program.parent / "token").write_text(what)
        return program

    with listing(Knows) as one:
        told = kubeconfig_of("one", one=(one, "vision"))
        asks = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program)}
        told["users"][0]["user"] = {"exec": {**asks, "interactiveMode": "Never"}}
        (tmp_path / "kubeconfig").write_text(json.dumps(told))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield does


def test_a_credential_plugin_that_fails_once_is_asked_again(plugin, handle_of, monkeypatch):
    """Its jobs were asked for by nobody, and refused, until the triggerer was started again."""
    monkeypatch.setattr(module, "Cluster", Cluster)
    plugin("good")
    handle = handle_of("one/train-1")
    plugin("fails")
    launcher = KubernetesLauncher()
    with pytest.raises(LaunchError, match="user 'one': the credential plugin .*aws-like") as caught:
        launcher.status(handle)
    assert caught.value.retryable
    plugin("good")
    assert launcher.status(handle).state is JobState.LOST  # no job of it is there


def test_a_credential_plugin_that_fails_at_a_renewal_is_asked_again(plugin):
    plugin("old")
    cluster = Cluster()
    plugin("fails")
    for _ in range(2):
        with pytest.raises(LaunchError, match="credential plugin") as caught:
            cluster.list("vision", "Job")
        assert caught.value.retryable
    plugin("good")
    assert cluster.list("vision", "Job") == []


def test_a_credential_plugin_that_hangs_is_ended(plugin, tmp_path, monkeypatch):
    """It kept all jobs of the triggerer from being looked at, of other clusters too."""
    monkeypatch.setattr("ddl_airflow.launchers.kubernetes.api._PLUGIN_S", within(1))
    program = plugin("hangs")
    with pytest.raises(LaunchError, match="gave no credentials within") as caught:
        Cluster()
    assert caught.value.retryable
    pid = int((program.parent / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists(), 5)
    plugin("good")
    assert Cluster().list("vision", "Job") == []


def test_a_credential_plugin_that_is_not_there_is_named(plugin):
    plugin("good").unlink()
    with pytest.raises(SubmitFailed, match="credential plugin .*aws-like' is not there") as caught:
        Cluster()
    assert caught.value.retryable is False


def test_a_certificate_of_a_credential_plugin_is_in_files_for_a_moment(tls, plugin, monkeypatch):
    one, context = tls
    program = plugin("good")
    certificate, key = certify(program.parent)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    version = "client.authentication.k8s.io/v1"
    status = {"clientCertificateData": certificate.read_text(), "clientKeyData": key.read_text()}
    said = {"apiVersion": version, "kind": "ExecCredential", "status": status}
    (program.parent / "said").write_text(json.dumps(said))
    program.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\necho "$KUBERNETES_EXEC_INFO" > told\ncat said'
    )
    authority = base64.b64encode((program.parents[1] / "certificate").read_bytes()).decode()
    path = program.parents[1] / "kubeconfig"
    told = json.loads(path.read_text())
    told["users"][0]["user"]["exec"]["provideClusterInfo"] = True
    about = {"server": f"https://127.0.0.1:{one.server_address[1]}"}
    told["clusters"][0]["cluster"] = {**about, "certificate-authority-data": authority}
    path.write_text(json.dumps(told))
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    temporary = program.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("ddl_airflow.launchers.kubernetes.api.usual_base", lambda: temporary)
    with pytest.raises(Refused, match="Unauthorized"):  # it wants a token beside
        Cluster().list("vision", "Job")
    assert list(temporary.iterdir()) == []
    info = json.loads((program.parent / "told").read_text())
    assert info["spec"]["cluster"]["certificate-authority-data"] == authority


def test_who_was_nobody_reads_the_credentials_anew(plugin, tmp_path):
    """As where the kubeconfig was read while somebody wrote it."""
    path = tmp_path / "kubeconfig"
    told = json.loads(path.read_text())
    told["users"][0]["user"] = {}
    path.write_text(json.dumps(told))
    cluster = Cluster()
    with pytest.raises(Refused, match="system:anonymous"):
        cluster.list("vision", "Job")
    told["users"][0]["user"] = {"token": "good"}
    path.write_text(json.dumps(told))
    assert cluster.list("vision", "Job") == []
