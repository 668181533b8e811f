"""A wheel of this clone, and virtual environments with one of its extras and nothing else."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runtime.process import ReadyFile

ROOT = Path(__file__).resolve().parent.parent.parent
_PACKAGES = ("protos", "runtime", "rollout_server", "learner", "reward_service", "evaluation", "deploy")
_FILES = ("pyproject.toml", "README.md", "LICENSE")
_ONLY_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
_OUT_OF_REACH = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Max retries|ProxyError")


class IndexOutOfReachError(Exception):
    """pip got no answer from its package index."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with tandem in it."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *arguments: str | Path, timeout_seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs its Python away from this clone."""
        return subprocess.run(
            [self.python, "-I", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            timeout=timeout_seconds,
        )

    def tandem(self, *arguments: str | Path, timeout_seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs its `tandem` command."""
        return self.run(self.folder / "bin" / "tandem", *arguments, timeout_seconds=timeout_seconds)

    def has(self, module: str) -> bool:
        """Says whether it has a module."""
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return self.run("-c", code).returncode == 0

    def size_bytes(self) -> int:
        """What it takes of disk."""
        return sum(path.lstat().st_size for path in self.folder.rglob("*"))

    @contextmanager
    def serving(self, service: str, *arguments: str | Path, timeout_seconds: float = 60.0) -> Iterator[ReadyFile]:
        """Runs `tandem serve` until the block ends, and then ends it with SIGTERM; a learner is the only rank.

        Raises:
            AssertionError: It ended, or did not serve in time.
        """
        file, log = self.folder / f"{service}.ready", self.folder / f"{service}.log"
        file.unlink(missing_ok=True)
        command = [
            self.python,
            "-I",
            self.folder / "bin" / "tandem",
            "serve",
            service,
            *arguments,
            "--ready-file",
            file,
        ]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **_ONLY_RANK}
            )
        try:
            deadline = time.monotonic() + timeout_seconds
            while (ready := ReadyFile.read(file)) is None:
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.05)
            yield ready
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def build_wheel(folder: Path) -> Path:
    """Builds the wheel from a copy, so that nothing is left in the clone."""
    source = folder / "source"
    source.mkdir(parents=True)
    for package in _PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, source)
    _pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("tandem-*.whl")
    return wheel


def make_environment(folder: Path, *, wheel: Path, extra: str, arguments: Sequence[str] = ()) -> Environment:
    """Installs an extra into an empty virtual environment, with the index that pip is configured for.

    Raises:
        IndexOutOfReachError: The index does not answer.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    environment = Environment(folder)
    _pip(environment.python, "install", "--no-compile", *arguments, f"tandem[{extra}] @ {wheel.as_uri()}")
    return environment


def _pip(python: str | Path, command: str, *arguments: str | Path) -> None:
    target = [] if python == sys.executable else ["--python", python]
    done = subprocess.run(
        [sys.executable, "-I", "-m", "pip", *target, command, "--quiet", "--retries", "1", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    if done.returncode != 0:
        log = done.stdout + done.stderr
        if _OUT_OF_REACH.search(log):
            raise IndexOutOfReachError(log.strip().splitlines()[-1])
        raise AssertionError(log[-3000:])
