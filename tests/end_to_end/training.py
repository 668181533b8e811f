"""`tandem train` as a user runs it: a child process, its run folder, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 240
STOP_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Training:
    """A run of the command that goes on."""

    process: subprocess.Popen[str]
    runs: Path

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
        deadline = time.monotonic() + START_SECONDS
        while not any(record["step"] >= step for record in self.steps()):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"step {step} did not come"
            # The run is a process apart: there is nothing to wait on but its file.
            time.sleep(0.1)

    def learner(self) -> psutil.Process:
        (learner,) = [child for child in self.children() if "learner" in child.cmdline()]
        return learner

    def children(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children(recursive=True) if child.is_running()]

    def interrupt(self) -> str:
        """Ctrl-C; returns what the command has printed."""
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=STOP_SECONDS)[0]

    def finish(self) -> str:
        """Waits for the end; returns what the command has printed."""
        return self.process.communicate(timeout=START_SECONDS)[0]


def start_training(*arguments: str, runs: Path) -> Training:
    """Starts the command with its run folders below `runs`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "train", *arguments, "--run.folder", str(runs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )
    return Training(process, runs)


def resume_training(training: Training, *arguments: str) -> Training:
    """Goes on with its run folder."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "train", "--resume", str(training.folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Training(process, training.runs)


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
