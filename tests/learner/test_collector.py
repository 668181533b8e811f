"""From a prompt to a scored group, over scripted rollout servers and a scripted reward server."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from learner.collector import MAX_REFUSED_IN_A_ROW, Collector
from learner.config import LearnerSettings, SamplingSettings
from learner.ledger import Ledger
from learner.ledger_verdict import LedgerVerdict, verify
from learner.prompts import PromptSource
from learner.records import ScoredGroup
from learner.servers import ModelFacts, ServerBook, ServerKind
from protos.reward.v1 import reward_pb2
from rollout_server.engine import EngineDeadError
from runtime.problems.problem import Problem
from tests.learner.conftest import Holder
from tests.learner.scripted_rewards import ScriptedRewards, first_is_correct, scripted_reward_server
from tests.rollout_server.scripted_engine import CONTEXT_LENGTH
from tests.rollout_server.scripted_server import ScriptedServer, scripted_server

MODEL = ModelFacts(tokenizer_fingerprint="f" * 64, vocabulary_size=100, stop_token_ids=(1,))
PROBLEMS = [Problem(f"problem-{number}", str(number % 10), "7", "sum") for number in range(50)]
SETTINGS = LearnerSettings(
    prompts_per_step=2,
    rollouts_per_prompt=2,
    max_staleness=1,
    sampling=SamplingSettings(max_tokens=4),
    group_timeout_seconds=20,
)


class Learner:
    """A collector with everything around it; scripted servers come by `add_server`."""

    def __init__(self, holder: Holder, ledger_path: Path, settings: LearnerSettings, policy_version: int = 0) -> None:
        self.holder, self.ledger_path, self.settings = holder, ledger_path, settings
        self.rewards = ScriptedRewards()
        self.prompts = PromptSource(PROBLEMS, encode=lambda text: [5, int(text)], seed=1)
        self.ledger = Ledger(ledger_path, start_step=0)
        self.servers = ServerBook(token=None, model=MODEL)
        self.version = policy_version
        self.collector = Collector(
            prompts=self.prompts,
            servers=self.servers,
            ledger=self.ledger,
            settings=settings,
            decode=lambda token_ids: f"{len(token_ids)} tokens",
            policy_version=policy_version,
        )
        address = holder.hold(scripted_reward_server(self.rewards))
        holder.run(self.servers.register(ServerKind.REWARD, address))

    def add_server(self) -> ScriptedServer:
        server = self.holder.hold(scripted_server())
        self.holder.run(self.servers.register(ServerKind.ROLLOUT, server.address))
        self.push(server)
        return server

    def push(self, server: ScriptedServer) -> None:
        server.engine.policy_version = server.served.policy_version = self.version
        infos = [info for info in self.servers.push_targets() if info.address == server.address]
        self.holder.run(self.servers.note_pushed(infos, self.version))

    def make_step(self, groups: Sequence[ScoredGroup], *servers: ScriptedServer) -> None:
        """What the main loop does: book, push, give the slots back."""
        self.version += 1
        self.ledger.end_trained(step=self.version, rollouts=[r for group in groups for r in group.rollouts])
        for server in servers:
            self.push(server)
        self.collector.set_version(self.version)
        self.collector.release(groups)

    def start(self) -> None:
        self.collector.start(self.holder.background)

    def take(self, num_groups: int) -> list[ScoredGroup]:
        groups = self.collector.take(num_groups, timeout_seconds=20)
        assert groups is not None
        return groups

    def wait_for_groups(self, num_groups: int) -> None:
        """Until so many groups are ready; they stay where they are."""
        ready = self.collector._ready
        with self.collector._delivered:
            assert self.collector._delivered.wait_for(lambda: len(ready) >= num_groups, 20)

    def end(self) -> LedgerVerdict:
        """Ends the run, as `Run` does."""
        self.collector.stop()
        self.ledger.close_run()
        self.holder.run(self.servers.close())
        return verify(self.ledger_path)


@pytest.fixture
def learner(holder: Holder, tmp_path: Path) -> Iterator[Learner]:
    yield (started := Learner(holder, tmp_path / "ledger.sqlite", SETTINGS))
    assert_ended(started)


def assert_ended(learner: Learner) -> None:
    """However a run went, every sample has exactly one end."""
    verdict = learner.end()
    assert verdict.problems == ()
    assert (verdict.lost, verdict.open, verdict.trained_twice) == (0, 0, 0)
    assert learner.ledger.counts().ended_twice == 0


def set_gate(learner: Learner, server: ScriptedServer, *, is_open: bool) -> None:
    """Lets samples go, or wait; the scripted engine calls those without a seed 0."""

    async def change() -> None:
        if is_open:
            server.engine.gates.pop(0).set()
        else:
            server.engine.shut(0)

    learner.holder.run(change())


def wait_for_samples(learner: Learner, server: ScriptedServer, num_samples: int) -> None:
    async def wait() -> None:
        async with asyncio.timeout(10):
            for _ in range(num_samples):
                await server.engine.started.acquire()

    learner.holder.run(wait())


def wait_for_aborts(learner: Learner, server: ScriptedServer, num_samples: int) -> None:
    async def wait() -> None:
        async with asyncio.timeout(10):
            for _ in range(num_samples):
                await server.engine.aborted.acquire()

    learner.holder.run(wait())


def positions(groups: Sequence[ScoredGroup]) -> list[int]:
    return sorted(group.prompt.position for group in groups)


def attempts_of(learner: Learner) -> list[int]:
    with closing(sqlite3.connect(learner.ledger_path)) as connection:
        return [attempts for (attempts,) in connection.execute("SELECT attempts FROM samples")]


def test_groups_come_scored_and_with_advantages(learner: Learner) -> None:
    learner.add_server()
    learner.start()

    groups = learner.take(4)

    assert positions(groups) == [0, 1, 2, 3]
    for group in groups:
        assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]
        assert [rollout.outcome for rollout in group.rollouts] == ["correct", "wrong"]
        assert [rollout.advantage for rollout in group.rollouts] == pytest.approx([1.0, -1.0], abs=1e-3)
        assert group.rollouts[0].token_ids == (0,) * 4
        assert group.rollouts[0].behaviour_logprobs == (-0.5,) * 4
        assert group.rollouts[0].version_spans == ((0, 0),)
    item, *_ = learner.rewards.items
    assert (item.completion, item.reference_answer) == ("4 tokens", "7")


def test_admission_bounds_groups_that_are_not_trained_on(learner: Learner) -> None:
    server = learner.add_server()
    learner.start()
    most = (SETTINGS.max_staleness + 1) * SETTINGS.prompts_per_step

    learner.wait_for_groups(most)
    groups = learner.take(2)

    # Whatever was done with its last slot has been issued: no other prompt follows, though two groups were taken.
    assert learner.prompts.state().cursor == most
    assert learner.ledger.counts().issued == most * SETTINGS.rollouts_per_prompt

    learner.make_step(groups, server)
    learner.wait_for_groups(most)

    assert learner.prompts.state().cursor == most + 2


def test_a_deadline_of_a_group_fails_its_samples_and_gives_the_slot_back(holder: Holder, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"group_timeout_seconds": 0.3})
    learner = Learner(holder, tmp_path / "ledger.sqlite", settings)
    server = learner.add_server()
    set_gate(learner, server, is_open=False)
    learner.start()
    # The four first groups, and a fifth that has one of their slots.
    wait_for_samples(learner, server, 5 * settings.rollouts_per_prompt)
    set_gate(learner, server, is_open=True)

    learner.take(2)

    failed = learner.ledger.counts().failed
    assert set(failed) == {"rollout_deadline"}
    assert failed["rollout_deadline"] >= settings.rollouts_per_prompt
    assert_ended(learner)


def test_refused_groups_give_their_slots_back_and_end_the_run_if_all_are(holder: Holder, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"sampling": SamplingSettings(max_tokens=CONTEXT_LENGTH)})
    learner = Learner(holder, tmp_path / "ledger.sqlite", settings)
    learner.add_server()
    learner.start()

    with pytest.raises(RuntimeError, match=rf"{MAX_REFUSED_IN_A_ROW} groups in a row .* sampling.max_tokens = 32"):
        learner.collector.take(1, timeout_seconds=20)

    assert learner.ledger.counts().failed == {"refused": MAX_REFUSED_IN_A_ROW * settings.rollouts_per_prompt}
    assert_ended(learner)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [(reward_pb2.OUTCOME_TIMED_OUT, "reward_timed_out"), (reward_pb2.OUTCOME_ERROR, "reward_error")],
)
def test_a_sample_without_a_reward_is_dropped_with_its_reason(
    holder: Holder, tmp_path: Path, outcome: reward_pb2.Outcome, reason: str
) -> None:
    settings = SETTINGS.model_copy(update={"rollouts_per_prompt": 3})
    learner = Learner(holder, tmp_path / "ledger.sqlite", settings)
    learner.rewards.outcome_of = lambda sample: outcome if sample.endswith("-s1") else first_is_correct(sample)
    learner.add_server()
    learner.start()

    learner.wait_for_groups(4)
    (group,) = learner.take(1)

    assert [rollout.sample_id[-3:] for rollout in group.rollouts] == ["-s0", "-s2"]
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]
    assert learner.ledger.counts().dropped == {reason: 4}
    assert_ended(learner)


def test_a_group_with_one_reward_is_dropped_whole(learner: Learner) -> None:
    first = PromptSource(PROBLEMS, encode=lambda _text: [5], seed=1).next().prompt_id
    learner.rewards.outcome_of = lambda sample: (
        reward_pb2.OUTCOME_ERROR if sample.endswith(f"-{first}-s1") else first_is_correct(sample)
    )
    learner.add_server()
    learner.start()

    learner.wait_for_groups(4)

    assert learner.ledger.counts().dropped == {"reward_error": 1, "group_too_small": 1}
    assert positions(learner.take(4)) == [1, 2, 3, 4]


def test_stale_groups_are_dropped_when_they_are_taken(learner: Learner) -> None:
    server = learner.add_server()
    learner.start()
    learner.wait_for_groups(4)
    for version in (1, 2):
        learner.version = version
        learner.push(server)
        learner.collector.set_version(version)

    # The four that were made under version 0 are gone, and their slots with them.
    assert learner.collector.take(4, timeout_seconds=0) is None
    groups = learner.take(4)

    assert {rollout.oldest_version for group in groups for rollout in group.rollouts} == {2}
    assert learner.ledger.counts().dropped == {"stale": 4 * SETTINGS.rollouts_per_prompt}
    assert learner.prompts.state().unfinished == (4, 5, 6, 7)


def test_without_staleness_only_the_present_version_is_taken(holder: Holder, tmp_path: Path) -> None:
    learner = Learner(holder, tmp_path / "ledger.sqlite", SETTINGS.model_copy(update={"max_staleness": 0}))
    server = learner.add_server()
    learner.start()
    for version in range(4):
        groups = learner.take(2)

        assert {rollout.version_spans for group in groups for rollout in group.rollouts} == {((0, version),)}
        # Nothing is made while the step is.
        assert learner.prompts.state().cursor == 2 * (version + 1)
        learner.make_step(groups, server)
    assert_ended(learner)


def test_a_retry_on_another_server_is_recorded(learner: Learner) -> None:
    broken = learner.add_server()
    broken.engine.failures[0] = EngineDeadError("no memory")
    sound = learner.add_server()
    learner.start()

    groups = learner.take(4)

    assert len(groups) == 4
    wait_for_samples(learner, sound, 8)
    assert Counter(attempts_of(learner)) == {1: 4, 2: 4}


def test_without_a_reward_server_the_samples_have_failed(
    holder: Holder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.collector.REWARD_TIMEOUT_SECONDS", 0.2)
    learner = Learner(holder, tmp_path / "ledger.sqlite", SETTINGS)
    (address,) = learner.servers.rewards.addresses
    holder.run(learner.servers.rewards.remove_server(address))
    server = learner.add_server()
    learner.start()

    # A ninth sample needs a slot of a group that has failed.
    wait_for_samples(learner, server, 9)

    assert learner.ledger.counts().failed["reward_unavailable"] >= 2
    assert_ended(learner)


def test_what_is_in_flight_at_the_end_is_issued_again_by_a_resume(holder: Holder, tmp_path: Path) -> None:
    learner = Learner(holder, tmp_path / "ledger.sqlite", SETTINGS)
    server = learner.add_server()
    learner.start()
    groups = learner.take(2)
    learner.wait_for_groups(2)
    set_gate(learner, server, is_open=False)
    learner.make_step(groups, server)
    wait_for_samples(learner, server, 12)

    verdict = learner.end()

    wait_for_aborts(learner, server, 4)
    assert (verdict.issued, verdict.trained, verdict.dropped) == (12, 4, {"run_ended": 8})
    assert (verdict.is_sound, verdict.open) == (True, 0)
    state = learner.prompts.state()
    # Two groups that were ready, and two in flight.
    assert (state.cursor, state.unfinished) == (6, (2, 3, 4, 5))

    again = Learner(holder, tmp_path / "ledger.sqlite", SETTINGS)
    again.prompts.restore(state)
    again.add_server()
    again.start()
    assert positions(again.take(4)) == [2, 3, 4, 5]
    assert_ended(again)


def test_starting_twice_is_starting_once(learner: Learner) -> None:
    learner.add_server()
    learner.start()
    learner.start()

    learner.wait_for_groups(4)

    assert learner.prompts.state().cursor == 4


def test_stopping_before_the_start_is_no_error(learner: Learner) -> None:
    learner.collector.stop()

    assert learner.collector.take(1, timeout_seconds=0) is None
