"""What `make install` looks at before it installs: the machine, its Python and its GPUs.

The system's own python3 runs this file, so it uses the standard library alone, and loads on any Python from 3.8 on.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CPU, CUDA = "cpu", "cuda"
"""What the packages are installed for; the names of the lists under requirements/."""
PYTHONS = ((3, 12), (3, 11))
"""Supported Python versions, the preferred one first."""
MIN_MEMORY_BYTES = 6 * 10**9
MIN_DISK_BYTES = {CPU: 5 * 10**9, CUDA: 12 * 10**9}
"""3.5 GB installed for a CPU and 6.5 for CUDA, and pip's unpacking and download cache beside it."""
MIN_DISK_BYTES_LATER = 10**9
"""Once the large packages are there."""
MIN_GLIBC = (2, 28)
"""What the wheels of torch and vLLM are built for (manylinux_2_28)."""
MIN_DRIVER = (580,)
"""The first NVIDIA driver that runs CUDA 13, which the wheels of torch 2.11.0 and vLLM 0.26.0 are built for."""
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_NVIDIA_SMI_SECONDS = 60.0
_OTHERWISE = "installing for the CPU"


@dataclass(frozen=True)
class Machine:
    """What the preflight looks at, as this machine has it."""

    system: str
    """As `platform.system()` says it: "Linux"."""
    architecture: str
    """As `platform.machine()` says it: "x86_64"."""
    glibc: tuple[int, ...] | None
    """Version of the C library; None where it is another one, e.g. musl."""
    cpu_flags: frozenset[str]
    python: tuple[int, int]
    has_ensurepip: bool
    """Debian and Ubuntu keep it in a package of its own; without it a venv has no pip."""
    memory_bytes: int
    """The machine's, or its container's limit where that is smaller."""
    disk_free_bytes: int


@dataclass(frozen=True)
class SmiAnswer:
    """How nvidia-smi answered the question for the GPUs and their driver."""

    status: int
    text: str
    """Standard output and error: "NVIDIA H200, 580.159.04", a line for each GPU, or what is wrong."""


@dataclass(frozen=True)
class DeviceChoice:
    """What to install for, and why."""

    device: str
    """CPU or CUDA."""
    reason: str
    """One line for the user; empty where there is nothing to say."""


def choose_device(asked: str, answer: SmiAnswer | None) -> DeviceChoice:
    """Decides what to install for.

    Args:
        asked: CPU or CUDA, which is what is installed; or `auto`: CUDA where there is a GPU with a driver for it.
        answer: What nvidia-smi said; None where there is none.
    """
    found = [] if answer is None or answer.status else re.findall(r"^(.+), (\d+(?:\.\d+)*)$", answer.text, re.MULTILINE)
    if asked == CPU:
        return DeviceChoice(CPU, "")
    if found:
        name, driver = found[0]
        gpus = f"{name if len(found) == 1 else f'{len(found)} x {name}'}, driver {driver}"
        if _version(driver) >= MIN_DRIVER:
            return DeviceChoice(CUDA, f"{gpus}: installing for CUDA 13")
        if asked == CUDA:
            return DeviceChoice(
                CUDA, f"{gpus}: installing for CUDA 13, which runs with driver {MIN_DRIVER[0]} or newer"
            )
        cure = f"CUDA 13 needs driver {MIN_DRIVER[0]} or newer; update it and run this again"
        return DeviceChoice(CPU, f"{gpus}: {_OTHERWISE}, as {cure}")
    if asked == CUDA:
        return DeviceChoice(CUDA, "no GPU found here: installing for CUDA 13 as asked")
    if answer is None or "no devices" in answer.text.lower():
        return DeviceChoice(CPU, "")
    said = " ".join(answer.text.split())[:200].rstrip(". ") or f"exit status {answer.status}"
    cure = "mend the NVIDIA driver and run this again, or choose with make install DEVICE=cpu or DEVICE=cuda"
    return DeviceChoice(CPU, f"nvidia-smi finds no GPU ({said}): {_OTHERWISE}; {cure}")


