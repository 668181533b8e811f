"""The weights as a folder that transformers and vLLM load."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_WEIGHT_INDEXES = "*.index.json"


def write_export(run_folder: Path, parameters: Iterable[tuple[str, Tensor]], *, step: int, model_folder: Path) -> Path:
    """Writes `export/step_N`: the weights, and configuration and tokenizer as the model's folder has them.

    Args:
        run_folder: Of the run.
        parameters: Name and whole tensor, tied ones once; a tensor need not outlive the next one.
        step: Number of the folder.
        model_folder: What the run began with.

    Returns:
        The folder, which appears whole or not at all; an older one of the same step is replaced.

    Raises:
        OSError, SafetensorError: It could not be written; nothing of it is left.
    """
    folder = run_folder / "export" / f"step_{step}"
    part = folder.with_name(folder.name + ".part")
    # To be copied at once: a gathered tensor is gone when the next one is asked for.
    weights = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in parameters}
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for file in model_folder.iterdir():
            if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and not file.match(_WEIGHT_INDEXES):
                shutil.copyfile(file, part / file.name)
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except (OSError, SafetensorError):
        shutil.rmtree(part, ignore_errors=True)
        raise
    return folder
