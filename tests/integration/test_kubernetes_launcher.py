"""The Kubernetes launcher on a real cluster of two nodes, with plain objects and no operator: what
it makes of what a cluster refuses, and of what never starts. How jobs can end is in
test_launcher_contract.py. Each pod is run by a kubelet and containerd.
"""

from __future__ import annotations

import base64
import json
import pwd
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ddl_airflow.core.errors import LaunchError, SubmitFailed
from ddl_airflow.core.job import JobHandle, JobState
from ddl_airflow.core.parameters import word_of
from ddl_airflow.launchers.base import Scheduler
from ddl_airflow.storage.filesystem import alone_in, lock_of
from tests.integration.kubernetes import NODES, ROOT, SPACE, KubernetesCluster, ours, python
from tests.integration.kubernetes_jobs import SLEEP, Job, Jobs
from tests.limits import until

pytest.importorskip("kubernetes", reason="no package `kubernetes` in this environment")
from ddl_airflow.launchers.kubernetes import KubernetesLauncher

pytestmark = pytest.mark.integration

_WAIT_S = 60.0
# Saves when it is asked to make room, at a step of all ranks.
SAVES = """\
import os, time
from ddl_ops import lifecycle, preemption
lifecycle.init()
preemption.save_by(lambda step, saver: None)
for step in range(1, 10000):
    open("up-" + os.environ["OMPI_COMM_WORLD_RANK"], "w").close()
    time.sleep(0.1)
    if preemption.wanted(step, ""):
        preemption.end(step)
"""
# The ranks' Python, which waits before it becomes what runs mpirun.
WAITS = """\
#!/bin/sh
case "$*" in
"-m ddl_ops.nodes --job "*) : >"{folder}/waits"; until [ -e "{folder}/go" ]; do sleep 0.1; done ;;
esac
exec "{python}" "$@"
"""
SECRET = "ZGRsIGlzIG5vdCBiYXNlNjQ"


@pytest.fixture
def cluster(kubernetes_cluster: KubernetesCluster) -> KubernetesCluster:
    return kubernetes_cluster


