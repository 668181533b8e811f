"""Rank 0 of a run as a whole: real policy, pushes, ledger and checkpoints; rollouts and rewards are scripted."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from learner.assignment import LearnerAssignment
from learner.checkpoint import newest_complete
from learner.policy import Policy
from learner.run import MAX_SKIPPED_STEPS
from learner.train import train
from learner.weight_push import WeightPushError
from protos.learner.v1 import learner_pb2
from runtime.disk import NotWrittenError
from runtime.problems.problem import Problem
from tests.learner.conftest import Holder
from tests.learner.run_stage import (
    NUM_SAMPLES,
    SETTINGS,
    Stage,
    assert_ended,
    assert_equal,
    begin,
    hold,
    make_step,
    num_skipped,
    overflowing,
    versions_committed,
    weights,
)


@pytest.fixture(scope="module")
def first_state(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first_state")
    policy.save_state(folder)
    return folder


@pytest.fixture
def stage(holder: Holder, policy: Policy, first_state: Path, model_folder: Path, tmp_path: Path) -> Iterator[Stage]:
    assignment = LearnerAssignment(
        run_id="run",
        run_folder=tmp_path,
        model_folder=model_folder,
        seed=1,
        settings=SETTINGS,
        problems=tuple(Problem(f"problem-{number}", str(number), "7", "sum") for number in range(50)),
        num_rollout_servers=1,
        num_reward_servers=1,
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield (made := Stage(holder, policy, assignment))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    policy.load_state(first_state)
    assert_ended(made)


def test_a_run_makes_its_steps_and_leaves_checkpoint_and_export(stage: Stage) -> None:
    server, engine = stage.add_server()

    with stage.run(server, num_steps=3, checkpoint_every_steps=2) as run:
        train(run)

    assert stage.steps == [1, 2, 3]
    assert versions_committed(engine) == [0, 1, 2, 3]
    assert_equal(engine.weights, weights(stage.policy))
    assert stage.checkpoints == ["step_2", "step_3"]
    assert stage.exports == ["step_3"]
    assert stage.verdict().trained == 3 * NUM_SAMPLES


def test_a_step_that_is_not_finite_is_dropped_and_leaves_no_trace_but_in_the_accounts(stage: Stage) -> None:
    server, engine = stage.add_server()
    before, skipped_before = weights(stage.policy), num_skipped()

    with stage.run(server) as run:
        begin(run)
        with overflowing(stage.policy):
            make_step(run)

    assert_equal(weights(stage.policy), before)
    assert stage.verdict().dropped["nonfinite_step"] == NUM_SAMPLES
    assert stage.verdict().trained == 0
    assert num_skipped() == skipped_before + 1
    assert versions_committed(engine) == [0]
    assert stage.steps == []
    assert stage.checkpoints == []


def test_ten_steps_in_a_row_that_are_not_finite_end_the_run(stage: Stage) -> None:
    server, _engine = stage.add_server()

    with (
        pytest.raises(RuntimeError, match="10 steps in a row had a loss or gradient that is not finite"),
        overflowing(stage.policy),
        stage.run(server) as run,
    ):
        train(run)

    assert stage.verdict().dropped["nonfinite_step"] == MAX_SKIPPED_STEPS * NUM_SAMPLES


def test_a_good_step_in_between_begins_the_count_anew(stage: Stage) -> None:
    server, engine = stage.add_server()

    with stage.run(server) as run:
        begin(run)
        for _ in range(2):
            with overflowing(stage.policy):
                for _ in range(MAX_SKIPPED_STEPS - 1):
                    make_step(run)
            make_step(run)

    assert stage.verdict().dropped["nonfinite_step"] == 2 * (MAX_SKIPPED_STEPS - 1) * NUM_SAMPLES
    assert stage.steps == [1, 2]
    assert versions_committed(engine) == [0, 1, 2]


def test_a_stopped_run_ends_with_a_checkpoint_and_without_an_export(stage: Stage) -> None:
    server, _engine = stage.add_server()

    with stage.run(server) as run:
        begin(run)
        make_step(run)
        stage.holder.run(stage.stop())

        assert not run.is_going_on

    assert stage.checkpoints == ["step_1"]
    assert stage.exports == []


def test_a_stop_lets_the_step_in_progress_end(stage: Stage) -> None:
    server, _engine = stage.add_server()

    with stage.run(server) as run:
        begin(run)
        groups = run.next_groups()
        assert groups is not None
        stage.holder.run(stage.stop())
        report = run.update(groups)
        run.push()
        run.end_step(groups, report)

        assert stage.checkpoints == ["step_1"]
        assert not run.is_going_on

    assert stage.steps == [1]


def test_a_checkpoint_that_is_asked_for_is_made_once_at_the_end_of_the_step(stage: Stage) -> None:
    server, _engine = stage.add_server()

    with stage.run(server) as run:
        begin(run)
        stage.holder.run(stage.request_checkpoint())
        made = []
        for _ in range(2):
            make_step(run)
            made.append(stage.checkpoints)

    assert made == [["step_1"], ["step_1"]]


def test_a_server_that_registers_in_mid_run_gets_the_weights_at_once_and_then_traffic(stage: Stage) -> None:
    (old, _), (new, engine) = stage.add_server(), stage.add_server()

    async def register_while_groups_are_held() -> None:
        await stage.rewards.asked.acquire()
        await stage.register(learner_pb2.SERVER_KIND_ROLLOUT, new.address)
        await engine.committed.acquire()
        stage.rewards.gate.set()

    with stage.run(old, num_steps=3) as run:
        begin(run)
        groups = run.next_groups()
        assert groups is not None
        report = run.update(groups)
        run.push()
        hold(stage)
        run.end_step(groups, report)
        registering = stage.holder.background.submit(register_while_groups_are_held())
        groups = run.next_groups()
        registering.result(10)
        assert groups is not None

        assert versions_committed(engine) == [1]
        assert_equal(engine.weights, weights(stage.policy))
        # The samples of this step were asked for before it came.
        assert engine.started.locked()
        run.end_step(groups, run.update(groups))
        run.push()
        make_step(run)

        assert not engine.started.locked()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_after_a_failure_the_newest_checkpoint_stays_what_it_is_and_nothing_is_exported(stage: Stage) -> None:
    server, engine = stage.add_server()
    checkpoint: dict[str, bytes] = {}

    def fail_in_the_third_step() -> None:
        with stage.run(server, checkpoint_every_steps=2, fleet_timeout_seconds=0.1) as run:
            begin(run)
            make_step(run)
            make_step(run)
            checkpoint.update(files(stage.folder / "checkpoints"))
            engine.commit_refusal = "not now"
            make_step(run)

    with pytest.raises(WeightPushError, match="policy version 3: there is no rollout server"):
        fail_in_the_third_step()

    assert files(stage.folder / "checkpoints") == checkpoint
    newest = newest_complete(stage.folder)
    assert newest is not None
    assert newest.progress.step == 2
    assert stage.exports == []
    assert stage.select("SELECT end_reason FROM incarnations") == [("failed",)]
    assert stage.verdict().trained == 3 * NUM_SAMPLES


def test_samples_in_flight_are_dropped_when_a_run_fails(stage: Stage) -> None:
    server, _engine = stage.add_server()
    hold(stage)

    def fail_while_rewards_are_awaited() -> None:
        with stage.run(server) as run:
            begin(run)
            stage.holder.run(stage.rewards.asked.acquire())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_rewards_are_awaited()

    assert stage.verdict().dropped == {"run_ended": NUM_SAMPLES}


def test_what_cannot_be_exported_keeps_nothing_else_from_ending(stage: Stage) -> None:
    server, _engine = stage.add_server()
    (stage.folder / "export").write_text("in the way")

    with pytest.raises(NotWrittenError, match="export"), stage.run(server, num_steps=1) as run:
        train(run)

    # The fixture proves that the others have ended.
    assert stage.checkpoints == ["step_1"]
    assert stage.select("SELECT end_reason FROM incarnations") == [("run_ended",)]


def test_a_resumed_run_goes_on_with_the_next_version_and_the_next_prompts(stage: Stage, first_state: Path) -> None:
    server, engine = stage.add_server()
    with stage.run(server, num_steps=2) as run:
        train(run)
    saved = weights(stage.policy)
    stage.policy.load_state(first_state)

    with stage.run(server, num_steps=4, resume=True) as run:
        begin(run)
        assert_equal(engine.weights, saved)
        while run.is_going_on:
            make_step(run)

    assert stage.steps == [1, 2, 3, 4]
    assert versions_committed(engine) == [0, 1, 2, 2, 3, 4]
    trained = stage.select("SELECT DISTINCT step, position FROM sample_ends WHERE end = 'trained'")
    assert sorted(trained) == [(1 + position // 2, position) for position in range(8)]
    assert stage.select("SELECT start_step, end_reason FROM incarnations") == [(0, "run_ended"), (2, "run_ended")]


@pytest.mark.parametrize("ending", [Stage.stop, Stage.terminate])
@pytest.mark.parametrize("place", ["servers", "probe", "groups"])
def test_whoever_waits_ends_at_once_when_the_run_is_to_end(
    stage: Stage, place: str, ending: Callable[[Stage], Any]
) -> None:
    server, engine = stage.add_server()

    async def shut_the_engine() -> None:
        engine.shut(0)

    async def end() -> None:
        if place == "probe":
            await engine.started.acquire()
        if place == "groups":
            await stage.rewards.asked.acquire()
        await ending(stage)

    if place == "probe":
        stage.holder.run(shut_the_engine())
    hold(stage)
    registered = [] if place == "servers" else [server]

    begin_seconds = time.monotonic()
    with stage.run(*registered) as run:
        asked = stage.holder.background.submit(end())
        train(run)
        asked.result(10)

    assert time.monotonic() - begin_seconds < 5
    assert (stage.steps, stage.checkpoints, stage.exports) == ([], [], [])


def test_a_stop_while_no_server_is_left_is_no_failure(stage: Stage) -> None:
    server, engine = stage.add_server()

    with stage.run(server) as run:
        begin(run)
        engine.commit_refusal = "not now"
        groups = run.next_groups()
        assert groups is not None
        report = run.update(groups)
        stage.holder.run(stage.stop())
        run.push()
        run.end_step(groups, report)

    assert stage.steps == [1]
    assert stage.checkpoints == ["step_1"]
