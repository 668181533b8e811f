"""What a run leaves on the disk: whether there is room for it before it starts, and while it goes on."""

import os
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import UserError
from deploy.model_shape import ModelShape, read_model_shape
from deploy.run_file import RunConfig
from runtime.disk import free_bytes, nearest_existing, size_in_words

# DeepSpeed's files, measured, by ZeRO stage: two fp32 moments, and weights. In bf16, and in fp32 at stages 1 and 2, it
# keeps fp32 master weights beside the model's; stage 3 has no others.
_CHECKPOINT_BYTES = {"fp32": (12, 16, 16, 12), "bf16": (14, 14, 14, 12)}
_EXPORT_BYTES = {"fp32": 4, "bf16": 2}
# Names, shapes and what DeepSpeed tells of itself.
_CHECKPOINT_OVERHEAD = 1 << 20
# Rows of a sample in the ledger's tables and their indexes, and a bound on its texts; see learner/ledger.py.
_SAMPLE_BYTES = 700
_TEXT_BYTES = 400
_MAX_TEXTS_BYTES = 256 << 20
# The ledger's write-ahead log may have 16 MiB before it is copied; the services' logs are small beside it.
_LOG_BYTES = 32 << 20
_STEP_BYTES = 2 << 10


@dataclass(frozen=True, slots=True)
class DiskNeeds:
    """Bytes that a run writes into its folder.

    Attributes:
        checkpoint_bytes: One checkpoint; 0 if the model is of a kind whose size is not known.
        num_checkpoints: Those that are kept, and the one that is being written.
        export_bytes: The model at the end.
        log_bytes: Ledger, metrics and logs, at most.
    """

    checkpoint_bytes: int
    num_checkpoints: int
    export_bytes: int
    log_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.num_checkpoints * self.checkpoint_bytes + self.export_bytes + self.log_bytes


def disk_needs(config: RunConfig, shape: ModelShape | None) -> DiskNeeds:
    """What a run writes; pure."""
    learner = config.learner
    num_parameters = 0 if shape is None else shape.num_parameters
    num_samples = learner.num_steps * learner.prompts_per_step * learner.rollouts_per_prompt
    text_bytes = _TEXT_BYTES + 8 * learner.sampling.max_tokens
    per_parameter = _CHECKPOINT_BYTES[learner.dtype][learner.zero_stage]
    return DiskNeeds(
        checkpoint_bytes=num_parameters and num_parameters * per_parameter + _CHECKPOINT_OVERHEAD,
        num_checkpoints=learner.checkpoints_kept + 1,
        export_bytes=num_parameters * _EXPORT_BYTES[learner.dtype],
        log_bytes=num_samples * _SAMPLE_BYTES
        + min(_MAX_TEXTS_BYTES, num_samples * text_bytes)
        + learner.num_steps * _STEP_BYTES
        + _LOG_BYTES,
    )


def check_folder(config: RunConfig) -> None:
    """Looks whether run folders can be made where the settings say, before anything that takes time.

    Raises:
        UserError: The place is no folder, or may not be written.
    """
    parent = nearest_existing(Path(config.run.folder).expanduser())
    if not parent.is_dir():
        raise UserError(f"run.folder = {config.run.folder}: {parent} is no folder; name another")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"run.folder = {config.run.folder}: {parent} may not be written")


def check_room(config: RunConfig, *, model_folder: Path, resumed: Path | None) -> DiskNeeds:
    """Looks whether the disk of the run folder has room for all that the run will write.

    Args:
        config: The run.
        model_folder: The model that is trained.
        resumed: The run folder, if it is there already; what it holds is part of what the run needs.

    Returns:
        What the run needs.

    Raises:
        UserError: It has not.
    """
    needs = disk_needs(config, read_model_shape(model_folder))
    folder = Path(config.run.folder).expanduser() if resumed is None else resumed
    needed = needs.total_bytes - (0 if resumed is None else _size(resumed))
    free = free_bytes(folder)
    if free < needed:
        raise UserError(
            f"too little room on the disk of {folder}: {size_in_words(needed)} are needed for "
            f"{needs.num_checkpoints} checkpoints of {size_in_words(needs.checkpoint_bytes)}, an export, the ledger "
            f"and logs, {size_in_words(free)} are free: free some, set run.folder to another disk, or lower "
            "learner.checkpoints_kept"
        )
    return needs


class DiskWatch:
    """Says while a run goes on when its disk has less room than one checkpoint takes, and when it has it again."""

    def __init__(self, folder: Path, *, checkpoint_bytes: int) -> None:
        self._folder, self._checkpoint_bytes = folder, checkpoint_bytes
        self._is_short = False

    def news(self) -> str:
        """A line when that has changed; empty otherwise."""
        shortage = self.shortage()
        if bool(shortage) == self._is_short:
            return ""
        self._is_short = bool(shortage)
        if not shortage:
            return f"the disk of the run folder has room again: {size_in_words(free_bytes(self._folder))} are free"
        return f"ALARM: {shortage}; training goes on, and the newest checkpoint stays"

    def shortage(self) -> str:
        """What is wrong now, in words; empty if nothing is."""
        free = free_bytes(self._folder)
        if free >= self._checkpoint_bytes:
            return ""
        return (
            f"the disk of the run folder is nearly full: {size_in_words(free)} are free, a checkpoint takes "
            f"{size_in_words(self._checkpoint_bytes)}"
        )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
