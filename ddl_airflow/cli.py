"""``ddl-airflow``: look at manifests and lineage without Airflow, and see the product work."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module

from ddl_airflow import __version__
from ddl_airflow.core.collector import without_collector
from ddl_airflow.core.errors import DdlError
from ddl_airflow.core.output import (
    EndedBySignal,
    ended_by_its_reader,
    ended_by_its_signal,
    printable,
)

# The files of commands/, and which commands each adds. One command needs one file: to ask about a
# model nobody waits for what trains one to be imported.
FILES = {
    "run": ("run", "plan"),
    "manifests": ("validate", "schema", "convert"),
    "lineage": ("lineage",),
    "rerun": ("rerun",),
    "verify": ("verify",),
    "results": ("production", "rollback", "promote"),
    "workspaces": ("tensorboard", "verify-cache", "clean"),
    "site": ("doctor", "demo"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 for what it found wrong, 2 for how it was called.

    Where a signal has interrupted it, and ``argv`` is this process's own, that ends this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    file = next((file for file, names in FILES.items() if words[:1] and words[0] in names), "")
    # Somebody waits for an answer: the collector would be a fifth of its time.
    with without_collector() if file == "lineage" else nullcontext():
        return ended_by_its_signal(
            lambda: ended_by_its_reader(lambda: _called(file, words)), alone=argv is None
        )


def _called(file: str, words: list[str]) -> int:
    if file == "lineage":
        from ddl_airflow.commands.lineage import with_question

        words = with_question(words)
    options = _parser([file] if file else FILES).parse_args(words)
    try:
        return int(options.run(options))
    except DdlError as error:
        print(printable(f"ddl-airflow: {error}", keep="\t\n"), file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(printable(f"ddl-airflow: {place}{error.strerror or error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        # As ``run`` raises it, it says for which signal.
        raise EndedBySignal(error.args[0] if error.args else signal.SIGINT) from None


def _parser(files: Iterable[str] = FILES) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddl-airflow", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for file in files:
        import_module(f"ddl_airflow.commands.{file}").add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
