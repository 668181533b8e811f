"""What a person sees while a run goes on: one live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deploy.run_records import EvaluationRecord, ShownStep

_NUM_ROWS = 12
_PLAIN_SECONDS = 2.0
_PLAIN_STEPS = 10
_FEW_STEPS = 3
_SPEED_STEPS = 50
"""Steps that speed and time left are taken from."""


@dataclass(slots=True)
class Progress:
    """What is known of a run so far."""

    num_steps: int
    """Steps of the whole run."""
    steps: list[ShownStep] = field(default_factory=list)
    """Those done, in order."""
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    """Held-out accuracy, in order."""

    def add(self, record: ShownStep) -> None:
        """Takes a step in; one that was done again replaces what was known from there on."""
        while self.steps and self.steps[-1].step >= record.step:
            self.steps.pop()
        self.steps.append(record)

    def steps_per_minute(self) -> float | None:
        """Median over the last steps, waits included; None before there is one."""
        seconds = [record.step_seconds for record in self.steps[-_SPEED_STEPS:]]
        return 60 / median(seconds) if seconds and median(seconds) > 0 else None

    def seconds_left(self) -> float | None:
        """At the speed of the last steps; None before there are a few, as the first one also waits for a start."""
        speed = self.steps_per_minute() if len(self.steps) >= _FEW_STEPS else None
        return 60 * (self.num_steps - self.steps[-1].step) / speed if speed else None

    def held_out(self, step: int) -> float | None:
        """The held-out accuracy that was newest at a step."""
        known = [record.result.accuracy for record in self.evaluations if record.step <= step]
        return known[-1] if known else None


class Display(Protocol):
    """Where a run says what happens. Used as a context, which begins and ends the live part."""

    def phase(self, text: str) -> None:
        """What is being waited for; replaces what was."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def steps(self, records: Sequence[ShownStep]) -> None:
        """Steps that were done."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """An evaluation that ended."""

    def __enter__(self) -> Self:
        """Begins."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends."""


def make_display(console: Console, *, num_steps: int) -> Display:
    """The live table on a terminal, plain lines elsewhere."""
    return TableDisplay(console, num_steps=num_steps) if console.is_terminal else PlainDisplay(console, num_steps)


