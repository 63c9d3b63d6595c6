"""The objects of a job on Kubernetes, and what is made of answers of an API server. A real cluster
is in tests/integration/test_kubernetes_launcher.py.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import LaunchError, ManifestError, SubmitFailed
from ddl_airflow.core.job import JobSpec, JobState, JobStatus, StartedJob
from ddl_airflow.core.manifest.load import load_manifest_text
from ddl_airflow.core.plan import plan
from ddl_airflow.launchers.kubernetes import KubernetesLauncher
from ddl_airflow.launchers.kubernetes import api as kubernetes_api
from ddl_airflow.launchers.kubernetes import launcher as launcher_module
from ddl_airflow.launchers.kubernetes import pod as pod_program
from ddl_airflow.launchers.kubernetes.api import Refused
from ddl_airflow.launchers.kubernetes.causes import (
    dead,
    judged,
    left_over,
    needs_events,
    refused,
    slim,
    taken_back,
    why_ended,
)
from ddl_airflow.launchers.kubernetes.facts import ENDED_BECAUSE
from ddl_airflow.launchers.kubernetes.launcher import make_keys
from ddl_airflow.launchers.kubernetes.objects import completed, name_of
from ddl_airflow.launchers.kubernetes.operators import OPERATORS
from ddl_airflow.launchers.registry import launcher

SPEC = JobSpec(
    job_id="digits-manual-1a2b/train-1",
    command="python train.py --name 'a b'",
    nodes=2,
    slots=4,
    python="/usr/local/bin/python3.12",
    folder=Path("/workspace/runs/code"),
    record_dir=Path("/workspace/runs/records"),
    log_dir=Path("/workspace/runs/logs"),
    env={"PARAM_KEY": "a secret value"},
    gpu=True,
    lock=Path("/workspace/experiments/.digits wide.lock"),
    keep=(Path("/workspace/experiments/digits"), Path("/workspace/runs/experiment")),
)
NAME = name_of(SPEC.job_id)
MANIFEST = """\
model_definition:
  name: digits
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py
    compute_configuration: {name: v100x4, nodes: 2}
training_data_reference: {type: fs, source: {path: ./data}}
training_results_reference: {type: fs, target: {path: ./results}}
launcher:
  kind: kubernetes
  image: registry.example.com/vision/trainer:2.21
  python: /opt/train/bin/python
  context: arn:aws:eks:eu-1:1:cluster/training
  namespace: vision
  image_pull_secrets: [registry]
  service_account: trainer
  node_selector: {pool: gpu}
  tolerations:
    - {key: nvidia.com/gpu, effect: NoSchedule}
    - {key: team, value: vision}
  priority_class: batch
  queue: vision
  resources: {cpu: 8, memory: 64Gi}
  volumes:
    - {claim: training, mount_path: /workspace}
    - {host_path: /data, mount_path: /data, read_only: true}
  start_timeout: 30m
  time_limit: 12h
  grace: 2m
  keep_finished: 10m
"""
SETTINGS = {"image": "trainer:1"}


def full() -> KubernetesLauncher:
    steps = plan(load_manifest_text(MANIFEST, "m.yml"), Path("m.yml"))
    made = launcher(steps.train.launcher, json.loads(json.dumps(steps.train.scheduler)))
    assert isinstance(made, KubernetesLauncher)
    return made


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("DDL_", "OMPI_", "PRTE_", "TF_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "geteuid", lambda: 50000)
    monkeypatch.setattr(os, "getegid", lambda: 0)


def test_the_objects_ask_for_everything(golden):
    golden("kubernetes_full.txt", f"{full().render(SPEC)}\n")


def test_the_objects_ask_for_no_more_than_they_must(golden):
    spec = replace(SPEC, gpu=False, lock=None, keep=None, nodes=1, slots=1)
    golden("kubernetes_least.txt", f"{KubernetesLauncher(**SETTINGS).render(spec)}\n")


def test_the_time_limit_begins_when_a_job_may_start():
    """A Job that is not suspended has its time from the beginning, its wait among it."""
    limited = KubernetesLauncher(image="trainer:1", time_limit_s=600.0)
    for delay_s, deadline in ((0.0, 600), (1800.0, None)):
        said = yaml.safe_load_all(limited.render(replace(SPEC, delay_s=delay_s)).script)
        (job,) = (one for one in said if one["kind"] == "Job")
        assert job["spec"].get("activeDeadlineSeconds") == deadline
        kept = job["metadata"]["annotations"].get("ddl-airflow/time-limit-s")
        assert kept == (None if deadline else "600")  # set when it begins


def pods_in(script):
    """The metadata of each pod, and of each template of one."""
    made = yaml.safe_load_all(script)
    pods = [one.get("spec", {}).get("template", one) for one in made if "spec" in one]
    return [one["metadata"] for one in pods if "containers" in one["spec"]]


def test_no_mesh_puts_a_container_into_the_pods():
    """One that does not end with mpirun or the ranks: the Job would never complete."""
    pods = pods_in(full().render(SPEC).script)
    assert len(pods) == 3
    for one in pods:
        said = one["labels"] | one["annotations"]
        assert said["sidecar.istio.io/inject"] == "false"
        assert one["labels"]["kuma.io/sidecar-injection"] == "disabled"
        assert one["annotations"]["linkerd.io/inject"] == "disabled"
        assert one["annotations"]["consul.hashicorp.com/connect-inject"] == "false"


def test_an_autoscaler_lets_the_pods_end_before_it_takes_their_node():
    """To pack nodes closer it would end a training again and again."""
    for one in pods_in(full().render(SPEC).script):
        assert one["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        assert one["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


def test_kubernetes_finds_no_variables_in_the_words_of_a_command():
    command = "python train.py --name '$(PARAM_KEY)' 'a$$b' $HOME"
    submission = KubernetesLauncher(**SETTINGS, python="/opt/a$$b/python").render(
        replace(SPEC, command=command)
    )
    made = {
        one["kind"]: one["spec"] for one in yaml.safe_load_all(submission.script) if "spec" in one
    }
    launcher_words = made["Job"]["template"]["spec"]["containers"][0]["command"]
    assert launcher_words[-1] == "python train.py --name '$$(PARAM_KEY)' 'a$$$$b' $$HOME"
    worker_words = made["Pod"]["containers"][0]["command"]
    assert launcher_words[0] == worker_words[0] == "/opt/a$$$$b/python"


@pytest.mark.parametrize("version", ["1.25", "1.31", "1.37"])
def test_the_objects_are_what_kubernetes_knows(version):
    validate = pytest.importorskip("kubernetes_validate").validate
    made = list(yaml.safe_load_all(full().render(SPEC).script))
    for one in [completed(one, {"A": "1"}, make_keys()) for one in made]:
        validate(one, version, strict=True)


def test_nothing_secret_is_shown_and_all_of_it_is_submitted():
    submission = full().render(SPEC)
    assert "a secret value" not in str(submission)
    keys = make_keys()
    made = [completed(one, submission.env, keys) for one in yaml.safe_load_all(submission.script)]
    secrets = {one["metadata"]["name"]: one["stringData"] for one in made if "stringData" in one}
    assert secrets[f"{NAME}-env"]["PARAM_KEY"] == "a secret value"
    assert "PATH" not in secrets[f"{NAME}-env"]
    assert secrets[f"{NAME}-keys"] == keys
    shown = json.dumps([one for one in made if one["kind"] != "Secret"])
    assert "a secret value" not in shown and "PRIVATE KEY" not in shown


def test_keys_are_those_of_ssh_and_of_one_job(tmp_path):
    keys = make_keys()
    assert keys["id_ed25519"] != make_keys()["id_ed25519"]
    for private, public in (
        ("id_ed25519", "authorized_keys"),
        ("ssh_host_ed25519_key", "known_hosts"),
    ):
        path = tmp_path / private
        path.touch(0o600)
        path.write_text(keys[private])
        words = ["ssh-keygen", "-y", "-f", str(path)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        assert " ".join(said[:2]) in keys[public]


def test_names_are_those_of_kubernetes_and_of_one_job_each():
    assert "ddl-digits-manual-1a2b-train-1-" + NAME[-10:] == NAME
    long = "x" * 300
    names = {name_of(one) for one in ("A_b/train-1", "a-b/train-1", "", "…", long, f"{long}y")}
    assert len(names) == 6
    assert max(map(len, names)) <= 45 and all(name[-1] != "-" for name in names)


def test_the_place_goes_with_the_job(monkeypatch):
    handle = full().expected(SPEC)
    assert handle.place == "vision/arn:aws:eks:eu-1:1:cluster/training"
    dumped = json.loads(json.dumps(StartedJob(handle, 1.0).dump()))
    assert StartedJob.load(dumped).handle == handle
    del dumped["handle"]["place"]  # as an earlier version dumped it
    assert StartedJob.load(dumped).handle == replace(handle, place="")
    found = SimpleNamespace(namespace="default", context="here")
    monkeypatch.setattr(launcher_module, "Cluster", lambda *_: found)
    least = KubernetesLauncher(**SETTINGS).expected(SPEC)
    assert least.place == "default/here"
    assert (handle.grace_s, least.grace_s) == (120.0, 30.0)  # whoever waits for its end is to know


def test_a_job_needs_an_image():
    with pytest.raises(SubmitFailed, match="launcher.image") as caught:
        KubernetesLauncher().render(SPEC)
    assert caught.value.retryable is False


def test_a_connection_with_a_slash_in_its_id_is_no_shorter_one():
    """By the place of a job it would be another's: a right to prod/x_dev is none to prod."""
    with pytest.raises(SubmitFailed, match=r"launcher\.connection") as caught:
        KubernetesLauncher(**SETTINGS, connection="prod/x_dev")
    assert caught.value.retryable is False


