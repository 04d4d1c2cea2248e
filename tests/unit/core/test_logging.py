"""No secret leaves by the logs."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from core import logging as logs
from core.settings import Log

KEY = "tg_" + "aB3" * 15 + "z"
TOKEN = "tgo_" + "Zz9" * 15 + "q"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Logs of this test; the logging of the process is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    logs.configure(Log(), "test", stream=stream)
    yield stream
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def _only(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()
    event: dict[str, Any] = json.loads(line)
    return event


def test_an_event_is_one_json_line_with_context(lines: io.StringIO) -> None:
    with logs.bound_contextvars(request_id="req_1"):
        logs.get_logger("api.x").info("hold.settled", amount_pico=12)
    event = _only(lines)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "hold.settled",
        "amount_pico": 12,
        "request_id": "req_1",
        "level": "info",
        "logger": "api.x",
        "process": "test",
    }


def test_secrets_are_masked_by_look_at_every_depth(lines: io.StringIO) -> None:
    logs.get_logger("x").warning(
        f"saw {KEY}",
        url="redis://user:hunter2@host:1/0",
        dsn="host=x password=hunter2 user=y",
        nested={"list": [f"Bearer {TOKEN}", ("sk-abcdefgh12345678",)]},
    )
    text = lines.getvalue()
    for secret in (KEY[3:], TOKEN[4:], "hunter2", "abcdefgh12345678"):
        assert secret not in text
    event = _only(lines)
    assert event["event"] == "saw tg_***"
    assert event["url"] == "redis://user:***@host:1/0"


def test_texts_are_hidden_by_name_and_counts_are_not(lines: io.StringIO) -> None:
    logs.get_logger("x").info(
        "x",
        api_key="plain",
        prompt="hello",
        tokens_input=7,
        headers={"Authorization": "abc", "cookie": "d"},
        content=None,
    )
    event = _only(lines)
    assert (event["api_key"], event["prompt"], event["tokens_input"], event["content"]) == ("***", "***", 7, None)
    assert event["headers"] == {"Authorization": "***", "cookie": "***"}


def test_exceptions_and_other_loggers_pass_the_same_guard(lines: io.StringIO) -> None:
    try:
        raise ValueError(f"cannot use {KEY} at postgresql://app:hunter2@db/x")  # noqa: TRY301 - a traceback is wanted
    except ValueError:
        logging.getLogger("uvicorn.error").exception("failed with %s", TOKEN)
    event = _only(lines)
    assert event["event"] == "failed with tgo_***"
    assert "ValueError: cannot use tg_*** at postgresql://app:***@db/x" in event["exception"]
    assert (event["logger"], event["level"]) == ("uvicorn.error", "error")


def test_levels_and_depth_are_bounded(lines: io.StringIO) -> None:
    deep: dict[str, Any] = {}
    deep["self"] = deep
    logs.get_logger("x").debug("not said")
    logs.get_logger("x").info("said", deep=deep)
    assert _only(lines)["event"] == "said"


def test_configuring_again_replaces(lines: io.StringIO) -> None:
    other = io.StringIO()
    logs.configure(Log(json_lines=False), "second", stream=other)
    logs.get_logger("x").info("moved", key=KEY)
    assert lines.getvalue() == ""
    assert "moved" in other.getvalue()
    assert KEY not in other.getvalue()
