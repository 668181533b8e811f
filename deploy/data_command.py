"""`tandem data check`: what a run would be trained on, before it is."""

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from deploy.data import RenderedPart, RunProblems, left_out, load_problems, render_problems, too_long
from deploy.heavy_imports import heavy_imports
from deploy.run_file import RunConfig, load_run_file
from runtime.problems.problem import Problem

_NUM_SHOWN = 10
_INTEGER = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?\d*\.\d+")
_FRACTION = re.compile(r"[+-]?(\\[dt]?frac\s*\{?-?\d+\}?\s*\{?\d+\}?|\d+/\d+)")
_ANSWER_FORMS = (("integer", _INTEGER), ("decimal", _DECIMAL), ("fraction", _FRACTION))


def check_data(*, run_file: Path, overrides: Mapping[str, str]) -> int:
    """Prints where the problems come from, what is left out, lengths, forms of answers and ten rendered prompts.

    Args:
        run_file: The run whose data is looked at.
        overrides: Settings that count more than the file's, as text by dotted key.

    Returns:
        The exit code, 0.

    Raises:
        UserError: A setting, a file or the model is unusable, as when the run is started.
    """
    config = load_run_file(run_file, overrides)
    loaded = load_problems(config.data, seed=config.run.seed, max_answer_chars=config.reward.max_answer_chars)
    with heavy_imports():
        from deploy.train_command import with_model
    rendered = render_problems(loaded, with_model(config, is_resumed=False))
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    for line in (
        *_source_lines(config, loaded),
        *_part_lines("train", rendered.train),
        *_part_lines("held out", rendered.held_out),
        *(f"note        {note}" for note in (*left_out(loaded), *too_long(rendered))),
    ):
        console.print(line)
    _print_prompts(rendered.train.problems, seed=config.run.seed, console=console)
    return 0


def _source_lines(config: RunConfig, loaded: RunProblems) -> list[str]:
    lines = [
        f"source      {read.name}: {read.num_rows:,} {read.unit}s, {len(read.problems):,} distinct problems"
        for read in loaded.sources
    ] or [f"source      {config.data.source}"]
    left_over = (
        f"; {loaded.num_left_over:,} problems are beyond data.num_train = {config.data.num_train} (0 takes all)"
        if loaded.num_left_over
        else ""
    )
    return [*lines, f"template    {config.data.template}{left_over}"]


def _part_lines(name: str, part: RenderedPart) -> list[str]:
    if not part.problems:
        return [f"{name:<12}no problems"]
    lengths = sorted(part.lengths)
    kinds = Counter(problem.kind for problem in part.problems if problem.kind)
    tokens = f"min {lengths[0]:,}, median {median(lengths):,.0f}, p95 {lengths[len(lengths) * 95 // 100]:,}"
    lines = [
        f"{name:<12}{len(part.problems):,} problems",
        f"  tokens    {tokens}, max {lengths[-1]:,}; limit {part.limit:,}, {len(part.too_long):,} prompts over it",
        f"  answers   {_counts(Counter(_answer_form(problem.answer) for problem in part.problems))}",
    ]
    return [*lines, f"  kinds     {_counts(kinds)}"] if kinds else lines


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())


def _answer_form(answer: str) -> str:
    return next((name for name, form in _ANSWER_FORMS if form.fullmatch(answer)), "other")


def _print_prompts(problems: Sequence[Problem], *, seed: int, console: Console) -> None:
    """Prints prompts as they are tokenised, drawn by the seed, in the order of training data."""
    drawn = random.Random(f"data/{seed}/check").sample(range(len(problems)), min(_NUM_SHOWN, len(problems)))
    for place in sorted(drawn):
        problem = problems[place]
        kind = f", {problem.kind}" if problem.kind else ""
        console.print(Rule(Text(f"{problem.problem_id}{kind}"), align="left"))
        console.print(problem.prompt)
        console.print(f"=> {problem.answer}")
