"""What Airflow's provider registry is told. Schema: ``airflow/provider_info.schema.json``."""

from __future__ import annotations

from typing import Any

from ddl_airflow import __version__


def get_provider_info() -> dict[str, Any]:
    """The provider's description; entry point ``apache_airflow_provider``."""
    return {
        "package-name": "ddl-airflow",
        "name": "DDL",
        "description": "Distributed TensorFlow training from a manifest.",
        "versions": [__version__],
        "integrations": [{"integration-name": "DDL", "tags": ["software"]}],
        "operators": [
            {
                "integration-name": "DDL",
                "python-modules": [
                    "ddl_airflow.operators.stage",
                    "ddl_airflow.operators.train",
                    "ddl_airflow.operators.transform",
                    "ddl_airflow.operators.evaluate",
                    "ddl_airflow.operators.upload",
                ],
            }
        ],
        "bundles": [
            {"integration-name": "DDL", "python-modules": ["ddl_airflow.bundle"]},
        ],
        "triggers": [
            {
                "integration-name": "DDL",
                "python-modules": ["ddl_airflow.triggers.data_change", "ddl_airflow.triggers.job"],
            },
        ],
        "config": {
            "ddl": {
                "description": "Distributed TensorFlow training from manifests.",
                "options": {
                    "workspace": {
                        "description": (
                            "Folder for staged data and running trainings. All tasks of one DAG "
                            "run must see it: a shared file system where they may land on "
                            "several workers."
                        ),
                        "type": "string",
                        "default": "{AIRFLOW_HOME}/ddl",
                        "example": "/mnt/shared/ddl",
                        "version_added": "0.1.0",
                    },
                    "python": {
                        "description": (
                            "Python that starts the ranks, with TensorFlow and ddl-airflow's ops "
                            "installed. Empty: the one that runs Airflow. A manifest's "
                            "launcher.python comes first."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "/opt/trainer/bin/python",
                        "version_added": "0.1.0",
                    },
                    "tensorboard_url": {
                        "description": (
                            "Address of a TensorBoard over the workspace's experiments, as "
                            "`ddl-airflow tensorboard` starts it. The Training tab links to it. "
                            "Empty: no link."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "https://tensorboard.example.com",
                        "version_added": "0.1.0",
                    },
                    "data_poll_interval": {
                        "description": (
                            "Seconds between two looks at the data of a manifest with "
                            "`schedule: {on_data_change: true}`, by the triggerer."
                        ),
                        "type": "float",
                        "default": "60",
                        "example": None,
                        "version_added": "0.1.0",
                    },
                    "job_poll_interval": {
                        "description": (
                            "Seconds between two looks at a job of a cluster's scheduler, by the "
                            "triggerer."
                        ),
                        "type": "float",
                        "default": "5",
                        "example": None,
                        "version_added": "0.1.0",
                    },
                    "transfer_workers": {
                        "description": "Objects fetched or published at the same time, per task.",
                        "type": "integer",
                        "default": "8",
                        "example": None,
                        "version_added": "0.1.0",
                    },
                },
            }
        },
    }
