"""The objects of a job that an operator makes the pods of, and what is made of what it says. Pods
of such jobs on a real cluster are in tests/integration/test_kubernetes_operators.py.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ddl_airflow.core.errors import ManifestError, SubmitFailed
from ddl_airflow.core.job import JobSpec, JobState, StartedJob
from ddl_airflow.core.manifest.load import load_manifest_text
from ddl_airflow.core.plan import plan
from ddl_airflow.launchers.kubernetes import KubernetesLauncher
from ddl_airflow.launchers.kubernetes import launcher as module
from ddl_airflow.launchers.kubernetes.causes import (
    Verdict,
    dead,
    due,
    judged,
    outdated,
    taken_back,
)
from ddl_airflow.launchers.kubernetes.causes import slim as slimmed
from ddl_airflow.launchers.kubernetes.facts import ENDED_BECAUSE
from ddl_airflow.launchers.kubernetes.objects import name_of
from ddl_airflow.launchers.kubernetes.operators import BEGUN, OPERATORS
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
  operator: OPERATOR
  image: registry.example.com/vision/trainer:2.21
  python: /opt/train/bin/python
  namespace: vision
  image_pull_secrets: [registry]
  service_account: trainer
  node_selector: {pool: gpu}
  tolerations: [{key: nvidia.com/gpu, effect: NoSchedule}]
  priority_class: batch
  queue: vision
  resources: {cpu: 8, memory: 64Gi}
  volumes: [{claim: training, mount_path: /workspace}]
  start_timeout: 30m
  time_limit: 12h
  grace: 2m
  keep_finished: 10m
"""
either = pytest.mark.parametrize("operator", ["mpi", "trainer"])


def made_by(operator: str) -> KubernetesLauncher:
    text = MANIFEST.replace("OPERATOR", operator)
    steps = plan(load_manifest_text(text, "m.yml"), Path("m.yml"))
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


@either
def test_the_objects_for_an_operator(golden, operator):
    golden(f"kubernetes_{operator}.txt", f"{made_by(operator).render(SPEC)}\n")


def test_another_operator_is_refused_where_the_manifest_is_read():
    with pytest.raises(ManifestError, match=r"launcher\.operator"):
        made_by("volcano")


@either
def test_pods_of_an_operator_are_those_of_plain_objects(operator):
    """But for what the operator sets itself, and the names of hosts."""

    def pods(of: str) -> dict[str, dict]:
        found: dict[str, dict] = {}

        def look(one: object) -> None:
            if isinstance(one, dict):
                role = one.get("metadata", {}).get("labels", {}).get("ddl-airflow/role")
                if role and "spec" in one:
                    found.setdefault(role, one["spec"])
                list(map(look, one.values()))
            if isinstance(one, list):
                list(map(look, one))

        look(list(yaml.safe_load_all(made_by(of).render(SPEC).script)))
        for one in found.values():
            for field in ("hostname", "subdomain", "restartPolicy"):
                one.pop(field, None)
            del one["containers"][0]["name"]
        said = json.dumps(found, sort_keys=True)
        return json.loads(said.replace(f"{NAME}-node-0-", f"{NAME}-worker-"))

    plain = pods("none")
    assert set(plain) == {"launcher", "worker"}
    assert pods(operator) == plain


@either
@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_the_pods_in_an_operators_object_are_what_kubernetes_knows(operator, version):
    validate = pytest.importorskip("kubernetes_validate").validate
    found = []

    def look(one: object) -> None:
        if isinstance(one, dict):
            if "containers" in one:
                found.append(one)
            list(map(look, one.values()))
        if isinstance(one, list):
            list(map(look, one))

    made = list(yaml.safe_load_all(made_by(operator).render(SPEC).script))
    look(made)
    assert len(found) == 2
    for spec in found:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
        validate(pod, version, strict=True)


def test_a_train_job_is_what_kubeflows_models_know():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    made = {one["kind"]: one for one in yaml.safe_load_all(made_by("trainer").render(SPEC).script)}
    for kind in ("TrainJob", "TrainingRuntime"):
        model = getattr(models, f"TrainerV1alpha1{kind}")
        known = json.dumps(model.from_dict(made[kind]).to_dict()["spec"], sort_keys=True)
        # The one default that they fill in.
        known = known.replace(', "protocol": "TCP"', "")
        assert json.loads(known) == made[kind]["spec"]


