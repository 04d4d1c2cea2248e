"""Operators look at how an engine is started, and at how gateways choose among replicas."""

from typing import Any
from uuid import uuid4

import msgspec

from api.services import Services
from core import keyspace
from core.ids import IdKind, parse_id
from knative.types import DeploymentState, Endpoint, ReplicaState
from scheduler.router.router import Router
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"


async def _deployment(admin: Client, **fields: Any) -> str:
    name = f"m-{uuid4().hex[:8]}"
    model = (await admin.post(f"{ADMIN}/models", {"name": name})).json()
    version = (await admin.post(f"{ADMIN}/models/{model['id']}/versions", {"context_max": 8192})).json()
    body = {
        "name": name,
        "version_id": version["id"],
        "kind": "external",
        "engine": "vllm",
        "upstream_model": "gpt",
        "base_url": "https://upstream.example",
        **fields,
    }
    answer = await admin.post(f"{ADMIN}/deployments", body)
    assert answer.status_code == 201, answer.text
    found: str = answer.json()["id"]
    return found


async def test_the_command_line_is_shown_for_given_hardware(admin: Client) -> None:
    made = await _deployment(admin, engine_args={"prefix_caching": True}, gpu_memory_mb=80_000, kv_request_mb=1200)
    shown = (await admin.get(f"{ADMIN}/deployments/{made}/command?card=A100&cards=2&memory_mib=81920")).json()
    assert (shown["engine"], shown["accepted"], shown["seats"], shown["context"]) == ("vllm", True, 26, 8192)
    arguments = shown["arguments"]
    assert arguments[arguments.index("--tensor-parallel-size") + 1] == "2"
    assert arguments[arguments.index("--max-num-seqs") + 1] == "26"
    assert shown["memory"] is None  # nobody has read the weights


async def test_what_is_wrong_is_said_with_its_remedy(admin: Client) -> None:
    made = await _deployment(admin, engine_args={"sleep": True, "tensor_parallel": 4, "extra": "--api-key x"})
    shown = (await admin.get(f"{ADMIN}/deployments/{made}/command?vendor=cpu&memory_mib=65536")).json()
    assert not shown["accepted"]
    assert {found["param"] for found in shown["objections"]} == {"sleep", "tensor_parallel", "extra"}
    assert all(found["reason"] and found["remedy"] for found in shown["objections"])
    wrong = await admin.get(f"{ADMIN}/deployments/{made}/command?share=all")
    assert wrong.status_code == 422
    unknown = await _deployment(admin, engine_args={"colour": 1})
    answer = await admin.get(f"{ADMIN}/deployments/{unknown}/command")
    assert (answer.status_code, answer.json()["param"]) == (400, "engine_args")


async def test_an_engine_that_is_not_known_has_to_be_named(admin: Client) -> None:
    made = await _deployment(admin, engine="openai")
    answer = await admin.get(f"{ADMIN}/deployments/{made}/command")
    assert (answer.status_code, answer.json()["code"]) == (400, "NO_COMMAND")
    shown = (await admin.get(f"{ADMIN}/deployments/{made}/command?engine=tensorrt-llm&card=H100")).json()
    assert shown["accepted"]
    assert "enable_block_reuse: true" in shown["files"]["tensorrt-llm.yaml"]


async def test_how_gateways_choose_is_shown(admin: Client, services: Services) -> None:
    made = await _deployment(admin)
    path = f"{ADMIN}/deployments/{made}/routing"
    assert (await admin.get(path)).json() == {"gateways": []}
    deployment = parse_id(IdKind.DEPLOYMENT, made).hex
    endpoints = (Endpoint("a", "unix:/a"), Endpoint("b", "unix:/b"))
    router = Router(random=lambda: 0.0)
    router.pick(DeploymentState(deployment, ReplicaState.READY, endpoints), b"x" * 600, 0, "t", 100.0).sent()
    report = router.report(deployment, gateway="g1", now=100.0, now_us=services.clock.now_us())
    await services.valkey.call("HSET", keyspace.routing(deployment), "g1", msgspec.json.encode(report))
    (gateway,) = (await admin.get(path)).json()["gateways"]
    assert (gateway["gateway"], [seen["sent"] for seen in gateway["replicas"]]) == ("g1", [1, 0])
    (decision,) = gateway["decisions"]
    assert (decision["chosen"], decision["by"], decision["prompt_bytes"]) == ("a", "two choices", 600)
    assert [one["replica"] for one in decision["considered"]] == ["a", "b"]
