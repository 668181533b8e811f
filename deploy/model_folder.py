"""Whether a folder holds a model that can be trained: looked at in a moment, before services start."""

import json
from pathlib import Path
from typing import Any

from deploy.errors import UserError
from runtime.problems.tokenizer import stop_token_ids

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

# Of transformers' names for models that continue a text; the second is GPT-2's.
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_LFS_POINTER = b"version https://git-lfs.github.com"
_LARGEST_HEADER = 100_000_000
"""Bytes; the bound of the safetensors library."""
_SAVE_AGAIN = "load it with transformers and save it again with save_pretrained"


def check_model_folder(folder: Path, *, is_trained: bool = True) -> None:
    """Looks for everything that servers and learner need: configuration, whole weights, tokenizer, end token.

    Qwen2, Qwen3 and Llama are tested; another causal language model is let through, and transformers and vLLM decide.

    Args:
        folder: Of the model.
        is_trained: Whether it is to be trained, which quantised weights cannot.

    Raises:
        UserError: What is missing or broken, in which file, and what to do about it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder")
    if not (folder / CONFIG_FILE).is_file():
        hint = ""
        if (folder / "adapter_config.json").is_file():
            hint = "; it is an adapter: merge it into the model that it belongs to, and save that"
        raise UserError(f"{folder}: is no model folder, it has no {CONFIG_FILE}{hint}")
    _check_config(folder / CONFIG_FILE, is_trained=is_trained)
    _check_weights(folder)
    _check_tokenizer(folder)


def check_context_length(folder: Path, context_length: int) -> None:
    """Compares the setting with the positions that the model knows.

    Args:
        folder: That passes `check_model_folder`.
        context_length: As `rollout.context_length` has it, in tokens.

    Raises:
        UserError: The model knows fewer positions.
    """
    path = folder / CONFIG_FILE
    limit = _max_positions(_read_json(path))
    if limit is not None and context_length > limit:
        raise UserError(
            f"rollout.context_length = {context_length}: must be at most {limit}, the max_position_embeddings of {path}"
        )


def _max_positions(config: dict[str, Any]) -> int | None:
    """As vLLM counts them; None if the configuration does not say."""
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "llama3", "longrope", "su"):
        # These have the stretched length in the configuration already.
        return limit
    if kind == "yarn":
        limit = rope.get("original_max_position_embeddings", limit)
    return int(limit * rope.get("factor", 1.0))


def _check_config(path: Path, *, is_trained: bool) -> None:
    config = _read_json(path)
    architectures = config.get("architectures") or []
    if not any(str(name).endswith(_CAUSAL_SUFFIXES) for name in architectures):
        named = ", ".join(map(str, architectures)) or "none"
        raise UserError(
            f"{path}: architectures = {named}: is no causal language model; name one such as "
            "Qwen2ForCausalLM, Qwen3ForCausalLM or LlamaForCausalLM"
        )
    if is_trained and "quantization_config" in config:
        raise UserError(
            f"{path}: quantization_config: quantised weights cannot be trained; take the checkpoint they were made from"
        )


def _check_weights(folder: Path) -> None:
    names = set()
    if (folder / WEIGHTS_INDEX).is_file():
        names |= _shards(folder / WEIGHTS_INDEX)
    if not names or (folder / WEIGHTS_FILE).is_file():
        names.add(WEIGHTS_FILE)
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        if names == {WEIGHTS_FILE}:
            raise UserError(f"{folder}: {_without_safetensors(folder)}")
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{folder / missing[0]}: is missing{more}, and {WEIGHTS_INDEX} names it; fetch the model again")
    for name in sorted(names):
        _check_safetensors(folder / name)


def _shards(index: Path) -> set[str]:
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UserError(f"{index}: has no weight_map; fetch the model again")
    return {str(name) for name in names.values()}


def _without_safetensors(folder: Path) -> str:
    for pattern in ("pytorch_model*.bin", "*.pth", "*.gguf"):
        for found in sorted(folder.glob(pattern)):
            return f"has {found.name} and no {WEIGHTS_FILE}; {_SAVE_AGAIN}"
    return f"has no weights: neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX}; fetch the model again"


def _check_safetensors(path: Path) -> None:
    """Compares the file's length with what its header says: a download that broke off is shorter.

    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    size = path.stat().st_size
    _refuse_lfs_pointer(path)
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= header_size <= _LARGEST_HEADER:
            raise UserError(f"{path}: is no safetensors file; fetch it again")
        header = file.read(header_size)
    if len(header) < header_size:
        raise UserError(f"{path}: is cut short within its header; fetch it again")
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no safetensors file; fetch it again") from error
    expected = 8 + header_size + max(ends, default=0)
    if size < expected:
        raise UserError(f"{path}: is cut short: {size:,} of {expected:,} bytes; fetch it again")


def _check_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{folder}: has no tokenizer.json; save the fast tokenizer there: "
            "AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER)"
        )
    _read_json(path)
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            _read_json(folder / name)
    try:
        stop_token_ids(folder)
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder}: names no end token; write its eos_token_id into generation_config.json") from error


def _read_json(path: Path) -> dict[str, Any]:
    _refuse_lfs_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: is no JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: is no JSON object; fetch it again")
    return content


def _refuse_lfs_pointer(path: Path) -> None:
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if is_pointer:
        raise UserError(f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")
