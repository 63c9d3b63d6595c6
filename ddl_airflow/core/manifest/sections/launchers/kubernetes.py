"""launcher: {kind: kubernetes}: ranks in pods of a Kubernetes cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ddl_airflow.core.manifest.rule import Finding, Findings
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.sections.launcher import Launcher, Preflight
from ddl_airflow.core.manifest.values import Duration, Text, truth

# As the API server takes them. Source: Kubernetes' "Object Names and IDs", "Labels and Selectors",
# and resource.Quantity.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([mkMGTPE]|[KMGTPE]i)?")
_IMAGE = re.compile(r"[a-z0-9][\w.:/-]*(@sha256:[0-9a-f]{64})?", re.ASCII)
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
# What the pods have there themselves.
_OWN_PLACES = (
    *("/etc/ddl", "/etc/passwd", "/dev/shm", "/proc", "/sys", "/run"),  # noqa: S108
    "/tmp/ddl",  # noqa: S108  # keys, which must be no other pod's
)


class Resources(Section):
    """What each worker's pod asks for, besides its GPUs."""

    cpu: Text | None = Field(
        default=None, description="Cores that are kept for each pod.", examples=["8"]
    )
    memory: Text | None = Field(
        default=None,
        description="Memory of each pod, kept for it, and more than which it cannot take.",
        examples=["64Gi"],
    )


class Volume(Section):
    """A volume in every pod: a claim, or a folder of the node."""

    mount_path: Text = Field(description="Where it is in the pods.", examples=["/workspace"])
    claim: Text | None = Field(
        default=None,
        description="Name of its PersistentVolumeClaim, which several pods may mount.",
        examples=["training"],
    )
    host_path: Text | None = Field(
        default=None, description="Folder of the node, in place of a claim.", examples=["/shared"]
    )
    sub_path: Text | None = Field(
        default=None, description="Folder within it that is mounted.", examples=["team-a"]
    )
    read_only: Annotated[bool, BeforeValidator(truth)] = Field(
        default=False, description="Whether pods only read it."
    )


class Toleration(Section):
    """A taint that the pods may run beside."""

    key: Text | None = Field(
        default=None, description="The taint's key; none: every taint.", examples=["nvidia.com/gpu"]
    )
    value: Text | None = Field(
        default=None, description="The taint's value; none: any.", examples=["present"]
    )
    effect: Text | None = Field(
        default=None, description="The taint's effect; none: any.", examples=["NoSchedule"]
    )