def test_kubeflow_trainer_is_asked_for_one_launcher():
    """It makes as many pods as the runtime says of what is labelled as its trainer."""
    made = {one["kind"]: one for one in yaml.safe_load_all(made_by("trainer").render(SPEC).script)}
    runtime = made["TrainingRuntime"]["spec"]
    node, mpirun = runtime["template"]["spec"]["replicatedJobs"]
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert mpirun["template"]["metadata"]["labels"] == {label: "trainer"}
    assert runtime["mlPolicy"]["numNodes"] == 1
    # Of what is called node, as the TrainJob says.
    assert node["name"] == "node" and "metadata" not in node["template"]
    assert made["TrainJob"]["spec"]["trainer"]["numNodes"] == SPEC.nodes


@either
def test_the_job_is_found_by_its_handle_alone(monkeypatch, operator):
    monkeypatch.setattr(module, "Cluster", NoOperator)
    handle = made_by(operator).expected(SPEC)
    assert handle.place == f"{operator}:vision/here"
    dumped = json.loads(json.dumps(StartedJob(handle, 1.0).dump()))
    assert StartedJob.load(dumped).handle == handle


class NoOperator:
    """A cluster of which only discovery is asked."""

    namespace, context = "default", "here"

    def __init__(self, _context: str, _connection: object) -> None:
        pass

    def has(self, _version: str) -> set[str]:
        return {"trainjobs"}


@either
def test_a_cluster_without_the_operator_is_told_by_the_field(monkeypatch, operator):
    monkeypatch.setattr(module, "Cluster", NoOperator)
    one = made_by(operator)
    missing = {"mpi": "mpijobs", "trainer": "trainingruntimes"}[operator]
    words = rf"launcher\.operator is {operator}, .*: {missing}\).*launcher\.operator: none"
    with pytest.raises(SubmitFailed, match=words) as caught:
        one.submit(one.render(SPEC))
    assert caught.value.retryable is False


# --- what an operator says --------------------------------------------------------------------

NOW = 1_800_000_000.0
AT = "2027-01-15T07:59:50Z"  # 10 s before
LATER = "2027-01-15T07:59:58Z"
LONG_AGO = "2027-01-15T07:00:00Z"


@pytest.fixture
def handle(tmp_path):
    for folder in ("records", "logs"):
        (tmp_path / folder).mkdir()
    spec = replace(SPEC, slots=1, record_dir=tmp_path / "records", log_dir=tmp_path / "logs")
    return spec.handle("kubernetes", 0, spec.nodes)


def job_of(operator, condition="", reason="", message="", *, suspended=False, at=LONG_AGO, **notes):
    annotations = {"ddl-airflow/nodes": "2", BEGUN: "true"} | notes
    kind = {"Complete": "Succeeded"}.get(condition, condition) if operator == "mpi" else condition
    said = {"type": kind, "status": "True", "reason": reason, "message": message}
    status = {"conditions": [said | {"lastTransitionTime": at}], "completionTime": at}
    held = {"runPolicy": {"suspend": suspended}} if operator == "mpi" else {"suspend": suspended}
    about = {"name": NAME, "uid": "u", "annotations": annotations, "creationTimestamp": LONG_AGO}
    one = {"metadata": about, "spec": held, "status": status if condition else {}}
    return slimmed(OPERATORS[operator].as_job(one))


def pod_of(operator, number, state=None, phase="Running", created=LONG_AGO, deleted="", **status):
    host = f"{NAME}-node-0-{number}" if operator == "trainer" else f"{NAME}-worker-{number}"
    role = "worker"
    if number == "launcher":
        host, role = f"{NAME}-launcher", "launcher"
    about = {"name": f"{host}-abcde" if operator == "trainer" else host, "uid": "u"}
    about |= {"labels": {"ddl-airflow/role": role}, "creationTimestamp": created}
    about |= {"deletionTimestamp": deleted} if deleted else {}
    containers = [{"image": "trainer:1", "state": state or {"running": {"startedAt": LONG_AGO}}}]
    names = {"worker": "ranks", "launcher": "node" if operator == "trainer" else "launcher"}
    containers[0]["name"] = names[role]
    said = {"phase": phase, "containerStatuses": containers} | status
    one = {"metadata": about, "spec": {"nodeName": f"n{number}", "hostname": host}, "status": said}
    return slimmed(one)


def ended_as(reason="Error", code=1, message=""):
    said = {"reason": reason, "exitCode": code, "message": message, "finishedAt": LONG_AGO}
    return {"terminated": said}


