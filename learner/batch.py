"""Groups to micro-batches of tensors: within a token budget, balanced over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from learner.records import ScoredGroup, ScoredRollout


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass: prompt, completion, then padding on the right.

    Everything per token stands at the token's own place. Padding needs no attention mask: in a causal model no token
    sees what comes after it. What counts is told by length, never by id, for a policy can sample the padding token.

    Attributes:
        num_prompt_tokens: Tokens of the shortest prompt; no row has a completion token before this place.
        input_ids: Token ids; 0 on padding.
        completion_mask: 1 on completion tokens, else 0.
        on_policy_mask: 1 on completion tokens that, like all before them, the learner's own version sampled.
        behaviour_logprobs: 0 outside of completions, like the advantages.
        advantages: Of each token.
    """

    num_prompt_tokens: int
    input_ids: Int64[Tensor, "rows length"]
    completion_mask: Float[Tensor, "rows length"]
    on_policy_mask: Float[Tensor, "rows length"]
    behaviour_logprobs: Float[Tensor, "rows length"]
    advantages: Float[Tensor, "rows length"]


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank computes in one optimizer step.

    Attributes:
        num_tokens: Completion tokens of the whole step over all ranks: what the token mean divides by.
        micro_batches: As many on every rank.
    """

    num_tokens: int
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: tuple[int, ...]
    rollout: ScoredRollout

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.rollout.token_ids)


def pack(
    groups: Sequence[ScoredGroup], *, num_ranks: int, tokens_per_micro_batch: int, policy_version: int
) -> list[RankShare]:
    """Spreads the rollouts of one step over ranks and micro-batches.

    Rollouts go to ranks longest first, each to the rank with the fewest tokens. Within a rank rows of like length
    share a micro-batch, so that little is padded.

    Args:
        groups: At least one rollout in all.
        num_ranks: How many shares to make.
        tokens_per_micro_batch: Most tokens of a micro-batch, padding included; a longer row is one by itself.
        policy_version: The learner's, for `on_policy_mask`.

    Returns:
        One share per rank; short ones end with empty micro-batches, which count for nothing.

    Raises:
        ValueError: There is no rollout, or a rollout has no token or another number of logprobs.
    """
    rows = [_Row(group.prompt.token_ids, rollout) for group in groups for rollout in group.rollouts]
    if not rows:
        raise ValueError("groups has no rollout: must have at least 1")
    for row in rows:
        _check(row.rollout)
    rows_of_ranks: list[list[_Row]] = [[] for _ in range(num_ranks)]
    tokens_of_ranks = [0] * num_ranks
    for row in sorted(rows, key=attrgetter("length"), reverse=True):
        rank = tokens_of_ranks.index(min(tokens_of_ranks))
        rows_of_ranks[rank].append(row)
        tokens_of_ranks[rank] += row.length
    plans = [_cut(rows_of_rank, tokens_per_micro_batch) for rows_of_rank in rows_of_ranks]
    num_micro_batches = max(len(plan) for plan in plans)
    num_tokens = sum(len(row.rollout.token_ids) for row in rows)
    return [
        RankShare(
            num_tokens,
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
    length = max(row.length for row in rows)
    input_ids: list[tuple[int, ...]] = []
    floats: list[list[tuple[float, ...]]] = [[], [], [], []]
    for row in rows:
        rollout, size = row.rollout, len(row.rollout.token_ids)
        before, after = len(row.prompt), length - row.length
        on_policy = _num_on_policy_tokens(rollout, policy_version)
        input_ids.append((*row.prompt, *rollout.token_ids, *(0,) * after))
        for column, values in zip(
            floats,
            (
                (1.0,) * size,
                (1.0,) * on_policy + (0.0,) * (size - on_policy),
                rollout.behaviour_logprobs,
                (rollout.advantage,) * size,
            ),
            strict=True,
        ):
            column.append((0.0,) * before + values + (0.0,) * after)
    return MicroBatch(
        min(len(row.prompt) for row in rows),
        torch.tensor(input_ids, dtype=torch.int64),
        *(torch.tensor(column, dtype=torch.float32) for column in floats),
    )


def _empty_micro_batch() -> MicroBatch:
    nothing = torch.zeros((1, 2), dtype=torch.float32)
    return MicroBatch(1, torch.zeros((1, 2), dtype=torch.int64), nothing, nothing, nothing, nothing)


def _num_on_policy_tokens(rollout: ScoredRollout, policy_version: int) -> int:
    for first_token, version in rollout.version_spans:
        if version != policy_version:
            return first_token
    return len(rollout.token_ids)
