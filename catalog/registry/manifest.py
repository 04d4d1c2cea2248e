"""A version's hash, its reference and its signed manifest. Pure.

The hash of a version is what its bytes are and nothing else: of one file its own SHA-256, as every tool computes it; of
several the SHA-256 of the canonical JSON of their paths, sizes and hashes. The manifest is canonical JSON too (members
sorted, no spaces, UTF-8; RFC 8785 for texts, whole numbers and booleans), signed with Ed25519.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from catalog.registry.errors import invalid
from catalog.registry.types import Facts, Provenance, WeightFile
from core.settings import Secrets

FORMAT = "tidegate-manifest/1"
MANIFEST_FILE = "tidegate-manifest.json"
FILES_MAX = 2000
PATH_MAX = 255
FILE_MAX_BYTES = 1 << 43  # 8 TiB
_DOMAIN = b"tidegate model manifest\n"
_PATH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REFERENCE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127})@(?P<number>[0-9]{1,9}):(?P<hash>[0-9a-f]{64})")
_RUNS_CODE = re.compile(r"(?i)(.*/)?(.*\.(pkl|pickle|pt|pth|ckpt)|(pytorch|tf)_model.*\.bin)")


@dataclass(frozen=True, slots=True)
class Reference:
    """A version by name, number and hash."""

    name: str
    number: int
    sha256: str


def parse_reference(text: str) -> Reference:
    """Return the parts of ``name@number:sha256``.

    Raises:
        PlatformError: kind invalid, it is of another shape.
    """
    found = _REFERENCE.fullmatch(text)
    if found is None or int(found["number"]) == 0:
        raise invalid("A version is pinned as name@number:sha256, with the whole SHA-256 in lower-case hex.", "version")
    return Reference(found["name"], int(found["number"]), found["hash"])


def check_path(path: str) -> None:
    """Refuse a path that leads out of its folder, hides, or names what runs code when it is loaded.

    Raises:
        PlatformError: kind invalid.
    """
    if len(path) > PATH_MAX or not _PATH.fullmatch(path):
        raise invalid(
            f"{path[:100]!r} is no path of a version: letters, digits and . _ - in parts divided by /, no part "
            "beginning with a dot, 255 characters at most.",
            "files",
        )
    if path == MANIFEST_FILE:
        raise invalid(f"{MANIFEST_FILE} is the registry's own file: give yours another name.", "files")
    if _RUNS_CODE.fullmatch(path):
        raise invalid(f"{path!r} is a pickle, which runs code when it is loaded: convert it to safetensors.", "files")


def check_files(files: Sequence[WeightFile]) -> None:
    """Refuse a list that is no version: paths, hashes, sizes, count, two of one name, a file that is another's folder.

    Raises:
        PlatformError: kind invalid.
    """
    if not 1 <= len(files) <= FILES_MAX:
        raise invalid(f"A version has 1 to {FILES_MAX:,} files.", "files")
    for file in files:
        check_path(file.path)
        if not _SHA256.fullmatch(file.sha256):
            raise invalid(f"The SHA-256 of {file.path!r} has 64 lower-case hex digits.", "files")
        if not 0 < file.size_bytes <= FILE_MAX_BYTES:
            raise invalid(f"{file.path!r} has 1 to {FILE_MAX_BYTES:,} bytes.", "files")
    paths = [file.path.casefold() for file in files]
    if len(set(paths)) != len(paths):
        raise invalid("Two files have the same path (upper and lower case count as the same).", "files")
    folders = {path[:at] for path in paths for at, character in enumerate(path) if character == "/"}
    if folders & set(paths):
        raise invalid("A file has the path of a folder.", "files")


def canonical(value: Any) -> bytes:
    """Return the canonical JSON of texts, whole numbers, booleans, lists and objects of them."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def content_hash(files: Sequence[WeightFile]) -> str:
    """Return the hash of a version: what `name@number:sha256` ends with. The order of the files does not matter."""
    if len(files) == 1:
        return files[0].sha256
    return hashlib.sha256(canonical(_plain(files))).hexdigest()


def _plain(files: Sequence[WeightFile]) -> list[dict[str, Any]]:
    ordered = sorted(files, key=lambda file: file.path)
    return [{"path": file.path, "sha256": file.sha256, "size": file.size_bytes} for file in ordered]


def document(
    *,
    model: str,
    number: int,
    files: Sequence[WeightFile],
    facts: Facts,
    provenance: Provenance,
    licence: str,
    created_at: str,
) -> str:
    """Return the manifest of a version as the text that is signed."""
    return canonical(
        {
            "format": FORMAT,
            "model": model,
            "version": number,
            "sha256": content_hash(files),
            "files": _plain(files),
            "facts": msgspec.to_builtins(facts),
            "provenance": msgspec.to_builtins(provenance),
            "licence": licence,
            "created_at": created_at,
        }
    ).decode()


class _File(msgspec.Struct, frozen=True):
    path: str
    sha256: str
    size: int


class _Manifest(msgspec.Struct, frozen=True):
    format: str
    sha256: str
    files: list[_File]


def read_files(text: bytes, sha256: str) -> list[WeightFile]:
    """Return the files of a manifest found in the store, once it is the one of this hash.

    Raises:
        PlatformError: kind invalid, it is another version's or no manifest.
    """
    try:
        found = msgspec.json.decode(text, type=_Manifest)
    except msgspec.MsgspecError:
        raise invalid("The manifest in the store cannot be read.") from None
    files = [WeightFile(file.path, file.size, file.sha256) for file in found.files]
    check_files(files)
    if found.format != FORMAT or content_hash(files) != sha256:
        raise invalid("The manifest in the store is not the one of this hash.")
    return files


def keys_of(secrets: Secrets) -> tuple[Ed25519PrivateKey, ...]:
    """Return the keys of manifests, made of the installation's signing keys: the first one signs, all are believed."""
    seeds = (secrets.signing, *secrets.previous_signing)
    return tuple(Ed25519PrivateKey.from_private_bytes(_seed(seed.get_secret_value())) for seed in seeds)


def _seed(signing: str) -> bytes:
    key = bytes.fromhex(signing)
    return hashlib.blake2b(b"ed25519", digest_size=32, key=key[:64], person=b"tg-manifest").digest()


def key_id(key: Ed25519PublicKey) -> str:
    """Return the name of a public key: 16 hex digits of its SHA-256."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def sign(key: Ed25519PrivateKey, text: str) -> bytes:
    """Return the signature of a manifest."""
    return key.sign(_DOMAIN + text.encode())


def is_signed(keys: Sequence[Ed25519PrivateKey], text: str, signature: bytes) -> bool:
    """Say whether one of these keys signed it."""
    for key in keys:
        try:
            key.public_key().verify(signature, _DOMAIN + text.encode())
        except InvalidSignature:
            continue
        return True
    return False
