"""Every command and option, from the parsers of ddl-airflow and ddl-run, as a page.

python scripts/commands_page.py > docs/commands.md
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator

_INTRODUCTION = """\
# Commands

Every command of `ddl-airflow`, and `ddl-run`, with all options. `COMMAND --help`
says the same in a terminal. This page is written by `python scripts/commands_page.py`.
"""
# Arguments that `--help` leaves to their names.
_UNSAID = {
    "command": "what each rank runs, as of a manifest's `execution.command`",
    "dags": "the folder with the examples; default: dags",
    "manifest": "the file",
    "of": "of which; default: manifest",
}


def page() -> str:
    """The page, whatever the environment says of defaults."""
    for name in [name for name in os.environ if name.startswith("AIRFLOW__DDL__")]:
        del os.environ[name]
    from ddl_airflow import cli, run

    lines = [_INTRODUCTION]
    for name, said, parser in _commands(cli._parser(), "ddl-airflow"):
        lines += [f"## {name}", "", f"{_sentence(said)}\n", *_described(parser)]
    lines += ["## ddl-run", "", *_described(run._parser())]
    return "\n".join(lines).rstrip() + "\n"


def _commands(
    parser: argparse.ArgumentParser, name: str
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word, below in action.choices.items():
                if any(isinstance(one, argparse._SubParsersAction) for one in below._actions):
                    yield from _commands(below, f"{name} {word}")
                else:
                    yield f"{name} {word}", said.get(word, ""), below


def _described(parser: argparse.ArgumentParser) -> Iterator[str]:
    for text in (parser.description, parser.epilog):
        if text:
            yield f"{_sentence(_cell(text))}\n"
    yield "| argument | meaning |"
    yield "|---|---|"
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar or "|".join(map(str, action.choices or ()))
        value = value if isinstance(value, str) else " ".join(value)  # of each of its arguments
        if action.option_strings:
            takes = "" if action.nargs == 0 else f" {value or action.dest.upper()}"
            name = f"{action.option_strings[-1]}{takes}"
        else:
            name = str(value or action.dest).upper() if not action.choices else str(value)
        said = (action.help or _UNSAID.get(action.dest, "")).replace("%%", "%")
        required = ", required" if action.required and action.option_strings else ""
        yield f"| `{_cell(name)}` | {_cell(said)}{required} |"
    yield ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    if not text.startswith("s3:"):
        text = text[:1].upper() + text[1:]
    return text if text.endswith(".") or not text else f"{text}."


if __name__ == "__main__":
    print(page(), end="")
