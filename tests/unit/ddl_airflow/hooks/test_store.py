from __future__ import annotations

import json
import traceback

import pytest
from airflow.sdk.exceptions import AirflowSecretsBackendAccessDenied
from airflow.sdk.log import redact

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import ConnectionInvalid, StagingError
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import ObjectStoreHook, connection_of, secret_of, store_of
from ddl_airflow.storage.connections import open_by_connection
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import client_by_connection, settings_of
from ddl_airflow.storage.s3_http import connections_of

ENDPOINT = "http://127.0.0.1:9"


def s3(**connection: str) -> S3Store:
    store = store_of(StoreReference("s3://some-bucket/some/prefix", Connection(**connection)))
    assert isinstance(store, S3Store)
    assert store.uri == "s3://some-bucket/some/prefix"
    return store


def signs_with(store: S3Store) -> tuple[str, str]:
    """The keys that the store's client signs its requests with."""
    credentials = store._client._request_signer._credentials
    return credentials.access_key, credentials.secret_key


def test_a_folder_needs_no_connection(tmp_path):
    (tmp_path / "a b").mkdir()
    store = store_of(StoreReference((tmp_path / "a b").as_uri()))
    assert isinstance(store, FolderStore)
    assert store.path == tmp_path / "a b"


def test_literal_keys_are_used_and_masked_from_then_on():
    keys = {"access_key_id": "AKIDHOOKTESTONE", "secret_access_key": "hookTestSecretOne"}
    assert "hookTestSecretOne" in str(redact("x hookTestSecretOne"))
    store = s3(endpoint_url=ENDPOINT, **keys)
    assert signs_with(store) == tuple(keys.values())
    assert store._client.meta.endpoint_url == ENDPOINT
    shown = str(redact("keys AKIDHOOKTESTONE and hookTestSecretOne."))
    assert "AKIDHOOKTESTONE" not in shown and "hookTestSecretOne" not in shown


def test_references_are_read_from_the_environment_when_used(monkeypatch):
    names = {"URL": ENDPOINT, "ID": "AKIDHOOKTESTTWO", "SECRET": "hookTestSecretTwo"}
    for name, value in names.items():
        monkeypatch.setenv(f"UNIT_{name}", value)
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_VARIABLES", "S3_*, UNIT_*")
    store = s3(
        endpoint_url="${UNIT_URL}",
        access_key_id="${UNIT_ID}",
        secret_access_key="${UNIT_SECRET}",
        region_name="eu-de",
    )
    assert signs_with(store) == ("AKIDHOOKTESTTWO", "hookTestSecretTwo")
    assert store._client.meta.endpoint_url == ENDPOINT
    assert store._client.meta.region_name == "eu-de"
    assert "hookTestSecretTwo" not in str(redact("x hookTestSecretTwo"))


def test_what_a_reference_stands_for_is_in_no_message(monkeypatch):
    monkeypatch.setenv("S3_URL", "http://127.0.0.1:9/planted-path")
    store = s3(endpoint_url="${S3_URL}", access_key_id="k", secret_access_key="s")
    with pytest.raises(StagingError) as failed:
        store.list()
    said = "".join(traceback.format_exception(failed.value))
    assert "${S3_URL}" in said and "Check that the service runs" in said
    assert "127.0.0.1" not in said and "planted-path" not in said, said
    with pytest.raises(StagingError, match=r"a/key at \$\{S3_URL\}"):
        store.at("a").read_bytes("key")


def test_references_that_are_not_set_are_named(monkeypatch):
    monkeypatch.delenv("S3_UNSET", raising=False)
    with pytest.raises(ConnectionInvalid, match="S3_UNSET is not set"):
        s3(endpoint_url=ENDPOINT, access_key_id="${S3_UNSET}", secret_access_key="x")


def test_other_variables_of_airflows_environment_are_not_read(monkeypatch):
    monkeypatch.setenv("DB_URL", "planted-value")
    with pytest.raises(ConnectionInvalid, match="DB_URL is not one .* DDL_\\*, S3_\\*") as refused:
        s3(endpoint_url=ENDPOINT, access_key_id="${DB_URL}", secret_access_key="x")
    assert "planted-value" not in str(refused.value)


def test_endpoint_that_is_none_is_refused_without_its_keys():
    with pytest.raises(ConnectionInvalid) as caught:
        s3(endpoint_url="ftp://x", access_key_id="AKIDSHOWN", secret_access_key="secretShown")
    assert "ftp://x" in str(caught.value)
    assert "secretShown" not in str(caught.value)


