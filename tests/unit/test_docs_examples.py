"""What the documentation shows is what the program takes: manifests, settings and commands.

Each block is held to the program's own readers. tests/parallel/test_documents.py runs scripts,
tests/parallel/test_tutorial.py the tutorial.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from typing import Any

import kubernetes_validate
import pytest
import yaml
from airflow.cli import cli_parser

from ddl_airflow import cli, run
from ddl_airflow.commands.lineage import with_question
from ddl_airflow.core.errors import ManifestError
from ddl_airflow.core.manifest.load import load_manifest_text
from ddl_airflow.core.manifest.rights import RightsTable
from ddl_airflow.core.manifest.site import compute_table
from tests.pages import PAGES, ROOT, Block, blocks, name_of, spans

BLOCKS = [block for page in PAGES for block in blocks(page)]
# What a page leaves out of a manifest because it is about something else.
REST: dict[str, Any] = {
    "model_definition": {
        "name": "example",
        "framework": {"name": "tensorflow"},
        "execution": {
            "command": "python train.py",
            "compute_configuration": {"name": "cpu"},
        },
    },
    "training_data_reference": {"type": "fs", "source": {"path": "./data"}},
    "training_results_reference": {"type": "fs", "target": {"path": "./results"}},
}


def _of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def _by_place(block: Block) -> str:
    return block.place


def _check_yaml(block: Block) -> str:
    """Holds the block to whoever reads it in earnest; returns who that is."""
    value = yaml.safe_load(block.text)
    if isinstance(value, dict) and "compute" in value:
        compute_table(json.dumps(value))
        return "[ddl] compute"
    if isinstance(value, dict) and "rights" in value:
        assert RightsTable.read(json.dumps(value)) is not None
        return "[ddl] manifest_rights"
    if isinstance(value, dict) and "rules" in value:
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "x"},
        }
        kubernetes_validate.validate(role | value, "1.31", strict=True)
        return "Kubernetes"
    if isinstance(value, dict) and "services" in value:
        site = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
        assert value["services"].keys() <= site["services"].keys()
        return "Compose"
    if isinstance(value, list):
        offered = {
            hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
        }
        assert {hook["id"] for repo in value for hook in repo["hooks"]} <= offered
        return ".pre-commit-config.yaml"
    if value is None:  # a comment for editors
        (schema,) = re.findall(r"\$schema=(\S+)", block.text)
        assert (ROOT / "docs" / schema).is_file()
        return "editors"
    load_manifest_text(_whole(block.text, value), block.place)
    return "a manifest"


def _whole(text: str, value: dict[str, Any]) -> str:
    """The manifest with what its page leaves out: version and nodes as the part needs them."""
    servers = value.get("distribution") == "parameter_server"
    rest = copy.deepcopy({name: part for name, part in REST.items() if name not in value})
    if "model_definition" in rest:
        rest["model_definition"]["framework"]["version"] = "1.15" if servers else "2.21"
        nodes = len(value.get("launcher", {}).get("hosts", "12"))
        rest["model_definition"]["execution"]["compute_configuration"]["nodes"] = nodes
    return text + (yaml.safe_dump(rest) if rest else "")


@pytest.mark.parametrize("block", _of("yaml"), ids=_by_place)
def test_yaml_is_taken_by_what_reads_it(block):
    assert _check_yaml(block)


def test_manifests_of_the_documents_name_fields_that_there_are():
    """A page that is read as something else would be held to nothing."""
    kinds = [_check_yaml(block) for block in _of("yaml")]
    assert kinds.count("a manifest") >= 12
    with pytest.raises(ManifestError, match="Did you mean schedule"):
        _check_yaml(Block("here:1", "yaml", "shedule: '@daily'\n"))


@pytest.mark.parametrize("block", _of("ini"), ids=_by_place)
def test_settings_name_classes_that_there_are(block):
    written = ConfigParser(interpolation=None)
    written.read_string(block.text)
    for section in written.values():
        for value in section.values():
            for name in re.findall(r'"(ddl_airflow[\w.]+)"', value):
                module, _, attribute = name.rpartition(".")
                source = ROOT / (module.replace(".", "/") + ".py")
                assert attribute in {
                    node.name
                    for node in ast.parse(source.read_text()).body
                    if hasattr(node, "name")
                }
        if "dag_bundle_config_list" in section:
            assert json.loads(section["dag_bundle_config_list"])


@pytest.mark.parametrize("block", _of("toml", "json"), ids=_by_place)
def test_toml_and_json_are_such(block):
    assert tomllib.loads(block.text) if block.language == "toml" else json.loads(block.text)


@pytest.mark.parametrize("block", _of("python", "py"), ids=_by_place)
def test_python_compiles_and_what_it_imports_of_ours_is_there(block):
    tree = ast.parse(block.text)
    if any(
        isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddl_airflow")
        for node in tree.body
    ):
        given = {"__name__": "example", "__file__": "/srv/dags/example.py"}
        exec(compile(tree, block.place, "exec"), given)


# -- commands


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block; of one that is shown, ``$`` stands before it."""
    shown = re.search(r"^\$ ", text, re.M)
    for line in text.replace("\\\n", " ").splitlines():
        if shown and not line.startswith("$ "):
            continue
        line = re.sub(r"<[^<>]+>", "X", line.removeprefix("$ "))
        if "[--" in line:  # what may be left out
            yield from _commands(re.sub(r"\[--[^\]]*\]", "", line))
            line = re.sub(r"\[(--[^\]]*)\]", r"\1", line)
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an argument goes on in the next line
            continue
        for mark in (">", "|", "&&", "&"):
            words = words[: words.index(mark)] if mark in words else words
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # of its environment
            del words[0]
        if words:
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def _parse(words: Sequence[str]) -> str:
    """Holds a command to the parser of its program; returns which, or nothing of one not ours."""
    program, *rest = words
    if program == "ddl-airflow":
        cli._parser().parse_args(with_question(rest))
    elif program == "ddl-run":
        run._parser().parse_args(rest)
    elif program == "airflow":
        cli_parser.get_parser().parse_args(rest)
    elif program == "make":
        targets = [word for word in rest if "=" not in word]
        assert set(targets) <= _targets()
    else:
        return ""
    return program


