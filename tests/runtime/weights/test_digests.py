"""Digests: equal for equal bits, different for any one fault."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.weights.digests import tensor_digest

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 34), st.integers(0, 31))
def test_a_flipped_bit_changes_the_digest(dtype: torch.dtype, element: int, bit: int) -> None:
    tensor = random_tensor(dtype, 5, 7)
    digest = tensor_digest(tensor)
    width = 8 * tensor.element_size()
    mask = 1 << (bit % width)

    words_of(tensor)[element] ^= mask - (1 << width) if mask == 1 << (width - 1) else mask

    assert tensor_digest(tensor) != digest


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 34), st.integers(0, 34))
def test_exchanged_elements_change_the_digest(dtype: torch.dtype, one: int, other: int) -> None:
    tensor = random_tensor(dtype, 5, 7)
    digest = tensor_digest(tensor)
    words = words_of(tensor)
    is_change = bool(words[one] != words[other])

    words[one], words[other] = words[other].clone(), words[one].clone()

    assert (tensor_digest(tensor) != digest) == is_change


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_is_of_the_bits_alone(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 6, 4)

    assert tensor_digest(tensor.clone()) == tensor_digest(tensor)
    assert tensor_digest(tensor.t().contiguous().t()) == tensor_digest(tensor)
    assert tensor_digest(tensor.t()) != tensor_digest(tensor)


def test_zero_and_negative_zero_differ() -> None:
    assert tensor_digest(torch.zeros(3)) != tensor_digest(-torch.zeros(3))


def test_not_a_number_has_a_digest() -> None:
    tensor = torch.full((3,), float("nan"))

    assert tensor_digest(tensor) == tensor_digest(tensor.clone())


def test_an_empty_tensor_has_a_digest() -> None:
    assert tensor_digest(torch.empty(0, 4)) == 0
