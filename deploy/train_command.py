"""`tandem train`: the main job in one command."""

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from deploy.data import left_out, load_problems, render_problems, too_long, with_absolute_paths
from deploy.errors import RunFailedError, UserError
from deploy.heavy_imports import heavy_imports
from deploy.invocation import program, shown
from deploy.live_table import make_display
from deploy.local_ray import check_address, ray_cluster
from deploy.memory import fit_into_memory
from deploy.placement import Bundle, ClusterFacts, plan_placement
from deploy.run_file import RunConfig, dump_toml, load_run_file
from deploy.run_folder import RunFolder, find_run_folder, make_run_folder
from deploy.torchvision_check import check_torchvision
from runtime.problems.problem import Problem

TINY = "tiny"
_FIXED = ("run.seed", "run.name", "model.", "data.", "learner.num_ranks", "rollout.model")
"""What a run keeps from its beginning: its checkpoints, its prompts and its ledger depend on it."""
_MODEL_FILE = "config.json"
_INTERRUPTED = 128 + signal.SIGINT


def train(*, run_file: Path | None, overrides: Mapping[str, str], resume: str | None, is_dry_run: bool) -> int:
    """Trains as a run file says, or goes on with an earlier run.

    Args:
        run_file: The settings; may be left out with `resume`.
        overrides: Settings that count more than the file's, as text by dotted key.
        resume: Folder of the run to go on with, or `latest`; None for a new run.
        is_dry_run: Print the settings and the placement, and start nothing.

    Returns:
        The exit code: 0, or 130 if it was interrupted.

    Raises:
        UserError: A setting, a file or a folder is unusable.
        RunFailedError: The run began and could not go on.
    """
    begin = time.monotonic()
    console = Console()
    earlier, config = _settings(run_file, overrides, resume=resume)
    config = config.model_copy(update={"data": with_absolute_paths(config.data)})
    loaded = load_problems(config.data, seed=config.run.seed, max_answer_chars=config.reward.max_answer_chars)
    # Before a model is made, which takes its time.
    check_address(config.ray)
    if is_dry_run:
        _print_plan(config, console=console)
        return 0
    # Until the event loop takes them over; a shell's background jobs begin with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        config = with_model(config, is_resumed=earlier is not None)
        config, memory = fit_into_memory(config, Path(config.rollout.model))
        problems = render_problems(loaded, config)
        notes = left_out(loaded) + too_long(problems)
        if memory is not None and memory.room.is_gpu:
            notes = [memory.line(), *notes]
        for note in notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        folder = earlier or make_run_folder(config, now=datetime.now(UTC))
        folder.write_config(config)
        held_out = problems.held_out.problems
        return _train(config, folder, held_out=held_out, is_resumed=earlier is not None, console=console, begin=begin)
    except KeyboardInterrupt:
        console.print("stopped before training began", highlight=False)
        return _INTERRUPTED


def _settings(
    run_file: Path | None, overrides: Mapping[str, str], *, resume: str | None
) -> tuple[RunFolder | None, RunConfig]:
    if resume is None:
        if run_file is None:
            raise UserError(
                "train: name a run file, as in `tandem train deploy/runs/tiny.toml`, or --resume RUN_FOLDER"
            )
        return None, load_run_file(run_file, overrides)
    if run_file is not None:
        raise UserError(
            f"train: {run_file} and --resume {resume}: a resumed run has its own settings; name one of both"
        )
    runs = load_run_file(None, {key: text for key, text in overrides.items() if key == "run.folder"}).run.folder
    folder = find_run_folder(resume, runs=Path(runs).expanduser())
    for key in overrides:
        if key.startswith(_FIXED):
            raise UserError(f"train: --resume {resume}: {key} cannot change in the middle of a run; start a new one")
    return folder, load_run_file(folder.config_file, overrides)


def with_model(config: RunConfig, *, is_resumed: bool) -> RunConfig:
    """Fills in the folder of the model that servers and learner load; the tiny one is made where it is missing."""
    known = Path(config.rollout.model)
    if is_resumed and (known / _MODEL_FILE).is_file():
        # What `tiny` makes may have changed since; a run goes on with the tokenizer that it began with.
        return config
    if config.model.source == TINY:
        with heavy_imports():
            check_torchvision()
            from deploy.tiny_model import ensure_tiny_model

        model = ensure_tiny_model(cache_folder=Path(config.model.cache_folder).expanduser(), seed=config.run.seed)
    else:
        model = Path(config.model.source).expanduser()
        if not (model / _MODEL_FILE).is_file():
            raise UserError(f"model.source = {config.model.source}: is no model folder, it has no {_MODEL_FILE}")
    rollout = config.rollout.model_copy(update={"model": str(model.absolute())})
    return config.model_copy(update={"rollout": rollout})


def _train(
    config: RunConfig,
    folder: RunFolder,
    *,
    held_out: Sequence[Problem],
    is_resumed: bool,
    console: Console,
    begin: float,
) -> int:
    from deploy.report import print_report, write_report
    from deploy.train_run import TrainRun, run_until_signal

    run_folder = shown(folder.path)
    resume = f"go on with: {program()} train --resume {shlex.quote(str(run_folder))}"
    try:
        with make_display(console, num_steps=config.learner.num_steps) as display:
            display.note(f"run folder: {run_folder}")
            display.phase("starting Ray")
            with ray_cluster(config.ray) as facts:
                bundles = plan_placement(config, facts)
                run = TrainRun(
                    config,
                    folder=folder,
                    bundles=bundles,
                    held_out=held_out,
                    is_resumed=is_resumed,
                    display=display,
                )
                is_complete = asyncio.run(run_until_signal(run.run()))
                display.phase("stopping Ray")
            display.phase("")
    except RunFailedError as error:
        raise RunFailedError(f"{error}; {resume}") from error
    if not is_complete:
        console.print(f"stopped; {resume}", highlight=False, soft_wrap=True)
        return _INTERRUPTED
    report = write_report(folder, seconds_total=time.monotonic() - begin)
    print_report(report, folder=run_folder, console=console)
    return 0


def _print_plan(config: RunConfig, *, console: Console) -> None:
    cores = config.ray.num_cpus or len(os.sched_getaffinity(0))
    console.print(dump_toml(config), markup=False, highlight=False, soft_wrap=True)
    console.print(f"# Placement, if the cluster is this machine with {cores} cores:", highlight=False)
    for bundle in plan_placement(config, ClusterFacts(num_cpus=cores, num_gpus=0)):
        console.print(_plan_line(bundle), highlight=False)


def _plan_line(bundle: Bundle) -> str:
    return f"# {bundle.name}: {bundle.num_cpus:g} cores, {bundle.num_gpus:g} GPUs"
