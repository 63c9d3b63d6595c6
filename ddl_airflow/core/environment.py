"""The environment of ranks, and of whatever else a manifest has run: built here alone.

``docs/process-contract.md`` shows the table below: ``python -m ddl_airflow.core.environment FILE``
writes it there, between its marks. What only a rank itself can know it adds itself
(``ddl_ops.rank``); it is in the table too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddl_airflow.core.job import JobSpec
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.parameters import parameter_environment

if TYPE_CHECKING:  # launchers need not know what reads manifests
    from ddl_airflow.core.plan import ScriptStep, TrainStep

# Which environment, files and signals launchers and ranks agree on: another number where an older
# one could not be told from them. ddl_ops.rank has the same, and starts no script by another.
CONTRACT = 1
# ddlrun's default mode. Set, it makes `import ddl` initialise and hook; see ddl's docstring.
DEFAULT_OPTIONS = "-mode p"
_BEGIN = "<!-- variables: written by python -m ddl_airflow.core.environment -->"
_END = "<!-- end of variables -->"


def of_run(layout: RunLayout, job_name: str, *, trained: bool = False) -> dict[str, str]:
    """Where the run's files are.

    Args:
        layout: the run's.
        job_name: the DAG's id.
        trained: whether it is for a step after the training.
    """
    return {
        "DATA_DIR": str(layout.staged),
        "RESULT_DIR": str(layout.result),
        "MODEL_DIR": str(layout.code),
        "CHECKPOINT_DIR": str(layout.checkpoints),
        "LOG_DIR": str(layout.logs),
        "JOB_STATE_DIR": str(layout.state),
        "TRAINING_ID": layout.training_id,
        "DLAAS_JOB_ID": layout.training_id,
        "JOB_NAME": job_name,
        "EXPERIMENT_ID": layout.experiment.name,
        "EXPERIMENT_DIR": str(layout.experiment_copy if trained else layout.experiment),
        "DDL_PROGRESS": str(layout.progress),
        "DDL_STATS": str(layout.statistics),
    }


def of_script(step: ScriptStep, secrets: Mapping[str, str]) -> dict[str, str]:
    """What the manifest says of its scripts.

    Args:
        step: that runs them.
        secrets: the value of each of its secret parameters, by name.
    """
    said = {"DDL_TF1": "1"} if step.tf1 else {}
    return {**said, **parameter_environment(step.parameters), **parameter_environment(secrets)}


def of_training(step: TrainStep) -> dict[str, str]:
    """What only the training's ranks find."""
    said = {
        "DDL_METRICS": json.dumps([dict(one) for one in step.metrics]),
        "GPU_COUNT": str(step.slots if step.gpu else 0),
    }
    if step.prove:
        said["DDL_PROVE"] = "1"
    return said if step.gpu else {**said, "DDL_NO_GPU": "1"}


def of_evaluation(layout: RunLayout, said: Path) -> dict[str, str]:
    """What only the evaluation's command finds; ``said`` is where it leaves its metrics."""
    return {"MODEL": str(layout.model), "EVALUATION": str(said)}


def of_job(job: JobSpec) -> dict[str, str]:
    """What every process of a job finds, whatever starts it."""
    return {
        **job.env,
        "DDL_CONTRACT": str(CONTRACT),
        "DDL_JOB_ID": job.job_id,
        "DDL_SLOTS": str(job.slots),
        "DDL_RECORD_DIR": str(job.record_dir),
        "LOG_DIR": str(job.log_dir),
    }


@dataclass(frozen=True)
class Variable:
    """A line of the table: one variable, or some that are explained together.

    Attributes:
        names: as they are in the environment; ``<>`` stands for what differs.
        meaning: in Markdown, as in ``docs/``.
    """

    names: tuple[str, ...]
    meaning: str


def _variable(names: str, meaning: str) -> Variable:
    return Variable(tuple(names.split()), meaning)


