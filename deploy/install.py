"""Installs tandem into .venv: looks at the machine first, then runs every stage whose inputs have changed.

The system's own python3 runs this file, so it uses the standard library alone, and loads on any Python from 3.8 on.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, NoReturn, Sequence

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOG = VENV / "install.log"
PYTHON_NAME = f"python{sys.version_info[0]}.{sys.version_info[1]}"

PYTHONS = ((3, 12), (3, 11))
"""Supported Python versions, the preferred one first."""
MIN_MEMORY_BYTES = 6 * 10**9
MIN_DISK_BYTES = 5 * 10**9
"""3.5 GB installed, and pip's unpacking and download cache beside it."""
MIN_GLIBC = (2, 28)
"""What the wheels of torch and vLLM are built for (manylinux_2_28)."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IMPORTS = (
    "torch",
    "transformers.models.qwen2.modeling_qwen2",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "deepspeed.runtime.engine",
    "ray._private.workers",
    "math_verify",
    "matplotlib.pyplot",
)
"""What the services import: a check that the packages fit together, and their bytecode for the first start."""


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
class Stage:
    """One thing to install or check, done again only when its key changes."""

    name: str
    title: str
    inputs: tuple[str, ...]
    """Files, relative to the repository, whose content decides whether the stage is still done."""
    commands: tuple[tuple[str, ...], ...]
    """Arguments of the venv's Python; alternatives, tried in order until one succeeds."""

    def key(self) -> str:
        """Digest of all that the stage depends on."""
        digest = hashlib.sha256(repr((sys.version_info[:3], self.commands)).encode())
        for name in self.inputs:
            digest.update((ROOT / name).read_bytes())
        return digest.hexdigest()

    def stamp(self) -> Path:
        """File that holds the key with which the stage last ended well."""
        return VENV / f"tandem-{self.name}.stamp"

    def is_done(self) -> bool:
        """Says whether nothing changed since the stage last ended well."""
        return self.stamp().is_file() and self.stamp().read_text() == self.key()


def _pip(*arguments: str) -> tuple[str, ...]:
    return ("-I", "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--retries", "2", *arguments)


def stages(*, is_dev: bool) -> list[Stage]:
    """Lists the stages in the order in which they run.

    pip does not compile: of 27,000 modules some 6,000 are ever imported, and get their bytecode from the last stage.
    """
    torch = ("-r", "requirements/torch-cpu.txt")
    result = [
        Stage("build", "pip and setuptools", ("requirements/build.txt",), (_pip("-r", "requirements/build.txt"),)),
        Stage("torch", "torch for the CPU", (torch[1],), (_pip(*torch), _pip(*torch, "--index-url", TORCH_CPU_INDEX))),
        Stage(
            "packages",
            "vLLM, DeepSpeed, Ray and what they need",
            ("requirements/cpu.txt",),
            (_pip("--no-build-isolation", "--use-pep517", "-r", "requirements/cpu.txt"),),
        ),
        Stage("project", "tandem itself", ("pyproject.toml",), (_pip("--no-build-isolation", "-e", "."),)),
    ]
    if is_dev:
        development = "requirements/dev.txt"
        result.append(Stage("dev", "tools for checks and tests", (development,), (_pip("-r", development),)))
    lists = ("requirements/torch-cpu.txt", "requirements/cpu.txt")
    result.append(Stage("imports", "check of the imports", lists, (("-c", f"import {', '.join(IMPORTS)}"),)))
    return result


def find_obstacle(machine: Machine) -> str | None:
    """Says in one line why this machine cannot take the installation, and the cure; None when it can."""
    obstacle: str | None = None
    python = ".".join(map(str, machine.python))
    if machine.system != "Linux":
        obstacle = f"tandem runs on Linux, and this is {machine.system}: use a Linux machine or container"
    elif machine.architecture != "x86_64":
        obstacle = f"the pinned packages are for x86-64, and this is {machine.architecture}: use an x86-64 machine"
    elif machine.glibc is None or machine.glibc < MIN_GLIBC:
        has = "another C library" if machine.glibc is None else f"glibc {'.'.join(map(str, machine.glibc))}"
        obstacle = f"glibc 2.28 or newer is needed, and this system has {has}: use Debian 12, Ubuntu 24.04 or newer"
    elif "avx2" not in machine.cpu_flags:
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
    elif machine.disk_free_bytes < MIN_DISK_BYTES:
        obstacle = (
            f"5 GB of free disk are needed in {ROOT}, and there are {machine.disk_free_bytes / 1e9:.1f} GB: "
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


def read_machine() -> Machine:
    """Looks at the machine and the Python that run this."""
    library, version = platform.libc_ver()
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        glibc=tuple(int(part) for part in version.split(".")) if library == "glibc" else None,
        cpu_flags=cpu_flags(_text("/proc/cpuinfo")),
        python=(sys.version_info[0], sys.version_info[1]),
        has_ensurepip=importlib.util.find_spec("ensurepip") is not None,
        memory_bytes=memory_bytes(meminfo=_text("/proc/meminfo"), cgroup_limit=_text("/sys/fs/cgroup/memory.max")),
        disk_free_bytes=shutil.disk_usage(ROOT).free,
    )