def facts_of(job, *pods, events=()):
    return {"job": job, "pods": list(pods), "events": list(events)}


def host_of(operator, number):
    return pod_of(operator, number)["spec"]["hostname"]


@either
def test_pods_that_are_not_made_yet_are_not_gone(handle, operator):
    facts = facts_of(job_of(operator), pod_of(operator, 0))
    assert dead(facts, NOW) is None
    assert judged(handle, facts, NOW).state is JobState.PENDING
    nothing = judged(handle, facts_of(job_of(operator)), NOW)
    assert (nothing.state, "Does it run?" in nothing.reason) == (JobState.PENDING, True)
    patient = job_of(operator, **{"ddl-airflow/start-timeout-s": "60"})
    status = judged(handle, facts_of(patient), NOW)
    assert (status.state, status.permanent) == (JobState.FAILED, False)  # it may be back


@either
def test_a_worker_that_is_gone_while_the_job_runs_is_a_preemption(handle, operator):
    launcher_pod = pod_of(operator, "launcher", created=AT)
    facts = facts_of(job_of(operator), launcher_pod, pod_of(operator, 0))
    verdict = dead(facts, NOW)
    assert verdict and verdict.state is JobState.PREEMPTED
    assert host_of(operator, 1) in verdict.reason
    # The MPI operator makes it again, under its name.
    again = pod_of(operator, 1, created=LATER)
    verdict = dead(facts_of(facts["job"], *facts["pods"], again), NOW)
    assert verdict and verdict.state is JobState.PREEMPTED
    assert dead(facts_of(facts["job"], *facts["pods"], pod_of(operator, 1)), NOW) is None


@either
def test_pods_that_the_operator_removes_after_the_end_explain_nothing(handle, operator):
    job = job_of(operator, "Failed", "BackoffLimitExceeded")
    end = ended_as(message='{"said": "mpirun ended with code 137", "pod": ""}', code=137)
    launcher_pod = pod_of(operator, "launcher", end, "Failed")
    facts = facts_of(job, launcher_pod, pod_of(operator, 0, deleted=AT))
    status = judged(handle, facts, NOW)
    assert (status.state, "mpirun ended" in status.reason) == (JobState.LOST, True)
    # What says more is taken.
    oom = pod_of(operator, 0, ended_as("OOMKilled", 137), "Failed", deleted=AT)
    status = judged(handle, facts_of(job, launcher_pod, oom), NOW)
    assert (status.state, "launcher.resources.memory" in status.reason) == (JobState.FAILED, True)
    told = {"of": f"{pod_of(operator, 1)['metadata']['name']}", "reason": "Preempted"}
    facts = facts_of(job, launcher_pod, events=[told | {"message": "by x/y"}])
    status = judged(handle, facts, NOW)
    assert (status.state, "higher priority" in status.reason) == (JobState.PREEMPTED, True)


@either
def test_the_worker_that_the_launcher_missed_is_named(handle, operator):
    job = job_of(operator, "Failed", "BackoffLimitExceeded")
    message = json.dumps({"said": "it does not answer", "pod": host_of(operator, 1)})
    launcher_pod = pod_of(operator, "launcher", ended_as(message=message, code=75), "Failed")
    status = judged(handle, facts_of(job, launcher_pod), NOW)
    assert (status.state, "was deleted" in status.reason) == (JobState.PREEMPTED, True)
    cut_off = pod_of(operator, 1, deleted=AT)  # nobody has heard of its end
    status = judged(handle, facts_of(job, launcher_pod, cut_off), NOW)
    assert (status.state, "on node n1 does not answer" in status.reason) == (JobState.LOST, True)


def test_what_the_operator_says_is_the_last_word(handle):
    first = f"jobset failed due to one or more job failures (first failed job: {NAME}-node-0)"
    status = judged(handle, facts_of(job_of("trainer", "Failed", message=first)), NOW)
    assert status.state is JobState.PREEMPTED
    job = job_of("trainer", "Failed", "TrainingRuntimeNotSupported", "unsupported runtime: x")
    status = judged(handle, facts_of(job), NOW)
    assert (status.state, "unsupported runtime: x" in status.reason) == (JobState.LOST, True)
    job = job_of("mpi", "Failed", "DeadlineExceeded", "too long")
    assert "launcher.time_limit" in judged(handle, facts_of(job), NOW).reason


