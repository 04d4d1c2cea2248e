"""Roles in words, for whoever gives them."""

from fastapi import APIRouter

from api.guard import GuardedRoute
from api.schemas import Output
from tenants import roles
from tenants.types import Role

router = APIRouter(route_class=GuardedRoute, tags=["your organisation"])


class PermissionOut(Output):
    """`name` for programs, `words` for people: "may …"."""

    name: str
    words: str


class RoleOut(Output):
    """A role, what it may do, and the scopes that API keys of somebody with it may have."""

    role: str
    permissions: list[PermissionOut]
    key_scopes: list[str]


class RolesOut(Output):
    """Of members; those of operators are the platform's own."""

    roles: list[RoleOut]


@router.get("/api/v1/roles", summary="What each role may do")
async def get_roles() -> RolesOut:
    return RolesOut(
        roles=[
            RoleOut(
                role=role.value,
                permissions=[
                    PermissionOut(name=permission.value, words=roles.WORDS[permission])
                    for permission in roles.Permission
                    if permission in roles.PERMISSIONS[role]
                ],
                key_scopes=sorted(roles.SCOPES[role]),
            )
            for role in Role
        ]
    )
