"""A real Kubernetes cluster of two nodes, with real kubelets, all on this host.

It is started by the scripts of ``../shared/kubernetes/cluster``. Where those are not, tests skip.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddl_airflow.demo.site import free_port
from tests.limits import within

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/ddl-test:1"
NODES = ("node-1", "node-2")
SPACE = "vision"
# Of the control plane, as the nodes and their pods reach it.
CONTROL = "10.98.0.1"
# Beside what is asked for, what Python and Open MPI of this machine are linked with.
PROGRAMS = ("sh", "env", "sleep", "ssh", "sshd")


def _shared() -> Path:
    main = subprocess.run(
        ["git", "rev-parse", "--path-format=absolute", "--git-common-dir"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return Path(main or ROOT / ".git").parents[1] / "shared" / "kubernetes"


class KubernetesCluster:
    """Started by ``with``. ``kubeconfig`` is its administrator's.

    It has a namespace ``SPACE``, and a class of priority ``urgent``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "run" / "admin.conf"
        self._scripts = _shared() / "cluster"

    @staticmethod
    def missing() -> str:
        """Nothing if a cluster can run here, else why not."""
        if os.geteuid() != 0:
            return "No Kubernetes cluster: its nodes need root."
        if not (_shared() / "cluster" / "cluster_up.sh").exists():
            return "No Kubernetes cluster: no ../shared/kubernetes/cluster beside the repository."
        absent = [one for one in PROGRAMS if shutil.which(one, path=_path()) is None]
        return f"No Kubernetes cluster: no {', '.join(absent)}." if absent else ""

    def __enter__(self) -> KubernetesCluster:
        server = next(_shared().glob("kube-apiserver-*.xz"))
        try:
            self._run("cluster_up.sh", "2", str(free_port()), KUBE_APISERVER_XZ=str(server))
            archive = self.folder / "image.tar"
            write_image(archive)
            self.load(archive)
            self.kubectl("create", "namespace", SPACE)
            priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
            self.apply(priority | {"metadata": {"name": "urgent"}, "value": 1000})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._run("cluster_down.sh", check=False)

    def kubectl(self, *words: str, given: str = "", check: bool = True) -> str:
        """What kubectl says, as the administrator."""
        done = subprocess.run(
            [str(self.folder / "bin" / "kubectl"), "--kubeconfig", str(self.kubeconfig), *words],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=within(60),
        )
        if check and done.returncode:
            raise RuntimeError(f"kubectl {words}: {done.stderr}")
        return done.stdout

    def apply(self, *objects: dict[str, Any]) -> None:
        """Makes these objects."""
        every = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "-f", "-", given=json.dumps(every))

    def of_job(self, name: str, namespace: str, more: Sequence[str] = ()) -> list[str]:
        """All objects of a job that are there, as ``kind/name``; ``more``: other kinds, too."""
        kinds = ",".join(("jobs", "pods", "services", "configmaps", "secrets", *more))
        words = ("-n", namespace, "get", kinds, "-l", f"ddl-airflow/job={name}", "-o", "name")
        return self.kubectl(*words).split()

    def load(self, archive: Path, limit_s: float = 180) -> None:
        """Gives an image to every node, from a file as ``docker save`` writes it."""
        self._run("load_image.sh", str(archive), limit_s=limit_s)

    def on(self, place: str, *words: str) -> None:
        """Runs a command on a node, or where the control plane is."""
        self._run("on.sh", place, *words)

    def there(self, place: str) -> list[str]:
        """Words before a command that is to run there."""
        return [str(self._scripts / "on.sh"), str(self.folder), place]

    def cut_power(self, node: str) -> None:
        """Ends a node at once with all that runs there."""
        self._run("cluster_down.sh", node)

    def start(self, node: str) -> None:
        """Starts a node again whose power was cut."""
        self._run("cluster_up.sh", node)

    def cut(self, node: str) -> None:
        """Takes a node's cable out."""
        self.on("control", "ip", "link", "set", f"v{node.partition('-')[2]}", "down")

    def connect(self, node: str) -> None:
        """Puts it back, and waits until the cluster counts on the node again."""
        self.on("control", "ip", "link", "set", f"v{node.partition('-')[2]}", "up")
        self.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=50s")

    @contextmanager
    def without_names(self) -> Iterator[None]:
        """Meanwhile nobody answers what a name means."""
        signal = 'kill -"$1" "$(cat "$2/run/control/names.inner")"'
        words = ("sh", "-c", signal, "sh")
        self.on("control", *words, "STOP", str(self.folder))
        try:
            yield
        finally:
            self.on("control", *words, "CONT", str(self.folder))

    def as_account(self, namespace: str, account: str) -> Path:
        """A kubeconfig for a service account."""
        said = json.loads(self.kubectl("-n", namespace, "get", "secrets", "-o", "json"))
        of = "kubernetes.io/service-account.name"
        (token,) = (
            one["data"]["token"]
            for one in said["items"]
            if one["metadata"].get("annotations", {}).get(of) == account
        )
        config = json.loads(self.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": base64.b64decode(token).decode()}
        config["contexts"][0]["context"]["namespace"] = namespace
        path = self.folder / f"{account}.conf"
        path.write_text(json.dumps(config))
        return path

    def _run(
        self, script: str, *words: str, check: bool = True, limit_s: float = 180, **env: str
    ) -> None:
        done = subprocess.run(
            [str(self._scripts / script), str(self.folder), *words],
            env=os.environ | {"PATH": _path()} | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=within(limit_s),
        )
        if check and done.returncode:
            raise RuntimeError(f"{script} {words}: {done.stdout}{done.stderr}")


def ours() -> list[dict[str, Any]]:
    """Volumes with the Python of this environment and these sources, under their own paths."""
    prefix, base = Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()
    places = [*dict.fromkeys((prefix, base)), ROOT / "ops_lib", ROOT / "ddl_airflow"]
    return [{"host_path": str(one), "mount_path": str(one), "read_only": True} for one in places]


def sources() -> str:
    """PYTHONPATH for them: a wheel of ddl-ops has what it needs of ddl_airflow in itself."""
    return os.pathsep.join([str(ROOT / "ops_lib" / "python"), str(ROOT)])


def python() -> str:
    """The Python of this environment, by the path that ``ours`` brings."""
    return str(Path(sys.prefix).resolve() / "bin" / "python")


def write_image(archive: Path) -> None:
    """An image of this machine's shell, sshd and libraries, as ``docker save`` writes one."""
    files = {str(shutil.which(one, path=_path())) for one in PROGRAMS}
    libraries = [*Path(sys.base_prefix).glob("lib/python3.*/lib-dynload/*.so")]
    packages = Path(sys.prefix).resolve()
    libraries += packages.glob("bin/*prte*")
    libraries += packages.rglob("libmpi.so*")
    libraries += packages.rglob("_multiarray_umath*.so")
    libraries += packages.rglob("libtensorflow_framework.so.2")
    libraries += (ROOT / "ops_lib" / "python" / "ddl_ops").glob("*.so")
    needed: set[str] = set()
    for one in (*files, *map(str, libraries), os.path.realpath(sys.executable)):
        said = subprocess.run(["ldd", one], capture_output=True, text=True, check=False).stdout
        needed |= set(re.findall(r"(?:=> |^\s*)(/(?:usr/)?lib\S*) \(0x", said, re.MULTILINE))
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name in ("bin", "sbin", "lib", "lib64"):
            _add_link(tar, name, f"usr/{name}")
        for name, mode in (("tmp", 0o1777), ("run", 0o755), ("root", 0o755), ("var/run", 0o755)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            tar.addfile(folder)
        for one in sorted(files | needed):
            inside = re.sub(r"^/(bin|sbin|lib|lib64)/", r"/usr/\1/", one).lstrip("/")
            tar.add(os.path.realpath(one), inside)
        for name, text in (
            ("etc/passwd", "root:x:0:0::/root:/bin/sh\n"),
            ("etc/group", "root:x:0:\n"),
        ):
            _add_text(tar, name, text)
    data = layer.getvalue()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    config = {
        **{"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/sbin:/usr/bin"]}},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        _add_text(tar, "manifest.json", json.dumps(manifest))
        _add_text(tar, "config.json", json.dumps(config))
        info = tarfile.TarInfo("layer.tar")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(text.encode()), 0o644
    tar.addfile(info, io.BytesIO(text.encode()))


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
