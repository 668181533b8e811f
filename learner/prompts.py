"""Prompts in an endless seeded order, with a cursor that a checkpoint keeps."""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.records import Prompt
from runtime.problems.problem import Problem


@dataclass(frozen=True, slots=True)
class PromptState:
    """Where a prompt source stands; with the same problems and seed it determines every prompt to come.

    Attributes:
        num_problems: Problems in an epoch.
        seed: Seed of the order.
        cursor: The first position that was never issued.
        unfinished: Positions that were issued and not marked as done, ascending.
    """

    num_problems: int
    seed: int
    cursor: int
    unfinished: tuple[int, ...]


class PromptSource:
    """Issues prompts for ever: each epoch is a permutation of the problems, drawn from (seed, epoch).

    A prompt is issued with a position, its count in that endless order, and is unfinished until `mark_done`. After a
    restore the unfinished ones are issued again, in order, before the cursor goes on: a resume neither skips nor
    repeats a prompt. Threads may share it.
    """

    def __init__(self, problems: Sequence[Problem], *, encode: Callable[[str], Sequence[int]], seed: int) -> None:
        """Starts at position 0.

        Args:
            problems: One epoch; at least one problem.
            encode: The tokenizer: prompt text to token ids.
            seed: Decides the order.

        Raises:
            ValueError: There are no problems.
        """
        if not problems:
            raise ValueError("problems is empty: must have at least 1")
        self._problems = problems
        self._encode = encode
        self._seed = seed
        self._cursor = 0
        self._unfinished: set[int] = set()
        self._again: deque[int] = deque()
        self._orders: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def next(self) -> Prompt:
        """Issues the next prompt; it is unfinished from now on."""
        with self._lock:
            if self._again:
                position = self._again.popleft()
            else:
                position = self._cursor
                self._cursor += 1
            self._unfinished.add(position)
            epoch, place = divmod(position, len(self._problems))
            problem = self._problems[self._order(epoch)[place]]
        return Prompt(
            prompt_id=f"e{epoch}-p{place}",
            position=position,
            problem_id=problem.problem_id,
            token_ids=tuple(self._encode(problem.prompt)),
            reference_answer=problem.answer,
        )

    def mark_done(self, position: int) -> None:
        """Says that the prompt at this position needs no further rollouts: trained on, or given up for good.

        Raises:
            ValueError: The position is not unfinished.
        """
        with self._lock:
            if position not in self._unfinished:
                raise ValueError(f"position = {position}: must be one that was issued and is not done")
            self._unfinished.remove(position)

    def state(self) -> PromptState:
        """What a checkpoint must keep."""
        with self._lock:
            unfinished = tuple(sorted(self._unfinished))
            return PromptState(len(self._problems), self._seed, self._cursor, unfinished)

    def restore(self, state: PromptState) -> None:
        """Goes back to a state: what was unfinished is issued again first.

        Raises:
            ValueError: The state belongs to another number of problems or another seed.
        """
        for field, value, own in (
            ("num_problems", state.num_problems, len(self._problems)),
            ("seed", state.seed, self._seed),
        ):
            if value != own:
                raise ValueError(f"{field} = {value} in the checkpoint: must be {own}, as in this run")
        with self._lock:
            self._cursor = state.cursor
            # Still unfinished before they are issued again, so that a state taken at once is the same state.
            self._unfinished = set(state.unfinished)
            self._again = deque(sorted(state.unfinished))

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self._problems)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            # At most two epochs are in use at a time, at the seam between them.
            self._orders = {known: self._orders[known] for known in sorted(self._orders)[-1:]} | {epoch: order}
        return self._orders[epoch]