class Kubernetes(Launcher):
    """How the ranks start: in pods of a Kubernetes cluster."""

    kind_name = "kubernetes"
    runs_on = "pods of a Kubernetes cluster"
    implementation = "ddl_airflow.launchers.kubernetes:KubernetesLauncher"
    can_run_parameter_servers = True
    connection_types = ("kubernetes",)
    has_image = True
    not_here = {
        "min_nodes": "Delete it: a scheduler gives all nodes or none. A try that finds one not to "
        "be well ends before its ranks start, and the next one may get others."
    }

    image: Text | None = Field(
        default=None,
        description="Image of the pods: a Python with ddl-ops, Open MPI, and sshd.",
        examples=["registry.example.com/trainer:2.21"],
    )
    connection: Text | None = Field(
        default=None,
        description="Airflow connection of type kubernetes that has the kubeconfig; by default "
        "it is a file that tasks and triggerer find.",
        examples=["training_cluster"],
    )
    context: Text | None = Field(
        default=None,
        description="Context of the kubeconfig that tasks and triggerer find; by default its "
        "current one, and in a pod without kubeconfig the cluster that it runs in.",
        examples=["training"],
    )
    operator: Literal["none", "mpi", "trainer"] | None = Field(
        default=None,
        description="Who makes the pods: `mpi`, the MPI operator, of an MPIJob; `trainer`, "
        "Kubeflow Trainer, of a TrainJob; by default `none`: no operator is needed.",
        examples=["mpi"],
    )
    namespace: Text | None = Field(
        default=None,
        description="Namespace of the pods; by default the context's.",
        examples=["vision"],
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None,
        description="Whether nodes ask the registry at each start what the image's tag means; by "
        "default they do for the tag latest alone, and else take the image that they have.",
        examples=["Always"],
    )
    image_pull_secrets: tuple[Text, ...] | None = Field(
        default=None,
        description="Names of the namespace's secrets that the image is pulled with.",
        examples=[["registry"]],
    )
    service_account: Text | None = Field(
        default=None,
        description="Service account of the pods, whose token they do not get; by default the "
        "namespace's own.",
        examples=["trainer"],
    )
    node_selector: Mapping[str, Text] | None = Field(
        default=None, description="Labels that nodes must have.", examples=[{"pool": "gpu"}]
    )
    tolerations: tuple[Toleration, ...] | None = Field(
        default=None, description="Taints of nodes that the pods may run on all the same."
    )
    priority_class: Text | None = Field(
        default=None, description="Priority class of the pods.", examples=["batch"]
    )
    queue: Text | None = Field(
        default=None,
        description="Kueue's local queue; the workers are admitted together.",
        examples=["vision"],
    )
    resources: Resources | None = Field(
        default=None, description="What each worker's pod asks for, besides its GPUs."
    )
    volumes: tuple[Volume, ...] | None = Field(
        default=None,
        description="Volumes of every pod. The workspace must be among them, under the path "
        "that Airflow has it at.",
    )
    start_timeout: Duration | None = Field(
        default=None,
        description="How long the pods may take to run, the wait for room among it. By default "
        "they wait for room, and while a node pulls the image, for ever, and 10m for the rest.",
        examples=["30m"],
    )
    time_limit: Duration | None = Field(
        default=None, description="After it Kubernetes ends the job, a try.", examples=["12h"]
    )
    grace: Duration | None = Field(
        default=None,
        description="What ranks have between SIGTERM and SIGKILL, to save; by default 30s.",
        examples=["2m"],
    )
    keep_finished: Duration | None = Field(
        default=None,
        description="How long the job's objects stay after its end; by default 1h.",
        examples=["10m"],
    )

    preflight: Preflight = None

    def findings(self, at: str) -> Findings:
        """Yields what the API server would refuse, or what would run nowhere."""
        if self.image is None:
            example = "registry.example.com/trainer:2.21"
            yield Finding(f"{at}.image", "is missing", f"Add it, for example image: {example}")
        elif not _IMAGE.fullmatch(self.image):
            yield Finding(f"{at}.image", "is no name of an image", "Write registry/name:tag.")
        if self.namespace is not None and not _NAMESPACE.fullmatch(self.namespace):
            yield _no_name(f"{at}.namespace")
        if "/" in (self.connection or ""):
            fix = "Give the connection an id without one."
            yield Finding(f"{at}.connection", "has a slash in it", fix)
        for name in ("service_account", "priority_class", "queue"):
            said = getattr(self, name)
            if said is not None and not _NAME.fullmatch(said):
                yield _no_name(f"{at}.{name}")
        for i, secret in enumerate(self.image_pull_secrets or ()):
            if not _NAME.fullmatch(secret):
                yield _no_name(f"{at}.image_pull_secrets[{i}]")
        for key, value in (self.node_selector or {}).items():
            if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
                fix = "Write label: value, as `kubectl get nodes --show-labels` has them."
                yield Finding(f"{at}.node_selector", f"{key[:40]!r} can be no node's label", fix)
        for i, one in enumerate(self.tolerations or ()):
            if one.effect is not None and one.effect not in _EFFECTS:
                fix = f"Use {', '.join(_EFFECTS[:-1])} or {_EFFECTS[-1]}."
                yield Finding(f"{at}.tolerations[{i}].effect", "is no effect of a taint", fix)
            if one.key is None and one.value is not None:
                yield Finding(f"{at}.tolerations[{i}].value", "has no key", "Add the key.")
        for name, example in (("cpu", "8 or 500m"), ("memory", "64Gi")):
            said = self.resources and getattr(self.resources, name)
            if said and not _QUANTITY.fullmatch(said):
                fix = f"Write for example {example}."
                yield Finding(f"{at}.resources.{name}", f"{said[:40]!r} is no quantity", fix)
        yield from self._of_volumes(f"{at}.volumes")
        for name in ("start_timeout", "time_limit", "grace"):
            if (said := getattr(self, name)) is not None and not said:
                yield Finding(f"{at}.{name}", "is no time at all", "Write for example 30m.")

    def _of_volumes(self, at: str) -> Findings:
        places: dict[str, int] = {}
        for i, one in enumerate(self.volumes or ()):
            place = one.mount_path.rstrip("/")
            if (one.claim is None) == (one.host_path is None):
                yield Finding(f"{at}[{i}]", "is no volume", "Give it either a claim or host_path.")
            if one.claim is not None and not _NAME.fullmatch(one.claim):
                yield _no_name(f"{at}[{i}].claim")
            for name in ("mount_path", "host_path"):
                path = getattr(one, name)
                if path is not None and (
                    not path.startswith("/") or ".." in path.split("/") or ":" in path
                ):
                    fix = "Write it from / on, without .. and colon."
                    yield Finding(f"{at}[{i}].{name}", "is no whole path", fix)
            if not place or any(_overlap(place, own) for own in _OWN_PLACES):
                fix = "Choose another mount_path."
                yield Finding(f"{at}[{i}].mount_path", "is where pods have their own", fix)
            if one.sub_path is not None and (
                one.sub_path.startswith("/") or ".." in one.sub_path.split("/")
            ):
                fix = "Write a path within the volume."
                yield Finding(f"{at}[{i}].sub_path", "leads out of the volume", fix)
            if places.setdefault(place, i) != i:
                fix = "Choose another mount_path."
                yield Finding(f"{at}[{i}].mount_path", f"is that of volumes[{places[place]}]", fix)

    def settings(self) -> dict[str, Any]:
        """The arguments of ``KubernetesLauncher``."""
        said = self.model_dump(mode="json", exclude_none=True, include=self.own_fields())
        for name in ("start_timeout", "time_limit", "grace", "keep_finished"):
            said.pop(name, None)
            if (time := getattr(self, name)) is not None:
                said[f"{name}_s"] = time.total_seconds()
        return said | ({"python": self.python} if self.python else {})


def _overlap(one: str, other: str) -> bool:
    """Whether a folder is the other, in it, or above it."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _no_name(at: str) -> Finding:
    return Finding(at, "is no name that Kubernetes could have", "Correct it.")


KIND = Kubernetes
