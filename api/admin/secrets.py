"""Operators: how far a rotation of the installation's pepper has come. No secret is shown."""

from fastapi import APIRouter
from pydantic import Field

from api.deps import CurrentServices, ReadSession
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import Count, Output
from tenants import key_secrets

router = APIRouter(route_class=GuardedRoute, tags=["secrets"])


class PepperOut(Output):
    """One pepper by its name, which is made of it and does not give it away."""

    name: str = Field(description="12 hex digits; empty for secrets stored before peppers had names.")
    current: bool = Field(description="New secrets are stored under it.")
    configured: bool = Field(description="This process believes secrets that are stored under it.")
    api_key_secrets: Count = Field(description="Living secrets that no newer pepper knows yet.")
    operator_tokens: Count = Field(description="Living tokens that no newer pepper knows yet.")


class PeppersOut(Output):
    """The current one first. A previous pepper may go when nothing living is left under it alone."""

    peppers: list[PepperOut]


@router.get(f"{ADMIN}/secrets", summary="Read how many secrets each pepper still carries")
async def get_secrets(session: ReadSession, services: CurrentServices) -> PeppersOut:
    """A secret is stored under the current pepper when it is used next; what is never used stays where it is."""
    return PeppersOut(
        peppers=[
            PepperOut(
                name=use.name,
                current=use.current,
                configured=use.configured,
                api_key_secrets=use.api_keys,
                operator_tokens=use.operator_tokens,
            )
            for use in await key_secrets.pepper_use(session, services.peppers)
        ]
    )
