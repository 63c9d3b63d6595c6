"""The stand-in for Horovod: where it is found, what it refuses, and what it makes of settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddl_ops import rank

OPS = Path(rank.__file__).parent
STAND_IN = OPS / "stand_in"


def ended(script: str, *paths: Path, folder: Path | None = None, **environment: str):
    """How a Python ends that starts as a rank's does, with `paths` before what is installed."""
    path = os.pathsep.join(map(str, (OPS / "startup", OPS.parent, *paths)))
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which a Horovod is installed."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'theirs'\n")
    return tmp_path


def test_ranks_find_ours_where_none_is_installed(tmp_path: Path):
    (tmp_path / "horovod").mkdir()  # a mere folder, as of results, is none
    done = ended(
        "import importlib.util as i; assert i.find_spec('horovod')  # as some ask before\n"
        "import horovod, horovod.common.util as u; print(horovod.__version__, horovod.__file__)",
        folder=tmp_path,
    )
    assert done.stdout.split() == ["0.28.1", str(STAND_IN / "horovod" / "__init__.py")], done.stderr
    assert done.stderr == ""


def test_an_installed_one_wins_and_is_named_on_rank_0(installed: Path):
    script = "import horovod; print(horovod.__version__)"
    done = ended(script, installed)
    assert done.stdout.split() == ["theirs"]
    assert done.stderr == (
        f"ddl: rank 0: `import horovod` gives {installed}/horovod/__init__.py, which is installed, "
        "and not ddl's own\n"
    )
    assert ended(script, installed, OMPI_COMM_WORLD_RANK="1").stderr == ""


def test_nothing_is_found_where_no_rank_is_started():
    done = subprocess.run(
        [sys.executable, "-c", "import horovod"],
        env=os.environ | {"PYTHONPATH": str(OPS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ModuleNotFoundError: No module named 'horovod'" in done.stderr


@pytest.mark.parametrize(
    ("module", "way"),
    [
        ("torch", "torchrun"),
        ("mxnet", "retired"),
        ("spark.keras", "manifest or with ddl-run"),
        ("ray", "ddl-run"),
        ("data", "tf.data"),
    ],
)
def test_what_is_not_there_names_the_way_across(module: str, way: str):
    done = ended(f"import horovod.{module}")
    assert done.stderr.splitlines()[-1].startswith("ImportError: ddl stands in for Horovod"), done
    assert way in done.stderr


@pytest.mark.parametrize(
    ("module", "name", "way"),
    [
        ("gradient_aggregation", "LocalGradientAggregationHelper", "backward_passes_per_step"),
        ("gradient_aggregation_eager", "LocalGradientAggregationHelperEager", "hvd.Distributed"),
        ("mpi_ops", "_alltoall_grad", "hvd.alltoall has a gradient by itself"),
    ],
)
def test_internals_that_scripts_import_name_the_way_across(module: str, name: str, way: str):
    done = ended(f"from horovod.tensorflow.{module} import {name}")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {name} is ") and way in last, done


def test_settings_that_have_a_counterpart_are_taken_and_others_named():
    script = (
        "import os; from horovod.common.settings import translate\n"
        "print(*translate(os.environ), sep='\\n')\n"
        "print(*(f'{k}={v}' for k, v in sorted(os.environ.items()) if k.startswith('DDL_')))"
    )
    done = ended(
        script,
        STAND_IN,
        HOROVOD_TIMELINE="t.json",
        HOROVOD_FUSION_THRESHOLD="4096",
        HOROVOD_LOG_LEVEL="DEBUG",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="7",
        HOROVOD_CYCLE_TIME="3.5",
        HOROVOD_SOMETHING="1",
        HOROVOD_GPU_ALLREDUCE="NCCL",  # what only a build of Horovod reads, as a site exports it
        HOROVOD_GPU_OPERATIONS="NCCL",
        HOROVOD_NCCL_HOME="/usr",
        HOROVOD_CUDA_HOME="/usr",
        HOROVOD_WITH_PYTORCH="1",
        DDL_TIMELINE="ours.json",
    )
    assert done.stdout.splitlines() == [
        "HOROVOD_CYCLE_TIME has no effect with ddl in Horovod's place: nothing waits for a cycle "
        "here.",
        "HOROVOD_SOMETHING has no effect with ddl in Horovod's place: it has no counterpart.",
        "DDL_GROUP_SIZE=1024 DDL_LOG=info DDL_STALL_TIMEOUT=7 DDL_TIMELINE=ours.json",
    ], done.stderr


def test_a_timeline_that_a_script_would_start_is_no_file():
    script = (
        "import os; from horovod.common.settings import translate\n"
        "print(*translate(os.environ), os.environ.get('DDL_TIMELINE'))"
    )
    done = ended(script, STAND_IN, HOROVOD_TIMELINE="DYNAMIC", HOROVOD_ELASTIC_TIMEOUT="30")
    assert done.stdout == (
        "HOROVOD_TIMELINE=DYNAMIC has no effect with ddl in Horovod's place: a timeline is of the "
        "whole job here; set it to the name of a file. None\n"
    ), done.stderr


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (["-np", "2"], "--np 2"),
        (["-np", "2", "--min-np", "1"], "--np 2 --min-np 1 --elastic-timeout 30"),
        (
            ["-np", "2", "--min-np", "1", "--elastic-timeout", "7"],
            "--np 2 --min-np 1 --elastic-timeout 7",
        ),
    ],
)
def test_horovodrun_waits_for_hosts_as_long_as_the_environment_says(words: list[str], taken: str):
    script = (
        f"import sys; sys.argv[1:] = {[*words, 'true']!r}\n"
        "from horovod.runner import launch; launch._ddl_run = lambda words: print(*words)\n"
        "launch.main(sys.argv[1:])"
    )
    done = ended(script, STAND_IN, HOROVOD_ELASTIC_TIMEOUT="30")
    assert (done.stdout, done.stderr) == (f"{taken} -- true\n", "")


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 3600),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, 2592000),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, 2592000),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, 3600),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1", "DDL_STALL_TIMEOUT": "9"}, 9),
    ],
)
def test_a_rank_may_be_waited_for_as_long_as_with_horovod(settings: dict[str, str], seconds: int):
    script = (
        "import os; from horovod.common.settings import translate\n"
        "print(translate(os.environ), os.environ['DDL_STALL_TIMEOUT'])"
    )
    assert ended(script, STAND_IN, **settings).stdout == f"[] {seconds}\n"


