"""Tokenizer folders small enough to write in a test."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors


def write_words_tokenizer(
    folder: Path, *, chat_template: Any = None, adds_bos: bool = False, config: dict[str, Any] | None = None
) -> None:
    """Writes a tokenizer of bytes, so that any text is encoded, whose only merge is the word "What ".

    Args:
        folder: Where to; it is there.
        chat_template: Of tokenizer_config.json.
        adds_bos: Its post-processor puts `<s>` before a text.
        config: More of tokenizer_config.json.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("W", "h"), ("Wh", "a"), ("Wha", "t"), ("What", "Ġ")]
    symbols = ["<s>", "</s>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if chat_template is not None:
        content["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(content | (config or {})), encoding="utf-8")
