"""What a manifest of Fabric for Deep Learning may say.

Source: github.com/IBM/FfDL, the user guide and the fields that its REST API reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ddl_airflow.core.manifest.document import Plain
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.values import AnySecret, AnyText, Secret, Text, Whole

OBJECT_STORES = ("mount_cos", "s3_datastore")
# What an object store's connection is called: ours, FfDL's.
CONNECTION = {
    "conn_id": "conn_id",
    "endpoint_url": "auth_url",
    "access_key_id": "user_name",
    "secret_access_key": "password",
    "region_name": "region",
}
SWIFT = ("domain_name", "project_id")
HOST_MOUNT = ("name", "path")
# A tag of TensorFlow's images that is no version.
IMAGE = r"(latest|nightly|devel)(-[a-z0-9]+)*"
# Where FfDL kept the results if nobody said where.
DEFAULT_RESULTS = "dlaas-trained-models"
# A point on FfDL's time axes -> the metric that sets our progress.
PROGRESS = {"iteration": "step", "step": "step", "epoch": "epoch"}


def _number(value: Any) -> Any:
    if isinstance(value, Plain) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return float(value)
    raise ValueError("is not a number")


def _size(text: str) -> str:
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?\s*([kmgt](i?b?)?)?", text, re.IGNORECASE):
        return text
    raise ValueError("is not an amount of memory")


Number = Annotated[float, BeforeValidator(_number)]
Size = Annotated[Text, AfterValidator(_size)]


class Container(Section):
    """A bucket, or a folder of the mounted volume."""

    container: Text = Field(description="Bucket, or folder.", examples=["mnist-training-data"])


class StoreConnection(Section):
    """Access to a data store; which fields, its type decides."""

    type: Literal["mount_cos", "s3_datastore", "host_mount"] | None = Field(
        default=None, description="The store's type again.", examples=["mount_cos"]
    )
    conn_id: Text | None = Field(
        default=None,
        description="Our addition: an Airflow connection; nothing else then.",
        examples=["my_s3"],
    )
    auth_url: Text | None = Field(
        default=None, description="Address of the store.", examples=["https://s3.example.com"]
    )
    user_name: Secret | None = Field(
        default=None, description="Access key.", examples=["${S3_ACCESS_KEY_ID}"]
    )
    password: Secret | None = Field(
        default=None, description="Secret key.", examples=["${S3_SECRET_ACCESS_KEY}"]
    )
    region: Text | None = Field(default=None, description="Region.", examples=["eu-de"])
    domain_name: Text | None = Field(default=None, description="Swift's.", examples=["1234"])
    project_id: Text | None = Field(default=None, description="Swift's.", examples=["1234"])
    name: Text | None = Field(default=None, description="The volume's.", examples=["host-mount"])
    path: Text | None = Field(
        default=None, description="Folder of the host, for mount_volume.", examples=["/srv/data"]
    )


class DataStore(Section):
    """Where data comes from and results go."""

    id: AnyText = Field(default="", description="A name for it.", examples=["my-store"])
    type: Literal["mount_cos", "s3_datastore", "mount_volume", "swift_datastore"] = Field(
        description="Kind of store.", examples=["mount_cos"]
    )
    training_data: Container = Field(
        description="Where the data is.", examples=[{"container": "mnist-training-data"}]
    )
    training_results: Container | None = Field(
        default=None,
        description="Where the results go.",
        examples=[{"container": "mnist-training-models"}],
    )
    connection: StoreConnection = Field(
        description="Access to it.",
        examples=[
            {
                "auth_url": "https://s3.example.com",
                "user_name": "${S3_ACCESS_KEY_ID}",
                "password": "${S3_SECRET_ACCESS_KEY}",
            }
        ],
    )


class ImageLocation(Section):
    """Where a custom image is."""

    registry: Text | None = Field(
        default=None, description="Its registry.", examples=["registry.example.com"]
    )
    namespace: Text | None = Field(default=None, description="Namespace in it.", examples=["mine"])
    # Empty where anyone may: FfDL's examples leave them so.
    access_token: AnySecret | None = Field(
        default=None, description="Opens the registry.", examples=["${REGISTRY_TOKEN}"]
    )
    email: AnyText | None = Field(
        default=None, description="Of who may.", examples=["a@example.com"]
    )


class FfdlFramework(Section):
    """What runs."""

    name: Text = Field(description="Framework.", examples=["tensorflow"])
    version: Text = Field(description="Its version.", examples=["2.21"])
    image_tag: Text | None = Field(default=None, description="Image.", examples=["latest"])
    image_location: ImageLocation | None = Field(
        default=None, description="Of a custom image.", examples=[{"namespace": "mine"}]
    )
    command: Text = Field(
        description="Runs on every learner.", examples=["python train.py --data ${DATA_DIR}"]
    )


class Value(Section):
    """A typed value: a constant, or ``$name`` of a group of the regex."""

    type: Literal["INT", "FLOAT", "STRING", "JSONSTRING"] | None = Field(
        default=None, description="Type.", examples=["FLOAT"]
    )
    value: Text = Field(description="Named group of the regex.", examples=["$loss"])


class Meta(Section):
    """Time and sub-series of a value."""

    time: Text | None = Field(default=None, description="Time.", examples=["$timestamp"])
    subid: Text | None = Field(default=None, description="Sub-series.", examples=["train"])


class Group(Section):
    """A regex and the values in its match."""

    regex: Text = Field(
        description="Matched from the start of a line.", examples=["loss=(?P<loss>[0-9.]+)"]
    )
    meta: Meta | None = Field(default=None, description="Time.", examples=[{"time": "$time"}])
    scalars: Mapping[str, Value] = Field(
        default={}, description="Metrics.", examples=[{"loss": {"type": "FLOAT", "value": "$l"}}]
    )
    etimes: Mapping[str, Value] = Field(
        default={}, description="Time axes.", examples=[{"iteration": {"value": "$step"}}]
    )


class EvaluationMetrics(Section):
    """Where numbers about the training come from."""

    type: Literal["regex_extractor", "regex", "tensorboard", "emetrics_file"] = Field(
        description="Kind of extractor.", examples=["regex_extractor"]
    )
    image_tag: Text | None = Field(default=None, description="Its image.", examples=["latest"])
    in_: Text | None = Field(
        default=None, alias="in", description="File or folder read.", examples=["$LOG_DIR"]
    )
    line_lookahead: Whole | None = Field(
        default=None, ge=1, description="Lines matched at once.", examples=[1]
    )
    eventTypes: tuple[Text, ...] = Field(
        default=(), description="TensorBoard events.", examples=[["scalars"]]
    )
    groups: Mapping[str, Group] = Field(
        default={}, description="By name.", examples=[{"train": {"regex": "(?P<loss>[0-9.]+)"}}]
    )


class FfdlManifest(Section):
    """One training, as FfDL takes it."""

    name: Text = Field(description="Name of the model.", examples=["tf-mnist"])
    description: AnyText = Field(default="", description="For people.", examples=["Digits"])
    version: Text | None = Field(default=None, description="Not used.", examples=["1.0"])
    learners: Whole = Field(default=1, ge=1, le=4096, description="Nodes.", examples=[2])
    gpus: Whole = Field(default=0, ge=0, le=4096, description="GPUs per learner.", examples=[1])
    gpu_type: Text | None = Field(default=None, description="Not used.", examples=["nvidia-V100"])
    cpus: Number | None = Field(default=None, description="CPUs per learner.", examples=[4])
    memory: Size | None = Field(default=None, description="Per learner.", examples=["8Gb"])
    storage: Size | None = Field(default=None, description="Per learner.", examples=["20Gb"])
    data_stores: tuple[DataStore, ...] = Field(
        min_length=1,
        description="Where data comes from and results go; one.",
        examples=[
            [
                {
                    "id": "my-store",
                    "type": "mount_cos",
                    "training_data": {"container": "mnist-training-data"},
                    "connection": {"conn_id": "my_s3"},
                }
            ]
        ],
    )
    framework: FfdlFramework = Field(
        description="What runs.",
        examples=[{"name": "tensorflow", "version": "2.21", "command": "python train.py"}],
    )
    evaluation_metrics: EvaluationMetrics | None = Field(
        default=None, description="Metrics.", examples=[{"type": "tensorboard"}]
    )
    distribution: Literal["mpi", "independent"] | None = Field(
        default=None,
        description="Our addition: independent, where the learners need not average gradients.",
        examples=["independent"],
    )
