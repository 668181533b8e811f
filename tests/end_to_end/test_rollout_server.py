"""A rollout server with real vLLM, as a process, over gRPC and gloo.

Two servers are started, once and at the same time, since a start costs ten seconds and more. `served` is pushed to;
`fresh` has loaded from its folder what is pushed. The tests that end them stand behind all others.
"""

import asyncio
import os
import select
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2_grpc
from torch import Tensor

from protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from rollout_server.client import FinishReason, GroupRequest, Rollout, RolloutFleet, Sampling
from rollout_server.server import ROLLOUT_SERVICE, WEIGHT_SERVICE
from runtime.dialling import dial
from runtime.process import ReadyFile
from runtime.serving import is_serving
from tests.end_to_end.weight_pusher import WeightPusher
from tests.models import save_tiny_qwen2
from tests.rollout_server.server_process import ServerProcess

pytestmark = pytest.mark.timeout(300)

PROMPT = (5, 6, 7, 8, 9, 10)
LONG_PROMPT = tuple(3 + index % 60 for index in range(100))
DRAIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server, and the model whose weights it has loaded."""

    server: ServerProcess
    ready: ReadyFile
    model: Any


@dataclass(frozen=True, slots=True)
class Servers:
    served: Running
    fresh: Running


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    processes: list[ServerProcess] = []
    models = []
    try:
        for seed in (0, 1):
            folder = tmp_path_factory.mktemp(f"seed-{seed}")
            models.append(save_tiny_qwen2(folder / "model", seed=seed))
            settings = {
                "model": str(folder / "model"),
                "dtype": "float32",
                "context_length": 256,
                "max_running_samples": 64,
                "kv_cache_bytes": 64 << 20,
                "block_size": 32,
                # Little more than one long prompt.
                "max_batched_tokens": 256,
                "listen": {"drain_seconds": DRAIN_SECONDS},
            }
            processes.append(ServerProcess(folder, settings))
        running = [
            Running(process, process.wait_until_ready(), model)
            for process, model in zip(processes, models, strict=True)
        ]
        yield Servers(*running)
    finally:
        for process in processes:
            process.process.kill()
            process.process.wait()


@pytest.fixture
def served(servers: Servers) -> Running:
    return servers.served


@pytest.fixture(scope="module")
def pusher(servers: Servers) -> Iterator[WeightPusher]:
    with grpc.insecure_channel(servers.served.ready.address) as channel:
        info = rollout_pb2_grpc.RolloutServiceStub(channel).GetServerInfo(rollout_pb2.GetServerInfoRequest(), timeout=5)
    pusher = WeightPusher.join(info.admin_address, weights_of(servers.served.model))
    yield pusher
    pusher.group.abort()


@pytest.fixture
async def fleet() -> AsyncIterator[RolloutFleet]:
    fleet = RolloutFleet(token=None)
    yield fleet
    await fleet.close()


def weights_of(model: Any) -> dict[str, Tensor]:
    """What is pushed: every parameter once, the tied head with the embedding."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def group(*, num_samples: int = 4, prompt: tuple[int, ...] = PROMPT, seed: int = 100, **sampling: Any) -> GroupRequest:
    return GroupRequest(
        group_id="group",
        prompt_token_ids=prompt,
        sample_ids=tuple(f"s{index}" for index in range(num_samples)),
        sampling=Sampling(**{"max_tokens": 24, "ignore_stop_tokens": True, **sampling}),
        seeds=tuple(range(seed, seed + num_samples)),
    )


async def generate(fleet: RolloutFleet, running: Running, request: GroupRequest) -> list[Rollout]:
    """Asks this one server."""
    for info in fleet.servers:
        await fleet.remove_server(info.address)
    await fleet.add_server(running.ready.address, timeout_seconds=10)
    return await fleet.generate_group(request, timeout_seconds=60)