def test_what_runs_in_pods_needs_nothing_but_python():
    code = f"import runpy; runpy.run_path({pod_program.__file__!r}, run_name='x')"
    subprocess.run([sys.executable, "-ISc", code], check=True)


@pytest.mark.parametrize(
    ("why", "state", "permanent", "words"),
    [
        (errno.ENOSPC, JobState.LOST, False, "No space left on device. Free space in the work"),
        (errno.EDQUOT, JobState.LOST, False, "Disk quota exceeded. Free space in the workspace"),
        (errno.ENOENT, JobState.FAILED, True, "launcher.volumes must bring the workspace"),
    ],
)
def test_a_workspace_that_is_full_may_have_room_the_next_time(
    handle, tmp_path, monkeypatch, why, state, permanent, words
):
    def touch(_):
        raise OSError(why, os.strerror(why))

    def end(code, said):
        ended.append(ended_as(code=code, message=json.dumps({"said": said})))
        raise SystemExit

    ended = []
    monkeypatch.setattr(Path, "touch", touch)
    monkeypatch.setattr(pod_program, "end", end)
    with pytest.raises(SystemExit):
        pod_program.need_workspace(str(tmp_path))
    pods = [LAUNCHER, pod_of(0), pod_of(1, ended[0], phase="Failed")]
    verdict = dead({"job": job_of(), "pods": pods, "events": []}, NOW)
    assert (verdict.state, verdict.permanent) == (state, permanent)
    assert words in verdict.reason


def test_a_worker_does_not_end_before_its_launcher_has_heard_its_answer(tmp_path):
    """What ends with the pod forwards the answer, and may be slow to."""
    code = (
        f"import runpy, pathlib; pod = runpy.run_path({pod_program.__file__!r}, run_name='x');"
        f"pod['hold'].__globals__['PRIVATE'] = pathlib.Path({str(tmp_path)!r}); pod['hold']()"
    )
    pipe = subprocess.PIPE
    around = {**os.environ, "SSH_CONNECTION": "10.0.0.1 40000 10.0.0.2 2222"}
    session = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, env=around)
    try:
        assert session.stdout.readline() == b"up 10.0.0.2\n"
        session.stdin.write(b"done\n")
        session.stdin.flush()
        assert session.stdout.readline() == b"bye\n"
        time.sleep(0.3)
        assert not (tmp_path / "done").exists()
        session.stdin.close()
        deadline = time.monotonic() + 30
        while not (tmp_path / "done").exists():
            assert session.poll() is None and time.monotonic() < deadline
    finally:
        session.kill()
        session.wait()
        session.stdout.close()
        session.stdin.close()


