"""Installs tandem into .venv: looks at the machine first, then runs every stage whose inputs have changed.

The system's own python3 runs this file, so it uses the standard library alone, and loads on any Python from 3.8 on.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
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
if not __package__:
    # Run by its path, as make does: then only this folder is searched.
    sys.path.insert(0, str(ROOT))

from deploy.install_machine import (
    CPU,
    CUDA,
    MIN_DISK_BYTES,
    MIN_DISK_BYTES_LATER,
    PYTHONS,
    ask_nvidia_smi,
    choose_device,
    find_obstacle,
    read_machine,
)

VENV = ROOT / ".venv"
LOG = VENV / "install.log"
DEVICE_FILE = VENV / "tandem-device"
"""What .venv is installed for."""
PYTHON_NAME = f"python{sys.version_info[0]}.{sys.version_info[1]}"
AUTO = "auto"
TITLES = {CPU: "the CPU", CUDA: "CUDA 13"}

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IMPORTS = (
    "torch",
    "transformers.models.qwen2.modeling_qwen2",
    "vllm.v1.engine.async_llm",
    "vllm.model_executor.models.qwen2",
    "deepspeed.runtime.engine",
    "ray._private.workers",
    "math_verify",
    "matplotlib.pyplot",
)
"""What the services import: a check that the packages fit together, and their bytecode for the first start."""
LARGE_STAGES = ("torch", "packages")
WORKERS = {CPU: "vllm.v1.worker.cpu_worker", CUDA: "vllm.v1.worker.gpu_worker"}


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


@dataclass(frozen=True)
class VenvDevice:
    """What a virtual environment is installed for."""

    device: str
    is_asked: bool
    """Named by the user; later calls that name none keep to it."""


def _pip(*arguments: str) -> tuple[str, ...]:
    return ("-I", "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--retries", "2", *arguments)


def stages(device: str, *, is_dev: bool) -> list[Stage]:
    """Lists the stages for a device in the order in which they run.

    pip does not compile: of 27,000 modules some 6,000 are ever imported, and get their bytecode from the last stage.
    """
    torch_list, packages_list, dev_list = (
        f"requirements/torch-{device}.txt",
        f"requirements/{device}.txt",
        "requirements/dev.txt",
    )
    torch: tuple[tuple[str, ...], ...] = (_pip("-r", torch_list),)
    if device == CPU:
        torch += (_pip("-r", torch_list, "--index-url", TORCH_CPU_INDEX),)
    imports = (*IMPORTS, WORKERS[device])
    result = [
        Stage("build", "pip and setuptools", ("requirements/build.txt",), (_pip("-r", "requirements/build.txt"),)),
        Stage("torch", f"torch for {TITLES[device]}", (torch_list,), torch),
        Stage(
            "packages",
            "vLLM, DeepSpeed, Ray and what they need",
            (packages_list,),
            (_pip("--no-build-isolation", "--use-pep517", "-r", packages_list),),
        ),
        Stage("project", "tandem itself", ("pyproject.toml",), (_pip("--no-build-isolation", "-e", "."),)),
    ]
    if is_dev:
        result.append(Stage("dev", "tools for checks and tests", (dev_list,), (_pip("-r", dev_list),)))
    lists = (torch_list, packages_list)
    result.append(Stage("imports", "check of the imports", lists, (("-c", f"import {', '.join(imports)}"),)))
    return result


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


def venv_device() -> VenvDevice:
    """Returns what .venv is installed for, or an older one that does not say it: the CPU, then the only choice."""
    if not DEVICE_FILE.is_file():
        return VenvDevice(CPU, is_asked=False)
    device, _, origin = DEVICE_FILE.read_text().partition(" ")
    return VenvDevice(device, is_asked=origin == "asked")


def make_venv(device: str) -> None:
    """Makes the virtual environment, in place of an unusable one or one for another device."""
    if has_venv():
        installed = venv_device().device
        if installed == device:
            return
        print(f"  .venv is installed for {TITLES[installed]}: making it anew for {TITLES[device]}", flush=True)
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
    parser.add_argument(
        "--device",
        choices=(AUTO, CPU, CUDA),
        default=AUTO,
        help="what to install for; auto: what an earlier call named for this .venv, "
        "else CUDA where nvidia-smi finds a GPU with a driver for it (default: auto)",
    )
    parsed = parser.parse_args(arguments)
    if sys.version_info[:2] not in PYTHONS:
        other = find_python()
        if other:
            os.execv(other, [other, __file__, *arguments])  # noqa: S606 -- no shell is wanted
    with only_one():
        install(parsed.device, is_dev=parsed.dev)


def install(asked: str, *, is_dev: bool) -> None:
    """Looks for what to install for, and installs what is not yet installed."""
    has_old = has_venv()
    is_asked = asked != AUTO
    if not is_asked and has_old and venv_device().is_asked:
        asked, is_asked = venv_device().device, True
    choice = choose_device(asked, ask_nvidia_smi() if asked != CPU else None)
    todo = stages(choice.device, is_dev=is_dev)
    is_current = has_old and venv_device().device == choice.device
    if is_current and venv_device().is_asked == is_asked and all(stage.is_done() for stage in todo):
        return
    is_small = is_current and all(stage.is_done() for stage in todo if stage.name in LARGE_STAGES)
    disk_bytes = MIN_DISK_BYTES_LATER if is_small else MIN_DISK_BYTES[choice.device]
    obstacle = find_obstacle(read_machine(ROOT), device=choice.device, folder=ROOT, disk_bytes=disk_bytes)
    if obstacle:
        fail(obstacle)
    started = time.monotonic()
    print(f"Installing tandem (Python {platform.python_version()}); the log is .venv/install.log", flush=True)
    if choice.reason:
        print(f"  {choice.reason}", flush=True)
    make_venv(choice.device)
    DEVICE_FILE.write_text(f"{choice.device} {'asked' if is_asked else 'found'}")
    for stage in todo:
        if not stage.is_done():
            run_stage(stage)
    print(f"Installed in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\ninstall: interrupted; the next run goes on where this one stopped", file=sys.stderr)
        raise SystemExit(130) from None
