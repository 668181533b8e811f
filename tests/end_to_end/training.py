"""`tandem train` as a user runs it: a child process, its run folder, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from runtime.process import ReadyFile

START_SECONDS = 240
STOP_SECONDS = 15
"""In which a Ctrl-C must be done, at any moment."""

# Nothing listens there: whoever asks it for a local address fails.
_PROXY = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")


@dataclass(frozen=True, slots=True)
class Training:
    """A run of the command that goes on."""

    process: subprocess.Popen[str]
    runs: Path
    output: Path

    @property
    def printed(self) -> str:
        """What the command has printed so far."""
        return self.output.read_text(encoding="utf-8")

    @property
    def folder(self) -> Path:
        (folder,) = self.runs.iterdir()
        return folder

    def steps(self) -> list[dict[str, Any]]:
        """What metrics.jsonl says so far; a line that is being written is left out."""
        file = next(self.runs.glob("*/metrics.jsonl"), None)
        if file is None:
            return []
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: any(record["step"] >= step for record in self.steps()), what=f"step {step}")

    def wait_for_line(self, text: str) -> None:
        self.wait_until(lambda: text in self.printed, what=f"the line `{text}`")

    def wait_until(self, has_come: Callable[[], bool], *, what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not has_come():
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline, f"{what} did not come: {self.printed}"
            # The run is a process apart: there is nothing to wait on but its files.
            time.sleep(0.1)

    def service(self, kind: str) -> psutil.Process:
        """The one process of a kind of service."""
        (service,) = self.services(kind)
        return service

    def services(self, kind: str) -> list[psutil.Process]:
        return [child for child in self.children() if child.cmdline()[3:5] == ["serve", kind]]

    def children(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children(recursive=True) if child.is_running()]

    def metric(self, name: str) -> float:
        """A number that the learner exports."""
        ready = ReadyFile.read(self.folder / "logs" / "learner-0.ready")
        assert ready is not None, "the learner serves"
        with urllib.request.urlopen(f"http://{ready.metrics_address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        (value,) = (line.split()[1] for line in lines if line.split()[0] == name)
        return float(value)

    def kill(self) -> None:
        """Ends whatever of it still runs."""
        if self.process.poll() is None:
            children = self.children()
            self.process.kill()
            self.process.wait()
            for child in children:
                child.kill()

    def interrupt(self) -> str:
        """Ctrl-C; returns what the command has printed."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=STOP_SECONDS)
        return self.printed

    def finish(self) -> str:
        """Waits for the end; returns what the command has printed."""
        self.process.wait(timeout=START_SECONDS)
        return self.printed


def start_training(*arguments: str, runs: Path, output: Path | None = None) -> Training:
    """Starts the command with its run folders below `runs`; what it prints goes beside them, or to `output`."""
    return _start(*arguments, "--run.folder", str(runs), runs=runs, output=output)


def resume_training(training: Training, *arguments: str) -> Training:
    """Goes on with its run folder."""
    return _start("--resume", str(training.folder), *arguments, runs=training.runs, output=training.output)


def _start(*arguments: str, runs: Path, output: Path | None = None) -> Training:
    output = output or runs.parent / "printed.txt"
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "train", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | _PROXY | {"COLUMNS": "160"},
        )
    return Training(process, runs, output)


def still_running(processes: list[psutil.Process]) -> list[str]:
    """Those of the processes that are left, by their command lines."""
    left = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return left