@pytest.mark.parametrize(
    ("says", "words"),
    [
        # As of a pod that waits for room: it has no address yet, and may wait for long.
        ("Could not resolve hostname p-0: Name or service not known", ""),
        ("Could not resolve hostname p-0: Temporary failure in name resolution", "p-0 .* DNS"),
        ("connect to host p-0 port 2222: Connection timed out", "p-0 .*: Connection timed out"),
    ],
)
def test_a_launcher_gives_up_on_workers_that_run_and_cannot_be_reached(
    tmp_path, monkeypatch, says, words
):
    program = tmp_path / "ssh"
    said = "echo x >> $0.tries; test $(wc -l < $0.tries) -gt 4 && echo up && exec cat"
    program.write_text(f"#!/bin/sh\n{said}\necho 'ssh: {says}' >&2; exit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    one = pod_program.Launcher(["p-0"], 1.0, tmp_path / "log", patience_s=1.0)
    with open(tmp_path / "log", "ab") as log:
        unreached = one._wait_for_workers(log)
    try:
        assert bool(unreached) == bool(words) and re.search(words, unreached)
        assert one._held[0].up is not bool(words)
    finally:
        for held in one._held:
            if held._ssh is not None:
                held._ssh.communicate()


@pytest.mark.parametrize(
    ("says", "address"),
    [
        ("up 10.0.0.2", "10.0.0.2"),
        ("up fd00::2", "fd00::2"),
        ("up 127.0.0.1", ""),  # of a proxy in its pod
        ("up fe80::2%eth0", ""),
        ("up", ""),
        ("up 10.0.0.2 ProxyCommand x", ""),
    ],
)
def test_mpirun_goes_where_a_worker_was_reached(tmp_path, monkeypatch, says, address):
    made = yaml.safe_load_all(full().render(SPEC).script)
    (given,) = (one["data"] for one in made if one["kind"] == "ConfigMap")
    config = tmp_path / "ssh_config"
    config.write_text(given["ssh_config"].replace("/tmp/ddl", str(tmp_path)))
    monkeypatch.setattr(pod_program, "PRIVATE", tmp_path)
    name = name_of(SPEC.job_id)
    pods = [f"{name}-worker-{number}" for number in (1, 11)]

    def where():
        ssh = ["ssh", "-G", "-F", str(config)]
        told = [subprocess.check_output([*ssh, pod], text=True) for pod in pods]
        return [re.search("^hostname (.*)", one, re.MULTILINE)[1] for one in told]

    by_name = [f"{pod}.{name}" for pod in pods]
    assert where() == by_name
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{says}'; exec cat\n")
    program.chmod(0o755)
    one = pod_program.Launcher(pods[:1], 1.0, tmp_path / "log")
    with monkeypatch.context() as context, open(tmp_path / "log", "ab") as log:
        context.setenv("PATH", str(program.parent), prepend=os.pathsep)
        assert one._wait_for_workers(log) == ""
        one._held[0]._ssh.communicate()
    one._keep_addresses()
    assert where() == [address or by_name[0], by_name[1]]


def test_what_runs_in_pods_keeps_nothing_from_its_group(tmp_path):
    """In which Airflow's user is, where ranks have another."""
    (tmp_path / "environment.json").write_text(json.dumps({"PATH": os.environ["PATH"]}))
    code = (
        f"import os, pathlib, runpy; pod = runpy.run_path({pod_program.__file__!r}, run_name='x');"
        f"pod['main'].__globals__['PRIVATE'] = pathlib.Path({str(tmp_path)!r});"
        "os.umask(0o022); pod['main']()"
    )
    around = {**os.environ, "SSH_ORIGINAL_COMMAND": "umask"}
    words = [sys.executable, "-c", code, "session"]
    said = subprocess.run(words, env=around, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert int(said, 8) == 0o007


def test_keys_and_addresses_are_in_files_that_ssh_takes(tmp_path, monkeypatch):
    """For themselves, so that what runs in the pod need not write all its files so."""
    private = tmp_path / "private"
    monkeypatch.setattr(pod_program, "GIVEN", tmp_path)
    monkeypatch.setattr(pod_program, "PRIVATE", private)
    (tmp_path / "key").write_text("a key\n")
    before = os.umask(0o007)
    try:
        pod_program.take_private("key")
        pod_program.Launcher([], 1.0, tmp_path / "log")._keep_addresses()
    finally:
        after = os.umask(before)
    assert after == 0o007
    assert (private / "key").read_text() == "a key\n"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (private, *private.iterdir())}
    assert modes == {"private": 0o700, "key": 0o600, "addresses": 0o600}


def test_the_manifest_in_the_documentation_is_one():
    page = Path(__file__).parents[4] / "docs" / "kubernetes.md"
    shown = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    folders = (
        "training_data_reference: {type: fs, source: {path: ./data}}\n"
        "training_results_reference: {type: fs, target: {path: ./results}}\n"
    )
    train = plan(load_manifest_text(shown + folders, "kubernetes.md"), page).train
    job = replace(SPEC, nodes=train.nodes, slots=train.slots, gpu=train.gpu)
    script = launcher(train.launcher, train.scheduler).render(job).script
    pods = [one for one in yaml.safe_load_all(script) if one["kind"] == "Pod"]
    limits = {"memory": "64Gi", "nvidia.com/gpu": "4"}
    assert [one["spec"]["containers"][0]["resources"]["limits"] for one in pods] == [limits] * 2


# --- what the cluster says --------------------------------------------------------------------

NOW = 1_800_000_000.0
AT = "2027-01-15T07:59:50Z"  # 10 s before
LONG_AGO = "2027-01-15T07:00:00Z"


@pytest.fixture
def handle(tmp_path):
    for folder in ("records", "logs"):
        (tmp_path / folder).mkdir()
    spec = replace(SPEC, slots=1, record_dir=tmp_path / "records", log_dir=tmp_path / "logs")
    return spec.handle("kubernetes", 0, spec.nodes)


def job_of(condition="", reason="", at=LONG_AGO, **metadata):
    conditions = [{"type": condition, "status": "True", "reason": reason, "lastTransitionTime": at}]
    annotations = {"ddl-airflow/nodes": "2"} | metadata.pop("annotations", {})
    about = {"name": NAME, "uid": "u", "annotations": annotations, "creationTimestamp": LONG_AGO}
    return {
        "metadata": about | metadata,
        "spec": {"parallelism": 1},
        "status": {"conditions": conditions if condition else None},
    }


def pod_of(
    number,
    state=None,
    *,
    image="trainer:1",
    phase="Running",
    created=LONG_AGO,
    conditions=(),
    **status,
):
    name = f"{NAME}-worker-{number}" if number != "launcher" else f"{NAME}-abcde"
    role = "launcher" if number == "launcher" else "worker"
    about = {"name": name, "uid": f"uid-{number}", "labels": {"ddl-airflow/role": role}}
    about["creationTimestamp"] = created
    if deleted := status.pop("deleted", ""):
        about["deletionTimestamp"] = deleted
    containers = [{"image": image, "state": state or {"running": {"startedAt": LONG_AGO}}}]
    containers[0]["name"] = "launcher" if role == "launcher" else "ranks"
    said = {"phase": phase, "conditions": list(conditions), "containerStatuses": containers}
    return {"metadata": about, "spec": {"nodeName": f"n{number}"}, "status": said | status}


def ended_as(reason="Error", code=1, message="", at=LONG_AGO):
    return {
        "terminated": {"reason": reason, "exitCode": code, "message": message, "finishedAt": at}
    }


def waiting(reason, message=""):
    return {"waiting": {"reason": reason, "message": message}}


def event(number, reason, message="it says", uid=""):
    of = f"{NAME}-abcde" if number == "launcher" else f"{NAME}-worker-{number}"
    return {"of": of, "uid": uid or f"uid-{number}", "reason": reason, "message": message}


NOT_READY = {"type": "Ready", "status": "False"}


def disrupted(reason):
    said = {"reason": reason, "message": "so it says"}
    return {"type": "DisruptionTarget", "status": "True", **said}


LAUNCHER = pod_of("launcher")
GONE = pod_of(1, ended_as(code=143), phase="Failed")
DONE = [pod_of(0, ended_as(), phase="Failed"), GONE]


@pytest.mark.parametrize(
    ("pods", "events", "state", "words"),
    [
        ([*DONE, pod_of("launcher", ended_as(), phase="Failed")], [], JobState.LOST, ""),
        (DONE, [], JobState.PREEMPTED, "launcher's pod of ddl-digits"),
        (
            [pod_of(0, ended_as(code=75), phase="Failed"), GONE],
            [event("launcher", "Preempted", "by x/y")],
            JobState.PREEMPTED,
            "higher priority: by x/y",
        ),
        (
            DONE,
            [event("launcher", "NodeNotReady"), event("launcher", "TaintManagerEviction")],
            JobState.LOST,
            "its node does not",
        ),
        (DONE[:1], [], JobState.PREEMPTED, "worker-1 was deleted while the job ran"),
        (
            DONE[:1],
            [event(1, "Preempted", "by x/y")],
            JobState.PREEMPTED,
            "higher priority: by x/y",
        ),
        (DONE[:1], [event(1, "NodeNotReady")], JobState.LOST, "its node does not answer"),
        # Its node was away for a moment, hours ago.
        (
            DONE[:1],
            [event(1, "NodeNotReady"), event(1, "Preempted", "by x/y")],
            JobState.PREEMPTED,
            "higher priority: by x/y",
        ),
        (
            DONE[:1],
            [event(1, "NodeNotReady"), event(1, "Killing")],
            JobState.PREEMPTED,
            "its node is being drained, or by hand",
        ),
        # A taint of a person or of a cloud.
        (
            DONE[:1],
            [event(1, "TaintManagerEviction")],
            JobState.PREEMPTED,
            "its node was given a taint",
        ),
        # Of an earlier pod of that name.
        (
            [DONE[0], pod_of(1, deleted=AT)],
            [event(1, "NodeNotReady", uid="another")],
            JobState.PREEMPTED,
            "its node is being drained, or by hand",
        ),
        *(
            (
                [DONE[0], pod_of(1, deleted=AT, conditions=[NOT_READY, disrupted(why)])],
                [event(1, "NodeNotReady")],
                state,
                words,
            )
            for why, state, words in (
                ("PreemptionByScheduler", JobState.PREEMPTED, "higher priority: so it says"),
                ("EvictionByEvictionAPI", JobState.PREEMPTED, "its node is being drained"),
                ("DeletionByPodGC", JobState.LOST, "does not answer"),
            )
        ),
        (
            [DONE[0], pod_of(1, ended_as(code=143), phase="Failed", deleted=AT)],
            [],
            JobState.PREEMPTED,
            "on node n1 was deleted",
        ),
        (
            [DONE[0], pod_of(1, phase="Failed", reason="NodeShutdown", message="bye")],
            [],
            JobState.PREEMPTED,
            "to make room (NodeShutdown): bye",
        ),
        (
            [
                DONE[0],
                pod_of(
                    1,
                    phase="Failed",
                    reason="Evicted",
                    message="The node had condition: [DiskPressure]. ",
                ),
            ],
            [],
            JobState.PREEMPTED,
            "was evicted: The node had condition: [DiskPressure].",
        ),
        (
            [
                DONE[0],
                pod_of(
                    1,
                    phase="Failed",
                    reason="Evicted",
                    message="Pod ephemeral local storage usage exceeds the total limit of "
                    "containers 1Gi.",
                ),
            ],
            [],
            JobState.FAILED,
            "Write less to the pod's own disk",
        ),
        (
            [
                DONE[0],
                pod_of(
                    1,
                    phase="Failed",
                    reason="Evicted",
                    message="The node was low on resource: memory. Container ranks was using "
                    "4Gi, which exceeds its request of 0.",
                ),
            ],
            [],
            JobState.FAILED,
            "Raise launcher.resources.memory",
        ),
        (
            [
                DONE[0],
                pod_of(
                    1,
                    phase="Failed",
                    reason="Evicted",
                    message="The node was low on resource: memory. Threshold quantity: 100Mi, "
                    "available: 84372Ki. Container ranks was using 1843Mi, request is 256Mi, has "
                    "larger consumption of memory. ",
                ),
            ],
            [],
            JobState.FAILED,
            "Raise launcher.resources.memory",
        ),
        (
            # Its containers are being ended: until they have, its status does not say why.
            [DONE[0], pod_of(1, conditions=[{"type": "Ready", "status": "False"}])],
            [event(1, "Evicted", "Pod ephemeral local storage usage exceeds the total limit")],
            JobState.FAILED,
            "was evicted: Pod ephemeral local storage",
        ),
        (
            [DONE[0], pod_of(1, conditions=[{"type": "Ready", "status": "False"}])],
            [],
            JobState.LOST,
            "on node n1 does not answer",
        ),
        (
            [
                *DONE,
                pod_of(
                    "launcher",
                    ended_as(message=json.dumps({"said": "x", "pod": f"{NAME}-worker-1"})),
                ),
            ],
            [],
            JobState.LOST,
            "worker-1 on node n1 does not answer",
        ),
        (
            [DONE[0], pod_of(1, ended_as("OOMKilled", 137), phase="Failed")],
            [],
            JobState.FAILED,
            "launcher.resources.memory",
        ),
    ],
)
def test_a_job_that_ended_says_what_happened_to_its_pods(handle, pods, events, state, words):
    facts = {"job": job_of("Failed", "BackoffLimitExceeded"), "pods": pods, "events": events}
    status = judged(handle, facts, NOW)
    assert (status.state, status.permanent) == (state, False)
    assert words in status.reason
    # The ranks' own records say more; but for what they say of a pod that was ended.
    for rank in range(2):
        record = {"rank": rank, "host": f"w{rank}", "ended": 1.0, "exit_code": 0}
        (handle.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))
    assert judged(handle, facts, NOW).state is JobState.SUCCEEDED
    (handle.record_dir / "rank-1.json").write_text(
        '{"rank": 1, "host": "w1", "ended": 1.0, "exit_code": 3}'
    )
    assert judged(handle, facts, NOW).failure.exit_code == 3


