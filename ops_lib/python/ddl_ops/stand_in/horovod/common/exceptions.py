"""Horovod's exceptions."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective has failed, and the state is to be restored."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have come or gone. Nothing here raises it: the launcher starts the job again."""

    def __init__(self, skip_sync: bool = False) -> None:
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod was compiled for another framework. Nothing here raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} is {installed_version}, but Horovod was built for {version}")
        self.name = name
        self.version = version
        self.installed_version = installed_version
