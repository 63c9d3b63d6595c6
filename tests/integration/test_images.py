"""The images of docker/, built by buildah on a stand-in for their base, and run without an engine.

Building takes minutes, so it is ``make test-images`` that does; see docs/docker.md for what neither
shows. Containers are chroots in hosts of ``hosts``: with network, processes, shared memory and
temporary files of their own, as the images' user.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from ddl_airflow import __version__
from ddl_airflow.demo.digits import write_digits
from tests.integration import images
from tests.integration.hosts import NETWORK, Hosts, available
from tests.integration.images import ROOT, Container
from tests.limits import within

SWITCH = "DDL_TEST_IMAGES"
if not os.environ.get(SWITCH):
    SKIP = "builds images for minutes: make test-images"
else:
    SKIP = images.missing() or available()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(SKIP), reason=SKIP)]

# Trainers are on the first two hosts, Airflow is on this one.
AIRFLOW = 2
UID = 50000
OTHER_UID = 61234
AVERAGE = """\
import ddl, tensorflow as tf
total = ddl.allreduce_n([tf.constant([1.0 + ddl.rank(), 10.0])], average=False)
print("rank", ddl.rank(), "of", ddl.size(), total[0].numpy().tolist())
"""
# Compilers and what makes programs of what they leave; and what may change its user.
COMPILERS = r"(g?cc|[cg]\+\+|cpp|clang|ld|as|make)(-\d+)?"
KEYS = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """What git knows, and a .env as somebody has who builds: neither it nor keys may go in."""
    tree = tmp_path_factory.mktemp("images") / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    subprocess.run([tree / "docker" / "prepare"], check=True, capture_output=True)
    (tree / "docker" / "trainer" / "id_ed25519").write_text("-----BEGIN OPENSSH PRIVATE KEY-----")
    images.make_base()
    return tree


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """What all containers see as /workspace."""
    folder = tmp_path_factory.mktemp("workspace")
    os.chown(folder, UID, 0)
    folder.chmod(0o755)
    for above in folder.parents:  # of pytest: for its user alone
        if str(above).startswith(str(tmp_path_factory.getbasetemp().parent)):
            above.chmod(0o711)
    return folder


@pytest.fixture(scope="module")
def secrets(source) -> list[bytes]:
    lines = (source / "docker" / ".env").read_text().splitlines()
    return [line.partition("=")[2].encode() for line in lines]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    """As docker/compose.yaml has them made; of both hosts the same, and the client's beside."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("host_key", "id_ed25519"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    shutil.copy(folder / "id_ed25519.pub", folder / "authorized_keys")
    host_key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[{NETWORK}.*]:2222 {host_key}")
    for path in (folder, *folder.iterdir()):
        os.chown(path, UID, 0)
    return folder


@pytest.fixture(scope="module")
def containers(source, shared, keys) -> Iterator[dict[str, Container]]:
    """All images are built; of the trainer's there are two."""
    labels = {"VERSION": __version__, "REVISION": "abc"}
    airflow = "docker/airflow/Dockerfile"
    trainer = {"TRAINER_IMAGE": "localhost/ddl-trainer"}
    made = {}
    for name, dockerfile, target, more in (
        ("ddl-trainer", "docker/trainer/Dockerfile", "", {}),
        ("ddl-airflow", airflow, "airflow", {}),
        ("ddl-worker", airflow, "worker", trainer),
    ):
        took = images.build(source, dockerfile, name, target, **labels, **more)
        made[name] = Container(name, shared, None if name == "ddl-airflow" else keys)
        print(f"\n{name}: built in {took:.0f} s, {made[name].size / 1e6:.0f} MB")
    made["second"] = Container("ddl-trainer", shared, keys)
    yield made
    for one in made.values():
        one.remove()


@pytest.fixture(scope="module")
def hosts(containers, tmp_path_factory) -> Iterator[Hosts]:
    """Made after the containers: what is mounted later is not seen there."""
    with Hosts(tmp_path_factory.mktemp("hosts"), 3) as three:
        yield three


@pytest.fixture(scope="module")
def trainers(containers) -> list[Container]:
    return [containers["ddl-trainer"], containers["second"]]


