from __future__ import annotations

import re
from pathlib import Path

from ddl_ops import rank

from ddl_airflow.core.environment import CONTRACT, VARIABLES, of_run, with_table
from ddl_airflow.core.layout import RunLayout

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "process-contract.md"
# What a person sets, for the ops, the demo or the command line, and no step or rank.
OF_PEOPLE = {
    *("DDL_BUILD_OPS", "DDL_GPU", "DDL_GPUS", "DDL_GROUP_SIZE", "DDL_HOSTID", "DDL_LOG"),
    *("DDL_SPARSE_AS_DENSE", "DDL_STALL_TIMEOUT", "DDL_THREADS", "DDL_TIMELINE", "DDL_TRANSPORT"),
    "DDL_WIRE_DTYPE",
}


def test_rank_environment_is_the_contract():
    root = Path("/w/runs/mnist/mnist-1")
    assert of_run(RunLayout(Path("/w"), "mnist", "mnist-1"), "mnist") == {
        "DATA_DIR": str(root / "data"),
        "RESULT_DIR": str(root / "result"),
        "MODEL_DIR": str(root / "code"),
        "CHECKPOINT_DIR": str(root / "result/checkpoints"),
        "LOG_DIR": str(root / "logs"),
        "JOB_STATE_DIR": str(root / "ddl"),
        "TRAINING_ID": "mnist-1",
        "DLAAS_JOB_ID": "mnist-1",
        "JOB_NAME": "mnist",
        "EXPERIMENT_ID": "mnist-1",
        "EXPERIMENT_DIR": "/w/experiments/mnist-1",
        "DDL_PROGRESS": str(root / "ddl/progress.jsonl"),
        "DDL_STATS": str(root / "ddl/stats.json"),
    }


def test_launchers_and_ranks_name_the_same_contract():
    assert rank.CONTRACT == CONTRACT


def test_trainings_of_one_experiment_share_its_folder():
    found = [
        of_run(RunLayout(Path("/w"), dag_id, f"{dag_id}-1", "wide"), dag_id)
        for dag_id in ("a", "b")
    ]
    for environment in found:
        assert environment["EXPERIMENT_ID"] == "wide"
        assert environment["EXPERIMENT_DIR"] == "/w/experiments/wide"
    assert found[0]["RESULT_DIR"] != found[1]["RESULT_DIR"]


def test_the_page_shows_the_variables_that_there_are():
    page = PAGE.read_text()
    written = f"python -m ddl_airflow.core.environment {PAGE.relative_to(ROOT)}"
    assert with_table(page) == page, f"the table is another by now: {written}"


def test_every_variable_that_is_set_is_in_the_table():
    """Read from the sources: whoever adds one, here or in the rank shim, adds a line."""
    known = {name for one in VARIABLES for name in one.names} | OF_PEOPLE
    sources = [*(ROOT / "ddl_airflow").rglob("*.py"), *(ROOT / "ops_lib/python").rglob("*.py")]
    said = {
        name
        for path in sources
        for name in re.findall(r"""["'](DDL_[A-Z0-9_]+)["']""", path.read_text())
    }
    assert len(said) > 15
    assert said - known == set()
