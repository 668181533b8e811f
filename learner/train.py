"""The main loop: take groups, update, push, again."""

import os
import signal
from pathlib import Path

import structlog

from learner.assignment import LearnerAssignment
from learner.policy import Policy
from learner.ranks import follow
from learner.run import Run
from runtime.telemetry import set_up_logging

__all__ = ["LearnerAssignment", "run_learner"]

log = structlog.get_logger()


def run_learner(assignment: LearnerAssignment, *, ready_file: Path | None = None) -> None:
    """Trains until all steps are done, or the run is asked to stop; every rank calls it.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the environment say which rank this is.

    Args:
        assignment: What to do; the same on every rank.
        ready_file: Where rank 0 writes the address of its LearnerService once it takes registrations.

    Raises:
        ValueError: A setting or the model folder is unusable.
        WeightPushError: No rollout server is left.
    """
    rank = int(os.environ.get("RANK", "0"))
    log_name = "training.log" if rank == 0 else f"training_rank_{rank}.log"
    set_up_logging(service="learner", file=assignment.run_folder / log_name)
    policy = Policy.load(assignment.model_folder, assignment.settings)
    if rank != 0:
        # Rank 0 ends the others when it has made its last checkpoint with them.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        follow(policy)
        return
    with Run.begin(assignment, policy, ready_file=ready_file) as run:
        train(run)


def train(run: Run) -> None:
    """GRPO, off-policy by at most `max_staleness` versions."""
    if not run.wait_for_servers():
        return
    run.push()
    while run.is_going_on:
        groups = run.next_groups()
        if groups is None:
            break
        report = run.update(groups)
        if report.is_applied:
            run.push()
        run.end_step(groups, report)
