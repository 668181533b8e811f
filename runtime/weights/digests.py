"""Digests of tensors, computed where the tensors are, so that both ends can prove that they hold the same bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

_MIX = 0x9E3779B1
"""An odd constant (2^32 over the golden ratio): multiplying by it permutes the integers modulo 2^64."""


def tensor_digest(tensor: Tensor) -> Tensor:
    """A 64-bit digest of a tensor's bits and their order.

    The bits are read as integers x_i; the digest is sum(x_i * (mix * i + 1)) modulo 2^64. Any single changed element,
    and any exchange of two unequal elements, changes it. It guards against faults, not against an adversary.

    Args:
        tensor: Of a floating-point dtype of 2 or 4 bytes, contiguous, on any device.

    Returns:
        A signed 64-bit integer as an int64 tensor without dimensions, on the tensor's device: nothing waits for a GPU
        here, see `digest_values`.
    """
    words = tensor.detach().reshape(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    weights = torch.arange(words.numel(), device=words.device, dtype=torch.int64).mul_(_MIX).add_(1)
    return torch.dot(words.to(torch.int64), weights) if words.device.type == "cpu" else (words * weights).sum()


def digest_values(digests: Sequence[Tensor]) -> list[int]:
    """The digests as numbers; waits for the device that computes them, once for all."""
    return [int(value) for value in torch.stack(list(digests)).tolist()] if digests else []
