"""The whole system against one script: steps a minute of the default run, and where its time goes.

Runs `tandem train deploy/runs/tiny.toml` and then benchmarks/single_script.py on the same problems, model, batch and
lengths, one after the other on the same machine, and prints the ratio of their speeds.

    python -m benchmarks.end_to_end [--steps 100] [--seed 1] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUN_FILE = Path("deploy/runs/tiny.toml")


def main() -> None:
    """Runs both and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each (default: 100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        system = _run_system(Path(folder), steps=arguments.steps, seed=arguments.seed)
        script = _run_script(Path(folder), steps=arguments.steps, seed=arguments.seed)
    ratio = system["steps_per_minute"] / script["steps_per_minute"]
    result = {"system": system, "single_script": script, "ratios": {"steps_vs_single_script": ratio}}
    _print(system, script, ratio=ratio)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _run_system(folder: Path, *, steps: int, seed: int) -> dict[str, Any]:
    settings = {
        "run.folder": folder / "runs",
        "run.seed": seed,
        "learner.num_steps": steps,
        # The script measures no accuracy meanwhile either.
        "evaluation.every_steps": 0,
    }
    overrides = [f"--{key}={value}" for key, value in settings.items()]
    subprocess.run([sys.executable, "-m", "deploy.cli", "train", str(RUN_FILE), *overrides], check=True)
    (report,) = (folder / "runs").glob("*/report.json")
    figures: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return figures


def _run_script(folder: Path, *, steps: int, seed: int) -> dict[str, Any]:
    file = folder / "script.json"
    command = ["benchmarks.single_script", "--steps", str(steps), "--seed", str(seed), "--json", str(file)]
    subprocess.run([sys.executable, "-m", *command], check=True)
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return figures


def _print(system: dict[str, Any], script: dict[str, Any], *, ratio: float) -> None:
    print(f"tandem: {system['steps_per_minute']:.0f} steps a minute (median after step 10, waits included)")
    shares = ", ".join(f"{name} {system[f'{name}_share']:.0%}" for name in ("wait", "train", "push", "checkpoint"))
    print(f"  time of the learner: {shares}")
    print(f"single script: {script['steps_per_minute']:.0f} steps a minute")
    print(f"steps_vs_single_script: {ratio:.2f}")


if __name__ == "__main__":
    main()
