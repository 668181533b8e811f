"""The clipped importance-weighted policy loss: pure functions of tensors."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClipBounds:
    """Where the ratio of policy to behaviour probability stops to matter.

    Attributes:
        low: The ratio is clipped below at 1 - low.
        high: The ratio is clipped above at 1 + high.
        importance_cap: The importance weight is truncated here, whatever the advantage; at least 1 + high.
    """

    low: float
    high: float
    importance_cap: float


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of some tokens and what it did to them.

    Every value is a sum over these tokens divided by the number of tokens of the whole step, so the values of all
    micro-batches of all ranks add up to those of the step.

    Attributes:
        loss: To be minimised.
        clip_share: Share of tokens without a gradient because their ratio has left the clip range.
        truncated_share: Share of tokens whose importance weight was truncated.
        mismatch_kl: Estimate of KL(behaviour, policy), in nats.
    """

    loss: Float[Tensor, ""]
    clip_share: Float[Tensor, ""]
    truncated_share: Float[Tensor, ""]
    mismatch_kl: Float[Tensor, ""]


def clipped_policy_loss(
    policy_logprobs: Float[Tensor, "rows length"],
    behaviour_logprobs: Float[Tensor, "rows length"],
    advantages: Float[Tensor, "rows length"],
    mask: Float[Tensor, "rows length"],
    *,
    bounds: ClipBounds,
    num_tokens: int,
) -> PolicyLoss:
    """PPO's clipped objective on the ratio of policy to behaviour, its importance weight truncated.

    With r = exp(policy_logprob - behaviour_logprob) and A the advantage, a token's loss is

        -min(min(r, importance_cap) A, clip(r, 1 - low, 1 + high) A)

    The cap acts where A < 0, the side on which PPO leaves r unbounded: dual clip. Mismatch KL is the k3 estimator,
    r - 1 - log r, on the untruncated ratio. All is computed in fp32.

    Args:
        policy_logprobs: Of each token under the current weights; gradients flow through these.
        behaviour_logprobs: Of each token under the weights that sampled it.
        advantages: Of each token.
        mask: 1 where a token counts, else 0; whatever the other tensors hold there has no effect.
        bounds: Where the ratio stops to matter.
        num_tokens: Tokens that count in the whole step, over all micro-batches and ranks; at least 1.

    Source: Schulman et al. 2017, arXiv 1707.06347 (clip); Yu et al. 2025, arXiv 2503.14476 (separate bounds, token
    mean); Ye et al. 2020, arXiv 1912.09729 (dual clip); k3: http://joschu.net/blog/kl-approx.html.
    """
    counts = mask > 0
    zero = torch.zeros((), dtype=torch.float32, device=mask.device)
    difference = policy_logprobs.float() - behaviour_logprobs.float()
    log_ratio = torch.where(counts, difference, zero)
    advantage = torch.where(counts, advantages.float(), zero)
    # Truncated before the exponential, which would overflow otherwise: infinity times a zero gradient is NaN.
    weight = log_ratio.clamp(max=math.log(bounds.importance_cap)).exp()
    clipped = weight.clamp(1 - bounds.low, 1 + bounds.high)
    loss = -torch.minimum(weight * advantage, clipped * advantage)
    with torch.no_grad():
        is_clipped = ((advantage > 0) & (weight > 1 + bounds.high)) | ((advantage < 0) & (weight < 1 - bounds.low))
        is_truncated = log_ratio > math.log(bounds.importance_cap)
        # exp(20) is already far beyond any number that one would read.
        kl = log_ratio.clamp(max=20).exp() - 1 - log_ratio
    return PolicyLoss(
        loss=loss.sum() / num_tokens,
        clip_share=is_clipped.float().sum() / num_tokens,
        truncated_share=is_truncated.float().sum() / num_tokens,
        mismatch_kl=kl.sum() / num_tokens,
    )


def max_logprob_difference(
    policy_logprobs: Float[Tensor, "rows length"],
    behaviour_logprobs: Float[Tensor, "rows length"],
    mask: Float[Tensor, "rows length"],
) -> Float[Tensor, ""]:
    """The largest absolute difference over the tokens of a mask; -1 if there are none.

    Over tokens whose whole prefix was sampled under the learner's own version it is what rounding and mistakes alone
    make of the difference between learner and rollout server.
    """
    difference = (policy_logprobs.detach().float() - behaviour_logprobs.float()).abs()
    return torch.where(mask > 0, difference, -torch.ones_like(difference)).max()
