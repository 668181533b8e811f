"""Groups to micro-batches of tensors: within a token budget, balanced over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from learner.records import ScoredGroup, ScoredRollout

PADDING = -1
"""Segment of a place that holds no token."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass: a prompt, one or more of its completions, then padding on the right.

    Completions that share a row share the computation of their prompt; each sees the prompt and itself. Everything
    per token stands at the token's own place. What is padding is told by place, never by id, for a policy can sample
    the padding token.

    Attributes:
        num_prompt_tokens: Tokens of the shortest prompt; no row has a completion token before this place.
        input_ids: Token ids; 0 on padding.
        position_ids: Of each token within its own prompt and completion; 0 on padding.
        segments: 0 on a prompt, 1, 2, ... on its completions, PADDING elsewhere.
        sources: The place whose output predicts the token: one before, or the end of the prompt.
        completion_mask: 1 on completion tokens, else 0.
        on_policy_mask: 1 on completion tokens that, like all before them, the learner's own version sampled.
        behaviour_logprobs: 0 outside of completions, like the advantages.
        advantages: Of each token.
    """

    num_prompt_tokens: int
    input_ids: Int64[Tensor, "rows length"]
    position_ids: Int64[Tensor, "rows length"]
    segments: Int64[Tensor, "rows length"]
    sources: Int64[Tensor, "rows length"]
    completion_mask: Float[Tensor, "rows length"]
    on_policy_mask: Float[Tensor, "rows length"]
    behaviour_logprobs: Float[Tensor, "rows length"]
    advantages: Float[Tensor, "rows length"]

    @property
    def is_shared(self) -> bool:
        """Whether any row holds more than one completion; if none does, plain causal attention is right."""
        return bool((self.segments > 1).any())


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank computes in one optimizer step.

    Attributes:
        num_tokens: Completion tokens of the whole step over all ranks: what the token mean divides by.
        num_packed_tokens: Those of them that are in some rank's micro-batches.
        micro_batches: As many on every rank.
    """

    num_tokens: int
    num_packed_tokens: int
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: tuple[int, ...]
    rollouts: tuple[ScoredRollout, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(len(rollout.token_ids) for rollout in self.rollouts)


def pack(
    groups: Sequence[ScoredGroup],
    *,
    num_ranks: int,
    tokens_per_micro_batch: int,
    tokens_per_shared_row: int,
    policy_version: int,
) -> list[RankShare]:
    """Spreads the rollouts of one step over ranks and micro-batches.

    Rows go to ranks longest first, each to the rank with the fewest tokens. Within a rank rows of like length share a
    micro-batch, so that little is padded. Groups whose advantages are all zero have no gradient and are left out; they
    count in the token mean all the same.

    Args:
        groups: At least one rollout in all; no prompt is empty.
        num_ranks: How many shares to make.
        tokens_per_micro_batch: Most tokens of a micro-batch, padding included; a longer row is one by itself.
        tokens_per_shared_row: Completions of a group share a row while it is no longer than this; 0 is never.
        policy_version: The learner's, for `on_policy_mask`.

    Returns:
        One share per rank; short ones end with empty micro-batches, which count for nothing.

    Raises:
        ValueError: There is no rollout, or a rollout has no token or another number of logprobs.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise ValueError("groups has no rollout: must have at least 1")
    for rollout in rollouts:
        _check(rollout)
    # Without any gradient the optimizer steps by its momentum alone; one group stands for all.
    packed = [group for group in groups if any(rollout.advantage for rollout in group.rollouts)] or groups[:1]
    rows = [row for group in packed for row in _rows(group, tokens_per_shared_row)]
    rows_of_ranks: list[list[_Row]] = [[] for _ in range(num_ranks)]
    tokens_of_ranks = [0] * num_ranks
    for row in sorted(rows, key=attrgetter("length"), reverse=True):
        rank = tokens_of_ranks.index(min(tokens_of_ranks))
        rows_of_ranks[rank].append(row)
        tokens_of_ranks[rank] += row.length
    plans = [_cut(rows_of_rank, tokens_per_micro_batch) for rows_of_rank in rows_of_ranks]
    num_micro_batches = max(len(plan) for plan in plans)
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    num_packed_tokens = sum(len(rollout.token_ids) for group in packed for rollout in group.rollouts)
    return [
        RankShare(
            num_tokens,
            num_packed_tokens,
            tuple(
                _micro_batch(plan[index], policy_version) if index < len(plan) else _empty_micro_batch()
                for index in range(num_micro_batches)
            ),
        )
        for plan in plans
    ]


def _check(rollout: ScoredRollout) -> None:
    num_tokens, num_logprobs = len(rollout.token_ids), len(rollout.behaviour_logprobs)
    if num_tokens == 0 or num_tokens != num_logprobs:
        raise ValueError(
            f"{rollout.sample_id} has {num_tokens} tokens and {num_logprobs} behaviour logprobs: "
            "must have one logprob for each of at least 1 token"
        )


def _rows(group: ScoredGroup, limit: int) -> list[_Row]:
    """Fills rows with the group's completions, longest first, up to the limit; one completion may exceed it."""
    rows: list[_Row] = []
    for rollout in sorted(group.rollouts, key=lambda rollout: len(rollout.token_ids), reverse=True):
        if rows and rows[-1].length + len(rollout.token_ids) <= limit:
            rows[-1] = _Row(rows[-1].prompt, (*rows[-1].rollouts, rollout))
        else:
            rows.append(_Row(group.prompt.token_ids, (rollout,)))
    return rows


def _cut(rows: Sequence[_Row], budget: int) -> list[list[_Row]]:
    """Cuts rows, longest first, into runs whose padded size is within the budget."""
    cuts: list[list[_Row]] = []
    for row in rows:
        if cuts and (len(cuts[-1]) + 1) * cuts[-1][0].length <= budget:
            cuts[-1].append(row)
        else:
            cuts.append([row])
    return cuts


def _micro_batch(rows: Sequence[_Row], policy_version: int) -> MicroBatch:
    shape = (len(rows), max(row.length for row in rows))
    integers = torch.zeros((4, *shape), dtype=torch.int64)
    floats = torch.zeros((4, *shape), dtype=torch.float32)
    integers[2] = PADDING
    for index, row in enumerate(rows):
        columns = _columns(row, policy_version)
        integers[:, index, : row.length] = torch.tensor(columns[:4], dtype=torch.int64)
        floats[:, index, : row.length] = torch.tensor(columns[4:], dtype=torch.float32)
    return MicroBatch(min(len(row.prompt) for row in rows), *integers, *floats)


def _columns(row: _Row, policy_version: int) -> list[list[int] | list[float]]:
    """The values of one row, in the order of MicroBatch's tensors."""
    begin = len(row.prompt)
    ids, positions, segments, sources = [*row.prompt], [*range(begin)], [0] * begin, [0, *range(begin - 1)]
    mask, on_policy, logprobs, advantages = ([0.0] * begin for _ in range(4))
    for segment, rollout in enumerate(row.rollouts, start=1):
        place, size = len(ids), len(rollout.token_ids)
        num_on_policy = _num_on_policy_tokens(rollout, policy_version)
        ids += rollout.token_ids
        positions += range(begin, begin + size)
        segments += [segment] * size
        sources += [begin - 1, *range(place, place + size - 1)]
        mask += [1.0] * size
        on_policy += [1.0] * num_on_policy + [0.0] * (size - num_on_policy)
        logprobs += rollout.behaviour_logprobs
        advantages += [rollout.advantage] * size
    return [ids, positions, segments, sources, mask, on_policy, logprobs, advantages]


def _empty_micro_batch() -> MicroBatch:
    integers = torch.zeros((4, 1, 2), dtype=torch.int64)
    return MicroBatch(1, *integers, *torch.zeros((4, 1, 2), dtype=torch.float32))


def _num_on_policy_tokens(rollout: ScoredRollout, policy_version: int) -> int:
    for first_token, version in rollout.version_spans:
        if version != policy_version:
            return first_token
    return len(rollout.token_ids)
