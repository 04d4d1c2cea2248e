"""One S3 server for the tests of the registry."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import S3Store

from catalog.registry import store
from core.settings import Objects
from tests.factories import object_server


@pytest.fixture(scope="session")
def s3_url(service_folder: Path) -> Iterator[str]:
    with object_server.s3_server(service_folder / "weed") as url:
        yield url


@pytest.fixture
def objects(s3_url: str) -> Objects:
    """A prefix of its own in the one bucket. SeaweedFS makes a bucket at the first write into it."""
    return Objects.model_validate(
        {
            "url": f"s3://tidegate/{secrets.token_hex(6)}",
            "endpoint": s3_url,
            "access_key": object_server.ACCESS,
            "secret_key": object_server.SECRET,
        }
    )


@pytest.fixture
def s3(objects: Objects) -> S3Store:
    found = store.bucket(objects, objects.url)
    assert isinstance(found, S3Store)
    return found