@pytest.mark.parametrize("block", _of("sh", ""), ids=_by_place)
def test_command_lines_are_what_the_programs_take(block, capsys):
    for words in _commands(block.text):
        try:
            _parse(words)
        except SystemExit:
            pytest.fail(f"{shlex.join(words)}: {capsys.readouterr().err}")


def _options(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """What is wrong with the command and options that are named, whatever is left out."""
    parsers = [parser]
    for word in words:
        below = [
            action
            for action in parsers[-1]._actions
            if isinstance(action, argparse._SubParsersAction)
        ]
        if word.startswith("--"):
            name = word.partition("=")[0].rstrip("….,")
            if not any(name in one._option_string_actions for one in parsers):
                return f"no option {name}"
        elif below and word in below[0].choices:
            parsers.append(below[0].choices[word])
        elif below and re.fullmatch(r"[a-z]+", word):
            return f"no command {word}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_within_sentences_name_commands_and_options_that_there_are(page):
    wrong = []
    for span in spans(page):
        found = re.fullmatch(r"(?:\$ |\.venv/bin/)?(ddl-airflow|ddl-run|make)( [^>|]*)?.*", span)
        if not found:
            continue
        words = (found[2] or "").split()
        if found[1] == "make":
            problem = ", ".join({w for w in words if "=" not in w and w.isalpha()} - _targets())
        elif found[1] == "ddl-run":  # what is run has options of its own
            problem = _options(run._parser(), [w for w in words[:1] if w.startswith("--")])
        else:
            problem = _options(cli._parser(), with_question(words))
        if problem:
            wrong.append(f"{span}: {problem}")
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        *("ddl-airflow validdate x.yml", "ddl-airflow validate --formt json x.yml"),
        *("ddl-airflow lineage diff s3://a/b", "ddl-run --pn 2 python train.py"),
        *("airflow dags unpauze digits", "make dogs"),
    ],
)
def test_a_command_that_is_none_is_found(line):
    (words,) = _commands(f"{line}    # a comment\n")
    with pytest.raises((SystemExit, AssertionError)):
        _parse(words)


def test_commands_of_all_kinds_are_found_in_the_documents():
    found = [_parse(words) for block in _of("sh", "") for words in _commands(block.text)]
    assert {"ddl-airflow", "ddl-run", "airflow", "make"} <= set(found)
    assert found.count("ddl-airflow") >= 15
    assert _options(cli._parser(), ["lineage", "list", "--limt"]) == "no option --limt"
    assert _options(cli._parser(), ["promot", "URI"]) == "no command promot"
