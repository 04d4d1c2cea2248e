"""Which conversation a request belongs to, so that a rollout serves all of it by one version. Pure.

By the caller's own word: `prompt_cache_key`, else `safety_identifier`, else `user`. Else by how it begins: the messages
up to the first one of the user, which every later request of a chat repeats; of a completion the first bytes of its
prompt. Embeddings are told apart by nothing: vectors of two versions do not belong in one index, so that all of a
tenant's come from one version.
"""

from typing import Any

import msgspec

from api.inference.request import Call

MESSAGES_MAX = 8
BYTES_MAX = 4096
PROMPT_BYTES = 256


class _Message(msgspec.Struct):
    role: Any = None
    content: msgspec.Raw = msgspec.Raw(b"")


class _Chat(msgspec.Struct):
    messages: list[_Message]


class _Completion(msgspec.Struct):
    prompt: msgspec.Raw


_chat = msgspec.json.Decoder(_Chat).decode
_completion = msgspec.json.Decoder(_Completion).decode


def conversation_of(call: Call) -> bytes:
    """Return what is the same for all requests of a conversation; of different ones it is hardly ever the same."""
    if call.conversation:
        return b"named " + call.conversation.encode("utf-8", "surrogatepass")
    try:
        if call.endpoint == "chat":
            return b"begun " + _beginning(call.body)
        if call.endpoint == "completions":
            return b"begun " + bytes(_completion(call.body).prompt)[:PROMPT_BYTES]
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass  # the engine will refuse it
    return b""


def _beginning(body: bytes) -> bytes:
    parts: list[bytes] = []
    for message in _chat(body).messages[:MESSAGES_MAX]:
        parts.append(bytes(message.content))
        if message.role == "user":
            break
    return b"\n".join(parts)[:BYTES_MAX]