def ask_nvidia_smi() -> SmiAnswer | None:
    """Asks nvidia-smi for the GPUs of this machine; None where there is no nvidia-smi."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return None
    try:
        asked = subprocess.run(
            NVIDIA_SMI,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_NVIDIA_SMI_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return SmiAnswer(status=1, text=f"no answer within {_NVIDIA_SMI_SECONDS:g} s")
    except OSError as error:
        return SmiAnswer(status=1, text=str(error))
    return SmiAnswer(asked.returncode, asked.stdout.decode(errors="replace"))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def find_obstacle(machine: Machine, *, device: str, folder: Path, disk_bytes: int) -> str | None:
    """Says in one line why this machine cannot take the installation, and the cure; None when it can.

    Args:
        machine: What it has.
        device: What is to be installed for.
        folder: Where it is to be installed.
        disk_bytes: What that needs of disk.
    """
    obstacle: str | None = None
    python = ".".join(map(str, machine.python))
    if machine.system != "Linux":
        obstacle = f"tandem runs on Linux, and this is {machine.system}: use a Linux machine or container"
    elif machine.architecture != "x86_64":
        obstacle = f"the pinned packages are for x86-64, and this is {machine.architecture}: use an x86-64 machine"
    elif machine.glibc is None or machine.glibc < MIN_GLIBC:
        has = "another C library" if machine.glibc is None else f"glibc {'.'.join(map(str, machine.glibc))}"
        obstacle = f"glibc 2.28 or newer is needed, and this system has {has}: use Debian 12, Ubuntu 24.04 or newer"
    elif device == CPU and "avx2" not in machine.cpu_flags:
        obstacle = (
            "the processor has no AVX2, which vLLM needs on a CPU: use a machine (or a CPU model of the VM) with it"
        )
    elif machine.python not in PYTHONS:
        obstacle = (
            f"Python 3.11 or 3.12 is needed, and this is {python}: install one "
            "(apt-get install python3.11 python3.11-venv), or name one with make PYTHON=/path/to/python3.12"
        )
    elif not machine.has_ensurepip:
        obstacle = f"Python {python} lacks its venv module: apt-get install python{python}-venv"
    elif machine.memory_bytes < MIN_MEMORY_BYTES:
        obstacle = (
            f"6 GB of memory are needed, and there are {machine.memory_bytes / 1e9:.1f} GB: "
            "use a larger machine, or raise the limit of the container"
        )
    elif machine.disk_free_bytes < disk_bytes:
        obstacle = (
            f"{disk_bytes / 1e9:.0f} GB of free disk are needed in {folder}, "
            f"and there are {machine.disk_free_bytes / 1e9:.1f} GB: "
            "free some, or clone to another disk"
        )
    return obstacle


def memory_bytes(*, meminfo: str, cgroup_limit: str) -> int:
    """Returns the memory to count on, from the texts of /proc/meminfo and the cgroup's memory.max ("max": no limit)."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    installed = int(total.group(1)) * 1024 if total else 0
    return min(installed, int(cgroup_limit)) if cgroup_limit.strip().isdigit() else installed


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Returns the processor's flags, from the text of /proc/cpuinfo."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(flags.group(1).split()) if flags else frozenset()


def _text(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def read_machine(folder: Path) -> Machine:
    """Looks at the machine and the Python that run this, and at the disk of a folder."""
    library, version = platform.libc_ver()
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        glibc=tuple(int(part) for part in version.split(".")) if library == "glibc" else None,
        cpu_flags=cpu_flags(_text("/proc/cpuinfo")),
        python=(sys.version_info[0], sys.version_info[1]),
        has_ensurepip=importlib.util.find_spec("ensurepip") is not None,
        memory_bytes=memory_bytes(meminfo=_text("/proc/meminfo"), cgroup_limit=_text("/sys/fs/cgroup/memory.max")),
        disk_free_bytes=shutil.disk_usage(folder).free,
    )
