"""Rollout servers with real vLLM, and what tests ask of them: groups, reference logprobs, metrics."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import torch

from rollout_server.client import GroupRequest, Rollout, RolloutFleet, Sampling
from runtime.process import ReadyFile
from tests.rollout_server.server_process import ServerProcess

PROMPT = (5, 6, 7, 8, 9, 10)
DRAIN_SECONDS = 10.0
IS_CUDA = torch.cuda.is_available()
TRANSPORTS = ("nccl", "gloo") if IS_CUDA else ("gloo",)
SAME_WEIGHTS = 1e-4 if IS_CUDA else 1e-5
"""How far logprobs of the same weights may be apart: on a GPU the batch decides which kernels compute and round."""


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
