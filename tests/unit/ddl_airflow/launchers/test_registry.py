from __future__ import annotations

import subprocess
import sys

import pytest

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.launchers.registry import launcher


@pytest.mark.parametrize("kind", ["local", "slurm", "fake"])
def test_a_kind_gives_a_new_launcher_of_that_kind(kind):
    assert launcher(kind).kind == kind
    assert launcher(kind) is not launcher(kind)
    # A run may choose it where the manifest is for Slurm.
    assert launcher(kind, {"partition": "gpu"}).kind == kind


def test_a_job_on_kubernetes_is_found_where_nothing_is_known_of_its_manifest():
    assert launcher("kubernetes").kind == "kubernetes"


def test_unknown_kind_names_the_known_ones_and_is_not_retried():
    with pytest.raises(
        SubmitFailed, match="'slrum' is not known.*fake, kubernetes, local, slurm"
    ) as caught:
        launcher("slrum")
    assert caught.value.retryable is False


def test_a_kind_whose_module_is_not_here_names_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ddl_airflow.launchers.slurm", None)
    with pytest.raises(SubmitFailed, match="launcher 'slurm': .* cannot be loaded: ") as caught:
        launcher("slurm")
    assert caught.value.retryable is False


def test_a_backend_is_imported_only_when_used():
    code = (
        "import sys; from ddl_airflow.launchers.registry import launcher; launcher('fake');"
        "assert 'ddl_airflow.launchers.fake' in sys.modules;"
        "assert 'ddl_airflow.launchers.local' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
