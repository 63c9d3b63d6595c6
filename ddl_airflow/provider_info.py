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
                    "ddl_airflow.operators.approve",
                    "ddl_airflow.operators.production",
                    "ddl_airflow.operators.clean",
                ],
            }
        ],
        "hooks": [
            {"integration-name": "DDL", "python-modules": ["ddl_airflow.hooks.store"]},
        ],
        "connection-types": [
            {
                "connection-type": "ddlstore",
                "hook-name": "DDL object store",
                "hook-class-name": "ddl_airflow.hooks.store.ObjectStoreHook",
                "ui-field-behaviour": {
                    "hidden-fields": ["schema", "extra"],
                    "relabeling": {
                        "host": "Endpoint",
                        "login": "Access key ID",
                        "password": "Secret access key",
                    },
                    "placeholders": {
                        "host": "https://s3.example.com; empty for Amazon's own",
                        "port": "443, or where the store listens; Test needs it",
                        "login": "of a user who may read the data and write the results",
                        "password": "never shown again",
                    },
                },
                "conn-fields": {
                    "region_name": {
                        "label": "Region",
                        "schema": {"type": ["string", "null"]},
                        "description": "Where the store asks for it.",
                    },
                    "ca_bundle": {
                        "label": "CA certificates",
                        "schema": {"type": ["string", "null"]},
                        "description": "File on the workers with the certificates that the "
                        "endpoint's is signed with, if they are not public ones.",
                    },
                    "bucket": {
                        "label": "Bucket to test",
                        "schema": {"type": ["string", "null"]},
                        "description": "What Test looks into. Empty: the list of buckets, which "
                        "not every user may see.",
                    },
                },
            }
        ],
        "extra-links": [
            "ddl_airflow.links.TrainingLink",
            "ddl_airflow.links.TensorBoardLink",
            "ddl_airflow.links.ResultsLink",
        ],
        "bundles": [
            {"integration-name": "DDL", "python-modules": ["ddl_airflow.bundle"]},
        ],
        "triggers": [
            {
                "integration-name": "DDL",
                "python-modules": [
                    "ddl_airflow.triggers.data_change",
                    "ddl_airflow.triggers.experiment",
                    "ddl_airflow.triggers.job",
                ],
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
                    "site_id": {
                        "description": (
                            "What tells this Airflow from others that publish to the same "
                            "buckets; part of each training's id, so keep it. Empty: a random "
                            "one in the workspace's file site-id."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "berlin",
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
                    "run_ranks_as": {
                        "description": (
                            "User that trainings, and all commands of manifests, run as: by the "
                            "kernel where Airflow's tasks run as root, else by sudo. Jobs of Slurm "
                            "are that user's. SECURITY.md says what it takes and what it keeps "
                            "apart. Empty: Airflow's own user, whose files and secrets they may "
                            "then read."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "trainer",
                        "version_added": "0.1.0",
                    },
                    "compute": {
                        "description": (
                            "The site's kinds of node, by the names that manifests write: ranks "
                            "per node, pool, queue, executor, priority. A YAML file, or the table "
                            "itself as JSON; docs/cluster.md has its fields. Empty: the built-in "
                            "names."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "/etc/airflow/compute.yml",
                        "version_added": "0.1.0",
                    },
                    "manifest_rights": {
                        "description": (
                            "What manifests may name, by the folder that they lie in: Airflow "
                            "connections, folders outside their own, launchers, environment "
                            "variables. A YAML file, or the table itself as JSON; docs/cluster.md "
                            "has its fields. Manifests of other folders may then name none. "
                            "Empty: all may name what they like."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "/etc/airflow/rights.yml",
                        "version_added": "0.1.0",
                    },
                    "manifest_variables": {
                        "description": (
                            "Environment variables that manifests may read with ${NAME} in a "
                            "connection, separated by commas; * is any text. Never Airflow's own. "
                            "With manifest_rights a manifest needs the right to each besides."
                        ),
                        "type": "string",
                        "default": "DDL_*, S3_*",
                        "example": "S3_*, TEAM_STORE_*",
                        "version_added": "0.1.0",
                    },
                    "keep_runs": {
                        "description": (
                            "How long cleaning keeps the folder of a run after the last change "
                            "in it, such as 30d; a run that is open stays. Empty: for ever."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "30d",
                        "version_added": "0.1.0",
                    },
                    "keep_experiments": {
                        "description": (
                            "The same for experiments that manifests or runs have given a name."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "365d",
                        "version_added": "0.1.0",
                    },
                    "cache_size": {
                        "description": (
                            "What cleaning leaves of the cache, such as 500Gi: what was used "
                            "last, and all that a run's data are links to. Hosts over ssh that do "
                            "not share the workspace are held to it, too. Empty: all."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "500Gi",
                        "version_added": "0.1.0",
                    },
                    "tensorboard_url": {
                        "description": (
                            "Address of a TensorBoard over the workspace's experiments, as "
                            "`ddl-airflow tensorboard` starts it. The Training tab and the train "
                            "task link to it. Empty: no link."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "https://tensorboard.example.com",
                        "version_added": "0.1.0",
                    },
                    "tensorboards": {
                        "description": (
                            "How many TensorBoards the api-server of a host runs at once, each for "
                            "one training, started by a button of the Training tab. The one that "
                            "nobody has used for longest makes room. 0: none, and no button. Needs "
                            "the extra `tensorboard` where the api-server runs."
                        ),
                        "type": "integer",
                        "default": "4",
                        "example": None,
                        "version_added": "0.1.0",
                    },
                    "tensorboard_idle_minutes": {
                        "description": (
                            "After how many minutes without a request such a TensorBoard ends. It "
                            "starts again when somebody goes on."
                        ),
                        "type": "float",
                        "default": "15",
                        "example": None,
                        "version_added": "0.1.0",
                    },
                    "results_url": {
                        "description": (
                            "Page of the object store's browser that shows a training's files: "
                            "`{bucket}` and `{prefix}` are replaced. The upload-results task "
                            "links to it. Empty: no link."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "https://store.example.com/browse/{bucket}/{prefix}",
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
                            "Seconds between two looks at a job of a cluster's scheduler, or at an "
                            "experiment that another training works in, by the triggerer."
                        ),
                        "type": "float",
                        "default": "5",
                        "example": None,
                        "version_added": "0.1.0",
                    },
                    "preemptions": {
                        "description": (
                            "How often a training may have to make room for others before it "
                            "fails. Each time it is started again, without an attempt."
                        ),
                        "type": "integer",
                        "default": "100",
                        "example": None,
                        "version_added": "0.1.0",
                    },
                    "evidence": {
                        "description": (
                            "Whether each published model gets a card, a bill of materials, a "
                            "description of its data and a statement of how it was made; "
                            "docs/evidence.md. Some need the extra `evidence`."
                        ),
                        "type": "boolean",
                        "default": "True",
                        "example": None,
                        "version_added": "0.1.0",
                    },
                    "signing_key": {
                        "description": (
                            "The private key that signs what is published: the path of a PEM "
                            "file, or the id of an Airflow connection whose password is the PEM. "
                            "Needs the extra `evidence`. Empty: nothing is signed."
                        ),
                        "type": "string",
                        "default": "",
                        "example": "/etc/airflow/signing-key.pem",
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
