"""The tested versions of Airflow: what docs/provider.md says of them, and how that is made."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made():
    """scripts/airflow_matrix.py"""
    spec = spec_from_file_location("airflow_matrix", ROOT / "scripts" / "airflow_matrix.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documentation_has_a_row_for_each_way_of_each_version(made):
    """It is made by `make test-airflow`, which is too long for here."""
    _, _, rest = made.PAGE.read_text().partition(made.BEGIN)
    table, end, _ = rest.partition(made.END)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.strip().splitlines()]
    assert end
    wanted = [(version, way) for version in made.versions() for way in (*made.WAYS, "all")]
    assert [tuple(row[:2]) for row in rows[2:]] == wanted
    assert not re.search(r"failed|\| –", table)


def test_what_is_required_of_airflow_are_the_versions_that_are_tested(made):
    project = (ROOT / "pyproject.toml").read_text()
    required = SpecifierSet(re.search(r'"apache-airflow([^"-]+)"', project)[1])
    released = [one for one in made.versions() if not Version(one).is_prerelease]
    assert released and all(one in required for one in released)
    newest = Version(released[-1])
    assert f"{newest.major}.{newest.minor + 1}" not in required
    # Else pip would install the next beta for who asks for none.
    assert not required.prereleases


RESULTS = """\
<testsuites><testsuite>
<testcase classname="tests.unit.ddl_airflow.test_bundle" name="test_a" />
<testcase classname="tests.unit.ddl_airflow.test_importer" name="test_b"><skipped /></testcase>
<testcase classname="tests.unit.ddl_airflow.test_importer" name="test_c" />
<testcase classname="tests.unit.ddl_airflow.test_form" name="test_d"><failure /></testcase>
<testcase classname="tests.unit.ddl_airflow.test_form" name="test_e"><error /></testcase>
</testsuite></testsuites>
"""
RUNNING = """\
<testsuites><testsuite>
<testcase classname="tests.integration.test_manifests" name="test_edits_are_picked_up" />
<testcase classname="tests.integration.test_manifests" name="test_a_loader_does_without" />
<testcase classname="tests.integration.test_data_change" name="test_x" />
</testsuite></testsuites>
"""


def test_the_matrix_counts_what_passed_was_skipped_and_failed(made, tmp_path):
    results = tmp_path / "airflow-3.9.0" / "results"
    results.mkdir(parents=True)
    (results / "unit.xml").write_text(RESULTS)
    (results / "running.xml").write_text(RUNNING)
    assert made.matrix(tmp_path, ["3.9.0"]).splitlines()[2:] == [
        "| 3.9.0 | bundle | 1 passed | 1 passed | 1 passed | failed |",
        "| 3.9.0 | loader | – | 1 passed |  |  |",
        "| 3.9.0 | importer | 1 passed, 1 skipped | – |  |  |",
        "| 3.9.0 | all | 2 passed, 1 skipped, 2 failed | | | |",
    ]