class PlainDisplay:
    """A line for every phase, and one for steps every ten steps or two seconds."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console, self._progress = console, Progress(num_steps)
        self._last_step, self._last_time, self._last_phase = 0, 0.0, ""

    def __enter__(self) -> Self:
        """Nothing to begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""

    def phase(self, text: str) -> None:
        """Prints a new phase."""
        if text and text != self._last_phase:
            self.note(text)
        self._last_phase = text

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def steps(self, records: Sequence[ShownStep]) -> None:
        """Prints the last step if ten steps or two seconds have passed, or it is the run's last."""
        for record in records:
            self._progress.add(record)
        if not records:
            return
        step = records[-1].step
        is_due = step - self._last_step >= _PLAIN_STEPS or time.monotonic() - self._last_time >= _PLAIN_SECONDS
        if is_due or step == self._progress.num_steps:
            self._last_step, self._last_time = step, time.monotonic()
            self.note(plain_line(self._progress))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Prints the accuracy."""
        self._progress.evaluations.append(record)
        self.note(evaluation_line(record))


class TableDisplay:
    """A table that grows to a dozen rows, the last one live, with a bar below it."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._progress, self._phase = Progress(num_steps), ""
        self._spinner = Spinner("dots")
        self._begin = time.monotonic()
        self._live = Live(console=console, refresh_per_second=2, get_renderable=self._render)

    def __enter__(self) -> Self:
        """Begins the live part."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the table as it was last."""
        self._phase = ""
        self._live.stop()

    def phase(self, text: str) -> None:
        """Shows a phase below the table."""
        if text != self._phase:
            self._phase, self._begin = text, time.monotonic()

    def note(self, text: str) -> None:
        """Prints a line above the table."""
        self._live.console.print(text, markup=False, highlight=False)

    def steps(self, records: Sequence[ShownStep]) -> None:
        """Takes steps into the table."""
        for record in records:
            self._progress.add(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Takes an evaluation into the table."""
        self._progress.evaluations.append(record)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._progress.steps or self._progress.evaluations:
            parts.append(table(self._progress))
            parts.append(_bar(self._progress))
        if self._phase:
            seconds = time.monotonic() - self._begin
            self._spinner.update(text=Text(f"{self._phase} ({seconds:.0f} s)"))
            parts.append(self._spinner)
        return Group(*parts)


def table(progress: Progress) -> Table:
    """The run so far in at most a dozen rows: each the mean of its steps, the last one up to now."""
    result = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("step", "reward", "accuracy", "held-out", "tokens/s", "staleness", "push s", "steps/min"):
        result.add_column(name, justify="right")
    if not progress.steps:
        result.add_row("0", "", "", _number(progress.held_out(0), 2), *[""] * 4)
        return result
    size = max(1, -(-progress.num_steps // (_NUM_ROWS - 1)))
    blocks: dict[int, list[ShownStep]] = {}
    for record in progress.steps:
        blocks.setdefault((record.step - 1) // size, []).append(record)
    for index, block in enumerate(blocks.values()):
        is_last = index == len(blocks) - 1
        result.add_row(*_cells(progress, block), style="bold" if is_last else "dim")
    return result


def _cells(progress: Progress, block: Sequence[ShownStep]) -> list[str]:
    last, count = block[-1], len(block)
    seconds = sum(record.step_seconds for record in block)
    return [
        str(last.step),
        _number(sum(record.reward_mean for record in block) / count, 2),
        _number(sum(record.accuracy for record in block) / count, 2),
        _number(progress.held_out(last.step), 2),
        f"{sum(record.tokens for record in block) / seconds:,.0f}" if seconds else "",
        _number(sum(record.staleness_mean for record in block) / count, 1),
        _number(sum(record.push_seconds for record in block) / count, 3),
        f"{60 * count / seconds:.0f}" if seconds else "",
    ]


def _bar(progress: Progress) -> RenderableType:
    done = progress.steps[-1].step if progress.steps else 0
    line = Table.grid(padding=(0, 2))
    line.add_row(
        Text(f"step {done}/{progress.num_steps}"),
        ProgressBar(total=progress.num_steps, completed=done, width=40),
        Text(f"{duration(progress.seconds_left())} left"),
    )
    return line


def plain_line(progress: Progress) -> str:
    """The last step in one line."""
    record, speed = progress.steps[-1], progress.steps_per_minute()
    held_out = progress.held_out(record.step)
    return "  ".join(
        [
            f"step {record.step}/{progress.num_steps}",
            f"reward {record.reward_mean:.2f}",
            f"accuracy {record.accuracy:.2f}",
            f"held-out {_number(held_out, 2) or '-'}",
            f"{record.tokens_per_second:,.0f} tokens/s",
            f"staleness {record.staleness_mean:.1f}",
            f"push {record.push_seconds:.3f} s",
            f"{_number(speed, 0) or '-'} steps/min",
            f"{duration(progress.seconds_left())} left",
        ]
    )


def evaluation_line(record: EvaluationRecord) -> str:
    """An evaluation in one line."""
    result = record.result
    unscored = f", {result.num_unscored} could not be scored" if result.num_unscored else ""
    where = {"before": "before training", "during": f"at step {record.step}", "after": "after training"}[record.moment]
    return (
        f"held-out accuracy {where}: {result.accuracy:.3f} +- {result.standard_error:.3f} "
        f"({result.num_correct} of {result.num_problems}{unscored}, {result.seconds:.1f} s)"
    )


def duration(seconds: float | None) -> str:
    """Seconds as m:ss or h:mm:ss; `-:--` if not known."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
