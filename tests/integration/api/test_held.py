"""What a caller meets whose model sleeps: held within its patience, hearing that it is, charged for nothing."""

import asyncio

import httpx
import pytest

from knative.types import ReplicaState
from tests.factories.stack import Stack, chat
from tests.waiting import until

COMMENT = b": tidegate "


@pytest.fixture
def quick(stack: Stack) -> Stack:
    """A caller of a stream hears something every 20 ms."""
    stack.rig.gateway.settings = stack.rig.gateway.settings.model_copy(update={"heartbeat_s": 0.02})
    return stack


async def read_until(response: httpx.Response, words: bytes) -> bytes:
    found = b""
    async for piece in response.aiter_raw():
        found += piece
        if words in found:
            return found
    return found


async def test_a_stream_hears_comments_while_it_is_held_and_then_its_answer(quick: Stack) -> None:
    model = quick.rig.sleeping("local")
    body = chat("[[sim n=2]]", model="local", stream=True)
    async with quick.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        pieces = response.aiter_raw()
        said = await anext(pieces)
        assert said.startswith(COMMENT)
        assert said.endswith(b"\n\n")
        assert b"data:" not in said
        quick.rig.wake(model, quick.rig.models["sim"].base_url)
        rest = b"".join([piece async for piece in pieces])
    assert rest.count(b"data: {") >= 2
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"HTTP/1.1" not in rest  # one head
    assert len(quick.rig.spool.events) == 1


async def test_a_stream_that_heard_comments_ends_with_an_error_event_when_patience_ends(quick: Stack) -> None:
    quick.rig.sleeping("local")
    body = chat("x", model="local", stream=True) | {"max_wait": 0.15}
    answer = await quick.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    *comments, last = answer.text.rstrip("\n").split("\n\n")
    assert comments
    assert all(comment.startswith(": tidegate loading") for comment in comments)
    assert last.startswith('data: {"error":{')
    assert '"code":"MODEL_LOADING"' in last
    assert not quick.rig.spool.events
    assert list(quick.rig.admission.charges.values()) == [None]  # the whole hold is given back


@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_first_comment_and_without_a_stream_it_is_a_plain_refusal(stack: Stack, stream: bool) -> None:
    stack.rig.sleeping("local")
    body = chat("x", model="local", stream=stream) | {"max_wait": 0.05}
    answer = await stack.client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "MODEL_LOADING")
    assert int(answer.headers["retry-after"]) == answer.json()["error"]["details"]["estimate_s"] >= 1


async def test_a_whole_answer_waits_in_silence(quick: Stack) -> None:
    model = quick.rig.sleeping("local")
    call = asyncio.create_task(quick.chat("x", model="local"))
    await until(lambda: quick.rig.gateway.held.here == 1)
    quick.rig.wake(model, quick.rig.models["sim"].base_url)
    assert (await call).status_code == 200


async def test_who_leaves_frees_its_place_and_wakes_nobody_twice(quick: Stack) -> None:
    quick.rig.sleeping("local", waiting_max=1)
    body = chat("x", model="local", stream=True)
    async with quick.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert COMMENT in await read_until(response, b"\n\n")
        refused = await quick.chat("x", model="local")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "MODEL_LOADING")
    await until(lambda: quick.rig.gateway.held.here == 0)
    assert not quick.rig.admission.held
    assert not quick.rig.spool.events


async def test_where_nobody_may_wait_the_model_is_woken_all_the_same(stack: Stack) -> None:
    model = stack.rig.sleeping("local", waiting_max=0)
    answer = await stack.chat("x", model="local")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "MODEL_LOADING")
    assert stack.rig.states.wakes == [model.deployment_id]


async def test_the_shorter_of_header_and_member_is_the_patience(stack: Stack) -> None:
    stack.rig.sleeping("local")
    for member, header in ((0.05, "20"), (20, "0.05")):
        body = chat("x", model="local") | {"max_wait": member}
        answer = await stack.client.post("/v1/chat/completions", json=body, headers={"X-Tidegate-Max-Wait": header})
        assert answer.status_code == 503
    for bad in ("soon", -1, True, [3], 1e9):
        refused = await stack.client.post("/v1/chat/completions", json=chat("x", model="local") | {"max_wait": bad})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_wait")


async def test_who_comes_while_others_are_let_go_stands_behind_them(stack: Stack) -> None:
    model = stack.rig.sleeping("local")
    stack.rig.wake(model, stack.rig.models["sim"].base_url)
    stack.rig.states.opening.add(model.deployment_id)
    assert (await stack.chat("x", model="local")).status_code == 200
    assert stack.rig.states.states[model.deployment_id].state is ReplicaState.READY
