"""What a connection's extra asks for is in each request, and on the objects of a real Ceph."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import store_of
from ddl_airflow.storage import s3_put
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.publication import publish
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import client_by_connection
from ddl_airflow.storage.staging import stage
from tests.integration.ceph import CephObjectStore, available

PART = 256 * 1024
SMALL, LARGE = b"small", random.Random(0).randbytes(2 * PART + 1000)
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ceph(tmp_path_factory):
    if reason := available():
        pytest.skip(reason)
    with CephObjectStore(tmp_path_factory.mktemp("ceph") / "store", PART) as running:
        yield running, running.add_user("owner")


@pytest.fixture
def names_of_buckets(monkeypatch):
    """results.localhost is this host, too: not every resolver says so."""
    getaddrinfo = socket.getaddrinfo

    def found(host, *more, **other):
        here = isinstance(host, str) and host.endswith("localhost")
        return getaddrinfo("127.0.0.1" if here else host, *more, **other)

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(s3_put, "PART_SIZE", PART)


def client_of(endpoint, keys, extra):
    host, _, port = endpoint.rpartition(":")
    return client_by_connection(
        AirflowConnection(
            "my_s3", host=host, port=int(port), login=keys[0], password=keys[1], extra=extra
        )
    )


@contextmanager
def recorded(monkeypatch):
    """The requests that go out: method, path, and headers in small letters; nothing is answered
    but by the service itself."""
    import http.client

    seen, lock = [], threading.Lock()
    connection = http.client.HTTPConnection
    putrequest, putheader = connection.putrequest, connection.putheader

    def begun(self, method, url, *more, **other):
        self._seen = (method, url, {"host of it": self.host})
        with lock:
            seen.append(self._seen)
        return putrequest(self, method, url, *more, **other)

    def told(self, name, *values):
        text = [v.decode() if isinstance(v, bytes) else str(v) for v in values]
        name = name.decode() if isinstance(name, bytes) else name
        self._seen[2][name.lower()] = text[0] if text else ""
        return putheader(self, name, *values)

    monkeypatch.setattr(connection, "putrequest", begun)
    monkeypatch.setattr(connection, "putheader", told)
    yield seen
    monkeypatch.undo()
    monkeypatch.setattr(s3_put, "PART_SIZE", PART)


def published(store, folder):
    files = {}
    for key, body in (("model/large.bin", LARGE), ("logs/rank-0.log", SMALL), ("a.json", b"{}")):
        files[key] = folder / key.rpartition("/")[2]
        files[key].write_bytes(body)
    return publish(files, store, "t")


@pytest.mark.parametrize("nested", [False, True])
def test_acl_class_and_who_pays_are_of_all_that_is_stored(ceph, tmp_path, monkeypatch, nested):
    running, keys = ceph
    asked = {
        "extra_args": {"ACL": "public-read", "StorageClass": "STANDARD", "Tagging": "team=vision"},
        "requester_pays": True,
    }
    extra = {"service_config": {"s3": asked}} if nested else asked
    client = client_of(running.endpoint_url, keys, extra)
    client.create_bucket(Bucket=f"settings-{nested}".lower())
    store = S3Store(client, f"settings-{nested}".lower())
    with recorded(monkeypatch) as seen:
        done = published(store, tmp_path)
        stage(store.at(f"t/{done.name}"), Cache(tmp_path / "cache"), tmp_path / "data")
    assert (tmp_path / "data" / "model" / "large.bin").read_bytes() == LARGE
    begun = [one for one in seen if one[0] in ("PUT", "POST") and "partNumber" not in one[1]]
    stored = [one for one in begun if "uploadId" not in one[1]]
    assert len(stored) == 4  # two files, the beginning of the large one, and the marker
    for _, _, headers in stored:
        assert headers["x-amz-acl"] == "public-read"
        assert headers["x-amz-storage-class"] == "STANDARD"
        assert headers["x-amz-tagging"] == "team=vision"
    assert all("x-amz-acl" not in one[2] for one in seen if one not in stored)
    # Also of what is asked for over connections of our own: parts, and what comes down.
    for method, path, headers in seen:
        assert headers["x-amz-request-payer"] == "requester", (method, path)
    for key in ("model/large.bin", "logs/rank-0.log", "_SUCCESS"):
        name = {"Bucket": store.bucket, "Key": f"t/{done.name}/{key}"}
        grants = client.get_object_acl(**name)["Grants"]
        assert {"READ", "FULL_CONTROL"} == {one["Permission"] for one in grants}, key
        # Ceph 16 keeps no tags of what goes up in parts.
        if key != "model/large.bin":
            tags = client.get_object_tagging(**name).get("TagSet")
            assert tags == [{"Key": "team", "Value": "vision"}], key
    client.close()


def test_objects_say_what_they_are(ceph, tmp_path):
    running, keys = ceph
    client = client_of(running.endpoint_url, keys, {})
    client.create_bucket(Bucket="types")
    store = S3Store(client, "types")
    done = published(store, tmp_path)
    store.put_if("production.json", b"{}", None)
    store.put_bytes("lineage.json", b"{}")
    said = {
        obj.key.removeprefix(f"t/{done.name}/"): client.head_object(Bucket="types", Key=obj.key)[
            "ContentType"
        ]
        for obj in store.list()
        if not obj.key.endswith(".conditions")
    }
    assert said == {
        "model/large.bin": "application/octet-stream",
        "logs/rank-0.log": "text/plain; charset=utf-8",
        **dict.fromkeys(
            ("a.json", "_SUCCESS", "production.json", "lineage.json"), "application/json"
        ),
    }
    # What is copied, as it has not changed, says so too.
    (tmp_path / "a.json").write_text("[]")
    again = publish(
        {"model/large.bin": tmp_path / "large.bin", "a.json": tmp_path / "a.json"}, store, "t"
    )
    name = {"Bucket": "types", "Key": f"t/{again.name}/model/large.bin"}
    assert client.head_object(**name)["ContentType"] == "application/octet-stream"
    client.close()


def answering(headers):
    """A server that answers every PUT as a store that encrypts does, and keeps what it was told."""
    told = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            told.append((self.headers["Host"], self.path, dict(self.headers)))
            self.send_response(200)
            self.send_header("ETag", '"0123456789abcdef0123456789abcdef"')
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server, told


def test_encryption_is_asked_for_and_an_etag_that_is_no_md5_is_no_damage():
    """Ceph 16 encrypts over https only, and with a key service: here only what is asked for."""
    server, told = answering({"x-amz-server-side-encryption": "aws:kms"})
    asked = {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "arn:of:a/key",
        "BucketKeyEnabled": True,
    }
    client = client_of(
        f"http://127.0.0.1:{server.server_port}", ("key", "secret"), {"extra_args": asked}
    )
    S3Store(client, "results").put_bytes("a/b.json", b"{}")
    ((_, path, headers),) = told
    headers = {name.lower(): value for name, value in headers.items()}
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "arn:of:a/key"
    assert headers["x-amz-server-side-encryption-bucket-key-enabled"] == "true"
    signed = path.partition("X-Amz-SignedHeaders=")[2].partition("&")[0]
    assert "x-amz-server-side-encryption-aws-kms-key-id" in signed
    client.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("style", "host", "path"),
    [("", "127.0.0.1", "/results/a/b"), ("virtual", "results.localhost", "/a/b")],
)
def test_buckets_are_named_in_path_or_host(style, host, path, names_of_buckets):
    server, told = answering({"x-amz-server-side-encryption": "aws:kms"})
    name = "localhost" if style else "127.0.0.1"
    client = client_of(
        f"http://{name}:{server.server_port}", ("key", "secret"), {"addressing_style": style}
    )
    store = S3Store(client, "results")
    store.put_bytes("a/b", b"1")
    assert told[0][0] == f"{host}:{server.server_port}" and told[0][1].partition("?")[0] == path
    client.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"addressing_style": "host"}, "addressing_style is 'host'. Write path, virtual, auto"),
        ({"extra_args": "AES256"}, "extra_args is no object"),
        ({"extra_args": {"SSECustomerKey": "k"}}, "extra_args has 'SSECustomerKey'. It may have"),
        ({"requester_pays": "perhaps"}, "requester_pays is neither true nor false"),
        ({"service_config": {"s3": {"extra_args": {"Acl": "x"}}}}, "extra_args has 'Acl'"),
    ],
)
def test_an_extra_that_nothing_comes_of_is_refused(extra, said):
    with pytest.raises(ConnectionInvalid, match=said):
        client_of("http://127.0.0.1:9", ("key", "secret"), extra)


def test_a_connection_of_the_amazon_provider_says_it_its_own_way(monkeypatch, names_of_buckets):
    server, told = answering({"x-amz-server-side-encryption": "aws:kms"})
    monkeypatch.setenv(
        "AIRFLOW_CONN_MY_AWS",
        # Masked from now on in this process: no word that other tests print.
        '{"conn_type": "aws", "login": "storeSettingsKey", "password": "storeSettingsPassword", '
        '"extra": {"endpoint_url": '
        f'"http://localhost:{server.server_port}", "region_name": "eu-de", '
        '"config_kwargs": {"s3": {"addressing_style": "virtual"}}, '
        '"service_config": {"s3": {"extra_args": {"StorageClass": "STANDARD_IA"}}}}}',
    )
    reference = StoreReference("s3://results", Connection(conn_id="my_aws"))
    store_of(reference).put_bytes("a/b", b"1")
    ((host, path, headers),) = told
    assert host == f"results.localhost:{server.server_port}" and path.startswith("/a/b?")
    assert {k.lower(): v for k, v in headers.items()}["x-amz-storage-class"] == "STANDARD_IA"
    server.shutdown()
    server.server_close()
