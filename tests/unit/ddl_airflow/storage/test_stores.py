"""Kinds of store: what opens each, and that a new one is its own files and no other change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddl_airflow.core.connections import AirflowConnection, connection_of_environment
from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.core.manifest.sections.stores import kind_of_uri, store_kinds
from ddl_airflow.storage.connections import open_by_connection
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client, settings_of
from ddl_airflow.storage.stores import open_by_environment, open_store, place_of

PACKAGE = Path(__file__).parents[4] / "ddl_airflow"
# Its buckets are folders, so that nobody has to serve them.
KIND = """
from ddl_airflow.core.manifest.rule import Finding
from ddl_airflow.core.manifest.sections.stores.s3 import S3

class Cellar(S3):
    kind_name = scheme = "cellar"
    is_a = "a cellar"
    form = "cellar://bucket/prefix"
    implementation = "ddl_airflow.storage.cellar:CellarStore"

    def findings(self, at, location):
        if location.bucket == "closed":
            yield Finding(f"{at}.bucket", "is closed", "Choose another one.")

    def fixed_uri(self, location):
        return f"cellar://{location.bucket}/{location.prefix}".rstrip("/")

KIND = Cellar()
"""
STORE = """
from pathlib import Path
from ddl_airflow.storage.filesystem import FolderStore

class CellarStore(FolderStore):
    @classmethod
    def opened(cls, uri, access):
        return cls(Path(access.client) / uri.removeprefix("cellar://"))
"""
MANIFEST = """\
model_definition:
  name: in-the-cellar
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py
    compute_configuration: {name: cpu, nodes: 1}
training_data_reference:
  type: cellar
  connection: {conn_id: my_cellar}
  source: {bucket: wine, prefix: red}
training_results_reference:
  type: fs
  target: {path: ./results}
schedule: {on_data_change: true}
"""
RUN = """
import json, sys
from pathlib import Path
from ddl_airflow.core.errors import ManifestError
from ddl_airflow.core.manifest.load import load_manifest, load_manifest_text
from ddl_airflow.core.manifest.schema import json_schema
from ddl_airflow.core.plan import plan
from ddl_airflow.storage.stores import open_store

def errors(text):
    try:
        load_manifest_text(text, "m.yml")
    except ManifestError as error:
        return str(error).splitlines()

path = Path(sys.argv[1])
dataset = plan(load_manifest(path), path).stage_data.dataset
text = path.read_text()
print(json.dumps({
    "uri": dataset.uri,
    "objects": [one.key for one in open_store(dataset.uri, path.parent).list()],
    "types": json_schema()["$defs"]["DataReference"]["properties"]["type"]["enum"],
    "closed": errors(text.replace("wine", "closed")),
    "path": errors(text.replace("bucket: wine", "path: wine")),
    "alone": errors(text.replace("  connection: {conn_id: my_cellar}\\n", "")),
}))
"""


def test_a_new_kind_of_store_is_its_own_files(tmp_path):
    ours = tmp_path / "ddl_airflow"
    shutil.copytree(PACKAGE, ours, ignore=shutil.ignore_patterns("__pycache__"))
    (ours / "core/manifest/sections/stores/cellar.py").write_text(KIND)
    (ours / "storage/cellar.py").write_text(STORE)
    manifest = tmp_path / "manifest.yml"
    manifest.write_text(MANIFEST)
    (tmp_path / "wine/red").mkdir(parents=True)
    (tmp_path / "wine/red/bottle").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", RUN, manifest],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "uri": "cellar://wine/red",
        "objects": ["bottle"],
        "types": ["azure", "cellar", "fs", "gcs", "s3"],
        "closed": [
            "m.yml:10: training_data_reference.source.bucket: is closed. Choose another one."
        ],
        "path": [
            "m.yml:10: training_data_reference.source.bucket: is missing, type cellar needs it. "
            "Write bucket: my-bucket.",
            "m.yml:10: training_data_reference.source.path: is not for type cellar. Use bucket "
            "and prefix, or type: fs.",
        ],
        "alone": [
            "m.yml:7: training_data_reference.connection: is missing, type cellar needs it. Write "
            "connection: {conn_id: my_cellar}, with the id of an Airflow connection."
        ],
    }


def test_schemes_and_forms_are_of_one_kind_each():
    kinds = store_kinds().values()
    assert len({kind.scheme for kind in kinds}) == len(kinds)
    assert all(kind_of_uri(kind.form) is kind for kind in kinds)
    assert kind_of_uri("s3") is None and kind_of_uri("http://host/x") is None


def test_open_store_finds_what_uri_names(tmp_path):
    folder = FolderStore(tmp_path / "with space", "sub")
    again = open_store(folder.uri)
    assert isinstance(again, FolderStore)
    assert again.uri == folder.uri
    client = s3_client("http://localhost:1", "key", "secret")
    bucket = open_store("s3://bucket/a/b/", client)
    assert isinstance(bucket, S3Store)
    assert bucket.uri == "s3://bucket/a/b"
    assert bucket.at("c").uri == "s3://bucket/a/b/c"
    assert open_store("s3://bucket", client).uri == "s3://bucket"


@pytest.mark.parametrize("uri", ["bucket/a", "s3://", "file://relative", "http://host/x", ""])
def test_open_store_refuses_other_uris(uri):
    with pytest.raises(ConnectionInvalid, match="names no store"):
        open_store(uri)


def test_open_store_needs_a_client_for_s3():
    with pytest.raises(ConnectionInvalid, match="needs a connection"):
        open_store("s3://bucket")


def test_the_environment_opens_what_needs_no_connection_of_airflow(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:1")
    bucket = open_by_environment("s3://bucket/a")
    assert isinstance(bucket, S3Store) and bucket.endpoint == "http://localhost:1"
    assert open_by_environment("s3://other")._client is bucket._client  # to make one takes long
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:2")
    assert open_by_environment("s3://bucket/a").endpoint == "http://localhost:2"
    assert open_by_environment(tmp_path.as_uri()).uri == tmp_path.as_uri()


@pytest.mark.parametrize("keys", [{}, {"login": "AKID", "password": "secret"}])
def test_the_environments_endpoint_is_the_one_that_boto3_finds(
    keys_of_this_host, monkeypatch, keys
):
    """That of S3 alone goes before that of all services, as under Airflow."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://localhost:2")
    assert by_aws({}, **keys)[0].endpoint == "http://localhost:2"
    assert open_by_environment("s3://bucket/a").endpoint == "http://localhost:2"
    assert (
        by_aws({"endpoint_url": "http://localhost:3"}, **keys)[0].endpoint == "http://localhost:3"
    )
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert by_aws({"region_name": "eu-west-1"}, **keys)[0].endpoint.endswith("amazonaws.com")
    monkeypatch.delenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://planted:planted@localhost:2")
    for opens in (lambda: by_aws({}, **keys), lambda: open_by_environment("s3://bucket/b")):
        with pytest.raises(ConnectionInvalid, match="holds credentials") as refused:
            opens()
        assert "planted" not in str(refused.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "planted:planted@localhost")
    for opens in (lambda: by_aws({}, **keys), lambda: open_by_environment("s3://bucket/c")):
        with pytest.raises(ConnectionInvalid, match="AWS_ENDPOINT_URL_S3.*is no URL") as refused:
            opens()
        assert "planted" not in str(refused.value) and refused.value.__cause__ is None


