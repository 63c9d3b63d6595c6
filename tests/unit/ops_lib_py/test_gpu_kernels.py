"""Which kernels TensorFlow is told of, without a GPU: stand-ins of the libraries, names alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ddl_ops import loader

from tests.limits import within

ROOT = Path(__file__).resolve().parents[3]

# Says for each op the devices that it has kernels for; then reduces on one rank, without a device.
SCRIPT = """
import json
from ddl_ops.loader import device_of_collectives, operations, runtime
from tensorflow.python.framework import kernels
ops = ("AllReduce", "AllReduceN", "Bcast", "AllGather", "Init")
found = {}
for op in ops:
    operations()
    registered = kernels.get_registered_kernels_for_op(op).kernel
    found[op] = sorted(kernel.device_type for kernel in registered)
    on_gpu = [k for k in registered if k.device_type == "GPU"]
    if op == "AllGather" and on_gpu:
        found["on host"] = list(on_gpu[0].host_memory_arg)
        found["types"] = len(on_gpu[0].constraint[0].allowed_values.list.type)
operations().init(-1, mode="")
found["device collectives"] = runtime().ddl_device_collectives()
with device_of_collectives():
    total = operations().all_reduce_n([[1.5, 2.5], [3.5]], op="sum")
found["total"] = [t.numpy().tolist() for t in total]
found["where"] = total[0].device[-5:]
runtime().ddl_shutdown()
print(json.dumps(found))
"""


def _run(**environment: str) -> dict[str, object]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("DDL_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=kept
        | {"PYTHONPATH": str(ROOT / "ops_lib" / "python"), "TF_CPP_MIN_LOG_LEVEL": "3"}
        | environment,
        capture_output=True,
        text=True,
        timeout=within(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries that have every name we look up, and no work behind it."""
    if not loader.LIBRARY.exists():
        pytest.skip("the ops library is not built: make ops")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++: apt-get install g++")
    folder = tmp_path_factory.mktemp("lib")
    source = (ROOT / "ops_lib" / "cc" / "comm" / "nccl_library.cc").read_text()
    names = re.findall(r"DDL_LOOK_UP\((?:nccl|cuda), (\w+)\)", source)
    assert len(names) == 20
    (folder / "names.c").write_text(
        "".join(f"int {name}(void) {{ return 1; }}\n" for name in names)
    )
    for library in ("libcuda.so.1", "libcudart.so.12", "libnccl.so.2"):
        subprocess.run(
            [compiler, "-x", "c", "-shared", "-o", str(folder / library), str(folder / "names.c")],
            check=True,
        )
    return folder


def test_gpu_kernels_are_there_where_the_libraries_are(stand_ins: Path) -> None:
    found = _run(LD_LIBRARY_PATH=str(stand_ins))
    for op in ("AllReduce", "AllReduceN", "Bcast", "AllGather"):
        assert found[op] == ["CPU", "GPU"], found
    assert found["Init"] == ["CPU"]
    assert found["on host"] == ["sizes"]
    assert found["types"] == 14  # the 15 plain types without int32
    # TensorFlow chooses, and takes the CPU where there is no GPU.
    assert found["device collectives"] == 1
    assert (found["total"], found["where"]) == ([[1.5, 2.5], [3.5]], "CPU:0")


def test_host_setting_leaves_gpus_alone(stand_ins: Path) -> None:
    found = _run(LD_LIBRARY_PATH=str(stand_ins), DDL_GPU="host")
    assert found["AllReduceN"] == found["AllGather"] == ["CPU"], found
    assert found["device collectives"] == 0
    assert found["total"] == [[1.5, 2.5], [3.5]]
