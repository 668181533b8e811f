"""Seeded arithmetic problems in words: the task of the default run.

Each kind is a wording, the operands it may have, and the rule for its answer. The seed decides which operands of a kind
are held out: training never sees them, whatever the names and things. It sees the same numbers in another order, which
a model this small needs to learn the rest. The sizes asked for never move that border, and a longer training list
begins with the shorter one.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from runtime.problems.problem import Problem

NAMES = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva", "Max", "Zoe")
THINGS = ("apples", "pens", "cards", "books", "coins", "shells", "stamps", "plums")
HELD_OUT_SHARE = 0.12

Operands = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of problem: its wording, its operands and its answer.

    Attributes:
        name: What `Problem.kind` says.
        wording: A format string over `name`, `things` and the operands `a`, `b`, `c`.
        operands: Every tuple of operands that makes sense, in a fixed order.
        answer: The right answer for operands.
    """

    name: str
    wording: str
    operands: tuple[Operands, ...]
    answer: Callable[..., int]

    @property
    def num_wordings(self) -> int:
        """Prompts that there are for one tuple of operands."""
        return len(THINGS) * (len(NAMES) if "{name}" in self.wording else 1)


@dataclass(frozen=True, slots=True)
class ArithmeticProblems:
    """Problems to train on and problems to test on, which share no (kind, operands)."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


_FACTORS = range(2, 11)
_SUMMANDS = range(2, 9)
_UNEQUAL = tuple((a, b) for a in range(2, 13) for b in range(2, 13) if a != b)

KINDS = (
    Kind(
        name="sum",
        wording="{name} has {a} {things}, gets {b} more. How many now?",
        operands=tuple((a, b) for a in _FACTORS for b in _FACTORS),
        answer=lambda a, b: a + b,
    ),
    Kind(
        name="difference",
        wording="{a} and {b} {things}: how far apart?",
        operands=_UNEQUAL,
        answer=lambda a, b: abs(a - b),
    ),
    Kind(
        name="larger",
        wording="{a} or {b} {things}: which is more?",
        operands=_UNEQUAL,
        answer=max,
    ),
    Kind(
        name="smaller",
        wording="{a} or {b} {things}: which is less?",
        operands=_UNEQUAL,
        answer=min,
    ),
    Kind(
        name="product",
        wording="{name} has {a} bags of {b} {things}. How many in all?",
        operands=tuple((a, b) for a in _FACTORS for b in _FACTORS if min(a, b) <= 5),
        answer=lambda a, b: a * b,
    ),
    Kind(
        name="two_steps",
        wording="{name} has {a} {things}, gets {b}, finds {c}. How many then?",
        operands=tuple((a, b, c) for a in _SUMMANDS for b in _SUMMANDS for c in _SUMMANDS),
        answer=lambda a, b, c: a + b + c,
    ),
)


def arithmetic_problems(*, seed: int, num_train: int, num_held_out: int) -> ArithmeticProblems:
    """Make the problems of one seed, kinds in turn, every prompt once.

    Args:
        seed: Decides which operands are held out and what the problems are, on every platform.
        num_train: Problems to train on.
        num_held_out: Problems to test on.

    Returns:
        Both parts; no (kind, operands) is in both, and no prompt is there twice.

    Raises:
        ValueError: A negative number of problems, or more than there are distinct prompts.
    """
    train_operands: dict[str, list[Operands]] = {}
    held_out_operands: dict[str, list[Operands]] = {}
    for kind in KINDS:
        held_out = _held_out_operands(kind, seed=seed)
        held_out_operands[kind.name] = [values for values in kind.operands if values in held_out]
        train_operands[kind.name] = [values for values in kind.operands if values not in held_out]
    return ArithmeticProblems(
        train=_draw(train_operands, seed=seed, part="train", num_problems=num_train),
        held_out=_draw(held_out_operands, seed=seed, part="held_out", num_problems=num_held_out),
    )


def _held_out_operands(kind: Kind, *, seed: int) -> set[Operands]:
    """Choose a share of a kind's operands, of which the same numbers in another order stay for training."""
    shuffled = random.Random(f"arithmetic/{seed}/split/{kind.name}").sample(kind.operands, len(kind.operands))
    one_of_each_order = {tuple(sorted(values)): values for values in shuffled if len(set(values)) > 1}
    return set(list(one_of_each_order.values())[: round(HELD_OUT_SHARE * len(shuffled))])


def _draw(operands: dict[str, list[Operands]], *, seed: int, part: str, num_problems: int) -> tuple[Problem, ...]:
    """Take problems from each kind in turn."""
    limit = len(KINDS) * min(len(operands[kind.name]) * kind.num_wordings for kind in KINDS)
    if not 0 <= num_problems <= limit:
        raise ValueError(f"num_{part} is {num_problems}; it must be between 0 and {limit}")
    streams = [_problems_of_kind(kind, operands[kind.name], seed=seed, part=part) for kind in KINDS]
    problems = (next(streams[index % len(KINDS)]) for index in range(num_problems))
    return tuple(
        Problem(problem_id=f"arithmetic-{seed}-{part}-{index}", prompt=prompt, answer=str(answer), kind=kind)
        for index, (kind, prompt, answer) in enumerate(problems)
    )


def _problems_of_kind(kind: Kind, operands: list[Operands], *, seed: int, part: str) -> Iterator[tuple[str, str, int]]:
    """Yield (kind, prompt, answer); operands come round again, in another wording, only when all were used."""
    generator = random.Random(f"arithmetic/{seed}/{part}/{kind.name}")
    seen: set[str] = set()
    while True:
        for values in generator.sample(operands, len(operands)):
            prompt = _word(kind, values, generator=generator)
            while prompt in seen:
                prompt = _word(kind, values, generator=generator)
            seen.add(prompt)
            yield kind.name, prompt, kind.answer(*values)


def _word(kind: Kind, values: Operands, *, generator: random.Random) -> str:
    name, things = generator.choice(NAMES), generator.choice(THINGS)
    return kind.wording.format(name=name, things=things, **dict(zip("abc", values, strict=False)))
