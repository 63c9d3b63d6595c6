"""What is put beside a model to show how it was made, and that it is what was made.

None of it is needed to serve the model: what cannot be made is said, and left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddl_airflow.core.beneath import make_folder, read_beneath, write_beneath
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.progress import Tail
from ddl_airflow.evidence.bom import bill
from ddl_airflow.evidence.card import card
from ddl_airflow.evidence.croissant import described
from ddl_airflow.evidence.curves import drawn, read_curves
from ddl_airflow.evidence.names import (
    BOM,
    CARD,
    CURVES,
    DATASET,
    EVIDENCE,
    PROVENANCE,
    SIGNATURE,
    plain,
    writable,
)
from ddl_airflow.evidence.provenance import statement
from ddl_airflow.evidence.signature import sign, signing_key, still_holds
from ddl_airflow.lineage.record import LINEAGE, encoded

_LONGEST_REASON = 300
NO_CURVES = "no metric was reported at two steps"


@dataclass
class Evidence:
    """What came of it.

    Attributes:
        files: those that were made, by their keys.
        not_made: why the others were not, by their keys.
        failed: keys of those of them that should have been.
    """

    files: dict[str, Path] = field(default_factory=dict)
    not_made: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def record(self) -> dict[str, Any]:
        """The section of ``lineage.json``."""
        return {"made": sorted(self.files), "not_made": dict(sorted(self.not_made.items()))}

    def attempt(self, key: str, make: Callable[[], Path | None], without: str = "") -> None:
        """Has one file made, whatever that raises.

        Args:
            key: of the file.
            make: makes it; None: there is nothing to make it of.
            without: what is said then.
        """
        self.files.pop(key, None)
        try:
            made = make()
        except ModuleNotFoundError as error:
            reason = f"there is no module {error.name!r}. Install the extra `evidence`"
            self.not_made[key] = reason
        except Exception as error:  # nothing here is worth a model
            self.failed.add(key)
            self.not_made[key] = plain(f"{type(error).__name__}: {error}")[:_LONGEST_REASON]
        else:
            if made is None:
                self.not_made[key] = without
            else:
                self.files[key] = made


def make(made: Evidence, record: Mapping[str, Any], layout: RunLayout) -> None:
    """Makes all but the signature, in ``<run>/airflow/evidence/``. The same record and run give the
    same files.

    Args:
        made: what comes of it.
        record: as ``lineage.json`` has it, with the files that the training left.
        layout: the run's.
    """
    told: Any = writable(record)

    def written(key: str, text: str) -> Path | None:
        if not text:
            return None
        path = place_of(layout, key)
        make_folder(path.parent, layout.workspace)
        write_beneath(path, layout.workspace, text.encode())
        return path

    def dataset() -> dict[str, Any]:
        return described(told, layout.staged, layout.cache)

    made.attempt(CURVES, lambda: written(CURVES, drawn(read_curves(_told(layout)))), NO_CURVES)
    made.attempt(CARD, lambda: written(CARD, card(told, curves=CURVES in made.files)))
    made.attempt(DATASET, lambda: written(DATASET, _json(dataset())))
    made.attempt(BOM, lambda: written(BOM, bill(told)))
    made.attempt(PROVENANCE, lambda: written(PROVENANCE, statement(told)))


def add_signature(
    made: Evidence,
    record: dict[str, Any],
    layout: RunLayout,
    setting: str,
    secret: Callable[[str], str],
) -> None:
    """Signs what is about to be published. A retry that publishes the same keeps its signature.

    Args:
        made: the signature joins it, or why there is none.
        record: as ``lineage.json`` will have it, with all files; it says whether there is a
            signature.
        layout: the run's.
        setting, secret: as ``signing_key`` has them.
    """
    path = place_of(layout, SIGNATURE)

    def signature() -> Path:
        with signing_key(setting, secret) as key:
            record["evidence"] = made.record()
            record["evidence"]["made"].append(SIGNATURE)
            signed = {file["key"]: file["sha256"] for file in record["result"]["files"]}
            signed[LINEAGE] = hashlib.sha256(encoded(record)).hexdigest()
            make_folder(path.parent, layout.workspace)
            if not (
                path.exists() and still_holds(read_beneath(path, layout.workspace), signed, key)
            ):
                write_beneath(path, layout.workspace, sign(layout.training_id, signed, key))
        return path

    made.attempt(SIGNATURE, signature)
    if SIGNATURE in made.not_made:
        record["evidence"] = made.record()


def place_of(layout: RunLayout, key: str) -> Path:
    """Where a file of evidence is made."""
    return layout.kept / EVIDENCE / key.removeprefix(EVIDENCE)


def _told(layout: RunLayout) -> Iterator[str]:
    """The lines of progress, by all tries."""
    try:
        for text in Tail(layout.progress, 0, layout.workspace).read(ended=True):
            yield from text.split("\n")
    except FileRefused:  # what a script put there in its place is not read
        return


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