def find_python() -> str | None:
    """Returns a Python of a supported version from PATH that starts, the preferred version first."""
    for major, minor in PYTHONS:
        path = shutil.which(f"python{major}.{minor}")
        # A pyenv shim is on PATH for versions too that are not active, and then does not start.
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def pip_failure(log: str) -> str:
    """Says in one line what went wrong, from what pip printed: its last error, and the cure where one is known."""
    errors = re.findall(r"^(?:ERROR: (?!ResolutionImpossible)|\w*Error: )(.+)$", log, re.MULTILINE)
    reason = errors[-1].strip().rstrip(".") if errors else "it says no more"
    if "No space left on device" in log:
        return f"{reason}: free some disk, then run it again"
    if re.search(r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Max retries|ProxyError", log):
        return (
            f"{reason}: the package index is out of reach; see to the network or pip's configuration, then run it again"
        )
    return reason


def fail(line: str) -> NoReturn:
    """Ends with the one line that a person needs."""
    print(f"install: {line}", file=sys.stderr)
    raise SystemExit(2)


def run_with_clock(title: str, command: Sequence[str]) -> int:
    """Runs a command, its output in the log and, on a terminal, a clock beside the title; returns its exit status."""
    started = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with LOG.open("ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        while sys.stdout.isatty():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
                print("\r", end="")
                break
            print(f"\r  {title} ... {time.monotonic() - started:.0f} s", end="", flush=True)
        return process.wait()


def run_stage(stage: Stage) -> None:
    """Runs the first of the stage's commands that succeeds and stamps it, or ends with one line."""
    started = time.monotonic()
    log_start = LOG.stat().st_size if LOG.is_file() else 0
    if not sys.stdout.isatty():
        print(f"  {stage.title} ...", flush=True)
    for command in stage.commands:
        if run_with_clock(stage.title, [str(VENV / "bin" / "python"), *command]) == 0:
            break
    else:
        with LOG.open("rb") as log:
            log.seek(log_start)
            fail(f"{stage.title}: {pip_failure(log.read().decode(errors='replace'))} (log: {LOG.relative_to(ROOT)})")
    stage.stamp().write_text(stage.key())
    print(f"  {stage.title}: {time.monotonic() - started:.1f} s", flush=True)


def has_venv() -> bool:
    """Says whether .venv is of this Python version and was made here; one copied along would start the old clone."""
    pip = VENV / "bin" / "pip"
    return (VENV / "bin" / PYTHON_NAME).exists() and pip.is_file() and str(VENV) in pip.read_text()


def make_venv() -> None:
    """Makes the virtual environment, in place of an unusable one."""
    if has_venv():
        return
    print(f"  virtual environment of {PYTHON_NAME} in .venv", flush=True)
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        fail(f"no virtual environment: {' '.join((made.stdout + made.stderr).split())}")


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Waits until no other installation of this clone runs, so that two terminals cannot mix theirs."""
    descriptor = os.open(ROOT / "requirements", os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("install: waiting for another installation of this clone to end", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str]) -> None:
    """Installs what is not yet installed."""
    parser = argparse.ArgumentParser(prog="install", description="Installs tandem into .venv.")
    parser.add_argument("--dev", action="store_true", help="also what the checks and tests need")
    is_dev = parser.parse_args(arguments).dev
    if sys.version_info[:2] not in PYTHONS:
        other = find_python()
        if other:
            os.execv(other, [other, __file__, *arguments])  # noqa: S606 -- no shell is wanted
    with only_one():
        if has_venv() and all(stage.is_done() for stage in stages(is_dev=is_dev)):
            return
        obstacle = find_obstacle(read_machine())
        if obstacle:
            fail(obstacle)
        started = time.monotonic()
        print(f"Installing tandem (Python {platform.python_version()}); the log is .venv/install.log", flush=True)
        make_venv()
        for stage in stages(is_dev=is_dev):
            if not stage.is_done():
                run_stage(stage)
        print(f"Installed in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\ninstall: interrupted; the next run goes on where this one stopped", file=sys.stderr)
        raise SystemExit(130) from None