@pytest.mark.parametrize("first", [{}, {"ended": 1.0, "exit_code": 137}])
@pytest.mark.parametrize("second", [{}, {"ended": 2.0, "exit_code": 137, "asked_to_end": 1.5}])
def test_a_rank_whose_pod_took_too_much_failed_whichever_ended_first(handle, first, second):
    """Two pods write too much: one is evicted, and its end ends the other, or the other way."""
    said = "Pod ephemeral local storage usage exceeds the total limit of containers 16Mi. "
    evicted = pod_of(1, phase="Failed", reason="Evicted", message=said)
    facts = {"job": job_of("Failed", "BackoffLimitExceeded"), "pods": [DONE[0], evicted]}
    for rank, ended in enumerate((first, second)):
        record = {"rank": rank, "host": f"{NAME}-worker-{rank}"} | ended
        (handle.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))
    status = judged(handle, facts | {"events": []}, NOW)
    assert (status.state, status.failure.rank) == (JobState.FAILED, 1)
    assert "was killed: Pod" in status.failure.reason and "was evicted: " in status.failure.reason


@pytest.mark.parametrize("job", [job_of(creationTimestamp=AT), job_of("Complete")])
def test_ranks_that_are_all_in_one_pod_are_none_of_success(handle, job):
    for rank in range(2):
        record = {"rank": rank, "host": "launcher", "ended": 1.0, "exit_code": 0}
        (handle.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))
    facts = {"job": job, "pods": [LAUNCHER, pod_of(0), pod_of(1)], "events": []}
    status = judged(handle, facts, NOW)
    assert (status.state, status.permanent) == (JobState.FAILED, True)
    assert "ranks 0 and 1 on launcher" in status.reason


def test_a_launchers_pod_that_kubernetes_removed_is_no_preemption(handle):
    """At its deadline, or with a Job that somebody deletes."""
    facts = {"job": job_of("Failed", "DeadlineExceeded"), "pods": DONE, "events": []}
    assert "launcher.time_limit" in judged(handle, facts, NOW).reason
    facts = {"job": job_of("Complete"), "pods": [pod_of(0), pod_of(1)], "events": []}
    assert judged(handle, facts, NOW).state is JobState.LOST


def test_for_whom_ranks_made_room_is_asked_also_where_all_ended_well(handle):
    done, gone = pod_of(0, ended_as(code=0)), pod_of(1, deleted=AT)
    assert not needs_events(job_of("Complete"), [done, pod_of(1, ended_as(code=0))])
    assert needs_events(job_of("Complete"), [done])
    assert needs_events(job_of("Complete"), [done, gone])
    for rank in range(2):
        saved = {"listens": True, "preempted": {"step": 7}}
        ended = {"host": f"pod-{rank}", "ended": 1.0, "exit_code": 0, **saved}
        (handle.record_dir / f"rank-{rank}.json").write_text(json.dumps(ended))
    events = [event(1, "Preempted", "Preempted by vision/better on node n1")]
    told = {"job": job_of("Complete"), "pods": [done, gone], "events": events}
    assert (
        "for one of higher priority: Preempted by vision/better" in judged(handle, told, NOW).reason
    )


def all_save(handle):
    """The records of ranks that were asked to make room, and saved after step 7."""
    for rank in range(2):
        record = {"host": f"pod-{rank}", "exit_code": 0, "ended": 2.0, "preempted": {"step": 7}}
        (handle.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))


def test_how_a_container_ended_that_was_put_beside_ours_is_no_word_on_the_ranks(handle):
    """First in the list, and ended as its pod was: others than Istio put some there, too."""
    killed = pod_of(1, ended_as("OOMKilled", 137), phase="Failed")
    proxy = {"name": "proxy", "state": ended_as("Completed", 0)}
    killed["status"]["containerStatuses"].insert(0, proxy)
    facts = {"job": job_of("Failed", "BackoffLimitExceeded"), "pods": [DONE[0], killed]}
    assert "launcher.resources.memory" in judged(handle, facts | {"events": []}, NOW).reason


LOW = (
    "The node was low on resource: memory. Threshold quantity: 100Mi, available: 84372Ki. "
    "Container launcher was using 900Mi, request is 128Mi, has larger consumption of memory. "
)


@pytest.mark.parametrize(
    ("launcher_pod", "state", "words"),
    [
        (
            pod_of("launcher", ended_as("OOMKilled", 137), phase="Failed"),
            JobState.LOST,
            "took more memory than its limit (OOMKilled), which follows from the number of nodes",
        ),
        (
            pod_of("launcher", phase="Failed", reason="Evicted", message=LOW),
            JobState.PREEMPTED,
            "was evicted: The node was low on resource: memory.",
        ),
    ],
)
def test_what_happens_to_mpiruns_pod_is_not_put_down_to_the_workers_resources(
    handle, launcher_pod, state, words
):
    alone = [pod_of(number, ended_as(code=75), phase="Failed") for number in (0, 1)]
    job = job_of("Failed", "BackoffLimitExceeded")
    status = judged(handle, {"job": job, "pods": [launcher_pod, *alone], "events": []}, NOW)
    assert (status.state, status.permanent) == (state, False)
    assert words in status.reason and "launcher.resources" not in status.reason


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        ("Pod ephemeral local storage usage exceeds the total limit", "Write less to the pod's"),
        (
            "The node was low on resource: ephemeral-storage. Container ranks was using 4Gi, "
            "request is 0, has larger consumption of ephemeral-storage.",
            "Write less to the pod's",
        ),
        ("Container ranks was using 4Gi, which exceeds its request of 0.", "resources.memory"),
    ],
)
def test_a_pod_that_was_evicted_says_what_to_change(handle, message, cure):
    evicted = pod_of(1, phase="Failed", reason="Evicted", message=message)
    facts = {"job": job_of("Failed"), "pods": [LAUNCHER, DONE[0], evicted], "events": []}
    status = judged(handle, facts, NOW)
    assert status.state is JobState.FAILED and cure in status.reason


