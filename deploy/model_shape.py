"""What a model's config.json says of its size: parameters, and keys and values a token."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of the Llama kind, as far as memory depends on it.

    Attributes:
        num_parameters: Of the whole model; a tied head counts once.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layers.
        num_layers: Blocks.
        vocabulary_size: Rows of the head.
        kv_width: Elements of keys and values of one token in one layer.
        dtype: The checkpoint's numbers, as torch calls them, e.g. "bfloat16".
    """

    num_parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocabulary_size: int
    kv_width: int
    dtype: str


def read_model_shape(folder: Path) -> ModelShape | None:
    """Reads config.json; None if it lacks what such a model says of itself, as other kinds of models do."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        inner, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
        heads = int(config["num_attention_heads"])
    except KeyError:
        return None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * head_size * (heads + kv_heads)
    block = attention + 3 * hidden * inner + 2 * hidden
    num_heads_of_vocabulary = 1 if config.get("tie_word_embeddings", False) else 2
    return ModelShape(
        num_parameters=num_heads_of_vocabulary * vocabulary * hidden + layers * block + hidden,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        vocabulary_size=vocabulary,
        kv_width=2 * kv_heads * head_size,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )
