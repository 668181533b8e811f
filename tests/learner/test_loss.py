"""The policy loss: value by hand, gradient by finite differences, diagnostics, no NaN."""

import math

import pytest
import torch

from learner.loss import ClipBounds, PolicyLoss, clipped_policy_loss, max_logprob_difference

BOUNDS = ClipBounds(low=0.2, high=0.3, importance_cap=2.0)


def loss_of(ratios: list[float], advantages: list[float], *, num_tokens: int | None = None) -> PolicyLoss:
    ratio = torch.tensor([ratios])
    return clipped_policy_loss(
        ratio.log() - 1.0,
        torch.full_like(ratio, -1.0),
        torch.tensor([advantages]),
        torch.ones_like(ratio),
        bounds=BOUNDS,
        num_tokens=num_tokens or len(ratios),
    )


def gradient(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.6),
        (0.5, 2.0, -1.0),
        (0.5, -2.0, 1.6),
        (1.5, -2.0, 3.0),
        (5.0, -2.0, 4.0),
    ],
)
def test_the_loss_of_one_token(ratio: float, advantage: float, loss: float) -> None:
    assert loss_of([ratio], [advantage]).loss.item() == pytest.approx(loss)


def test_the_loss_is_the_mean_over_the_tokens_of_the_whole_step() -> None:
    assert loss_of([1.0, 1.0], [1.0, 2.0], num_tokens=10).loss.item() == pytest.approx(-0.3)


def test_masked_tokens_count_for_nothing_even_if_they_are_not_finite() -> None:
    policy = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    behaviour, advantages = torch.tensor([[-1.0, -math.inf]]), torch.tensor([[1.0, math.nan]])
    mask = torch.tensor([[1.0, 0.0]])
    result = clipped_policy_loss(policy, behaviour, advantages, mask, bounds=BOUNDS, num_tokens=1)
    assert (result.loss.item(), result.clip_share.item(), result.mismatch_kl.item()) == (-1.0, 0.0, 0.0)
    assert gradient(result.loss, policy).tolist() == [[-1.0, 0.0]]


def test_shares_and_mismatch() -> None:
    result = loss_of([1.5, 0.5, 3.0, 1.0], [1.0, -1.0, -1.0, 1.0])
    assert result.clip_share.item() == 0.5
    assert result.truncated_share.item() == 0.25
    kl = sum(ratio - 1 - math.log(ratio) for ratio in (1.5, 0.5, 3.0, 1.0)) / 4
    assert result.mismatch_kl.item() == pytest.approx(kl, rel=1e-5)


def test_a_huge_ratio_gives_a_finite_gradient() -> None:
    policy = torch.tensor([[0.0, 0.0]], requires_grad=True)
    behaviour = torch.tensor([[-500.0, -500.0]])
    result = clipped_policy_loss(
        policy, behaviour, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2), bounds=BOUNDS, num_tokens=2
    )
    assert gradient(result.loss, policy).tolist() == [[0.0, 0.0]]
    assert math.isfinite(result.mismatch_kl.item())


def test_the_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    policy = -torch.rand(4, 50, generator=generator)
    behaviour = policy + 0.4 * torch.randn(4, 50, generator=generator)
    advantages = torch.randn(4, 50, generator=generator)
    mask = (torch.rand(4, 50, generator=generator) > 0.2).float()

    def loss(logprobs: torch.Tensor) -> PolicyLoss:
        return clipped_policy_loss(logprobs, behaviour, advantages, mask, bounds=BOUNDS, num_tokens=1)

    leaf = policy.clone().requires_grad_()
    slopes = gradient(loss(leaf).loss, leaf)
    step = 1e-3
    for row, place in torch.cartesian_prod(torch.arange(4), torch.arange(50)).tolist():
        offset = torch.zeros_like(policy)
        offset[row, place] = step
        # A token's loss alone keeps the rounding of the sum out of the difference.
        one = torch.zeros_like(mask)
        one[row, place] = mask[row, place]
        sides = [
            clipped_policy_loss(policy + sign * offset, behaviour, advantages, one, bounds=BOUNDS, num_tokens=1).loss
            for sign in (1, -1)
        ]
        ratio = (policy - behaviour)[row, place].exp().item()
        if min(abs(ratio - kink) for kink in (0.8, 1.3, 2.0)) < 3e-3:
            continue
        assert slopes[row, place].item() == pytest.approx(((sides[0] - sides[1]) / (2 * step)).item(), abs=2e-3)


def test_the_largest_difference_is_over_the_mask_alone() -> None:
    policy, behaviour = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -2.0, -9.0]])
    assert max_logprob_difference(policy, behaviour, torch.tensor([[1.0, 1.0, 0.0]])).item() == 0.5
    assert max_logprob_difference(policy, behaviour, torch.zeros(1, 3)).item() == -1.0
