"""Measures allreduce of a model's gradients: `python -m benchmarks.collectives.groups`.

Below TensorFlow, through shared memory; as one group, and as one tensor of as many bytes. See
README.md.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks import report
from benchmarks.collectives.__main__ import compile_driver, start_ranks
from benchmarks.collectives.gradient_sets import GRADIENT_SETS


def main() -> int:
    parser = report.argument_parser("Measures allreduce of a model's gradients.", 9, "set")
    parser.add_argument("--sets", nargs="+", default=["resnet50"], choices=GRADIENT_SETS)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "driver"
        compile_driver(program, Path(__file__).with_name("groups.cc"))
        for name in arguments.sets:
            counts = ",".join(str(math.prod(shape)) for shape in GRADIENT_SETS[name]())
            output = start_ranks(program, arguments.ranks, [arguments.rounds, counts])
            samples: dict[str, list[float]] = defaultdict(list)
            for line in output.splitlines():
                way, _, seconds = line.split()
                samples[way].append(float(seconds))
            results[name] = samples
            print(f"{name}: median ms of a call, and its time over that of one tensor")
            for way, times in samples.items():
                pairs = zip(times, samples["single"], strict=True)
                ratio = statistics.median(time / single for time, single in pairs)
                print(f"  {way}: {statistics.median(times) * 1e3:.2f} ({ratio:.2f})")
    if arguments.json:
        about = report.about() | {"ranks": arguments.ranks, "samples_s": results}
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
