"""Packing loses no token, stays within the budget and is fair to ranks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch import PADDING, MicroBatch, RankShare, pack
from learner.records import Prompt, ScoredGroup, ScoredRollout

VERSION = 7


def rollout(
    sample_id: str, tokens: tuple[int, ...], *, spans: tuple[tuple[int, int], ...] = ((0, 7),)
) -> ScoredRollout:
    logprobs = tuple(-0.25 * (index + 1) for index in range(len(tokens)))
    return ScoredRollout(sample_id, tokens, logprobs, spans, "stop", 1.0, "correct", 0.5 + len(tokens))


def group(position: int, prompt: tuple[int, ...], completions: list[tuple[int, ...]]) -> ScoredGroup:
    rollouts = tuple(rollout(f"g{position}-s{index}", tokens) for index, tokens in enumerate(completions))
    return ScoredGroup(f"g{position}", Prompt(f"e0-p{position}", position, "problem", prompt, "1"), rollouts)


token_lists = st.lists(st.integers(0, 50), min_size=1, max_size=12).map(tuple)
groups_of_prompts = st.lists(
    st.tuples(token_lists, st.lists(token_lists, min_size=2, max_size=4)), min_size=1, max_size=6
).map(lambda raw: [group(index, prompt, completions) for index, (prompt, completions) in enumerate(raw)])


def rows_of(batch: MicroBatch) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], float]]:
    """Prompt, completion, logprobs and advantage of each rollout, read back from the tensors."""
    rows = []
    for row in range(len(batch.input_ids)):
        prompt = tuple(batch.input_ids[row][batch.segments[row] == 0].tolist())
        for segment in range(1, int(batch.segments[row].max()) + 1):
            places = batch.segments[row] == segment
            assert batch.completion_mask[row][places].all()
            completion = tuple(batch.input_ids[row][places].tolist())
            logprobs = tuple(batch.behaviour_logprobs[row][places].tolist())
            rows.append((prompt, completion, logprobs, batch.advantages[row][places][0].item()))
    return rows


def packed(groups: list[ScoredGroup], *, num_ranks: int = 1, budget: int = 64, shared: int = 0) -> list[RankShare]:
    return pack(
        groups,
        num_ranks=num_ranks,
        tokens_per_micro_batch=budget,
        tokens_per_shared_row=shared,
        policy_version=VERSION,
    )


@settings(max_examples=30, deadline=None)
@given(groups_of_prompts, st.integers(1, 4), st.integers(1, 100), st.integers(0, 60))
def test_packing_loses_no_token(groups: list[ScoredGroup], num_ranks: int, budget: int, shared: int) -> None:
    shares = packed(groups, num_ranks=num_ranks, budget=budget, shared=shared)
    rows = [row for share in shares for batch in share.micro_batches for row in rows_of(batch)]
    expected = [
        (one.prompt.token_ids, rolled.token_ids, rolled.behaviour_logprobs, rolled.advantage)
        for one in groups
        for rolled in one.rollouts
    ]
    assert sorted(rows) == sorted(expected)
    assert {share.num_tokens for share in shares} == {sum(len(completion) for _, completion, _, _ in expected)}


@settings(max_examples=30, deadline=None)
@given(groups_of_prompts, st.integers(1, 4), st.integers(1, 100))
def test_micro_batches_fit_and_are_as_many_on_every_rank(
    groups: list[ScoredGroup], num_ranks: int, budget: int
) -> None:
    shares = packed(groups, num_ranks=num_ranks, budget=budget)
    assert len({len(share.micro_batches) for share in shares}) == 1
    for share in shares:
        for batch in share.micro_batches:
            assert batch.input_ids.numel() <= budget or len(batch.input_ids) == 1
            assert not batch.completion_mask[:, : batch.num_prompt_tokens].any()


def test_ranks_get_about_as_many_tokens() -> None:
    groups = [group(index, (1,) * (index + 1), [(2,) * (5 + index), (3,) * 30]) for index in range(10)]
    shares = packed(groups, num_ranks=3, budget=100)
    tokens = [sum(len(p) + len(c) for b in share.micro_batches for p, c, _, _ in rows_of(b)) for share in shares]
    assert max(tokens) - min(tokens) <= 10


def test_a_row_longer_than_the_budget_is_a_micro_batch_by_itself() -> None:
    (share,) = packed([group(0, (1,) * 10, [(2,) * 10, (3,) * 10])], budget=15)
    assert [tuple(batch.input_ids.shape) for batch in share.micro_batches] == [(1, 20), (1, 20)]


def test_a_rank_without_rollouts_gets_an_empty_micro_batch() -> None:
    shares = packed([group(0, (1,), [(2,), (3,)])], num_ranks=3)
    assert shares[2].micro_batches[0].completion_mask.sum() == 0


@settings(max_examples=30, deadline=None)
@given(groups_of_prompts, st.integers(0, 60))
def test_each_token_has_its_place_in_its_own_sequence(groups: list[ScoredGroup], shared: int) -> None:
    for batch in packed(groups, shared=shared)[0].micro_batches:
        for row in range(len(batch.input_ids)):
            segments, sources = batch.segments[row].tolist(), batch.sources[row].tolist()
            prompt_end = segments.count(0)
            for place, segment in enumerate(segments):
                if segment == PADDING:
                    continue
                is_first = place and segments[place - 1] != segment
                assert sources[place] == (prompt_end - 1 if is_first else max(place - 1, 0))
                before = segments[:place].count(segment) + (prompt_end if segment else 0)
                assert batch.position_ids[row, place] == before


def test_a_shared_row_holds_the_prompt_once() -> None:
    (share,) = packed([group(0, (1, 2, 3), [(4, 5), (6,)])], shared=6)
    (batch,) = share.micro_batches
    assert batch.is_shared
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert batch.sources.tolist() == [[0, 0, 1, 2, 3, 2]]
    assert batch.completion_mask.tolist() == [[0, 0, 0, 1, 1, 1]]


def test_completions_that_do_not_fit_into_a_row_begin_another() -> None:
    (share,) = packed([group(0, (1, 2, 3), [(4, 5), (6,)])], shared=5)
    (batch,) = share.micro_batches
    assert not batch.is_shared
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, PADDING]]


def test_on_policy_tokens_end_where_another_version_begins() -> None:
    rollouts = (
        rollout("a", (1, 2, 3, 4), spans=((0, VERSION),)),
        rollout("b", (1, 2, 3, 4), spans=((0, VERSION - 1), (2, VERSION))),
        rollout("c", (1, 2, 3, 4), spans=((0, VERSION), (3, VERSION + 1))),
    )
    (share,) = packed([ScoredGroup("g", Prompt("e0-p0", 0, "problem", (9,), "1"), rollouts)])
    (batch,) = share.micro_batches
    assert batch.on_policy_mask.tolist() == [[0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]]


def test_no_rollouts_are_refused() -> None:
    with pytest.raises(ValueError, match="groups has no rollout"):
        packed([])


def test_a_missing_logprob_is_refused() -> None:
    bad = ScoredRollout("s", (1, 2), (-0.5,), ((0, 0),), "stop", 1.0, "correct", 0.5)
    with pytest.raises(ValueError, match="s has 2 tokens and 1 behaviour logprobs"):
        packed([ScoredGroup("g", Prompt("e0-p0", 0, "problem", (9,), "1"), (bad,))])


def test_groups_without_a_gradient_are_left_out_and_still_count_in_the_mean() -> None:
    (share,) = packed([with_advantage(group(0, (1,), [(5, 6)]), 0.0), group(1, (2,), [(7,), (8,)])])

    assert sorted(completion for batch in share.micro_batches for _, completion, _, _ in rows_of(batch)) == [(7,), (8,)]
    assert (share.num_tokens, share.num_packed_tokens) == (4, 2)


def test_one_group_stands_for_a_step_without_any_gradient() -> None:
    groups = [with_advantage(group(position, (1,), [(5, 6)]), 0.0) for position in range(3)]

    (share,) = packed(groups)

    assert (share.num_tokens, share.num_packed_tokens) == (6, 2)


def with_advantage(one: ScoredGroup, advantage: float) -> ScoredGroup:
    return replace(one, rollouts=tuple(replace(rollout, advantage=advantage) for rollout in one.rollouts))
