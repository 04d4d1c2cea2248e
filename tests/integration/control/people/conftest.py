"""People at the control plane, in the time of the test."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import pytest
from fastapi import FastAPI

from api.app import create_app
from api.services import Services
from core.clock import ManualClock
from tenants.types import Person
from tests.factories.browser import ADA, Browser, Open, browser, local_person


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(datetime(2026, 11, 30, 12, tzinfo=UTC))


@pytest.fixture
def at_desk(services: Services, clock: ManualClock) -> Services:
    """The services, in the time of the test."""
    return dataclasses.replace(services, clock=clock)


@pytest.fixture
def app(at_desk: Services) -> FastAPI:
    return create_app(at_desk)


@pytest.fixture
async def visit(app: FastAPI) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        def opened(address: str = "203.0.113.7") -> Browser:
            made = browser(app, address)
            stack.push_async_callback(made.http.aclose)
            return made

        yield opened


@pytest.fixture
async def ada(at_desk: Services) -> Person:
    return await local_person(at_desk, ADA)