def test_an_evicted_worker_does_not_end_an_mpi_job_before_its_launcher():
    job = {
        "metadata": {"name": NAME, "annotations": {BEGUN: "true"}, "creationTimestamp": AT},
        "spec": {"runPolicy": {"suspend": False}},
        "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "MPIJobEvicted"}]},
    }
    assert OPERATORS["mpi"].as_job(job)["status"]["conditions"] == []


@either
def test_kueue_holds_a_job_and_one_that_it_takes_back_is_ended(handle, operator):
    job = job_of(operator, suspended=True)
    status = judged(handle, facts_of(job), NOW)
    assert (status.state, "Kueue's queue" in status.reason) == (JobState.PENDING, True)
    assert taken_back(handle, job) is None
    (handle.record_dir / "rank-0.json").write_text('{"rank": 0, "host": "h"}')
    verdict = taken_back(handle, job)
    assert verdict and verdict.state is JobState.PREEMPTED
    kept = {"ddl-airflow/ended-because": verdict.dump(NOW - 5)}
    ended = job_of(operator, suspended=True, **kept)
    assert taken_back(handle, ended) is None
    assert judged(handle, facts_of(ended, pod_of(operator, 0)), NOW).state is JobState.RUNNING
    assert judged(handle, facts_of(ended), NOW).state is JobState.PREEMPTED


@either
def test_ranks_save_for_as_long_as_the_launchers_pod_has(handle, operator):
    """Also where Kueue takes the place back, or the time is over: the operator removes all pods."""
    kept = Verdict(JobState.PREEMPTED, "Kueue took its place back.").dump(NOW - 60)
    for job in (
        job_of(operator, suspended=True, **{ENDED_BECAUSE: kept}),
        job_of(operator, "Failed", "DeadlineExceeded"),
    ):
        pods = [pod_of(operator, one, deleted="2027-01-15T08:01:00Z") for one in ("launcher", 0)]
        facts = facts_of(job, *pods)
        assert judged(handle, facts, NOW).reason == "is ending"
        assert judged(handle, facts, NOW + 60 + 90).ended  # its node does not answer
        pods[0]["status"]["phase"] = "Failed"
        assert judged(handle, facts, NOW).ended
    # A job that has not failed has no ranks any more.
    late = pod_of(operator, "launcher", deleted="2027-01-15T08:01:00Z")
    assert judged(handle, facts_of(job_of(operator, "Complete"), late), NOW).ended


@either
def test_a_job_is_queued_last_of_all(operator):
    first = next(
        one
        for one in yaml.safe_load_all(made_by(operator).render(SPEC).script)
        if one["kind"] == OPERATORS[operator].kind
    )
    label = "kueue.x-k8s.io/queue-name"
    assert label not in first["metadata"]["labels"]
    change = OPERATORS[operator].begin(first)
    assert change["metadata"]["labels"] == {label: "vision"}
    assert "spec" not in change  # that is Kueue's to say
    assert label in OPERATORS[operator].end["metadata"]["labels"]


@either
def test_a_job_that_was_not_wholly_submitted_never_starts(handle, operator):
    job = job_of(operator, suspended=True)
    del job["metadata"]["annotations"][BEGUN]
    job["spec"]["parallelism"] = 0
    status = judged(handle, facts_of(job), NOW)
    assert (status.state, status.permanent) == (JobState.FAILED, True)


@either
def test_objects_of_an_operator_are_removed_when_their_time_is_over(operator):
    kept = {"ddl-airflow/keep-finished-s": "60"}
    assert outdated(job_of(operator, "Complete", **kept), NOW)
    assert not outdated(job_of(operator, "Complete", at=AT, **kept), NOW)
    assert not outdated(job_of(operator, **kept), NOW)


@pytest.mark.parametrize("operator", ["none", "mpi", "trainer"])
def test_a_job_with_a_delay_waits_and_is_begun_once(handle, operator):
    notes = {"ddl-airflow/delay-s": "3595", "ddl-airflow/waits": "{}"}
    job = job_of(operator if operator != "none" else "mpi", **notes)
    assert not due(job, NOW - 20)
    status = judged(handle, facts_of(job), NOW - 20)
    assert (status.state, status.reason) == (
        JobState.PENDING,
        "is not to start before 07:59:55 UTC",
    )
    assert due(job, NOW)
    del job["metadata"]["annotations"]["ddl-airflow/waits"]
    assert not due(job, NOW)
