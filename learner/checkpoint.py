"""Checkpoints that are whole or do not count: written aside, digested, renamed; verified before they are used."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from learner.prompts import PromptState
from runtime.disk import NotWrittenError, free_bytes, is_write_failure

log = structlog.get_logger()

_MANIFEST = "manifest.json"
_PROGRESS = "progress.json"
_STATE = "state"
# Of the files that differ in size from one checkpoint to the next, and of what folders and blocks take.
_SPARE_BYTES = 1 << 20


class CheckpointError(NotWrittenError):
    """A checkpoint could not be written, for want of space or permission; those written before are whole."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run was when it was saved, besides the policy's own state.

    Attributes:
        run_id: Of the run.
        seed: Of the run.
        step: The last step; the checkpoint's folder carries its number.
        policy_version: Of the weights.
        prompts: Where the prompt source stood.
        samples_issued: Samples asked for so far.
        num_ranks: Ranks that wrote the state.
    """

    run_id: str
    seed: int
    step: int
    policy_version: int
    prompts: PromptState
    samples_issued: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    progress: Progress

    @property
    def state_folder(self) -> Path:
        """What `Policy.load_state` reads."""
        return self.folder / _STATE


class _DamageError(Exception):
    """Why a folder is no complete checkpoint."""


def write_checkpoint(run_folder: Path, progress: Progress, *, save_state: Callable[[Path], None]) -> Checkpoint:
    """Writes `checkpoints/step_N`, which appears whole or not at all.

    Args:
        run_folder: Of the run.
        progress: What is known besides the policy's state.
        save_state: Writes the policy's state into the empty folder that it is given.

    Raises:
        CheckpointError: The disk is full or may not be written; nothing of this checkpoint is left.
    """
    folder = _folder_of(run_folder, progress.step)
    part = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        (part / _STATE).mkdir(parents=True)
        save_state(part / _STATE)
        _write_json(part / _PROGRESS, asdict(progress))
        _write_json(part / _MANIFEST, {"files": _contents(part)})
        _sync_tree(part)
        # One of the same step is left by an earlier incarnation that this run was not resumed from.
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        _sync(folder.parent)
    except (OSError, RuntimeError, NotWrittenError) as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, NotWrittenError) or is_write_failure(error):
            raise CheckpointError(f"checkpoint of step {progress.step} could not be written: {error}") from error
        raise
    return Checkpoint(folder, progress)


def newest_complete(run_folder: Path) -> Checkpoint | None:
    """The newest checkpoint whose files are all there, with their sizes and digests; damaged ones are logged.

    Returns:
        None if there is none.
    """
    for folder in reversed(_folders(run_folder)):
        try:
            return _verified(folder)
        except _DamageError as damage:
            log.warning("checkpoint skipped", folder=str(folder), reason=str(damage))
    return None


def make_room(run_folder: Path) -> None:
    """Deletes the oldest checkpoints where that leaves room for another one like the newest, which always stays."""
    whole = [folder for folder in _folders(run_folder) if (folder / _MANIFEST).is_file()]
    if not whole:
        return
    *older, newest = whole
    needed, free = _size(newest) + _SPARE_BYTES, free_bytes(run_folder)
    if free + sum(map(_size, older)) < needed:
        return
    for folder in older:
        if free >= needed:
            return
        log.warning("checkpoint deleted before its time, for want of space", folder=str(folder), free_bytes=free)
        _delete(folder)
        free = free_bytes(run_folder)


def prune(run_folder: Path, *, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints, and what an interrupted one has left.

    Args:
        run_folder: Of the run.
        keep: At least 1.
    """
    for folder in [*_folders(run_folder)[:-keep], *(run_folder / "checkpoints").glob("step_*.part")]:
        _delete(folder)


def discard_after(run_folder: Path, *, step: int) -> None:
    """Deletes what is named as a checkpoint of a later step than this one, which the run begins with."""
    for folder in _folders(run_folder):
        if int(folder.name.removeprefix("step_")) > step:
            _delete(folder)


def _delete(folder: Path) -> None:
    # Without its manifest a folder that is half deleted does not count.
    (folder / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _folder_of(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step_{step}"


def _folders(run_folder: Path) -> list[Path]:
    """Whatever is named as a checkpoint, oldest first."""
    names = (path.name.removeprefix("step_") for path in (run_folder / "checkpoints").glob("step_*"))
    return [_folder_of(run_folder, step) for step in sorted(int(name) for name in names if name.isdecimal())]


def _verified(folder: Path) -> Checkpoint:
    try:
        files = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = [(name, entry["size_bytes"], entry["sha256"]) for name, entry in files.items()]
    except FileNotFoundError as error:
        raise _DamageError("it has no manifest") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamageError(f"its manifest is damaged: {error}") from error
    for name, expected_size, expected_digest in expected:
        file = folder / name
        if not file.is_file():
            raise _DamageError(f"{name} is missing")
        if (size := file.stat().st_size) != expected_size:
            raise _DamageError(f"{name} has {size} bytes instead of {expected_size}")
        if _digest(file) != expected_digest:
            raise _DamageError(f"{name} has other content than was written")
    content = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
    prompts = content.pop("prompts")
    state = PromptState(**prompts | {"unfinished": tuple(prompts["unfinished"])})
    return Checkpoint(folder, Progress(**content, prompts=state))


def _contents(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(file.relative_to(folder)): {"size_bytes": file.stat().st_size, "sha256": _digest(file)} for file in files
    }


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
