from __future__ import annotations

import os
import sys

import pytest

from ddl_airflow.core.command import check_command, command_finding
from ddl_airflow.core.errors import CommandInvalid


@pytest.fixture
def code(tmp_path):
    """A folder with scripts, one of which is no Python."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "train.py").write_text("print('well')\n")
    (tmp_path / "my train.py").write_text("")
    (tmp_path / "lib" / "net.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n    pass\n")
    (tmp_path / "nul.py").write_bytes(b"x = 1\0\n")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "python train.py",
        "python3.11 -u train.py --epochs 3",
        "python3 train.py --images ${DATA_DIR}/images",
        "/usr/bin/python ./train.py",
        "python 'my train.py'",
        "python lib/net.py",
        # What is not this code's script is not looked at.
        "python -m package.train",
        "python -c 'no script.py'",
        "python /elsewhere/train.py",
        "python $SCRIPTS/train.py",
        "bash missing.sh",
        "echo missing.py",
        "cd lib && python net.py",
        "python -W ignore train.py",
        "python train.py --sep '&'",
        "python train.py --sep=\\&",
    ],
)
def test_command_that_may_run_passes(code, command):
    check_command(command, code, sys.executable)


@pytest.mark.parametrize("command", ["python ~/train.py", "python t*n.py", "python tra?n.py"])
def test_words_that_a_shell_expands_are_not_taken_for_names(code, command):
    check_command(command, code, sys.executable)


def test_the_nearest_is_found_by_the_whole_of_a_long_name(code):
    folder = code / "experiments" / "computer_vision" / "classification" / "convolutional_networks"
    folder.mkdir(parents=True)
    for name in ("evaluate.py", "train_model.py"):
        (folder / name).touch()
    with pytest.raises(CommandInvalid, match=r"Did you mean '[a-z_/]+/train_model\.py'\?"):
        script = folder.relative_to(code) / "train_mdoel.py"
        check_command(f"python {script}", code, sys.executable)


@pytest.mark.parametrize("python", ["python", "python3"])
def test_missing_script_is_named_with_the_nearest(code, python):
    with pytest.raises(CommandInvalid) as caught:
        check_command(f"{python} trian.py --x", code, sys.executable)
    assert "'trian.py'" in str(caught.value)
    assert "Did you mean 'train.py'?" in str(caught.value)
    assert caught.value.retryable is False


@pytest.mark.parametrize(
    "before",
    [
        "pip install -q 'keras<3' &&",
        "pip3 install -r requirements.txt && python -m pip list &&",
        "apt-get update -qq && export LR=0.1 && nvidia-smi &&",
        "set -e && env && env LR=0.1 && echo '-t' &&",
        "PYTHONHASHSEED=1",
        "TF_CPP_MIN_LOG_LEVEL=3 LR=0.1",
    ],
)
def test_a_missing_script_is_named_behind_what_prepares(code, before):
    with pytest.raises(CommandInvalid, match=r"the script 'trian\.py' is not .* 'train\.py'\?"):
        check_command(f"{before} python trian.py --x", code, sys.executable)
    check_command(f"{before} python train.py --sep '&&'", code, sys.executable)
    with pytest.raises(CommandInvalid, match="ranks of its own"):
        check_command(f"{before} mpirun -np 2 python train.py", code, sys.executable, 2)


@pytest.mark.parametrize(
    "before",
    [
        "unzip -q code.zip &&",
        "cd lib &&",
        "pip install x; cd lib &&",
        "pip install x > made.py &&",
        "git clone git@host:code &&",
        "env X=1 unzip -q code.zip &&",
        "env python make.py &&",
        "pip install -t . one &&",
        "pip install -qt. one &&",
        "pip3 install --target=. one &&",
        "python -m pip install --root . one &&",
        "pip install one '--prefix' . &&",
        "pip install -e git+https://git.example.com/one &&",
        "pip install --src . --editable git+https://git.example.com/one &&",
        "X=$(unzip -q code.zip) &&",
        'echo "$(unzip -q code.zip)" &&',
        "export X=`unzip -q code.zip` &&",
    ],
)
def test_what_may_bring_the_script_is_believed(code, before):
    check_command(f"{before} python made.py", code, sys.executable)


@pytest.mark.parametrize("script", ["main.py", "a.py", "run.py", "nn.py"])
def test_a_script_that_is_called_otherwise_is_no_misspelling(code, script):
    with pytest.raises(CommandInvalid, match="There is: "):
        check_command(f"python {script}", code, sys.executable)


@pytest.mark.parametrize(("script", "near"), [("net.py", "lib/net.py"), ("trane.py", "train.py")])
def test_a_script_elsewhere_or_misspelt_is_found(code, script, near):
    with pytest.raises(CommandInvalid, match=f"Did you mean '{near}'"):
        check_command(f"python {script}", code, sys.executable)


def test_missing_script_without_a_near_name_shows_what_is_there(code, tmp_path):
    with pytest.raises(CommandInvalid, match="There is: bad.py, lib/net.py, my train.py, nul.py"):
        check_command("python zzzzzz.py", code, sys.executable)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CommandInvalid, match=r"There is: no \.py"):
        check_command("python train.py", tmp_path / "empty", sys.executable)


def test_script_that_is_no_python_is_named_with_its_line(code):
    with pytest.raises(CommandInvalid, match=r"^bad\.py:2: .*not valid Python"):
        check_command("python bad.py", code, sys.executable)


def test_script_with_a_nul_byte_is_no_python(code):
    with pytest.raises(CommandInvalid, match=r"^nul\.py:1: "):
        check_command("python nul.py", code, sys.executable)


def test_open_quote_is_named(code):
    with pytest.raises(CommandInvalid, match="execution.command: .*quotation"):
        check_command("python 'train.py", code, sys.executable)


def test_checking_runs_nothing(code):
    (code / "loud.py").write_text("raise SystemExit('ran')\n")
    check_command("python loud.py", code, sys.executable)
    assert not (code / "__pycache__").exists()


def test_syntax_is_judged_by_the_ranks_python_if_it_is_another(code):
    (code / "newer.py").write_text("match = this is from the future\n")
    with pytest.raises(CommandInvalid):
        check_command("python newer.py", code, sys.executable)
    check_command("python newer.py", code, "/opt/trainer/bin/python")


@pytest.mark.parametrize(
    "before",
    [
        "conda activate tf &&",
        "mamba install -y python=3.13 &&",
        "export PATH=/opt/trainer/bin:$PATH &&",
        'LR=1 PATH="/opt/trainer/bin:$PATH"',
    ],
)
def test_syntax_is_not_judged_where_the_command_takes_another_python(code, before):
    check_command(f"{before} python bad.py", code, sys.executable)
    with pytest.raises(CommandInvalid, match=r"the script 'trian\.py' is not"):
        check_command(f"{before} python trian.py", code, sys.executable)


@pytest.mark.parametrize("before", ["PYTHONPATH=lib", "export PYTHONPATH=lib &&"])
def test_a_path_for_modules_is_no_other_python(code, before):
    with pytest.raises(CommandInvalid, match="not valid Python"):
        check_command(f"{before} python bad.py", code, sys.executable)


def test_a_script_that_ranks_made_a_link_or_huge_is_not_read(code, tmp_path_factory):
    secret = tmp_path_factory.mktemp("airflow") / ".pgpass"
    secret.write_text("host:5432:db:user:planted secret\n")
    (code / "export.py").symlink_to(secret)
    check_command("python export.py", code, sys.executable)
    (code / "huge.py").touch()
    os.truncate(code / "huge.py", 2**40)
    check_command("python huge.py", code, sys.executable)
    (code / "deep.py").write_text("-" * 500_000 + "1")
    check_command("python deep.py", code, sys.executable)


def test_the_error_has_no_line_of_the_script(code):
    (code / "bad.py").write_text("planted secret\n")
    with pytest.raises(CommandInvalid) as caught:
        check_command("python bad.py", code, sys.executable)
    assert "planted" not in str(caught.value)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mpirun -np 2 python train.py", "mpirun would start ranks of its own in each rank"),
        ("/usr/bin/srun python train.py", "Write python and the script alone."),
        ("ddlrun -H a,b python train.py", "ddlrun would start ranks of its own in each rank"),
        ("python train.py &", "goes on in the background"),
        ("python train.py&", "Leave the & out"),
        ("train.py --epochs 3", "Write python train.py."),
    ],
)
def test_a_command_that_cannot_be_a_ranks_is_refused(tmp_path, command, said):
    (tmp_path / "train.py").write_text("")
    with pytest.raises(CommandInvalid) as caught:
        check_command(command, tmp_path, sys.executable, 2)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("mpirun -np 2 python evaluate.py", 0),  # as evaluation's command: it runs once
        ("torchrun --nproc_per_node 4 train.py", 1),
        ("ddlrun -accelerators 4 python train.py", 1),
        *((f"{name} train.py", 2) for name in ("jython", "bpython", "pythonw", "python_tf")),
    ],
)
def test_a_program_that_may_be_meant_passes(tmp_path, command, ranks):
    check_command(command, tmp_path, sys.executable, ranks)


@pytest.mark.parametrize("program", ["pyhton", "pythom", "pyton3", "pithon", "pythonn"])
def test_a_misspelt_python_is_named(tmp_path, program):
    with pytest.raises(CommandInvalid, match="Did you mean 'python'"):
        check_command(f"{program} train.py", tmp_path, sys.executable)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("# the held-out set isn't in DATA_DIR\npython train.py", None),
        ("# the held-out set\npython trian.py", "'trian.py' is not in the manifest's code folder"),
        ("cd below\npython other.py  # isn't beside it", None),
    ],
)
def test_comments_are_no_part_of_a_command(tmp_path, command, said):
    (tmp_path / "train.py").write_text("print(1)\n")
    found = command_finding("evaluation.command", command, tmp_path, sys.executable)
    assert found is None if said is None else found is not None and said in found.message