def beside_a_proxy(pod):
    """A pod with a container of somebody else's that never ends, and holds it."""
    proxy = {"name": "proxy", "state": {"running": {"startedAt": LONG_AGO}}}
    pod["status"]["containerStatuses"].append(proxy)
    return pod


@pytest.mark.parametrize("just_now", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_a_job_whose_pods_are_held_by_a_container_beside_ours_ends(handle, saved, just_now):
    """Its Job would never complete, and its workers would hold their GPUs."""
    done = ended_as("Completed", 0, at=AT if just_now else LONG_AGO)
    long_done = ended_as("Completed", 0)  # the workers end first
    launcher_pod = beside_a_proxy(pod_of("launcher", done))
    workers = [beside_a_proxy(pod_of(number, long_done)) for number in (0, 1)]
    facts = {"job": job_of(), "pods": [launcher_pod, *workers], "events": []}
    assert needs_events(facts["job"], facts["pods"])
    verdict = dead(facts, NOW)
    assert (verdict is None) is just_now
    if just_now:  # it may end by itself
        return
    if saved:
        all_save(handle)
    else:
        for rank in range(2):
            record = {"rank": rank, "host": f"w{rank}", "ended": 1.0, "exit_code": 0}
            (handle.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))
    notes = {ENDED_BECAUSE: verdict.dump(NOW)}
    facts["job"] = job_of("Failed", "DeadlineExceeded", at=AT, annotations=notes)
    # Whoever looks at it does so until the workers, too, are let go.
    assert judged(handle, facts, NOW).state is JobState.RUNNING
    assert left_over(facts, NOW + 10) == workers
    expected = JobState.PREEMPTED if saved else JobState.SUCCEEDED
    assert judged(handle, facts, NOW + 10).state is expected


def test_a_rank_that_was_killed_beside_a_container_that_runs_on_ends_the_job(handle):
    killed = beside_a_proxy(pod_of(1, ended_as("OOMKilled", 137)))
    launcher_pod = beside_a_proxy(pod_of("launcher", ended_as()))
    pods = [launcher_pod, beside_a_proxy(pod_of(0, ended_as())), killed]
    verdict = dead({"job": job_of(), "pods": pods, "events": []}, NOW)
    assert verdict.state is JobState.FAILED and "launcher.resources.memory" in verdict.reason


def test_a_job_that_saved_before_it_made_room_goes_on_from_there(handle):
    all_save(handle)
    pods = [pod_of(0, deleted=LONG_AGO), pod_of(1)]
    facts = {"job": job_of("Complete"), "pods": pods, "events": []}
    status = judged(handle, facts, NOW)
    assert (status.state, status.step) == (JobState.PREEMPTED, 7)
    assert "was deleted while the job ran" in status.reason
    assert "all ranks saved after step 7" in status.reason


@pytest.mark.parametrize(
    ("job", "pods"),
    [
        (job_of("Complete", deletionTimestamp=AT), []),
        (job_of("Complete", deletionTimestamp=AT), [pod_of(0, phase="Succeeded", deleted=AT)]),
        (None, []),
    ],
    ids=["being removed", "with its pods", "gone"],
)
def test_what_ranks_saved_counts_when_kubernetes_removes_the_job(handle, job, pods):
    all_save(handle)
    status = judged(handle, {"job": job, "pods": pods, "events": []}, NOW)
    assert (status.state, status.step) == (JobState.PREEMPTED, 7)


def test_a_job_that_is_deleted_while_it_runs_has_ended_when_its_pods_have(handle):
    """Its launcher ends first, and the Job has failed by that."""
    job = job_of("Failed", "BackoffLimitExceeded", deletionTimestamp=LONG_AGO)
    facts = {"job": job, "pods": [pod_of(0, ended_as(), phase="Failed"), pod_of(1)], "events": []}
    assert judged(handle, facts, NOW).reason == "is being ended"
    facts["pods"].pop()
    status = judged(handle, facts, NOW)
    assert (status.state, "it was cancelled" in status.reason) == (JobState.LOST, True)


def test_a_job_that_took_too_long_says_so_while_it_is_removed(handle):
    job = job_of("Failed", "DeadlineExceeded", deletionTimestamp=AT)
    status = judged(handle, {"job": job, "pods": [], "events": []}, NOW)
    assert (status.state, "launcher.time_limit" in status.reason) == (JobState.LOST, True)


def test_a_node_that_is_not_well_is_named_with_its_pod(handle):
    pods = [pod_of(0), pod_of(1)]
    name = pods[1]["metadata"]["name"]
    (handle.record_dir / "preflight.json").write_text(json.dumps({name: "its clock is late"}))
    status = judged(handle, {"job": job_of("Failed"), "pods": pods, "events": []}, NOW)
    assert (status.state, status.permanent) == (JobState.LOST, False)
    assert f"Pod {name} on node n1: its clock is late." in status.reason


def test_a_job_has_ended_when_its_pods_have(handle):
    facts = {"job": job_of("Complete", at=AT), "pods": [pod_of(0), pod_of(1)], "events": []}
    assert judged(handle, facts, NOW).state is JobState.RUNNING
    assert left_over(facts, NOW) == []
    assert judged(handle, facts, NOW + 60).ended
    assert len(left_over(facts, NOW + 60)) == 2


@pytest.mark.parametrize("condition", ["Failed", "FailureTarget"])  # before 1.31, and since
def test_ranks_save_for_as_long_as_the_pods_of_a_drained_node_have(handle, condition):
    job = job_of(condition, "BackoffLimitExceeded", at="2027-01-15T07:59:00Z")
    later = "2027-01-15T08:01:00Z"  # when its grace is over
    workers = [pod_of(0), pod_of(1)]
    facts = {"job": job, "pods": [pod_of("launcher", deleted=later), *workers], "events": []}
    assert judged(handle, facts, NOW).reason == "is ending"
    assert left_over(facts, NOW) == []
    all_save(handle)
    ended = pod_of("launcher", ended_as(code=0), phase="Succeeded", deleted=later)
    status = judged(handle, facts | {"pods": [ended, *workers]}, NOW)
    assert (status.state, status.step) == (JobState.PREEMPTED, 7)
    assert left_over(facts | {"pods": [ended, *workers]}, NOW) == workers


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("BackoffLimitExceeded", "on node nlauncher does not answer"),
        ("DeadlineExceeded", "launcher.time_limit"),
    ],
)
def test_a_job_whose_launchers_node_is_down_ends_without_it(handle, reason, words):
    """Since 1.31 a Job has not failed before its pods have ended, which that one never does."""
    not_ready = [{"type": "Ready", "status": "False"}]
    silent = pod_of("launcher", deleted=LONG_AGO, conditions=not_ready)
    workers = [pod_of(0), pod_of(1)]
    facts = {"job": job_of("FailureTarget", reason), "pods": [silent, *workers], "events": []}
    status = judged(handle, facts, NOW)
    assert (status.state, words in status.reason) == (JobState.LOST, True)
    assert left_over(facts, NOW) == workers


def test_a_job_does_not_wait_for_a_worker_on_a_node_that_is_cut_off(handle):
    job = job_of("Failed", "BackoffLimitExceeded", at="2027-01-15T07:59:00Z")
    ended = pod_of("launcher", ended_as(code=1), phase="Failed")
    pods = [ended, pod_of(0), pod_of(1, deleted="2027-01-15T08:01:00Z")]
    assert judged(handle, {"job": job, "pods": pods, "events": []}, NOW).ended


def test_a_job_that_is_deleted_has_ended_when_it_is_gone_or_its_node_is_lost(handle):
    job = job_of(deletionTimestamp=AT)
    facts = {"job": job, "pods": [pod_of(0, deleted=AT)], "events": []}
    assert judged(handle, facts, NOW).reason == "is being ended"
    # A busy node takes its time with a pod that has ended.
    assert judged(handle, facts, NOW + 60).reason == "is being ended"
    status = judged(handle, facts, NOW + 90)
    assert (status.state, status.ended) == (JobState.LOST, True)
    assert "on node n0 does not answer" in status.reason
    assert judged(handle, {"job": None, "pods": [], "events": []}, NOW).state is JobState.LOST


