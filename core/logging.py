"""Logs: structlog, one JSON line per event, and a guard that lets no secret through.

An event reads ``noun.verb_past`` with values as fields; `bind_contextvars` adds fields to all that follows in this
task. The standard library's loggers (uvicorn, Celery, SQLAlchemy …) leave by the same door.
"""

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog
from structlog.contextvars import bind_contextvars, bound_contextvars, clear_contextvars
from structlog.typing import Processor

from core.settings import Log

__all__ = ["bind_contextvars", "bound_contextvars", "clear_contextvars", "configure", "get_logger", "redact"]

HIDDEN = "***"
DEPTH_MAX = 6
# Texts under these names never leave, whatever they look like: secrets, and what tenants' users say and hear.
_HIDDEN_NAMES = re.compile(
    r"(^|_)(authorization|cookie|credential|password|passwd|pepper|secret|api_key|token|signing|sealing"
    r"|prompt|messages|completion|content|input|body)$",
    re.IGNORECASE,
)
_PATTERNS = (
    (re.compile(r"\b(tgo?_)[0-9A-Za-z]{6,}"), r"\1" + HIDDEN),  # API keys and operator tokens of ours
    (re.compile(r"\b(sk-|gsk_|hf_)[0-9A-Za-z_-]{8,}"), r"\1" + HIDDEN),  # keys of upstream services
    (re.compile(r"(?i)\b(bearer|basic)\s+[0-9a-z._~+/=-]{6,}"), r"\1 " + HIDDEN),
    (re.compile(r"(\w://[^/\s:@]*):[^/\s@]+@"), r"\1:" + HIDDEN + "@"),  # passwords in URLs
    (re.compile(r"(?i)\b(password=)\S+"), r"\1" + HIDDEN),  # passwords in Postgres' own notation
)


def redact(text: str) -> str:
    """Return `text` without anything that looks like a secret."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, int | float | bool | None):
        return value
    if depth >= DEPTH_MAX:
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(name): _clean_field(str(name), item, depth) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(item, depth + 1) for item in value]
    return redact(str(value))


def _clean_field(name: str, value: Any, depth: int) -> Any:
    hidden = _HIDDEN_NAMES.search(name) is not None and not isinstance(value, int | float | bool | None)
    return HIDDEN if hidden else _clean(value, depth + 1)


def guard(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """The last processor before rendering: hide secrets by name and by look, at every depth."""
    cleaned: dict[str, Any] = _clean(event, 0)
    return cleaned


def configure(log: Log, process: str, *, stream: TextIO | None = None) -> None:
    """Send every log of this process to `stream` (standard error) as lines. Calling again replaces the former.

    Args:
        log: level and shape.
        process: ``gateway``, ``api``, ``worker`` …, on every line.
        stream: where to.
    """

    def name_process(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        event["process"] = process
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_process,
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer() if log.json_lines else structlog.dev.ConsoleRenderer(colors=False)
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                guard,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(log.level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "celery", "kombu", "amqp"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
    for name in ("uvicorn.access", "celery.app.trace", "celery.worker.strategy", "kombu"):
        logging.getLogger(name).setLevel(logging.WARNING)  # a line per request or task is ours to write
    logging.getLogger("celery.beat").setLevel(logging.CRITICAL)  # a broker away: the consumer says so, once per try
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module; what it writes goes where `configure` says at that time."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
