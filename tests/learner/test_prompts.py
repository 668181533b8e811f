"""The prompt order: seeded, endless, and the same over a resume."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.prompts import PromptSource
from runtime.problems.problem import Problem


def source(*, size: int = 7, seed: int = 1) -> PromptSource:
    problems = [Problem(f"problem-{index}", f"prompt {index}", str(index), "sum") for index in range(size)]
    return PromptSource(problems, encode=lambda text: [ord(letter) for letter in text], seed=seed)


def test_an_epoch_has_every_problem_once() -> None:
    prompts = source(size=7)
    epochs = [[prompts.next().problem_id for _ in range(7)] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(f"problem-{index}" for index in range(7))] * 3
    assert epochs[0] != epochs[1]


def test_the_same_seed_gives_the_same_order() -> None:
    first, second, other = source(size=50, seed=3), source(size=50, seed=3), source(size=50, seed=4)
    order = [first.next() for _ in range(100)]
    assert order == [second.next() for _ in range(100)]
    assert order != [other.next() for _ in range(100)]


def test_a_prompt_carries_its_problem() -> None:
    prompt = source(size=1).next()
    assert (prompt.prompt_id, prompt.position, prompt.problem_id) == ("e0-p0", 0, "problem-0")
    assert prompt.token_ids == tuple(ord(letter) for letter in "prompt 0")
    assert prompt.reference_answer == "0"


@pytest.mark.parametrize("position", [0, 5])
def test_only_an_unfinished_position_can_be_done(position: int) -> None:
    prompts = source()
    prompts.mark_done(prompts.next().position)
    with pytest.raises(ValueError, match=f"position = {position}"):
        prompts.mark_done(position)


def test_a_state_of_other_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="num_problems = 7"):
        source(size=8).restore(source(size=7).state())


def test_no_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="problems is empty"):
        source(size=0)


@given(
    size=st.integers(1, 9), events=st.lists(st.sampled_from(["issue", "finish", "resume"]), max_size=60), data=st.data()
)
def test_resumes_neither_skip_nor_repeat(size: int, events: list[str], data: st.DataObject) -> None:
    prompts, done, in_flight = source(size=size), [], []
    for event in events:
        if event == "issue":
            in_flight.append(prompts.next().position)
        elif event == "finish" and in_flight:
            position = in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
            prompts.mark_done(position)
            done.append(position)
        elif event == "resume":
            state = prompts.state()
            prompts = source(size=size)
            prompts.restore(state)
            assert prompts.state() == state
            in_flight.clear()
    assert len(set(done)) == len(done)
    remaining = [position for position in range(len(done) + len(in_flight) + 5) if position not in {*done, *in_flight}]
    assert [prompts.next().position for _ in range(5)] == remaining[:5]


@given(issued=st.integers(0, 20), finished=st.sets(st.integers(0, 19)))
def test_unfinished_prompts_come_first_and_in_order(issued: int, finished: set[int]) -> None:
    prompts = source(size=6)
    first_run = [prompts.next() for _ in range(issued)]
    for position in finished & set(range(issued)):
        prompts.mark_done(position)
    resumed = source(size=6)
    resumed.restore(prompts.state())
    unfinished = [prompt for prompt in first_run if prompt.position not in finished]
    assert [resumed.next() for _ in unfinished] == unfinished
    assert resumed.next().position == issued
