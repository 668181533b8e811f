r"""The tokenizer of the tiny model: one token a word of the arithmetic problems, one a number, one for `\boxed{`.

A byte-level BPE in Qwen2's own form, because `AutoTokenizer` reads text by Qwen2's rules wherever config.json says
"qwen2", whatever tokenizer.json says. Any other text is encoded too, byte by byte.
"""

import re
from pathlib import Path

from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from runtime.problems.arithmetic import KINDS, NAMES, THINGS

PAD_TOKEN = "<pad>"
END_TOKEN = "<eos>"
ANSWER_OPENING = r"\boxed{"
ANSWER_CLOSING = "}"
NUMBERS = range(100)


def save_tiny_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write the tokenizer as an ordinary folder that `AutoTokenizer` and vLLM load.

    Args:
        folder: An existing folder.

    Returns:
        The tokenizer that was written.
    """
    merges = _merges()
    symbols = (PAD_TOKEN, END_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges))
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(symbols)},
        merges=merges,
        unk_token=END_TOKEN,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    # Qwen2's rules part a number's digits and the space before it; whole tokens are found before the rules are used.
    # The word before a number takes the space, so that a number is the same token in a prompt and in an answer.
    whole = (ANSWER_OPENING, *map(str, NUMBERS), *_words_before_numbers())
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole])
    tokenizer.save_pretrained(folder)
    return tokenizer


def _merges() -> list[tuple[str, str]]:
    """Join each word from its beginning, a letter at a time.

    Every pair begins with a capital or a space, so no pair can match inside a word and the order does not matter.
    """
    to_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    merges: dict[tuple[str, str], None] = {}
    for word in sorted(_words()):
        symbols = to_symbols(word)[0][0]
        merges |= {(symbols[:length], symbols[length]): None for length in range(1, len(symbols))}
    return list(merges)


def _words() -> set[str]:
    words = set(NAMES) | {f" {things}" for things in THINGS}
    for kind in KINDS:
        plain = kind.wording.format(name="", things="", a="", b="", c="")
        words |= {f" {word}" for word in plain.translate(_NO_PUNCTUATION).split()}
    return words


def _words_before_numbers() -> list[str]:
    return sorted({word for kind in KINDS for word in re.findall(r" [a-z]+ (?=\{[abc]\})", kind.wording)})


_NO_PUNCTUATION = str.maketrans("", "", ".,:?")
