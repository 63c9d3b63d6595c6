from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ddl_ops import environment
from ddl_ops.environment import (
    SETTINGS,
    Placement,
    checkpoint_folder,
    child_of_rank,
    group_size,
    read_placement,
    sees_all_gpus,
    sparse_as_dense,
    unknown_settings,
    wire_dtype,
)


def test_open_mpi_is_read() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMI_RANK": "0",
        "PMI_SIZE": "1",
    }
    placement = read_placement(environ)
    assert placement == Placement(rank=5, size=8, local_rank=1, local_size=4, launched=True)
    assert placement.num_hosts == 2


def test_hydra_is_read() -> None:
    environ = {
        "PMI_RANK": "3",
        "PMI_SIZE": "6",
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "3",
    }
    assert read_placement(environ) == Placement(3, 6, 0, 3, True)


@pytest.mark.parametrize("per_node", ["2(x3)", "2", "2,1"])
def test_slurm_step_is_read(per_node: str) -> None:
    environ = {
        "SLURM_PROCID": "4",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }
    assert read_placement(environ) == Placement(4, 6, 0, 2, True)


def test_slurm_batch_script_is_no_rank() -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0"}
    assert read_placement(environ) == Placement(0, 1, 0, 1, False)


def test_without_a_launcher_there_is_one_rank() -> None:
    placement = read_placement({})
    assert placement == Placement(0, 1, 0, 1, False)
    assert placement.num_hosts == 1


def test_value_that_is_no_number_is_named() -> None:
    with pytest.raises(RuntimeError, match="PMI_SIZE is 'two'"):
        read_placement({"PMI_RANK": "0", "PMI_SIZE": "two"})


@pytest.mark.parametrize(("text", "limit"), [(None, None), ("1", 1), ("250000", 250000)])
def test_group_size_is_read(text: str | None, limit: int | None) -> None:
    assert group_size({} if text is None else {"DDL_GROUP_SIZE": text}) == limit


@pytest.mark.parametrize("text", ["", "0", "-3", "1e6", "many"])
def test_group_size_without_meaning_is_refused(text: str) -> None:
    with pytest.raises(RuntimeError, match="DDL_GROUP_SIZE"):
        group_size({"DDL_GROUP_SIZE": text})


@pytest.mark.parametrize(("text", "dense"), [(None, True), ("1", True), ("0", False)])
def test_sparse_as_dense_is_read(text: str | None, dense: bool) -> None:
    assert sparse_as_dense({} if text is None else {"DDL_SPARSE_AS_DENSE": text}) is dense


@pytest.mark.parametrize("text", ["", "no", "false", "2"])
def test_sparse_as_dense_without_meaning_is_refused(text: str) -> None:
    with pytest.raises(RuntimeError, match="DDL_SPARSE_AS_DENSE"):
        sparse_as_dense({"DDL_SPARSE_AS_DENSE": text})


@pytest.mark.parametrize("text", [None, "float16", "bfloat16"])
def test_wire_dtype_is_read(text: str | None) -> None:
    assert wire_dtype({} if text is None else {"DDL_WIRE_DTYPE": text}) == text


@pytest.mark.parametrize("text", ["", "fp16", "float32", "FLOAT16"])
def test_wire_dtype_without_meaning_is_refused(text: str) -> None:
    with pytest.raises(RuntimeError, match="DDL_WIRE_DTYPE"):
        wire_dtype({"DDL_WIRE_DTYPE": text})


@pytest.mark.parametrize("text", ["", "nccl", "1", "ALL"])
def test_gpus_without_meaning_are_refused(text: str) -> None:
    assert not sees_all_gpus({"DDL_GPU": "nccl"})
    assert sees_all_gpus({"DDL_GPUS": "all"})
    with pytest.raises(RuntimeError, match=r"DDL_GPUS is .*DDL_GPU "):
        sees_all_gpus({"DDL_GPUS": text})


def test_unknown_settings_name_the_nearest() -> None:
    environ = dict.fromkeys(SETTINGS, "1") | {
        "DDL_GROUPSIZE": "1",
        "DDL_TIME_LINE": "x",
        "MY_DDL_X": "",
    }
    assert unknown_settings(environ) == [
        "DDL_GROUPSIZE is set, but ddl has no such setting. Did you mean DDL_GROUP_SIZE?",
        "DDL_TIME_LINE is set, but ddl has no such setting. Did you mean DDL_TIMELINE?",
    ]


def test_process_that_a_rank_starts_is_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"PMIX_NAMESPACE": "prterun-7@1"}
    for name, value in {environment.RANK_PROCESS: "", **job}.items():
        monkeypatch.setenv(name, value)
    assert not child_of_rank()
    environment.claim_rank()
    assert not child_of_rank()
    code = "from ddl_ops.environment import child_of_rank; print(child_of_rank())"
    for more, child in [({}, "True"), ({"PMIX_NAMESPACE": "prterun-8@1"}, "False")]:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True)
        assert done.stdout == f"{child}\n", done.stderr


def test_call_in_a_child_names_its_rank_and_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PLACEMENT", Placement(3, 4, 1, 2, launched=True))
    monkeypatch.setattr(environment, "child_of_rank", lambda: True)
    with pytest.raises(
        RuntimeError, match=r"ddl.bcast\(\) needs a rank.*child of rank 3.*__main__"
    ):
        environment.require_launched("ddl.bcast()")


def test_what_is_advised_without_a_folder_for_checkpoints_is_what_resumes(monkeypatch) -> None:
    """A path in the script would go into the code folder, where no retry looks for it."""
    monkeypatch.setenv("CHECKPOINT_DIR", "there")
    assert checkpoint_folder("CheckpointCallback") == "there"
    monkeypatch.setenv("CHECKPOINT_DIR", "")
    with pytest.raises(ValueError, match="^CheckpointCallback: CHECKPOINT_DIR is not set") as told:
        checkpoint_folder("CheckpointCallback")
    assert "ddl-run --manifest manifest.yml" in str(told.value)
    assert "Pass a" not in str(told.value)
