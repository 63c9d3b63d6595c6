"""Whose an experiment is, and which trainings were in it.

A run goes on with an experiment of its own DAG, and with those that manifests share.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddl_airflow.core.beneath import read_object, write_beneath
from ddl_airflow.core.errors import FileRefused, SettingInvalid
from ddl_airflow.core.layout import (
    OWN_EXPERIMENT,
    RunLayout,
    experiments,
    is_experiment,
    owners_file,
    owners_of,
    trainings_file,
)
from ddl_airflow.storage.filesystem import alone_in

_OTHERS_CLAIM_S = 10.0
# Trainings that an experiment is known to have had: each later record lists them all.
_MOST_KNOWN = 1_000
_AT = "at"  # when a training was first noted, in seconds since 1970


@dataclass(frozen=True)
class Before:
    """Who trained in an experiment before.

    Attributes:
        trainings: what each was made of, as ``note_training`` was told; the oldest first.
        whole: whether these are all.
    """

    trainings: Sequence[Mapping[str, Any]] = ()
    whole: bool = True


def claim(workspace: Path, experiment: str, dag_id: str, *, in_manifest: bool) -> None:
    """Makes an experiment that nobody has the DAG's, and refuses another DAG's.

    Two DAGs share one if the manifest of each names it. That of one training, which is called as
    the training, is the training's DAG's. A folder that nobody is known to have is refused.

    Args:
        workspace: the site's.
        experiment: its name.
        dag_id: whose run asks for it.
        in_manifest: whether the DAG's manifest names it, and not only the run.

    Raises:
        SettingInvalid: it is another DAG's, or it is not known whose.
        StagingError: what is known of it cannot be read.
    """
    own = workspace / "runs" / dag_id / experiment
    if re.fullmatch(OWN_EXPERIMENT, experiment) and not own.is_dir():
        raise SettingInvalid(
            f"experiment_id: {experiment!r} is the name of the experiment of a training that is "
            f"not of {dag_id}, or no longer there. Choose another name."
        )
    folder = experiments(workspace) / experiment
    path = owners_file(workspace, experiment)
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(path, dag_id, _OTHERS_CLAIM_S):
        owners = owners_of(workspace, experiment)
        shared = in_manifest and all(owners.values())
        if owners and dag_id not in owners and not shared:
            raise SettingInvalid(
                f"experiment_id: {experiment!r} is an experiment of {', '.join(sorted(owners))}. "
                f"Choose another name; or write `experiment: {experiment}` in the manifests of "
                "all that share it."
            )
        if not owners and folder.exists() and not own.is_dir():
            raise SettingInvalid(
                f"experiment_id: {folder} is there, and it is not known whose it is. Choose "
                "another name; or, as the site's administrator, write "
                f"{json.dumps({dag_id: False})} into {path}"
            )
        now = owners | {dag_id: in_manifest}
        if now != owners:
            write_beneath(path, workspace, json.dumps(now).encode())


def may_have_others(layout: RunLayout) -> bool:
    """Whether others have trained in the run's experiment: it has a name, or one noted itself.

    Who has only claimed it may never train, and has left nothing to go on from.
    """
    # An id that is too long to be named as an experiment may be too long for that file's name.
    return bool(layout.experiment_id) or (
        is_experiment(layout.training_id) and _place(layout).exists()
    )


def note_training(
    layout: RunLayout,
    training: Mapping[str, Any] | None,
    owner: Mapping[str, Any] | None = None,
    brought: Before | None = None,
) -> Before:
    """Notes that a training is about to work in its experiment; returns who did before it.

    An experiment in which there is nothing to go on from starts anew, but for who waits in a
    scheduler's queue. Only for who keeps others out of it.

    Args:
        layout: of a run in whose experiment there may be others.
        training: its id, data, code, manifest and parameters; None: they are not known.
        owner: the same of the training whose own experiment it is, which notes nothing itself
            before others come.
        brought: who had a hand in checkpoints that came from another workspace.
    """
    from ddl_airflow.storage.checkpoint_files import has_any  # no parse needs it

    path = _place(layout)
    noted, first = _noted(path, layout.workspace), []
    if has_any(layout.experiment, layout.workspace):
        first = [owner] if owner else []
    else:
        noted = Before([one for one in noted.trainings if _waits(layout, one["training_id"])])
    if brought is not None:
        first += [one for one in brought.trainings if _is_another(one, layout)]
        noted = Before(noted.trainings, noted.whole and brought.whole)
    known = [one for one in noted.trainings if _plain(one) not in (training, *first)]
    before = Before([*first, *map(_plain, known)], noted.whole)
    now = [*first, *known]
    if training is not None:
        earlier = [one[_AT] for one in noted.trainings if _plain(one) == training and _AT in one]
        now.append({**training, _AT: min([*earlier, time.time()])})
    whole = before.whole and training is not None and len(now) <= _MOST_KNOWN
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"whole": whole, "trainings": now[-_MOST_KNOWN:]}
    write_beneath(path, layout.workspace, json.dumps(told).encode())
    return before


def noted_meanwhile(layout: RunLayout, began: float) -> Before:
    """Who came to the experiment after a training was noted, and before its ranks began: while it
    waited in a scheduler's queue they may have trained, and it went on from their weights.

    Args:
        layout: of a run in whose experiment there may be others.
        began: when its last ranks did, in seconds since 1970.
    """
    noted = list(_noted(_place(layout), layout.workspace).trainings)
    own = [n for n, one in enumerate(noted) if one["training_id"] == layout.training_id]
    later = noted[own[-1] + 1 :] if own else noted
    return Before([_plain(one) for one in later if one.get(_AT, 0.0) < began], bool(own))


def _waits(layout: RunLayout, training_id: str) -> bool:
    """Whether another training, of any DAG, has a scheduler's job."""
    runs = layout.workspace / "runs"
    with suppress(OSError, ValueError):  # it is no name, if ranks have written that
        return training_id != layout.training_id and any(
            RunLayout(layout.workspace, dag.name, training_id).scheduled_job.exists()
            for dag in runs.iterdir()
        )
    return False


def _place(layout: RunLayout) -> Path:
    return trainings_file(layout.workspace, layout.experiment_id or layout.training_id)


def _plain(noted: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in noted.items() if name != _AT}


def _is_another(training: Mapping[str, Any], layout: RunLayout) -> bool:
    with suppress(LookupError, TypeError):  # its own, which have no id
        return _is_sound(training) and training["training_id"] != layout.training_id
    return False


def forget_trainings(workspace: Path, experiment: str) -> None:
    """Of an experiment that was removed."""
    if is_experiment(experiment):  # else it has no such file: see ``may_have_others``
        trainings_file(workspace, experiment).unlink(missing_ok=True)


def _noted(path: Path, workspace: Path) -> Before:
    """What is noted; where ranks have Airflow's user, they may have written it."""
    try:
        said = read_object(path, workspace)
        if all(map(_is_sound, said["trainings"])):
            return Before(said["trainings"], said["whole"] is True)
    except (FileNotFoundError, FileRefused, LookupError, TypeError):
        pass  # of an earlier version of ours: nobody noted who was there
    return Before(whole=False)


def _is_sound(training: Any) -> bool:
    texts = [training[name] for name in ("training_id", "dataset", "code")]
    texts += [training[name] for name in ("uri", "resolved_uri") if name in training]
    return (
        set(map(type, texts)) == {str}
        and "manifest" in training
        and isinstance(training["parameters"], dict)
        and isinstance(training.get(_AT, 0.0), float)
    )
