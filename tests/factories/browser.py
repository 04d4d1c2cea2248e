"""A browser with a cookie jar, that does what our pages' scripts do; and the mails that people get."""

import re
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
from fastapi import FastAPI

from api.guard import COOKIE, CSRF_HEADER
from api.services import Services
from billing import tasks
from core import db, mail, outbox
from core.mail import KeptMail
from core.tasks import Job, TaskContext
from tenants import people, people_tasks, sign_in
from tenants.types import Person

BASE = "http://control"
AUTH = "/api/v1/auth"
PASSWORD = "tides-turn-at-dusk-again"
OTHER = "lantern-quay-moss-ebbing"
ADA = "ada@example.com"
JOBS = {task.name: task for task in (*mail.TASKS, *people_tasks.TASKS, *tasks.TASKS) if isinstance(task, Job)}


@dataclass
class Browser:
    """Keeps cookies, and sends the token of changes that it was told last."""

    http: httpx.AsyncClient
    csrf: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def cookie(self) -> str | None:
        return self.http.cookies.get(COOKIE)

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"origin": BASE, "sec-fetch-site": "same-origin", CSRF_HEADER: self.csrf, **self.headers}
        answer = await self.http.request(method, path, headers={**headers, **options.pop("headers", {})}, **options)
        if answer.status_code == 200 and answer.headers["content-type"] == "application/json":
            self.csrf = answer.json().get("csrf_token") or self.csrf
        return answer

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.call("GET", path, **options)

    async def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return await self.call("POST", path, json=json, **options)

    async def patch(self, path: str, json: Any) -> httpx.Response:
        return await self.call("PATCH", path, json=json)

    async def delete(self, path: str) -> httpx.Response:
        return await self.call("DELETE", path)

    async def sign_in(self, email: str, password: str) -> httpx.Response:
        return await self.post(f"{AUTH}/password", {"email": email, "password": password})

    async def signed_in(self) -> bool:
        status = (await self.get("/api/v1/session")).status_code
        assert status in {200, 401}
        return status == 200


class Open(Protocol):
    """Opens a browser somewhere."""

    def __call__(self, address: str = ...) -> Browser: ...


async def local_person(services: Services, email: str, password: str = PASSWORD) -> Person:
    """Commit a person with a password."""
    fresh = await services.passwords.new(password, email=email, name="")
    async with db.transaction(services.sessions) as session:
        made = await people.create(session, email=email, name=email.partition("@")[0].title())
        return await sign_in.set_password(session, made.id, fresh, services.clock.now())


def browser(app: FastAPI, address: str = "203.0.113.7") -> Browser:
    """A fresh browser somewhere; close its `http`."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 40000))
    return Browser(httpx.AsyncClient(transport=transport, base_url=BASE))


async def mails(services: Services, to: str) -> list[KeptMail]:
    """Do the worker's work, and return what this person got so far, newest first."""
    context = TaskContext(services.settings, services.sessions, services.clock)
    while rows := await outbox.claim(context):
        for row in rows:
            assert await outbox.execute(context, JOBS, row) is outbox.Outcome.DONE
    return [kept for kept in mail.kept(services.settings.mail_dir, 100) if kept.to == to]


def token_in(kept: KeptMail) -> str:
    """The token of the link in a mail."""
    found = re.search(r"#(tg[a-z]_\w+)", kept.text)
    assert found is not None
    return found[1]
