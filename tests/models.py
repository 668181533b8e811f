"""Model folders small enough to make in a test: a random Qwen2 with the tokenizer of the tiny model."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from deploy.tiny_tokenizer import save_tiny_tokenizer


def save_tiny_qwen2(folder: Path, *, seed: int = 0) -> Qwen2ForCausalLM:
    """Writes a folder that transformers and vLLM load, and returns the model: 0.3 M parameters, tied head, float32."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tiny_tokenizer(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Wide enough that two seeds are two very different models, and narrow enough that every token has its chance.
        initializer_range=0.08,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model