@pytest.fixture(scope="module")
def sshds(trainers, hosts) -> Iterator[None]:
    """Both containers as they start without a command."""
    logs = [hosts.folder / f"sshd-{i}" for i in range(2)]
    started = []
    for i, log in enumerate(logs):
        with log.open("wb") as output:
            command = hosts.on(i, trainers[i].run([]))
            started.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
    try:
        for i in range(2):
            until_well(hosts, i, trainers[i], ["healthcheck"], logs[i])
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def until_well(
    hosts: Hosts, host: int, container: Container, check: Sequence[str], log: Path, **env: str
) -> None:
    deadline = time.monotonic() + within(120)
    while subprocess.run(hosts.on(host, container.run(check, env)), capture_output=True).returncode:
        assert time.monotonic() < deadline, f"{check}: {log.read_text(errors='replace')[-3000:]}"
        time.sleep(0.5)


def said(
    hosts: Hosts, host: int, container: Container, *command: str, user: str = "", **env: str
) -> str:
    """What a command in a container prints, which must end well."""
    done = subprocess.run(
        hosts.on(host, container.run(command, env, user)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within(300),
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def programs(root: Path) -> set[str]:
    folders = [root / name for name in ("usr/bin", "usr/sbin", "usr/local/bin", "bin", "sbin")]
    folders += root.glob("opt/*/bin")
    return {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}


def check_contents(container: Container, secrets: list[bytes]) -> None:
    """No compiler, no secret, no key, nothing of the build, and no program that changes users."""
    found = programs(container.root)
    assert not [name for name in found if re.fullmatch(COMPILERS, name)]
    assert not (container.root / "build").exists()
    for folder, _, names in os.walk(container.root):
        for path in (Path(folder, name) for name in names):
            if path.is_symlink() or not path.is_file():
                continue
            status = path.stat()
            assert not status.st_mode & 0o6000, path
            assert not re.match(r"\.env|ssh_host_|id_(rsa|ecdsa|ed25519)", path.name), path
            if status.st_size < 100_000:
                content = path.read_bytes()
                # Libraries have examples of keys, and the words.
                assert "site-packages" in path.parts or not KEYS.search(content), path
                assert not [one for one in secrets if one in content], path
    for name in ("Env", "Cmd", "Entrypoint", "Labels"):
        text = json.dumps(container.config[name])
        assert not [one for one in secrets if one.decode() in text]


def check_labels(container: Container, title: str) -> None:
    labels = {
        name.removeprefix("org.opencontainers.image."): value
        for name, value in container.config["Labels"].items()
    }
    assert labels["title"] == title
    assert labels["licenses"] == "Apache-2.0"
    assert (labels["version"], labels["revision"]) == (__version__, "abc")
    assert container.config["User"] == f"{UID}:0"


def importable(hosts: Hosts, container: Container, python: str, names: str) -> set[str]:
    code = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"
    return set(said(hosts, AIRFLOW, container, python, "-c", code, *names.split()).split())


def test_trainer_image_has_what_ranks_need_and_nothing_else(trainers, hosts, secrets):
    one = trainers[0]
    check_contents(one, secrets)
    check_labels(one, "ddl-trainer")
    assert {"sshd", "ssh", "mpirun", "ddl-run", "python"} <= programs(one.root)
    lacking = "airflow ddl_airflow boto3"
    names = f"{lacking} ddl mpi4py tensorflow tf_keras tf_slim tensorflow_estimator"
    assert importable(hosts, one, "python", names) == {*names.split()} - {*lacking.split()}
    assert said(hosts, 0, one, "id", "-u", "-n") == "trainer\n"


@pytest.mark.parametrize("user", [f"{UID}:0", f"{OTHER_UID}:{OTHER_UID}"])
def test_ddl_run_averages_in_the_trainer_image_as_whichever_user(trainers, hosts, shared, user):
    (shared / "average.py").write_text(AVERAGE)
    words = ("ddl-run", "--np", "2", "python", "/workspace/average.py")
    printed = said(hosts, 0, trainers[0], *words, user=user, TMPDIR="/tmp")
    assert sorted(printed.splitlines()) == [
        "[rank 0] rank 0 of 2 [3.0, 20.0]",
        "[rank 1] rank 1 of 2 [3.0, 20.0]",
    ]


def test_sshd_takes_another_user_and_says_which_key_is_not_there(trainers, hosts, keys):
    words = trainers[0].run([], user=f"{OTHER_UID}:{OTHER_UID}")
    done = subprocess.run(hosts.on(0, words), capture_output=True, text=True, timeout=within(30))
    assert done.returncode == 1
    assert f"user {OTHER_UID} cannot read /etc/ddl/ssh/host_key: mount it" in done.stderr
    named = said(hosts, 0, trainers[0], "id", "-u", "-n", user=f"{OTHER_UID}:{OTHER_UID}")
    assert named == "trainer\n"
    said(hosts, 0, trainers[0], "id")  # the image's user has its name again
    assert said(hosts, 0, trainers[0], "id", "-u", "-n") == "trainer\n"


@pytest.mark.usefixtures("sshds")
def test_the_example_trains_on_two_hosts_in_the_trainer_image(trainers, hosts, shared):
    data, result = shared / "data", shared / "result"
    write_digits(data)
    shutil.copy(ROOT / "dags" / "mnist-keras" / "train.py", shared)
    result.mkdir()
    os.chown(result, UID, 0)
    environment = {
        "DATA_DIR": "/workspace/data",
        "RESULT_DIR": "/workspace/result",
        "CHECKPOINT_DIR": "/workspace/result/checkpoints",
        "PARAM_EPOCHS": "2",
        "DDL_OPTIONS": "",
        "OMP_NUM_THREADS": "1",
    }
    (shared / "hostfile").write_text("".join(f"{at} slots=1\n" for at in hosts.addresses[:2]))
    words = ["mpirun", "--hostfile", "/workspace/hostfile", "-np", "2", "--bind-to", "none"]
    words += ["--mca", "btl_tcp_if_include", f"{NETWORK}.0/24"]
    words += [word for name in environment for word in ("-x", name)]
    words += ["sh", "-c", 'echo "on $(hostname)"; exec python /workspace/train.py']
    before = hosts.sent_bytes()
    printed = said(hosts, 0, trainers[0], *words, **environment)
    assert sorted(re.findall(r"^on (\w+)", printed, re.MULTILINE)) == ["host1", "host2"]
    accuracy = float(re.search(r"test accuracy= ([\d.]+)", printed)[1])
    sent = [b - a for a, b in zip(before, hosts.sent_bytes(), strict=True)][:2]
    print(f"\ntest accuracy {accuracy}; hosts sent {[round(one / 1e6, 1) for one in sent]} MB")
    assert accuracy > 0.8
    assert min(sent) > 5e6  # gradients, not only greetings
    assert (result / "model.keras").stat().st_uid == UID


@pytest.mark.usefixtures("sshds")
def test_a_host_of_another_key_and_a_key_that_is_not_known_are_refused(trainers, hosts, keys):
    def ssh(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["ssh", *options, hosts.addresses[1], "ddl-run --help"]
        on_first = hosts.on(0, trainers[0].run(command))
        return subprocess.run(on_first, capture_output=True, text=True, timeout=within(60))

    # The session has the image's programs, though it has none of its variables.
    assert "usage: ddl-run" in ssh().stdout
    unknown = ssh("-o", "UserKnownHostsFile=/dev/null")
    assert unknown.returncode == 255 and "Host key verification failed" in unknown.stderr
    # Without the image's configuration, whose key would be tried as well.
    known = ("-o", "UserKnownHostsFile=/etc/ddl/ssh/known_hosts", "-p", "2222", "-l", "trainer")
    other = ssh("-F", "none", *known, "-o", "BatchMode=yes", "-i", "/etc/ddl/ssh/host_key")
    assert other.returncode == 255 and "Permission denied" in other.stderr


@pytest.fixture(scope="module")
def airflow(containers) -> Container:
    one = containers["ddl-airflow"]
    for manifest in (ROOT / "dags").glob("*/manifest.yml"):
        name = manifest.parent.name
        shutil.copytree(manifest.parent, one.root / "opt/airflow/trainings" / name)
    return one


@pytest.fixture(scope="module")
def settings(source) -> dict[str, str]:
    """Airflow's environment of docker/compose.yaml, but for its database and broker."""
    lines = (source / "docker" / ".env").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines)
    compose = yaml.safe_load((source / "docker" / "compose.yaml").read_text())
    text = compose["services"]["init"]["environment"]

    def filled(value: str) -> str:
        return re.sub(r"\$\{(\w+)(?::([-?])([^}]*))?\}", lambda m: values.get(m[1]) or m[3], value)

    return {name: filled(value) for name, value in text.items()} | {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "sqlite:////workspace/airflow.db?timeout=60",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": "http://127.0.0.1:8080/execution/",
    }


def test_airflow_image_makes_dags_and_has_no_tensorflow(airflow, hosts, secrets):
    check_contents(airflow, secrets)
    check_labels(airflow, "ddl-airflow")
    lacking = "tensorflow keras mpi4py numpy ddl ddl_ops"
    names = f"{lacking} airflow ddl_airflow boto3 celery kubernetes psycopg2 asyncpg"
    assert importable(hosts, airflow, "python", names) == {*names.split()} - {*lacking.split()}
    assert {"mpirun", "ssh", "rsync", "airflow", "ddl-airflow"} <= programs(airflow.root)
    validated = said(hosts, AIRFLOW, airflow, "ddl-airflow", "validate", "/opt/airflow/trainings")
    assert "DAG mnist-keras, 2 ranks" in validated
    provided = said(hosts, AIRFLOW, airflow, "airflow", "providers", "list", "--output", "json")
    assert "ddl-airflow" in {
        row["package_name"] for row in json.loads(provided[provided.index("[{") :])
    }


def test_airflow_image_runs_and_its_healthchecks_say_so(airflow, hosts, settings):
    """What compose's services start, over SQLite: there is nothing of Docker, Celery or Redis."""
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    init = compose["init"]["command"]
    said(hosts, AIRFLOW, airflow, *init[:-1], init[-1].replace("$$", "$"), **settings)
    started = {}
    try:
        for name in ("api-server", "scheduler", "dag-processor", "triggerer"):
            # Nothing runs yet: this is what the check is for.
            check = airflow.run(["healthcheck", name], settings)
            assert subprocess.run(hosts.on(AIRFLOW, check), capture_output=True).returncode != 0
            log = hosts.folder / f"airflow-{name}"
            with log.open("wb") as output:
                command = hosts.on(AIRFLOW, airflow.run(compose[name]["command"], settings))
                started[name] = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
                )
            until_well(hosts, AIRFLOW, airflow, ["healthcheck", name], log, **settings)
        # From the manifests, by the dag-processor and the bundle that compose names.
        deadline = time.monotonic() + within(120)
        while True:
            listed = said(
                hosts, AIRFLOW, airflow, "airflow", "dags", "list", "-o", "json", **settings
            )
            if re.search(r'"dag_id": *"mnist-keras"', listed):
                break
            assert time.monotonic() < deadline, listed
    finally:
        for one in started.values():
            one.terminate()
        for one in started.values():
            one.wait(within(60))


@pytest.fixture(scope="module")
def worker(containers, source) -> Container:
    """With ssh's configuration where docker/compose.yaml mounts it."""
    services = yaml.safe_load((source / "docker" / "compose.yaml").read_text())["services"]
    mounted = [one for one in services["worker"]["volumes"] if "ssh_config" in one]
    place = mounted[0].split(":")[1].lstrip("/")
    shutil.copy(source / "docker" / "trainer" / "ssh_config", containers["ddl-worker"].root / place)
    return containers["ddl-worker"]


@pytest.mark.usefixtures("sshds")
def test_a_worker_takes_the_whole_road_with_ranks_on_two_trainers(worker, hosts, source, shared):
    check_labels(worker, "ddl-worker")
    folder = shared / "mnist-two-hosts"
    shutil.copytree(source / "docker" / "trainings" / folder.name, folder)
    manifest = folder / "manifest.yml"
    text = manifest.read_text()
    for name, address in zip(("trainer-1", "trainer-2"), hosts.addresses, strict=False):
        assert name in text
        text = text.replace(name, address)
    manifest.write_text(text)
    write_digits(shared / "digits")
    os.chown(folder, UID, 0)
    road = ["ddl-airflow", "run", f"/workspace/{folder.name}/manifest.yml"]
    run = worker.run([*road, "--data", "/workspace/digits"])
    run[run.index("/opt/airflow")] = f"/workspace/{folder.name}"  # where it works
    done = subprocess.run(
        hosts.on(AIRFLOW, run), capture_output=True, text=True, timeout=within(600)
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    print(printed)
    assert f"ranks go to 2 host(s): {', '.join(hosts.addresses[:2])}" in printed
    published = folder / ".ddl-run" / "results"
    assert list(published.rglob("saved_model.pb")), printed
