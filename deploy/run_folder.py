"""A run's folder: where each of its files lies, how it is made and found again."""

import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from deploy.errors import UserError
from deploy.run_file import RunConfig, dump_toml

LATEST = "latest"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        """Name of the folder, and id of the run."""
        return self.path.name

    @property
    def config_file(self) -> Path:
        """The run file as resolved."""
        return self.path / "config.toml"

    @property
    def services_file(self) -> Path:
        """The run file that the services read: `config_file` with what was planned for this start, e.g. memory."""
        return self.path / "services.toml"

    @property
    def problems_file(self) -> Path:
        """Digests of the problems that the run began with."""
        return self.path / "problems.json"

    @property
    def metrics_file(self) -> Path:
        """One line of JSON a step; the learner writes it."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations_file(self) -> Path:
        """One line of JSON an evaluation."""
        return self.path / "evaluations.jsonl"

    @property
    def report_file(self) -> Path:
        """The result, for programs."""
        return self.path / "report.json"

    @property
    def ledger_file(self) -> Path:
        """What became of every sample; the learner writes it."""
        return self.path / "ledger.sqlite"

    def kept(self) -> str:
        """Which checkpoint a resume would begin with, for a person."""
        found = (path.parent.name.removeprefix("step_") for path in self.path.glob("checkpoints/step_*/manifest.json"))
        steps = [int(step) for step in found if step.isdecimal()]
        return f"kept: the checkpoint of step {max(steps)}" if steps else "there is no checkpoint yet"

    def write_config(self, config: RunConfig, *, planned: RunConfig) -> None:
        """Writes the run file, and that of the services, each whole or not at all."""
        for path, content in ((self.services_file, planned), (self.config_file, config)):
            part = path.with_suffix(".part")
            try:
                part.write_text(dump_toml(content), encoding="utf-8")
                part.replace(path)
            except OSError:
                part.unlink(missing_ok=True)
                raise

    def log_file(self, process: str) -> Path:
        """What a service process, e.g. `rollout-0`, prints."""
        return self.path / "logs" / f"{process}.log"


def make_run_folder(config: RunConfig, *, planned: RunConfig, now: datetime) -> RunFolder:
    """Makes `<run.folder>/<run.name>-<time>` with the settings in it.

    Args:
        config: The settings as resolved.
        planned: The same with what was planned for this start.
        now: The time in UTC.

    Raises:
        UserError: The folder cannot be made.
    """
    parent = Path(config.run.folder).expanduser()
    stem = f"{config.run.name}-{now:%Y%m%d-%H%M%S}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = _make_new(parent, stem)
        try:
            folder.write_config(config, planned=planned)
        except OSError:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
    except OSError as error:
        raise UserError(f"run.folder = {config.run.folder}: {error.strerror}") from error
    return folder


def rewrite_config(folder: RunFolder, config: RunConfig, *, planned: RunConfig) -> None:
    """Writes the settings that a run is resumed with.

    Raises:
        UserError: They cannot be written; the old ones stay.
    """
    try:
        folder.write_config(config, planned=planned)
    except OSError as error:
        raise UserError(f"{folder.path}: {error.strerror}") from error


def _make_new(parent: Path, stem: str) -> RunFolder:
    """Two runs that begin in the same second get two folders."""
    number = 1
    while True:
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return RunFolder(path.absolute())


def find_run_folder(wanted: str, *, runs: Path) -> RunFolder:
    """The folder of an earlier run.

    Args:
        wanted: Its path, or `latest` for the newest one.
        runs: Where `latest` is looked for.

    Raises:
        UserError: It is no folder of a run, or there is none.
    """
    if wanted != LATEST:
        folder = RunFolder(Path(wanted).absolute())
        if not folder.config_file.is_file():
            raise UserError(f"{wanted}: is no run folder, it has no config.toml; name one, or `latest` for the newest")
        return folder
    found = [path.parent for path in runs.glob("*/config.toml")]
    if not found:
        raise UserError(f"latest: there is no run under {runs}")
    return RunFolder(max(found, key=lambda path: (path / "config.toml").stat().st_mtime).absolute())
