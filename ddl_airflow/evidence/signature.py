"""The signature over all that is published, by model-signing, with a key of the site's own.

It is offline: no certificate authority and no log is asked. What is signed are names and SHA-256 of
all files but the marker ``_SUCCESS``, which comes after, and the signature itself; model-signing's
own command verifies it as well.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddl_airflow.core.errors import DAMAGED, SettingInvalid
from ddl_airflow.evidence.names import SIGNATURE
from ddl_airflow.storage.store import SUCCESS

UNSIGNED = frozenset({SUCCESS, SIGNATURE})


@contextmanager
def signing_key(setting: str, secret: Callable[[str], str]) -> Iterator[Path]:
    """Yields a file with the site's private key. The key of a connection is in memory alone.

    Args:
        setting: the path of a PEM file, which has a slash; or the id of an Airflow connection
            whose password is the PEM.
        secret: a connection's password, by its id.

    Raises:
        SettingInvalid: the setting is a key itself, or names a file that cannot be read.
    """
    if "-----" in setting:  # which messages of any error would show
        raise SettingInvalid(
            "[ddl] signing_key holds a key. Write it to a file that only Airflow reads, or into a "
            "connection's password, and name that."
        )
    if "/" in setting:
        path = Path(os.path.expanduser(setting))
        try:
            path.open("rb").close()
        except OSError as error:
            why = f"the file of [ddl] signing_key cannot be read: {error.strerror}"
            raise SettingInvalid(why) from None
        yield path
        return
    with _in_memory(secret(setting).encode()) as path:
        yield path


def sign(name: str, digests: Mapping[str, str], private_key: Path) -> bytes:
    """The signature: a Sigstore bundle.

    Args:
        name: of what is signed; for people.
        digests: SHA-256 in hex of each file, by its key.
        private_key: PEM, of the curve P-256, P-384 or P-521, with no passphrase.

    Raises:
        ValueError, TypeError: it is no such key.
    """
    from model_signing import signing

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "signature")
        config = signing.Config().use_elliptic_key_signer(private_key=private_key)
        config.set_hashing_config(_known(digests)).sign(Path(name), path)
        return path.read_bytes()


def check(signature: bytes, digests: Mapping[str, str], public_key: Path) -> dict[str, str]:
    """What is wrong with files that were signed: a sentence for each, by its key; empty: nothing.

    Args:
        signature: as ``sign`` gave it.
        digests: SHA-256 in hex of each file that is there now, by its key.
        public_key: PEM.

    Raises:
        OSError: there is no such key.
    """
    from cryptography.exceptions import InvalidSignature
    from model_signing import verifying

    public_key.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "signature")
        path.write_bytes(signature)
        try:
            config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
            config.set_hashing_config(_known(digests)).verify(Path("published"), path)
        except InvalidSignature:
            return {SIGNATURE: "it was not made with this key, or was changed"}
        except Exception as error:  # of whatever kind the parsers of a changed bundle raise
            if not str(error).startswith("Signature mismatch"):
                return {SIGNATURE: f"it does not hold: {type(error).__name__}: {error}"}
            return _changed(_signed(signature), digests)
    return {}


def still_holds(signature: bytes, digests: Mapping[str, str], private_key: Path) -> bool:
    """Whether that key signed these files: another signature of the same differs, and says no more.

    Raises:
        ValueError, TypeError: as ``sign``.
    """
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(private_key.read_bytes(), None)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    with _in_memory(public) as path:
        return not check(signature, digests, path)


def signer(signature: bytes) -> str:
    """SHA-256 of the public key, as PEM, that a signature says to be for; empty: it says none."""
    try:
        material = json.loads(signature)["verificationMaterial"]
        return str(material["publicKey"]["hint"])
    except DAMAGED:
        return ""


def _known(digests: Mapping[str, str]) -> Any:
    """model-signing's way to find digests, which reads nothing: they are known.

    The classes are not in its stable interface; the tests hold what they make against its command.
    """
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest

    class Known(hashing.Config):
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            items = [
                manifest.FileManifestItem(
                    path=Path(key), digest=Digest("sha256", bytes.fromhex(sha256))
                )
                for key, sha256 in sorted(digests.items())
            ]
            kind = manifest._FileSerialization("sha256")
            return manifest.Manifest(Path(model_path).name, items, kind)

    return Known()  # type: ignore[no-untyped-call]


def _signed(signature: bytes) -> dict[str, str]:
    """SHA-256 of each file that a signature is over, by its key. Only of one that was verified."""
    payload = json.loads(base64.b64decode(json.loads(signature)["dsseEnvelope"]["payload"]))
    return {one["name"]: one["digest"] for one in payload["predicate"]["resources"]}


def _changed(signed: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    said = {key: "it is not the file that was signed" for key in signed.keys() & there.keys()}
    said = {key: text for key, text in said.items() if signed[key] != there[key]}
    said |= dict.fromkeys(signed.keys() - there.keys(), "it was signed, and is gone")
    return said | dict.fromkeys(there.keys() - signed.keys(), "it was not signed")


@contextmanager
def _in_memory(content: bytes) -> Iterator[Path]:
    """Yields the path of a file that no disk has, and no other user can open."""
    with os.fdopen(os.memfd_create("key", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
        yield Path(f"/proc/self/fd/{file.fileno()}")
