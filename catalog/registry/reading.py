"""What the stored files of a version say of themselves: heads and small files are read, never the weights."""

from collections.abc import Sequence

import msgspec
from obstore.store import ObjectStore

from catalog.registry import gguf, safetensors, store
from catalog.registry.types import Facts, WeightFile

SHARDS_READ_MAX = 500


async def read_facts(objects: ObjectStore, folder: str, files: Sequence[WeightFile]) -> Facts:
    """Return the facts of a version whose files lie in `folder`; empty when it is of no format we know.

    Raises:
        PlatformError: kind invalid, a file is broken or says what cannot be.
    """
    main = safetensors.main_file([file.path for file in files])
    if main:
        return gguf.read_facts(await store.read_start(objects, f"{folder}/{main}", gguf.HEAD_MAX_BYTES))
    return await _read_safetensors(objects, folder, files)


async def _read_safetensors(objects: ObjectStore, folder: str, files: Sequence[WeightFile]) -> Facts:
    sizes = {file.path: file.size_bytes for file in files}
    facts = Facts()
    if "config.json" in sizes:
        facts = safetensors.read_config(await _small(objects, folder, "config.json"))
    shards = [path for path in sorted(sizes) if path.endswith(".safetensors")]
    parameters, dtype = 0, ""
    for path in shards[:SHARDS_READ_MAX]:
        first = await store.read_start(objects, f"{folder}/{path}", 8)
        length = safetensors.head_size(first, sizes[path])
        head = await store.read_range(objects, f"{folder}/{path}", 8, length)
        count, dtype = safetensors.count_parameters(head, sizes[path])
        parameters += count
    tokenizer, template = "", False
    if "tokenizer_config.json" in sizes:
        tokenizer, template = safetensors.tokenizer_of(await _small(objects, folder, "tokenizer_config.json"))
    return msgspec.structs.replace(
        facts,
        format="safetensors" if shards else facts.format,
        parameters=parameters,
        quantisation=facts.quantisation or dtype.lower(),
        tokenizer=tokenizer,
        chat_template=template or "chat_template.jinja" in sizes,
    )


async def _small(objects: ObjectStore, folder: str, path: str) -> bytes:
    return await store.read_start(objects, f"{folder}/{path}", safetensors.CONFIG_MAX_BYTES + 1)
