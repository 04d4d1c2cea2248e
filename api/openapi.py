"""The description of the control API: FastAPI's, completed from the table of permissions."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api import idempotency
from api.guard import COOKIE, CSRF_HEADER, SAFE_METHODS
from api.permissions import CallerKind, rule_of
from api.schemas import Problem, problem_response
from core.idempotency import HEADER

SECURITY_SCHEMES: Mapping[str, Any] = {
    "apiKey": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "tg_…",
        "description": "A tenant's API key.",
    },
    "operatorToken": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "tgo_…",
        "description": "An operator's token.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE,
        "description": "The session of somebody who signed in; changes need the X-CSRF-Token too.",
    },
    "csrfToken": {
        "type": "apiKey",
        "in": "header",
        "name": CSRF_HEADER,
        "description": "What signing in answers, and GET /api/v1/session shows; with the cookie, for changes.",
    },
}
_SCHEMES_OF = {
    CallerKind.KEY: ("apiKey",),
    CallerKind.PERSON: ("session",),
    CallerKind.MEMBER: ("session", "apiKey"),
    CallerKind.OPERATOR: ("operatorToken", "session"),
}


def _complete(method: str, path: str, operation: dict[str, Any]) -> None:
    """Add what the door and the frame answer on every such route."""
    rule = rule_of(method, path)
    statuses = []
    if rule.caller is CallerKind.PUBLIC:
        operation["security"] = []
    else:
        scopes = [rule.scope.value] if rule.scope else []
        operation["security"] = [_with_csrf(method, {scheme: scopes}) for scheme in _SCHEMES_OF[rule.caller]]
        statuses += [401, 403, 503]
    if idempotency.takes_key(path, rule):
        _take_key(operation)
        statuses.append(409)
    if "{" in path:
        statuses.append(404)
    if "requestBody" in operation:
        statuses += [400, 413]
    responses = operation["responses"]
    if "422" in responses:
        responses["422"] = problem_response(422)
        statuses.append(400)
    for status in statuses:
        responses.setdefault(str(status), problem_response(status))


def _take_key(operation: dict[str, Any]) -> None:
    """Describe the header, unless the route does because it must have one."""
    parameters = operation.setdefault("parameters", [])
    if not any(known["name"] == HEADER for known in parameters):
        parameters.append(idempotency.parameter())


def _with_csrf(method: str, choice: dict[str, list[str]]) -> dict[str, list[str]]:
    """A session changes things only together with its token."""
    return {**choice, "csrfToken": []} if "session" in choice and method not in SAFE_METHODS else choice


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes
        )
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                _complete(method.upper(), path, operation)
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        components["securitySchemes"] = dict(SECURITY_SCHEMES)
        app.openapi_schema = document
    return app.openapi_schema
