"""`tandem serve`: one service in the foreground."""

import asyncio
from pathlib import Path

from deploy.errors import RunFailedError, UserError
from deploy.heavy_imports import heavy_imports
from deploy.placement import Service
from deploy.run_file import RunConfig
from deploy.torchvision_check import check_torchvision
from runtime.disk import NotWrittenError, is_no_room
from runtime.telemetry import make_output_patient, set_up_logging


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
        UserError: A setting, a file or a port is unusable, or the disk is full.
        RunFailedError: A learner could not write what its run must leave behind.
    """
    make_output_patient()
    set_up_logging(service=service)
    if service is not Service.REWARD and config.rollout.model:
        # A reward node has no tokenizer to read.
        from deploy.model_folder import check_model_folder

        check_model_folder(Path(config.rollout.model), is_trained=service is Service.LEARNER)
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
    except NotWrittenError as error:
        raise RunFailedError(str(error)) from error
    except OSError as error:
        if not is_no_room(error):
            raise
        raise UserError(f"{error.filename or service}: {error.strerror}") from error
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
