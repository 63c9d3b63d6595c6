"""``ddl-airflow lineage`` over a folder of results: its questions, answered for people and JSON."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import time
from datetime import datetime, timedelta, timezone

import pytest
from moto.server import ThreadedMotoServer

from ddl_airflow import cli
from ddl_airflow.commands import lineage
from ddl_airflow.core.manifest.digest import digest, earlier_digests
from ddl_airflow.lineage.index import add, mark_removed
from ddl_airflow.lineage.production import LATEST, PRODUCTION, point
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import publish
from ddl_airflow.storage.s3_client import s3_client
from tests.limits import within

SCRIPT = "import ddl\nepochs = 3\n"
# What indexes of before do not have.
NEW = ("experiment", "went_on_from", "went_on_from_is_whole")
INDEX = "_lineage/index.json.gz"


@pytest.fixture
def results(tmp_path):
    (tmp_path / "results").mkdir()
    return FolderStore(tmp_path / "results")


@pytest.fixture
def training(tmp_path, results):
    """training(number, script=, data=, serves=, **facts) -> its place, published."""

    def make(
        number, script=SCRIPT, data=(("a", 1), ("b", 2)), *, serves=False, dag_id="digits", **facts
    ):
        folder = tmp_path / f"of-{number}"
        folder.mkdir()
        files = {}
        for key, text in {"model/saved_model.pb": f"{number}", "code/train.py": script}.items():
            files[key] = folder / key.replace("/", "-")
            files[key].write_text(text)
        listing = [{"key": key, "size": size, "etag": f"{size}"} for key, size in data]
        digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
        record = {
            "training_id": f"{dag_id}-{number}",
            "manifest": {
                **{"file": "digits.yml", "name": "digits", "digest": "sha256:v2:m"},
                **facts.get("manifest", {}),
            },
            "dataset": {
                "uri": facts.get("uri", "s3://bucket/digits"),
                "fingerprint": f"sha256:{digest}",
                "files": len(listing),
                "bytes": sum(size for _, size in data),
                "listing": listing,
                **{name: facts[name] for name in ("resolved_uri",) if name in facts},
            },
            "code": {
                "digest": "sha256:" + hashlib.sha256(script.encode()).hexdigest(),
                "files": ["train.py"],
                "git_commit": f"{number:040x}",
            },
            "run": {
                "dag_id": dag_id,
                "run_id": f"manual-{number}",
                "type": "manual",
                "triggered_by": "ada",
                "started": "2026-11-20T20:15:00+00:00",
                "parameters": facts.get("parameters", {"epochs": 3}),
                "tries": {"train": 2},
                **{name: facts[name] for name in ("experiment",) if name in facts},
            },
            "environment": {
                "launcher": "local",
                "world_size": 2,
                "hosts": ["a", "b"],
                "versions": {"tensorflow": facts.get("tensorflow", "2.21.0"), "keras": "3.15.1"},
            },
            "result": {
                "metrics": {"accuracy": 0.9 + number / 100},
                "measurements": [
                    {"metric": "accuracy", "value": 0.9 + number / 100, "source": "validation"}
                ],
                "steps": 380,
                "goodput": {"held_s": 12.5},
                **{name: facts[name] for name in facts if name.startswith("went_on_from")},
                "files": [
                    {
                        "key": key,
                        "size": path.stat().st_size,
                        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                    }
                    for key, path in files.items()
                ],
            },
        }
        files["lineage.json"] = folder / "lineage.json"
        files["lineage.json"].write_text(json.dumps(record))
        done = publish(files, results, f"{dag_id}-{number}", marker={"dag_id": dag_id})
        place = f"{dag_id}-{number}/{done.name}"
        add(results, record, place)
        for name in (LATEST, PRODUCTION) if serves else (LATEST,):
            point(results, dag_id, name, place, record["result"]["metrics"])
        return place

    return make


@pytest.fixture
def ask(capsys):
    """ask(words) -> exit code, stdout, stderr."""

    def call(*words):
        code = cli.main(["lineage", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_the_story_of_a_model_names_what_made_it(ask, results, training, tmp_path):
    place = training(1, serves=True)
    code, out, err = ask(tmp_path / "results" / place)
    assert (code, err) == (0, "2 files are as recorded\n")
    for said in (
        f"{results.uri}/{place}/model, 1 file, 0.0 MiB, in production",
        "accuracy 0.91 (validation data)",
        "manual-1 of digits, manual, asked for by ada",
        "tries of train: 2",
        "s3://bucket/digits, 2 files",
        "train.py",
        "commit 0000000000000000000000000000000000000001",
        "epochs=3",
        "local, 2 ranks, on a b, 380 steps, 12 s",
        "tensorflow 2.21.0, keras 3.15.1",
    ):
        assert said in out
    (tmp_path / "results" / place / "code" / "train.py").write_text("another")
    code, out, err = ask("show", tmp_path / "results" / place)
    assert code == 1 and "code/train.py is not the file that was published" in err


def test_a_record_that_was_changed_is_not_told_as_true(ask, training, tmp_path):
    place = tmp_path / "results" / training(1)
    record = place / "lineage.json"
    record.write_text(record.read_text().replace('"epochs": 3', '"epochs": 9'))
    for words in ((place,), (place, "--json")):
        code, _, err = ask("show", *words)
        assert code == 1 and "lineage.json is not the file that was published" in err
    (place / "_SUCCESS").rename(place / "_RETIRED")  # as cleaning leaves it for two days
    assert ask("show", place)[0] == 1
    (place / "_RETIRED").unlink()
    code, _, err = ask("show", place)
    assert code == 0 and "note: whether lineage.json was changed is not known" in err
    assert "_SUCCESS" in err


def test_no_word_of_a_training_is_obeyed_by_a_terminal(ask, training, tmp_path):
    """As the title of the window, or the order in which letters are shown."""
    place = tmp_path / "results" / training(1)
    record = json.loads((place / "lineage.json").read_text())
    record["result"]["not_finite"] = {"\x1b]0;title\x07": "NaN"}
    record["result"]["files"].append({"key": "\u202egone", "size": 1, "sha256": ""})
    (place / "lineage.json").write_text(json.dumps(record))
    code, out, err = ask("show", place)
    assert code == 1 and all(line.isprintable() for line in (out + err).splitlines())
    assert "\\x1b]0;title\\x07" in err and "\\u202egone is gone" in err
    (place / "lineage.json").unlink()
    code, _, err = ask("show", place.rename(place.with_name("\x1b[2Jwiped")))
    assert code == 1 and all(line.isprintable() for line in err.splitlines())
    assert "\\x1b[2Jwiped" in err


def test_of_a_dag_whose_name_is_not_ascii_it_is_known_what_serves(ask, training, tmp_path):
    place = training(1, dag_id="ziffern-ä", serves=True)
    assert ", in production\n" in ask(tmp_path / "results" / place)[1]
    newer = training(2, dag_id="ziffern-ä")
    assert ", not in production\n" in ask(tmp_path / "results" / newer)[1]


def test_a_question_about_no_place_of_results_is_answered_so_and_changes_nothing(
    ask, training, tmp_path, capsys
):
    publication = tmp_path / "results" / training(1)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("1")
    for words in (
        ("list", publication),
        ("list", publication.parent),
        ("impact", tmp_path / "results", tmp_path / "data"),  # the wrong way round
    ):
        code, out, err = ask(*words)
        assert (code, out) == (1, "") and "the place of results" in err
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]
    assert [path.name for path in publication.parent.iterdir()] == [publication.name]
    assert cli.main(["verify", str(publication)]) == 0
    capsys.readouterr()


def test_the_story_says_what_the_training_went_on_from(ask, results, training, tmp_path):
    before = {"code": "sha256:0123456789abcdef", "manifest": "sha256:v2:m"}
    before |= {"dataset": "sha256:d", "parameters": {"epochs": 3, "rate": 0.5}}
    place = training(1, went_on_from=[before])
    _, out, _ = ask(tmp_path / "results" / place)
    assert "\n            went on from checkpoints of code 0123456789ab, rate=0.5\n" in out
    others = [before | {"training_id": "digits-0", "uri": "s3://bucket/others"}]
    place = training(2, went_on_from=others, experiment="wide", went_on_from_is_whole=False)
    _, out, _ = ask(tmp_path / "results" / place)
    assert (
        "\n            went on from checkpoints of digits-0, data s3://bucket/others d, code "
        "0123456789ab, rate=0.5\n"
        "            perhaps went on from others': nobody noted who was in experiment wide before\n"
    ) in out


def test_a_manifest_is_the_same_by_an_earlier_versions_digest(ask, training, tmp_path):
    said = {"steps": {"train": {"command": "python train.py"}}, "code": "./scripts"}
    now = {"digest": digest(said), "said": said}
    (before,) = earlier_digests(said)
    other = said | {"code": "./"}
    places = [
        tmp_path / "results" / training(number, manifest=manifest)
        for number, manifest in enumerate(
            ({"digest": before}, now, {"digest": digest(other), "said": other})
        )
    ]
    for one, two in ((0, 1), (1, 0)):
        code, out, _ = ask("diff", places[one], places[two])
        digests = [(before, now["digest"])[place] for place in (one, two)]
        assert code == 0 and f"manifest    the same: {' -> '.join(digests)}" in out
        assert json.loads(ask("diff", "--json", places[one], places[two])[1])["manifest"]["same"]
    for two in (0, 1):
        found = json.loads(ask("diff", "--json", places[2], places[two])[1])
        assert not found["manifest"]["same"]


def test_why_two_models_differ(ask, training, tmp_path):
    one = training(1)
    other = training(
        2,
        SCRIPT.replace("3", "5") + "done\n",
        (("b", 3), ("c", 1)),
        parameters={"epochs": 5},
        tensorflow="2.22.0",
    )
    places = tmp_path / "results" / one, tmp_path / "results" / other
    code, out, err = ask("diff", *places)
    assert (code, err) == (0, "")
    lines = [line.strip() for line in out.splitlines()]
    assert {"+ c", "- a", "~ b", "~ train.py"} <= set(lines)
    assert {"-epochs = 3", "+epochs = 5", "+done", "--- a/train.py"} <= set(lines)
    assert "parameters  epochs: 3 -> 5" in lines
    assert "environment versions.tensorflow: 2.21.0 -> 2.22.0" in lines
    assert "metrics     accuracy (validation): 0.91 -> 0.92" in lines
    assert "manifest    the same: sha256:v2:m" in lines

    found = json.loads(ask("diff", "--json", *places)[1])
    assert found["data"]["added"] == ["c"] and found["code"]["changed"] == ["train.py"]
    assert found["parameters"] == {"epochs": [3, 5]} and found["manifest"]["same"]

    same = ask("diff", places[0], places[0])[1]
    assert same.count("the same") == 5 and "->" not in same and "---" not in same


def test_what_became_of_data_and_what_of_it_serves(ask, training, tmp_path):
    training(1)
    serving = training(2, data=(("a", 1), ("c/d", 2)), serves=True)
    results = tmp_path / "results"
    for data, trainings in (
        ("s3://bucket/digits", ["digits-2", "digits-1"]),
        ("s3://bucket/digits/", ["digits-2", "digits-1"]),
        ("s3://bucket", ["digits-2", "digits-1"]),
        ("s3://bucket/digits/a", ["digits-2", "digits-1"]),
        ("s3://bucket/digits/b", ["digits-1"]),
        ("s3://bucket/digits/c", ["digits-2"]),
        ("s3://bucket/digits/c/d", ["digits-2"]),
        ("s3://bucket/digits-of-others", []),
        ("s3://buck", []),
        ("digits", []),
    ):
        code, out, err = ask("impact", "--json", data, results)
        found = json.loads(out)
        assert code == 0
        note = f"note: no training that is known there read anything at {data}\n"
        assert (note in err) == (not trainings), data
        assert {one["training_id"] for one in found} == set(trainings), data
        assert all(one["production"] == (one["publication"] == serving) for one in found)
    assert " production  digits-2/" in ask("impact", "s3://bucket", results)[1]
    assert ask("impact", "s3://other", results)[2].startswith("none\nnote: no training that ")


def before(number, data=(("a", 1), ("b", 2)), uri="s3://bucket/digits"):
    """What the record of a later training of the experiment has of one."""
    listing = [{"key": key, "size": size, "etag": f"{size}"} for key, size in data]
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    made_of = {"dataset": f"sha256:{digest}", "code": "sha256:c", "manifest": "sha256:v2:m"}
    return {"training_id": f"digits-{number}", "uri": uri, **made_of, "parameters": {"epochs": 3}}


def test_what_went_on_from_weights_of_the_data_came_of_them_too(ask, training, tmp_path):
    """An experiment that is gone on with: the second training has other data of its own."""
    bad, good = "s3://bucket/bad", "s3://bucket/good"
    wide = {"experiment": "wide", "went_on_from_is_whole": True}
    of_bad = before(1, (("a", 1),), bad)
    training(1, data=(("a", 1),), uri=bad, **wide)
    training(2, data=(("a", 2),), uri=good, **wide, went_on_from=[of_bad], serves=True)
    # What was between them failed, so that nobody knows what it read.
    unknown = before(9, (("a", 9),), good)
    training(3, data=(("a", 3),), uri=good, **wide, went_on_from=[of_bad, unknown])
    training(4, data=(("a", 1),), uri=good, experiment="narrow", went_on_from_is_whole=True)
    results = tmp_path / "results"
    for data, code, trainings in (
        (bad, 0, {"digits-1", "digits-2", "digits-3"}),
        (f"{bad}/a", 0, {"digits-1", "digits-2", "digits-3"}),
        (f"{bad}/b", 0, set()),
        (good, 0, {"digits-2", "digits-3", "digits-4"}),
        (f"{good}/a", 0, {"digits-2", "digits-3", "digits-4"}),
        (f"{good}/b", 1, set()),
    ):
        found, out, err = ask("impact", "--json", data, results)
        assert (found, {one["training_id"] for one in json.loads(out)}) == (code, trainings), data
        assert ("digits-3/" in err and "nobody knows" in err) == bool(code), data
    _, out, err = ask("impact", bad, results)
    assert " production  digits-2/" in out
    assert "note: digits-2/" in err and " went on from what digits-1 had made of it\n" in err
    shutil.rmtree(results / "_lineage")
    assert ask("impact", bad, results)[1] == out


def test_an_index_of_an_experiment_with_many_trainings_stays_small(ask, results):
    """Each record names all before it: the index would be of the square of their number."""

    def read(number):
        return {"uri": f"s3://bucket/{number}", "fingerprint": f"sha256:{number}"}

    def publish_another(number):
        others = [
            {"training_id": f"digits-{n}", "uri": read(n)["uri"], "dataset": f"sha256:{n}"}
            for n in range(number)
        ]
        record = {
            "training_id": f"digits-{number}",
            "manifest": {"name": "digits", "digest": "sha256:v2:m"},
            "dataset": {**read(number), "files": 1, "bytes": 1},
            "code": {"digest": "sha256:c", "git_commit": None},
            "run": {
                **{"dag_id": "digits", "run_id": f"{number}", "triggered_by": None},
                **{"parameters": {}, "experiment": "wide"},
            },
            "result": {"metrics": {}, "went_on_from": others, "went_on_from_is_whole": True},
        }
        if number not in (7, 8):  # which failed
            add(results, record, f"digits-{number}/{number:016x}-00000000")

    def bytes_of_each():
        ask("list", results.uri)
        index = results.read_bytes("_lineage/index.json.gz")
        body = json.loads(gzip.decompress(index))["publications"]
        return len(json.dumps(body)) / len(body)

    for number in range(30):
        publish_another(number)
    few = bytes_of_each()
    for number in range(30, 300):
        publish_another(number)
    assert bytes_of_each() <= 1.5 * few
    for number in (0, 7, 8, 150, 299):
        code, out, _ = ask("impact", "--json", f"s3://bucket/{number}", results.uri)
        found = {int(one["training_id"].partition("-")[2]) for one in json.loads(out)}
        assert (code, found) == (0, {n for n in range(number, 300) if n not in (7, 8)}), number


def test_what_went_on_from_a_training_that_was_cleared_came_of_all_its_data(
    ask, training, tmp_path
):
    bad, good = "s3://bucket/bad", "s3://bucket/good"
    wide = {"experiment": "wide", "went_on_from_is_whole": True}
    of_bad, of_good = before(1, (("a", 1),), bad), before(1, (("a", 2),), good)
    training(2, data=(("a", 3),), uri="s3://bucket/own", **wide, went_on_from=[of_bad, of_good])
    for data in (bad, good):
        code, out, err = ask("impact", "--json", data, tmp_path / "results")
        assert (code, [one["training_id"] for one in json.loads(out)]) == (0, ["digits-2"]), data
        assert "went on from what digits-1 had made of it" in err


@pytest.mark.parametrize("known", [{}, {"went_on_from_is_whole": False}])
def test_whether_older_records_of_the_experiment_are_of_the_data_nobody_knows(
    ask, results, training, tmp_path, known
):
    """Of before it was noted who else trained there."""
    bad, good = "s3://bucket/bad", "s3://bucket/good"
    training(1, uri=bad, experiment="wide", **known)
    second = training(2, uri=good, experiment="wide", serves=True, **known)
    training(3, uri=good, experiment="narrow", **known)
    training(4, uri=good, experiment="digits-4")
    # An experiment of one training, which another run named to go on with it.
    training(5, uri=bad, experiment="other-5", dag_id="other")
    sixth = training(6, uri=good, experiment="other-5", dag_id="other", **known)

    def look():
        code, out, err = ask("impact", "--json", bad, tmp_path / "results")
        assert code == 1
        assert {one["training_id"] for one in json.loads(out)} == {"digits-1", "other-5"}
        for place in (second, sixth):
            assert f"{place}: nobody knows whether it was made from that: it was trained in" in err
        assert err.count("nobody knows") == 2

    look()
    without_experiments(results)
    look()
    look()


def without_experiments(results):
    """The index as one of before has it."""
    body = json.loads(gzip.decompress(results.read_bytes(INDEX)))
    for one in body["publications"]:
        for name in NEW:
            one.pop(name, None)
    results.put_bytes(INDEX, gzip.compress(json.dumps(body).encode()))


def test_of_a_removed_model_of_before_nobody_knows_its_experiment(ask, results, training, tmp_path):
    bad, good = "s3://bucket/bad", "s3://bucket/good"
    removed = training(1, uri=good, experiment="wide")
    ask("list", results.uri)
    without_experiments(results)
    shutil.rmtree(tmp_path / "results" / removed)
    mark_removed(results, removed)
    training(2, uri=bad, experiment="wide", went_on_from_is_whole=True)
    training(3, uri=bad, dag_id="other")
    code, out, err = ask("impact", "--json", bad, results.uri)
    assert {one["training_id"] for one in json.loads(out)} == {"digits-2", "other-3"} and code == 1
    why = "it may have been trained in experiment wide as well"
    assert f"{removed}: nobody knows whether it was made from that: {why}" in err
    assert ask("impact", "s3://bucket/another", results.uri)[0] == 0


def test_records_are_read_for_experiments_once_and_only_where_that_is_asked(
    ask, results, training, tmp_path, monkeypatch
):
    """Who asks may not write there; the next one may. One of the records has been lost."""
    bad, good = "s3://bucket/bad", "s3://bucket/good"
    lost = training(1, uri=good, experiment="wide")
    training(2, uri=bad, experiment="wide", went_on_from_is_whole=True)
    ask("list", results.uri)
    without_experiments(results)
    shutil.rmtree(tmp_path / "results" / lost)
    read, asked = FolderStore.read_bytes, []

    def reads(self, key):
        asked.append(f"{self.uri}/{key}")
        return read(self, key)

    def records():
        found = [one for one in asked if one.endswith("lineage.json")]
        asked.clear()
        return found

    monkeypatch.setattr(FolderStore, "read_bytes", reads)
    ask("list", results.uri)
    assert not records()
    with monkeypatch.context() as patch:
        patch.setattr("ddl_airflow.lineage.index._write", lambda *_: None)
        assert ask("impact", bad, results.uri)[0] == 1
    assert len(records()) == 2
    monkeypatch.setattr("ddl_airflow.lineage.index._MERGED_AT", 1)
    training(3, uri=good)  # an upload waits for no records of others
    assert not [one for one in records() if lost in one]
    ask("impact", bad, results.uri)
    records()
    code, _, err = ask("impact", bad, results.uri)
    assert code == 1 and f"{lost}: nobody knows" in err and not records()
    assert ask("impact", bad, results.uri, "--rebuild")[0] == 0  # the records alone count


def test_the_list_is_filtered_and_has_the_newest_first(ask, training, tmp_path):
    places = [training(n, parameters={"epochs": n, "mode": "fast"}, serves=n == 2) for n in (1, 2)]
    results = tmp_path / "results"

    def listed(*words):
        code, out, _ = ask("list", results, "--json", *words)
        assert code == 0
        return {one["publication"] for one in json.loads(out)}

    assert listed() == set(places)
    assert listed("--where", "accuracy>=0.92") == {places[1]}
    assert listed("--where", "accuracy<0.95", "--where", "epochs=1") == {places[0]}
    assert listed("--where", "mode=fast") == set(places) and not listed("--where", "mode=slow")
    assert not listed("--where", "loss<1")
    assert listed("--production") == {places[1]}
    assert listed("--dag", "digits", "--since", "2026-01-01") == set(places)
    assert not listed("--dag", "digit") and not listed("--since", "2999")
    assert listed("--code", f"{1:040x}"[:40]) == {places[0]}
    assert len(listed("--limit", "1")) == 1
    one = json.loads(ask("list", results, "--json")[1])[0]
    assert listed("--data", one["dataset"]["fingerprint"][:16])
    out = ask("list", results)[1].splitlines()
    assert len(out) == 3 and out[0].startswith("published")


def test_a_condition_that_is_none_is_refused(ask, capsys, tmp_path):
    for text in ("accuracy", "accuracy>high", ">3"):
        with pytest.raises(SystemExit):
            ask("list", tmp_path, "--where", text)
        assert "--where" in capsys.readouterr().err


def test_without_the_scripts_of_one_the_files_names_are_compared(ask, training, results, tmp_path):
    """As of what was published before scripts were."""
    places = [training(1), training(2, SCRIPT + "more\n")]
    path = tmp_path / "results" / places[0] / "lineage.json"
    record = json.loads(path.read_text())
    record["result"]["files"] = record["result"]["files"][:1]
    path.write_text(json.dumps(record))
    out = ask("diff", *(tmp_path / "results" / place for place in places))[1]
    assert "the scripts were not published with one of the two" in out


def edit(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_data_in_folders_are_found_by_any_name_of_theirs(ask, training, tmp_path):
    """As a link, as the folder itself, and with what a URI writes as %20."""
    folder = tmp_path / "my data" / "100%25"
    folder.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(folder)
    listing = (("a b/c%20d", 1), ("ä", 2))
    training(1, data=listing, uri=folder.as_uri())
    training(2, data=listing, uri=link.as_uri())
    results = tmp_path / "results"
    for data, trainings in (
        (folder, {"digits-1"}),
        (link, {"digits-1", "digits-2"}),
        (folder.as_uri(), {"digits-1"}),
        (link / "a b", {"digits-1", "digits-2"}),
        (folder / "a b" / "c%20d", {"digits-1"}),
        ((folder / "ä").as_uri(), {"digits-1"}),
        (folder / "b", set()),
        (tmp_path / "my data", {"digits-1"}),
    ):
        code, out, _ = ask("impact", "--json", data, results)
        assert (code, {one["training_id"] for one in json.loads(out)}) == (0, trainings), data


@pytest.mark.parametrize("deep", [False, True])
def test_what_production_names_by_a_link_is_in_production(ask, training, results, deep):
    """As `promote --to current` of an earlier version has written it."""
    place = training(1, serves=True)
    name = place.partition("/")[0]
    folder = results.path / name
    if deep:  # a person has moved it, and left a link where it was
        (results.path / "archive").mkdir()
        folder = folder.rename(results.path / "archive" / name)
        (results.path / name).symlink_to(folder)
    (results.path / "current").symlink_to(folder)
    pointer = results.path / "digits" / "production.json"
    pointer.write_text(pointer.read_text().replace(f"{name}/", "current/"))
    for words in (("list", "--production"), ("impact", "s3://bucket/digits")):
        code, out, err = ask(words[0], "--json", *words[1:], results.path, "--rebuild")
        assert code == 0
        found = [(one["publication"], one["production"]) for one in json.loads(out)]
        assert found == [(place, True)]
    elsewhere = results.path.parent / "served"
    elsewhere.symlink_to(results.path / place)
    names = [results.path / place.replace(name, link) for link in (name, "current")]
    for one in names if deep else [*names, elsewhere]:
        _, out, _ = ask("show", one)
        assert "model, 1 file, 0.0 MiB, in production" in out


def test_data_reached_by_a_link_are_found_by_the_folder_that_it_led_to(ask, training, tmp_path):
    """`data/current` is another folder by the time somebody asks what `data/v1` made."""
    old, new, link = (tmp_path / "data" / name for name in ("v1", "v2", "current"))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "a").write_text(folder.name)
    results = tmp_path / "results"
    for number, folder in enumerate((old, new), 1):
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        store = FolderStore(link)
        assert (store.uri, store.resolved_uri) == (link.as_uri(), folder.as_uri())
        training(number, uri=store.uri, resolved_uri=store.resolved_uri)
    for data, trainings in (
        (old, {"digits-1"}),
        (new, {"digits-2"}),
        (link, {"digits-1", "digits-2"}),  # both were given that name
        (old / "a", {"digits-1"}),
        (tmp_path / "data", {"digits-1", "digits-2"}),
    ):
        code, out, _ = ask("impact", "--json", data, results)
        assert (code, {one["training_id"] for one in json.loads(out)}) == (0, trainings), data


def test_a_record_that_cannot_be_read_is_not_taken_for_one_without_the_data(
    ask, training, tmp_path
):
    places = [training(number, data=(("a", number),)) for number in (1, 2, 3)]
    results = tmp_path / "results"
    (results / places[0] / "lineage.json").unlink()
    (results / places[1] / "lineage.json").write_text("{")
    code, out, err = ask("impact", "--json", "s3://bucket/digits/a", results)
    assert code == 1
    assert {one["training_id"] for one in json.loads(out)} == {"digits-3"}
    for place in places[:2]:
        assert f"{place}: nobody knows whether it was made from that" in err
    assert ask("impact", "s3://bucket/digits", results)[0] == 0  # for which no record is needed


def test_a_damaged_record_is_named_also_once_the_index_was_made_again(
    ask, training, tmp_path, capsys
):
    damaged, _ = training(1), training(2)
    results = tmp_path / "results"
    (results / damaged / "lineage.json").write_text('{"run": ')
    shutil.rmtree(results / "_lineage")
    for words in (
        ("impact", "s3://bucket/digits", results),
        ("impact", "s3://bucket/digits", results, "--rebuild"),
        ("list", results),
        ("list", results, "--json"),
    ):
        code, out, err = ask(*words)
        assert code == 1 and "digits-2" in out and damaged not in out, words
        assert f"ddl-airflow: {damaged}: " in err and "lineage.json is damaged" in err, words
    assert cli.main(["verify", str(results)]) == 1
    assert f"{damaged}: its lineage.json is damaged" in capsys.readouterr().err
    assert cli.main(["verify", str(results), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem == {"file": damaged, "problem": "its lineage.json is damaged"}


def test_where_no_record_can_be_read_it_is_not_said_that_nothing_was_published(
    ask, training, tmp_path
):
    damaged = training(1)
    results = tmp_path / "results"
    (results / damaged / "lineage.json").unlink()
    shutil.rmtree(results / "_lineage")
    code, _, err = ask("impact", "s3://bucket/digits", results)
    assert code == 1 and f"{damaged}: nobody knows whether it was made from that" in err
    assert "nothing was published" not in err


def test_one_record_answers_for_all_that_were_trained_on_the_same_data(
    ask, training, tmp_path, monkeypatch
):
    """Of thousands of models there are few states of the data."""
    places = [training(number) for number in (1, 2, 3)] + [training(4, data=(("c", 1),))]
    results = tmp_path / "results"
    ask("list", results)
    newest = json.loads(ask("list", "--json", results)[1])[1]["publication"]
    (results / newest / "lineage.json").unlink()  # then one of the others does
    read: list[str] = []
    real = lineage.read_record
    monkeypatch.setattr(lineage, "read_record", lambda of: read.append(of.uri) or real(of))
    code, out, _ = ask("impact", "--json", "s3://bucket/digits/a", results)
    assert code == 0
    assert {one["publication"] for one in json.loads(out)} == set(places[:3])
    assert len(read) <= 3  # two of the same data, the first of which is gone, and the other


def test_a_question_reads_each_pointer_once(ask, training, tmp_path, monkeypatch):
    """A store is asked for each of hundreds of DAGs."""
    training(1, serves=True)
    results = tmp_path / "results"
    ask("list", results)
    read: list[str] = []
    real = FolderStore.read_version
    monkeypatch.setattr(
        FolderStore, "read_version", lambda self, key: read.append(key) or real(self, key)
    )
    for words in (("list",), ("impact", "s3://bucket/digits")):
        read.clear()
        assert ask(*words, results)[0] == 0
        pointers = [key for key in read if key.startswith("digits/")]
        assert sorted(set(pointers)) == sorted(pointers) and pointers


def test_only_scripts_are_compared_as_scripts(ask, training, tmp_path):
    """A training may have left a file below code/, before that was refused."""
    places = [training(1), training(2)]
    for number, place in enumerate(places):
        path = tmp_path / "results" / place
        (path / "code" / "own").write_text(f"{number}")
        digest = hashlib.sha256(f"{number}".encode()).hexdigest()
        file = {"key": "code/own", "size": 1, "sha256": digest}
        edit(path / "lineage.json", lambda r, file=file: r["result"]["files"].append(file))
    code, out, _ = ask("diff", *(tmp_path / "results" / place for place in places))
    assert code == 0 and "own" not in out


def test_scripts_of_very_many_lines_are_not_compared_by_lines(ask, training, tmp_path):
    """It would take minutes: the work grows with the square of the lines."""
    many = [f"{n * n % 151}\n" for n in range(20_000)]
    places = [training(1, "".join(many)), training(2, "".join(many[::-1]))]
    started = time.monotonic()
    code, out, _ = ask("diff", *(tmp_path / "results" / place for place in places))
    assert code == 0 and "train.py differs; it is no text, or too long" in out
    assert time.monotonic() - started < within(5)


def test_since_is_a_time_and_a_limit_a_number_of_trainings(ask, training, capsys, tmp_path):
    training(1)
    results = tmp_path / "results"
    (one,) = json.loads(ask("list", results, "--json")[1])
    at = datetime.fromisoformat(one["published"])
    east, west = (timezone(timedelta(hours=hours)) for hours in (9, -9))
    for since, there in (
        (at.astimezone(east).isoformat(), True),
        ((at + timedelta(minutes=1)).astimezone(west).isoformat(), False),
        (f"{at:%Y-%m-%dT%H:%MZ}", True),
        (f"{at:%Y%m%d}", True),
        (f"{at:%Y-%m}", True),
    ):
        code, out, _ = ask("list", results, "--json", "--since", since)
        assert (code, len(json.loads(out))) == (0, there), since
    for words in (("--since", "yesterday"), ("--limit", "-5"), ("--limit", "few")):
        with pytest.raises(SystemExit):
            ask("list", results, *words)
        assert words[0] in capsys.readouterr().err


def test_a_record_of_an_earlier_version_has_its_metrics_shown(ask, training, tmp_path):
    place = tmp_path / "results" / training(1)
    edit(place / "lineage.json", lambda record: record["result"].pop("measurements"))
    assert "accuracy 0.91\n" in ask(place)[1]


@pytest.fixture
def bucket(results, monkeypatch):
    """bucket(prefix, archived=()) -> the URI of a copy of the results in a bucket, where files of
    these names are in a storage class out of which they are to be restored.
    """
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        **{"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"},
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = s3_client(f"http://{host}:{port}", "k", "s")
    client.create_bucket(Bucket="models")

    def copy(prefix, archived=()):
        for path in results.path.rglob("*"):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(results.path).as_posix()}"
                cold = {"StorageClass": "DEEP_ARCHIVE"} if path.name in archived else {}
                client.put_object(Bucket="models", Key=key, Body=path.read_bytes(), **cold)
        return f"s3://models/{prefix}"

    yield copy
    client.close()
    server.stop()


COLD = "archived, in storage class DEEP_ARCHIVE: restore it before it can be read"


def test_what_is_in_an_archive_is_named_with_its_class(ask, training, bucket, capsys):
    """It ended each question with what the store says of one object."""
    place = training(1, serves=True)

    def verify(uri):
        code = cli.main(["verify", uri])
        return code, capsys.readouterr().err

    of_model = bucket("of-model", ["saved_model.pb"])
    code, out, err = ask("show", f"{of_model}/{place}")
    assert code == 1 and "accuracy 0.91" in out
    assert f"ddl-airflow: {of_model}/{place}/model/saved_model.pb is {COLD}\n" in err
    for uri in (f"{of_model}/{place}", f"{of_model}/digits-1"):
        code, err = verify(uri)
        assert code == 1
        assert f"ddl-airflow: {of_model}/{place}/model/saved_model.pb: it is {COLD}\n" in err
        assert err.count("model.pb") == 1 and "gone" not in err

    of_record = bucket("of-record", ["lineage.json"])
    for uri in (f"{of_record}/{place}", f"{of_record}/digits-1"):
        code, out, err = ask("show", uri)
        assert (code, out) == (1, "")
        assert err == f"ddl-airflow: {of_record}/{place}/lineage.json is {COLD}\n"
        code, err = verify(uri)
        assert code == 1 and f"{place}/lineage.json: it is {COLD}\n" in err and "gone" not in err
    for question in (("list", of_record), ("impact", "s3://bucket/digits", of_record)):
        code, out, _ = ask(*question)  # by what its upload has noted
        assert code == 0 and place in out

    of_marker = bucket("of-marker", ["_SUCCESS"])
    code, out, err = ask("show", f"{of_marker}/{place}")
    assert code == 0 and "accuracy 0.91" in out
    assert f"whether lineage.json was changed is not known: its _SUCCESS is {COLD}" in err
    code, _, err = ask("show", f"{of_marker}/digits-1")
    assert code == 1 and err == f"ddl-airflow: {of_marker}/{place}/_SUCCESS is {COLD}\n"
    for uri in (f"{of_marker}/{place}", f"{of_marker}/digits-1"):
        code, err = verify(uri)
        assert code == 1 and f"{place}/_SUCCESS: it is {COLD}\n" in err and "gone" not in err

    of_all = bucket("of-all", ["_SUCCESS", "lineage.json"])
    code, err = verify(f"{of_all}/digits-1")
    assert code == 1 and err.count(COLD) == 2 and "gone" not in err


def test_of_an_archived_record_the_others_are_listed(ask, training, results, bucket):
    training(1)
    cold, warm = training(2), training(3)
    shutil.rmtree(results.path / "_lineage")
    uri = bucket("some")
    client, key = s3_client(os.environ["AWS_ENDPOINT_URL"], "k", "s"), f"some/{cold}/lineage.json"
    client.copy_object(Bucket="models", Key=key, CopySource=f"models/{key}", StorageClass="GLACIER")
    client.close()
    for question in (("list", uri), ("list", uri, "--rebuild"), ("impact", "s3://bucket/d", uri)):
        code, out, err = ask(*question)
        assert code == 1 and (question[0] == "impact" or warm in out)
        why = "its lineage.json is archived, in storage class GLACIER: restore it"
        assert f"ddl-airflow: {cold}: nobody knows " in err and why in err


def test_an_archived_index_or_pointer_hides_no_line(ask, training, results, bucket, capsys):
    """A bucket's rule moves what has not changed for long: each of them ended every question."""
    one, other = training(1), training(2, serves=True)
    assert ask("list", str(results.path))[0] == 0
    of_index = bucket("of-index", ["index.json.gz"])
    questions = [("list", of_index), ("impact", "s3://bucket/digits", of_index)]
    for question in (*questions, ("list", of_index, "--rebuild")):
        code, out, err = ask(*question)
        assert code == 1 and one in out and other in out
        assert "ddl-airflow: _lineage/index.json.gz: nobody knows whether it " in err
        assert "it is archived" in err and err.count("_lineage/index.json.gz") == 1
        assert cli.main(["verify", of_index]) == 1
        assert capsys.readouterr().err.count("_lineage/index.json.gz: ") == 1
    # Nor is it made again: it alone knows what was removed.
    assert ask("list", of_index)[0] == 1

    of_pointer = bucket("of-pointer", ["production.json"])
    for question in (("list", of_pointer), ("impact", "s3://bucket/digits", of_pointer)):
        code, out, err = ask(*question)
        assert code == 1 and one in out and other in out
        assert "digits/production.json: nobody knows what is in production: " in err
    assert ask("list", of_pointer, "--production")[:2] == (1, "")
    assert cli.main(["verify", of_pointer]) == 1
    assert "digits/production.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model", "x/model"])
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_results_at_a_place_called_model_are_results(
    ask, results, training, bucket, tmp_path, capsys, kind, name
):
    place = training(1, serves=True)
    (tmp_path / "at" / name).parent.mkdir(parents=True)
    moved = shutil.copytree(results.path, tmp_path / "at" / name)
    uri = bucket(name) if kind == "bucket" else str(moved)
    for one in (uri, f"{uri}/"):
        assert cli.main(["verify", one]) == 0
        assert "1 publications that are known are there" in capsys.readouterr().out
        code, _, err = ask("show", one)
        assert code == 1 and f"{uri} is of several trainings. Name one, as {uri}/digits-1" in err
        assert ask("list", one)[0] == 0
    for one in (place, f"{place}/model", f"{place}/model/", f"{place}/lineage.json"):
        assert ", in production\n" in ask("show", f"{uri}/{one}")[1]
        assert cli.main(["verify", f"{uri}/{one}"]) in (0, 1)
        assert "nothing was published" not in capsys.readouterr().err
    assert ", in production\n" in ask("show", f"{uri}/digits-1/model")[1]
    _, _, err = ask("show", f"{uri}/digits-9/model")
    assert "nothing was published there" in err or "no such folder" in err


