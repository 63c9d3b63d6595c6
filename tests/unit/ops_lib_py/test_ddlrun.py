"""PowerAI's launcher: what its flags become, and what it says of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ddl_ops import ddlrun


@pytest.fixture
def taken(monkeypatch, capfd):
    """taken(*words, **environment): what ddl-run is called with, and what is said."""
    monkeypatch.setattr(ddlrun, "_gpus", lambda environ: 4)
    monkeypatch.setattr(ddlrun, "_ddl_run", lambda words: print(*words) or 0)
    monkeypatch.setattr(ddlrun, "os", SimpleNamespace(environ={}))

    def run(*words: str) -> tuple[str, str]:
        assert ddlrun.main(words) == 0
        said = capfd.readouterr()
        return said.out.strip(), said.err

    return run


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        # Of IBM's documents and of public scripts.
        ("-H host1,host2 python train.py", "--hosts host1:4,host2:4 -- python train.py"),
        ("--H cap --accelerators 2 python ./x.py -p 1", "--hosts cap:2 -- python ./x.py -p 1"),
        ("-host=a,b:1 -accelerators=2 python x.py", "--hosts a:2,b:1 -- python x.py"),
        ("--accelerators 4 -m b ./train.sh -m c", "--np 4 -- ./train.sh -m c"),
        ("-v python x.py --tcp", "--np 4 -- python x.py --tcp"),
        ("--nodes 1 --racks 2 -H a,b python x.py", "--hosts a:4,b:4 -- python x.py"),
        ("--tf1 -- python x.py", "--np 4 --tf1 -- python x.py"),
    ],
)
def test_flags_become_those_of_ddl_run(taken, words, becomes):
    assert taken(*words.split()) == (becomes, "")


def test_hosts_of_a_file_run_as_many_ranks_each(taken, tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("host1\nhost2  # the other\n\n")
    said = taken("-hostfile", str(file), "-accelerators", "3", "python", "x.py")
    assert said == ("--hosts host1:3,host2:3 -- python x.py", "")


def test_ranks_get_the_variables_and_options_and_others_are_named(taken):
    words = ["-x", "WORLD_SIZE=16", "-x", "HOME", "-mpiarg", "-x NCCL_DEBUG=INFO -x A='b c'"]
    words += ["--mpiarg", "-pami_noib", "--tcp", "--no_ddloptions", "-mode", "b:4x2", "-ddlarg"]
    said, named = taken(*words, "-dump_iter 100", "python", "x.py")
    assert said == "--np 4 -- python x.py"
    assert ddlrun.os.environ == {
        **{"WORLD_SIZE": "16", "NCCL_DEBUG": "INFO", "A": "b c"},
        "DDL_OPTIONS": "-mode b:4x2 -dump_iter 100",
    }
    assert named == (
        "ddlrun: -tcp has no effect here\n"
        "ddlrun: -no_ddloptions has no effect here\n"
        "ddlrun: -mpiarg -pami_noib has no effect here\n"
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("-H a,b", "no program given; for example: ddlrun -H host1,host2 python train.py"),
        ("-accelerators", "-accelerators needs a value"),
        ("-accelerators 0 python x.py", "-accelerators: '0' is no number from 1 on"),
        (
            "--np 2 python x.py",
            "there is no flag --np. `ddlrun --help` names those that there are.",
        ),
        ("-rf 4x3.rf python x.py", "Name the hosts by -H, and the ranks of each by -accelerators."),
        ("-mpiarg ' python x.py", "-mpiarg ': No closing quotation"),
        ("-H a@b python x.py", "'a@b' is no host. Write name or name:slots"),
        ("-hostfile none python x.py", "-hostfile none: No such file or directory"),
        (
            "--nodes 18 --racks 4 python x.py",
            "-nodes, -racks and -aisles are for 72 hosts, and there are 1. Name them by -H or "
            "-hostfile.",
        ),
    ],
)
def test_what_cannot_be_is_said(taken, capfd, words, why):
    with pytest.raises(SystemExit) as ended:
        taken(*words.split())
    said = capfd.readouterr().err
    assert ended.value.code == 2 and said.startswith("ddlrun: ") and why in said, said


def test_without_gpus_somebody_must_say_how_many_ranks(taken, monkeypatch, capfd):
    monkeypatch.setattr(ddlrun, "_gpus", lambda environ: 0)
    with pytest.raises(SystemExit):
        taken("python", "x.py")
    assert "How many ranks on each? -accelerators N" in capfd.readouterr().err


@pytest.mark.parametrize(("visible", "number"), [("0,2", 2), ("", 0), ("-1", 0), ("GPU-8932f9", 1)])
def test_gpus_are_those_that_ranks_see(visible, number):
    assert ddlrun._gpus({"CUDA_VISIBLE_DEVICES": visible}) == number


def test_it_starts_ranks(tmp_path: Path):
    script = f"""import sys
from ddl_ops import ddlrun
words = ["-accelerators", "2", "-x", "OURS=1", {sys.executable!r}, "-c"]
sys.exit(ddlrun.main([*words, "import os; print(os.environ['OURS'], os.environ['DDL_OPTIONS'])"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 1 -mode p", "[rank 1] 1 -mode p"]
