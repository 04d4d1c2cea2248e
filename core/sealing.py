"""Secrets that must be read again, at rest: AES-256-GCM under the installation's sealing secret."""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import SecretStr

from core.errors import ErrorKind, PlatformError

NONCE_BYTES = 12
_VERSION = b"\x01"


def sealing_key(secret: SecretStr) -> bytes:
    """Return the key in `Settings.secrets.sealing`: 32 bytes in hex."""
    key = bytes.fromhex(secret.get_secret_value())
    if len(key) != 32:
        raise ValueError("The sealing secret must be 32 bytes in hex.")
    return key


def seal(key: bytes, plain: bytes, *, context: bytes, nonce: bytes) -> bytes:
    """Return version, nonce and ciphertext.

    Args:
        key: 32 bytes, see `sealing_key`.
        plain: what to hide.
        context: what it belongs to, e.g. a deployment's id; a sealed value moved elsewhere does not open.
        nonce: 12 fresh random bytes, never used twice with one key.
    """
    return _VERSION + nonce + AESGCM(key).encrypt(nonce, plain, context)


def unseal(key: bytes, sealed: bytes, *, context: bytes) -> bytes:
    """Return what was sealed.

    Raises:
        PlatformError: kind internal, when key, context or bytes are not the ones it was sealed with.
    """
    try:
        plain = AESGCM(key).decrypt(sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :], context)
    except (InvalidTag, ValueError):
        plain = None
    if plain is None or not sealed.startswith(_VERSION):
        raise PlatformError(
            "CREDENTIAL_UNREADABLE",
            ErrorKind.INTERNAL,
            "A stored secret does not open with this installation's sealing secret. Set it anew.",
        )
    return plain
