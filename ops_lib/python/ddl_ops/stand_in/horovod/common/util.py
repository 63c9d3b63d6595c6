"""Questions about the installation, and small things that scripts and tests import."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from typing import Any

EXTENSIONS = ["tensorflow"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a front-end for the framework of that name."""
    del verbose
    return ext_base_name in EXTENSIONS


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Nothing was left out when this was built."""
    del ext_name, ext_env_var, pkg_path, args


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU."""
    del ext_base_name, verbose
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def mpi_built(verbose: bool = False) -> bool:
    """True: the ops are built on MPI."""
    del verbose
    return True


def gloo_built(verbose: bool = False) -> bool:
    """False: there is no Gloo here."""
    del verbose
    return False


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as a number, 0 where GPU tensors do not go over NCCL."""
    del verbose
    return nccl_version()


def ddl_built(verbose: bool = False) -> bool:
    """False: IBM's library of that name is not used."""
    del verbose
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: there is no oneCCL here."""
    del verbose
    return False


def nccl_version() -> int:
    """As nccl_built."""
    from ddl_ops.lifecycle import initialised
    from ddl_ops.loader import runtime

    return 1 if initialised() and runtime().ddl_device_collectives() else 0


@contextlib.contextmanager
def env(**kwargs: str) -> Iterator[None]:
    """Inside, these variables are in the environment."""
    before = {name: os.environ.get(name) for name in kwargs}
    os.environ.update(kwargs)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether so many ranks are a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Any], n: int) -> list[list[Any]]:  # noqa: E741  the name is Horovod's
    """Cuts a list into n parts, the first of which have one more where it does not come out even.

    Empty parts are left out.
    """
    small, larger = divmod(len(l), n)
    parts, begin = [], 0
    for number in range(n):
        end = begin + small + (number < larger)
        parts.append(list(l[begin:end]))
        begin = end
    return [part for part in parts if part]


def is_iterable(x: Any) -> bool:
    """Whether one can go through it."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is `target` or later. ValueError unless both have three numbers."""
    for text in (ver, target):
        if not re.match(r"\d+\.\d+\.\d+", text):
            raise ValueError(f"{text!r} is no version of three numbers, as in 2.21.0.")
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def pickled(obj: Any) -> bytes:
    """An object for a process of the same script: by cloudpickle if pickle cannot take it.

    By pickle first, so that objects of the script's own classes stay of these.
    """
    try:
        return pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError):
        import cloudpickle  # rarely needed

        return bytes(cloudpickle.dumps(obj))


def unpickled(data: bytes | memoryview) -> Any:
    """What `pickled` has made. It may run anything: of the job's own ranks only."""
    return pickle.loads(data)  # noqa: S301
