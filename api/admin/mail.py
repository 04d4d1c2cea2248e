"""Operators: mails that stay here, because no SMTP server is set. They hold links that let people in."""

import asyncio
from collections.abc import Sequence
from html import escape

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from api.deps import CurrentCaller, CurrentServices, ReadSession
from api.guard import GuardedRoute
from api.permissions import ADMIN
from core import mail
from core.errors import ErrorKind, PlatformError
from core.mail import KeptMail
from tenants import operators, vouching

router = APIRouter(route_class=GuardedRoute, tags=["operators"])

SHOWN_MAX = 100
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Mail</title>
<style>body{{font:16px/1.5 sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem}}
article{{border-top:1px solid #888}}pre{{white-space:pre-wrap;overflow-wrap:anywhere}}</style></head>
<body><main><h1>Mail</h1><p>No mail server is set, so mails stay here, newest first.</p>
{mails}</main></body></html>
"""


NOT_YOURS = "It is for this operator alone. Who has no mail server finds it on the host, in the home's folder `mail`."


def _article(kept: KeptMail, hidden: frozenset[str]) -> str:
    if kept.to.lower() in hidden:
        return f"<article><h2>A mail to {escape(kept.to)}</h2><p>{NOT_YOURS}</p></article>\n"
    head = f"<p>To {escape(kept.to)}<br>{escape(kept.written_at)}</p>"
    return f"<article><h2>{escape(kept.subject)}</h2>{head}<pre>{escape(kept.text)}</pre></article>\n"


def page_of(found: Sequence[KeptMail], hidden: frozenset[str] = frozenset()) -> str:
    """Return the page: no script, no link, nothing from elsewhere; what a mail says is text. `hidden`: addresses."""
    mails = "".join(_article(kept, hidden) for kept in found) or "<p>There are none.</p>\n"
    return _PAGE.format(mails=mails)


@router.get(f"{ADMIN}/mail", summary="Look at mails that no server is set for", response_class=HTMLResponse)
async def show_mail(services: CurrentServices, caller: CurrentCaller, session: ReadSession) -> HTMLResponse:
    """Return a page with the newest mails, while no SMTP server is set; 404 when one is.

    Who could read another operator's mails could become them: of these it shows that they are there.
    """
    if services.settings.mail.host:
        raise PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, "Mails go out by SMTP; none stay here.")
    found = await asyncio.to_thread(mail.kept, services.settings.mail_dir, SHOWN_MAX)
    reader = None if caller.operator is None else vouching.who(caller.operator, caller.signed_in)
    hidden = await operators.addresses_of_others(session, {kept.to.lower() for kept in found}, reader)
    return HTMLResponse(page_of(found, hidden), headers=HEADERS)
