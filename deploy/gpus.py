"""The GPUs of this machine, as nvidia-smi tells them; no CUDA context is made to find out."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

_SECONDS = 20
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        index: Its number on this machine.
        name: E.g. "NVIDIA H200".
        total_bytes: Its memory.
        free_bytes: What nobody uses at this moment.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that services started here use; none with a torch for the CPU, or without a working nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None or _is_torch_for_cpu():
        return ()
    query = "--query-gpu=index,uuid,name,memory.total,memory.free"
    try:
        answer = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(answer.stdout, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))


def _is_torch_for_cpu() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def parse_gpus(table: str, *, visible: str | None) -> tuple[Gpu, ...]:
    """Reads nvidia-smi's table.

    Args:
        table: Lines of index, UUID, name, total and free memory in MiB.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    gpus = []
    chosen = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    for line in table.splitlines():
        index, uuid, name, total, free = (cell.strip() for cell in line.split(","))
        is_visible = chosen is None or any(index == one or uuid.startswith(one) for one in chosen)
        if is_visible and total.isdigit() and free.isdigit():
            gpus.append(Gpu(int(index), name, int(total) * _MEBIBYTE, int(free) * _MEBIBYTE))
    return tuple(gpus)
