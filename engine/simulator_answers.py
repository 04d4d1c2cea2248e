"""The bodies and events that the engine simulator writes."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from aiohttp import web

from engine import simulation
from engine.simulation import Generation

EMBEDDING_SIZE = 8
# Fields whose arrival tests want to see; none of them holds text of a caller.
LOGGED_FIELDS = (
    "model",
    "priority",
    "cache_salt",
    "max_tokens",
    "max_completion_tokens",
    "stream_options",
    "n",
    "seed",
)


class Answer:
    """One request while it is answered; `generated` counts tokens over all choices."""

    def __init__(self, generation: Generation, *, endpoint: str, stream: bool, request_id: str) -> None:
        self.generation = generation
        self.endpoint = endpoint
        self.stream = stream
        self.request_id = request_id
        self.model = ""
        self.dialect = "openai"
        self.sequence = 0
        self.include_usage = True
        self.logprobs = False
        self.fields: dict[str, Any] = {}
        self.generated = 0
        self.recorded = False

    @classmethod
    def of(
        cls, request: web.Request, body: Mapping[str, Any], generation: Generation, sequence: int, dialect: str
    ) -> Self:
        answer = cls(
            generation,
            endpoint=request.path.removeprefix("/v1/").partition("/")[0],
            stream=bool(body.get("stream")),
            request_id=request.headers.get("x-request-id", ""),
        )
        answer.model = str(body.get("model", ""))
        answer.dialect = dialect
        answer.sequence = sequence
        answer.include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        answer.logprobs = bool(body.get("logprobs"))
        answer.fields = {name: body[name] for name in LOGGED_FIELDS if name in body}
        return answer

    @property
    def chat(self) -> bool:
        return self.endpoint == "chat"

    def head(self, kind: str) -> dict[str, Any]:
        """The members that every body and chunk of this answer has."""
        prefix = "chatcmpl" if self.chat else "cmpl"
        identity = simulation.upstream_id(self.generation, prefix, self.sequence)
        return {"id": identity, "object": kind, "created": 0, "model": self.model}

    def usage(self) -> dict[str, Any]:
        """The members that report usage after what has been generated so far."""
        found: dict[str, Any] = {"usage": simulation.usage_object(self.generation, self.dialect, self.generated)}
        if self.dialect == "llama.cpp":
            found["timings"] = simulation.timings_object(self.generation, self.generated)
        return found


def completion_body(answer: Answer) -> dict[str, Any]:
    """The whole answer of a call that does not stream."""
    reasoning, text = simulation.answer_text(answer.generation)
    finish = answer.generation.finish_reason
    choices: list[dict[str, Any]] = []
    for index in range(answer.generation.choices):
        if answer.chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if reasoning:
                message["reasoning_content"] = reasoning
            choices.append({"index": index, "message": message, "finish_reason": finish})
        else:
            choices.append({"index": index, "text": text, "finish_reason": finish})
        choices[-1]["logprobs"] = logprobs(text) if answer.logprobs else None
    body = answer.head("chat.completion" if answer.chat else "text_completion") | {"choices": choices}
    return body if answer.generation.plan.usage == "missing" else body | answer.usage()


def logprobs(text: str) -> dict[str, Any]:
    return {"content": [{"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}]}


def embedding_body(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": [(index + 1) / (place + 2) for place in range(EMBEDDING_SIZE)],
        }
        for index, _ in enumerate(simulation.prompt_texts(body))
    ]
    tokens = answer.generation.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": answer.model, "data": data, "usage": usage}


def stream_events(answer: Answer) -> Iterator[tuple[bytes, int]]:
    """Yield each SSE event with the number of tokens it carries; the caller adds them up before the next one."""
    generation, plan = answer.generation, answer.generation.plan
    head = answer.head("chat.completion.chunk" if answer.chat else "text_completion")

    def encode(choices: list[dict[str, Any]], members: Mapping[str, Any]) -> bytes:
        return simulation.encode_event({**head, "choices": choices, **members}, plan)

    if answer.chat:
        for index in range(generation.choices):
            yield encode([choice(answer, index, {"role": "assistant", "content": ""})], usage_members(answer)), 0
    for place in range(generation.tokens):
        for index in range(generation.choices):
            last = place == generation.tokens - 1 and index == generation.choices - 1
            members = usage_members(answer, "middle" if last else "", coming=1)
            yield encode([choice(answer, index, delta(answer, place))], members), 1
    for index in range(generation.choices):
        members = usage_members(answer, "choice" if index == generation.choices - 1 else "")
        yield encode([choice(answer, index, {}, generation.finish_reason)], members), 0
    if plan.usage not in {"choice", "middle", "missing"} and (answer.include_usage or plan.usage in {"every", "null"}):
        yield encode([], answer.usage()), 0
    if plan.done:
        yield b"data: [DONE]" + (b"\r\n\r\n" if plan.crlf else b"\n\n"), 0


def usage_members(answer: Answer, here: str = "", coming: int = 0) -> dict[str, Any]:
    """What a chunk with choices says of usage: nothing, ``null``, or a report that counts the tokens it comes with."""
    wanted = answer.generation.plan.usage
    if wanted == "null":
        return {"usage": None}
    if wanted not in {"every", here}:
        return {}
    answer.generated += coming
    found = answer.usage()
    answer.generated -= coming
    return found


def delta(answer: Answer, place: int) -> dict[str, str]:
    text = simulation.token_text(place)
    return {"reasoning_content" if place < answer.generation.reasoning_tokens else "content": text}


def choice(answer: Answer, index: int, content: Mapping[str, str], finish: str | None = None) -> dict[str, Any]:
    """One entry of `choices`, for chat or text."""
    found: dict[str, Any] = {"index": index, "finish_reason": finish}
    if answer.chat:
        found["delta"] = content
    else:
        found["text"] = "".join(content.values())
    text = "".join(value for name, value in content.items() if name != "role")
    found["logprobs"] = logprobs(text) if answer.logprobs and text else None
    return found
