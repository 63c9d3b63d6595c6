"""What ``ddl-airflow`` and ``python -m ddl_airflow`` run."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs one command. Ctrl-C while it is still imported ends it, and shows no traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ddl_airflow.cli import main as command

    signal.signal(signal.SIGINT, before)
    return command()


if __name__ == "__main__":
    sys.exit(main())