@pytest.fixture
def keys_of_this_host(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHISHOST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secretOfThisHost")
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


def by_aws(extra, **said):
    told = json.dumps({"conn_type": "aws", "extra": extra, **said})
    connection = connection_of_environment("my_s3", {"AIRFLOW_CONN_MY_S3": told})
    store = open_by_connection("s3://bucket/a", connection)
    credentials = store._client._request_signer._credentials
    return store, (credentials.access_key, credentials.secret_key, credentials.token)


def test_an_extra_holds_also_where_the_keys_are_the_environments(
    keys_of_this_host, monkeypatch, tmp_path
):
    """Data were read from Amazon, and results went there, without encryption."""
    extra = {
        "endpoint_url": "https://minio.example.com",
        "region_name": "eu-de",
        "verify": str(tmp_path / "ca.pem"),
        "extra_args": {"ServerSideEncryption": "aws:kms"},
        "requester_pays": True,
        "config_kwargs": {"proxies": {"https": "http://proxy:3128"}},
    }
    store, signs_with = by_aws(extra)
    client = store._client
    assert signs_with == ("AKIDOFTHISHOST", "secretOfThisHost", None) and store.caller == ""
    assert client.meta.endpoint_url == "https://minio.example.com"
    assert client.meta.region_name == "eu-de"
    assert client._endpoint.http_session._verify == str(tmp_path / "ca.pem")
    assert settings_of(client).put == {"ServerSideEncryption": "aws:kms"}
    assert settings_of(client).requester_pays
    assert client.meta.config.proxies == {"https": "http://proxy:3128"}
    only_s3 = {"service_config": {"s3": {"endpoint_url": "http://s3.example.com"}}}
    assert by_aws(extra | only_s3)[0].endpoint == "http://s3.example.com"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:1")
    store, _ = by_aws({"extra_args": {"ServerSideEncryption": "AES256"}})
    assert store.endpoint == "http://localhost:1"
    assert settings_of(store._client).put == {"ServerSideEncryption": "AES256"}


def test_a_connections_session_token_goes_with_its_keys(keys_of_this_host):
    extra = {"endpoint_url": "http://localhost:1", "aws_session_token": "planted-token"}
    _, signs_with = by_aws(extra, login="ASIA", password="secret")
    assert signs_with == ("ASIA", "secret", "planted-token")
    assert "planted-token" in AirflowConnection("c", "aws", extra=extra).secrets()
    # Where earlier versions of the amazon provider had it, and where it still finds it.
    earlier = {"endpoint_url": "http://localhost:1", "session_kwargs": {"aws_session_token": "old"}}
    assert by_aws(earlier, login="ASIA", password="secret")[1] == ("ASIA", "secret", "old")
    assert by_aws(extra | earlier, login="ASIA", password="secret")[1][-1] == "planted-token"
    assert "old" in AirflowConnection("c", "aws", extra=earlier).secrets()


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("profile_name", "Set AWS_PROFILE"),
        ("aws_access_key_id", "Enter keys as login and password"),
        ("aws_secret_access_key", "Enter keys as login and password"),
        ("aws_session_token", "Enter keys as login and password"),
    ],
)
def test_what_says_in_an_extra_who_asks_is_not_left_out_silently(keys_of_this_host, name, fix):
    for extra, said in (
        ({name: "planted"}, name),
        ({"session_kwargs": {name: "planted", "region_name": "eu-de"}}, f"session_kwargs.{name}"),
    ):
        with pytest.raises(
            ConnectionInvalid, match=rf"connection 'my_s3': .*\b{said}\b.*{fix}"
        ) as refused:
            by_aws(extra)
        assert "planted" not in str(refused.value)
        assert ("Enter keys" in str(refused.value)) == ("keys" in fix)


