"""Images built and run without a container engine: by buildah, and by chroot into what it built.

Bases cannot be pulled everywhere. In place of the one that the Dockerfiles name, a debootstrapped
Debian of the same release with its own Python stands; everything else is built as the files say.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Kept between runs: the base and all layers that did not change. `make clean` removes it.
FOLDER = ROOT / "build" / "images"
BASE = "localhost/stand-in-for-python-slim"
PROGRAMS = ("buildah", "debootstrap")
HOW_TO_GET = "apt-get install -y --no-install-recommends buildah debootstrap"
RELEASE = "bookworm"
_PACKAGES = "ca-certificates,python3,python3-venv"
# Of this machine, while steps of a build run: mirrors, and the certificate of a proxy.
_MOUNTED = ("/etc/apt", "/etc/ssl/certs")
_STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{folder}/run"
"""
# What a container gets beside its image: processes and devices of the host that it runs on, and
# shared memory and temporary files of its own.
_ENTER = """\
root=$1 shared=$2 keys=$3
if ! mountpoint -q "$root/proc"; then
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
    mount -t tmpfs -o mode=1777 tmp "$root/tmp"
    mount --bind /etc/hosts "$root/etc/hosts"
    mount --bind "$shared" "$root/workspace"
    [ -z "$keys" ] || mount --bind "$keys" "$root/etc/ddl/ssh"
fi
shift 3
exec chroot "$@"
"""


def missing() -> str:
    """Nothing if images can be built here, else why not."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}. Get it: {HOW_TO_GET}"
    if os.geteuid() != 0:
        return "not root, and debootstrap wants to be"
    release = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.M)
    if release is None or release[1] != RELEASE:
        return f"this is no Debian {RELEASE}, whose package sources the builds use"
    return ""


def buildah(*words: str | Path, **options: Any) -> str:
    """Standard output of a buildah command over the images of these tests."""
    configuration = FOLDER / "storage.conf"
    if not configuration.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        configuration.write_text(_STORAGE.format(folder=FOLDER))
    done = subprocess.run(
        ["buildah", *words],
        env=os.environ | {"CONTAINERS_STORAGE_CONF": str(configuration)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def make_base() -> None:
    """The stand-in, if it was not made before."""
    if BASE in buildah("images", "--format", "{{.Name}}"):
        return
    root, lists = FOLDER / "base", Path("/etc/apt/sources.list.d")
    shutil.rmtree(root, ignore_errors=True)
    # Those that apt reads: others lie beside them, whose archives are not Debian's.
    read = [path for path in lists.iterdir() if path.suffix in (".list", ".sources")]
    sources = "".join(path.read_text() for path in sorted(read))
    mirror = re.findall(r"^(?:URIs:|deb) *(\S+)", sources, re.MULTILINE)[:1]
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", RELEASE, root, *mirror],
        check=True,
        capture_output=True,
    )
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, root, "/")
    buildah("commit", "--quiet", container, BASE)
    buildah("rm", container)
    shutil.rmtree(root)


def build(source: Path, dockerfile: str, tag: str, target: str = "", **arguments: str) -> float:
    """Builds an image of a tree. Returns the seconds that it took."""
    arguments |= {"PYTHON_IMAGE": BASE}
    words = [word for item in arguments.items() for word in ("--build-arg", "=".join(item))]
    words += [word for path in _MOUNTED for word in ("--volume", f"{path}:{path}:ro")]
    words += ["--target", target] if target else []
    began = time.monotonic()
    how = ["--isolation", "chroot", "--layers", "--quiet", "--format", "docker"]
    buildah("bud", *how, *words, "--file", source / dockerfile, "--tag", tag, source)
    return time.monotonic() - began


def save(image: str, name: str, archive: Path) -> str:
    """Writes an image to a file, as ``docker save`` does, under a name. Returns its id."""
    buildah("push", "--quiet", image, f"docker-archive:{archive}:{name}")
    return buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", image).strip()


class Container:
    """A copy of an image that can be run on hosts of ``hosts.Hosts``, as the image says.

    Args:
        image: its name.
        shared: folder of this machine, which is /workspace.
        keys: folder of this machine, which is /etc/ddl/ssh.
    """

    def __init__(self, image: str, shared: Path, keys: Path | None = None) -> None:
        self._id = buildah("from", "--pull-never", image).strip()
        self.root = Path(buildah("mount", self._id).strip())
        inspected = json.loads(buildah("inspect", "--type", "image", image))
        self.size = sum(
            entry.stat().st_size
            for folder, _, names in os.walk(self.root)
            for entry in (Path(folder, name) for name in names)
            if not entry.is_symlink()
        )
        self.config: dict[str, Any] = inspected["Docker"]["config"]
        self._shared, self._keys = shared, keys

    def remove(self) -> None:
        """What runs in it must have ended."""
        buildah("umount", self._id)
        buildah("rm", self._id)

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, user: str = ""
    ) -> list[str]:
        """The command that runs ``command`` in it, by its entrypoint. For ``Hosts.on``.

        Args:
            command: none for that of the image.
            environment: beside that of the image.
            user: ``uid:gid``; by default the image's.
        """
        # In a container tini is the first process, and need not be told to reap.
        set_ = [*self.config["Env"], "TINI_SUBREAPER=1"]
        set_ += [f"{name}={value}" for name, value in (environment or {}).items()]
        argv = [*self.config["Entrypoint"], *(command or self.config["Cmd"] or [])]
        return [
            *("sh", "-euc", _ENTER, "sh", str(self.root), str(self._shared)),
            *(str(self._keys or ""), f"--userspec={user or self.config['User']}"),
            *("--groups=0", str(self.root), "env", "-i", *set_, "sh", "-c"),
            *('cd "$0"; exec "$@"', self.config["WorkingDir"] or "/", *argv),
        ]
