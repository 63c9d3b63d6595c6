"""``ddl-airflow rerun``: what would make a model again, and whether it comes out the same.

One training of the example on two ranks is for all tests here; it and its reruns are real.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
from ddl_ops import rank_record

from ddl_airflow import cli
from ddl_airflow.commands.rerun import _SETTINGS as SET_AGAIN
from ddl_airflow.core.manifest.digest import digest
from ddl_airflow.core.manifest.load import load_manifest, load_manifest_text
from ddl_airflow.demo.digits import HELD_OUT_LABELS, TRAIN_LABELS, write_digits
from ddl_airflow.lineage.rerun import manifest_text
from ddl_airflow.storage import checksums
from ddl_airflow.storage.code import digest_of
from ddl_airflow.storage.fingerprint import DigestOfParts
from tests.limits import within

pytest.importorskip("tensorflow")

EXAMPLE = Path(__file__).parents[3] / "dags" / "mnist-keras" / "train.py"
# Seeds, for the example sets none; one epoch of few steps; and an input that no record knows of:
# what is in the file `hidden` is added to a picture of the third step.
SEEDS = """
keras.utils.set_random_seed(7 + ddl.rank())
"""
HIDDEN = """
train_images, train_labels = train_images[:2560].copy(), train_labels[:2560]
with open({hidden!r}) as file:
    train_images[300] += float(file.read())
"""
MANIFEST = """
model_definition:
  name: digits
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py
    compute_configuration: {name: cpu, nodes: 2}