def test_conn_id_is_an_airflow_connection(monkeypatch):
    connection = {
        "conn_type": "aws",
        "login": "AKIDHOOKTESTTHREE",
        "password": "hookTestSecretThree",
        "extra": {"endpoint_url": ENDPOINT, "region_name": "eu-de"},
    }
    monkeypatch.setenv("AIRFLOW_CONN_UNIT_STORE", json.dumps(connection))
    store = s3(conn_id="unit_store")
    assert signs_with(store) == ("AKIDHOOKTESTTHREE", "hookTestSecretThree")
    assert store._client.meta.endpoint_url == ENDPOINT


def test_conn_id_may_be_of_our_own_type(monkeypatch, tmp_path):
    connection = {
        "conn_type": "ddlstore",
        "host": "http://127.0.0.1",
        "port": 9,
        "login": "AKIDHOOKTESTFOUR",
        "password": "hookTestSecretFour",
        "extra": {"region_name": "eu-de", "ca_bundle": str(tmp_path / "ca.pem")},
    }
    monkeypatch.setenv("AIRFLOW_CONN_UNIT_STORE", json.dumps(connection))
    store = s3(conn_id="unit_store")
    assert signs_with(store) == ("AKIDHOOKTESTFOUR", "hookTestSecretFour")
    assert store._client.meta.endpoint_url == ENDPOINT
    assert store._client.meta.region_name == "eu-de"
    assert store._client._endpoint.http_session._verify == str(tmp_path / "ca.pem")
    assert "hookTestSecretFour" not in str(redact("x hookTestSecretFour"))


@pytest.mark.parametrize("conn_type", ["aws", "ddlstore"])
def test_what_the_extra_says_for_clients_holds_beside_what_ours_need(
    monkeypatch, tmp_path, conn_type
):
    """As with the amazon provider's own operators; it was left out."""
    extra = {
        "endpoint_url": "http://s3.example.com",
        "region_name": "eu-de",
        "verify": str(tmp_path / "ca.pem"),
        "config_kwargs": {
            "s3": {"addressing_style": "virtual"},
            "proxies": {"http": "http://proxy:3128"},
        },
        "requester_pays": True,
    }
    host = {"host": "http://s3.example.com"} if conn_type == "ddlstore" else {}
    said = {"conn_type": conn_type, "login": "AKIDSIX", "password": "secretSix", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_UNIT_STORE", json.dumps(said | host))
    client = s3(conn_id="unit_store")._client
    config, name = client.meta.config, {"Bucket": "some-bucket", "Key": "k"}
    url = client.generate_presigned_url("get_object", Params=name)
    assert url.startswith("http://some-bucket.s3.example.com/k?")
    assert "x-amz-request-payer" in url and settings_of(client).requester_pays
    assert connections_of(client) is None  # boto3 knows the way through a proxy
    assert config.proxies == {"http": "http://proxy:3128"}
    assert client._endpoint.http_session._verify == str(tmp_path / "ca.pem")
    assert (client.meta.region_name, config.connect_timeout) == ("eu-de", 10)
    assert config.request_checksum_calculation == "when_required"
    extra["config_kwargs"] = {"nonsense": 1}
    monkeypatch.setenv("AIRFLOW_CONN_UNIT_STORE", json.dumps(said | host))
    with pytest.raises(ConnectionInvalid, match="config_kwargs: .*nonsense"):
        s3(conn_id="unit_store")


@pytest.mark.parametrize("login", ["AKID", ""])
def test_a_role_that_only_airflow_can_take_is_not_left_out_silently(login):
    extra = {"role_arn": "arn:aws:iam::1:role/reader", "endpoint_url": ENDPOINT}
    one = AirflowConnection("roles", "aws", "", None, login, login and "secret", extra)
    with pytest.raises(ConnectionInvalid, match="takes the role arn:aws:iam::1:role/reader"):
        client_by_connection(one)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"login": ""}, "connection 'unit_store' has no access key ID"),
        ({"password": ""}, "connection 'unit_store' has no secret access key"),
        ({"host": "s3.example.com"}, "'s3.example.com' is no http"),
        ({"host": "http://key:secret@127.0.0.1"}, "endpoint_url holds credentials"),
        ({}, ENDPOINT),  # nobody answers there
    ],
)
def test_what_is_wrong_with_a_connection_is_what_its_test_says(monkeypatch, changed, said):
    connection = {"conn_type": "ddlstore", "host": ENDPOINT, "login": "AKID", "password": "secret5"}
    monkeypatch.setenv("AIRFLOW_CONN_UNIT_STORE", json.dumps(connection | changed))
    good, message = ObjectStoreHook("unit_store").test_connection()
    assert not good
    assert said in message and "secret5" not in message


