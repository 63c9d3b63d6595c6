from __future__ import annotations

import os

import pytest

from ddl_airflow import cli, doctor
from ddl_airflow.doctor import State, examine


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "AIRFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", str(tmp_path / "w"))
    return tmp_path


def found(what: str) -> tuple[State, str]:
    one = next(one for one in examine() if one.what == what)
    return one.state, f"{one.said} {one.fix}"


def test_a_host_that_is_ready_has_open_boundaries_and_nothing_wrong(home, capsys):
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--strict"]) == 1
    said = capsys.readouterr().out
    assert "ok     mpirun: " in said and "Open MPI" in said
    assert "open   ranks' user: " in said and "Set [ddl] run_ranks_as" in said
    assert "wrong" not in said


def test_what_others_can_read_is_said(home):
    (home / "airflow.cfg").touch(mode=0o644)
    (home / "w").mkdir(mode=0o755)
    assert found("airflow.cfg")[0] is State.OPEN
    state, said = found("workspace")
    assert state is State.OPEN and "mode 755" in said and "chmod go-rw" in said
    (home / "airflow.cfg").chmod(0o600)
    (home / "w").chmod(0o711)
    assert found("workspace")[0] is State.OK
    assert "airflow.cfg" not in [one.what for one in examine()]


def test_what_keeps_trainings_from_running_is_wrong(home, monkeypatch, capsys):
    monkeypatch.setenv("AIRFLOW__DDL__PYTHON", str(home / "python"))
    assert cli.main(["doctor"]) == 1
    assert f"wrong  ranks: the ranks' Python '{home / 'python'}'" in capsys.readouterr().out
    monkeypatch.delenv("AIRFLOW__DDL__PYTHON")
    monkeypatch.setenv("AIRFLOW__DDL__RUN_RANKS_AS", "no-such-user")
    assert cli.main(["doctor"]) == 1
    assert "this host has no user 'no-such-user'" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user without sudo")
def test_the_user_of_the_ranks_is_tried(home, monkeypatch):
    monkeypatch.setenv("AIRFLOW__DDL__RUN_RANKS_AS", "nobody")
    assert found("ranks' user") == (State.OK, "nobody ")
