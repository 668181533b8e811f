"""Model folders small enough to make in a test: random weights of several families, the tokenizer of the tiny model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deploy.tiny_tokenizer import save_tiny_tokenizer

_FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A family, and whether its head is the embedding."""

    family: str
    is_tied: bool

    def __str__(self) -> str:
        return f"{self.family}-{'tied' if self.is_tied else 'untied'}"


SHAPES = tuple(Shape(family, is_tied) for family in _FAMILIES for is_tied in (True, False))


def save_tiny_qwen2(folder: Path, *, seed: int = 0) -> Qwen2ForCausalLM:
    """Writes a folder that transformers and vLLM load, and returns the model: 0.3 M parameters, tied head, float32."""
    return save_tiny_model(folder, Shape("qwen2", is_tied=True), seed=seed)


def save_tiny_model(folder: Path, shape: Shape, *, seed: int = 0) -> Any:
    """Writes a folder that transformers and vLLM load, and returns the model: some 0.3 M parameters, float32."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tiny_tokenizer(folder)
    make_config, make_model = _FAMILIES[shape.family]
    config = make_config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Qwen3 has 128 whatever the width; 32 is the smallest that vLLM's CPU attention has.
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=shape.is_tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Wide enough that two seeds are two very different models, and narrow enough that every token has its chance.
        initializer_range=0.08,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Fresh models begin with norms of 1 and biases of 0, which would hide one that goes missing.
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                assert parameter.dtype == torch.float32, name
    model.save_pretrained(folder)
    return model
