"""Weights are pushed to a rollout server with real vLLM: what it samples before, over and after.

`served` is pushed to; `fresh` has loaded from its folder what is pushed.
"""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from rollout_server.client import FinishReason, RolloutFleet
from runtime.dialling import dial
from tests.end_to_end.rollout_servers import (
    PROMPT,
    SAME_WEIGHTS,
    Running,
    Servers,
    generate,
    group,
    largest_difference,
    reference_logprobs,
    wait_for_running,
)
from tests.end_to_end.weight_pusher import WeightPusher

pytestmark = pytest.mark.timeout(300)

LONG_PROMPT = tuple(3 + index % 60 for index in range(100))


@pytest.fixture(scope="module")
def pusher(servers: Servers) -> Iterator[WeightPusher]:
    with grpc.insecure_channel(servers.served.ready.address) as channel:
        info = rollout_pb2_grpc.RolloutServiceStub(channel).GetServerInfo(rollout_pb2.GetServerInfoRequest(), timeout=5)
    pusher = WeightPusher.join(info.admin_address, weights_of(servers.served.model))
    yield pusher
    pusher.group.abort()


def weights_of(model: Any) -> dict[str, Tensor]:
    """What is pushed: every parameter once, the tied head with the embedding."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


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
        assert largest_difference(rollout.behaviour_logprobs, fresh.behaviour_logprobs) < SAME_WEIGHTS
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
    assert largest_difference(after.behaviour_logprobs, cold.behaviour_logprobs) < SAME_WEIGHTS


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
