"""`tandem train`: the main job in one command."""

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from deploy.data import RunProblems, left_out, load_problems, render_problems, too_long, with_absolute_paths
from deploy.disk import DiskWatch, check_folder, check_room
from deploy.errors import RunFailedError, UserError
from deploy.gpus import visible_gpus
from deploy.invocation import program, shown
from deploy.live_table import make_display
from deploy.local_ray import check_address, ray_cluster
from deploy.memory import fit_into_memory
from deploy.model_folder import CONFIG_FILE, check_context_length, check_model_folder
from deploy.model_source import resolve_model
from deploy.placement import Bundle, ClusterFacts, plan_placement
from deploy.problem_pin import pin_problems
from deploy.run_file import RunConfig, dump_toml, load_run_file
from deploy.run_folder import RunFolder, find_run_folder, make_run_folder, rewrite_config
from deploy.run_records import read_steps
from runtime.problems.problem import Problem

_FIXED = ("run.seed", "run.name", "model.", "data.", "learner.num_ranks", "rollout.model")
"""What a run keeps from its beginning: its checkpoints, its prompts and its ledger depend on it."""
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
    if earlier is not None:
        _require_steps_left(earlier, config)
    config = config.model_copy(update={"data": with_absolute_paths(config.data)})
    loaded = load_problems(config.data, seed=config.run.seed, max_answer_chars=config.reward.max_answer_chars)
    # Before a model is made, which takes its time.
    check_address(config.ray)
    if is_dry_run:
        _print_plan(config, console=console)
        return 0
    if earlier is None:
        check_folder(config)
    # Until the event loop takes them over; a shell's background jobs begin with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        ready = _prepare(config, loaded, earlier=earlier, console=console)
        return _train(ready, console=console, begin=begin)
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


def _require_steps_left(earlier: RunFolder, config: RunConfig) -> None:
    """A run that has its report has nothing left to do; one without it is made to write it."""
    steps = read_steps(earlier.metrics_file)
    if earlier.report_file.is_file() and steps and steps[-1].step >= config.learner.num_steps:
        raise UserError(
            f"train: --resume {earlier.path}: the run is complete with {steps[-1].step} steps; go on to more with "
            f"--learner.num_steps {2 * config.learner.num_steps}"
        )


def with_model(config: RunConfig, *, is_resumed: bool) -> RunConfig:
    """Fills in the folder of the model that servers and learner load; it is made or fetched where it is missing."""
    model = Path(config.rollout.model)
    # What `tiny` makes or a hub has may have changed since; a run goes on with the tokenizer that it began with.
    if not is_resumed or not (model / CONFIG_FILE).is_file():
        model = resolve_model(config.model, seed=config.run.seed)
    check_model_folder(model)
    check_context_length(model, config.rollout.context_length)
    rollout = config.rollout.model_copy(update={"model": str(model)})
    return config.model_copy(update={"rollout": rollout})


@dataclass(frozen=True, slots=True)
class _ReadyRun:
    """A run that nothing speaks against any more."""

    config: RunConfig
    folder: RunFolder
    held_out: Sequence[Problem]
    watch: DiskWatch
    is_resumed: bool


def _prepare(config: RunConfig, loaded: RunProblems, *, earlier: RunFolder | None, console: Console) -> _ReadyRun:
    """Brings the model and looks whether all fits together, into memory and onto the disk; makes the run folder."""
    config = with_model(config, is_resumed=earlier is not None)
    model = Path(config.rollout.model)
    planned, memory = fit_into_memory(config, model)
    problems = render_problems(loaded, config)
    notes = left_out(loaded) + too_long(problems)
    if memory is not None and memory.room.is_gpu:
        notes = [memory.line(), *notes]
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    needs = check_room(config, model_folder=model, resumed=None if earlier is None else earlier.path)
    folder = earlier or make_run_folder(config, planned=planned, now=datetime.now(UTC))
    pin_problems(folder, problems)
    if earlier is not None:
        rewrite_config(folder, config, planned=planned)
    watch = DiskWatch(folder.path, checkpoint_bytes=needs.checkpoint_bytes)
    return _ReadyRun(planned, folder, problems.held_out.problems, watch, is_resumed=earlier is not None)


def _train(ready: _ReadyRun, *, console: Console, begin: float) -> int:
    from deploy.report import print_report, write_report
    from deploy.train_run import TrainRun, run_until_signal

    config, folder = ready.config, ready.folder
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
                    held_out=ready.held_out,
                    is_resumed=ready.is_resumed,
                    display=display,
                    watch=ready.watch,
                )
                is_complete = asyncio.run(run_until_signal(run.run()))
                display.phase("stopping Ray")
            display.phase("")
    except RunFailedError as error:
        # A log on a full disk lacks the service's last words.
        reason = "; ".join(filter(None, (str(error), ready.watch.shortage())))
        raise RunFailedError(f"{reason}; {folder.kept()}; {resume}") from error
    if not is_complete:
        console.print(f"stopped; {folder.kept()}; {resume}", highlight=False, soft_wrap=True)
        return _INTERRUPTED
    try:
        report = write_report(folder, seconds_total=time.monotonic() - begin)
    except OSError as error:
        # All else of the run is there; a resume has nothing left to do but this.
        raise RunFailedError(
            f"the report could not be written: {error.strerror or error}; {folder.kept()}; {resume}"
        ) from error
    print_report(report, folder=run_folder, console=console)
    return 0


def _print_plan(config: RunConfig, *, console: Console) -> None:
    cores, gpus = config.ray.num_cpus or len(os.sched_getaffinity(0)), visible_gpus()
    console.print(dump_toml(config), markup=False, highlight=False, soft_wrap=True)
    has = f"{cores} cores and {len(gpus)} GPUs"
    console.print(f"# Placement, if the cluster is this machine with {has}:", highlight=False)
    for bundle in plan_placement(config, ClusterFacts(num_cpus=cores, num_gpus=len(gpus))):
        console.print(_plan_line(bundle), highlight=False)
    model = Path(config.model.source).expanduser()
    if (model / CONFIG_FILE).is_file():
        _planned, memory = fit_into_memory(config, model)
        line = "each process has a GPU of its own" if memory is None else memory.line()
    else:
        line = "planned when the model is there"
    console.print(f"# Memory: {line}", highlight=False, soft_wrap=True)


def _plan_line(bundle: Bundle) -> str:
    return f"# {bundle.name}: {bundle.num_cpus:g} cores, {bundle.num_gpus:g} GPUs"