training_data_reference: {type: fs, source: {path: ./data}, exclude: [/scratch/]}
training_results_reference: {type: fs, target: {path: ./results}}
parameters: {epochs: 9}
transform: {sample: t10k-images-idx3-ubyte.gz}
lineage: {prove: true}
retries: {delay: 10s}
"""


def test_what_is_set_again_is_among_what_ranks_record():
    """The two are in packages of which neither imports the other."""
    assert {*SET_AGAIN} <= {*rank_record._SETTINGS}


def of_the_run(text, uri="file:///data", environment=None, **parameters):
    """The manifest that would make a model of such a run again."""
    manifest = load_manifest_text(text, "m.yml")
    record = {
        "training_id": "digits-1",
        "manifest": {"digest": manifest.digest, "said": manifest.said},
        "run": {"parameters": {"nodes": 2, **parameters}},
        "dataset": {"uri": uri},
        "environment": environment or {},
    }
    return load_manifest_text(manifest_text(record), "again.yml")


@pytest.mark.parametrize(
    ("command", "checkpoint"), [("python train.py", 7), ("python train.py ; python a.py", "latest")]
)
def test_a_checkpoint_is_set_for_the_built_in_transform_alone(command, checkpoint):
    """A run by hand has it among its parameters whichever transform there is."""
    again = of_the_run(MANIFEST.replace("python train.py", command), checkpoint="7")
    assert again.transform.checkpoint == checkpoint
    assert not [one for one in again.warnings if one.field.startswith("transform")]


@pytest.mark.parametrize("chosen", ["local", "slurm"])
def test_the_launchers_fields_are_those_of_the_run(chosen):
    text = MANIFEST + "launcher: {python: /opt/train/bin/python}\n"
    launcher = of_the_run(text, launcher=chosen).launcher
    # What the manifest asks for is of its own launcher.
    expected = "/opt/train/bin/python" if chosen == "local" else None
    assert (launcher.kind, launcher.python or None) == (chosen, expected)


A, B = "@sha256:" + "a" * 64, "@sha256:" + "b" * 64


@pytest.mark.parametrize(
    ("asked", "images", "chosen", "image"),
    [
        ("t:1", ["docker.io/t" + A], "kubernetes", "t" + A),
        # As nodes say that pull over mirrors.
        ("t:1", ["docker.io/t" + A, "mirror:5000/hub/t" + A], "kubernetes", "t" + A),
        ("t:1", ["docker.io/t" + A, "docker.io/t" + B], "kubernetes", "t:1"),
        ("t:1", ["docker.io/t" + A, "t:1 (sha256:cc)"], "kubernetes", "t:1"),
        ("t:1", ["t:1 (sha256:cc)"], "kubernetes", "t:1"),
        ("t:1", None, "kubernetes", "t:1"),
        ("t:1", [], "local", None),
        ("host:5000/team/t", ["host:5000/team/t" + A], "kubernetes", "host:5000/team/t" + A),
        ("host:5000/t:1.0-rc_2", ["host:5000/t" + A], "kubernetes", "host:5000/t" + A),
        ("team/t:1" + B, ["team/t" + A], "kubernetes", "team/t" + A),
        ("t" + B, ["t" + A], "kubernetes", "t" + A),
    ],
)
def test_ranks_run_again_in_the_image_that_their_tag_meant_then(asked, images, chosen, image):
    text = (
        MANIFEST
        + f"launcher: {{kind: kubernetes, image: '{asked}', "
        + "volumes: [{claim: w, mount_path: /w}]}\n"
    )
    environment = {"launcher": chosen, **({"images": images} if images else {})}
    launcher = of_the_run(text, environment=environment, launcher=chosen).launcher
    assert (launcher.kind, getattr(launcher, "image", None)) == (chosen, image)


def test_data_that_a_run_by_hand_took_from_a_folder_are_looked_for_there():
    """``ddl-airflow run --data``: the manifest says where they are otherwise."""
    source = "{type: fs, source: {path: ./data}, exclude: [/scratch/]}"
    of_bucket = (
        "{type: s3, source: {bucket: own}, connection: {conn_id: minio}, exclude: [/scratch/]}"
    )
    assert source in MANIFEST
    again = of_the_run(MANIFEST.replace(source, of_bucket), "file:///a%20copy")
    assert str(again.training_data_reference.source.path) == "/a copy"
    again = of_the_run(MANIFEST.replace(source, of_bucket), "s3://own")
    assert again.training_data_reference.source.bucket == "own"


@pytest.mark.parametrize("in_manifest", [True, False])
@pytest.mark.parametrize(("name", "kept"), [("wide", "wide"), ("digits-1-" + 32 * "a", None)])
def test_only_an_experiment_with_a_name_of_its_own_is_named_again(name, kept, in_manifest):
    """That of another training is where that was, and of it a run elsewhere is refused."""
    text = MANIFEST + f"experiment: {name}\n" * in_manifest
    experiment = of_the_run(text, experiment_id=name).experiment
    assert (experiment and experiment.name) == kept


def environment():
    own = ("AIRFLOW_CONN_", "AIRFLOW__DDL__", "DDL_", "OMPI_", "PARAM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}


def call(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "ddl_airflow.cli", *map(str, words)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=within(180),
        check=False,
    )


def write_example(folder):
    """The example with seeds, its data, and the file `.hidden`."""
    write_digits(folder / "data")
    script = EXAMPLE.read_text()
    script = script.replace("\nmodel = keras.Sequential(", f"{SEEDS}\nmodel = keras.Sequential(")
    of_hidden = HIDDEN.format(hidden=str(folder / ".hidden"))
    script = script.replace("\n# (1) Each rank", f"{of_hidden}\n# (1) Each rank")
    script = script.replace("verbose=2", "shuffle=False, verbose=2")
    assert script.count("shuffle=False") == script.count("set_random_seed") == 1
    (folder / "train.py").write_text(script)
    (folder / "manifest.yml").write_text(MANIFEST)
    (folder / ".hidden").write_text("0")


def publication_in(folder):
    """Where its one model was published."""
    (found,) = (folder / ".ddl-run" / "results").glob("digits-*/*/lineage.json")
    return found.parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of the manifest, with one training published in .ddl-run/results."""
    folder = tmp_path_factory.mktemp("dags")
    write_example(folder)
    done = call(folder, "run", "manifest.yml", "--set", "epochs=2")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def place(trained):
    """The publication."""
    return publication_in(trained)


@pytest.fixture
def record(place):
    return json.loads((place / "lineage.json").read_text())


def test_the_weights_are_noted_while_the_model_trains(place, record, trained):
    proof = record["result"]["proof"]
    assert proof == {"key": "logs/weights.jsonl", "notes": 41, "step": 40}
    assert all(len(one["sha256"]) == 64 for one in record["dataset"]["listing"])
    begun, *notes = map(json.loads, (place / proof["key"]).read_text().splitlines())
    assert [one["step"] for one in notes] == list(range(41))
    assert begun["begun"] == 0 and begun["tensors"][0].endswith("conv2d/kernel")
    assert record["manifest"]["digest"] == load_manifest(trained / "manifest.yml").digest


