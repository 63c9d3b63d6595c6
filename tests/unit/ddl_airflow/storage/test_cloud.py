"""What connections open Azure Blob Storage and Google Cloud Storage with, and what answers mean.

No cloud is contacted: tests/integration/test_cloud_stores.py asks their emulators.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError
from azure.identity import CredentialUnavailableError
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth.compute_engine import Credentials
from google.auth.exceptions import RefreshError, TransportError

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import (
    AccessDenied,
    ConnectionInvalid,
    ObjectArchived,
    StagingError,
)
from ddl_airflow.storage.cloud import Small
from ddl_airflow.storage.connections import open_by_connection
from ddl_airflow.storage.gcs import GcsStore
from ddl_airflow.storage.stores import open_by_environment

KEY = "cGxhbnRlZCBrZXk="
SIGNATURE = "sv=2026-01-01&sr=c&sig=planted"


def azure(**fields):
    return open_by_connection("abfs://models/a", AirflowConnection("mine", "wasb", **fields))


def google(**extra):
    connection = AirflowConnection("mine", "google_cloud_platform", extra=extra)
    return open_by_connection("gs://models/a", connection)


@pytest.fixture(scope="module")
def key_file():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return {
        "type": "service_account",
        "project_id": "a-project",
        "private_key_id": "1",
        "private_key": pem.decode(),
        "client_email": "trainer@a-project.iam.gserviceaccount.com",
        "token_uri": "https://oauth2.googleapis.com/token",
    }


@pytest.mark.parametrize(
    ("fields", "endpoint"),
    [
        ({"login": "acct", "password": KEY}, "https://acct.blob.core.windows.net"),
        (
            {"host": "acct.blob.core.windows.net", "password": KEY},
            "https://acct.blob.core.windows.net",
        ),
        (
            {"host": "http://127.0.0.1:9/acct", "login": "acct", "password": KEY},
            "http://127.0.0.1:9/acct",
        ),
        (
            {"login": "acct", "extra": {"sas_token": f"?{SIGNATURE}"}},
            "https://acct.blob.core.windows.net",
        ),
        (
            {"extra": {"connection_string": f"AccountName=acct;AccountKey={KEY}"}},
            "https://acct.blob.core.windows.net",
        ),
        (
            {"host": "acct", "login": "client", "password": "s", "extra": {"tenant_id": "t"}},
            "https://acct.blob.core.windows.net",
        ),
        ({"login": "acct"}, "https://acct.blob.core.windows.net"),
    ],
    ids=["key", "host", "url", "signature", "string", "secret", "identity"],
)
def test_azure_is_opened_as_the_connection_says(fields, endpoint):
    store = azure(**fields)
    assert store.uri == "abfs://models/a" and store.endpoint == endpoint
    assert bool(store.caller) == (fields != {"login": "acct"})  # who that is nobody knows here
    assert "planted" not in store.endpoint


def test_azure_needs_an_account(monkeypatch):
    with pytest.raises(ConnectionInvalid, match="'mine' names no account. Enter it as login"):
        azure(password=KEY)
    with pytest.raises(ConnectionInvalid, match="connection_string is none") as refused:
        azure(extra={"connection_string": f"AccountKey={KEY}"})
    assert KEY not in str(refused.value)
    for name in ("ACCOUNT", "CONNECTION_STRING", "KEY", "SAS_TOKEN"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    with pytest.raises(ConnectionInvalid, match="Set AZURE_STORAGE_ACCOUNT"):
        open_by_environment("abfs://models")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acct")
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    here = open_by_environment("abfs://models")
    assert here.endpoint == azure(login="acct", password=KEY).endpoint


def test_google_is_opened_as_the_connection_says(key_file, tmp_path, monkeypatch):
    path = tmp_path / "key.json"
    path.write_text(json.dumps(key_file))
    stores = [
        google(keyfile_dict=key_file),
        google(keyfile_dict=json.dumps(key_file)),
        google(key_path=str(path)),
    ]
    assert len({store.caller for store in stores}) == 1 and stores[0].caller
    assert stores[0].endpoint == "https://storage.googleapis.com"
    here = google(is_anonymous=True, api_endpoint="http://127.0.0.1:9")
    assert here.endpoint == "http://127.0.0.1:9" and not here.caller
    pays = google(keyfile_dict=key_file, requester_pays=True, project="payer")
    assert pays._bucket.user_project == "payer"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    assert open_by_environment("gs://models/a").endpoint == "http://127.0.0.1:9"


def test_who_asks_google_by_another_identity_provider_nobody_knows(tmp_path):
    """All counted as one caller, None, whose right to what is in the cache was known."""
    identity = {
        "type": "external_account",
        # Of a project's pool Google is asked for the project's name at once.
        "audience": "//iam.googleapis.com/locations/global/workforcePools/p/providers/a",
        "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
        "token_url": "https://sts.googleapis.com/v1/token",
        "credential_source": {"file": str(tmp_path / "token")},
    }
    assert google(keyfile_dict=identity).caller == ""


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"keyfile_dict": '{"private_key": "planted"'}, "keyfile_dict is no key"),
        ({"keyfile_dict": {"type": "service_account", "private_key": "planted"}}, "is no key"),
        ({"key_path": "no/such.json"}, "key_path: no/such.json is not there"),
        ({"key_secret_name": "s"}, "secret manager. Give keyfile_dict or key_path"),
        ({"impersonation_chain": "a@b"}, "impersonation_chain asks for another account's rights"),
    ],
)
def test_what_google_is_not_opened_with_is_said_without_the_key(extra, said):
    with pytest.raises(ConnectionInvalid, match=said) as refused:
        google(**extra)
    assert "planted" not in str(refused.value)


@pytest.mark.parametrize(
    ("uri", "module", "extra"),
    [
        ("gs://models", "google.cloud.storage", "gcs"),
        ("abfs://models", "azure.storage.blob", "azure"),
        ("abfs://models", "azure.identity", "azure"),
    ],
)
def test_a_library_that_is_not_installed_is_named(monkeypatch, uri, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    kind = {"gs": "google_cloud_platform", "abfs": "wasb"}[uri.partition(":")[0]]
    key = "" if module == "azure.identity" else KEY
    with pytest.raises(ConnectionInvalid, match=f"Install ddl-airflow with the extra {extra}"):
        open_by_connection(uri, AirflowConnection("mine", kind, login="a", password=key))


def test_what_is_secret_of_a_connection(key_file):
    extra = {"sas_token": SIGNATURE, "connection_string": "AccountKey=x", "keyfile_dict": key_file}
    for given in (key_file, json.dumps(key_file)):
        secrets = AirflowConnection("c", password=KEY, extra={**extra, "keyfile_dict": given})
        key = key_file["private_key"]
        every = {KEY, SIGNATURE, "AccountKey=x", key, json.dumps(key)[1:-1]}
        assert set(secrets.secrets()) == every
    assert AirflowConnection("c", extra={"keyfile_dict": "none"}).secrets() == []


class Losing(GcsStore):
    """Heeds conditions, and loses the answer to each first write, which it has done."""

    def __init__(self):
        super().__init__(google(is_anonymous=True)._client, "models")
        self.there, self.version, self.told = b"", 0, False

    def _store_if(self, name, body, version):
        if int(version or 0) != self.version:
            return False
        self.there, self.version = body, self.version + 1
        self.told = not self.told
        if self.told:
            raise StagingError("the answer was lost")
        return True

    def _small(self, name):
        return Small(self.there, "", str(self.version))


def test_a_pointer_whose_answer_was_lost_is_asked_for_again_and_counts_as_changed(monkeypatch):
    monkeypatch.setattr("ddl_airflow.storage.retries._FIRST_WAIT_S", 0.0)
    store = Losing()
    assert store.put_if("pointer", b"one", None)
    assert not store.put_if("pointer", b"two", None)
    assert store.read_version("pointer") == (b"one", "1")


def test_a_pointer_that_somebody_else_has_changed_after_a_lost_answer_is_not_ours(monkeypatch):
    def others(*_):
        store.there, store.version = b"theirs", store.version + 1

    monkeypatch.setattr("ddl_airflow.storage.retries.wait", others)
    store = Losing()
    assert not store.put_if("pointer", b"one", None)
    assert store.read_bytes("pointer") == b"theirs"


@contextmanager
def answering(answer):
    """A service that answers each request with what ``answer`` makes of its path: status and body.

    Yields its address.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            status, headers, body = answer(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


BLOBS = b"""<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs><Blob><Name>a/f</Name>
<Properties><Last-Modified>Mon, 06 Jul 2026 10:00:00 GMT</Last-Modified><Etag>0x1</Etag>
<Content-Length>3</Content-Length><BlobType>BlockBlob</BlobType><AccessTier>TIER</AccessTier>
</Properties></Blob></Blobs><NextMarker /></EnumerationResults>"""
XML = {"Content-Type": "application/xml"}


@pytest.mark.parametrize("code", ["BlobArchived", "BlobBeingRehydrated"])
def test_a_blob_in_the_archive_is_listed_as_such_and_named_with_what_to_do(code):
    tier = b"Archive"

    def answer(path):
        if "comp=list" in path:
            return 200, XML, BLOBS.replace(b"TIER", tier)
        said = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>"
        return 409, {"x-ms-error-code": code, **XML}, said.encode()

    with answering(answer) as address:
        store = azure(host=f"{address}/acct", login="acct", password=KEY)
        (obj,) = store.list()
        assert (obj.key, obj.size, obj.archived) == ("f", 3, "Archive")
        with pytest.raises(ObjectArchived, match=rf"a/f at .*{code} \(409\): .*archive.*tier"):
            store.read(obj, lambda chunk: None)
        with pytest.raises(ObjectArchived):
            store.read_bytes("f")
        tier = b"Cold"
        (obj,) = store.list()
        assert not obj.archived


HTML = b"<html><meta charset=utf-8><body>Please log in</body></html>"
XHTML = b"<html><body>Please log in</body></html>"


@pytest.mark.parametrize(
    "ask",
    [lambda store: store.list(), lambda store: store.names(), lambda store: store.exists("f")],
    ids=["list", "names", "exists"],
)
@pytest.mark.parametrize(
    ("cloud", "kind", "page"),
    [
        *(("azure", "text/html", page) for page in (HTML, XHTML, b"")),
        *(("azure", "application/xml", page) for page in (HTML, XHTML, b"", BLOBS[:200])),
        ("azure", "application/xml", BLOBS.replace(b">3<", b">three<")),
        *(("google", "text/html", page) for page in (HTML, b"")),
        *(("google", "application/json", page) for page in (b"[]", b'{"items": [{"na')),
    ],
)
def test_an_answer_that_is_no_listing_is_the_stores_error(cloud, kind, page, ask):
    """As of a proxy, or of one that was cut off: some passed every handler of the store's errors.

    To Google ``{}`` is a listing, of nothing.
    """
    with answering(lambda path: (200, {"Content-Type": kind}, page)) as address:
        if cloud == "azure":
            store = azure(host=f"{address}/acct", login="acct", password=KEY)
        else:
            store = google(is_anonymous=True, api_endpoint=address)
        with pytest.raises(StagingError, match=f"^{store.uri}.* at http") as caught:
            ask(store)
    assert caught.value.retryable and len(str(caught.value)) < 400


def test_azures_identity_service_that_does_not_answer_may_answer_the_next_time(monkeypatch):
    """It was a lack of rights, for good."""
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", "http://127.0.0.1:9")
    for source in ("AzureCli", "AzurePowerShell", "AzureDeveloperCli"):  # programs of this host
        monkeypatch.setattr(f"azure.identity.{source}Credential.get_token", _none_here)
    unreachable = ServiceRequestError("Failed to resolve 'login.microsoftonline.com'")
    monkeypatch.setattr(
        "azure.identity.ClientSecretCredential._request_token",
        lambda *args, **how: _raise(unreachable),
    )
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for fields in (
        {"login": "acct"},
        {"host": "acct", "login": "client", "password": "s", "extra": {"tenant_id": "t"}},
    ):
        with pytest.raises(StagingError, match="could not be fetched.*identity service") as caught:
            azure(**fields).list()
        assert caught.value.retryable and type(caught.value) is StagingError
    refused = ClientAuthenticationError("AADSTS7000215: Invalid client secret provided")
    store = azure(login="acct")
    with pytest.raises(AccessDenied, match="AADSTS.*and secret") as denied, store._errors():
        raise refused
    assert not denied.value.retryable


def _raise(error):
    raise error


def _none_here(*args, **how):
    raise CredentialUnavailableError("not installed")


def test_googles_metadata_service_that_does_not_answer_may_answer_the_next_time(monkeypatch):
    """It was a lack of rights, for good."""
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda seconds: None)
    store = google(is_anonymous=True)
    with pytest.raises(StagingError, match="fetched.*metadata") as caught, store._errors():
        Credentials().refresh(lambda **asked: _raise(TransportError("timed out")))
    assert caught.value.retryable and type(caught.value) is StagingError
    with pytest.raises(AccessDenied, match="invalid_grant.*key") as denied, store._errors():
        raise RefreshError("invalid_grant: account not found")
    assert not denied.value.retryable
