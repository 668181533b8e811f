"""A model folder's tokenizer: read it, tell whether two are the same, and know where a completion stops.

The learner and the rollout servers exchange token ids, so both must read text the same way; they compare fingerprints
before the first token. Reading uses the tokenizers library alone, as this is imported by every service.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKEN_FIELDS = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
    "extra_special_tokens",
    "add_bos_token",
    "add_eos_token",
)


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """The text side of a model: text to token ids and back, with no template and no added tokens.

    Attributes:
        beginning: The special token, as text, that the model's own tokenizer puts before a text; empty for none. It is
            not added by `encode`, which reads it where a text begins with it.
    """

    _backend: Tokenizer
    beginning: str = ""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that have a text, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of the text as it stands; no beginning or end token is added."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        r"""Text of the token ids; end, padding and other special tokens leave no trace, `\boxed{` stays."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Read the tokenizer of a model folder.

    Args:
        folder: Holds `tokenizer.json`.

    Raises:
        FileNotFoundError: There is no `tokenizer.json`; slow tokenizers must be converted first.
    """
    path = _tokenizer_path(folder)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return TextTokenizer(tokenizer, beginning=_beginning(tokenizer))


def tokenizer_fingerprint(folder: Path) -> str:
    """Digest of everything that decides how text becomes token ids and where a prompt's template is.

    Covers the tokenizer itself, its special tokens and its chat template, each in a canonical form: the order of keys,
    white space and unrelated settings of the files do not matter.

    Args:
        folder: Holds `tokenizer.json`, and where there are any `tokenizer_config.json`, `special_tokens_map.json` and
            `chat_template.jinja`.

    Returns:
        SHA-256 as 64 hexadecimal digits.

    Raises:
        FileNotFoundError: There is no `tokenizer.json`.
    """
    tokenizer = json.loads(_tokenizer_path(folder).read_text(encoding="utf-8"))
    # How a caller last padded or cut is saved with the tokenizer, and is not a part of it.
    for setting in ("padding", "truncation"):
        tokenizer.pop(setting, None)
    declared = special_tokens(folder)
    content = {
        "tokenizer": tokenizer,
        "special_tokens": {field: declared[field] for field in _SPECIAL_TOKEN_FIELDS if declared.get(field)},
        "chat_template": chat_template(folder),
    }
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def stop_token_ids(folder: Path) -> list[int]:
    """Every token id that ends a completion, ascending.

    Args:
        folder: A model folder; `generation_config.json` counts, or where it names no end token, `config.json`.

    Raises:
        ValueError: Neither file names an end token.
    """
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(folder / name).get("eos_token_id")
        if declared is not None:
            token_ids = declared if isinstance(declared, list) else [declared]
            return sorted({int(token_id) for token_id in token_ids})
    raise ValueError(f"eos_token_id is in neither generation_config.json nor config.json of {folder}")


def special_tokens(folder: Path) -> dict[str, Any]:
    """What a model folder declares of its special tokens, such as "bos_token" or "add_bos_token"; tokens are texts."""
    declared = _read_json(folder / "special_tokens_map.json") | _read_json(folder / _CONFIG)
    return {
        field: _token_text(value) for field, value in declared.items() if field.endswith(("_token", "_special_tokens"))
    }


def chat_template(folder: Path) -> Any:
    """The chat template of a model folder: its text, a list of named ones as older folders have it, or ""."""
    path = folder / "chat_template.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else _read_json(folder / _CONFIG).get("chat_template", "")


def _beginning(tokenizer: Tokenizer) -> str:
    """What the tokenizer's own post-processor puts first, which is what transformers goes by as well."""
    plain = tokenizer.encode("0", add_special_tokens=False).ids
    whole = tokenizer.encode("0").ids
    num_before = next((index for index in range(len(whole)) if plain and whole[index : index + len(plain)] == plain), 0)
    return "".join(str(tokenizer.id_to_token(token_id)) for token_id in whole[:num_before])


def _tokenizer_path(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; save the model's fast tokenizer there")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _token_text(declared: Any) -> Any:
    """The token's text where it is written as an object with settings, which tokenizer.json repeats."""
    if isinstance(declared, dict) and "content" in declared:
        return declared["content"]
    if isinstance(declared, list):
        return [_token_text(token) for token in declared]
    return declared
