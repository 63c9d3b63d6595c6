"""Planted failures. What ends the log, the page and the command line name the cause; and the cure.

Each is made in a manifest and a script that work, which the last test here shows. They go the road
that Airflow's tasks go, step by step, as far as it takes them. TESTS_WHY=1 plants more of them, and
prints what was said of each (with ``-s``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from airflow.sdk.exceptions import AirflowException
from airflow.serialization.serialized_objects import DagSerialization

from ddl_airflow import cli
from ddl_airflow.core.errors import DdlError
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.dag import dags_from
from ddl_airflow.manifest_dag import dag_from
from ddl_airflow.operators.base import layout_of
from ddl_airflow.plugin.training import read_failure
from tests.unit.ddl_airflow.mistakes import (
    LONG,
    MANIFEST,
    MISTAKES,
    SCRIPT,
    TRAINED,
    Mistake,
    changed,
    write_data,
)

# An Airflow in an environment of its own has no TensorFlow.
RANKS_PYTHON = os.environ.get("AIRFLOW__DDL__PYTHON", sys.executable)
PLANTED = MISTAKES | (LONG if os.environ.get("TESTS_WHY") else {})


@dataclass(frozen=True)
class Said:
    """What a person reads of a failure; each empty if nothing failed.

    Attributes:
        log: the first line of the error that ends it.
        cause, fix: the page's one line, and what it says to do.
        cli: the line of the command that a person asks: validate, or lineage of the run.
    """

    log: str = ""
    cause: str = ""
    fix: str = ""
    cli: str = ""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The model that the script trains, alone."""
    folder = tmp_path_factory.mktemp("trained")
    write_data(folder / "data")
    env = {"DATA_DIR": str(folder / "data"), "RESULT_DIR": str(folder), "PARAM_EPOCHS": "1"}
    subprocess.run([RANKS_PYTHON, "-c", SCRIPT], env=os.environ | env, check=True)
    return folder / "model.keras"


@pytest.fixture
def road(workspace, context_of, tmp_path, request, capsys) -> Callable[[Mistake], Said]:
    """road(mistake) -> what is said of what ends the road."""

    def asked(*words: str | Path) -> str:
        capsys.readouterr()
        cli.main([*map(str, words)])
        said = capsys.readouterr()
        return said.err + said.out

    def refused(path: Path, error: DdlError) -> Said:
        """A manifest that makes no DAG: the page is Airflow's, of import errors."""
        (dag,) = dags_from(path.parent).values()
        with pytest.raises(Exception) as shown:  # as Airflow catches all
            DagSerialization.to_dict(dag)
        cause = str(shown.value).strip().splitlines()[0]
        told = asked("validate", path).splitlines()[0]
        return Said(str(error).splitlines()[0], cause, "", told)

    def go(mistake: Mistake) -> Said:
        folder = tmp_path / "digits"
        write_data(folder / "data")
        (folder / "train.py").write_text(changed(mistake.of, mistake.script))
        if mistake.of is TRAINED:
            shutil.copy(request.getfixturevalue("trained"), folder / "trained.keras")
        for name, text in mistake.beside.items():
            if name.endswith("/"):
                (folder / name).mkdir()
            else:
                (folder / name).write_text(text)
        path = folder / "manifest.yml"
        path.write_text(changed(MANIFEST, mistake.manifest))
        try:
            dag = dag_from(load_manifest(path), path)
        except DdlError as error:
            return refused(path, error)
        context = context_of(dag.dag_id)
        context["params"] = {name: dag.params[name] for name in dag.params}
        for task in dag.topological_sort():
            try:
                task.render_template_fields(context)
                task.execute(context)
            except AirflowException as error:
                layout = layout_of(context)
                shown = read_failure(layout)
                (told,) = re.findall("^why +(.*)$", asked("lineage", layout.root), re.MULTILINE)
                log = str(error).splitlines()[0]
                return Said(log, shown["cause"].splitlines()[0], shown["fix"], told)
        return Said()

    return go


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, tuple[Said, bool]]]:
    """What was said of each, and whether it was right; printed in the end."""
    said: dict[str, tuple[Said, bool]] = {}
    yield said
    if os.environ.get("TESTS_WHY"):
        print("\n")
        for name, (one, right) in said.items():
            print(f"{'right' if right else 'WRONG'}  {name}\n       page: {one.cause}")
            print(f"       cli:  {one.cli}")
        print(f"{sum(right for _, right in said.values())} of {len(said)} are right")


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_ends_in_its_cause_and_cure(road, name, told):
    mistake = PLANTED[name]
    if mistake.cure == "not valid Python" and sys.executable != RANKS_PYTHON:
        pytest.skip("the ranks have another Python, and only that one knows its syntax")
    said = road(mistake)
    lines = [said.log, said.cause, said.cli]
    right = [bool(re.search(mistake.cause, line)) for line in lines]
    told[name] = said, all(right)
    assert all(right), said
    assert re.search(mistake.cure, said.log)
    assert re.search(mistake.cure, f"{said.cause} {said.fix}")


def test_without_a_mistake_it_trains_and_publishes(road, tmp_path):
    assert road(Mistake("", "")) == Said()
    (pointer,) = (tmp_path / "digits" / "results").glob("*/production.json")