def test_the_folder_has_the_manifest_and_the_scripts_of_its_run(place, trained, tmp_path):
    done = call(tmp_path, "rerun", place, "--to", "made again")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": ddl-airflow run 'made again/manifest.yml'\n")
    made = tmp_path / "made again"
    manifest = load_manifest(made / "manifest.yml")
    assert manifest.parameters["epochs"].default == 2
    assert manifest.world_size == 2 and manifest.lineage.prove
    assert (made / "train.py").read_bytes() == (trained / "train.py").read_bytes()
    assert str(trained / "data") in (made / "manifest.yml").read_text()
    assert call(tmp_path, "run", "made again/manifest.yml", "--dry-run").returncode == 0
    done = call(tmp_path, "rerun", place, "--to", "made again")
    assert done.returncode == 1 and "made again is there, and is not empty" in done.stderr


def test_a_training_that_is_deterministic_is_proved_to_be_the_same(place, tmp_path):
    done = call(tmp_path, "rerun", place, "--prove")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.startswith("bit-identical: 41 notes of 8 tensors, to step 40, are the same")


def test_one_sample_that_is_another_is_told_by_step_and_tensor(trained, place, record, tmp_path):
    (trained / ".hidden").write_text("0.5")
    try:
        done = call(tmp_path, "rerun", place, "--prove", "--json")
    finally:
        (trained / ".hidden").write_text("0")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    first = json.loads((place / "logs" / "weights.jsonl").read_text().splitlines()[0])["tensors"]
    assert told["identical"] is False and told["environment"] == {}
    assert told["diverged"]["step"] == 3 and told["diverged"]["same_until"] == 2
    assert told["diverged"]["tensors"][0] == first[0]


