"""Runs each check of checks/ in one start of TensorFlow, and says how it went."""

from __future__ import annotations

import sys
import traceback

from checks import CHECKS, collectives, exchanges, gradients, keras, requests, sets, tf1  # noqa: F401 (they fill CHECKS)
from speech import SIZE, say


def main() -> None:
    wanted = sys.argv[1:]  # names; all without
    for function, least in CHECKS:
        if least > SIZE or (wanted and function.__name__ not in wanted):
            continue
        try:
            function()
        except Exception:
            say(f"{function.__name__}: FAILED {traceback.format_exc()}")
        else:
            say(f"{function.__name__}: ok")


main()
