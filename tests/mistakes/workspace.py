"""What mistakes are made with: a good model, a good data file, a hub, and copies of them to damage."""

import json
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUESTIONS = "".join(f'{{"question": "{n} and {n}?", "answer": "{2 * n}"}}\n' for n in range(40))


@dataclass(slots=True)
class Workspace:
    """A folder for one mistake."""

    folder: Path
    good_model: Path
    hub: str
    """Address of a hub that has `org/model` and refuses the files of `org/gated`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the mistake needs; a command with any runs as a process of its own."""
    held: list[socket.socket] = field(default_factory=list)

    def file(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return path

    def run_file(self, content: str = "") -> str:
        return str(self.file("run.toml", content))

    def data(self, content: str = QUESTIONS) -> str:
        return str(self.file("data.jsonl", content))

    def model(self, damage: Callable[[Path], object] = lambda folder: None) -> str:
        """A copy of the good model, damaged."""
        copy = self.folder / "model"
        shutil.copytree(self.good_model, copy)
        damage(copy)
        return str(copy)

    def train(self, *arguments: str, content: str = "") -> list[str]:
        """`tandem train` with a run file, its run folders in the workspace."""
        runs = ("--run.folder", str(self.folder / "runs"), "--rollout.context_length", "256")
        return ["train", self.run_file(content), *runs, *arguments]

    def taken_port(self) -> str:
        """A port of loopback that something listens on."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.held.append(listener)
        return str(listener.getsockname()[1])

    def free_port(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return str(probe.getsockname()[1])

    def readable(self, line: str) -> str:
        """The line without what differs from machine to machine and run to run."""
        line = line.replace(str(self.good_model), "MODEL").replace(str(self.folder), "FOLDER")
        line = re.sub(r"(127\.0\.0\.1|learner\.listen\.port|port) ?(:|=| )\d{4,5}", r"\1\2PORT", line)
        line = re.sub(r"(listen[a-z_.]* = )\d{4,5}", r"\1PORT", line)
        return re.sub(r"needed, [\d.]+ are free", "needed, N are free", line)


def set_config(**changes: Any) -> Callable[[Path], None]:
    """Damages config.json."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def replace(name: str, content: str) -> Callable[[Path], object]:
    """Puts other content into a file of the model."""
    return lambda folder: (folder / name).write_text(content)


def cut(name: str, num_bytes: int) -> Callable[[Path], object]:
    """Takes the end of a file away."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-num_bytes])
