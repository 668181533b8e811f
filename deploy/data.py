"""The problems of a run: made on the spot, or read from files or datasets, and rendered for the run's model."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.data_config import DataSection
from deploy.errors import UserError
from deploy.run_file import RunConfig
from runtime.problems.arithmetic import arithmetic_problems
from runtime.problems.columns import ColumnNames
from runtime.problems.dataset import ReadProblems, read_problems, shown_numbers
from runtime.problems.hub import read_hub
from runtime.problems.problem import Problem
from runtime.problems.rows import DataError, Table, is_file, read_file
from runtime.problems.template import load_template, prompt_renderer, template_names
from runtime.problems.tokenizer import TextTokenizer, load_tokenizer

ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True)
class RunProblems:
    """What a run trains on, and what it is tested on; no problem is in both.

    Attributes:
        train: Problems to train on.
        held_out: Problems to measure accuracy on.
        sources: What became of the rows of each file or dataset; the second one is of the held-out problems.
        num_in_both: Problems of the training source that are left out because the held-out source has them as well.
        num_left_over: Problems beyond `num_train`.
    """

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    sources: tuple[ReadProblems, ...] = ()
    num_in_both: int = 0
    num_left_over: int = 0


@dataclass(frozen=True, slots=True)
class RenderedPart:
    """Problems whose prompts are what is tokenised.

    Attributes:
        problems: Those whose prompts fit.
        lengths: Tokens of their prompts, in the same order.
        limit: Most tokens that a prompt may have: the context without the completion.
        too_long: Tokens of the prompts that are left out.
    """

    problems: tuple[Problem, ...]
    lengths: tuple[int, ...]
    limit: int
    too_long: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RenderedProblems:
    """Both parts of a run's problems, rendered."""

    train: RenderedPart
    held_out: RenderedPart


@dataclass(frozen=True, slots=True)
class _Place:
    """One source: the setting that names it, and which part of a dataset it is."""

    setting: str
    source: str
    subset: str
    split: str
    revision: str


def load_problems(settings: DataSection, *, seed: int, max_answer_chars: int) -> RunProblems:
    """Makes or reads the problems, whose prompts are the bare questions; the same settings and seed give the same.

    Args:
        settings: Where they come from.
        seed: Decides arithmetic problems, and which problems of a file are held out.
        max_answer_chars: Longest reference answer that the reward service takes.

    Raises:
        UserError: A file or dataset cannot be read or has no problems as the settings say, or there are too few.
    """
    _check_template(settings.template)
    if settings.source == ARITHMETIC:
        _check_made(settings)
        try:
            made = arithmetic_problems(seed=seed, num_train=settings.num_train, num_held_out=settings.num_held_out)
        except ValueError as error:
            raise UserError(f"data: {error}") from error
        return RunProblems(train=made.train, held_out=made.held_out)
    place = _place(settings, is_held_out=False)
    read = _read(place, settings=settings, max_answer_chars=max_answer_chars)
    if settings.held_out_source or settings.held_out_split:
        place = _place(settings, is_held_out=True)
        held_out = _read(place, settings=settings, max_answer_chars=max_answer_chars)
        return _with_held_out_source(read, held_out, settings=settings)
    return _cut(read, settings=settings, seed=seed)


def render_problems(problems: RunProblems, config: RunConfig) -> RenderedProblems:
    """Puts the template around every question, and leaves out the prompts that leave no room for a completion.

    Args:
        problems: As `load_problems` gives them.
        config: Of a run whose model folder is known.

    Raises:
        UserError: The template does not go with the model, or every prompt of a part is too long.
    """
    folder = Path(config.rollout.model)
    context_length = config.rollout.context_length
    try:
        tokenizer = load_tokenizer(folder)
    except FileNotFoundError as error:
        raise UserError(f"model: {error}") from error
    try:
        render = prompt_renderer(load_template(config.data.template), model_folder=folder, tokenizer=tokenizer)
        train, held_out = (
            [replace(problem, prompt=render(problem.prompt)) for problem in part]
            for part in (problems.train, problems.held_out)
        )
    except ValueError as error:
        raise UserError(f"data.template = {config.data.template}: {error}") from error
    train_limit = context_length - config.learner.sampling.max_tokens
    held_out_limit = context_length - config.evaluation.max_tokens
    return RenderedProblems(
        train=_fitting(train, tokenizer=tokenizer, limit=train_limit),
        held_out=_fitting(held_out, tokenizer=tokenizer, limit=held_out_limit),
    )


def run_problems(config: RunConfig) -> RenderedProblems:
    """Loads and renders the problems of a run whose model folder is known.

    Raises:
        UserError: As `load_problems` and `render_problems`.
    """
    loaded = load_problems(config.data, seed=config.run.seed, max_answer_chars=config.reward.max_answer_chars)
    return render_problems(loaded, config)


def with_absolute_paths(settings: DataSection) -> DataSection:
    """The same settings for a process, or a day, with another working directory."""
    paths = {
        name: str(Path(value).expanduser().absolute())
        for name, value in (("source", settings.source), ("held_out_source", settings.held_out_source))
        if value and value != ARITHMETIC and is_file(value)
    }
    # One that is not there is named in the words of whoever gave it.
    if settings.template not in template_names() and Path(settings.template).expanduser().is_file():
        paths["template"] = str(Path(settings.template).expanduser().absolute())
    return settings.model_copy(update=paths)


