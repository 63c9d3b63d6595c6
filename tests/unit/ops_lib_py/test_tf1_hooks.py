from __future__ import annotations

import os
import subprocess
import sys

import pytest

tf = pytest.importorskip("tensorflow")

from ddl_ops.tf1_hooks import session_config  # noqa: E402


def test_session_shows_one_gpu_and_grows() -> None:
    config = session_config(None, 2)
    assert config.gpu_options.visible_device_list == "2"
    assert config.gpu_options.allow_growth


def test_session_keeps_the_scripts_settings() -> None:
    own = tf.compat.v1.ConfigProto(allow_soft_placement=True, inter_op_parallelism_threads=3)
    config = session_config(own, 1)
    assert config.allow_soft_placement and config.inter_op_parallelism_threads == 3
    assert config.gpu_options.visible_device_list == "1"
    assert own.gpu_options.visible_device_list == ""  # a copy


def test_gpu_chosen_by_the_script_stays() -> None:
    own = tf.compat.v1.ConfigProto()
    own.gpu_options.visible_device_list = "0"
    assert session_config(own, 3).gpu_options.visible_device_list == "0"


RANK_5 = {
    **{"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    **{"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
}
OPENED = (
    "ddl: rank 5: TensorFlow has opened all GPUs of this host before `import ddl`, and the rank "
    "trains on the first. Import ddl before anything runs.\n"
)


@pytest.mark.parametrize(
    ("before", "rank", "chosen", "said"),
    [
        ("", RANK_5, "gpu1\n", ""),
        ("", {}, "", ""),
        ("divided = True", RANK_5, "gpu1\n", ""),
        ("seen = ['gpu0']", RANK_5, "", ""),  # by the script
        ("opened = True", RANK_5, "", OPENED),
        ("", RANK_5 | {"DDL_GPUS": "all"}, "", ""),
    ],
)
def test_a_script_that_calls_init_itself_has_a_gpu_of_its_own(before, rank, chosen, said):
    """Without DDL_OPTIONS, as under an mpirun of one's own: `import ddl` alone decides."""
    script = f"""
import tensorflow as tf
seen = every = ["gpu0", "gpu1"]
opened = divided = False
{before}
session = tf.compat.v1.Session.__mro__[1]
as_it_was = session.__init__
def choose(gpu, kind):
    if opened:
        raise RuntimeError("Visible devices cannot be modified after being initialized")
    print(gpu)
def grow(gpu, grows):
    if divided:
        raise ValueError("Cannot set memory growth on device when virtual devices configured")
tf.config.list_physical_devices = lambda kind: every
tf.config.get_visible_devices = lambda kind: seen
tf.config.set_visible_devices = choose
tf.config.experimental.set_memory_growth = grow
import ddl
# What sessions see is ours to say only where the rank's GPU is.
assert (session.__init__ is as_it_was) is not {bool(chosen)}
"""
    kept = {n: t for n, t in os.environ.items() if not n.startswith(("OMPI_", "DDL_", "PMI"))}
    call = [sys.executable, "-c", script]
    done = subprocess.run(call, env=kept | rank, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, chosen), done.stderr
    lines = [line for line in done.stderr.splitlines(True) if line.startswith("ddl:")]
    assert "".join(lines) == said