def test_cuts_a_list_into_parts():
    script = (
        "from horovod.common.util import split_list, num_rank_is_power_2 as power\n"
        "print(split_list([1, 2, 3, 4, 5], 3), split_list([1], 2), power(6), power(8))"
    )
    assert ended(script).stdout == "[[1, 2], [3, 4], [5]] [[1]] False True\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, "0.28.1"),
        (["-cb"], 0, "[X] MPI"),
        (["-np", "2", "-H", "a host:2", "python", "x.py"], 2, "'a host:2' is no host"),
        (["-np", "2", "-H", "localhost", "python", "x.py"], 2, "there are 1 slots: localhost"),
        (["python", "x.py"], 2, "how many ranks?"),
        (["-np", "2"], 2, "no command given"),
    ],
)
def test_horovodrun_says_what_it_is_and_what_it_cannot(words: list[str], code: int, said: str):
    script = f"import sys; sys.argv[1:] = {words!r}; from ddl_ops.horovodrun import main; main()"
    done = ended(script)
    assert done.returncode == code and said in done.stdout + done.stderr, done


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["-np", "2", "--max-np", "4", "--reset-limit=1", "--slots-per-host", "2"],
            "--max-np without --min-np has no effect here\n"
            "horovodrun: --reset-limit without --min-np has no effect here\n"
            "horovodrun: --slots-per-host without --min-np has no effect here\n",
        ),
        (["-np", "2", "--min-np", "3"], "--min-np 3 is more than --np 2.\n"),
        (["--min-np", "3", "--max-np", "2"], "--min-np 3 is more than --max-np 2.\n"),
        (["-np", "3", "--min-np", "2", "--max-np", "2"], "--np 3 is more than --max-np 2.\n"),
        (["--min-np", "3", "-H", "localhost:2"], "3 ranks are asked for, and there are 2 slots"),
        (
            ["-np", "2", "--host-discovery-script", "./none"],
            "--host-discovery-script ./none: /bin/sh: ",  # which says why
        ),
    ],
)
def test_horovodrun_says_what_bounds_of_ranks_cannot_be(words, said, tmp_path: Path):
    call = ["true"] if "without" in said else ["false"]
    script = f"import sys; sys.argv[1:] = {[*words, *call]!r}\n"
    script += "from ddl_ops.horovodrun import main; main()"
    done = ended(script, OPS.parents[2], folder=tmp_path)
    assert said in done.stderr and done.returncode == (0 if call == ["true"] else 2), done
    assert not (tmp_path / ".ddl-run").exists()