@pytest.mark.parametrize("condition", ["", "Failed"])
@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Pending"])
def test_a_node_is_not_down_where_a_finalizer_keeps_a_pod(handle, condition, phase):
    """As Kueue's, that has ended, or never had a node."""
    kept = pod_of(0, phase=phase, deleted=LONG_AGO)
    if phase == "Pending":
        del kept["spec"]["nodeName"]
    job = job_of(condition, deletionTimestamp=LONG_AGO)
    facts = {"job": job, "pods": [kept], "events": []}
    status = judged(handle, facts, NOW)
    assert (status.state, "it was cancelled" in status.reason) == (JobState.LOST, True)
    # Another one saves.
    facts["pods"].append(pod_of(1, deleted="2027-01-15T08:01:00Z"))
    assert judged(handle, facts, NOW).reason == "is being ended"


def test_kueue_lets_pods_go_that_have_ended_in_whatever_way():
    """Else it waits for others in place of those that failed."""
    made = yaml.safe_load_all(full().render(SPEC).script)
    pods = [one["metadata"] for one in made if one["kind"] == "Pod"]
    notes = [one["annotations"].get("kueue.x-k8s.io/retriable-in-group") for one in pods]
    assert notes == ["false"] * SPEC.nodes


def test_a_job_that_kueue_holds_says_so_and_one_that_it_takes_back_ends(handle):
    """As where it manages jobs that name no queue."""
    job = {**job_of(creationTimestamp=AT), "spec": {"parallelism": 1, "suspend": True}}
    job = slim(OPERATORS["none"].as_job(job))
    workers = [pod_of(0), pod_of(1)]
    facts = {"job": job, "pods": workers, "events": []}
    status = judged(handle, facts, NOW)
    assert status.state is JobState.PENDING and "waits in Kueue's queue." in status.reason
    status = judged(handle, facts, NOW + 599)  # its workers hold their nodes
    assert (status.state, status.permanent, status.waits) == (JobState.FAILED, False, True)
    assert "Kueue's queue; its launcher's pod" in status.reason and "LocalQueue" in status.reason
    assert taken_back(handle, job) is None
    (handle.record_dir / "rank-0.json").write_text('{"rank": 0, "host": "h"}')
    verdict = taken_back(handle, job)
    assert verdict.state is JobState.PREEMPTED
    # A deadline is none for a Job that is suspended: it does not fail by that.
    job["metadata"]["annotations"][ENDED_BECAUSE] = verdict.dump(NOW - 60)
    assert judged(handle, facts, NOW).state is JobState.PREEMPTED
    assert left_over(facts, NOW) == workers


def unschedulable(said, reason="Unschedulable"):
    return [{"type": "PodScheduled", "status": "False", "reason": reason, "message": said}]


@pytest.mark.parametrize(
    ("pod", "events", "state", "words"),
    [
        (pod_of(1), [], JobState.RUNNING, "on n0, n1"),
        (
            pod_of(
                1,
                phase="Pending",
                conditions=unschedulable("0/9 nodes: 9 Insufficient nvidia.com/gpu."),
            ),
            [],
            JobState.PENDING,
            "waits for room: 0/9 nodes: 9 Insufficient nvidia.com/gpu. If there never is, change "
            "launcher.slots",
        ),
        (
            pod_of(1, phase="Pending", conditions=unschedulable("", "SchedulingGated")),
            [],
            JobState.PENDING,
            "Kueue",
        ),
        (
            pod_of(
                1, phase="Pending", conditions=unschedulable('persistentvolumeclaim "w" not found')
            ),
            [],
            JobState.FAILED,
            "Correct launcher.volumes",
        ),
        (
            pod_of(1, waiting("ImagePullBackOff", "Back-off"), phase="Pending", created=AT),
            [],
            JobState.PENDING,
            "cannot be pulled (ImagePullBackOff): Back-off.",
        ),
        (
            pod_of(1, waiting("ImagePullBackOff", "Back-off"), phase="Pending", created=AT),
            [event(1, "Failed", "Failed to pull image: 401 Unauthorized")],
            JobState.FAILED,
            "launcher.image_pull_secrets",
        ),
        # A large image, on its way for an hour.
        (
            pod_of(1, waiting("ContainerCreating"), phase="Pending"),
            [event(1, "Failed", "Failed to pull image: timeout"), event(1, "Pulling", "Pulling x")],
            JobState.PENDING,
            "is being made: Pulling x.",
        ),
        (
            pod_of(1, waiting("ImagePullBackOff", "Back-off"), phase="Pending", created=AT),
            [event(1, "Failed", "Failed to pull image: lookup r.example.com: no such host")],
            JobState.PENDING,
            "no such host",
        ),
        (
            pod_of(
                1,
                waiting("ErrImagePull", 'of "r/denied-not found:1": r/denied:1: refused'),
                image="r/denied:1",
                phase="Pending",
                created=AT,
            ),
            [],
            JobState.PENDING,
            "cannot be pulled (ErrImagePull)",
        ),
        (
            pod_of(1, waiting("InvalidImageName", "x"), phase="Pending", created=AT),
            [],
            JobState.FAILED,
            "Correct launcher.image",
        ),
        (
            pod_of(
                1, waiting("CreateContainerConfigError", "no secret"), phase="Pending", created=AT
            ),
            [],
            JobState.PENDING,
            "(CreateContainerConfigError): no secret",
        ),
        (
            pod_of(1, waiting("ContainerCreating"), phase="Pending"),
            [event(1, "FailedMount", "not there")],
            JobState.FAILED,
            "(FailedMount): not there",
        ),
    ],
)
def test_a_job_that_waits_says_for_what(handle, pod, events, state, words):
    facts = {"job": job_of(), "pods": [LAUNCHER, pod_of(0), pod], "events": events}
    status = judged(handle, facts, NOW)
    assert (status.state, status.permanent) == (state, state is JobState.FAILED)
    assert words in status.reason


@pytest.mark.parametrize(
    ("pod", "asked"),
    [
        (pod_of(1, waiting("ErrImagePull", "connection refused"), phase="Pending"), False),
        (pod_of(1, waiting("ContainerCreating"), phase="Pending"), True),
        (pod_of(1, phase="Pending", conditions=unschedulable("0/9 nodes")), True),
        (pod_of(1, phase="Pending", conditions=unschedulable("", "SchedulingGated")), True),
    ],
    ids=["a registry", "a pull", "room", "Kueue"],
)
def test_what_takes_too_long_to_come_may_come_at_another_try(handle, pod, asked):
    notes = {"ddl-airflow/start-timeout-s": "600"} if asked else {}
    events = [event(1, "Pulling", "Pulling x")]
    facts = {"job": job_of(annotations=notes), "pods": [LAUNCHER, pod_of(0), pod]}
    facts["events"] = events if asked else []
    status = judged(handle, facts, NOW)
    assert (status.state, status.permanent, status.waits) == (JobState.FAILED, False, True)
    assert "so for 600 s" in status.reason and "launcher.start_timeout" in status.reason
    assert JobStatus.load(status.dump()) == status


def test_workers_that_hold_nodes_while_others_wait_for_room_are_told(handle):
    """Two jobs may wait so for each other, for ever."""
    waits = pod_of(1, phase="Pending", conditions=unschedulable("0/3 nodes: 3 Insufficient cpu."))
    del waits["spec"]["nodeName"]
    facts = {"job": job_of(), "pods": [LAUNCHER, pod_of(0), waits], "events": []}
    status = judged(handle, facts, NOW)
    assert status.state is JobState.PENDING
    assert "1 of 2 workers hold their nodes meanwhile: set launcher.start_timeout" in status.reason
    facts["job"] = job_of(annotations={"ddl-airflow/start-timeout-s": "7200"})
    assert "meanwhile" not in judged(handle, facts, NOW).reason


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (("docker.io/t@sha256:aa", "docker.io/t@sha256:bb"), True),
        (("docker-pullable://t@sha256:aa", "docker.io/t@sha256:aa"), False),
        (("docker.io/t@sha256:aa", "sha256:cc"), False),  # of a node that has it by other ways
        (("docker.io/t@sha256:aa", ""), False),
    ],
)
def test_workers_that_run_different_images_under_one_tag_are_told(handle, ids, told):
    """One node has had the tag for long, and the other pulled it today."""
    workers = [pod_of(0), pod_of(1)]
    for pod, one in zip(workers, ids, strict=True):
        pod["status"]["containerStatuses"][0]["imageID"] = one
    facts = {"job": job_of(), "pods": [LAUNCHER, *workers], "events": []}
    status = judged(handle, facts, NOW)
    words = ". Its workers have different images under trainer:1 (sha256:aa, sha256:bb)"
    assert status.state is JobState.RUNNING and (words in status.reason) is told
    assert told or status.reason == "on n0, n1"


