"""How busy a rank's GPU is, and how full, as NVIDIA's driver says it.

Nothing is asked of the script. The driver is asked through ``nvidia-ml-py``, which
``ddl-ops[gpu]`` brings; without it, or without a driver, nothing is known. The rank's GPU is the
one that ``ddl.init`` gives it: of those that ``CUDA_VISIBLE_DEVICES`` leaves, that of its local
rank. They are counted by their place on the PCI bus, as CUDA does under
``CUDA_DEVICE_ORDER=PCI_BUS_ID``, or where all GPUs of a host are alike.
Sources: NVML API Reference, Device Queries; CUDA C++ Programming Guide, Environment Variables.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

_EACH_S = 1.0


class GpuUsage(threading.Thread):
    """Asks the driver each second; in a thread, for a GPU that is lost may keep it waiting.

    Args:
        environ: the rank's environment.
        local_rank: the rank's number on its host.
    """

    def __init__(self, environ: Mapping[str, str], local_rank: int) -> None:
        super().__init__(name="ddl-gpu-usage", daemon=True)
        self._visible = environ.get("CUDA_VISIBLE_DEVICES")
        self._local_rank = local_rank
        self._lock = threading.Lock()
        self._lately: list[int] = []
        self._sum = self._looks = self._memory = self._peak = 0

    def run(self) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            devices = list(_visible(pynvml, self._visible))
            while devices:
                device = devices[self._local_rank % len(devices)]
                busy = int(pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
                self._add(busy, int(pynvml.nvmlDeviceGetMemoryInfo(device).used))
                time.sleep(_EACH_S)
        except pynvml.NVMLError:
            return  # no driver; a part of a GPU, which counts no time; one that is lost

    def _add(self, busy: int, memory: int) -> None:
        with self._lock:
            self._lately.append(busy)
            self._sum += busy
            self._looks += 1
            self._memory, self._peak = memory, max(self._peak, memory)

    def taken(self) -> dict[str, float]:
        """What was found out since this was asked last; empty if nothing was.

        Returns:
            ``gpu``, percent of the time in which it computed; ``gpu_average``, the same since the
            start; ``gpu_memory``, bytes of it that are taken, by whoever; ``gpu_peak``, the most
            of these.
        """
        with self._lock:
            if not self._lately:
                return {}
            lately, self._lately = self._lately, []
            return {
                "gpu": round(sum(lately) / len(lately), 1),
                "gpu_average": round(self._sum / self._looks, 1),
                "gpu_memory": self._memory,
                "gpu_peak": self._peak,
            }


def _visible(nvml: Any, names: str | None) -> Iterator[Any]:
    """The GPUs that CUDA shows: all, or those named, up to the first name that is none."""
    every = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
    if names is None:
        yield from every
        return
    for name in map(str.strip, names.split(",")):
        if name.isdecimal():
            found = every[int(name) : int(name) + 1]
        else:
            found = [one for one in every if name and nvml.nvmlDeviceGetUUID(one).startswith(name)]
        if len(found) != 1:
            return
        yield from found