def reference_logprobs(
    model: Any, prompt: tuple[int, ...], rollout: Rollout, *, temperature: float = 1.0
) -> list[float]:
    """log_softmax(logits / temperature) of every sampled token, as transformers has it."""
    token_ids = torch.tensor([[*prompt, *rollout.token_ids]])
    with torch.no_grad():
        logits = model(token_ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    logprobs = logits.log_softmax(-1).gather(-1, token_ids[0, len(prompt) :, None])[:, 0]
    return [float(value) for value in logprobs]


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def metric(text: str, name: str) -> float:
    """The sum of a metric's series."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


async def metrics_of(running: Running) -> str:
    def get() -> str:
        connection = HTTPConnection(running.ready.metrics_address, timeout=5)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(get)


async def wait_for_running(running: Running, *, is_any: bool, timeout_seconds: float) -> None:
    """Waits until vLLM says that it runs requests, or that it runs none."""
    async with asyncio.timeout(timeout_seconds):
        while (metric(await metrics_of(running), "vllm:num_requests_running") > 0) != is_any:  # noqa: ASYNC110 - HTTP
            await asyncio.sleep(0.02)


async def test_the_server_says_what_it_serves(served: Running, fleet: RolloutFleet) -> None:
    info = await fleet.add_server(served.ready.address, timeout_seconds=10)

    assert info.vocabulary_size == served.model.config.vocab_size
    assert (info.context_length, info.max_running_samples) == (256, 64)
    assert info.stop_token_ids == (served.model.config.eos_token_id,)
    assert (info.num_weight_ranks, info.transports) == (1, ("gloo",))
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
    assert largest_difference(alone[0].behaviour_logprobs, together[2].behaviour_logprobs) < 1e-5


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


async def test_pushed_weights_sample_as_a_fresh_engine_does(
    servers: Servers, pusher: WeightPusher, fleet: RolloutFleet
) -> None:
    request = group(num_samples=8)
    before = await generate(fleet, servers.served, request)

    commit = await asyncio.to_thread(pusher.push, weights_of(servers.fresh.model))

    after = await generate(fleet, servers.served, request)
    expected = await generate(fleet, servers.fresh, request)
    assert [rollout.token_ids for rollout in after] == [rollout.token_ids for rollout in expected]
    for rollout, fresh in zip(after, expected, strict=True):
        assert largest_difference(rollout.behaviour_logprobs, fresh.behaviour_logprobs) < 1e-5
        assert [(span.first_token, span.policy_version) for span in rollout.version_spans] == [(0, pusher.version)]
    assert [rollout.token_ids for rollout in before] != [rollout.token_ids for rollout in after]
    assert fleet.servers[0].policy_version == 0
    assert (await fleet.add_server(servers.served.ready.address, timeout_seconds=5)).policy_version == pusher.version
    assert 0 < commit.apply_seconds < commit.stopped_seconds < 10


async def test_the_head_that_is_tied_to_the_embedding_follows_a_push(
    servers: Servers, pusher: WeightPusher, fleet: RolloutFleet
) -> None:
    model = servers.fresh.model
    changed = {
        name: tensor + (0.3 if "embed_tokens" in name else 0.0) * torch.randn_like(tensor)
        for name, tensor in weights_of(model).items()
    }
    original = {name: tensor.clone() for name, tensor in weights_of(model).items()}

    await asyncio.to_thread(pusher.push, changed)
    rollouts = await generate(fleet, servers.served, group(num_samples=4))

    model.load_state_dict(changed, strict=False)
    try:
        for rollout in rollouts:
            expected = reference_logprobs(model, PROMPT, rollout)
            assert largest_difference(rollout.behaviour_logprobs, expected) < 1e-4
    finally:
        model.load_state_dict(original, strict=False)


async def test_no_block_of_the_prefix_cache_crosses_versions(
    servers: Servers, pusher: WeightPusher, fleet: RolloutFleet
) -> None:
    async def ask(running: Running) -> rollout_pb2.Sample:
        message = rollout_pb2.GenerateRequest(
            prompt_token_ids=LONG_PROMPT,
            samples=[rollout_pb2.SampleRequest(sample_id="s", seed=1)],
            sampling=rollout_pb2.SamplingParameters(max_tokens=24, ignore_stop_tokens=True),
        )
        async with dial(running.ready.address, token=None) as channel:
            stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
            (event,) = [event async for event in stub.Generate(message, timeout=30)]
            sample: rollout_pb2.Sample = event.sample
            return sample

    await asyncio.to_thread(pusher.push, weights_of(servers.served.model))
    await ask(servers.served)
    warm = await ask(servers.served)
    await asyncio.to_thread(pusher.push, weights_of(servers.fresh.model))
    after = await ask(servers.served)
    warm_again = await ask(servers.served)
    cold = await ask(servers.fresh)

    assert (warm.num_cached_prompt_tokens, after.num_cached_prompt_tokens) == (96, 0)
    assert warm_again.num_cached_prompt_tokens == 96
    assert list(after.token_ids) == list(warm_again.token_ids) == list(cold.token_ids)
    assert largest_difference(after.behaviour_logprobs, cold.behaviour_logprobs) < 1e-5


@pytest.mark.parametrize("recompute", [False, True])
async def test_requests_in_flight_are_kept_over_a_push_with_exact_spans(
    servers: Servers, pusher: WeightPusher, fleet: RolloutFleet, recompute: bool
) -> None:
    old, new = servers.served.model, servers.fresh.model
    await asyncio.to_thread(pusher.push, weights_of(old))
    old_version = pusher.version
    # More than can run at once, so that some wait for their first token over the push.
    asked = asyncio.ensure_future(
        generate(fleet, servers.served, group(num_samples=80, max_tokens=200, prompt=LONG_PROMPT[:40]))
    )
    await wait_for_running(servers.served, is_any=True, timeout_seconds=10)

    commit = await asyncio.to_thread(pusher.push, weights_of(new), recompute=recompute)
    rollouts = await asked

    assert commit.num_requests_kept == 80
    split = [rollout for rollout in rollouts if len(rollout.version_spans) == 2]
    late = [rollout for rollout in rollouts if len(rollout.version_spans) == 1]
    assert split
    assert late
    for rollout in rollouts:
        assert len(rollout.token_ids) == len(rollout.behaviour_logprobs) == 200
        assert rollout.finish_reason is FinishReason.LENGTH
        assert all(a.first_token < b.first_token for a, b in pairwise(rollout.version_spans))
    for rollout in split[:6]:
        first, second = rollout.version_spans
        assert (first.first_token, first.policy_version, second.policy_version) == (0, old_version, old_version + 1)
        border = second.first_token
        of_old = reference_logprobs(old, LONG_PROMPT[:40], rollout)
        assert largest_difference(rollout.behaviour_logprobs[:border], of_old[:border]) < 1e-4
        assert abs(rollout.behaviour_logprobs[border] - of_old[border]) > 1e-3
        if recompute:
            of_new = reference_logprobs(new, LONG_PROMPT[:40], rollout)
            assert largest_difference(rollout.behaviour_logprobs[border:], of_new[border:]) < 1e-4
    for rollout in late[:6]:
        assert rollout.version_spans[0].policy_version == old_version + 1
        of_new = reference_logprobs(new, LONG_PROMPT[:40], rollout)
        assert largest_difference(rollout.behaviour_logprobs, of_new) < 1e-4


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