@pytest.mark.parametrize("flag", ["--network", "--a", "--log", "--auto", "--stall-check-"])
def test_horovodrun_leaves_the_scripts_own_flags_to_the_script(flag: str):
    words = ["-np", "2", "python", "train.py", flag, "9", "-np", "3"]
    script = (
        f"import sys; sys.argv[1:] = {words!r}; from horovod.runner import launch\n"
        "launch._ddl_run = lambda words: print(*words)\n"
        "launch.main(sys.argv[1:])"
    )
    done = ended(script, STAND_IN)
    assert done.stdout == f"--np 2 -- python train.py {flag} 9 -np 3\n", done.stderr


def test_horovodrun_takes_every_network_interface_and_flag_of_log_lines():
    script = (
        "import sys; from horovod.runner import launch\n"
        "launch._ddl_run = lambda words: print(*words)\n"
        "launch.main(sys.argv[1:])"
    )
    words = ["-np", "2", "--network-interface", "eth0", "--network-interfaces", "eth1,eth0"]
    words += ["--network-interface=ib0", "--log-without-timestamp", "--no-log-hide-timestamp"]
    words += ["-prefix-timestamp", "-p", "2222", "true"]
    done = ended(f"import sys; sys.argv[1:] = {words!r}\n{script}", STAND_IN)
    assert done.stdout == "--np 2 --network eth0,eth1,ib0 --ssh-port 2222 -- true\n", done.stderr
    assert done.stderr == (
        "horovodrun: --no-log-hide-timestamp has no effect here\n"
        "horovodrun: -prefix-timestamp has no effect here\n"
    )


@pytest.mark.parametrize(("flag", "disabled"), [("--no-stall-check", "1"), ("--stall-check", "")])
def test_horovodrun_lets_ranks_wait_for_ever(flag: str, disabled: str):
    script = (
        f"import os, sys; sys.argv[1:] = ['-np', '2', {flag!r}, 'true']\n"
        "from horovod.runner import launch; launch._ddl_run = lambda words: 0\n"
        "launch.main(sys.argv[1:]); print(os.environ.get('HOROVOD_STALL_CHECK_DISABLE', ''))"
    )
    done = ended(script, STAND_IN)
    assert (done.stdout, done.stderr) == (f"{disabled}\n", "")


def test_horovodrun_takes_a_configuration_file(tmp_path: Path):
    from_file = (
        "import sys; from horovod.runner import launch\n"
        "launch._ddl_run = lambda words: print(*words)\n"
        "import os; launch.main(sys.argv[1:]); print(os.environ['HOROVOD_FUSION_THRESHOLD'],"
        " os.environ.get('HOROVOD_LOG_LEVEL'), os.environ.get('HOROVOD_STALL_CHECK_DISABLE'))"
    )
    file = tmp_path / "settings.yaml"
    file.write_text(
        "controller: gloo\nparams: {fusion_threshold_mb: 2, cycle_time_ms: 5}\n"
        "timeline: {filename: t.json}\nlogging: {level: INFO}\nstall_check: {enabled: false}\n"
    )
    words = ["-np", "2", "--config-file", str(file), "--log-level", "debug", "true"]
    done = ended(f"import sys; sys.argv[1:] = {words!r}\n{from_file}", STAND_IN)
    assert done.stdout == "--np 2 --timeline t.json -- true\n2097152 debug 1\n", done.stderr
    assert done.stderr == (
        "horovodrun: controller of --config-file has no effect here\n"
        "horovodrun: params.cycle_time_ms of --config-file has no effect here\n"
    )
    words.insert(0, "--stall-check")
    done = ended(f"import sys; sys.argv[1:] = {words!r}\n{from_file}", STAND_IN)
    assert done.stdout.endswith(" debug None\n"), done
    for text, said in (
        ("- a", "it has no sections"),
        ("a: [", "it is no YAML"),
        ("params: {fusion_threshold_mb: much}", "params.fusion_threshold_mb is 'much', no float"),
    ):
        file.write_text(text)
        done = ended(f"import sys; sys.argv[1:] = {words!r}\n{from_file}", STAND_IN)
        assert done.returncode == 2 and said in done.stderr
    words[4] = str(tmp_path / "none")
    done = ended(f"import sys; sys.argv[1:] = {words!r}\n{from_file}", STAND_IN)
    assert done.returncode == 2 and "No such file" in done.stderr


def test_horovodrun_of_an_installed_one_goes_before(installed: Path):
    (installed / "horovod" / "runner").mkdir()
    (installed / "horovod" / "runner" / "launch.py").write_text(
        "def run_commandline(): print('theirs')\n"
    )
    assert ended("from ddl_ops.horovodrun import main; main()", installed).stdout == "theirs\n"
