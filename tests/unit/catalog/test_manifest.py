"""References, paths, hashes and signatures of versions."""

import hashlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from catalog.registry import manifest
from catalog.registry.types import Facts, Provenance, WeightFile
from core.errors import PlatformError
from core.settings import Secrets

SECRETS = Secrets.model_validate({"pepper": "00" * 32, "signing": "11" * 32, "sealing": "22" * 32})
A, B = WeightFile("a", 1, "aa" * 32), WeightFile("b/c", 2, "bb" * 32)


def test_a_reference_is_name_number_and_hash() -> None:
    found = manifest.parse_reference(f"org/tide:7b@x@3:{'ab' * 32}")
    assert (found.name, found.number, found.sha256) == ("org/tide:7b@x", 3, "ab" * 32)


@pytest.mark.parametrize(
    "text",
    [
        "tide",
        "tide@1",
        "tide@0:" + "ab" * 32,
        "tide@1:" + "AB" * 32,
        "tide@1:" + "ab" * 31,
        "@1:" + "ab" * 32,
        "tide@x:y",
    ],
)
def test_what_is_no_whole_reference_is_refused(text: str) -> None:
    with pytest.raises(PlatformError, match="name@number:sha256"):
        manifest.parse_reference(text)


@pytest.mark.parametrize(
    "path",
    ["", "/a", "a/", "a//b", "../a", "a/../b", ".git", "a/.b", "a b", "a\n", "a\\b", "ä", "a" * 256, "~"],
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(PlatformError, match="no path of a version"):
        manifest.check_path(path)


@pytest.mark.parametrize("path", ["x.pkl", "x.pt", "a/X.PTH", "x.ckpt", "pytorch_model.bin", "pytorch_model-00001.bin"])
def test_weights_that_run_code_are_refused(path: str) -> None:
    with pytest.raises(PlatformError, match="safetensors"):
        manifest.check_path(path)


@pytest.mark.parametrize(
    "files",
    [
        [],
        [A, A],
        [A, WeightFile("A", 1, "cc" * 32)],
        [WeightFile("b", 1, "aa" * 32), B],
        [WeightFile("a", 0, "aa" * 32)],
    ],
)
def test_a_list_that_is_no_version_is_refused(files: list[WeightFile]) -> None:
    with pytest.raises(PlatformError):
        manifest.check_files(files)


def test_the_hash_of_one_file_is_its_own_and_of_several_that_of_their_list() -> None:
    assert manifest.content_hash([A]) == A.sha256
    text = json.dumps(
        [{"path": "a", "sha256": "aa" * 32, "size": 1}, {"path": "b/c", "sha256": "bb" * 32, "size": 2}],
        separators=(",", ":"),
    )
    assert manifest.content_hash([B, A]) == manifest.content_hash([A, B]) == hashlib.sha256(text.encode()).hexdigest()


def _document(files: list[WeightFile]) -> str:
    return manifest.document(
        model="tide",
        number=1,
        files=files,
        facts=Facts(format="gguf"),
        provenance=Provenance("upload"),
        licence="MIT",
        created_at="2026-12-01T00:00:00+00:00",
    )


def test_a_manifest_is_signed_and_anybody_can_check_it() -> None:
    (key,) = manifest.keys_of(SECRETS)
    text = _document([A, B])
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    signature = manifest.sign(key, text)
    public = Ed25519PublicKey.from_public_bytes(key.public_key().public_bytes_raw())
    public.verify(signature, b"tidegate model manifest\n" + text.encode())
    assert manifest.is_signed([key], text, signature)
    assert not manifest.is_signed([key], text.replace("MIT", "mit"), signature)
    assert not manifest.is_signed([key], text, b"\0" * 64)
    other = SECRETS.model_copy(update={"signing": SECRETS.pepper})
    assert not manifest.is_signed(manifest.keys_of(other), text, signature)


def test_a_manifest_in_the_store_is_believed_only_with_the_hash_that_is_pinned() -> None:
    text = _document([A, B]).encode()
    assert manifest.read_files(text, manifest.content_hash([A, B])) == [A, B]
    for altered, sha256 in (
        (text, "ab" * 32),
        (text.replace(b"aa" * 32, b"ac" * 32), manifest.content_hash([A, B])),
        (text.replace(b'"a"', b'"../a"'), manifest.content_hash([A, B])),
        (b"{", "ab" * 32),
    ):
        with pytest.raises(PlatformError):
            manifest.read_files(altered, sha256)