def test_a_dag_called_model_is_a_dag(ask, results, training):
    training(1, dag_id="model", serves=True)
    code, _, err = ask("show", f"{results.path}/model")
    assert code == 1 and "is of a DAG. Name one of its trainings" in err


def test_of_several_publications_of_a_training_it_is_said_which_is_shown(
    ask, results, training, tmp_path, capsys
):
    first = training(1, serves=True)
    shutil.rmtree(tmp_path / "of-1")
    second = training(1, SCRIPT + "again\n")
    name = f"{results.path}/digits-1"
    code, out, err = ask(name)
    assert code == 0 and second in out
    also = f"note: digits-1 has 2 publications, and this is the newest, {second.split('/')[1]}"
    assert f"{also}. The others: {first.split('/')[1]}\n" in err
    assert "note: " not in ask(results.path / first)[2]
    for question in (("diff", name, results.path / first), ("diff", results.path / first, name)):
        assert also in ask(*question)[2]
    # The newest has lost its marker: the one before does not pass for it.
    (results.path / second / "_SUCCESS").unlink()
    code, out, err = ask(name)
    assert code == 0 and first in out
    assert f"note: {second} is newer than this one, {first.split('/')[1]}, and has no whole" in err
    assert f"`ddl-airflow verify {(results.path / second).as_uri()}` says more\n" in err


ODD_DAGS = ["a b", "100%", "a%20b", "zähler.v2", ".hidden", "a\\b", "quote'd", "_digits"]


@pytest.mark.parametrize("dag_id", ODD_DAGS, ids=ascii)
def test_of_a_dag_with_an_odd_name_all_is_known(ask, results, training, capsys, dag_id):
    first = training(1, dag_id=dag_id, serves=True)
    serves = training(2, dag_id=dag_id, serves=True)
    found = json.loads(ask("list", "--json", "--dag", dag_id, results.path)[1])
    assert [(one["publication"], one["production"]) for one in found] == [
        (serves, True),
        (first, False),
    ]
    uri = (results.path / dag_id).as_uri()
    for words in (
        ("verify", results.path),
        ("production", uri),
        ("rollback", uri),
        ("promote", results.path / dag_id, "--to", f"{dag_id}-2"),
    ):
        assert cli.main([*map(str, words)]) == 0, words
    for place in (results.path / serves, (results.path / serves).as_uri()):
        assert ", in production\n" in ask(place)[1]
    capsys.readouterr()
