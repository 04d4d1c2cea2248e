"""Metric pages as engines write them."""

import pytest

from engine.figures import EngineFigures, parse

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:time_per_output_token_seconds histogram
vllm:time_per_output_token_seconds_bucket{engine="0",le="0.01",model_name="m"} 1.0
vllm:time_per_output_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 75.0
vllm:time_per_output_token_seconds_sum{engine="0",model_name="m"} 1.5
vllm:time_per_output_token_seconds_count{engine="0",model_name="m"} 75.0
"""


def test_ranks_are_summed_and_their_memory_is_averaged() -> None:
    assert parse(VLLM) == EngineFigures(5, 1, 0.5, 4, 1.5, 75)


def test_the_newer_name_of_the_time_between_tokens() -> None:
    page = VLLM.replace("time_per_output_token", "inter_token_latency")
    assert (parse(page).itl_sum_s, parse(page).itl_count) == (1.5, 75)


def test_llama_cpp() -> None:
    page = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\nllamacpp:n_decode_total 9\n"
    assert parse(page) == EngineFigures(running=1, waiting=2)


def test_a_page_of_something_else_says_nothing() -> None:
    assert parse("go_goroutines 7\nprocess_cpu_seconds_total 1.0\n") == EngineFigures()


def test_nonsense_is_an_error() -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse("vllm:num_requests_running three\n")
