"""Installs the large extras one after the other, starts what each promises, and prints sizes and times.

    python -m tests.packaging.large_extras [--pip-arguments "..."] [learner rollout-cpu cpu]

Each is gigabytes, so no test run takes them: `make test-packaging` does.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from deploy.torchvision_check import CURE
from tests.models import save_tiny_qwen2
from tests.packaging.environments import ROOT, Environment, build_wheel, make_environment

TINY = ROOT / "deploy" / "runs" / "tiny.toml"
_START_SECONDS = 180.0
_TRAIN_SECONDS = 600.0


def check_learner(environment: Environment, model: Path) -> None:
    """Its learner starts and waits for servers."""
    run_folder = environment.folder / "run"
    run_folder.mkdir()
    arguments = (TINY, "--rollout.model", model, "--run-folder", run_folder)
    with environment.serving("learner", *arguments, timeout_seconds=_START_SECONDS):
        pass


def check_rollout(environment: Environment, model: Path) -> None:
    """Its rollout server loads a model and serves; the reward service is not there."""
    with environment.serving("rollout", TINY, "--rollout.model", model, timeout_seconds=_START_SECONDS):
        pass


def check_all(environment: Environment, model: Path) -> None:
    """It serves, and trains for two steps through all services."""
    check_rollout(environment, model)
    steps = ("--learner.num_steps", "2", "--evaluation.num_problems", "16", "--model.source", model)
    done = environment.tandem("train", TINY, *steps, timeout_seconds=_TRAIN_SECONDS)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


CHECKS: dict[str, Callable[[Environment, Path], None]] = {
    "learner": check_learner,
    "rollout-cpu": check_rollout,
    "cpu": check_all,
}


def remove_unfit_torchvision(environment: Environment) -> str:
    """Does what the program says where pip brought a torchvision for another torch; returns what was said."""
    ended = environment.tandem("serve", "rollout", "--rollout.model", "nowhere", timeout_seconds=_START_SECONDS)
    if CURE not in ended.stderr:
        return "torchvision fits, or is not there"
    assert ended.returncode == 2, ended.stderr
    python = ("-m", "pip", "--python", str(environment.python))
    removed = Environment(Path(sys.prefix)).run(*python, *shlex.split(CURE)[1:], timeout_seconds=120)
    assert removed.returncode == 0, removed.stderr
    return ended.stderr.strip().splitlines()[-1]


def main() -> None:
    """Checks the extras that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", default=list(CHECKS), help=", ".join(CHECKS))
    parser.add_argument("--pip-arguments", default="", help='for example "--extra-index-url URL"')
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-packaging-") as folder:
        wheel = build_wheel(Path(folder) / "wheel")
        model = Path(folder) / "model"
        save_tiny_qwen2(model)
        for extra in parsed.extras:
            begin = time.monotonic()
            with tempfile.TemporaryDirectory(dir=folder) as venv:
                arguments = shlex.split(parsed.pip_arguments)
                environment = make_environment(Path(venv) / "venv", wheel=wheel, extra=extra, arguments=arguments)
                installed = time.monotonic()
                size_gb = environment.size_bytes() / 1e9
                said = remove_unfit_torchvision(environment) if environment.has("vllm") else "no vLLM"
                left_gb = environment.size_bytes() / 1e9
                CHECKS[extra](environment, model)
                print(
                    f"{extra}: installed in {installed - begin:.0f} s, {size_gb:.1f} GB ({left_gb:.1f} GB left); "
                    f"works, checked in {time.monotonic() - installed:.0f} s; {said}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
