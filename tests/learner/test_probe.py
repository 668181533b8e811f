"""Learner's and server's logprobs of fresh samples, compared through a real policy."""

import threading
from collections.abc import Iterator

import pytest
import torch

from learner.batch import pack
from learner.config import LearnerSettings, SamplingSettings
from learner.probe import NUM_SAMPLES, Probe
from learner.ranks import Leader
from learner.records import Prompt, ScoredGroup, ScoredRollout
from learner.servers import ModelFacts, ServerBook, ServerKind
from rollout_server.engine import EngineDeadError
from runtime.problems.problem import Problem
from tests.learner.conftest import Holder
from tests.rollout_server.scripted_server import ScriptedServer, scripted_server

MODEL = ModelFacts(tokenizer_fingerprint="f" * 64, vocabulary_size=100, stop_token_ids=(1,))
PROMPT = (5, 6)
NUM_TOKENS = 4


@pytest.fixture
def servers(holder: Holder) -> Iterator[ServerBook]:
    book = ServerBook(token=None, model=MODEL)
    yield book
    holder.run(book.close())


@pytest.fixture
def server(holder: Holder, servers: ServerBook) -> ScriptedServer:
    running = holder.hold(scripted_server())
    holder.run(servers.register(ServerKind.ROLLOUT, running.address))
    holder.run(servers.note_pushed(servers.push_targets(), 0))
    return running


def probe_of(holder: Holder, servers: ServerBook, *, max_tokens: int = NUM_TOKENS) -> Probe:
    return Probe(
        background=holder.background,
        servers=servers,
        problem=Problem("problem", "what is asked", "7", "sum"),
        encode=lambda _text: PROMPT,
        settings=LearnerSettings(sampling=SamplingSettings(max_tokens=max_tokens)),
        stop=threading.Event(),
    )


def logprobs_of_zeros(leader: Leader) -> torch.Tensor:
    """The learner's, of what the scripted engine answers: zeros."""
    rollout = ScoredRollout("s", (0,) * NUM_TOKENS, (-0.5,) * NUM_TOKENS, ((0, 0),), "length", 0.0, "probe", 0.0)
    group = ScoredGroup("g", Prompt("p", 0, "problem", PROMPT, "7"), (rollout,))
    (share,) = pack([group], num_ranks=1, tokens_per_micro_batch=1 << 30, tokens_per_shared_row=0, policy_version=0)
    (batch,) = share.micro_batches
    return leader.logprobs(batch)[batch.completion_mask > 0]


def test_the_largest_difference_is_that_of_one_token(
    holder: Holder, servers: ServerBook, server: ScriptedServer, leader: Leader
) -> None:
    probe = probe_of(holder, servers)
    probe.ask(0)

    difference = probe.max_difference(leader)

    # The scripted engine says -0.5 of every token.
    assert difference == pytest.approx((logprobs_of_zeros(leader) + 0.5).abs().max().item(), rel=1e-5)


def test_samples_are_asked_for_once(
    holder: Holder, servers: ServerBook, server: ScriptedServer, leader: Leader
) -> None:
    probe = probe_of(holder, servers)

    assert probe.max_difference(leader) is None
    probe.ask(0)
    assert probe.max_difference(leader) is not None
    assert probe.max_difference(leader) is None


def test_a_probe_is_short_however_long_rollouts_are(
    holder: Holder, servers: ServerBook, server: ScriptedServer, leader: Leader
) -> None:
    # Longer than the scripted engine's context: it would refuse the samples.
    probe = probe_of(holder, servers, max_tokens=1000)
    probe.ask(0)

    assert probe.max_difference(leader) is not None


def test_without_samples_of_the_version_there_is_no_proof(
    holder: Holder, servers: ServerBook, server: ScriptedServer, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.probe.TIMEOUT_SECONDS", 0.2)
    probe = probe_of(holder, servers)
    probe.ask(1)

    assert probe.max_difference(leader) is None


def test_an_engine_that_fails_is_no_failure_of_the_run(
    holder: Holder, servers: ServerBook, server: ScriptedServer, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.probe.TIMEOUT_SECONDS", 0.2)
    server.engine.failures[0] = EngineDeadError("no memory")
    probe = probe_of(holder, servers)
    probe.ask(0)

    assert probe.max_difference(leader) is None


def test_a_second_question_gives_the_first_up(
    holder: Holder, servers: ServerBook, server: ScriptedServer, leader: Leader
) -> None:
    async def shut() -> None:
        server.engine.shut(0)

    async def open_again() -> None:
        for _ in range(NUM_SAMPLES):
            await server.engine.started.acquire()
        server.engine.gates.clear()

    holder.run(shut())
    probe = probe_of(holder, servers)
    probe.ask(0)
    # Those of the first question wait for ever.
    holder.run(open_again())
    probe.ask(0)

    assert probe.max_difference(leader) is not None

    async def wait_for_aborts() -> None:
        for _ in range(NUM_SAMPLES):
            await server.engine.aborted.acquire()

    holder.run(wait_for_aborts())
