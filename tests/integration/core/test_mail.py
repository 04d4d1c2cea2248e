"""Mail by a real SMTP server (aiosmtpd), and into the folder when there is none."""

import asyncio
import re
import ssl
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword
from pydantic import ValidationError
from sqlalchemy import text

from core import db, mail, outbox
from core.clock import ManualClock
from core.mail import Letter
from core.outbox import Outcome
from core.settings import Database, Mail, Settings
from core.tasks import Job, TaskContext
from tests.factories.certificates import certificate

SECRET = "https://maas.example.com/invite#tok_a1b2c3d4e5"
LETTER = Letter("ann@example.com", "You are invited", f"Open {SECRET}\nGr\u00fc\u00dfe\n")
JOBS = {task.name: task for task in mail.TASKS if isinstance(task, Job)}
SEALING = "22" * 32


class Inbox:
    """What a server took, or the code it answers with."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse
        self.envelopes: list[Envelope] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Envelope) -> str:  # noqa: N802 - aiosmtpd's name
        if self.refuse:
            return self.refuse
        self.envelopes.append(envelope)
        return "250 OK"


def _login(server: Any, session: Any, envelope: Envelope, mechanism: str, data: Any) -> AuthResult:
    assert isinstance(data, LoginPassword)
    return AuthResult(success=(data.login, data.password) == (b"tidegate", b"sesame"))


@asynccontextmanager
async def smtp(inbox: Inbox, **options: Any) -> AsyncIterator[int]:
    def protocol() -> SMTP:
        return SMTP(inbox, hostname="mx.test", authenticator=_login, **options)

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


Make = Callable[..., TaskContext]


@pytest.fixture
def make(sessions: db.Sessions, database_settings: Database, tmp_path: Path) -> Make:
    def made(**group: Any) -> TaskContext:
        settings = Settings.model_validate(
            {
                "home": tmp_path,
                "secrets": {"pepper": "00" * 32, "signing": "11" * 32, "sealing": SEALING},
                "database": database_settings,
                "valkey": {"url": "unix:///none", "broker_url": "unix:///none"},
                "mail": {"sender": "Tidegate <gate@maas.example.com>", **group},
            }
        )
        return TaskContext(settings, sessions, ManualClock())

    return made


async def _post_and_send(context: TaskContext, letter: Letter = LETTER) -> Outcome:
    async with db.transaction(context.sessions) as session:
        await mail.post(session, letter, sealing_key=bytes.fromhex(SEALING))
    (row,) = await outbox.claim(context)
    return await outbox.execute(context, JOBS, row)


async def _outbox(context: TaskContext, column: str) -> list[str]:
    async with db.transaction(context.sessions) as session:
        return list((await session.execute(text(f"SELECT {column}::text FROM outbox"))).scalars())


async def test_over_starttls_with_a_login(make: Make, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trust.load_cert_chain(cert, key)
    inbox = Inbox()
    async with smtp(inbox, tls_context=trust, require_starttls=True, auth_required=True) as port:
        context = make(host="127.0.0.1", port=port, username="tidegate", password="sesame", ca_file=cert)
        assert await _post_and_send(context) is Outcome.DONE
    (envelope,) = inbox.envelopes
    assert (envelope.mail_from, envelope.rcpt_tos) == ("gate@maas.example.com", ["ann@example.com"])
    content = envelope.content
    assert isinstance(content, bytes)
    received = message_from_bytes(content, policy=policy.default)
    assert received["From"] == "Tidegate <gate@maas.example.com>"
    assert (received["To"], received["Subject"]) == ("ann@example.com", "You are invited")
    assert received["Date"] == "Thu, 01 Jan 2026 00:00:00 +0000"
    assert received["Message-ID"].endswith("@maas.example.com>")
    assert received.get_content().replace("\r\n", "\n") == LETTER.text
    assert not (tmp_path / "mail").exists()


async def test_a_server_whose_certificate_nobody_vouches_for_gets_nothing(make: Make, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trust.load_cert_chain(cert, key)
    inbox = Inbox()
    async with smtp(inbox, tls_context=trust) as port:
        context = make(host="127.0.0.1", port=port, username="tidegate", password="sesame")
        assert await _post_and_send(context) is Outcome.FAILED
    assert inbox.envelopes == []
    assert await _outbox(context, "last_error") == [
        "MailError: The mail server did not take it (SSLCertVerificationError)."
    ]


async def test_a_server_without_starttls_gets_nothing(make: Make) -> None:
    inbox = Inbox()
    async with smtp(inbox) as port:
        context = make(host="127.0.0.1", port=port)
        assert await _post_and_send(context) is Outcome.FAILED
    assert inbox.envelopes == []
    assert await _outbox(context, "last_error") == [
        "MailError: The mail server did not take it (SMTPNotSupportedError)."
    ]


async def test_a_refusal_is_tried_again_and_names_nobody(make: Make) -> None:
    inbox = Inbox("451 ann@example.com is greylisted")
    async with smtp(inbox) as port:
        context = make(host="127.0.0.1", port=port, security="none")
        assert await _post_and_send(context) is Outcome.FAILED
        assert await _outbox(context, "last_error") == ["MailError: The mail server answered 451."]
        inbox.refuse = ""
        context.clock.advance(6)  # type: ignore[attr-defined]
        (row,) = await outbox.claim(context)
        assert await outbox.execute(context, JOBS, row) is Outcome.DONE
    assert len(inbox.envelopes) == 1


async def test_nobody_listens(make: Make) -> None:
    async with smtp(Inbox()) as port:
        pass
    context = make(host="127.0.0.1", port=port)
    assert await _post_and_send(context) is Outcome.FAILED
    assert await _outbox(context, "last_error") == [
        "MailError: The mail server did not take it (ConnectionRefusedError)."
    ]


async def test_a_password_is_never_sent_in_clear(make: Make) -> None:
    with pytest.raises(ValidationError, match="not protected"):
        Mail.model_validate({"host": "mx", "security": "none", "username": "tidegate", "password": "sesame"})


async def test_what_waits_in_the_outbox_is_sealed(make: Make) -> None:
    context = make()
    async with db.transaction(context.sessions) as session:
        await mail.post(session, LETTER, sealing_key=bytes.fromhex(SEALING))
    (arguments,) = await _outbox(context, "arguments")
    assert re.fullmatch(r'\{"sealed": "[0-9A-Za-z+/=]+"\}', arguments)
    for part in ("ann", "invite", "tok_a1b2c3d4e5"):
        assert part not in arguments


async def test_without_a_server_mails_are_kept_for_the_home_s_owner_alone(make: Make, tmp_path: Path) -> None:
    context = make()
    assert await _post_and_send(context) is Outcome.DONE
    (path,) = (tmp_path / "mail").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (kept,) = mail.kept(tmp_path / "mail", 10)
    assert (kept.to, kept.subject, kept.text.replace("\r\n", "\n")) == (LETTER.to, LETTER.subject, LETTER.text)


async def test_a_second_delivery_of_the_same_mail_is_not_kept_twice(make: Make, tmp_path: Path) -> None:
    context = make()
    for second in (1, 2):
        context.clock.advance(second)  # type: ignore[attr-defined]
        await asyncio.to_thread(mail.deliver, context.settings, LETTER, "ab" * 16, context.clock.now())
    assert len(mail.kept(tmp_path / "mail", 10)) == 1


async def test_the_folder_is_bounded_and_newest_first(make: Make, tmp_path: Path) -> None:
    context = make()
    folder = tmp_path / "mail"
    folder.mkdir()
    for number in range(mail.KEPT_MAX + 5):
        (folder / f"20250101T000000.{number:06}-{number:032x}.eml").write_bytes(b"Subject: old\r\n\r\nx")
    mail.deliver(context.settings, LETTER, "ab" * 16, context.clock.now())
    assert len(list(folder.iterdir())) == mail.KEPT_MAX
    newest, second = mail.kept(folder, 2)
    assert (newest.subject, second.subject) == ("You are invited", "old")
    assert not (folder / f"20250101T000000.{0:06}-{0:032x}.eml").exists()


@pytest.mark.parametrize("to", ["ann@example.com\r\nBcc: eve@example.com", "eve@evil.com, ann@example.com", "ann"])
async def test_an_address_that_is_two_is_refused(make: Make, to: str, tmp_path: Path) -> None:
    assert await _post_and_send(make(), Letter(to, "x", "y")) is Outcome.FAILED
    assert not (tmp_path / "mail").exists()


async def test_a_subject_cannot_add_a_header(make: Make, tmp_path: Path) -> None:
    assert await _post_and_send(make(), Letter("ann@example.com", "x\r\nBcc: eve@evil.com", "y")) is Outcome.FAILED