@pytest.fixture
def job(
    cluster: KubernetesCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Job]]:
    """As ``Jobs.make``. Leaves nothing."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    with Jobs(cluster, tmp_path) as jobs:
        yield jobs.make


def test_ranks_run_on_two_nodes_and_find_what_they_find_on_one_host(job, cluster, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_X", "aws://key:secret@")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    script = "import json, os; print(json.dumps({'uid': os.getuid()} | dict(os.environ)))"
    one = job(
        script,
        env={"DATA_DIR": "/d a/ta", "PARAM_KEY": SECRET, "PARAM_LINES": "a\n'b'"},
        keep_finished_s=20.0,
        user="nobody",
    )
    assert isinstance(one.launcher, Scheduler)
    submission = one.launcher.render(one.spec)
    one.start()
    one.until(lambda: one.status().state is JobState.RUNNING, "running")
    nodes = {one.node_of(0), one.node_of(1)}
    shown = cluster.kubectl(
        "-n", SPACE, "get", "pods,jobs,configmaps,services,events", "-o", "yaml"
    )
    assert one.wait().state is JobState.SUCCEEDED, one.said()
    assert nodes == set(NODES)
    seen = [json.loads(one.log(rank)) for rank in range(2)]
    for number, rank in enumerate(seen):
        assert rank["HOSTNAME"] == one.pod(number)
        assert rank["OMPI_COMM_WORLD_RANK"] == str(number)
        assert (rank["OMPI_COMM_WORLD_SIZE"], rank["uid"]) == ("2", pwd.getpwnam("nobody").pw_uid)
        assert (rank["LEARNER_ID"], rank["DATA_DIR"]) == (str(number + 1), "/d a/ta")
        assert (rank["PARAM_LINES"], rank["DDL_OPTIONS"]) == ("a\n'b'", "-mode p")
        assert rank["TF_CPP_MIN_LOG_LEVEL"] == "2"
        assert not {"AIRFLOW_CONN_X", "CUDA_VISIBLE_DEVICES", "SSH_CONNECTION"} & rank.keys()
        record = json.loads((one.spec.record_dir / f"rank-{number}.json").read_text())
        assert record["host"] == one.pod(number)
    # Only its Secrets have values; nothing else of it does, nor what is printed.
    for secret in (SECRET, base64.b64encode(SECRET.encode()).decode(), "PRIVATE KEY"):
        assert secret not in shown
        assert secret not in str(submission)
    one.gone()  # by itself
    assert one.status().state is JobState.SUCCEEDED


def test_values_are_the_words_of_a_command_that_they_are_on_one_host(job):
    values = ["'; echo x > pwned; : '", "$(PARAM_FIRST)", "$(PARAM_KEY)", "a$$b", "$$(PARAM_KEY)"]
    one = job(
        "import json, sys; print(json.dumps(sys.argv[1:]))",
        nodes=1,
        env={"PARAM_FIRST": values[0], "PARAM_KEY": SECRET},
    )
    one.spec = replace(one.spec, command=f"python main.py {' '.join(map(word_of, values))}")
    assert one.start().wait().state is JobState.SUCCEEDED, one.said()
    assert json.loads(one.log(0)) == values
    assert not (one.spec.folder / "pwned").exists()


def test_a_job_that_is_to_wait_holds_no_node_before_its_time(job, cluster):
    one = job(delay_s=6.0).start()
    began = time.monotonic()
    status = one.status()
    assert status.state is JobState.PENDING and "not to start before" in status.reason
    assert not [name for name in cluster.of_job(one.name, SPACE) if name.startswith("pod/")]
    assert one.wait().state is JobState.SUCCEEDED, one.said()
    assert time.monotonic() - began > 5.0
    assert {one.node_of(0), one.node_of(1)} == set(NODES)


def test_a_name_that_nobody_knows_while_mpirun_connects_ends_no_job(job, cluster, tmp_path):
    program = tmp_path / "python"
    program.write_text(WAITS.format(folder=tmp_path, python=python()))
    program.chmod(0o755)
    one = job("print('trained')", python=str(program)).start()
    one.until((tmp_path / "waits").exists, "about to run mpirun")
    with cluster.without_names():
        (tmp_path / "go").touch()
        assert one.wait().state is JobState.SUCCEEDED, one.said()


def test_cancel_lets_ranks_end_may_come_twice_and_leaves_nothing(job):
    one = job(SLEEP).start().up()
    assert one.status().reason == "on node-1, node-2"
    one.cancel()
    one.cancel()
    status = one.wait()
    assert (status.state, status.permanent) == (JobState.LOST, False)
    assert "cancelled" in status.reason
    assert all((one.spec.folder / f"asked-{rank}").exists() for rank in (0, 1))
    one.gone()
    one.cancel()


def test_ranks_that_saved_have_made_room_also_when_their_job_is_gone(job, cluster):
    one = job(SAVES, keep_finished_s=0.0).start().up()
    cluster.kubectl("-n", SPACE, "delete", "pod", one.pod(1), "--wait=false")
    one.gone()  # before anybody has asked how it ended
    status = one.status()
    assert (status.state, status.step is None) == (JobState.PREEMPTED, False), one.said()


def test_two_jobs_run_at_once_and_are_found_by_their_names(job, tmp_path):
    both = [job(SLEEP, nodes=1).start() for _ in range(2)]
    for one in both:
        one.up()
    expected = [one.launcher.expected(one.spec) for one in both]
    assert [one.number for one in expected] == [0, 0]
    assert [KubernetesLauncher().find(one) for one in expected] == [one.handle for one in both]
    told = KubernetesLauncher().ask([one.handle for one in both])
    states = [
        KubernetesLauncher().conclude(one.handle, said)
        for one, said in zip(both, told, strict=True)
    ]
    assert [one.state for one in states] == [JobState.RUNNING] * 2
    never = replace(expected[0], job_id="never", record_dir=tmp_path / "none")
    assert KubernetesLauncher().find(never) == never
    assert KubernetesLauncher().status(never).state is JobState.LOST
    KubernetesLauncher().cancel(never)
    KubernetesLauncher().cancel(expected[0])  # as who never heard its number does
    assert both[0].wait().state is JobState.LOST
    assert both[1].status().state is JobState.RUNNING


def test_a_job_in_place_of_one_of_its_id_that_has_ended_and_of_none_that_runs(job):
    """As of a run that was deleted, and made again."""
    one = job("print('trained')", nodes=1).start()
    assert one.wait().state is JobState.SUCCEEDED, one.said()
    before = one.handle
    second = one.start().handle
    assert second.number != before.number
    with pytest.raises(SubmitFailed, match="already exists.*Wait for its end") as caught:
        one.start()
    assert caught.value.retryable
    assert one.wait().state is JobState.SUCCEEDED, one.said()


def test_only_one_job_works_in_an_experiment(job, tmp_path):
    lock = tmp_path / ".shared one.lock"
    first = job(SLEEP, nodes=1, lock=lock).start().up()
    second = job(nodes=1, lock=lock).start()
    assert second.wait().state is JobState.LOST
    assert f"another training works there now: {first.spec.job_id}" in second.said()


def test_ranks_of_another_user_hold_the_lock_that_the_task_had(job, tmp_path):
    experiment = tmp_path / "shared one"
    with alone_in(experiment, "the task"):
        pass
    one = job(nodes=1, lock=lock_of(experiment), user="nobody").start()
    assert one.wait().state is JobState.SUCCEEDED, one.said()


def test_a_job_that_was_not_wholly_submitted_never_starts(job):
    one = job(nodes=1)
    first, *_ = one.launcher.render(one.spec).script.split("\n---\n")
    one.cluster.kubectl("-n", SPACE, "create", "-f", "-", given=first)
    one.handle = KubernetesLauncher().find(one.launcher.expected(one.spec))
    assert one.handle.number
    status = one.status()
    assert (status.state, status.permanent) == (JobState.FAILED, True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"python": "/no/python"}, "could not start its program.*launcher.python"),
        ({"volumes": ours()}, "cannot be written.*launcher.volumes must bring the workspace"),
        ({"volumes": [{"claim": "none", "mount_path": "/w"}]}, 'claim "none" not found'),
    ],
)
def test_what_never_can_start_is_said_and_not_tried_again(job, settings, words):
    one = job(nodes=1, **settings).start()
    status = one.wait()
    assert (status.state, status.permanent) == (JobState.FAILED, True)
    assert re.search(words, status.reason), status.reason
    assert one.status() == status
    one.cancel()  # as its trigger does


@pytest.fixture
def as_account(cluster, monkeypatch) -> Callable[[str], None]:
    """as_account(name): from here on Kubernetes is asked by a new service account."""

    def become(name: str) -> None:
        cluster.kubectl("-n", SPACE, "create", "serviceaccount", name)
        words = ("-n", SPACE, "get", "secrets", "-o", "name")
        until(lambda: f"{name}-token" in cluster.kubectl(*words), 20)
        monkeypatch.setenv("KUBECONFIG", str(cluster.as_account(SPACE, name)))

    return become


def test_what_the_account_may_not_is_not_tried_again(job, as_account):
    one = job(nodes=1)
    as_account("nobody")
    with pytest.raises(SubmitFailed, match="cannot create.*docs/kubernetes.md") as caught:
        one.start()
    assert caught.value.retryable is False
    with pytest.raises(LaunchError, match="cannot list"):
        KubernetesLauncher().status(one.launcher.expected(one.spec))


def test_the_rights_that_the_page_lists_are_enough(job, cluster, as_account):
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    role = yaml.safe_load(page.split("```yaml\n")[2].partition("```")[0])
    cluster.apply(role)
    words = ("--role=ddl-airflow", f"--serviceaccount={SPACE}:airflow")
    cluster.kubectl("-n", SPACE, "create", "rolebinding", "airflow", *words)
    as_account("airflow")
    one = job(SLEEP, nodes=1).start().up()
    assert KubernetesLauncher().find(one.launcher.expected(one.spec)) == one.handle
    one.cancel()
    assert one.wait().state is JobState.LOST
    waits = job(nodes=1, resources={"cpu": "64"}).start()  # of which events tell
    waits.until(lambda: "waits for room" in waits.status().reason, "tried by the scheduler")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"namespace": "none"}, "none.*not found.*launcher.namespace"),
        ({"priority_class": "none"}, "launcher.priority_class"),
        ({"service_account": "none"}, "launcher.service_account"),
    ],
)
def test_what_the_cluster_refuses_leaves_nothing(job, settings, words):
    one = job(nodes=1, **settings)
    with pytest.raises(SubmitFailed, match=words) as caught:
        one.start()
    assert caught.value.retryable is False
    one.handle = one.launcher.expected(one.spec)
    one.gone()


def test_a_quota_that_is_used_up_is_tried_again(job, cluster):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}}
    cluster.apply(
        quota | {"metadata": {"name": "q", "namespace": SPACE}, "spec": {"hard": {"pods": "1"}}}
    )
    one = job()
    try:
        words = ("-n", SPACE, "get", "resourcequota", "q", "-o", "jsonpath={.status.hard.pods}")
        one.until(lambda: cluster.kubectl(*words) == "1", "known to the cluster")
        with pytest.raises(SubmitFailed, match="exceeded quota.*larger quota") as caught:
            one.start()
    finally:
        cluster.kubectl("-n", SPACE, "delete", "resourcequota", "q")
    assert caught.value.retryable is True
    one.handle = one.launcher.expected(one.spec)
    one.gone()


def test_a_cluster_that_does_not_answer_is_no_end(job, monkeypatch):
    one = job(SLEEP, nodes=1).start().up()
    said = json.loads(one.cluster.kubeconfig.read_text())
    said["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    away = one.spec.folder / "away.conf"
    away.write_text(json.dumps(said))
    with monkeypatch.context() as context:
        context.setenv("KUBECONFIG", str(away))
        with pytest.raises(LaunchError, match="does not answer") as caught:
            one.status()
    assert caught.value.retryable
    assert one.status().state is JobState.RUNNING


@pytest.mark.parametrize("as_text", [True, False])
def test_a_cluster_is_reached_by_an_airflow_connection_and_its_keys_are_nowhere(
    job, kubernetes_cluster, monkeypatch, as_text, tmp_path
):
    told = json.loads(kubernetes_cluster.kubeconfig.read_text())
    secret = told["users"][0]["user"]["token"]
    extra = {"kube_config": json.dumps(told) if as_text else told}
    said = {"conn_type": "kubernetes", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_TRAINING_CLUSTER", json.dumps(said))
    one = job("print('trained')", nodes=1, connection="training_cluster")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    one.start()
    # With the context that was current: tasks and triggerer find the job there from then on.
    context = told["current-context"]
    assert one.handle.place == f"{SPACE}@training_cluster/{context}"
    assert one.launcher.connection_of(one.handle) == "training_cluster"
    assert one.wait().state is JobState.SUCCEEDED, one.said()
    assert one.log(0) == "trained\n"
    shown = [str(one.launcher.render(one.spec)), str(one.handle), one.said()]
    shown += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    places = [*Path("/dev/shm").glob("ddl-kubeconfig-*"), *Path("/tmp").glob("ddl-kubeconfig-*")]
    assert places == []
    assert not [text for text in shown if secret in text]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", "Set AIRFLOW_CONN_TRAINING_CLUSTER"),
        ({"conn_type": "ssh"}, "is of type 'ssh', not kubernetes"),
        ({"conn_type": "kubernetes"}, "has no kubeconfig"),
        ({"conn_type": "kubernetes", "extra": {"kube_config": "c4n: [ary"}}, "has no kubeconfig"),
        ({"conn_type": "kubernetes", "extra": {"disable_verify_ssl": True}}, "is checked"),
    ],
)
def test_a_connection_that_reaches_no_cluster_says_why(monkeypatch, said, words):
    monkeypatch.setenv("AIRFLOW_CONN_TRAINING_CLUSTER", said and json.dumps(said))
    handle = JobHandle(
        *("kubernetes", "a", 0, 1, Path("/r"), Path("/l")), place="@training_cluster/"
    )
    with pytest.raises(SubmitFailed) as caught:
        KubernetesLauncher().status(handle)
    assert words in str(caught.value) and "c4n" not in str(caught.value)
    assert not caught.value.retryable
