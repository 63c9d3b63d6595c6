"""What a rank notes of whether it trains with the others."""

from __future__ import annotations

import json

import pytest
from ddl_ops import averaging


@pytest.mark.parametrize("before", [None, "", '{"star', "[]", '{"averaged": "yes"}'])
def test_whatever_is_there_a_rank_starts(tmp_path, monkeypatch, before):
    """As after a loss of power, of a file that had a name and no bytes yet."""
    monkeypatch.setenv("DDL_RECORD_DIR", str(tmp_path))
    monkeypatch.setattr(averaging, "_path", None)
    monkeypatch.setattr(averaging, "_facts", dict.fromkeys(averaging._facts, False))
    path = averaging.file_of(tmp_path, 0)
    if before is not None:
        path.write_text(before)
    averaging.started()
    assert json.loads(path.read_text()) == dict.fromkeys(averaging._facts, False)


def test_what_the_program_before_in_its_place_has_averaged_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("DDL_RECORD_DIR", str(tmp_path))
    monkeypatch.setattr(averaging, "_path", None)
    monkeypatch.setattr(averaging, "_facts", dict.fromkeys(averaging._facts, False))
    path = averaging.file_of(tmp_path, 0)
    path.write_text('{"averaged": true}')
    averaging.started()
    assert json.loads(path.read_text())["averaged"] is True