VARIABLES = (
    _variable("DATA_DIR", "the staged training data"),
    _variable("RESULT_DIR", "this training's results; the same folder in every try"),
    _variable("CHECKPOINT_DIR", "`$RESULT_DIR/checkpoints`"),
    _variable("MODEL_DIR", "the run's copy of the scripts, and the current folder"),
    _variable("LEARNER_ID", "the rank's node, from 1"),
    _variable(
        "NUM_LEARNERS",
        "how many nodes there are. Ranks of one node have the same `LEARNER_ID`: data are parted "
        "among all by `ddl.rank()` and `ddl.size()`",
    ),
    _variable(
        "GPU_COUNT",
        "of the training only: the GPUs of each node, of which each rank has one; `0` on a kind of "
        "node without",
    ),
    _variable(
        "TRAINING_ID",
        "`<dag id>-<run>-<digest>`, the digest of site, DAG and run; also the folder in"
        " the results bucket",
    ),
    _variable("DLAAS_JOB_ID", "the same, as FfDL calls it"),
    _variable("JOB_NAME", "the DAG's id"),
    _variable(
        "EXPERIMENT_ID",
        "the experiment that the run or the manifest names; else the training's id",
    ),
    _variable(
        "EXPERIMENT_DIR",
        "its folder, which [other trainings](coming-from-tf-config.md#experiments) may "
        "go on with; made by who uses it, and published. Of one that has a name the "
        "steps after `train` find a copy in the run, as the training left it",
    ),
    _variable("TF_CONFIG", "cluster and task, with `distribution: parameter_server` only"),
    _variable(
        "PARAM_<NAME>",
        "the value of each of the manifest's `parameters` in this run: numbers, `true` "
        "or `false`, text; of a [secret one](manifests.md#secrets-of-a-script) the "
        "password of its connection",
    ),
    _variable(
        "MODEL EVALUATION",
        "for `evaluation.command` only: the SavedModel's folder, and the file for a "
        "JSON object of metrics, at most 100 numbers by name",
    ),
    _variable("LOG_DIR JOB_STATE_DIR", "rank logs; progress and records"),
    _variable(
        "DDL_OPTIONS",
        "set: `import ddl` initialises and hooks. Absent: the script calls `ddl.init()`",
    ),
    _variable(
        "DDL_TF1",
        "`1`: `import tensorflow` gives the [1.x "
        "API](coming-from-wml.md#tensorflow-1-mode). The script does not find it: it is"
        " taken away at the start, so that what the script starts is not in the mode",
    ),
    _variable("DDL_PROGRESS", "file for progress lines"),
    _variable("DDL_STATS", "file for the statistics of the communication"),
    _variable(
        "DDL_PROVE",
        "`1` with `lineage: {prove: true}`: rank 0 notes [digests of the "
        "weights](lineage.md#made-again) in `$LOG_DIR/weights.jsonl`",
    ),
    _variable("DDL_JOB_ID", "the job: training and try"),
    _variable(
        "DDL_RECORD_DIR",
        "where the rank shim, a small process around the script of each rank, records how it "
        "ended. Surviving processes with this variable are killed when the job ends",
    ),
    _variable(
        "DDL_CONTRACT",
        "the number of this contract; a rank shim of another one starts nothing",
    ),
    _variable("DDL_METRICS DDL_TASK DDL_MPIRUN DDL_OUTPUT", "for the rank shim"),
    _variable(
        "DDL_SLOTS",
        "ranks of each host, or of every one in their order: `2` or `2,1`",
    ),
    _variable(
        "DDL_COMMIT_DIR",
        "by `ddl-run` and `horovodrun` with `--min-np` or `--host-discovery-script`, and by "
        "[`horovod.run`](coming-from-horovod.md#elastic-training): where "
        "elastic states commit, in place of `CHECKPOINT_DIR`, if the caller has not set that",
    ),
    _variable(
        "DDL_COMMIT_LOCK",
        "by the same: the folder in which it lets no other job commit "
        "meanwhile. In another one, as where the script sets `CHECKPOINT_DIR`, rank 0 does so",
    ),
    _variable(
        "DDL_NO_GPU",
        "`1` on a kind of node without GPUs: the shim leaves TensorFlow's lines on "
        "missing CUDA drivers out of the log, unless `TF_CPP_MIN_LOG_LEVEL` is set",
    ),
    _variable(
        "DDL_EXCEPTION_FILE DDL_WRITES_FILE",
        "from the rank shim to its script's Python: where to leave an exception, and "
        "the names of files that it writes",
    ),
    _variable(
        "DDL_RANK_PROCESS",
        "set by the rank when it starts communication: its process id and job, by which"
        " [what it starts](ops.md#processes-that-a-rank-starts) knows that it is no "
        "rank",
    ),
    _variable(
        "DDL_SHELL",
        "set by the shell that a command keeps: its process id, for a script that makes room, "
        "after which the shell is to run no more",
    ),
    _variable(
        "no_grpc_proxy",
        "with `TF_CONFIG`: the hosts of the tasks, which reach each other without a proxy; after "
        "what it, or `no_proxy`, had before",
    ),
    _variable(
        "LD_PRELOAD OMPI_MCA_btl_tcp_if_include",
        "on one host: [servers listen on its loopback address](#what-runs)",
    ),
    _variable(
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE "
        "OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
        "from mpirun, so not with `TF_CONFIG`; `PMI_*` and `SLURM_*` are read as well",
    ),
    _variable(
        "TF_NUM_INTRAOP_THREADS OMP_NUM_THREADS",
        "the cores that a host's ranks may use (affinity, a container's CPU limit), divided by "
        "them, unless set",
    ),
    _variable(
        "PYTHONUNBUFFERED TF_CPP_MIN_LOG_LEVEL",
        "`1`, unless set: lines are there at once, and none of TensorFlow's below a warning",
    ),
    _variable(
        "PATH PYTHONPATH",
        "begin with the folder of the ranks' Python, and with one that hooks into its start",
    ),
)


def table() -> str:
    """The variables, as a table in Markdown."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in one.names)} | {one.meaning} |" for one in VARIABLES
    ]
    return "\n".join(("| variable | meaning |", "|---|---|", *rows)) + "\n"


def with_table(page: str) -> str:
    """The page, with the table as it is now between its marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table()}{_END}{after}"


if __name__ == "__main__":
    _page = Path(sys.argv[1])
    _page.write_text(with_table(_page.read_text("utf-8")), "utf-8")
