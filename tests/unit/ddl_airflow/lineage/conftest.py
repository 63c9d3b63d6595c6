from __future__ import annotations

import dataclasses

import pytest

from ddl_airflow.core.errors import ObjectArchived
from ddl_airflow.storage.filesystem import FolderStore


@pytest.fixture
def archives(monkeypatch):
    """archives(*keys): these are in a storage class out of which they are to be restored."""
    read, listing, inside = FolderStore.read_version, FolderStore.list, []

    def is_inside(self, key):
        return f"{self.uri}/{key}" in inside

    def read_version(self, key):
        if is_inside(self, key):
            raise ObjectArchived(f"{self.uri}/{key}: it is archived.")
        return read(self, key)

    def listed(self):
        return [
            dataclasses.replace(obj, archived="GLACIER" * is_inside(self, obj.key))
            for obj in listing(self)
        ]

    def archive(store, *keys):
        inside[:] = [f"{store.uri}/{key}" for key in keys]

    read_bytes = FolderStore.read_bytes

    def bytes_of(self, key):
        if is_inside(self, key):
            raise ObjectArchived(f"{self.uri}/{key}: it is archived.")
        return read_bytes(self, key)

    monkeypatch.setattr(FolderStore, "read_version", read_version)
    monkeypatch.setattr(FolderStore, "read_bytes", bytes_of)
    monkeypatch.setattr(FolderStore, "list", listed)
    return archive
