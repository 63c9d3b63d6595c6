"""What importing costs, and that a user's ddl.py can take the place of the front-end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[3] / "ops_lib" / "python"


def test_light_modules_import_no_tensorflow() -> None:
    code = (
        "import sys, ddl_ops, ddl_ops.environment, ddl_ops.progress;"
        "print([m for m in sys.modules if m.split('.')[0] in ('tensorflow', 'numpy', 'keras')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(PYTHON)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_ddl_ops_never_imports_ddl() -> None:
    pattern = re.compile(r"^\s*(import ddl\b(?!_)|from ddl\b(?!_))", re.MULTILINE)
    sources = list((PYTHON / "ddl_ops").rglob("*.py"))
    assert len(sources) > 5
    assert [path.name for path in sources if pattern.search(path.read_text())] == []
