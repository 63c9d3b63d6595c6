"""Which keys patterns select, against git itself where there is one."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass
from random import Random

import pytest

from ddl_airflow.core.errors import SourceMissing, StagingError
from ddl_airflow.core.selection import Pattern, Selection, wrong_patterns
from tests.limits import within


@dataclass(frozen=True)
class Object:
    key: str


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("*.jpg", ["a.jpg", "b/c/d.jpg", "x.jpg/below"], ["a.jpgx", "a.jpg\n", "a.JPG"]),
        ("train", ["train", "train/a", "x/train", "x/train/y"], ["trains", "a/trains"]),
        ("train/", ["train/a", "x/train/b/c"], ["train", "x/train"]),
        ("/train", ["train", "train/a"], ["x/train"]),
        ("a/*", ["a/b", "a/b/c"], ["a", "x/a/b"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b", "a/b/below"], ["a", "x/a/b", "a/xb"]),
        ("**/b/c", ["b/c", "a/b/c"], ["b/x/c"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "b/a/c"]),
        ("a/**/", ["a/b/c"], ["a", "a/b"]),
        ("**", ["a", "a/b"], []),
        ("**/**", ["a", "a/b"], []),
        ("**/", ["a/b"], ["a"]),
        ("[!a]?.b", ["bc.b", "x/ü+.b"], ["ac.b", "b/.b"]),
        ("[*]", ["*", "x/*"], ["a"]),
        ("[", ["["], ["a"]),
        ("[z-a]", [], ["z", "a"]),
        ("with space/+*", ["with space/+1", "with space/+"], ["with+space/+1", "with space/ 1"]),
        ("ü漢*", ["ü漢字", "a/ü漢/b"], ["u\u0308漢"]),
        ("#*", ["#a"], ["a"]),
        ("{a,b}", ["{a,b}"], ["a"]),
        ("a\nb/*", ["a\nb/c", "a\nb/c\n"], ["a/c"]),
    ],
)
def test_what_a_pattern_matches(pattern, matched, others):
    asked = Pattern(pattern)
    for _ in range(2):  # also right after a key of another folder
        assert [key for key in (*matched, *others) if asked.matches(key)] == matched


@pytest.mark.parametrize(
    ("pattern", "key", "covers", "reaches"),
    [
        ("lost+found/", "lost+found", True, True),
        ("lost+found", "a/lost+found", True, True),
        ("/lost+found", "a/lost+found", False, False),
        ("a/*", "a", True, True),
        ("a/**", "a/b", True, True),
        ("a/**/b", "a", False, True),
        ("a/?", "a", False, True),
        ("a/*/", "a", False, True),  # not the files in it
        ("a/**/", "a", False, True),
        ("*.tfrecord", "lost+found", False, True),
        ("train/*.tfrecord", "lost+found", False, False),
        ("train/*.tfrecord", "train/a", False, False),
    ],
)
def test_what_a_pattern_can_match_below_a_folder(pattern, key, covers, reaches):
    asked = Pattern(pattern)
    assert (asked.covers(key), asked.reaches(key)) == (covers, reaches)


def drawn(random, letters, deep, instead=""):
    """A path of some parts, of few letters, so that many are the same."""
    parts = ["".join(random.choices(letters, k=random.randint(1, 3))) for _ in range(deep)]
    return "/".join(instead if instead and random.random() < 0.3 else part for part in parts)


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_patterns_mean_what_they_mean_to_git(tmp_path):
    """For each of many patterns git is asked which of many keys it would ignore."""
    random = Random(17)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    keys = sorted({drawn(random, "ab", random.randint(1, 4)) for _ in range(300)})
    matched = 0
    for _ in range(100):
        pattern = drawn(random, "ab?*", random.randint(1, 4), "**")
        pattern = f"{'/' * (random.random() < 0.3)}{pattern}{'/' * (random.random() < 0.3)}"
        if [*wrong_patterns([pattern])]:
            continue  # "a**" means to git what "a*" does
        (tmp_path / ".gitignore").write_text(pattern + "\n")
        told = subprocess.run(
            ["git", "-C", tmp_path, "check-ignore", "--no-index", "--stdin", "-z"],
            input="\0".join(keys),
            capture_output=True,
            text=True,
            check=False,
        )
        asked = Pattern(pattern)
        ours = [key for key in keys if asked.matches(key)]
        assert ours == [key for key in told.stdout.split("\0") if key], pattern
        matched += len(ours)
    assert matched > 1000


@pytest.mark.parametrize("pattern", ["*a" * 100 + "b", "**/" * 50 + "*a" * 40 + "b/**/x"])
def test_no_pattern_takes_long(pattern):
    """As it does by one regular expression: hours for these, with the interpreter's lock held."""
    asked, began = Pattern(pattern), time.process_time()
    assert not asked.matches("/".join(["a" * 255] * 4))
    assert time.process_time() - began < within(1)


def selected(include, exclude, keys, warn=lambda said: None):
    asked = Selection(tuple(include), tuple(exclude))
    return [one.key for one in asked.of(map(Object, keys), "s3://b/p", warn)]


def test_what_is_included_without_what_is_excluded_stays_in_order():
    keys = ["train/b.gz", "train/a.gz", "train/a.tmp", "test/c.gz", "train"]
    assert selected([], [], keys) == keys
    assert selected(["train/"], ["*.tmp"], keys) == ["train/b.gz", "train/a.gz"]
    assert selected(["train/*.gz", "test/"], [], keys) == ["train/b.gz", "train/a.gz", "test/c.gz"]
    assert selected([], ["/test/", "a.*"], keys) == ["train/b.gz", "train"]


def test_patterns_that_match_nothing_are_named():
    keys = [f"{number:05}.gz" for number in range(10_001)]
    with pytest.raises(
        SourceMissing,
        match=r"^s3://b/p: training_data_reference.include: 'train/\*' and 'b' match none of its "
        r"10,001 objects, such as '00000.gz'\. Correct",
    ):
        selected(["*.gz", "train/*", "b"], [], keys)
    with pytest.raises(SourceMissing, match=r"exclude: \*.gz leave nothing of 10,001 objects"):
        selected(["0*", "1*"], ["*.gz"], keys)
    said = []
    assert len(selected([], ["*.tmp", "00001.gz"], keys, said.append)) == 10_000
    of = "s3://b/p: training_data_reference.exclude"
    assert said == [f"{of}: '*.tmp' matches none of its objects"]


def test_one_that_only_matches_what_another_has_taken_matches():
    assert selected(["a*", "a/b"], [], ["a/b"]) == ["a/b"]


def test_what_is_no_pattern_is_told_by_its_number():
    wrong = ["", "/", " ", "!a", "a\\*", "a//b", "../a", "a/./b", "a**", "ü" * 600]
    assert [number for number, *_ in wrong_patterns(["a", *wrong])] == [*range(1, 11)]
    for text in wrong:
        with pytest.raises(ValueError, match="is no pattern|begins|backslash|part|beside|longer"):
            Pattern(text)
        # Of a DAG in Python, whose steps no rules of a manifest have looked at.
        with pytest.raises(StagingError, match="^training_data_reference.exclude: ") as told:
            selected([], [text], ["a"])
        assert not told.value.retryable