def test_session_kwargs_without_keys_are_no_reason_to_refuse(keys_of_this_host):
    extra = {"session_kwargs": {"region_name": "eu-de"}}
    store, signs_with = by_aws(extra)
    assert signs_with == ("AKIDOFTHISHOST", "secretOfThisHost", None)
    assert store._client.meta.region_name == "eu-de"
    assert by_aws(extra | {"region_name": "eu-nl"})[0]._client.meta.region_name == "eu-nl"
    assert by_aws({"session_kwargs": "{}"})[1] == signs_with


def test_login_and_password_go_before_a_profile(keys_of_this_host):
    """As the amazon provider has it."""
    for extra in ({"profile_name": "a"}, {"session_kwargs": {"profile_name": "a"}}):
        _, signs_with = by_aws(extra, login="AKID", password="secret")
        assert signs_with == ("AKID", "secret", None)


@pytest.mark.parametrize("keys", [{}, {"login": "AKID", "password": "secret"}])
def test_the_host_of_an_aws_connection_is_passed_over(keys_of_this_host, caplog, keys):
    """As the amazon provider does: a run by hand went to another store than Airflow's."""
    for host in ("s3.eu-west-1.amazonaws.com", "https://planted@minio.example.com"):
        store, signs_with = by_aws({"region_name": "eu-west-1"}, host=host, port=9000, **keys)
        assert signs_with[0] == ("AKID" if keys else "AKIDOFTHISHOST")
        assert store._client.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"
        endpoint = {"endpoint_url": "http://localhost:1"}
        assert by_aws(endpoint, host=host, **keys)[0].endpoint == "http://localhost:1"
    assert "connection 'my_s3': its host is passed over" in caplog.text
    assert "Write it as endpoint_url" in caplog.text and "planted" not in caplog.text


@pytest.mark.parametrize(
    ("said", "missing"),
    [({"login": "AKID"}, "secret access key"), ({"password": "s"}, "access key ID")],
)
def test_half_of_a_connections_keys_is_no_reason_to_take_the_environments(
    keys_of_this_host, said, missing
):
    with pytest.raises(ConnectionInvalid, match=f"'my_s3' has no {missing}"):
        by_aws({"endpoint_url": "http://localhost:1"}, **said)


def test_a_place_is_the_same_whatever_opens_it(tmp_path):
    """By two connections of one store, of which one may only read."""

    def s3(endpoint, uri, key="a"):
        return open_store(uri, s3_client(endpoint, key, "b", "us-east-1"), key)

    one = place_of(s3("https://s3.example.com", "s3://ml/digits"))
    assert one == place_of(s3("https://S3.example.com:443/", "s3://ml/digits", "c"))
    assert place_of(s3("https://s3.example.com", "s3://ml/digits/v1"))[: len(one)] == one
    for endpoint, uri in (
        ("https://s3.example.org", "s3://ml/digits"),
        ("https://s3.example.com:9000", "s3://ml/digits"),
        ("https://s3.example.com", "s3://ml/digits2"),
        ("https://s3.example.com", "s3://other/digits"),
    ):
        assert place_of(s3(endpoint, uri))[: len(one)] != one
    # Amazon's buckets have their names for themselves, wherever they are asked for.
    amazon = [s3(endpoint, "s3://ml") for endpoint in (None, "https://s3.eu-west-1.amazonaws.com")]
    assert place_of(amazon[0]) == place_of(amazon[1])
    (tmp_path / "a b").mkdir()
    (tmp_path / "link").symlink_to("a b")
    folders = [FolderStore(tmp_path / name) for name in ("a b", "link")]
    assert place_of(folders[0]) == place_of(folders[1])
    assert place_of(folders[0])[-1] == "a b"