def left_out(problems: RunProblems) -> list[str]:
    """What is not trained on though it stands in a source, one line for each reason; empty if nothing is left out."""
    lines = []
    for read in problems.sources:
        of_rows = f"of {read.num_rows} {read.unit}s"
        lines += [
            f"{read.name}: {len(refused.numbers)} {of_rows} have {refused.reason} and are left out: "
            f"{shown_numbers(refused.numbers, unit=read.unit)}"
            for refused in read.refused
        ]
        if read.duplicates:
            others = f", {len(read.contradictions)} of them another answer" if read.contradictions else ""
            lines.append(
                f"{read.name}: {len(read.duplicates)} {of_rows} have a question that came before{others}, and are "
                f"left out: {shown_numbers(read.duplicates, unit=read.unit)}"
            )
    if problems.num_in_both:
        lines.append(f"{problems.num_in_both} problems are held out as well, and are not trained on")
    return lines


def too_long(problems: RenderedProblems) -> list[str]:
    """How many prompts leave no room for a completion, one line for each part; empty if all fit."""
    return [
        f"{len(part.too_long)} {name} prompts have more than {part.limit} tokens (the longest {max(part.too_long)}) "
        "and are left out"
        for name, part in (("training", problems.train), ("held-out", problems.held_out))
        if part.too_long
    ]


def _fitting(problems: Sequence[Problem], *, tokenizer: TextTokenizer, limit: int) -> RenderedPart:
    lengths = [len(tokenizer.encode(problem.prompt)) for problem in problems]
    fitting = [index for index, length in enumerate(lengths) if length <= limit]
    if problems and not fitting:
        raise UserError(
            f"data: the shortest of {len(problems)} prompts has {min(lengths)} tokens, but rollout.context_length "
            f"without the max_tokens of a completion leaves {limit}"
        )
    return RenderedPart(
        problems=tuple(problems[index] for index in fitting),
        lengths=tuple(lengths[index] for index in fitting),
        limit=limit,
        too_long=tuple(length for length in lengths if length > limit),
    )


def _check_template(name: str) -> None:
    """Finds a mistake in a template of the user's before a model is made."""
    try:
        load_template(name)
    except ValueError as error:
        raise UserError(f"data.template: {error}") from error


def _check_made(settings: DataSection) -> None:
    if settings.num_train < 1:
        raise UserError(f"data.num_train = 0: must be at least 1 for source {ARITHMETIC}, which has no end")
    if settings.held_out_source or settings.held_out_split:
        raise UserError(
            f"data.held_out_source: source {ARITHMETIC} makes its own held-out problems; name a file as source"
        )


def _place(settings: DataSection, *, is_held_out: bool) -> _Place:
    if not is_held_out:
        return _Place("source", settings.source, settings.subset, settings.split, settings.revision)
    if settings.held_out_source:
        split = settings.held_out_split or "test"
        return _Place("held_out_source", settings.held_out_source, settings.held_out_subset, split, revision="")
    if is_file(settings.source):
        raise UserError("data.held_out_split: a file has no splits; name another file as data.held_out_source")
    return _Place("source", settings.source, settings.subset, settings.held_out_split, settings.revision)


def _read(place: _Place, *, settings: DataSection, max_answer_chars: int) -> ReadProblems:
    columns = ColumnNames(
        question=settings.question_column,
        answer=settings.answer_column,
        kind=settings.kind_column,
        problem_id=settings.id_column,
    )
    try:
        table = _open(place)
        if place.setting == "held_out_source":
            columns = columns.where_known(table)
        return read_problems(
            table, columns=columns, answer_form=settings.answer_form, max_answer_chars=max_answer_chars
        )
    except DataError as error:
        raise UserError(f"data.{place.setting} = {error}") from error


def _open(place: _Place) -> Table:
    if is_file(place.source):
        return read_file(place.source)
    if "/" not in place.source:
        raise DataError(
            f"{place.source}: there is no such file; give {ARITHMETIC}, a JSONL, JSON or Parquet file, or a dataset of "
            "the Hub (org/name)"
        )
    return read_hub(place.source, subset=place.subset, split=place.split, revision=place.revision)


def _with_held_out_source(read: ReadProblems, held_out: ReadProblems, *, settings: DataSection) -> RunProblems:
    asked = {problem.prompt.strip() for problem in held_out.problems}
    rest = [problem for problem in read.problems if problem.prompt.strip() not in asked]
    if not rest:
        raise UserError(f"data: every problem of {read.name} is held out in {held_out.name} as well")
    train = rest[: settings.num_train or None]
    return RunProblems(
        train=tuple(train),
        held_out=held_out.problems[: settings.num_held_out],
        sources=(read, held_out),
        num_in_both=len(read.problems) - len(rest),
        num_left_over=len(rest) - len(train),
    )


def _cut(read: ReadProblems, *, settings: DataSection, seed: int) -> RunProblems:
    """Draws the held-out problems; those to train on keep their order."""
    num_problems = len(read.problems)
    if settings.num_held_out >= num_problems:
        raise UserError(
            f"data.num_held_out = {settings.num_held_out}: must be fewer than the {num_problems} problems of "
            f"{read.name}"
        )
    drawn = random.Random(f"data/{seed}/held_out").sample(range(num_problems), settings.num_held_out)
    rest = sorted(set(range(num_problems)) - set(drawn))
    train = rest[: settings.num_train or None]
    return RunProblems(
        train=tuple(read.problems[index] for index in train),
        held_out=tuple(read.problems[index] for index in drawn),
        sources=(read,),
        num_left_over=len(rest) - len(train),
    )
