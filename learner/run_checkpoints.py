"""What a checkpoint of a run holds: when it is written, taken up again, pruned, and what is exported at the end."""

import time

import structlog
from safetensors import SafetensorError

from learner import metrics
from learner.assignment import LearnerAssignment
from learner.checkpoint import (
    CheckpointError,
    Progress,
    discard_after,
    make_room,
    newest_complete,
    prune,
    write_checkpoint,
)
from learner.export import write_export
from learner.prompts import PromptSource
from learner.ranks import Leader
from runtime.disk import NotWrittenError, free_bytes, is_write_failure

log = structlog.get_logger()


class RunCheckpoints:
    """The checkpoints of one run: the policy's state and the place in the prompts, together."""

    def __init__(self, assignment: LearnerAssignment, *, leader: Leader, prompts: PromptSource) -> None:
        self._assignment, self._leader, self._prompts = assignment, leader, prompts
        self.num_failures = 0
        """Checkpoints of this incarnation that could not be written."""
        self.last_failure = ""
        """Why the last one of them could not be."""

    def begin(self) -> int:
        """Takes up the newest complete checkpoint where the run is resumed.

        Returns:
            Its step; 0 for the initial model.

        Raises:
            ValueError: The folder holds checkpoints of a run that is not resumed, or the checkpoint belongs to another
                run, number of ranks, seed or list of problems.
        """
        run_folder = self._assignment.run_folder
        checkpoint = newest_complete(run_folder)
        if checkpoint is None:
            log.info("no checkpoint yet: from the beginning")
            discard_after(run_folder, step=0)
            return 0
        if not self._assignment.resume:
            raise ValueError(f"{run_folder}: holds checkpoints of a run; resume it, or choose another folder")
        self._check(checkpoint.progress)
        self._prompts.restore(checkpoint.progress.prompts)
        self._leader.load_state(checkpoint.state_folder)
        # Newer ones are damaged; left there they would count as the newest when this run is pruned.
        discard_after(run_folder, step=checkpoint.progress.step)
        log.info(
            "resumed", step=checkpoint.progress.step, num_prompts_again=len(checkpoint.progress.prompts.unfinished)
        )
        return checkpoint.progress.step

    def _check(self, progress: Progress) -> None:
        num_ranks, run_id = self._assignment.settings.num_ranks, self._assignment.run_id
        if progress.num_ranks != num_ranks:
            raise ValueError(f"learner.num_ranks = {num_ranks}: the checkpoint was written by {progress.num_ranks}")
        if progress.run_id != run_id:
            raise ValueError(f"run_id = {run_id}: the checkpoint belongs to {progress.run_id}")

    def save(self, step: int, *, samples_issued: int) -> bool:
        """Writes a checkpoint and prunes old ones; a full disk keeps the previous one, and training goes on.

        Where space is short, the oldest ones go before: all but the newest, and no more than are needed.

        Returns:
            Whether it was written.
        """
        progress = Progress(
            run_id=self._assignment.run_id,
            seed=self._assignment.seed,
            step=step,
            policy_version=step,
            prompts=self._prompts.state(),
            samples_issued=samples_issued,
            num_ranks=self._assignment.settings.num_ranks,
        )
        make_room(self._assignment.run_folder)
        try:
            write_checkpoint(self._assignment.run_folder, progress, save_state=self._leader.save_state)
        except CheckpointError as error:
            self.note_failure(step, error)
            return False
        metrics.CHECKPOINTS.inc()
        metrics.LAST_CHECKPOINT.set(time.time())
        prune(self._assignment.run_folder, keep=self._assignment.settings.checkpoints_kept)
        return True

    def note_failure(self, step: int, error: NotWrittenError) -> None:
        """Raises the alarm: there is no checkpoint of this step; the next one that is due is tried all the same."""
        self.num_failures += 1
        self.last_failure = str(error)
        metrics.CHECKPOINT_FAILURES.inc()
        log.error(
            "checkpoint failed: the previous one stays the newest, and training goes on",
            step=step,
            free_bytes=free_bytes(self._assignment.run_folder),
            reason=self.last_failure,
        )

    def export(self, step: int) -> None:
        """Writes the policy as a folder that transformers and vLLM load.

        Raises:
            NotWrittenError: The disk is full or may not be written; nothing of the export is left.
        """
        try:
            folder = write_export(
                self._assignment.run_folder,
                self._leader.parameters_for_push(),
                step=step,
                model_folder=self._assignment.model_folder,
            )
        except (OSError, SafetensorError) as error:
            if not is_write_failure(error):
                raise
            raise NotWrittenError(f"the export of step {step} could not be written: {error}") from error
        log.info("exported", folder=str(folder))
