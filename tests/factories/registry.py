"""Weights, hubs and desks for tests of the registry."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any
from uuid import UUID

from catalog import models
from catalog.registry import intakes, work
from catalog.registry.types import Asked, WeightFile
from core import db
from core.clock import Clock, SystemClock
from core.settings import Settings

PART = 1024
KEYS = {"pepper": "00" * 32, "signing": "11" * 32, "sealing": "22" * 32}


def settings_at(home: Path, **groups: Any) -> Settings:
    """Settings of a home; no database or Valkey is asked through them."""
    urls = {"database": {"url": "postgresql://x"}, "valkey": {"url": "unix:///x", "broker_url": "unix:///x"}}
    small = {"registry": {"part_bytes": PART, **groups.pop("registry", {})}}
    return Settings.model_validate({"home": home, "secrets": KEYS, **urls, **small, **groups})


def desk_at(settings: Settings, sessions: db.Sessions, clock: Clock | None = None, *roots: Path) -> work.Desk:
    return work.open_desk(settings, sessions, clock or SystemClock(), roots or None)


def gguf(
    *, layers: int = 2, heads: int = 4, kv_heads: int = 2, width: int = 64, context: int = 512, filling: bytes = b""
) -> bytes:
    """A GGUF file (version 3) of a Llama-like model, as the format's specification writes it; no tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def key(name: str, kind: int, value: bytes) -> bytes:
        return text(name) + struct.pack("<I", kind) + value

    numbers = {
        "llama.block_count": layers,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.embedding_length": width,
        "llama.context_length": context,
        "general.file_type": 15,
    }
    keys = [key("general.architecture", 8, text("llama")), key("general.license", 8, text("mit"))]
    keys += [key(name, 4, struct.pack("<I", value)) for name, value in numbers.items()]
    words = b"".join(text(word) for word in ("a", "b", "c"))
    keys.append(key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + words))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys) + filling


def safetensors(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """A safetensors file: name → dtype, shape, bytes of one element; the data is zeros."""
    head, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        end = at + size
        for side in shape:
            end = at + (end - at) * side
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def listed(contents: dict[str, bytes]) -> list[WeightFile]:
    return [WeightFile(path, len(content), hashlib.sha256(content).hexdigest()) for path, content in contents.items()]


async def model(sessions: db.Sessions, name: str = "tide", clock: Clock | None = None) -> UUID:
    async with db.transaction(sessions) as session:
        return await models.create_model(session, name=name, now=(clock or SystemClock()).now())


async def opened(
    desk: work.Desk, model_id: UUID, contents: dict[str, bytes], asked: Asked | None = None, number: int = 0
) -> UUID:
    """Open an upload of these files."""
    async with db.transaction(desk.sessions) as session:
        return await intakes.create_upload(
            session,
            model_id,
            listed(contents),
            asked or Asked(),
            number=number,
            limits=desk.settings.registry,
            now=desk.clock.now(),
        )


async def send(desk: work.Desk, intake_id: UUID, contents: dict[str, bytes]) -> None:
    """Send all that is missing of these files."""
    async with db.transaction(desk.sessions) as session:
        intake, files = await intakes.get(session, intake_id)
    for file in files:
        content, start = contents[file.path], file.received_bytes
        while start < len(content):
            part = content[start : start + intake.part_bytes]
            await intakes.receive(
                desk.sessions,
                desk.objects,
                intake_id,
                file.no,
                start=start,
                content=part,
                sha256="",
                now=desk.clock.now(),
            )
            start += len(part)


async def finish(desk: work.Desk, intake_id: UUID, mover: work.Mover | None = None) -> str:
    """Complete an upload and do the worker's work; returns the state it ends in."""
    async with db.transaction(desk.sessions) as session:
        await intakes.complete(session, intake_id, now=desk.clock.now())
    return await worked(desk, intake_id, mover)


async def worked(desk: work.Desk, intake_id: UUID, mover: work.Mover | None = None) -> str:
    mover = mover or work.Mover()
    while await work.work(mover, desk, intake_id):
        pass
    async with db.transaction(desk.sessions) as session:
        intake, _ = await intakes.get(session, intake_id)
    return intake.state.value


async def uploaded(desk: work.Desk, model_id: UUID, contents: dict[str, bytes], asked: Asked | None = None) -> UUID:
    """Upload these files and return the version that they became."""
    intake_id = await opened(desk, model_id, contents, asked)
    await send(desk, intake_id, contents)
    assert await finish(desk, intake_id) == "done"
    async with db.transaction(desk.sessions) as session:
        intake, _ = await intakes.get(session, intake_id)
    assert intake.version_id is not None
    return intake.version_id
