"""A training that plants what it can: its run ends clearly, and the host keeps what is its own."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from airflow.sdk.exceptions import AirflowException

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.launchers.processes import marked
from ddl_airflow.lineage.record import write_part
from ddl_airflow.manifest_dag import dag_from
from ddl_airflow.site import training_of
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import missing_from

SCRIPT = Path(__file__).parent / "scripts" / "hostile.py"
SECRET = "canary5ofTheHost"


@pytest.fixture
def host(tmp_path):
    """A folder that is none of the training's business."""
    host = tmp_path / "host"
    (host / "private").mkdir(parents=True)
    for name in ("secret.txt", "private/key", "record.json", "private/train.json"):
        (host / name).write_text(f'{{"exit_code": 0, "said": "{SECRET}"}}\n')
    (host / "hard.txt").write_text("anybody's\n")
    return host


@pytest.fixture
def run(tmp_path, host, workspace, context_of, write_manifest, capsys):
    """run(*kinds, **parameters): trains and publishes. Returns how each step ended, and the log."""

    def run(*kinds: str, **parameters: object) -> tuple[list[BaseException | None], str]:
        folder = tmp_path / "dags"
        command = f"python train.py {shlex.quote(str(host))} {' '.join(kinds)}"
        more = f"parameters: {{many: {parameters.get('many', 0)}}}\n"
        path = write_manifest(folder, "hostile", command, more=more, script=SCRIPT.read_text())
        (folder / "data").mkdir()
        (folder / "data" / "one").write_text("1")
        dag = dag_from(load_manifest(path), path)
        context = context_of("hostile", **{"nodes": 1, **parameters})
        layout = RunLayout(workspace, "hostile", training_of("hostile", context["dag_run"].run_id))
        ended: list[BaseException | None] = []
        for step in ("stage_data", "train", "upload_results"):
            if step == "upload_results":  # what transform leaves; it would need a real model
                write_part(layout, "transform", {"result": {}, "tries": {}})
            try:
                dag.get_task(step).render_template_fields(context)
                dag.get_task(step).execute(context)
                ended.append(None)
            except AirflowException as error:
                ended.append(error)
                break
        assert marked("DDL_RECORD_DIR", str(layout.records(1))) == []
        return ended, "".join(capsys.readouterr())

    return run


def _published(tmp_path):
    results = tmp_path / "dags" / "results"
    return [path for path in results.rglob("*") if path.is_file()]


def _check_host(host, tmp_path, said):
    """What was the host's is as it was, and nowhere else."""
    assert SECRET not in said
    for path in _published(tmp_path):
        assert SECRET.encode() not in path.read_bytes(), path
        assert not path.is_symlink()
    kept = {"secret.txt", "private/key", "record.json", "private/train.json"}
    for name in kept:
        assert (host / name).read_text() == f'{{"exit_code": 0, "said": "{SECRET}"}}\n', name
    there = {p.relative_to(host).as_posix() for p in host.rglob("*") if p.is_file()}
    assert {one for one in there if not one.startswith("pid-")} == {*kept, "hard.txt"}


def test_links_fifos_sockets_and_reports_leave_a_clean_result(run, host, tmp_path):
    # 100,000 take a minute or two.
    many = int(os.environ.get("HOSTILE_FILES", "2000"))
    ended, said = run("links", "specials", "reports", "many", many=many)
    assert ended == [None, None, None], ended
    _check_host(host, tmp_path, said)
    names = {path.name for path in _published(tmp_path)}
    assert {"saved_model.pb", "_SUCCESS", "lineage.json", str(many - 1)} <= names
    assert not {"fifo", "socket", "link-file", "link-environment"} & names
    assert "is not published" in said and "were no progress" in said
    assert max(map(len, said.splitlines())) < 5000


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *(("links", "model"), ("specials", "model"), ("names", "model")),
        *(("links", "checkpoints"), ("names", "checkpoints")),  # pipes are no checkpoints
    ],
)
def test_a_model_that_would_be_published_without_what_is_planted_in_it_is_not(
    run, host, tmp_path, kind, where
):
    (_, _, refused), said = run(f"{kind}-in-{where}")
    assert "FileRefused: " in str(refused) and "cannot be published with the model" in str(refused)
    assert "\x1b" not in str(refused)
    assert _published(tmp_path) == []
    _check_host(host, tmp_path, said)


def test_odd_names_are_published_or_said(run, host, tmp_path):
    ended, said = run("names")
    assert ended == [None, None, None], ended
    (training,) = (tmp_path / "dags" / "results").glob("hostile-*/*")
    assert missing_from(FolderStore(training)) == []
    assert json.loads((training / "lineage.json").read_text())["training_id"].startswith("hostile")
    there = {path.name for path in _published(tmp_path)}
    assert {"-rf", "..hidden", "a\\b", "{{ ds }}"} <= there
    assert not any("\n" in name or "\x1b" in name for name in there)
    assert said.count("no object can be called so") >= 4
    assert said.count("its path is longer than") >= 1 and "f" not in there
    assert "\x1b" not in said and "\udcff" not in said


def test_what_airflow_reads_is_not_read_where_it_was_replaced(run, host, tmp_path):
    ended, said = run("replaced")
    assert ended == [None, None, None], ended
    assert said.count("No link beneath a run's folder is followed") >= 2
    assert not {"rank-1.log", "launcher.log"} & {path.name for path in _published(tmp_path)}
    _check_host(host, tmp_path, said)


def test_a_record_that_is_none_is_said(run, host, tmp_path):
    (_, train), said = run("records")
    assert "LaunchError: rank 0: " in str(train) and "is no regular file" in str(train)
    assert _published(tmp_path) == [] and SECRET not in said


def test_no_daemon_outlives_the_training(run, host, tmp_path):
    ended, _ = run("daemons")
    pids = [int(path.read_text()) for path in host.glob("pid-*")]
    assert len(pids) == 3 and ended == [None, None, None], ended
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
