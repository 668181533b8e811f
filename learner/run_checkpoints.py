"""What a checkpoint of a run holds: when it is written, taken up again, pruned, and what is exported at the end."""

import time

import structlog

from learner import metrics
from learner.assignment import LearnerAssignment
from learner.checkpoint import CheckpointError, Progress, newest_complete, prune, write_checkpoint
from learner.export import write_export
from learner.prompts import PromptSource
from learner.ranks import Leader

log = structlog.get_logger()


class RunCheckpoints:
    """The checkpoints of one run: the policy's state and the place in the prompts, together."""

    def __init__(self, assignment: LearnerAssignment, *, leader: Leader, prompts: PromptSource) -> None:
        self._assignment, self._leader, self._prompts = assignment, leader, prompts

    def resume(self) -> int:
        """Takes up the newest complete checkpoint.

        Returns:
            Its step; 0 without any, for the initial model.

        Raises:
            ValueError: It belongs to another number of ranks, another seed or other problems.
        """
        checkpoint = newest_complete(self._assignment.run_folder)
        if checkpoint is None:
            log.info("no checkpoint yet: from the beginning")
            return 0
        progress, num_ranks = checkpoint.progress, self._assignment.settings.num_ranks
        if progress.num_ranks != num_ranks:
            raise ValueError(f"learner.num_ranks = {num_ranks}: the checkpoint was written by {progress.num_ranks}")
        self._prompts.restore(progress.prompts)
        self._leader.load_state(checkpoint.state_folder)
        log.info("resumed", step=progress.step, num_prompts_again=len(progress.prompts.unfinished))
        return progress.step

    def save(self, step: int, *, samples_issued: int) -> bool:
        """Writes a checkpoint and prunes old ones; a full disk keeps the previous one, and training goes on.

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
        try:
            write_checkpoint(self._assignment.run_folder, progress, save_state=self._leader.save_state)
        except CheckpointError as error:
            metrics.CHECKPOINTS.labels("failed").inc()
            log.warning("checkpoint failed: the previous one stays the newest", step=step, reason=str(error))
            return False
        metrics.CHECKPOINTS.labels("written").inc()
        metrics.LAST_CHECKPOINT.set(time.time())
        prune(self._assignment.run_folder, keep=self._assignment.settings.checkpoints_kept)
        return True

    def export(self, step: int) -> None:
        """Writes the policy as a folder that transformers and vLLM load."""
        folder = write_export(
            self._assignment.run_folder,
            self._leader.parameters_for_push(),
            step=step,
            model_folder=self._assignment.model_folder,
        )
        log.info("exported", folder=str(folder))
