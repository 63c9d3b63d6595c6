"""Commands on this host: doctor, demo."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from ddl_airflow.commands.options import Commands
from ddl_airflow.core.setting_commands import failed_command


def add_to(commands: Commands) -> None:
    """Adds the commands of this file."""
    doctor = commands.add_parser(
        "doctor",
        help="look whether this host can run trainings, and which boundaries hold on it",
        epilog="Ends with 1 if trainings cannot run or a setting cannot be used; with --strict "
        "also if a boundary is open, or something is at risk. "
        "Run it where Airflow's tasks run, with their environment.",
    )
    doctor.add_argument(
        "--strict", action="store_true", help="an open boundary, or a risk, is a failure"
    )
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="train the examples through a real Airflow")
    demo.add_argument("--dags", type=Path, default=Path("dags"))
    demo.add_argument("--home", type=Path, default=Path(".demo"), help="default: .demo")
    demo.add_argument(
        "--port", type=_port, help="for the UI; by default 8080, or the next one that is free"
    )
    demo.add_argument("--keep", action="store_true", help="leave the UI running until Ctrl-C")
    demo.set_defaults(run=_demo)


def _doctor(options: argparse.Namespace) -> int:
    try:
        # The one command that needs Airflow's settings, some of which it reads when it is imported.
        from ddl_airflow.doctor import State, examine
    except Exception as error:
        if (command := failed_command(error, os.environ)) is None:
            raise
        print("wrong  Airflow: {}\n       {}".format(*command))
        return 1
    states = set()
    for found in examine():
        states.add(found.state)
        print(f"{found.state.value:5}  {found.what}: {found.said}")
        if found.fix:
            print(f"       {found.fix}")
    bad = set(State) - {State.OK} if options.strict else {State.WRONG}
    return 1 if states & bad else 0


def _port(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 1 to 65535")


def _demo(options: argparse.Namespace) -> int:
    # Its imports take two seconds, of which Ctrl-C would show a traceback.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from ddl_airflow.demo.show import demo
    except ImportError as error:
        said = f"{error}. Run pip install '.[demo]' in the sources"
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGINT, before)
    if not options.dags.is_dir():
        print(f"ddl-airflow: {options.dags} is no folder. Give --dags.", file=sys.stderr)
        return 2
    if options.home.exists() and not options.home.is_dir():
        said = f"{options.home} is no folder. Give another with --home."
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 2
    return demo(
        options.home.resolve(), options.dags.resolve(), keep=options.keep, port=options.port
    )
