"""``ddl-airflow``: look at manifests and lineage without Airflow, and see the product work."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from ddl_airflow import __version__
from ddl_airflow.commands import lineage, manifests, rerun, results, run, site, verify, workspaces
from ddl_airflow.core.errors import DdlError
from ddl_airflow.core.output import ended_by_its_reader


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 for what it found wrong, 2 for how it was called."""
    return ended_by_its_reader(lambda: _called(argv))


def _called(argv: Sequence[str] | None) -> int:
    words = lineage.with_question(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(words)
    try:
        return int(options.run(options))
    except DdlError as error:
        print(f"ddl-airflow: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"ddl-airflow: {place}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddl-airflow", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for file in (run, manifests, lineage, rerun, verify, results, workspaces, site):
        file.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
