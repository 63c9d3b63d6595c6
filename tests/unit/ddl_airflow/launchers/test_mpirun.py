from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.launchers.local import rank_argv
from ddl_airflow.launchers.mpirun import OpenMpi, find_mpirun


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_argv_of_two_ranks(golden):
    argv = OpenMpi("mpirun").argv(2, rank_argv("python", "python train.py --name 'a b'"))
    golden("mpirun_two_ranks.txt", "\n".join(argv) + "\n")


def test_rank_argv_keeps_words_apart_or_the_text_whole():
    assert rank_argv("py", "a 'b c'")[-2:] == ["--command", "a 'b c'"]
    assert rank_argv("py", ["a", "b c", "--np"])[-4:] == ["--", "a", "b c", "--np"]


def test_mpirun_beside_the_python_is_taken_before_the_one_on_path(tmp_path, monkeypatch):
    beside = executable(tmp_path / "env/bin/mpirun")
    on_path = executable(tmp_path / "system/mpirun")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_mpirun(str(tmp_path / "env/bin/python")) == str(beside)
    assert find_mpirun(str(tmp_path / "other/bin/python")) == str(on_path)


def test_no_mpirun_says_how_to_get_one_and_is_not_retried(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitFailed, match="Install ddl-ops there, `/no/such/python -m") as caught:
        find_mpirun("/no/such/python")
    assert caught.value.retryable is False


def test_the_environment_of_these_tests_has_an_mpirun():
    assert os.access(find_mpirun(sys.executable), os.X_OK)


@pytest.mark.parametrize(("uid", "asks"), [(0, True), (1000, False)])
def test_only_root_asks_to_be_let_in(monkeypatch, uid, asks):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    names = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} if asks else set()
    forwards = "PRTE_MCA_ess_base_forward_signals"
    assert set(OpenMpi("mpirun").environment()) == names | {forwards}
    monkeypatch.setenv(forwards, "SIGUSR1")  # a site's own choice
    assert set(OpenMpi("mpirun").environment()) == names