@pytest.fixture
def rerun(tmp_path, monkeypatch, capsys):
    """rerun(words) -> exit code, stdout, stderr: in this process, for what trains nothing."""
    monkeypatch.chdir(tmp_path)

    def ask(*words):
        code = cli.main(["rerun", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ask


@pytest.fixture
def data(trained, tmp_path):
    """A copy of the data, of another time."""
    return Path(shutil.copytree(trained / "data", tmp_path / "copy", copy_function=shutil.copyfile))


def flip(path):
    """One bit, of which neither the size nor the time of the file tells."""
    before, body = path.stat(), bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_copy_of_the_data_is_as_good_as_long_as_it_is_the_same(rerun, place, data):
    assert rerun(place, "--to", "one", "--data", data)[0] == 0
    assert f"path: {data}" in Path("one/manifest.yml").read_text()
    flip(data / TRAIN_LABELS)
    (data / HELD_OUT_LABELS).unlink()
    code, _, err = rerun(place, "--to", "two", "--data", data)
    assert code == 1 and not Path("two").exists()
    assert f"{HELD_OUT_LABELS} (of the data: gone)" in err
    assert f"{TRAIN_LABELS} (of the data: not what they were)" in err


def test_what_has_come_to_the_data_since_is_left_out(rerun, place, data, record):
    (data / "more").mkdir()
    (data / "more" / "pictures").write_text("new")
    code, _, err = rerun(place, "--to", "again", "--data", data)
    assert code == 0 and "left out: 1 file" in err
    assert {path.name for path in Path("again/data").iterdir()} == {
        one["key"] for one in record["dataset"]["listing"]
    }
    manifest = load_manifest(Path("again/manifest.yml"))
    assert manifest.training_data_reference.source.path == "./data"


def of_a_bucket(listing, data, proof=MappingProxyType({})):
    """Gives each file the ETag that it had in a bucket, and takes its SHA-256 away.

    ``proof`` is what was known of it when it was staged.
    """

    def change(record):
        for one in record["dataset"]["listing"]:
            del one["sha256"]
            one |= {"etag": listing(data / one["key"]), **proof}

    return change


def md5(path):
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def md5_of_parts(path, size=8 * 2**20):
    digest = DigestOfParts(size)
    digest.update(path.read_bytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("etag", "proof"),
    [
        (md5, {"etag_is": "md5"}),
        (md5_of_parts, {"etag_is": "md5", "part_size": 8 * 2**20}),
        (partial(md5_of_parts, size=4_321), {"etag_is": "md5", "part_size": 4_321}),
    ],
)
def test_a_copy_of_what_came_from_a_bucket_is_compared_with_the_etag(
    rerun, place, data, tmp_path, etag, proof
):
    """Only a training that is to be proved has SHA-256 of its data."""
    copy = edited(place, tmp_path, of_a_bucket(etag, data, proof))
    assert rerun(copy, "--to", "one", "--data", data)[::2] == (0, "")
    flip(data / TRAIN_LABELS)
    code, _, err = rerun(copy, "--to", "two", "--data", data)
    assert code == 1 and f"{TRAIN_LABELS} (of the data: not what they were)" in err


@pytest.mark.parametrize("etag", [md5, md5_of_parts])
def test_an_etag_that_nobody_knows_to_be_a_digest_proves_what_it_is_the_digest_of(
    rerun, place, data, tmp_path, etag
):
    """As in a record of an earlier version: what it is not the digest of may be another's."""
    copy = edited(place, tmp_path, of_a_bucket(etag, data))
    assert rerun(copy, "--to", "one", "--data", data)[::2] == (0, "")
    flip(data / TRAIN_LABELS)
    code, _, err = rerun(copy, "--to", "two", "--data", data)
    assert code == 0 and f"of 1 file of the data, such as {TRAIN_LABELS}, only the size" in err


def of_a_key_service(path):
    """Neither the MD5 of the content nor of its parts."""
    return hashlib.sha256(path.name.encode()).hexdigest()[:32]


@pytest.mark.parametrize("etag", [md5, of_a_key_service])
@pytest.mark.parametrize("algorithm", checksums.CRCS)
def test_a_copy_is_compared_with_the_crc_that_the_bucket_had(
    rerun, place, data, tmp_path, etag, algorithm
):
    """Whatever its ETag is: nobody has looked."""

    def with_crc(record):
        of_a_bucket(etag, data)(record)
        for one in record["dataset"]["listing"]:
            one[algorithm] = checksums.hex_of(algorithm, (data / one["key"]).read_bytes())

    copy = edited(place, tmp_path, with_crc)
    assert rerun(copy, "--to", "one", "--data", data)[::2] == (0, "")
    flip(data / TRAIN_LABELS)
    code, _, err = rerun(copy, "--to", "two", "--data", data)
    assert code == 1 and f"{TRAIN_LABELS} (of the data: not what they were)" in err


@pytest.mark.parametrize(
    ("etag", "proof"),
    [
        (of_a_key_service, {}),
        (lambda path: f"{of_a_key_service(path)}-1", {}),
        (lambda path: f"{of_a_key_service(path)}-{'9' * 30}", {"etag_is": "md5", "part_size": 1}),
        (partial(md5_of_parts, size=4_321), {}),  # a size that no usual uploader has
    ],
)
def test_data_whose_etags_are_no_digests_are_not_called_changed(
    rerun, place, data, tmp_path, etag, proof
):
    """Of a bucket that a key service encrypts for, or of parts of some size."""
    copy = edited(place, tmp_path, of_a_bucket(etag, data, proof))
    code, _, err = rerun(copy, "--to", "again", "--data", data)
    assert code == 0, err
    assert "files of the data, such as t10k-" in err and "only the size was compared" in err


def test_what_cannot_be_compared_is_said(rerun, place, data, tmp_path):
    copy = edited(place, tmp_path, of_a_bucket(lambda path: "0x8DC-of-azure", data))
    code, _, err = rerun(copy, "--to", "again", "--data", data)
    assert code == 0 and "of 4 files of the data, such as t10k-" in err
    assert "only the size was compared: the record has no digest of what was in it" in err
    # Where it lay, who has another version of it has another content.
    code, _, err = rerun(copy, "--to", "there")
    assert code == 1 and "not what they were" in err


def test_data_do_not_get_among_scripts_of_that_name(rerun, place, data, tmp_path):
    def with_folder(record):
        record["code"] |= {"files": ["data/load.py"], "digest": digest_of({"data/load.py": load})}
        body = {"size": 4, "sha256": hashlib.sha256(b"x=1\n").hexdigest()}
        record["result"]["files"].append({"key": "code/data/load.py", **body})

    load = tmp_path / "load.py"
    load.write_text("x=1\n")
    copy = edited(place, tmp_path, with_folder)
    (copy / "code" / "data").mkdir()
    shutil.copy(load, copy / "code" / "data")
    (data / "new").write_text("new")
    code, _, err = rerun(copy, "--to", "again", "--data", data)
    assert code == 0, err
    assert [path.name for path in Path("again/data").iterdir()] == ["load.py"]
    assert len(list(Path("again/data-2").iterdir())) == 4
    manifest = load_manifest(Path("again/manifest.yml"))
    assert manifest.training_data_reference.source.path == "./data-2"


def test_what_the_manifest_leaves_out_is_no_news(rerun, place, data):
    (data / "scratch").mkdir()
    (data / "scratch" / "notes").write_text("new")
    code, _, err = rerun(place, "--to", "again", "--data", data)
    assert (code, err) == (0, "") and not Path("again/data").exists()
    manifest = load_manifest(Path("again/manifest.yml"))
    assert manifest.training_data_reference.exclude == ("/scratch/",)


def test_a_byte_of_the_data_that_changed_unseen_is_found_before_it_trains(trained, place, tmp_path):
    flip(trained / "data" / TRAIN_LABELS)
    try:
        done = call(tmp_path, "rerun", place, "--prove", "--to", "again")
    finally:
        flip(trained / "data" / TRAIN_LABELS)
    assert done.returncode == 1
    assert f"{TRAIN_LABELS} (of the data: not what they were)" in done.stderr
    assert not list(tmp_path.glob("again/.ddl-run/runs/*/*/logs/rank-*"))
    # Why it is not proved can be looked at, and the rest be done by hand.
    assert "again stays, to be looked at: its manifest and scripts are whole" in done.stderr
    assert (tmp_path / "again" / "manifest.yml").is_file()


def edited(place, tmp_path, change):
    """A copy of the publication with another record."""
    copy = Path(shutil.copytree(place, tmp_path / "results" / "x" / place.name))
    path = copy / "lineage.json"
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))
    return copy