@pytest.mark.parametrize(
    ("ids", "images"),
    [
        (("docker.io/t@sha256:aa", "docker.io/t@sha256:aa"), ("docker.io/t@sha256:aa",)),
        (
            ("docker-pullable://t@sha256:bb", "docker.io/t@sha256:aa"),
            ("docker.io/t@sha256:aa", "t@sha256:bb"),
        ),
        (("sha256:cc", ""), ("trainer:1", "trainer:1 (sha256:cc)")),
    ],
)
def test_a_job_that_has_succeeded_names_the_images_of_its_ranks(handle, ids, images):
    workers = [pod_of(number, ended_as(code=0), phase="Succeeded") for number in range(2)]
    for rank, (pod, one) in enumerate(zip(workers, ids, strict=True)):
        pod["status"]["containerStatuses"][0]["imageID"] = one
        record = {"rank": rank, "host": f"w{rank}", "ended": 1.0, "exit_code": 0}
        (handle.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))
    facts = {"job": job_of("Complete"), "pods": workers, "events": []}
    status = judged(handle, facts, NOW)
    assert (status.state, status.images) == (JobState.SUCCEEDED, images)
    assert JobStatus.load(json.loads(json.dumps(status.dump()))) == status


def test_an_image_may_be_asked_for_at_each_start():
    made = KubernetesLauncher(**SETTINGS, image_pull_policy="Always").render(SPEC).script
    assert made.count("imagePullPolicy: Always") == 1 + SPEC.nodes
    assert "imagePullPolicy" not in KubernetesLauncher(**SETTINGS).render(SPEC).script
    text = MANIFEST.replace(
        "image_pull_secrets:", "image_pull_policy: Always\n  image_pull_secrets:"
    )
    steps = plan(load_manifest_text(text, "m.yml"), Path("m.yml"))
    assert steps.train.scheduler["image_pull_policy"] == "Always"
    with pytest.raises(ManifestError, match=r"launcher\.image_pull_policy"):
        load_manifest_text(text.replace("Always", "Sometimes"), "m.yml")


def test_a_pod_that_waited_long_for_its_node_has_time_to_start(handle):
    has_node = {"type": "PodScheduled", "status": "True", "lastTransitionTime": AT}
    pod = pod_of(0, waiting("ContainerCreating"), phase="Pending", conditions=[has_node])
    status = judged(handle, {"job": job_of(), "pods": [pod, LAUNCHER], "events": []}, NOW)
    assert status.state is JobState.PENDING


def test_a_job_waits_for_its_quota(handle):
    made = {"of": NAME, "reason": "FailedCreate", "message": "exceeded quota"}
    facts = {"job": job_of(creationTimestamp=AT), "pods": [pod_of(0), pod_of(1)], "events": [made]}
    status = judged(handle, facts, NOW)
    assert (status.state, status.reason) == (JobState.PENDING, "waits to be made: exceeded quota")


NO_LIMIT = 'Error creating: pods "x" is forbidden: failed quota: q: must specify limits.memory'


@pytest.mark.parametrize(
    ("said", "passed_s", "state", "permanent", "words"),
    [
        (NO_LIMIT, 0, JobState.PENDING, False, "to be made: "),
        (NO_LIMIT, 61, JobState.FAILED, True, f"will not start: {NO_LIMIT}. Set launcher."),
        ('pods "x" is forbidden: not yet ready', 61, JobState.PENDING, False, "to be made: "),
        ('pods "x" is forbidden: exceeded quota: q', 0, JobState.PENDING, False, "to be made: "),
        ('pods "x" is forbidden: exceeded quota: q', 599, JobState.FAILED, False, "after 600 s"),
        ("failed calling webhook: no endpoints", 0, JobState.PENDING, False, "to be made: "),
        ("failed calling webhook: no endpoints", 599, JobState.FAILED, False, "no endpoints"),
        ("", 599, JobState.FAILED, False, "launcher's pod is not made after 600 s"),
    ],
)
def test_workers_do_not_wait_for_ever_for_a_launcher_that_is_not_made(
    handle, said, passed_s, state, permanent, words
):
    """They hold their GPUs meanwhile."""
    events = [{"of": NAME, "reason": "FailedCreate", "message": said}] if said else []
    workers = [pod_of(0), pod_of(1)]
    facts = {"job": job_of(creationTimestamp=AT), "pods": workers, "events": events}
    status = judged(handle, facts, NOW + passed_s)
    assert (status.state, status.permanent) == (state, permanent)
    assert words in status.reason and said in status.reason


