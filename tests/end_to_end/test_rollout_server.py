"""A rollout server with real vLLM, as a process, over gRPC.

Two servers are started, once and at the same time, since a start costs ten seconds and more. The tests that end them
stand behind all others.
"""

import asyncio
import os
import select
import signal
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2_grpc

from protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from rollout_server.client import FinishReason, RolloutFleet
from rollout_server.server import ROLLOUT_SERVICE, WEIGHT_SERVICE
from runtime.dialling import dial
from runtime.serving import is_serving
from tests.end_to_end.rollout_servers import (
    DRAIN_SECONDS,
    PROMPT,
    SAME_WEIGHTS,
    TRANSPORTS,
    Running,
    Servers,
    generate,
    group,
    largest_difference,
    metric,
    metrics_of,
    reference_logprobs,
    wait_for_running,
)
from tests.rollout_server.server_process import ServerProcess

pytestmark = pytest.mark.timeout(300)


async def test_the_server_says_what_it_serves(served: Running, fleet: RolloutFleet) -> None:
    info = await fleet.add_server(served.ready.address, timeout_seconds=10)

    assert info.vocabulary_size == served.model.config.vocab_size
    assert (info.context_length, info.max_running_samples) == (256, 64)
    assert info.stop_token_ids == (served.model.config.eos_token_id,)
    assert (info.num_weight_ranks, info.transports) == (1, TRANSPORTS)
    assert info.instance_id == served.ready.instance_id
    assert len(info.tokenizer_fingerprint) == 64


async def test_health_says_serving_on_both_listeners(served: Running, fleet: RolloutFleet) -> None:
    info = await fleet.add_server(served.ready.address, timeout_seconds=10)

    for address, service in ((info.address, ROLLOUT_SERVICE), (info.admin_address, WEIGHT_SERVICE)):
        async with dial(address, token=None) as channel:
            assert await is_serving(health_pb2_grpc.HealthStub(channel), service=service)


async def test_every_sample_comes_with_a_logprob_a_token(served: Running, fleet: RolloutFleet) -> None:
    rollouts = await generate(fleet, served, group(num_samples=8))

    assert [rollout.sample_id for rollout in rollouts] == [f"s{index}" for index in range(8)]
    for rollout in rollouts:
        assert len(rollout.token_ids) == len(rollout.behaviour_logprobs) == 24
        assert rollout.finish_reason is FinishReason.LENGTH
        assert rollout.stop_token_id is None
        assert [span.first_token for span in rollout.version_spans] == [0]
    assert len({rollout.token_ids for rollout in rollouts}) == 8


async def test_seeds_reproduce_alone_and_in_company(served: Running, fleet: RolloutFleet) -> None:
    together = await generate(fleet, served, group(num_samples=4))
    again = await generate(fleet, served, group(num_samples=4))
    alone = await generate(fleet, served, group(num_samples=1, seed=102))

    assert [rollout.token_ids for rollout in again] == [rollout.token_ids for rollout in together]
    assert alone[0].token_ids == together[2].token_ids
    assert largest_difference(alone[0].behaviour_logprobs, together[2].behaviour_logprobs) < SAME_WEIGHTS


async def test_a_stop_token_ends_a_sample_and_is_kept(served: Running, fleet: RolloutFleet) -> None:
    end = served.model.config.eos_token_id
    rollouts = await generate(fleet, served, group(num_samples=64, max_tokens=100, ignore_stop_tokens=False))

    stopped = [rollout for rollout in rollouts if rollout.finish_reason is FinishReason.STOP]
    assert stopped
    for rollout in stopped:
        assert rollout.stop_token_id == rollout.token_ids[-1] == end
        assert end not in rollout.token_ids[:-1]
        assert len(rollout.behaviour_logprobs) == len(rollout.token_ids)
    assert all(end not in rollout.token_ids for rollout in rollouts if rollout.finish_reason is FinishReason.LENGTH)


async def test_stop_tokens_of_the_request_count_too(served: Running, fleet: RolloutFleet) -> None:
    everything = tuple(range(served.model.config.vocab_size))
    (rollout,) = await generate(
        fleet, served, group(num_samples=1, stop_token_ids=everything, ignore_stop_tokens=False)
    )

    assert rollout.finish_reason is FinishReason.STOP
    assert rollout.token_ids == (rollout.stop_token_id,)


async def test_a_prompt_and_completion_may_fill_the_context_exactly(served: Running, fleet: RolloutFleet) -> None:
    (rollout,) = await generate(fleet, served, group(num_samples=1, max_tokens=256 - len(PROMPT)))

    assert len(rollout.token_ids) == 256 - len(PROMPT)