def without_code(record):
    record["result"]["files"] = [
        one for one in record["result"]["files"] if not one["key"].startswith("code/")
    ]


def climbing(record):
    record["code"]["files"] = ["../../train.py"]


def elsewhere(record):
    manifest = record["manifest"]
    manifest["said"]["code"] = "../out"
    manifest["digest"] = digest(manifest["said"])


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        (without_code, (), "the scripts were not published with the model (train.py was not)"),
        (lambda r: r["manifest"].pop("said"), (), "the record has no manifest"),
        (lambda r: r["manifest"]["said"].update(code="."), (), "not what the digest beside it"),
        (lambda r: r["result"].pop("proof"), ["--prove"], "noted no digests of its weights"),
        (lambda r: r["run"].update(experiment="wide"), ["--prove"], "experiment wide"),
        (climbing, (), "is no path inside a folder"),
        (elsewhere, (), "code: is outside the manifest's folder"),
        (lambda r: r.pop("code"), (), "has no whole lineage"),
    ],
    ids=["code", "manifest", "digest", "notes", "experiment", "climbing", "elsewhere", "damaged"],
)
def test_what_is_not_there_is_named_and_nothing_is_made(
    rerun, place, tmp_path, change, words, said
):
    code, out, err = rerun(edited(place, tmp_path, change), "--to", "again", *words)
    assert (code, out) == (1, "") and said in err
    assert not Path("again").exists() and not Path("out").exists()
    assert not (tmp_path.parent / "train.py").exists()


def test_a_script_that_was_changed_there_is_not_taken(rerun, place, tmp_path):
    copy = edited(place, tmp_path, lambda record: None)
    (copy / "code" / "train.py").write_text("print('another')")
    code, _, err = rerun(copy, "--to", "again")
    assert code == 1 and "code/train.py is not the file that was published" in err
    assert not Path("again").exists() and "stays" not in err


def test_what_went_on_from_others_weights_is_not_said_to_be_made_again(rerun, place, tmp_path):
    def went_on(record):
        record["run"]["experiment"] = "wide"
        before = {"training_id": "digits-0", "uri": "s3://b/old", "dataset": "sha256:01"}
        before |= {"code": "sha256:02", "manifest": "sha256:03", "parameters": {}}
        record["result"] |= {"went_on_from": [before], "went_on_from_is_whole": False}

    copy = edited(place, tmp_path, went_on)
    code, out, err = rerun(copy, "--to", "again")
    assert (code, err) == (0, "")
    first, *others = out.splitlines()
    assert first == (
        "again/manifest.yml begins without the checkpoints that it went on from: "
        "ddl-airflow run again/manifest.yml"
    )
    assert others[0].startswith("It went on from checkpoints of digits-0, data s3://b/old")
    assert others[1:] == [
        "It perhaps went on from others': nobody noted who was in experiment wide before"
    ]
    told = json.loads(rerun(copy, "--to", "once more", "--json")[1])
    assert [one["training_id"] for one in told["went_on_from"]] == ["digits-0"]
    assert told["went_on_from_is_whole"] is False


def test_a_folder_that_could_not_be_made_whole_is_taken_back(rerun, place, tmp_path):
    """Also one that is within others that were not there, and what was put into one that was."""
    copy = edited(place, tmp_path, lambda record: record["code"].update(digest="sha256:other"))
    assert rerun(copy, "--to", "far/away/again")[0] == 1
    assert not Path("far").exists()
    Path("mine").mkdir()
    code, _, err = rerun(copy, "--to", "mine")
    assert code == 1 and "is not the code that the record is of" in err
    assert list(Path("mine").iterdir()) == []
