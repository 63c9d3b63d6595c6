"""What the ranks' Python is asked before anything starts."""

from __future__ import annotations

import sys

import pytest

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.launchers.loopback import confined


def test_a_python_without_the_ops_is_named_with_what_to_install(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    said = f"{python} has no module ddl_ops. Install ddl-ops there, `{python} -m pip install ./ops"
    with pytest.raises(SubmitFailed, match=said) as caught:
        confined(str(python), {}, mpi=True)
    assert caught.value.retryable is False


def test_a_python_that_does_not_run_says_why(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no libpython >&2; exit 127\n")
    python.chmod(0o755)
    with pytest.raises(SubmitFailed, match="does not run: no libpython"):
        confined(str(python), {}, mpi=True)
