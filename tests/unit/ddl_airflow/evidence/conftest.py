"""Publications as upload-results makes them, without Airflow and without TensorFlow."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import StoreReference, UploadResultsStep
from ddl_airflow.lineage.record import Run, write_part
from ddl_airflow.steps.base import Site, StepContext
from ddl_airflow.steps.upload import UploadResults
from ddl_airflow.storage.code import digest_of
from ddl_airflow.storage.filesystem import FolderStore

# What a script may call a metric, and whoever triggers a run a parameter.
HOSTILE = (
    "<script>alert(1)</script> | [x](javascript:a) ![i](http://e.vil/p.png) `\"'&\n# T\u202e\x1b"
)


def no_secret(conn_id):
    raise AssertionError(conn_id)


class Training:
    """One whose steps but the last are done.

    Attributes:
        results: where it publishes.
        log: what the upload said.
    """

    def __init__(self, folder, *, metric="loss", key="train.csv"):
        self.folder = folder
        self.layout = layout = RunLayout(folder / "workspace", "digits", "digits-1")
        layout.create()
        self.results = folder / "results"
        data = {key: b"1,2\n", "more/test.csv": b"3\n"}
        for name, body in data.items():
            path = layout.staged / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        (layout.code / "train.py").write_text("import ddl\n")
        for name, text in {"saved_model.pb": "graph", "variables/v": "weights"}.items():
            path = layout.model / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (layout.logs / "rank-0.log").write_text("said\n")
        with layout.progress.open("w") as file:
            for step in range(1, 41):
                told = {"step": step, "steps": 40, "source": "keras", metric: 1 / step}
                file.write(json.dumps(told) + "\n")
        files = {"train.py": layout.code / "train.py"}
        dataset = {
            "uri": "s3://bucket/digits",
            "fingerprint": "sha256:" + "ab" * 32,
            "files": len(data),
            "bytes": sum(map(len, data.values())),
            "listing": [{"key": k, "size": len(b), "etag": "e"} for k, b in sorted(data.items())],
        }
        code = {"digest": digest_of(files), "files": ["train.py"], "git_commit": "c" * 40}
        parts = {
            "stage_data": {"dataset": dataset, "code": code, "tries": {"stage_data": 1}},
            "train": {
                "environment": {
                    **{"launcher": "local", "world_size": 2, "hosts": ["a"], "devices": ["CPU"]},
                    "images": ["docker.io/trainer@sha256:" + "e" * 64],
                    "versions": {"tensorflow": "2.21.0", "keras": "3.15.1", "python": "3.11.7"},
                },
                "result": {
                    "metrics": {metric: 0.025},
                    "measurements": [{"metric": metric, "value": 0.025, "source": "training"}],
                    "steps": 40,
                },
                "tries": {"train": 1},
            },
            "transform": {
                "result": {
                    "signatures": {
                        "serving_default": {
                            "inputs": {"x": {"dtype": "float32", "shape": [None, 28]}},
                            "outputs": {metric: {"dtype": "float32", "shape": [None]}},
                        }
                    }
                },
                "tries": {"transform": 1},
            },
        }
        for step, facts in parts.items():
            write_part(layout, step, facts)
        self.run = Run(
            dag_id="digits",
            run_id="manual__1",
            type="manual",
            due=datetime(2026, 11, 20, tzinfo=UTC),
            triggered_by=metric,
            started=datetime(2026, 11, 20, 1, tzinfo=UTC),
            parameters={"epochs": 3, metric: metric},
        )
        self.log = []

    def publish(self, *, store=None, secret=no_secret, try_number=1, **site):
        """The place of what it publishes."""
        log = logging.Logger("upload")
        handler = logging.Handler()
        handler.emit = lambda one: self.log.append((one.levelname, one.getMessage()))
        log.addHandler(handler)
        store = store or FolderStore(self.results)
        place = Site("python", lambda _reference: store, secret, **site)
        context = StepContext(self.layout, self.run, log, place, try_number, try_number)
        manifest = {"name": "digits", "digest": "sha256:v2:m", "dialect": "wml", "file": "d.yml"}
        step = UploadResultsStep(results=StoreReference(store.uri), manifest=manifest)
        return UploadResults(replace(step, keep=3), context).run()["training"]


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


@pytest.fixture(scope="session")
def key(tmp_path_factory):
    """A site's key: the private one's file, and the public one's."""
    return _key_in(tmp_path_factory.mktemp("key"))


@pytest.fixture(scope="session")
def other_key(tmp_path_factory):
    """Somebody else's."""
    return _key_in(tmp_path_factory.mktemp("other"))


def _key_in(folder):
    private = ec.generate_private_key(ec.SECP256R1())
    (folder / "site.pem").write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (folder / "site.pub").write_bytes(
        private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return folder / "site.pem", folder / "site.pub"
