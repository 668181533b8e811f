"""The tiny model of the default run: made on the spot, warmed up, and kept for the next time."""

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from deploy.heavy_imports import heavy_imports
from deploy.tiny_settings import TinyModelSettings
from deploy.torchvision_check import check_torchvision

# Raise it when the problems, the tokenizer, the shape or the warm-up change: it names the cached folder.
GENERATOR_VERSION = 3
_DEFAULT_SETTINGS = TinyModelSettings()


def ensure_tiny_model(
    *,
    cache_folder: Path,
    seed: int,
    settings: TinyModelSettings = _DEFAULT_SETTINGS,
    console: Console | None = None,
) -> Path:
    """Return the folder of the tiny model, making it first where it is not there yet.

    It holds 1.2 M parameters in fp32 with a tied head, in the Qwen2 shape, and loads in transformers and vLLM. The
    warm-up never sees what `arithmetic_problems` of the same seed holds out.

    Args:
        cache_folder: Where models are kept; made if missing. The model's folder appears in it complete or not at all.
        seed: Of the weights, of the warm-up and of its problems.
        settings: Shape and warm-up.
        console: Where progress goes: a bar on a terminal, plain lines elsewhere. The standard output if None.

    Returns:
        The model's folder, named by seed, settings and generator version.
    """
    folder = cache_folder / f"tiny-{seed}-{_key(settings, seed=seed)}"
    if folder.is_dir():
        return folder
    with heavy_imports():
        check_torchvision()
        from deploy.tiny_making import make_tiny_model

    cache_folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".tiny-", dir=cache_folder))
    try:
        make_tiny_model(unfinished, settings=settings, seed=seed, console=console or Console())
        unfinished.chmod(0o755)
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _key(settings: TinyModelSettings, *, seed: int) -> str:
    content = {"version": GENERATOR_VERSION, "seed": seed, "settings": asdict(settings)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        # Another process made the same model meanwhile; any other reason is an error.
        if not folder.is_dir():
            raise
