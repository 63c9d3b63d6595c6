from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ddl_airflow.core.errors import FileRefused, SettingInvalid
from ddl_airflow.core.layout import RunLayout, training_id
from ddl_airflow.storage.experiments import claim, forget_trainings, may_have_others, note_training


def test_an_experiment_is_the_dags_that_had_it_first(tmp_path):
    claim(tmp_path, "wide", "b", in_manifest=False)
    claim(tmp_path, "wide", "b", in_manifest=False)
    claim(tmp_path, "narrow", "a", in_manifest=False)
    for in_manifest in (False, True):
        with pytest.raises(SettingInvalid, match="'wide' is an experiment of b. Choose another"):
            claim(tmp_path, "wide", "a", in_manifest=in_manifest)


def test_two_share_it_if_the_manifest_of_each_names_it(tmp_path):
    claim(tmp_path, "wide", "b", in_manifest=True)
    with pytest.raises(SettingInvalid, match="write `experiment: wide` in the manifests of all"):
        claim(tmp_path, "wide", "a", in_manifest=False)
    claim(tmp_path, "wide", "a", in_manifest=True)
    claim(tmp_path, "wide", "b", in_manifest=True)
    claim(tmp_path, "wide", "b", in_manifest=False)  # b's manifest no longer does
    with pytest.raises(SettingInvalid, match="of a, b"):
        claim(tmp_path, "wide", "c", in_manifest=True)


def test_a_link_in_place_of_what_is_known_is_refused(tmp_path):
    claim(tmp_path, "wide", "b", in_manifest=False)
    path = tmp_path / "experiments" / ".owners" / "wide.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileRefused):
        claim(tmp_path, "wide", "a", in_manifest=False)


def test_a_trainings_own_experiment_is_for_its_dag_alone(tmp_path):
    """Its id is in logs, and in the address of what it publishes."""
    theirs = RunLayout(tmp_path, "b", training_id("b", "manual__1", "site"))
    theirs.create()
    theirs.experiment.mkdir(parents=True)
    not_yet = training_id("b", "manual__2", "site")
    for name in (theirs.training_id, not_yet):
        for in_manifest in (False, True):
            with pytest.raises(SettingInvalid, match=f"'{name}' .* a training that is not of a"):
                claim(tmp_path, name, "a", in_manifest=in_manifest)
    claim(tmp_path, theirs.training_id, "b", in_manifest=False)


def test_a_folder_that_is_nobodys_is_claimed_by_nobody(tmp_path):
    """One of before, or brought back from elsewhere: whose it is the site knows."""
    for name in ("wide", "b-manual-1-0123456789"):
        (tmp_path / "experiments" / name).mkdir(parents=True)
        for in_manifest in (False, True):
            with pytest.raises(SettingInvalid, match="known whose it is") as refused:
                claim(tmp_path, name, "a", in_manifest=in_manifest)
        (place,) = re.findall(r"into (\S+\.json)", str(refused.value))
        (content,) = re.findall(r"write (\{.*?\})", str(refused.value))
        Path(place).write_text(content)
        claim(tmp_path, name, "a", in_manifest=False)
        with pytest.raises(SettingInvalid, match="is an experiment of a"):
            claim(tmp_path, name, "b", in_manifest=False)


def test_a_training_whose_id_is_as_long_as_a_files_name_may_be_has_its_experiment_alone(tmp_path):
    run = "manual__2026-11-30T02:15:00.123456+00:00"
    layout = RunLayout(tmp_path, "d" * 200, training_id("d" * 200, run, "site"))
    assert len(layout.training_id) > 250
    assert not may_have_others(layout)
    forget_trainings(tmp_path, layout.training_id)


def test_an_experiment_that_is_claimed_stays_open_and_has_others_once_one_trains(tmp_path):
    """Claimed before it is opened to the ranks, noted before they begin: neither is the other."""
    owner = RunLayout(tmp_path, "a", training_id("a", "first", "site"), ranks_group=os.getgid())
    other = RunLayout(tmp_path, "a", training_id("a", "second", "site"), owner.training_id)
    owner.create()
    claim(tmp_path, owner.training_id, "a", in_manifest=False)
    owner.open_to_ranks()
    opened = owner.experiment.stat().st_mode
    owner.close_to_ranks()
    assert owner.experiment.stat().st_mode == opened
    assert not may_have_others(owner)
    note_training(other, None)
    assert may_have_others(owner)
