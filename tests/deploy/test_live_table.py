"""What a person sees of a run."""

import io

from rich.console import Console

from deploy.live_table import PlainDisplay, Progress, TableDisplay, duration, make_display, plain_line
from tests.deploy.run_samples import evaluation_record, step_record


def _console(*, is_terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=100, force_terminal=is_terminal), file


def test_a_terminal_gets_a_table_and_a_file_plain_lines() -> None:
    assert isinstance(make_display(_console(is_terminal=True)[0], num_steps=10), TableDisplay)
    assert isinstance(make_display(_console()[0], num_steps=10), PlainDisplay)


def test_a_plain_line_says_where_the_run_is() -> None:
    progress = Progress(num_steps=300)
    for step in range(1, 121):
        progress.add(step_record(step))
    progress.evaluations.append(evaluation_record("during", step=100, accuracy=0.66))

    assert plain_line(progress) == (
        "step 120/300  reward 0.50  accuracy 0.50  held-out 0.66  1,000 tokens/s  staleness 1.0  push 0.100 s  "
        "120 steps/min  1:30 left"
    )


def test_time_left_is_not_told_from_a_single_step() -> None:
    progress = Progress(num_steps=300)
    progress.add(step_record(1, step_seconds=30.0))

    assert plain_line(progress).endswith("-:-- left")


def test_a_pause_between_stop_and_resume_does_not_count_for_the_speed() -> None:
    progress = Progress(num_steps=300)
    for step in range(1, 21):
        progress.add(step_record(step, time_unix=1000.0 + step + (5000 if step > 10 else 0)))

    assert progress.steps_per_minute() == 120


def test_plain_lines_come_every_ten_steps_and_at_the_end() -> None:
    console, file = _console()
    with PlainDisplay(console, 25) as display:
        for step in range(1, 26):
            display.steps([step_record(step)])

    shown = [line.split()[1] for line in file.getvalue().splitlines()]
    assert shown == ["1/25", "11/25", "21/25", "25/25"]


def test_a_phase_is_printed_once() -> None:
    console, file = _console()
    with PlainDisplay(console, 10) as display:
        display.phase("starting rollout-0, learner-0")
        display.phase("starting rollout-0, learner-0")
        display.phase("starting learner-0")
        display.phase("")

    assert file.getvalue().splitlines() == ["starting rollout-0, learner-0", "starting learner-0"]


def test_an_evaluation_is_said_with_its_error_and_what_could_not_be_scored() -> None:
    console, file = _console()
    with PlainDisplay(console, 10) as display:
        display.evaluation(evaluation_record("before", step=0, accuracy=0.41))

    assert file.getvalue() == "held-out accuracy before training: 0.410 +- 0.050 (41 of 100, 1.0 s)\n"


def test_the_table_shows_steps_accuracy_and_the_present_phase() -> None:
    console, file = _console(is_terminal=True)
    with TableDisplay(console, num_steps=24) as display:
        display.evaluation(evaluation_record("before", step=0, accuracy=0.41))
        display.steps([step_record(step) for step in range(1, 13)])
        display.phase("waiting for something")

    shown = file.getvalue()
    for text in ("held-out", "0.41", "steps/min", "step 12/24", "0:06 left"):
        assert text in shown


def test_steps_that_are_done_again_replace_what_was_known() -> None:
    progress = Progress(num_steps=10)
    for step in (1, 2, 3, 2):
        progress.add(step_record(step))

    assert [record.step for record in progress.steps] == [1, 2]


def test_durations_are_read_by_people() -> None:
    assert [duration(seconds) for seconds in (None, 5, 65, 3725)] == ["-:--", "0:05", "1:05", "1:02:05"]
