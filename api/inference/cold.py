"""The ASGI app of all paths that are not inference: models, health, metrics, CORS, and the way to the control plane."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any

import msgspec

from api.inference import access, errors
from api.inference.bridge import Message
from api.inference.control_proxy import ControlProxy, refuse
from api.inference.directory import may_use
from api.inference.gateway import Gateway
from api.inference.jwt_bearer import PROJECT, looks_signed
from api.inference.readiness import Report
from api.inference.wire import bearer_of
from billing.types import PriceSchedule, PriceStep
from catalog.types import DeploymentKind, ServedModel
from core.errors import PlatformError
from core.ids import IdKind, format_id
from core.money import format_pico
from core.tiers import Tier
from knative.types import ReplicaState
from tenants.api_keys import digest
from tenants.types import Principal

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, bytes, Headers]
JSON = (b"content-type", b"application/json")
TOKENS_PRICED = 1_000_000
CONTROL_UNDER_V1 = "/v1/generations/"


class ColdApp:
    """Dispatch by path; what is unknown here belongs to the control plane, of ``/v1`` the receipts alone."""

    def __init__(self, gateway: Gateway, proxy: ControlProxy, readiness: Callable[[], Report]) -> None:
        self._gateway = gateway
        self._proxy = proxy
        self._readiness = readiness

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        method: str = scope["method"]
        headers = dict(scope["headers"])
        origins = self._gateway.settings.cors_origins
        if method == "OPTIONS" and origins and b"access-control-request-method" in headers:
            await _send(send, 204, b"", _preflight(headers, origins))
            return
        if method in {"GET", "HEAD"}:
            answer = await self._own(path, headers, scope)
            if answer is not None:
                status, body, lines = answer
                request_id = format_id(IdKind.GENERATION, self._gateway.new_id()).encode()
                await _send(send, status, body, [*lines, (b"x-request-id", request_id), *_cors(headers, origins)])
                return
        with_cors = _with_headers(send, _cors(headers, origins))
        if path.startswith("/v1/") and not path.startswith(CONTROL_UNDER_V1):
            await refuse(with_cors, errors.not_found(path))  # in a shape that an OpenAI client reads
            return
        await self._proxy.forward(scope, receive, with_cors)

    async def _own(self, path: str, headers: dict[bytes, bytes], scope: dict[str, Any]) -> Answer | None:
        if path in {"/health", "/healthz"}:
            return 200, b'{"status":"ok"}', [JSON]
        if path == "/ready":
            report = self._readiness()
            shown = report if self._may_look(headers) else {"serving": report.serving}
            return (200 if report.serving else 503), msgspec.json.encode(shown), [JSON]
        if path == "/metrics":
            if not self._may_look(headers):
                error = access.missing_metrics_token()
                return errors.status_of(error), errors.body_of(error), [JSON]
            return 200, self._metrics().encode(), [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        if path == "/v1/models" or path.startswith("/v1/models/"):
            return await self._models(path, headers, scope)
        return None

    def _may_look(self, headers: dict[bytes, bytes]) -> bool:
        """Whether it is asked with the metrics token: the door is open to strangers, our figures are not."""
        token = self._gateway.settings.metrics_token
        sent = bearer_of(headers.get(b"authorization", b""))
        return token is not None and compare_digest(sent, token.get_secret_value().encode())

    def _metrics(self) -> str:
        gateway = self._gateway
        return gateway.metrics.text(
            {
                "connections": len(gateway.connections),
                "streams": len(gateway.relays),
                "config_revision": gateway.directory.revision,
                "config_age_seconds": gateway.clock.monotonic() - gateway.directory.fresh_at,
                "config_delay_max_seconds": gateway.metrics.config_delay_max_s,
                "principals": len(gateway.directory.principals),
                "spool_full": int(gateway.spool.refuses(Tier.PRIORITY)),
                "spool_unposted_bytes": getattr(gateway.spool, "bytes_unposted", 0),
                "spool_max_bytes": gateway.settings.spool_max_bytes,
            },
            {"spool_refuses": ("tier", {tier.label: int(gateway.spool.refuses(tier)) for tier in Tier})},
            gateway.admission_metrics.lines(gateway.admission),
        )

    async def _models(self, path: str, headers: dict[bytes, bytes], scope: dict[str, Any]) -> Answer:
        gateway = self._gateway
        lines = [JSON]
        try:
            principal = await self._caller(headers, scope)
            lines += _split(gateway.seen_limits.headers(principal, gateway.clock.monotonic()))
            return 200, self._listed(path, principal), lines
        except PlatformError as error:
            retry_after = errors.retry_after_of(error)
            if retry_after:
                lines.append((b"retry-after", str(retry_after).encode()))
            return errors.status_of(error), errors.body_of(error), lines

    async def _caller(self, headers: dict[bytes, bytes], scope: dict[str, Any]) -> Principal:
        gateway = self._gateway
        key = bearer_of(headers.get(b"authorization", b"")).decode("latin-1")
        if not key:
            raise access.missing_key(key)
        found = digest(gateway.pepper, key)
        if gateway.directory.loaded and found not in gateway.directory.principals:
            if gateway.bearers is not None and looks_signed(key):
                found = await gateway.bearers.find(key, headers.get(PROJECT, b""))
            else:
                found = access.older_digest(gateway, key, found) or await access.new_digest(gateway, key)
        return access.authenticate(gateway.directory, found, gateway.clock.now_us(), scope["client"][0])

    def _listed(self, path: str, principal: Principal) -> bytes:
        gateway = self._gateway
        name = path.removeprefix("/v1/models").removeprefix("/")
        if name:
            return msgspec.json.encode(self._entry(principal, access.find_model(gateway.directory, principal, name)))
        entries = [self._entry(principal, model) for model in gateway.directory.usable(principal)]
        return msgspec.json.encode({"object": "list", "data": entries})

    def _entry(self, principal: Principal, model: ServedModel) -> dict[str, Any]:
        gateway = self._gateway
        state, eta_s = "ready", 0
        if model.kind is not DeploymentKind.EXTERNAL:
            current = gateway.states.current(model.deployment_id)
            state = current.state.value if current is not None else ReplicaState.ABSENT.value
            eta_s = current.eta_s if current is not None else 0
        prices = gateway.directory.prices
        tiers = {}
        for tier in Tier:
            if prices is None or tier > principal.tier_max:
                continue
            schedule = prices.schedule(
                model.model_id,
                tier,
                principal.currency,
                principal.tenant_id,
                gateway.clock.now_us(),
                plan_book=principal.price_book_id,
            )
            if schedule is not None:
                tiers[tier.label] = _prices(schedule)
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_at_s,
            "owned_by": model.owned_by,
            "context_max": model.context_max,
            "default_max_tokens": model.default_max_tokens,
            "endpoints": sorted(model.endpoints),
            "fallback": self._fallback(principal, model),
            "state": state,
            "cold_start_estimate_s": eta_s,
            **_deprecation(model, gateway.clock.now_us()),
            "price_per_million_tokens": {"currency": principal.currency.value, "tiers": tiers},
        }

    def _fallback(self, principal: Principal, model: ServedModel) -> str | None:
        """The model that serves instead, to callers that allow it; None when there is none that the key may use."""
        name = model.fallback_model
        known = name in self._gateway.directory.models and name != model.name
        return name if known and may_use(principal, name) else None


def _deprecation(model: ServedModel, now_us: int) -> dict[str, Any]:
    """What is announced of its end; `deprecated` once the day has come. It is served before and after."""
    if not model.deprecated_at_s:
        return {}
    at = datetime.fromtimestamp(model.deprecated_at_s, UTC).isoformat()
    passed = model.deprecated_at_s * 1_000_000 <= now_us
    return {"deprecated_at": at, "deprecated": passed, "deprecation_note": model.deprecation_note}


def _prices(schedule: PriceSchedule) -> dict[str, Any]:
    """Per million tokens, but for what is named per request; `steps` price a whole request by its input tokens."""
    return {
        **_per_million(schedule),
        "per_request": format_pico(schedule.request),
        "minimum_per_request": format_pico(schedule.minimum),
        "steps": [{"above_input_tokens": step.above, **_per_million(step)} for step in schedule.steps],
    }


def _per_million(unit: PriceSchedule | PriceStep) -> dict[str, str]:
    return {
        "input": format_pico(unit.input * TOKENS_PRICED),
        "cached_input": format_pico(unit.cached_input * TOKENS_PRICED),
        "cache_write": format_pico(unit.cache_write * TOKENS_PRICED),
        "output": format_pico(unit.output * TOKENS_PRICED),
        "reasoning": format_pico(unit.reasoning * TOKENS_PRICED),
    }


def _split(lines: bytes) -> Headers:
    """Header lines as ASGI has them."""
    pairs = (line.partition(b": ") for line in lines.splitlines())
    return [(name.lower(), value) for name, _, value in pairs]


def _with_headers(send: Send, added: Headers) -> Send:
    async def sent(message: Message) -> None:
        if added and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sent


def _cors(headers: dict[bytes, bytes], origins: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
    origin = headers.get(b"origin", b"")
    if not origin or ("*" not in origins and origin.decode("latin-1") not in origins):
        return []
    return [(b"access-control-allow-origin", origin), (b"vary", b"Origin"), (b"access-control-expose-headers", b"*")]


def _preflight(headers: dict[bytes, bytes], origins: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
    allowed = _cors(headers, origins)
    if not allowed:
        return []
    return [
        *allowed,
        (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE"),
        (
            b"access-control-allow-headers",
            headers.get(b"access-control-request-headers", b"authorization, content-type"),
        ),
        (b"access-control-max-age", b"600"),
    ]


async def _send(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = [] if status == 204 else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})
