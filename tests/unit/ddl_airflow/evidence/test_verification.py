"""Every byte of a publication counts: ``ddl-airflow verify`` names the file that is not itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ddl_airflow import cli
from ddl_airflow.core.errors import FileChanged
from ddl_airflow.evidence import bom
from ddl_airflow.evidence.signature import sign, signer
from ddl_airflow.evidence.verification import verify
from ddl_airflow.lineage.index import mark_removed
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.marker import sealed
from ddl_airflow.storage.publication import content_of, restore, retire
from tests.limits import within

ALL = {
    *("_SUCCESS", "lineage.json", "code/train.py", "logs/rank-0.log"),
    *("model/saved_model.pb", "model/variables/v"),
    *("evidence/curves.svg", "evidence/model-card.md", "evidence/dataset.croissant.json"),
    *("evidence/bom.cdx.json", "evidence/provenance.intoto.json", "evidence/model.sig"),
}


@pytest.fixture
def place(training, key):
    """The folder of a signed publication."""
    return Path(urlsplit(training.publish(signing_key=str(key[0]))).path)


@pytest.fixture
def ask(capsys):
    """ask(words) -> exit code, stdout, stderr."""

    def call(*words):
        capsys.readouterr()
        code = cli.main(["verify", *map(str, words)])
        return code, *capsys.readouterr()

    return call


def files_of(place):
    return sorted(path for path in place.rglob("*") if path.is_file())


def renamed(place):
    """The place, under the name that is right for what its marker lists."""
    files = json.loads((place / "_SUCCESS").read_text())["files"]
    content = content_of({one["key"]: (one["sha256"], one["size"]) for one in files})
    return place.rename(place.with_name(f"{content}-{place.name.rpartition('-')[2]}"))


def test_what_was_published_is_whole_with_the_key_and_without(place, key, ask):
    assert {path.relative_to(place).as_posix() for path in files_of(place)} == ALL
    code, out, err = ask(place, "--key", key[1])
    assert (code, err) == (0, "")
    assert out == f"{place.as_uri()}: {len(ALL)} files are as they were published, and signed " + (
        "with that key\n"
    )
    for uri in (place / "lineage.json", place / "model", place.parent):  # of which it is the newest
        code, out, _ = ask(uri)
    assert code == 0 and "nobody said whose key to expect" in out
    code, out, _ = ask("--json", place, "--key", key[1])
    said = json.loads(out)
    assert code == 0 and said["whole"] and said["signed"] and said["problems"] == []
    assert (said["files"], said["not_made"], said["notes"]) == (len(ALL), {}, [])


def test_a_byte_flipped_in_any_file_is_found_and_the_file_named(place, key):
    store = FolderStore(place)
    for path in files_of(place):
        body = path.read_bytes()
        name = path.relative_to(place).as_posix()
        for at, public in ((0, key[1]), (len(body) // 2, None), (len(body) - 1, key[1])):
            path.write_bytes(body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
            assert name in verify(store, public).problems, (name, at)
        path.write_bytes(body)
    assert verify(store, key[1]).problems == {}


def test_flipped_bytes_of_the_marker_and_the_record_are_that_file_alone(training):
    """The marker is under no other file's digest. DDL_EVERY_BYTE=1 flips each, for minutes."""
    place = Path(urlsplit(training.publish(evidence=False)).path)
    store = FolderStore(place)
    every = 1 if os.environ.get("DDL_EVERY_BYTE") else 61
    for name in ("_SUCCESS", "lineage.json"):
        path = place / name
        body = path.read_bytes()
        for at in range(0, len(body), every):
            for bit in (1, 32):
                path.write_bytes(body[:at] + bytes([body[at] ^ bit]) + body[at + 1 :])
                assert set(verify(store).problems) == {name}, (name, at, bit)
        path.write_bytes(body)
    assert verify(store).problems == {}


def test_a_file_that_is_gone_is_named(place, key):
    store = FolderStore(place)
    for path in files_of(place):
        body = path.read_bytes()
        path.unlink()
        name = path.relative_to(place).as_posix()
        assert set(verify(store).problems) == {name}
        assert name in verify(store, key[1]).problems
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(body)
    assert verify(store, key[1]).problems == {}


