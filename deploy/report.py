"""What came out of a run: report.json for programs, report.md for people, the same on the terminal."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from deploy.curve import draw_curve
from deploy.invocation import program
from deploy.live_table import duration
from deploy.run_folder import RunFolder
from deploy.run_records import EvaluationRecord, ShownStep, read_evaluations, read_steps
from learner.ledger_verdict import LedgerVerdict, verify

_WARM_UP_STEPS = 10
"""Speed and shares leave the first steps out, which load and compile."""
_NUM_PARTS = 24
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Held-out accuracy at a step."""

    step: int
    accuracy: float
    standard_error: float


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run; None where there is nothing to take them from."""

    run_id: str
    accuracy_before: float | None
    """Held-out, of the initial weights."""
    accuracy_after: float | None
    """Held-out, of the last weights."""
    steps: int
    """Optimizer steps done."""
    seconds_total: float
    """Of the command, from its start to this report."""
    steps_per_minute: float | None
    """Median after step 10, waits included."""
    tokens_per_second: float | None
    """Completion tokens trained on, after step 10, waits included."""
    wait_share: float | None
    """Part of the time after step 10 in which the learner waited for scored groups."""
    train_share: float | None
    """The same for updates."""
    push_share: float | None
    """The same for weight pushes."""
    checkpoint_share: float | None
    """The same for checkpoints."""
    max_logprob_difference: float | None
    """Largest one between the learner's and a server's logprobs under the same weights."""
    samples_issued: int
    samples_trained: int
    samples_dropped: int
    samples_failed: int
    samples_lost: int
    samples_trained_twice: int
    held_out_curve: tuple[CurvePoint, ...]
    training_curve: tuple[float, ...]
    """Share of correct training rollouts, over at most 24 equal parts of the run."""

    def to_json(self) -> str:
        """The content of report.json."""
        return json.dumps(asdict(self), indent=2) + "\n"


def write_report(folder: RunFolder, *, seconds_total: float) -> Report:
    """Works the figures out from the run's files, and writes report.json, report.md and curve.png beside them.

    Args:
        folder: The run, ended.
        seconds_total: How long the command has taken.
    """
    steps = read_steps(folder.metrics_file)
    evaluations = read_evaluations(folder.evaluations_file)
    report = make_report(
        run_id=folder.run_id,
        steps=steps,
        evaluations=evaluations,
        verdict=verify(folder.ledger_file),
        seconds_total=seconds_total,
    )
    draw_curve(
        folder.path / "curve.png",
        title=folder.run_id,
        training=[(record.step, record.accuracy) for record in steps],
        held_out=[(point.step, point.accuracy, point.standard_error) for point in report.held_out_curve],
    )
    folder.report_file.write_text(report.to_json(), encoding="utf-8")
    (folder.path / "report.md").write_text(markdown(report, folder=folder.path), encoding="utf-8")
    return report


def make_report(
    *,
    run_id: str,
    steps: Sequence[ShownStep],
    evaluations: Sequence[EvaluationRecord],
    verdict: LedgerVerdict,
    seconds_total: float,
) -> Report:
    """The figures of a run.

    Args:
        run_id: Its name.
        steps: Every step, in order.
        evaluations: Every evaluation.
        verdict: What the ledger proves.
        seconds_total: How long the command has taken.
    """
    warm = [record for record in steps if record.step > _WARM_UP_STEPS]
    busy = sum(record.step_seconds for record in warm)
    largest = [record.max_logprob_difference for record in steps if record.max_logprob_difference is not None]

    def share(seconds: float) -> float | None:
        return seconds / busy if busy else None

    return Report(
        run_id=run_id,
        accuracy_before=_accuracy(evaluations, "before"),
        accuracy_after=_accuracy(evaluations, "after"),
        steps=steps[-1].step if steps else 0,
        seconds_total=seconds_total,
        steps_per_minute=_steps_per_minute(steps),
        tokens_per_second=sum(record.tokens for record in warm) / busy if busy else None,
        wait_share=share(sum(record.wait_seconds for record in warm)),
        train_share=share(sum(record.train_seconds for record in warm)),
        push_share=share(sum(record.push_seconds for record in warm)),
        checkpoint_share=share(sum(record.checkpoint_seconds for record in warm)),
        max_logprob_difference=max(largest, default=None),
        samples_issued=verdict.issued,
        samples_trained=verdict.trained,
        samples_dropped=sum(verdict.dropped.values()),
        samples_failed=sum(verdict.failed.values()),
        samples_lost=verdict.lost,
        samples_trained_twice=verdict.trained_twice,
        held_out_curve=tuple(
            CurvePoint(record.step, record.result.accuracy, record.result.standard_error)
            for record in sorted(evaluations, key=lambda record: (record.step, record.time_unix))
        ),
        training_curve=_parts([record.accuracy for record in steps]),
    )


def _parts(values: Sequence[float]) -> tuple[float, ...]:
    """Means of equal parts."""
    size = max(1, -(-len(values) // _NUM_PARTS))
    return tuple(fmean(values[first : first + size]) for first in range(0, len(values), size))


def _accuracy(evaluations: Sequence[EvaluationRecord], moment: str) -> float | None:
    found = [record.result.accuracy for record in evaluations if record.moment == moment]
    return found[-1] if found else None


def _steps_per_minute(steps: Sequence[ShownStep]) -> float | None:
    """From the times at which steps ended, so that nothing between two steps is left out."""
    seconds = [
        later.time_unix - earlier.time_unix for earlier, later in pairwise(steps) if earlier.step >= _WARM_UP_STEPS
    ]
    return 60 / median(seconds) if seconds and median(seconds) > 0 else None


def figures(report: Report) -> list[tuple[str, str]]:
    """Name and value of every figure, as people read them."""
    return [
        ("held-out accuracy before", _number(report.accuracy_before, 3)),
        ("held-out accuracy after", _number(report.accuracy_after, 3)),
        ("steps", str(report.steps)),
        ("time in all", duration(report.seconds_total)),
        ("steps a minute (median)", _number(report.steps_per_minute, 0)),
        ("tokens trained on a second", _number(report.tokens_per_second, 0)),
        (
            "time waiting / training / pushing",
            " / ".join(map(_percent, (report.wait_share, report.train_share, report.push_share))),
        ),
        (
            "largest logprob difference",
            "-" if report.max_logprob_difference is None else f"{report.max_logprob_difference:.1e}",
        ),
        (
            "samples issued / trained / dropped / failed",
            " / ".join(
                f"{count:,}"
                for count in (
                    report.samples_issued,
                    report.samples_trained,
                    report.samples_dropped,
                    report.samples_failed,
                )
            ),
        ),
        ("samples lost / trained twice", f"{report.samples_lost} / {report.samples_trained_twice}"),
    ]


def next_commands(report: Report, *, folder: Path) -> list[tuple[str, str]]:
    """What to try next: the command, and what it does."""
    config, tandem = folder / "config.toml", program()
    return [
        (f"{tandem} ledger verify {folder}", "prove that every sample ended exactly once"),
        (f"{tandem} train --resume {folder} --learner.num_steps {2 * report.steps}", "go on to more steps"),
        (f"{tandem} train {config} --run.seed 2", "the same with another seed"),
        (f"{tandem} train {config} --rollout.num_servers 2", "the same with two rollout servers"),
        (f"{tandem} train {config} --learner.max_staleness 0", "the same, exactly on-policy"),
    ]


def markdown(report: Report, *, folder: Path) -> str:
    """The content of report.md."""
    lines = [f"# {report.run_id}", "", "![accuracy over steps](curve.png)", "", "| figure | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in figures(report)]
    lines += ["", "## Held-out accuracy", "", "| step | accuracy | standard error |", "|---:|---:|---:|"]
    lines += [
        f"| {point.step} | {point.accuracy:.3f} | {point.standard_error:.3f} |" for point in report.held_out_curve
    ]
    lines += ["", "## What to try next", ""]
    lines += [f"- `{command}`: {what}" for command, what in next_commands(report, folder=folder)]
    return "\n".join(lines) + "\n"


def print_report(report: Report, *, folder: Path, console: Console) -> None:
    """The report on the terminal, or as plain lines."""
    table = Table(title=f"Report of {report.run_id}", title_justify="left", box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in figures(report):
        table.add_row(name, value)
    for name, curve in (
        ("training", report.training_curve),
        ("held-out", [point.accuracy for point in report.held_out_curve]),
    ):
        if len(curve) > 1:
            table.add_row(f"{name} accuracy, start to end", spark_line(curve))
    console.print(table)
    console.print(f"\nreport and curve: {folder}/report.md, report.json, curve.png", highlight=False, soft_wrap=True)
    console.print("\nWhat to try next:", highlight=False)
    for command, what in next_commands(report, folder=folder):
        console.print(f"  {command}\n      {what}", markup=False, highlight=False, soft_wrap=True)


def spark_line(shares: Sequence[float]) -> str:
    """Shares in [0, 1] as a line of bars, with the first and the last in figures."""
    bars = "".join(_SPARKS[min(len(_SPARKS) - 1, int(share * len(_SPARKS)))] for share in shares)
    return f"{shares[0]:.2f} {bars} {shares[-1]:.2f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
