from __future__ import annotations

import pytest

from ddl_airflow.core.errors import FileRefused, SettingInvalid
from ddl_airflow.storage.experiments import claim


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
