"""The same trainings as manifests and as dag-factory's YAML: N folders of each."""

from __future__ import annotations

import json
from pathlib import Path

_MANIFEST = """\
model_definition:
  name: {dag_id}
  description: Digits, training {number}
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: python train.py --seed {number}
    compute_configuration: {{name: cpu, nodes: 2}}
training_data_reference:
  type: s3
  connection: {{conn_id: my_s3}}
  source: {{bucket: digits, prefix: "{number}"}}
training_results_reference:
  type: s3
  connection: {{conn_id: my_s3}}
  target: {{bucket: models}}
schedule: "{minute} 3 * * 0"
retries: {{attempts: 3, delay: 30s}}
metrics: [{{name: loss, regex: "loss= ([0-9.]+)"}}]
"""
# An equal DAG: four tasks in a chain, with the same schedule, retries, assets, tags, description.
# dag-factory, too, puts its YAML into the DAG's documentation.
_FACTORY = """\
{dag_id}:
  description: Digits, training {number}
  schedule: "{minute} 3 * * 0"
  start_date: 2024-01-01
  catchup: false
  max_active_runs: 1
  tags: [ddl, tensorflow]
  params:
    nodes: {{__type__: airflow.sdk.Param, default: 2, type: integer, minimum: 1, maximum: 4096,
      title: Nodes, section: This run, description: Each runs 1 rank(s).}}
    launcher: {{__type__: airflow.sdk.Param, default: local, type: string, title: Launcher,
      section: This run, enum: [local, slurm], description: Where the ranks run.}}
    checkpoint: {{__type__: airflow.sdk.Param, default: latest, type: string, title: Checkpoint,
      section: This run, pattern: "^(latest|0|[1-9][0-9]*)$",
      description: "Which one becomes the model: latest, or a step."}}
    attempts: {{__type__: airflow.sdk.Param, default: 3, type: integer, minimum: 1, maximum: 3,
      title: Attempts, section: This run, description: Tries of each task in all.}}
    dry_run: {{__type__: airflow.sdk.Param, default: false, type: boolean, title: Dry run,
      section: This run, description: Check scripts and data and say what would be done.}}
  default_args:
    retries: 2
    retry_delay: {{__type__: datetime.timedelta, seconds: 30}}
    retry_exponential_backoff: 2.0
    max_retry_delay: {{__type__: datetime.timedelta, seconds: 3600}}
  tasks:
    - task_id: stage_data
      operator: airflow.providers.standard.operators.bash.BashOperator
      bash_command: stage s3://digits/{number}
    - task_id: train
      operator: airflow.providers.standard.operators.bash.BashOperator
      bash_command: python train.py --seed {number}
      dependencies: [stage_data]
    - task_id: transform
      operator: airflow.providers.standard.operators.bash.BashOperator
      bash_command: transform --checkpoint latest
      dependencies: [train]
    - task_id: upload_results
      operator: airflow.providers.standard.operators.bash.BashOperator
      bash_command: upload s3://models/{dag_id}
      outlets: ["s3://models/{dag_id}"]
      dependencies: [transform]
"""
_OUR_LOADER = """\
from pathlib import Path

from ddl_airflow.dag import dags_from

globals().update(dags_from(Path(__file__).parent))
"""
_FACTORY_LOADER = """\
from airflow.sdk import DAG  # so that Airflow looks into this file
from dagfactory import load_yaml_dags

load_yaml_dags(globals_dict=globals(), dags_folder={folder})
"""
LOADER = "load_dags.py"


def dag_id(number: int) -> str:
    """Of the training of that number."""
    return f"training-{number:05d}"


def write_manifests(folder: Path, count: int) -> None:
    """`count` manifests, each in a folder, and our loader."""
    for number in range(count):
        place = folder / f"{number:05d}"
        place.mkdir(parents=True)
        text = _MANIFEST.format(dag_id=dag_id(number), number=number, minute=number % 60)
        (place / "manifest.yml").write_text(text)
    (folder / LOADER).write_text(_OUR_LOADER)


def write_factory(folder: Path, count: int) -> None:
    """`count` YAML files of dag-factory, each in a folder, and its loader."""
    for number in range(count):
        place = folder / "yaml" / f"{number:05d}"
        place.mkdir(parents=True)
        text = _FACTORY.format(dag_id=dag_id(number), number=number, minute=number % 60)
        (place / "dag.yml").write_text(text)
    text = _FACTORY_LOADER.format(folder=json.dumps(str(folder / "yaml")))
    (folder / LOADER).write_text(text)
