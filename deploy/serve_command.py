"""`tandem serve`: one service in the foreground."""

import asyncio
from pathlib import Path

from deploy.errors import UserError
from deploy.heavy_imports import heavy_imports
from deploy.placement import Service
from deploy.run_file import RunConfig
from deploy.torchvision_check import check_torchvision
from runtime.telemetry import set_up_logging


def serve(
    service: Service, *, config: RunConfig, ready_file: Path | None, run_folder: Path | None, resume: bool
) -> int:
    """Runs a service until it is told to end, or for a learner until its run is done.

    Args:
        service: Which one.
        config: Settings of the run that it belongs to.
        ready_file: Where it writes its addresses once it serves.
        run_folder: Where a learner puts its files.
        resume: Whether a learner goes on from the newest checkpoint in its folder.

    Returns:
        The exit code, 0.

    Raises:
        UserError: A setting, a file or a port is unusable.
    """
    set_up_logging(service=service)
    try:
        match service:
            case Service.ROLLOUT:
                with heavy_imports():
                    check_torchvision()
                    from rollout_server.server import serve as serve_rollout

                asyncio.run(serve_rollout(config.rollout, ready_file=ready_file))
            case Service.REWARD:
                with heavy_imports():
                    from reward_service.server import serve as serve_reward

                asyncio.run(serve_reward(config.reward, ready_file=ready_file))
            case Service.LEARNER:
                if run_folder is None:
                    raise UserError("serve learner: --run-folder FOLDER is required")
                _serve_learner(config, ready_file=ready_file, run_folder=run_folder, resume=resume)
    except ValueError as error:
        raise UserError(str(error)) from error
    return 0


def _serve_learner(config: RunConfig, *, ready_file: Path | None, run_folder: Path, resume: bool) -> None:
    with heavy_imports():
        check_torchvision()
        from deploy.data import run_problems
        from learner.train import LearnerAssignment, run_learner

    assignment = LearnerAssignment(
        run_id=run_folder.absolute().name,
        run_folder=run_folder,
        model_folder=Path(config.rollout.model),
        seed=config.run.seed,
        settings=config.learner,
        problems=run_problems(config).train.problems,
        num_rollout_servers=config.rollout.num_servers,
        num_reward_servers=config.reward.num_servers,
        resume=resume,
    )
    run_learner(assignment, ready_file=ready_file)