@pytest.mark.parametrize("name", ["model/assets/extra", "evidence/more.json", "_RETIRED", "x"])
def test_a_file_that_was_not_published_is_named(place, key, name, ask):
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text("foreign")
    assert set(verify(FolderStore(place)).problems) == {name}
    code, out, err = ask(place, "--key", key[1])
    assert code == 1 and out == ""
    assert f"ddl-airflow: {place.as_uri()}/{name}: it was not published with the rest" in err


def test_a_marker_that_cleaning_left_twice_is_no_fault_of_what_was_published(place, key):
    (place / "_RETIRED").write_bytes((place / "_SUCCESS").read_bytes())
    found = verify(FolderStore(place), key[1])
    assert found.problems == {}
    assert any("_RETIRED is beside _SUCCESS" in note for note in found.notes)


def test_whoever_changes_all_that_lists_a_file_is_found_by_the_signature(place, key):
    """With the record and the marker made to fit: only the site's key is not to be had."""
    path = place / "model" / "saved_model.pb"
    path.write_text("graPh")
    record = json.loads((place / "lineage.json").read_text())
    (file,) = (f for f in record["result"]["files"] if f["key"] == "model/saved_model.pb")
    file["sha256"] = hashlib.sha256(b"graPh").hexdigest()
    (place / "lineage.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    marker = json.loads((place / "_SUCCESS").read_text())
    for one in marker["files"]:
        one["sha256"] = hashlib.sha256((place / one["key"]).read_bytes()).hexdigest()
    (place / "_SUCCESS").write_bytes(sealed(marker))
    # The place is still named after what was published there.
    assert "_SUCCESS" in verify(FolderStore(place)).problems
    place = renamed(place)
    found = verify(FolderStore(place), key[1]).problems
    assert found["model/saved_model.pb"] == ["it is not the file that was signed"]
    assert found["lineage.json"] == ["it is not the file that was signed"]
    # Without the key, the statement still is of another file.
    assert set(verify(FolderStore(place)).problems) == {"evidence/provenance.intoto.json"}
    # Nor can the signature go as if there had been none.
    (place / "evidence" / "model.sig").unlink()
    marker["files"] = [one for one in marker["files"] if one["key"] != "evidence/model.sig"]
    (place / "_SUCCESS").write_bytes(sealed(marker))
    place = renamed(place)
    assert "evidence/model.sig" in verify(FolderStore(place)).problems


def test_another_key_or_none_is_no_signature(place, key, other_key, training, ask):
    assert set(verify(FolderStore(place), other_key[1]).problems) == {"evidence/model.sig"}
    code, _, err = ask(place, "--key", place / "none.pub")
    assert code == 1 and "none.pub: No such file or directory" in err
    unsigned = Path(urlsplit(training.publish()).path)
    found = verify(FolderStore(unsigned), key[1])
    assert found.problems == {"evidence/model.sig": ["nobody signed what was published"]}
    assert not found.signed and verify(FolderStore(unsigned)).problems == {}


def test_a_signature_that_names_the_sites_key_and_was_made_with_another_is_none(
    training, key, other_key
):
    """With all that lists it made to fit."""
    theirs = json.loads(sign("digits-1", {}, key[0]))["verificationMaterial"]
    place = Path(urlsplit(training.publish(signing_key=str(other_key[0]))).path)
    assert verify(FolderStore(place), other_key[1]).signed
    bundle = json.loads((place / "evidence" / "model.sig").read_text())
    body = json.dumps({**bundle, "verificationMaterial": theirs}).encode()
    (place / "evidence" / "model.sig").write_bytes(body)
    marker = json.loads((place / "_SUCCESS").read_text())
    (entry,) = (one for one in marker["files"] if one["key"] == "evidence/model.sig")
    entry["sha256"] = hashlib.sha256(body).hexdigest()
    (place / "_SUCCESS").write_bytes(sealed(marker))
    place = renamed(place)
    assert verify(FolderStore(place)).problems == {}  # nobody asked who
    for public in (key[1], other_key[1]):
        found = verify(FolderStore(place), public)
        assert set(found.problems) == {"evidence/model.sig"} and not found.signed


def test_what_is_no_signature_names_no_key():
    for body in (b"", b"[]", b'{"verificationMaterial": 1}', b"[" * 100_000):
        assert signer(body) == ""


def test_without_the_libraries_it_says_what_was_not_looked_at(place, key, monkeypatch):
    for module in ("cyclonedx", "in_toto_attestation", "model_signing"):
        for name in [one for one in sys.modules if one.partition(".")[0] == module]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
    bom._validator.cache_clear()
    found = verify(FolderStore(place))
    assert found.problems == {}
    for name in ("evidence/bom.cdx.json", "evidence/provenance.intoto.json"):
        (note,) = (one for one in found.notes if one.startswith(name))
        assert "was not held against its schema" in note and "extra `evidence`" in note
    # Whoever asks for a signature is not told that there is one.
    found = verify(FolderStore(place), key[1])
    assert set(found.problems) == {"evidence/model.sig"} and not found.signed


def test_a_copy_of_it_is_whole_and_one_withdrawn_says_so(place, key, tmp_path):
    """A copy has other times of change, which are the ETags of a folder."""
    copy = tmp_path / "copy"
    shutil.copytree(place, copy, copy_function=shutil.copyfile)
    store = FolderStore(copy)
    assert verify(store, key[1]).problems == {}
    retire(store, 1.5)
    assert verify(store, key[1]).problems == {
        "_SUCCESS": ["it is gone: cleaning has withdrawn what was published here"]
    }
    restore(store)
    assert verify(store, key[1]).problems == {}


def test_what_earlier_versions_published_is_verified_as_far_as_it_can_be(training):
    place = Path(urlsplit(training.publish(evidence=False)).path)
    marker = json.loads((place / "_SUCCESS").read_text())
    del marker["digest"]
    (place / "_SUCCESS").write_text(json.dumps(marker, indent=1))
    found = verify(FolderStore(place))
    assert found.problems == {} and len(found.notes) == 2
    (place / "model" / "variables" / "v").write_text("weightz")
    assert set(verify(FolderStore(place)).problems) == {"model/variables/v"}


def test_what_is_no_publication_is_said(tmp_path, ask):
    (tmp_path / "results").mkdir()
    assert ask(tmp_path / "results")[0] == 1
    (tmp_path / "results" / "_SUCCESS").write_text("[]")
    code, _, err = ask(tmp_path / "results")
    assert code == 1 and "_SUCCESS: it is not as it was written" in err
    assert "lineage.json: it is gone" in err


def test_an_older_publication_does_not_pass_for_the_newest_that_has_lost_its_marker(training, ask):
    older = Path(urlsplit(training.publish()).path)
    (training.layout.model / "variables" / "v").write_text("others")
    newer = Path(urlsplit(training.publish()).path)
    for first, last in ((1, 9e9), (9e9, 1)):  # as they were published, and as somebody copied them
        os.utime(older / "_SUCCESS", (first, first))
        os.utime(newer / "_SUCCESS", (last, last))
        code, out, _ = ask(older.parent)
        assert code == 0 and newer.as_uri() in out
    os.utime(older / "_SUCCESS", (1, 1))
    marker = (newer / "_SUCCESS").read_bytes()
    (newer / "_SUCCESS").unlink()
    code, out, err = ask(older.parent)
    assert (code, out) == (1, "") and f"{newer.as_uri()}/_SUCCESS: it is gone" in err
    assert f"cut off, or is at work, looks the same. The newest with a marker is {older.name}" in (
        err
    )
    # One that cleaning took is not the newest any more.
    (newer / "_RETIRED").write_bytes(marker)
    code, out, _ = ask(older.parent)
    assert code == 0 and older.as_uri() in out
    for name in ("_SUCCESS", "_RETIRED"):
        (older / name).unlink(missing_ok=True)
    (newer / "_RETIRED").unlink()
    code, _, err = ask(older.parent)
    assert code == 1 and f"{newer.as_uri()}/_SUCCESS: it is gone" in err


def test_the_place_says_whose_publication_is_asked_for(training, key, ask):
    """Another's that is whole, and signed with the same key, is put where this one lay."""
    mine = Path(urlsplit(training.publish(signing_key=str(key[0]))).path)
    (training.layout.model / "saved_model.pb").write_text("other graph")
    other = Path(urlsplit(training.publish(signing_key=str(key[0]))).path)
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    code, _, err = ask(mine, "--key", key[1])
    assert code == 1
    assert f"_SUCCESS: it lists other content than that after which {mine.name} is named" in err
    # Under its own name, and in the place of another training.
    training_of_others = mine.parent.with_name("digits-manual-" + "0" * 32)
    shutil.copytree(other, training_of_others / other.name)
    for asked in (training_of_others, training_of_others / other.name):
        code, _, err = ask(asked, "--key", key[1])
        assert code == 1
        said = f"lineage.json: it is of training digits-1, and not of {training_of_others.name}"
        assert said in err
    # A copy that is named in no such way is whole, and nobody knows more.
    copy = shutil.copytree(other, mine.parents[1] / "backup")
    code, out, _ = ask(copy, "--key", key[1])
    assert code == 0 and "nothing but what lies here says that it is of training digits-1" in out


def test_a_file_that_grows_while_it_is_published_has_one_digest(training, key):
    """Whoever is asked for the key writes to a log: after the record, before the upload."""
    log = training.layout.logs / "rank-0.log"

    def secret(_conn_id):
        if len(log.read_text()) < 10:
            log.write_text("said more and more\n")
        return key[0].read_text()

    place = Path(urlsplit(training.publish(signing_key="keys", secret=secret)).path)
    assert verify(FolderStore(place), key[1]).problems == {}
    assert (place / "logs" / "rank-0.log").read_text() == "said more and more\n"
    assert any("rank-0.log changed while" in said for level, said in training.log)


def test_a_file_that_goes_on_growing_is_not_published(training, key):
    log = training.layout.logs / "rank-0.log"

    def secret(_conn_id):
        with log.open("a") as file:
            file.write("more\n")
        return key[0].read_text()

    with pytest.raises(FileChanged, match="rank-0.log changed while") as raised:
        training.publish(signing_key="keys", secret=secret)
    assert raised.value.retryable
    assert not list(training.results.rglob("_SUCCESS"))


def test_nothing_is_written_to_disk_and_several_are_read_at_once(place, monkeypatch):
    """As long as all wait for one another, none of them ends."""
    together = threading.Barrier(4)

    class Slow(FolderStore):
        def read(self, obj, take):
            if obj.key.startswith(("model/", "code/", "logs/")):
                together.wait(within(10))
            return super().read(obj, take)

    monkeypatch.setattr(tempfile, "tempdir", str(place / "none"))  # where nothing can be made
    assert verify(Slow(place), readers=4).problems == {}


def test_without_what_its_library_checks_with_it_says_so(place):
    """In a process of its own: cyclonedx decides when it is imported."""
    script = (
        "import sys; sys.modules['jsonschema'] = sys.modules['jsonschema.validators'] = None\n"
        "from ddl_airflow import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        "note: evidence/bom.cdx.json was not held against its schema: there is no module "
        "'jsonschema[.a-z]*'. Install the extra `evidence`",
        done.stdout,
    )


def test_the_newest_that_is_lost_as_a_whole_is_named_by_who_knows_of_it(training, ask, capsys):
    older = Path(urlsplit(training.publish()).path)
    (training.layout.model / "variables" / "v").write_text("others")
    newer = Path(urlsplit(training.publish()).path)
    name = f"{newer.parent.name}/{newer.name}"
    code, out, err = ask(training.results)
    assert (code, err) == (0, "") and "2 publications" in out
    shutil.rmtree(newer)
    # The older one is whole, and is not what the training has published last.
    code, out, err = ask(older.parent)
    assert (code, out) == (1, "")
    assert f"{newer.as_uri()}: it is gone as a whole: digits/latest.json and the index" in err
    # Of a place of results what is missing of it is said, without reading all that is there.
    code, out, err = ask(training.results)
    assert (code, out) == (1, "") and f"{newer.as_uri()}: it is gone as a whole: digits/" in err
    code, out, _ = ask(training.results, "--json")
    (problem,) = json.loads(out)["problems"]
    assert code == 1 and problem["file"] == name
    # Whoever asks for that one alone is told that it is not the newest.
    assert ask(older)[0] == 0
    assert cli.main(["lineage", "list", str(training.results)]) == 0
    assert f"{name} is gone: digits/latest.json names it" in capsys.readouterr().err
    # Without the index the pointer alone tells; without the pointer the index alone.
    shutil.rmtree(training.results / "_lineage")
    assert f"{newer.as_uri()}: it is gone as a whole: digits/latest.json" in ask(older.parent)[2]


def test_what_cleaning_has_removed_is_not_lost(training, ask):
    older = Path(urlsplit(training.publish()).path)
    (training.layout.model / "variables" / "v").write_text("others")
    newer = Path(urlsplit(training.publish()).path)
    shutil.rmtree(older)
    assert ask(newer.parent)[0] == ask(training.results)[0] == 1
    mark_removed(FolderStore(training.results), f"{older.parent.name}/{older.name}")
    assert ask(newer.parent)[0] == ask(training.results)[0] == 0


def test_one_that_is_lost_and_nothing_beside_it(training, ask):
    place = Path(urlsplit(training.publish()).path)
    shutil.rmtree(place.parent)
    code, out, err = ask(training.results)
    assert (code, out) == (1, "") and f"{place.as_uri()}: it is gone as a whole" in err


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("latest.json", '{"checkpoint": "model-4.keras"}'),
        ("production.json", '{"training_id": "x", "publication": "y", "before": []}'),
        ("_lineage/index.json.gz", "x"),
        ("best/latest.json", '{"training_id": "x", "publication": "y", "before": []}'),
    ],
)
def test_no_file_of_a_rank_makes_a_training_a_place_of_results(training, key, ask, file, text):
    """Of which only the names are looked at: what is in it would go unseen."""
    path = training.layout.result / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    place = Path(urlsplit(training.publish(signing_key=str(key[0]))).path)
    code, out, err = ask(place.parent, "--key", key[1])
    assert (code, err) == (0, "") and "and signed with that key" in out
    code, out, err = ask(training.results)
    assert (code, err) == (0, "") and "1 publications that are known are there\nnote: what" in out
    (place / "model" / "saved_model.pb").write_text("tampered")
    for uri in (place.parent, place):
        code, out, err = ask(uri, "--key", key[1])
        assert (code, out) == (1, "") and "model/saved_model.pb: it is not the file" in err
    # Nor does it where nothing else tells what it is.
    for name in ("_SUCCESS", "lineage.json"):
        (place / name).unlink()
    for uri in (place.parent, place):
        assert ask(uri)[:2] == (1, "")


def test_a_key_is_for_a_training_and_not_for_a_place_of_results(training, key, ask):
    training.publish(signing_key=str(key[0]))
    code, out, err = ask(training.results, "--key", key[1])
    assert (code, out) == (2, "") and "--key: no signature is looked at for all" in err


@pytest.mark.parametrize("text", ['{"version": 3}', "{}"])
def test_what_only_has_the_name_of_a_pointer_is_passed_over(training, ask, text):
    training.publish()
    other = training.results / "nightly" / "latest.json"
    other.parent.mkdir()
    other.write_text(text)
    code, out, err = ask(training.results)
    assert (code, err) == (0, "") and "1 publications" in out
    assert "note: file://" in out and "/nightly/latest.json is passed over" in out
    code, out, _ = ask(training.results, "--json")
    assert code == 0 and json.loads(out)["problems"] == []
    # One that was ours is not.
    (training.results / "digits" / "latest.json").write_text('{"training_id": "x", "before": 3}')
    code, out, err = ask(training.results)
    assert (code, out) == (1, "") and "digits/latest.json is damaged" in err
