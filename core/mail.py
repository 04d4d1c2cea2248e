"""Mail: by SMTP when a server is set, else into the folder ``<home>/mail``, which operators can look at.

A mail is asked for in the transaction that needs it (`post`) and sent by the worker after its commit. What it says
waits sealed in the outbox, because it may hold a link that lets somebody in. It may be sent twice, with one Message-ID.
"""

import asyncio
import base64
import hashlib
import secrets
import smtplib
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email import message_from_bytes, policy
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime, parseaddr
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from core import outbox, sealing
from core.files import write_private
from core.logging import get_logger
from core.settings import Mail, MailSecurity, Settings
from core.tasks import Job, Task, TaskContext

SEND = "mail.send"
KEPT_MAX = 200  # mails in the folder; older ones are removed
KEPT_BYTES_MAX = 100_000  # of each that is read back
_CONTEXT = b"mail"
_POLICY = policy.SMTP.clone(max_line_length=500)  # a link stays on one line
_ID_BYTES = 16

log = get_logger(__name__)


class Letter(msgspec.Struct, frozen=True):
    """One mail to one person, as plain text."""

    to: str
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class KeptMail:
    """A mail in the folder."""

    written_at: str
    to: str
    subject: str
    text: str


class MailError(Exception):
    """It could not be handed over; the message says what the server said, without addresses."""


async def post(
    session: AsyncSession,
    letter: Letter,
    *,
    sealing_key: bytes,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> None:
    """Have the letter sent after this transaction's commit."""
    nonce = random_bytes(sealing.NONCE_BYTES)
    sealed = sealing.seal(sealing_key, msgspec.json.encode(letter), context=_CONTEXT, nonce=nonce)
    await outbox.add(session, SEND, {"sealed": base64.b64encode(sealed).decode()})


async def _send(context: TaskContext, _session: AsyncSession, arguments: Mapping[str, Any]) -> None:
    sealed = base64.b64decode(arguments["sealed"])
    key = sealing.sealing_key(context.settings.secrets.sealing)
    letter = msgspec.json.decode(sealing.unseal(key, sealed, context=_CONTEXT), type=Letter)
    identity = hashlib.blake2b(sealed, digest_size=_ID_BYTES).hexdigest()
    await asyncio.to_thread(deliver, context.settings, letter, identity, context.clock.now())
    log.info("mail.sent", mail=identity, smtp=bool(context.settings.mail.host))


def deliver(settings: Settings, letter: Letter, identity: str, now: datetime) -> None:
    """Hand the letter to the SMTP server, or keep it in the folder. Blocks; `identity` is the same at each try.

    Raises:
        MailError: the server did not take it.
    """
    mail = _rendered(settings.mail, letter, identity, now)
    if settings.mail.host:
        _by_smtp(settings.mail, mail, letter.to)
    else:
        _keep(settings.mail_dir, mail, identity, now)


def _rendered(settings: Mail, letter: Letter, identity: str, now: datetime) -> EmailMessage:
    name, address = parseaddr(settings.sender)
    mail = EmailMessage(_POLICY)
    mail["From"] = Address(name, addr_spec=address)
    mail["To"] = Address(addr_spec=letter.to)
    mail["Subject"] = letter.subject
    mail["Date"] = format_datetime(now)
    mail["Message-ID"] = f"<{identity}@{address.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: no absence notes, please
    mail.set_content(letter.text)
    return mail


def _by_smtp(settings: Mail, mail: EmailMessage, to: str) -> None:
    trust = ssl.create_default_context(cafile=settings.ca_file)
    try:
        with _connected(settings, trust) as server:
            if settings.security is MailSecurity.STARTTLS:
                server.starttls(context=trust)
            if settings.username:
                server.login(settings.username, settings.password.get_secret_value())
            server.send_message(mail, from_addr=parseaddr(settings.sender)[1], to_addrs=[to])
    except smtplib.SMTPResponseException as error:
        raise MailError(f"The mail server answered {error.smtp_code}.") from None
    except (smtplib.SMTPException, OSError) as error:
        raise MailError(f"The mail server did not take it ({type(error).__name__}).") from None


def _connected(settings: Mail, trust: ssl.SSLContext) -> smtplib.SMTP:
    if settings.security is MailSecurity.TLS:
        return smtplib.SMTP_SSL(settings.host, settings.port, timeout=settings.timeout_s, context=trust)
    return smtplib.SMTP(settings.host, settings.port, timeout=settings.timeout_s)


def _keep(folder: Path, mail: EmailMessage, identity: str, now: datetime) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not any(folder.glob(f"*-{identity}.eml")):
        write_private(folder / f"{now.astimezone(UTC):%Y%m%dT%H%M%S.%f}-{identity}.eml", mail.as_bytes())
    for old in _newest_first(folder)[KEPT_MAX:]:
        old.unlink(missing_ok=True)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.eml"), key=lambda path: path.name, reverse=True)


def kept(folder: Path, limit: int) -> Sequence[KeptMail]:
    """Return at most `limit` mails of the folder, newest first. Blocks."""
    found = []
    for path in _newest_first(folder)[:limit]:
        with path.open("rb") as file:
            mail = message_from_bytes(file.read(KEPT_BYTES_MAX), EmailMessage, policy=_POLICY)
        found.append(KeptMail(str(mail["Date"]), str(mail["To"]), str(mail["Subject"]), mail.get_content()))
    return found


TASKS: tuple[Task, ...] = (Job(SEND, _send, timeout_s=60),)
