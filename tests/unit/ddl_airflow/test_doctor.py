from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from airflow.models import Pool
from sqlalchemy.exc import OperationalError

from ddl_airflow import cli, doctor
from ddl_airflow.doctor import State, examine


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "AIRFLOW_CONFIG", str(tmp_path / "airflow.cfg"))
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
    assert "launcher, such as slurm, transform and evaluation run on this host" in said
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


def test_settings_elsewhere_that_others_can_read_are_said(home, monkeypatch):
    """AIRFLOW_CONFIG names the file."""
    settings = home / "etc" / "ours.cfg"
    settings.parent.mkdir()
    settings.touch(mode=0o644)
    monkeypatch.setattr(doctor, "AIRFLOW_CONFIG", str(settings))
    state, said = found("airflow.cfg")
    assert state is State.OPEN and f"chmod o-r {settings}" in said
    (home / "airflow.cfg").touch(mode=0o644)  # which nobody uses
    settings.chmod(0o600)
    assert "airflow.cfg" not in [one.what for one in examine()]


def test_what_keeps_trainings_from_running_is_wrong(home, monkeypatch, capsys):
    monkeypatch.setenv("AIRFLOW__DDL__PYTHON", str(home / "python"))
    assert cli.main(["doctor"]) == 1
    assert f"wrong  ranks: the ranks' Python '{home / 'python'}'" in capsys.readouterr().out
    monkeypatch.delenv("AIRFLOW__DDL__PYTHON")
    monkeypatch.setenv("AIRFLOW__DDL__RUN_RANKS_AS", "no-such-user")
    assert cli.main(["doctor"]) == 1
    assert "this host has no user 'no-such-user'" in capsys.readouterr().out


def test_an_mpirun_that_does_not_run_says_why(home, monkeypatch):
    for name, line in (
        ("python", f'exec {sys.executable} "$@"'),
        ("mpirun", "echo first; echo 'libprrte.so.3: cannot open shared object' >&2; exit 127"),
    ):
        (home / name).write_text(f"#!/bin/sh\n{line}\n")
        (home / name).chmod(0o700)
    monkeypatch.setenv("AIRFLOW__DDL__PYTHON", str(home / "python"))
    state, said = found("mpirun")
    assert state is State.WRONG
    assert said.startswith(f"{home}/mpirun: libprrte.so.3: cannot open shared object Install ddl-")
    assert "ops" in [one.what for one in examine()]


def test_mpirun_is_asked_as_ranks_are_started(home, monkeypatch):
    """Without HOME, as systemd starts services, Open MPI runs nothing."""
    monkeypatch.delenv("HOME")
    assert found("mpirun")[0] is State.OK


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user without sudo")
def test_the_user_of_the_ranks_is_tried(home, monkeypatch):
    monkeypatch.setenv("AIRFLOW__DDL__RUN_RANKS_AS", "nobody")
    assert found("ranks' user") == (State.OK, "nobody ")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file/w", "file is no folder Make one, or correct [ddl] workspace."),
        ("file", "file is no folder Make one, or correct [ddl] workspace."),
        ("/proc/no-such/w", "it cannot be made in /proc: "),
    ],
)
def test_a_workspace_that_cannot_be_made_is_wrong(home, monkeypatch, place, said):
    (home / "file").touch()
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", str(home / place))
    state, found_said = found("workspace")
    assert state is State.WRONG
    assert said in found_said and "[ddl] workspace" in found_said


