"""What upload-results puts beside a model, held against the validators of those who defined it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
from cryptography.hazmat.primitives import serialization
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from markdown_it import MarkdownIt
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from ddl_airflow.evidence import names
from ddl_airflow.evidence.bom import bill, problems_of
from ddl_airflow.evidence.curves import Curves, drawn, read_curves
from ddl_airflow.evidence.verification import verify
from ddl_airflow.lineage.record import read_part, write_part
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from tests.unit.ddl_airflow.evidence.conftest import HOSTILE, Training

ROOT = Path(__file__).parents[4]
CROISSANT = ROOT / "build" / "croissant"
MADE = sorted({names.CURVES, names.CARD, names.DATASET, names.BOM, names.PROVENANCE})


def folder(uri):
    return Path(urlsplit(uri).path)


def record_of(place):
    return json.loads((place / "lineage.json").read_text())


@pytest.fixture
def place(training):
    return folder(training.publish())


@pytest.fixture
def hostile(tmp_path):
    """A publication of a training whose script chose the worst names."""
    key = "a b;&<x>'\"%?#.csv"
    return folder(Training(tmp_path / "hostile", metric=HOSTILE, key=key).publish())


def test_the_record_names_what_was_made(training, place):
    record = record_of(place)
    assert record["evidence"] == {"made": MADE, "not_made": {}}
    assert set(MADE) < {file["key"] for file in record["result"]["files"]}
    assert [line for line in training.log if "is not made" in line[1]] == []


@pytest.mark.parametrize("which", ["place", "hostile"])
def test_the_bill_is_cyclonedx(which, request):
    place = request.getfixturevalue(which)
    text = (place / names.BOM).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom, record = json.loads(text), record_of(place)
    model = bom["metadata"]["component"]
    assert (model["type"], model["name"]) == ("machine-learning-model", "digits")
    assert model["version"] == record["training_id"]
    assert {one["name"]: one["hashes"][0]["content"] for one in model["components"]} == {
        file["key"]: file["sha256"]
        for file in record["result"]["files"]
        if file["key"].startswith("model/")
    }
    kinds = {one["name"]: one["type"] for one in bom["components"]}
    assert kinds["s3://bucket/digits"] == "data" and kinds["CPU"] == "device"
    assert kinds["docker.io/trainer"] == "container"
    # Our own packages are on no index: whoever registers their names there is not meant.
    purls = {one["purl"].partition("@")[0] for one in bom["components"] if "purl" in one}
    assert purls == {f"pkg:pypi/{name}" for name in ("apache-airflow", "keras", "tensorflow")}
    assert "pkg:pypi/ddl" not in (place / names.PROVENANCE).read_text()


@pytest.mark.parametrize("prefix", ["v1|raw^2", "100%", "a#b#c", "tab\t`\\", "ü {x} y"])
def test_data_of_any_prefix_make_a_bill(place, prefix):
    record = record_of(place)
    record["dataset"]["uri"] = uri = f"s3://bucket/{prefix}"
    text = bill(record)
    assert problems_of(text) == []
    assert uri in {one["name"] for one in json.loads(text)["components"]}


def test_a_bill_of_many_files_says_how_many_are_left_out(place):
    record = record_of(place)
    record["result"]["files"] = [
        {"key": f"model/{number}", "size": 1, "sha256": f"{number:064x}"} for number in range(700)
    ]
    text = bill(record)
    assert problems_of(text) == [] and bill(record) == text
    model = json.loads(text)["metadata"]["component"]
    told = {one["name"]: one["value"] for one in model["properties"]}
    assert len(model["components"]) == 500 and told["ddl:files_only_in_lineage"] == "200"


@pytest.mark.parametrize("which", ["place", "hostile"])
def test_the_provenance_is_in_totos(which, request):
    place = request.getfixturevalue(which)
    parsed = json_format.Parse((place / names.PROVENANCE).read_text(), statement_pb2.Statement())
    Statement.copy_from_pb(parsed).validate()
    assert parsed.predicate_type == "https://slsa.dev/provenance/v1"
    predicate = json_format.MessageToDict(parsed.predicate)
    data, code = predicate["buildDefinition"]["resolvedDependencies"][:2]
    assert data == {
        **{"name": "dataset", "uri": "s3://bucket/digits"},
        "digest": {"ddlListing": "ab" * 32},
    }
    assert code["digest"]["gitCommit"] == "c" * 40
    assert predicate["runDetails"]["metadata"]["invocationId"] == "digits-1"


def test_the_description_of_the_data_is_croissant(place, hostile):
    if not CROISSANT.is_dir():
        pytest.skip("mlcroissant is not in build/croissant: make build/croissant/.fetched")
    code = (
        "import json, sys, mlcroissant\n"
        "for path in sys.argv[1:]:\n"
        "    told = mlcroissant.Dataset(jsonld=path).metadata\n"
        "    issues = told.ctx.issues\n"
        "    files = {one.name: one.sha256 for one in told.distribution}\n"
        "    print(json.dumps([sorted(issues.errors), sorted(issues.warnings), files]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, place / names.DATASET, hostile / names.DATASET],
        env={**os.environ, "PYTHONPATH": str(CROISSANT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "not standard" not in done.stderr
    for published, line in zip((place, hostile), done.stdout.splitlines(), strict=True):
        errors, warnings, files = json.loads(line)
        assert errors == []
        # What nobody has told us: the dataset's licence, its date, how to cite it.
        assert all(re.search("citeAs|datePublished|license", one) for one in warnings)
        listed = {one["key"] for one in record_of(published)["dataset"]["listing"]}
        assert files.keys() == listed and len(listed) == 2
        # The digest of "3\n".
        assert files["more/test.csv"].startswith("1121cfccd5913f0a63fec40a6ffd44ea")


def test_model_signings_own_command_verifies_the_signature(training, key, other_key):
    place = folder(training.publish(signing_key=str(key[0])))

    def call(public):
        words = [sys.executable, "-m", "model_signing", "verify", "key", place]
        words += ["--signature", place / names.SIGNATURE, "--public_key", public]
        words += ["--ignore-paths", place / "_SUCCESS"]
        return subprocess.run(words, capture_output=True, text=True)

    done = call(key[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert call(other_key[1]).returncode != 0
    (place / "model" / "variables" / "v").write_text("weightz")
    done = call(key[1])
    assert done.returncode != 0 and "model/variables/v" in done.stdout + done.stderr


def test_names_that_training_chose_are_text_in_the_card(hostile):
    card = (hostile / names.CARD).read_text()
    assert all(c.isprintable() or c == "\n" for c in card)
    shown = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(card)
    tags = set(re.findall(r"<([a-z0-9]+)", shown))
    assert tags <= set("h1 h2 p code table thead tbody tr th td img".split())
    assert re.findall(r'(?:src|href)="([^"]*)"', shown) == ["curves.svg"]
    assert shown.count("<h1>") == 1 and "alert(1)" in shown


def test_names_that_training_chose_are_text_in_the_picture(hostile):
    text = (hostile / names.CURVES).read_text()
    root = ElementTree.fromstring(text)
    kinds = {one.tag.rpartition("}")[2] for one in root.iter()}
    assert kinds == {"svg", "title", "rect", "g", "text", "path", "polyline"}
    attributes = {name for one in root.iter() for name in one.attrib}
    assert not [name for name in attributes if name.startswith("on") or "href" in name]
    assert any("<script>" in (one.text or "") for one in root.iter())


def test_curves_are_of_what_was_reported():
    def line(**fields):
        return json.dumps(fields)

    curves = read_curves(
        [
            line(step=1, source="keras", loss=4.0, val_loss=5.0),
            line(step=2, source="keras", loss=3.0),
            line(step=3, source="keras", loss=2.0),
            # Another try begins at step 2 again; the ops count from its start.
            line(step=1, source="ops", examples_per_s=9.0),
            line(step=2, source="keras", loss=3.5),
            line(loss=float("nan"), step=4, source="keras"),
            "no progress",
            line(step=4, source="keras", loss=1.0),
        ]
    )
    assert curves.by == "step" and curves.values == {
        ("loss", "training"): {1: 4.0, 2: 3.5, 3: 2.0, 4: 1.0},
        ("val_loss", "validation"): {1: 5.0},
    }
    assert drawn(Curves({("loss", "training"): {1: 4.0}})) == ""


def test_epochs_are_drawn_where_a_script_tells_no_step():
    told = [
        '{"source": "metrics", "epoch": 1}',
        '{"source": "metrics", "loss": 4.0}',
        '{"source": "ops", "step": 90}',
        '{"source": "metrics", "epoch": 2}',
        '{"source": "metrics", "loss": 2.0}',
    ]
    curves = read_curves(told)
    assert curves == (({("loss", "output"): {1: 4.0, 2: 2.0}}), "epoch")
    assert ">epoch 1<" in drawn(curves)
    assert read_curves([*told, '{"source": "metrics", "step": 7, "loss": 1.0}']).by == "step"


def test_a_long_curve_keeps_its_peaks_and_any_numbers_are_drawn():
    long = dict.fromkeys(range(200_000), 0.5) | {77_777: 9.0}
    picture = ElementTree.fromstring(drawn(Curves({("loss", "training"): long})))
    (points,) = (one.get("points").split() for one in picture.iter() if "points" in one.attrib)
    assert len(points) <= 400 and points[0].startswith("58.0,") and points[-1].startswith("366.0,")
    heights = [float(point.split(",")[1]) for point in points]
    assert heights.count(34.0) == 1 and set(heights) == {34.0, 164.0}
    for values in ((1e308, -1e308), (5e-324, 0.0), (7.0, 7.0)):
        text = drawn(Curves({("loss", "training"): dict(enumerate(values))}))
        ElementTree.fromstring(text)
        assert "nan" not in text and "inf" not in text
    many = {(f"m{number}", "script"): {1: 1.0, 2: 2.0} for number in range(15)}
    assert "and 3 more" in drawn(Curves(many))


def test_a_script_that_makes_up_metrics_without_end_costs_no_memory_without_end():
    made_up = (f'{{"t": 1, "source": "script", "m{number}": 1.0}}' for number in range(3_000))
    known = read_curves(['{"t": 1, "source": "script", "loss": 2.0}', *made_up]).values
    assert len(known) == 1_000 and any(name == "loss" for name, _ in known)


def test_published_again_is_the_same_also_when_signed(training, key, other_key):
    first = training.publish(signing_key=str(key[0]))
    assert training.publish(signing_key=str(key[0]), try_number=2) == first
    assert len(list(folder(first).parent.iterdir())) == 1
    other = training.publish(signing_key=str(other_key[0]))
    assert other != first
    assert verify(FolderStore(folder(other)), other_key[1]).signed


@pytest.mark.parametrize("at", ["signing_key", "still_holds"])
def test_published_again_is_the_same_also_where_a_try_was_killed_meanwhile(
    training, key, monkeypatch, at
):
    def killed(*words):
        raise KeyboardInterrupt

    first = training.publish(signing_key=str(key[0]))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(f"ddl_airflow.evidence.files.{at}", killed)
        training.publish(signing_key=str(key[0]), try_number=2)
    assert training.publish(signing_key=str(key[0]), try_number=3) == first
    assert len(list(folder(first).parent.iterdir())) == 1


def test_without_the_libraries_the_rest_is_made_and_said(training, key, monkeypatch):
    for module in ("cyclonedx", "in_toto_attestation", "model_signing"):
        for name in [one for one in sys.modules if one.partition(".")[0] == module]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
    place = folder(training.publish(signing_key=str(key[0])))
    evidence = record_of(place)["evidence"]
    assert evidence["made"] == sorted({names.CURVES, names.CARD, names.DATASET})
    missing = {names.BOM, names.PROVENANCE, names.SIGNATURE}
    assert evidence["not_made"].keys() == missing
    for name in missing:
        assert "Install the extra `evidence`" in evidence["not_made"][name]
        assert ("INFO", f"{name} is not made: {evidence['not_made'][name]}") in training.log
    found = verify(FolderStore(place))
    assert found.problems == {} and found.not_made == evidence["not_made"]


def test_what_cannot_be_made_costs_no_model(training, monkeypatch):
    """Data that is gone, progress that is a link to a secret, and a fault of ours."""
    (training.layout.staged / "train.csv").unlink()
    training.layout.progress.unlink()
    training.layout.progress.symlink_to("/etc/passwd")
    monkeypatch.setattr("ddl_airflow.evidence.files.bill", lambda record: 1 / 0)
    place = folder(training.publish())
    assert (place / "model" / "saved_model.pb").read_text() == "graph"
    evidence = record_of(place)["evidence"]
    assert evidence["made"] == sorted({names.CARD, names.PROVENANCE})
    assert evidence["not_made"][names.CURVES] == "no metric was reported at two steps"
    assert evidence["not_made"][names.BOM] == "ZeroDivisionError: division by zero"
    assert "train.csv is not there any more" in evidence["not_made"][names.DATASET]
    warned = [text for level, text in training.log if level == "WARNING"]
    assert any(names.BOM in text for text in warned)
    assert any(names.DATASET in text for text in warned)
    assert "![" not in (place / names.CARD).read_text()
    assert verify(FolderStore(place)).problems == {}


@pytest.mark.parametrize("put", ["a link to a secret", "the same bytes", "more bytes"])
def test_data_that_were_changed_since_are_not_described(training, tmp_path, put):
    path = training.layout.staged / "train.csv"
    body = path.read_bytes()
    (tmp_path / "secret").write_bytes(body)
    path.unlink()
    if put == "a link to a secret":  # of the right size
        path.symlink_to(tmp_path / "secret")
    else:
        path.write_bytes(body + b"x" * (put == "more bytes"))
    evidence = record_of(folder(training.publish()))["evidence"]
    why = evidence["not_made"].get(names.DATASET)
    assert why == {
        "a link to a secret": "StagingError: train.csv leads out of the staged data",
        "more bytes": "StagingError: train.csv was changed since it was staged",
    }.get(put)


def test_data_whose_digests_are_known_are_not_read_again(training):
    """As with ``lineage: {prove: true}``, whatever they are by now, and however much."""
    part = read_part(training.layout, "stage_data")
    for number, one in enumerate(part["dataset"]["listing"]):
        one |= {"sha256": f"{number:064x}", "size": 2**33}
        (training.layout.staged / one["key"]).unlink()
    write_part(training.layout, "stage_data", part)
    place = folder(training.publish())
    described = json.loads((place / names.DATASET).read_text())
    assert [one["sha256"] for one in described["distribution"]] == [f"{n:064x}" for n in range(2)]
    assert verify(FolderStore(place)).problems == {}


def test_a_site_may_want_none(training):
    place = folder(training.publish(evidence=False))
    assert not (place / "evidence").exists() and "evidence" not in record_of(place)


def test_training_cannot_leave_evidence_of_its_own(training):
    forged = training.layout.result / "evidence" / "model-card.md"
    forged.parent.mkdir()
    forged.write_text("approved by nobody")
    place = folder(training.publish())
    assert "approved" not in (place / names.CARD).read_text()
    assert any("of ours of that name" in text for _, text in training.log)


@pytest.mark.parametrize("name", ["_SUCCESS", "_RETIRED", "lineage.json"])
def test_training_cannot_leave_a_marker_of_its_own(training, name):
    (training.layout.result / name).write_text("{}")
    place = folder(training.publish())
    assert verify(FolderStore(place)).problems == {}
    assert name not in {file["key"] for file in record_of(place)["result"]["files"]}
    assert any("of ours of that name" in text for _, text in training.log)


def test_the_key_of_a_connection_signs_and_is_nowhere_afterwards(training, key, tmp_path):
    pem = key[0].read_text()
    asked = []
    place = folder(
        training.publish(signing_key="site_key", secret=lambda one: asked.append(one) or pem)
    )
    assert asked == ["site_key"] and verify(FolderStore(place), key[1]).signed
    body = pem.splitlines()[1]
    left = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(left) > 20 and not [path for path in left if body in path.read_text("latin-1")]
    assert body not in repr(training.log)


def test_a_key_made_as_the_docs_say_signs(training, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    text = (ROOT / "docs" / "evidence.md").read_text()
    (commands,) = (b for b in re.findall(r"```sh\n(.*?)```", text, re.S) if "openssl" in b)
    done = ["sh", "-ec", commands]
    subprocess.run(done, cwd=tmp_path, check=True, capture_output=True)
    place = folder(training.publish(signing_key=str(tmp_path / "signing-key.pem")))
    assert verify(FolderStore(place), tmp_path / "signing-key.pub").signed


@pytest.mark.parametrize("kind", ["none", "text", "locked", "itself"])
def test_a_key_that_cannot_be_used_costs_no_model_and_is_not_shown(training, key, tmp_path, kind):
    path = tmp_path / "site.pem"
    private = serialization.load_pem_private_key(key[0].read_bytes(), None)
    locked = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret words"),
    )
    if kind != "none":
        path.write_bytes({"locked": locked}.get(kind, b"s3cret text"))
    setting = key[0].read_text() if kind == "itself" else str(path)
    place = folder(training.publish(signing_key=setting))
    assert not (place / names.SIGNATURE).exists()
    evidence = record_of(place)["evidence"]
    assert evidence["made"] == MADE and evidence["not_made"].keys() == {names.SIGNATURE}
    said = evidence["not_made"][names.SIGNATURE] + repr(training.log)
    for secret in (key[0].read_text().splitlines()[1], "s3cret", "secret words"):
        assert secret not in said
    assert (
        "WARNING",
        f"{names.SIGNATURE} is not made: " + evidence["not_made"][names.SIGNATURE],
    ) in (training.log)
    assert verify(FolderStore(place)).problems == {}


def test_nothing_is_asked_of_the_network(training, key, monkeypatch):
    def refused(*words):
        raise AssertionError(words)

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    place = folder(training.publish(signing_key=str(key[0])))
    found = verify(FolderStore(place), key[1])
    assert found.problems == {} and found.signed and found.not_made == {}


def test_it_is_so_in_an_object_store(training, key):
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        client = s3_client(f"http://127.0.0.1:{server.port}", "k", "s")
        client.create_bucket(Bucket="results")
        uri = training.publish(store=S3Store(client, "results"), signing_key=str(key[0]))
        prefix = uri.removeprefix("s3://results/")
        store = S3Store(client, "results", prefix)
        found = verify(store, key[1])
        assert found.problems == {} and found.signed and found.files == 12
        for obj in store.list():
            body = store.read_bytes(obj.key)
            changed = body[:-2] + bytes([body[-2] ^ 1]) + body[-1:]
            client.put_object(Bucket="results", Key=f"{prefix}/{obj.key}", Body=changed)
            assert obj.key in verify(store, key[1]).problems
            client.put_object(Bucket="results", Key=f"{prefix}/{obj.key}", Body=body)
        client.put_object(Bucket="results", Key=f"{prefix}/model/more", Body=b"")
        assert set(verify(store).problems) == {"model/more"}
        client.close()
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
