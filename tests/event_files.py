"""Event files, as TensorFlow writes them for TensorBoard; made without TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest


def write_events(
    folder: Path,
    values: Iterable[tuple[int, Mapping[str, Any]]],
    name: str = "events.out.tfevents.1",
) -> None:
    """Writes one, of steps and what a summary value of each has."""
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    folder.mkdir(parents=True, exist_ok=True)
    events = [Event(wall_time=1e9, file_version="brain.Event:2")]
    for step, value in values:
        summary = Summary(value=[Summary.Value(**value)])
        events.append(Event(step=step, wall_time=1e9 + step, summary=summary))
    with (folder / name).open("wb") as file:
        for event in events:
            said = event.SerializeToString()
            length = struct.pack("<Q", len(said))
            for part in (length, said):
                file.write(part + struct.pack("<I", masked_crc32c(part)))


def losses(count: int = 50, tag: str = "loss") -> list[tuple[int, dict[str, Any]]]:
    """A curve from 2 to 0.04, in 50 steps."""
    return [(step, {"tag": tag, "simple_value": 2 / (step + 1)}) for step in range(count)]
