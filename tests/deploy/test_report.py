"""The report of a run, from made-up records."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from deploy.report import make_report, markdown, print_report, spark_line, write_report
from deploy.run_folder import RunFolder
from deploy.run_records import append_evaluation
from learner.ledger import Ledger
from learner.ledger_verdict import LedgerVerdict
from tests.deploy.run_samples import evaluation_record, step_record, write_metrics

VERDICT = LedgerVerdict(
    issued=3840, trained=3800, dropped={"run_ended": 30}, failed={"x": 10}, open=0, lost=0, trained_twice=0, problems=()
)
STEPS = [step_record(step) for step in range(1, 31)]
EVALUATIONS = [
    evaluation_record("before", step=0, accuracy=0.4),
    evaluation_record("during", step=20, accuracy=0.7),
    evaluation_record("after", step=30, accuracy=0.9),
]
REQUIRED_KEYS = {
    "accuracy_before",
    "accuracy_after",
    "steps",
    "seconds_total",
    "steps_per_minute",
    "samples_issued",
    "samples_lost",
    "samples_trained_twice",
    "max_logprob_difference",
}


def test_the_figures_are_worked_out_after_the_warm_up() -> None:
    report = make_report(run_id="x", steps=STEPS, evaluations=EVALUATIONS, verdict=VERDICT, seconds_total=60)

    assert (report.accuracy_before, report.accuracy_after, report.steps) == (0.4, 0.9, 30)
    assert report.steps_per_minute == pytest.approx(120)
    assert report.tokens_per_second == pytest.approx(1000)
    assert (report.wait_share, report.train_share, report.push_share) == pytest.approx((0.4, 0.4, 0.2))
    assert report.max_logprob_difference == pytest.approx(3e-5)
    assert (report.samples_issued, report.samples_dropped, report.samples_failed) == (3840, 30, 10)
    assert [point.step for point in report.held_out_curve] == [0, 20, 30]


def test_waits_between_steps_count_for_the_speed() -> None:
    slow = [step_record(step, time_unix=1000.0 + 2 * step) for step in range(1, 31)]

    report = make_report(run_id="x", steps=slow, evaluations=[], verdict=VERDICT, seconds_total=60)

    assert report.steps_per_minute == pytest.approx(30)


def test_a_run_without_steps_has_a_report_with_gaps() -> None:
    report = make_report(run_id="x", steps=[], evaluations=[], verdict=VERDICT, seconds_total=1)

    assert (report.steps, report.steps_per_minute, report.accuracy_after) == (0, None, None)
    assert "| held-out accuracy after | - |" in markdown(report, folder=Path("runs/x"))


def test_the_folder_gets_a_report_for_programs_one_for_people_and_the_curve(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_metrics(folder.metrics_file, STEPS)
    for record in EVALUATIONS:
        append_evaluation(folder.evaluations_file, record)
    Ledger(folder.ledger_file, start_step=0).close_run("run_ended")

    write_report(folder, seconds_total=60)

    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report.keys() >= REQUIRED_KEYS
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "| 20 | 0.700 | 0.050 |" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_the_terminal_shows_the_figures_and_what_to_try_next() -> None:
    report = make_report(run_id="x", steps=STEPS, evaluations=EVALUATIONS, verdict=VERDICT, seconds_total=60)
    console = Console(file=io.StringIO(), width=100)

    print_report(report, folder=Path("runs/x"), console=console)

    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.40 ▄▆█ 0.90" in shown
    assert "tandem ledger verify runs/x" in shown


def test_a_spark_line_ends_in_figures() -> None:
    assert spark_line([0.0, 0.5, 1.0]) == "0.00 ▁▅█ 1.00"
