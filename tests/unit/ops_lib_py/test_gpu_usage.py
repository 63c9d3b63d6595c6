"""How busy a rank's GPU is, as the shim notes it, where a library answers as a driver of four GPUs.

No machine of ours has a GPU: what is real here is the shim, ``nvidia-ml-py`` and its way to the
library, not the library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import until, within
from tests.unit.ops_lib_py.test_rank import Shim, environment

# GPU n computes 10 + n, then 20 + n percent of the time, and n + 1 GiB of it are taken. Those
# whose number is not below LOST do not answer.
DRIVER = """\
#include <stdio.h>
#include <stdlib.h>
int nvmlInitWithFlags(unsigned) { return getenv("NO_DRIVER") ? 9 : 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 4; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, size_t* device) { *device = index + 1; return 0; }
int nvmlDeviceGetUUID(size_t device, char* uuid, unsigned size) {
  snprintf(uuid, size, "GPU-%zu%zu-9f", device, device);
  return 0;
}
int nvmlDeviceGetUtilizationRates(size_t device, unsigned* rates) {
  static unsigned busy = 0;
  if (device > strtoul(getenv("LOST"), 0, 10)) return 15;
  rates[0] = (busy += 10) + device - 1;
  return 0;
}
int nvmlDeviceGetMemoryInfo(size_t device, unsigned long long* memory) {
  memory[0] = 8ull << 30;
  memory[2] = (unsigned long long)device << 30;
  return 0;
}
"""
# What is known of the rank's GPU after a look, or when there is nothing to look at.
LOOKS = """\
import json, os, sys, time
from ddl_ops.gpu_usage import GpuUsage
usage = GpuUsage(os.environ, int(sys.argv[1]))
usage.start()
while not (told := usage.taken()) and usage.is_alive(): time.sleep(0.01)
print(json.dumps(told or usage.taken()))
"""
UNTIL = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a host that has it."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "nvml.c").write_text(DRIVER)
    words = ["gcc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"]
    subprocess.run(words, cwd=folder, check=True)
    return {"LD_LIBRARY_PATH": str(folder), "LOST": "5"}


def _taken(local_rank: int, variables: dict[str, str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", LOOKS, str(local_rank)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=within(20),
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("local_rank", "visible", "gpu"),
    [
        (2, None, 2),
        (6, None, 2),  # ranks share GPUs
        (0, "3", 3),
        (1, "2, 0", 0),
        (1, "GPU-22,GPU-44-9f", 3),
        (1, "1,9,0", 1),  # as in CUDA: what follows a name that is none is not shown
    ],
)
def test_the_ranks_gpu_is_looked_at(driver, local_rank, visible, gpu) -> None:
    told = _taken(local_rank, driver | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    taken = (gpu + 1) << 30
    busy = 10 + gpu
    assert told == {"gpu": busy, "gpu_average": busy, "gpu_memory": taken, "gpu_peak": taken}


@pytest.mark.parametrize(
    "variables",
    [
        {"NO_DRIVER": "1"},
        {"LOST": "0"},
        {"LD_LIBRARY_PATH": ""},
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "-1"},
        {"CUDA_VISIBLE_DEVICES": "GPU-"},  # more than one has that beginning
    ],
    ids=lambda variables: "=".join(*variables.items()),
)
def test_without_one_nothing_is_said_of_it(driver, variables) -> None:
    assert _taken(0, driver | variables) == {}


def test_the_shim_notes_it_of_its_rank(tmp_path: Path, driver: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text(UNTIL)
    env = environment(tmp_path, rank=1, size=2) | driver
    shim = Shim(tmp_path, ["--command", "python train.py"], env)
    path = tmp_path / "rank-1.usage"
    told: dict[str, float] = {}

    def looked_at_twice() -> bool:  # the driver says 11, then 21, ...
        if path.exists():
            told.update(json.loads(path.read_text()))
        return told.get("gpu", 0) > 11

    until(looked_at_twice, 30, shim.process.poll)
    (tmp_path / "go").touch()
    assert shim.end().code == 0, shim.errors
    assert shim.errors == ""
    assert told["gpu_memory"] == 2 << 30
    assert 11 < told["gpu_average"] <= told["gpu"]