async def test_behaviour_logprobs_are_of_the_distribution_that_was_sampled(
    servers: Servers, fleet: RolloutFleet
) -> None:
    rollouts = await generate(fleet, servers.fresh, group(num_samples=8, temperature=0.7))

    for rollout in rollouts:
        expected = reference_logprobs(servers.fresh.model, PROMPT, rollout, temperature=0.7)
        assert largest_difference(rollout.behaviour_logprobs, expected) < 1e-4


async def test_progress_and_the_final_sample_agree(served: Running) -> None:
    message = rollout_pb2.GenerateRequest(
        prompt_token_ids=PROMPT,
        samples=[rollout_pb2.SampleRequest(sample_id="s", seed=1)],
        sampling=rollout_pb2.SamplingParameters(max_tokens=24, ignore_stop_tokens=True),
        progress_every_tokens=10,
    )
    async with dial(served.ready.address, token=None) as channel:
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        events = [event async for event in stub.Generate(message, timeout=30)]

    assert [event.progress.num_tokens for event in events[:-1]] == [10, 20]
    assert len(events[-1].sample.token_ids) == len(events[-1].sample.behaviour_logprobs) == 24


async def test_a_cancel_aborts_inside_vllm_within_two_seconds(served: Running, fleet: RolloutFleet) -> None:
    running = asyncio.ensure_future(generate(fleet, served, group(num_samples=64, max_tokens=240)))
    await wait_for_running(served, is_any=True, timeout_seconds=10)

    running.cancel()

    await wait_for_running(served, is_any=False, timeout_seconds=2)
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_metrics_of_vllm_grpc_and_ours_stand_on_one_page(served: Running, fleet: RolloutFleet) -> None:
    await generate(fleet, served, group(num_samples=1))

    text = await metrics_of(served)

    assert metric(text, "vllm:generation_tokens_total") > 0
    assert metric(text, "tandem_rollout_samples_total") > 0
    assert metric(text, "grpc_server_handled_total") > 0
    assert "tandem_rollout_policy_version " in text


def test_every_listener_is_on_loopback(servers: Servers) -> None:
    root = psutil.Process(servers.fresh.server.process.pid)
    listening = [
        connection.laddr.ip.removeprefix("::ffff:")
        for process in (root, *root.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]

    assert len(listening) >= 3
    assert all(ip_address(ip).is_loopback for ip in listening)


async def test_prompts_that_do_not_fit_into_one_step_are_sampled_with_their_seeds(
    servers: Servers, fleet: RolloutFleet
) -> None:
    await fleet.add_server(servers.fresh.ready.address, timeout_seconds=10)
    prompts = [tuple(3 + (index * step) % 61 for index in range(200)) for step in range(1, 11)]
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(
                fleet.generate_group(group(num_samples=1, max_tokens=8, prompt=prompt), timeout_seconds=60)
            )
            for prompt in prompts
        ]

    alone = await fleet.generate_group(group(num_samples=1, max_tokens=8, prompt=prompts[-1]), timeout_seconds=60)
    assert asked[-1].result()[0].token_ids == alone[0].token_ids
    for prompt, task in zip(prompts, asked, strict=True):
        (rollout,) = task.result()
        of_model = reference_logprobs(servers.fresh.model, prompt, rollout)
        assert largest_difference(rollout.behaviour_logprobs, of_model) < 1e-4


async def test_sigterm_drains_and_ends_with_zero(served: Running, fleet: RolloutFleet) -> None:
    asked = asyncio.ensure_future(generate(fleet, served, group(num_samples=16, max_tokens=200)))
    await wait_for_running(served, is_any=True, timeout_seconds=10)

    begin = time.monotonic()
    served.server.process.send_signal(signal.SIGTERM)
    rollouts = await asked
    async with dial(served.ready.address, token=None) as channel:
        assert not await is_serving(health_pb2_grpc.HealthStub(channel), service=ROLLOUT_SERVICE)
    code = await asyncio.to_thread(served.server.process.wait, 30)

    assert (code, len(rollouts)) == (0, 16)
    assert time.monotonic() - begin < DRAIN_SECONDS + 5
    assert "Traceback" not in served.server.log
    assert "Exception ignored" not in served.server.log


def test_nothing_outlives_a_server_that_is_killed(servers: Servers) -> None:
    server = servers.fresh.server
    children = [os.pidfd_open(pid) for pid in server.children()]
    assert children

    server.process.kill()

    deadline = time.monotonic() + 2
    for child in children:
        ended, _, _ = select.select([child], [], [], max(0.0, deadline - time.monotonic()))
        os.close(child)
        assert ended


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, {"model": str(tmp_path)})

    with pytest.raises(RuntimeError, match=r"model = .*: is no folder with a config.json"):
        server.wait_until_ready()