def test_a_launcher_has_limits_which_a_quota_may_ask_for():
    made = list(yaml.safe_load_all(full().render(SPEC).script))
    (job,) = (one for one in made if one["kind"] == "Job")
    resources = job["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert set(resources["limits"]) >= {"memory"}


def test_a_launcher_that_a_quota_holds_back_holds_its_workers_no_longer_than_start_timeout(handle):
    workers = [pod_of(0), pod_of(1)]
    assert needs_events(job_of(), workers)
    assert not needs_events(job_of(), [LAUNCHER, *workers])
    patient = job_of(annotations={"ddl-airflow/start-timeout-s": "600"})
    # Kubernetes keeps an event for an hour, and what cannot be made is tried ever more seldom.
    facts = {"job": patient, "pods": workers, "events": []}
    status = judged(handle, facts, NOW)
    assert (status.state, status.permanent) == (JobState.FAILED, False)
    assert "launcher's pod is not made after 600 s (launcher.start_timeout)" in status.reason
    facts["events"] = [{"of": NAME, "reason": "FailedCreate", "message": "exceeded quota"}]
    assert "will not start: exceeded quota" in judged(handle, facts, NOW).reason
    # One that has ended may be gone a moment before its Job has failed by that.
    (handle.record_dir / "rank-0.json").write_text('{"rank": 0, "host": "h"}')
    assert not judged(handle, facts, NOW).ended


@pytest.mark.parametrize(
    ("pod", "state", "permanent"),
    [
        (pod_of(1), None, False),
        (pod_of(1, ended_as(at=AT), phase="Failed"), None, False),  # the launcher sees it
        (pod_of(1, ended_as("StartError", 128), phase="Failed"), JobState.FAILED, True),
        (
            pod_of(1, ended_as(code=69, message='{"said": "no sshd"}'), phase="Failed"),
            JobState.FAILED,
            True,
        ),
        (pod_of(1, ended_as(), phase="Failed"), JobState.LOST, False),
        (pod_of(0), JobState.PREEMPTED, False),  # not 1
        (pod_of(1, ended_as(code=75), phase="Failed"), JobState.LOST, False),
    ],
)
def test_a_job_that_cannot_go_on_is_ended(handle, pod, state, permanent):
    facts = {"job": job_of(), "pods": [LAUNCHER, pod_of(0), pod], "events": []}
    verdict = dead(facts, NOW)
    assert (verdict and verdict.state) is state
    if verdict:
        assert verdict.permanent is permanent
        kept = {"ddl-airflow/ended-because": verdict.dump()}
        ended = job_of("Failed", "DeadlineExceeded", annotations=kept)
        status = judged(handle, facts | {"job": ended}, NOW)
        assert (status.state, status.reason) == (state, verdict.reason)


@pytest.mark.parametrize("number", [1, "launcher"])
def test_a_pod_that_its_node_does_not_take_says_why(handle, number):
    why = {"reason": "UnexpectedAdmissionError", "message": "Pod was rejected: no device. "}
    # Newer kubelets tell of containers that they never made.
    for told in ({"containerStatuses": []}, {}):
        pods = {1: pod_of(1), "launcher": LAUNCHER}
        pods[number] = pod_of(number, waiting("ContainerCreating"), phase="Failed", **why, **told)
        facts = {"job": job_of(), "pods": [pod_of(0), *pods.values()], "events": []}
        if number == "launcher":
            facts["job"] = job_of("Failed", "BackoffLimitExceeded")
        verdict = dead(facts, NOW) or why_ended(facts)
        assert verdict.state is JobState.LOST and not verdict.permanent
        words = "(UnexpectedAdmissionError): Pod was rejected: no device."
        assert verdict.reason.endswith(f"on node n{number} was not taken by its node {words}")


def test_a_worker_that_lost_its_launcher_names_the_launchers_node():
    alone = pod_of(1, ended_as(code=75), phase="Failed")
    verdict = dead({"job": job_of(), "pods": [pod_of(0), alone, LAUNCHER], "events": []}, NOW)
    assert "on node nlauncher does not answer" in verdict.reason


@pytest.mark.parametrize(
    ("code", "said", "cure", "again"),
    [
        (403, 'pods "x" is forbidden: exceeded quota: q', "larger quota", True),
        (
            403,
            'jobs.batch is forbidden: User "u" cannot create resource "jobs"',
            "docs/kubernetes.md",
            False,
        ),
        (403, 'pods "x" is forbidden: must specify limits.memory', "resources.memory", False),
        (403, 'pods "x" is forbidden: must specify limits.cpu', "LimitRange", False),
        (404, 'namespaces "none" not found', "launcher.namespace", False),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted"', "run_ranks_as", False),
        (422, "Pod is invalid: spec", "", False),
        (503, "apiserver is shutting down", "", True),
        (409, "Operation cannot be fulfilled on resourcequotas", "", True),
    ],
)
def test_what_the_server_refuses_is_told_with_what_to_change(code, said, cure, again):
    one = {"kind": "Pod", "metadata": {"name": "x"}}
    error = refused(Refused(code, "Conflict" if code == 409 else "", said), "vision", one)
    assert error.retryable is again
    assert said in str(error) and cure in str(error) and "namespace vision" in str(error)


@pytest.mark.parametrize(("no_proxy", "by"), [("10.0.0.0/8", "PoolManager"), ("", "ProxyManager")])
def test_a_proxy_is_not_asked_for_a_server_that_needs_none(tmp_path, monkeypatch, no_proxy, by):
    for name in ("https_proxy", "HTTP_PROXY", "http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.com:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    kubeconfig = tmp_path / "config"
    one = [{"name": "here", "context": {"cluster": "c", "user": "u"}}]
    servers = [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443"}}]
    said = {"current-context": "here", "contexts": one, "clusters": servers}
    kubeconfig.write_text(json.dumps(said | {"users": [{"name": "u", "user": {"token": "t"}}]}))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    assert type(kubernetes_api.Cluster()._pool).__name__ == by


@pytest.mark.parametrize("by", ["connection", "file"])
def test_keys_of_a_kubeconfig_are_in_files_for_a_moment(tmp_path, monkeypatch, by):
    """Of a file's they stayed: a task of Airflow ends without what removes them."""
    private, certificate = tmp_path / "key", tmp_path / "certificate"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=airflow"]
    files = ["-keyout", str(private), "-out", str(certificate)]
    subprocess.run([*words, *files], check=True, capture_output=True)
    encoded = [base64.b64encode(one.read_bytes()).decode() for one in (certificate, private)]
    told = {
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "vision"}}
        ],
        "clusters": [
            {
                "name": "c",
                "cluster": {
                    "server": "https://127.0.0.1:9",
                    "certificate-authority-data": encoded[0],
                },
            }
        ],
        "users": [
            {
                "name": "u",
                "user": {"client-certificate-data": encoded[0], "client-key-data": encoded[1]},
            }
        ],
    }
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(kubernetes_api, "usual_base", lambda: temporary)
    seen = []
    made = kubernetes_api._tls_of

    def tls_of(config):
        files = [Path(one) for one in (config.ssl_ca_cert, config.cert_file, config.key_file)]
        seen.extend((path.stat().st_mode & 0o777, path.read_bytes()) for path in files)
        return made(config)

    monkeypatch.setattr(kubernetes_api, "_tls_of", tls_of, raising=False)
    (tmp_path / "config").write_text(json.dumps(told))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    one = AirflowConnection("c", "kubernetes", extra={"kube_config": told})
    for _ in range(2):  # the second is not told where the first's files were
        cluster = kubernetes_api.Cluster("", one if by == "connection" else None)
        assert cluster.namespace == "vision"
        with pytest.raises(LaunchError, match="does not answer"):
            cluster.list("vision", "Job")
    assert list(temporary.iterdir()) == []
    text = [path.read_bytes() for path in (certificate, certificate, private)]
    assert seen == [(0o600, one) for one in text * 2]
    assert told["users"][0]["user"]["client-key-data"] == encoded[1]  # as it was


def test_files_that_a_kubeconfig_names_are_beside_it(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("planted")
    told = kubeconfig(users=[{"name": "u", "user": {"tokenFile": "token"}}])
    # Of another user what is wrong does not matter.
    told["users"].append({"name": "v", "user": {"client-key-data": "DATA+OMITTED"}})
    (tmp_path / "config").write_text(json.dumps(told))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    about = kubernetes_api.Cluster()._config.auth_settings()
    assert about["BearerToken"]["value"] == "Bearer planted"


def kubeconfig(**changed):
    told = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"token": "planted"}}],
    }
    return told | changed


ODD = [
    (
        {"users": [{"name": "u", "user": {"client-key-data": "planted"}}]},
        "user 'u': client-key-data is not Base64",
    ),
    ({"users": [{"name": "u", "user": {"client-key-data": 7}}]}, "is not Base64"),
    ({"users": ["planted"]}, "Expected all values in .*users"),
    ({"users": {"u": "planted"}}, "to be a list"),
    ({"users": [{"name": "u", "token": "planted"}]}, "Expected key user"),
    ({"users": [{"user": {"token": "planted"}}, {"name": "u", "user": {}}]}, "'name' key"),
    ({"users": [{"user": {"client-key-data": "cGxhbnRlZA=="}}]}, "Expected all values in .*users"),
    ({"contexts": ["planted"]}, "Expected all values in .*contexts"),
    ({"contexts": [{"name": "here", "context": "planted"}]}, "malformed"),
    ({"clusters": [{"name": "c", "cluster": {"server": 7}}]}, "malformed"),
]


@pytest.mark.parametrize(("changed", "words"), ODD)
@pytest.mark.parametrize("by", ["connection", "file"])
def test_a_kubeconfig_that_is_malformed_is_told(tmp_path, monkeypatch, changed, words, by):
    """It was an error that nobody had foreseen, which ended the watching of all jobs."""
    told = kubeconfig(**changed)
    (tmp_path / "config").write_text(json.dumps(told))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    one = AirflowConnection("gpus", "kubernetes", extra={"kube_config": told})
    with pytest.raises(SubmitFailed, match="cannot reach a Kubernetes cluster") as caught:
        kubernetes_api.Cluster("", one if by == "connection" else None)
    assert caught.value.retryable is False
    assert "planted" not in "".join(traceback.format_exception(caught.value))
    if by == "connection":
        assert re.search(words, str(caught.value)) and "'gpus'" in str(caught.value)


def test_a_kubeconfig_that_is_no_yaml_is_told_without_its_keys(tmp_path, monkeypatch):
    (tmp_path / "config").write_text("users:\n- token: planted: planted\n")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(SubmitFailed, match=r"is no YAML \(line 2\)") as caught:
        kubernetes_api.Cluster()
    assert "planted" not in "".join(traceback.format_exception(caught.value))


def test_a_connection_whose_extra_is_no_object_is_told():
    one = AirflowConnection("gpus", "kubernetes", extra=["kube_config"])
    with pytest.raises(SubmitFailed, match="'gpus'.* malformed"):
        kubernetes_api.Cluster("", one)