def test_conn_id_that_airflow_lacks_is_named_and_nobodys_keys_are_taken(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHEMACHINE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secretOfTheMachine")
    with pytest.raises(ConnectionInvalid, match="no connection 'nobody'.*AIRFLOW_CONN_NOBODY"):
        s3(conn_id="nobody")


def test_a_connection_is_read_as_it_is_and_its_secrets_are_masked(monkeypatch):
    masked = []
    monkeypatch.setattr("ddl_airflow.hooks.store.mask_secret", masked.append)
    extra = {"private_key": "a key", "host_key": "ssh-ed25519 AAAA"}
    said = {"conn_type": "ssh", "host": "gpu1", "login": "trainer", "port": 22, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_GPU_HOSTS", json.dumps(said))
    one = connection_of("gpu_hosts")
    assert (one.conn_type, one.host, one.port, one.login) == ("ssh", "gpu1", 22, "trainer")
    assert dict(one.extra) == extra and "a key" not in repr(one)
    assert masked == ["a key"]
    with pytest.raises(ConnectionInvalid, match=r"no connection 'nobody'.*AIRFLOW_CONN_NOBODY"):
        connection_of("nobody")


@pytest.mark.parametrize(
    ("uri", "library", "said"),
    [
        (
            "abfs://models/a",
            "azure.storage.blob",
            {"conn_type": "wasb", "login": "acct", "password": "aG9va1Rlc3Q="},
        ),
        (
            "gs://models/a",
            "google.cloud.storage",
            {"conn_type": "google_cloud_platform", "extra": {"is_anonymous": True}},
        ),
    ],
)
def test_stores_of_other_clouds_are_opened_by_their_own_types(monkeypatch, uri, library, said):
    pytest.importorskip(library)
    monkeypatch.setenv("AIRFLOW_CONN_UNIT_CLOUD", json.dumps(said))
    connection = Connection(conn_id="unit_cloud")
    assert store_of(StoreReference(uri, connection)).uri == uri
    for secret in filter(None, [said.get("password")]):
        assert secret not in str(redact(f"x {secret}"))
    with pytest.raises(ConnectionInvalid, match="no connection 'unit_none'"):
        store_of(StoreReference(uri, Connection(conn_id="unit_none")))
    monkeypatch.setenv("AIRFLOW_CONN_UNIT_CLOUD", json.dumps({"conn_type": "aws"}))
    with pytest.raises(ConnectionInvalid, match="'unit_cloud' is of type 'aws'"):
        store_of(StoreReference(uri, connection))


def test_a_bucket_is_opened_by_no_connection_of_something_else(monkeypatch):
    """Airflow's hook would warn, and ask Amazon with whatever keys the machine itself has."""
    said = {"conn_type": "http", "host": "example.com", "login": "a", "password": "b@:/%c"}
    monkeypatch.setenv("AIRFLOW_CONN_UNIT_HTTP", json.dumps(said))
    wanted = "'unit_http' is of type 'http', and s3://models/a is opened by one of type ddlstore or"
    reference = StoreReference("s3://models/a", Connection(conn_id="unit_http"))
    with pytest.raises(ConnectionInvalid, match=wanted):
        store_of(reference)
    with pytest.raises(ConnectionInvalid, match=wanted):
        open_by_connection(reference.uri, connection_of("unit_http"))


def of_the_hook(conn_id):
    return s3(conn_id=conn_id)


@pytest.mark.parametrize("ask", [connection_of, secret_of, of_the_hook])
def test_a_connection_that_airflow_does_not_tell_may_be_told_the_next_time(ask):
    """Airflow says the same where its secrets backend, or its API, is away for a moment."""
    with pytest.raises(ConnectionInvalid, match=r"Admin > Connections.*NOBODY.*answer") as caught:
        ask("nobody")
    assert caught.value.retryable


@pytest.mark.parametrize("ask", [connection_of, secret_of, of_the_hook])
def test_a_connection_that_airflow_denies_is_no_file_system_that_is_away(monkeypatch, ask):
    def denied(conn_id):
        raise AirflowSecretsBackendAccessDenied(f"Access denied for connection {conn_id!r}")

    monkeypatch.setattr("ddl_airflow.hooks.store.BaseHook.get_connection", denied)
    with pytest.raises(ConnectionInvalid, match="denies the connection 'nobody'") as caught:
        ask("nobody")
    assert caught.value.retryable is False