def test_a_relative_workspace_is_wrong(home, monkeypatch):
    """Ranks work in a folder of their own, and would look for it there."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", "w")
    state, said = found("workspace")
    assert state is State.WRONG
    assert "[ddl] workspace is w, which is relative. Write an absolute path." in said


def test_a_workspace_of_a_user_who_is_not_there_is_wrong(home, monkeypatch):
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", "~no-such-user/ddl")
    state, said = found("workspace")
    assert state is State.WRONG
    assert "[ddl] workspace is ~no-such-user/ddl, which is relative." in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_workspace_that_cannot_be_written_is_wrong_for_a_user(home):
    (home / "w").mkdir(mode=0o500)
    assert found("workspace") == (
        State.WRONG,
        f"{home}/w cannot be written to: Permission denied Let user id {os.geteuid()} write there, "
        "or correct [ddl] workspace.",
    )


def test_a_workspace_that_cannot_be_written_is_wrong(home, monkeypatch):
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", "/proc/self")
    state, said = found("workspace")
    assert state is State.WRONG
    assert said.startswith("/proc/self cannot be written to: ")
    assert said.endswith(f"Let user id {os.geteuid()} write there, or correct [ddl] workspace.")


def test_a_workspace_that_is_not_there_yet_is_left_so(home):
    assert found("workspace")[0] is State.OK
    assert [path.name for path in home.iterdir()] == []


@pytest.mark.parametrize("refused", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_workspace_without_locks_is_wrong(home, monkeypatch, refused):
    def flock(file, how):
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR  # as the cache's
        if how & refused:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (home / "w").mkdir()
    monkeypatch.setattr(fcntl, "flock", flock)
    state, said = found("workspace")
    assert state is State.WRONG and f"{home}/w has no locks: No locks available" in said


LOADER = (Path(__file__).parents[3] / "dags" / "load_manifests.py").read_text()
MANIFESTS = "ddl_airflow.bundle.ManifestBundle"
DAGS = "airflow.dag_processing.bundles.local.LocalDagBundle"


@pytest.fixture
def bundles(home, monkeypatch):
    """bundles(entries): sets [dag_processor] dag_bundle_config_list, and the DAG folder."""
    (home / "dags").mkdir()
    monkeypatch.setenv("AIRFLOW__CORE__DAGS_FOLDER", str(home / "dags"))
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH", str(home / "bundles"))
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: str(home / "tmp"))

    def configure(*entries):
        told = [{"name": n, "classpath": c, "kwargs": k} for n, c, k in entries]
        text = json.dumps(told)
        monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST", text)

    return configure


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_importer_is_looked_at(home, bundles, monkeypatch, everywhere):
    ours = ["ddl_airflow.importer.ManifestImporter"]
    entry = {"name": "trainings", "classpath": DAGS, "kwargs": {}}
    bundles()
    if everywhere:
        monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_IMPORTER_CONFIGS", json.dumps(ours))
    else:
        entry["importers"] = [{"classpath": ours[0]}]
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST", json.dumps([entry]))
    where = "every bundle" if everywhere else "bundle 'trainings'"
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    assert found("manifests' DAGs") == (State.OK, f"{where} imports them ")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    state, said = found("manifests' DAGs")
    assert state is State.WRONG and said.startswith(f"{where} has an importer, and Airflow ")


def test_where_manifests_come_from_is_looked_at(home, bundles, monkeypatch):
    trainings = home / "trainings"
    ours = ("trainings", MANIFESTS, {"path": str(trainings)})
    bundles(("dags-folder", DAGS, {}))
    state, said = found("manifests' DAGs")
    assert state is State.RISK
    assert said.startswith("no bundle makes DAGs of manifests Add a ManifestBundle to ")
    (home / "dags" / "load.py").write_text(LOADER)
    assert found("manifests' DAGs") == (State.OK, f"{home}/dags/load.py loads them ")
    bundles(("dags-folder", DAGS, {}), ours)
    assert found("manifests' DAGs") == (
        State.WRONG,
        f"bundle 'trainings': {trainings} is no folder "
        "Make it, or correct path in [dag_processor] dag_bundle_config_list.",
    )
    trainings.mkdir()
    assert found("manifests' DAGs") == (State.OK, f"bundle 'trainings' makes them of {trainings} ")
    assert "DAG folder" not in [one.what for one in examine()]
    bundles(ours)
    state, said = found("DAG folder")
    assert state is State.RISK
    assert said.startswith(f"no bundle has {home}/dags, so its DAGs are deactivated Add ")
    (home / "dags" / "load.py").unlink()
    assert "DAG folder" not in [one.what for one in examine()]
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST", "[{")
    state, said = found("bundles")
    assert state is State.WRONG and "dag_bundle_config_list" in said
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST", '{"name": "x"}')
    state, said = found("bundles")
    assert state is State.WRONG and "is no list of bundles" in said


def test_where_bundles_keep_versions_is_looked_at(home, bundles, monkeypatch):
    (home / "trainings").mkdir()
    bundles(("trainings", MANIFESTS, {"path": str(home / "trainings")}))
    variable = "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH"
    assert found("versions") == (State.OK, f"of manifests are kept in {home}/bundles ")
    assert not (home / "bundles").exists()
    monkeypatch.delenv(variable)
    state, said = found("versions")
    assert state is State.RISK
    assert f"{home}/tmp/airflow/dag_bundles, below the temporary folder" in said
    assert "Set [dag_processor] dag_bundle_storage_path to a folder that stays." in said
    monkeypatch.setenv(variable, "bundles")
    assert found("versions")[0] is State.WRONG
    (home / "file").touch()
    monkeypatch.setenv(variable, str(home / "file" / "bundles"))
    state, said = found("versions")
    assert state is State.WRONG and "file is no folder" in said
    assert "[dag_processor] dag_bundle_storage_path" in said


def test_a_site_without_a_key_for_its_tokens_is_told_so(home, monkeypatch):
    monkeypatch.delenv("AIRFLOW__API_AUTH__JWT_SECRET", raising=False)
    state, said = found("jwt_secret")
    assert state is State.RISK and "openssl rand -hex 32" in said
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "a-secret-of-the-site")
    state, said = found("jwt_secret")
    assert state is State.OK and "a-secret" not in said
    monkeypatch.delenv("AIRFLOW__API_AUTH__JWT_SECRET")
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_PRIVATE_KEY_PATH", str(home / "key.pem"))
    assert found("jwt_secret")[0] is State.OK


def test_rules_of_cleaning_that_cannot_be_used_are_wrong(home, monkeypatch, capsys):
    assert "cleaning" not in [one.what for one in examine()]
    monkeypatch.setenv("AIRFLOW__DDL__KEEP_RUNS", "30 days")
    monkeypatch.setenv("AIRFLOW__DDL__KEEP_EXPERIMENTS", "1h")
    monkeypatch.setenv("AIRFLOW__DDL__CACHE_SIZE", "500GB")
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("Write for example 30d.") == 2
    assert shown.count("Write for example 500Gi.") == 1
    said = [line for line in shown.splitlines() if "  cleaning: " in line]
    assert len(said) == 3
    assert "wrong  cleaning: [ddl] keep_runs: '30 days' is not a duration: a number and" in said[0]
    assert "[ddl] keep_experiments: 1h is less than two days" in said[1]
    assert "[ddl] cache_size: '500GB' is not a size" in said[2]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("{home}/no-such.yml", "{home}/no-such.yml: cannot be read: No such file or directory "),
        ("{home}", "{home}: cannot be read: Is a directory Correct [ddl] manifest_rights in "),
        ('{{"rights": {{"dags": {{}}}}}}', "rights.dags: 'dags' is no absolute path Write the "),
        ('{{"rights": [', "[ddl] manifest_rights:2: is not YAML: "),
    ],
)
def test_a_table_of_rights_that_cannot_be_read_is_wrong(home, monkeypatch, table, said):
    """No manifest has a DAG then."""
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", table.format(home=home))
    state, found_said = found("manifests")
    assert state is State.WRONG and said.format(home=home) in found_said


def test_a_table_of_rights_that_this_user_may_not_read_is_wrong(trainer, monkeypatch):
    table = trainer.place / "rights 100% é.yml"
    table.write_text("rights: {/dags: {}}")
    table.chmod(0o600)
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", str(table))
    with trainer.acting():
        state, said = found("manifests")
    assert state is State.WRONG and "cannot be read: Permission denied Correct [ddl] mani" in said
    assert found("manifests")[0] is State.OK


@pytest.mark.parametrize(
    "text",
    [
        "# from ddl_airflow.dag import dags_from; dags_from('.')\n",
        '"""As ddl_airflow.dag.dags_from does it."""\n',
        "from ddl_airflow.dag import dags_from\n",  # and makes nothing of it
        "from ddl_airflow.operators.production import production_dag\nproduction_dag('s3://a')\n",
        "from ddl_airflow.dag import dags_from\ndags_from(\n",
        "dags_from('ddl_airflow')\n",
        "\0 ddl_airflow",
        "x = " + " + ".join(["ddl_airflow"] * 10_000),  # more than Python parses
        "x = ddl_airflow" + ".b()" * 600,
    ],
    ids=lambda text: text[:30],
)
def test_a_file_that_mentions_us_is_no_loader(home, bundles, text):
    bundles(("dags-folder", DAGS, {}))
    (home / "dags" / "a 100% é.py").write_text(text)
    (home / "dags" / "dangling.py").symlink_to("nowhere")
    (home / "dags" / "folder.py").mkdir()
    state, said = found("manifests' DAGs")
    assert state is State.RISK and said.startswith("no bundle makes DAGs of manifests")
    for written in (
        LOADER,
        "import ddl_airflow.dag\nglobals().update(ddl_airflow.dag.dags_from('/srv'))\n",
        "from ddl_airflow import dag as ours\nx = ours.dags_from('/srv')\n",
        "from ddl_airflow.dag import dags_from as made\nglobals().update(made('/srv'))\n",
        LOADER + "# of a site that explains itself\n" * 10_000,
    ):
        (home / "dags" / "load.py").write_text(written)
        assert found("manifests' DAGs") == (State.OK, f"{home}/dags/load.py loads them ")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sh -c 'echo a-secret; exit 3'", "its command ended with 3"),
        ("/no/such/program --token=a-secret", "its command cannot be started: No such file"),
        ("echo 'a-secret", "its command cannot be understood: No closing quotation"),
    ],
)
@pytest.mark.parametrize("setting", ["API_AUTH__JWT_SECRET", "DATABASE__SQL_ALCHEMY_CONN"])
def test_a_setting_whose_command_fails_is_a_line(home, setting, command, said):
    """Airflow asks some of them as it is imported."""
    environ = {name: value for name, value in os.environ.items() if setting not in name}
    environ |= {f"AIRFLOW__{setting}_CMD": command, "AIRFLOW_HOME": str(home)}
    asked = [sys.executable, "-m", "ddl_airflow", "doctor"]
    done = subprocess.run(asked, env=environ, capture_output=True, text=True, check=False)
    (line,) = [line for line in done.stdout.splitlines() if said in line]
    assert line.startswith("wrong  ") and f"AIRFLOW__{setting}_CMD: {said}" in line
    assert f"Correct AIRFLOW__{setting}_CMD: " in done.stdout
    assert "Traceback" not in done.stderr and "a-secret" not in done.stdout + done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("{home}/no-such.yml", "{home}/no-such.yml: cannot be read: No such file or directory "),
        ('{{"compute": {{"a100": {{"slot": 8}}}}}}', "compute.a100.slot: unknown field Did you "),
        (
            '{{"compute": {{"a100": {{"slots": 8, "executor": "Celery"}}}}}}',
            "a100 has executor Celery in [ddl] compute; this Airflow has not Known: ",
        ),
    ],
)
def test_a_table_of_compute_that_cannot_be_used_is_wrong(home, monkeypatch, table, said):
    """The manifests that it is for have no DAG then, or none has."""
    assert "compute" not in [one.what for one in examine()]
    monkeypatch.setenv("AIRFLOW__DDL__COMPUTE", table.format(home=home))
    state, found_said = found("compute")
    assert state is State.WRONG and said.format(home=home) in found_said


def test_a_pool_that_is_not_there_or_has_too_few_slots_is_wrong(
    home, monkeypatch, airflow_database
):
    """Nothing fails: what takes slots of it stays scheduled for ever."""
    pools = {"none": 0, "small": 7, "enough": 8, "endless": -1}
    kinds = {name: {"slots": 8, "pool": name} for name in (*pools, "gone")}
    kinds["others"] = {"slots": 8, "pool": "enough", "other_steps": {"pool": "transfers"}}
    kinds["free"] = {"slots": 2}
    monkeypatch.setenv("AIRFLOW__DDL__COMPUTE", json.dumps({"compute": kinds}))
    with airflow_database() as session:
        for name, slots in pools.items():
            Pool.create_or_update_pool(name, slots, "", include_deferred=True, session=session)
        session.commit()
    wrong = [one for one in examine() if one.what == "pools"]
    assert {one.state for one in wrong} == {State.WRONG}
    assert sorted(one.said.partition(": ")[0] for one in wrong) == [
        "gone has pool gone in [ddl] compute, and that is not there",
        "none has pool none in [ddl] compute, and that has 0 slots",
        "others has pool transfers in [ddl] compute, and that is not there",
        "small has pool small in [ddl] compute, and that has 7 slots",
    ]
    assert any("airflow pools set gone" in one.fix for one in wrong)


def test_pools_are_not_looked_for_where_the_database_cannot_be_asked(home, monkeypatch):
    assert "pools" not in [one.what for one in examine()]
    table = json.dumps({"compute": {"a100": {"slots": 8, "pool": "a100"}}})
    monkeypatch.setenv("AIRFLOW__DDL__COMPUTE", table)

    def away(*_, **__):
        raise OperationalError("select", {}, Exception("no connection"))

    monkeypatch.setattr("airflow.utils.session.create_session", away)
    state, said = found("pools")
    assert state is State.OK and "not reached" in said


def test_numbers_that_are_none_are_wrong(home, monkeypatch):
    given = {
        **{"TRANSFER_WORKERS": "many", "EVIDENCE": "maybe", "PREEMPTIONS": "2.5"},
        **{"DATA_POLL_INTERVAL": "0", "JOB_POLL_INTERVAL": "-1"},
    }
    assert "settings" not in [one.what for one in examine()]
    for name, text in given.items():
        monkeypatch.setenv(f"AIRFLOW__DDL__{name}", text)
    said = [f"{one.said} {one.fix}" for one in examine() if one.what == "settings"]
    assert len(said) == len(given)
    assert all(any(name.lower() in line for line in said) for name in given)
    assert any("data_poll_interval is 0, and a pause is more than 0 seconds" in one for one in said)
