"""A worker process: reads items from its standard input, grades them, answers on its standard output.

One JSON document a line, both ways; the pool holds the other ends and kills the process at an item's deadline. What can
be graded at sight is answered in one line, what needs the parser then item by item, in the order of the items.

    started with  {"parent": pid, "memory_bytes": n, "limits": {...}} as its only argument
    first answer  {"ready": true}
    a chunk       [[reward function, completion, reference answer], ...]
    its answers   [[index in the chunk, outcome, reward or null, extracted answer, reason, parts, seconds], ...]
"""

import ctypes
import json
import logging
import os
import resource
import signal
import sys
import time
from typing import BinaryIO

from reward_service.outcome import AnswerLimits, Grade, Item

_PR_SET_PDEATHSIG = 1


def main(argument: str) -> None:
    """Grades until the standard input ends.

    Args:
        argument: JSON, as the module says.
    """
    start = json.loads(argument)
    _confine(parent=start["parent"], memory_bytes=start["memory_bytes"])
    limits = AnswerLimits(**start["limits"])
    answers = _take_standard_output()
    # The import of sympy takes half a second; the limits above must hold before it.
    from reward_service.grade import grade, grade_at_sight  # noqa: PLC0415

    # math-verify warns that its timeouts are off.
    logging.disable(logging.WARNING)
    # The first parse builds the tables of the parser, 0.2 s that no item should be charged for.
    grade(Item("math", "\\boxed{\\sqrt{2}}", "\\sqrt{3}"), limits)
    _send(answers, {"ready": True})
    for line in sys.stdin.buffer:
        items = [Item(*fields) for fields in json.loads(line)]
        open_items: list[tuple[int, Item]] = []
        at_sight: list[list[object]] = []
        for index, item in enumerate(items):
            begin = time.perf_counter()
            if (verdict := grade_at_sight(item, limits)) is None:
                open_items.append((index, item))
            else:
                at_sight.append(_fields(index, verdict, time.perf_counter() - begin))
        _send(answers, at_sight)
        for index, item in open_items:
            begin = time.perf_counter()
            verdict = grade(item, limits)
            _send(answers, [_fields(index, verdict, time.perf_counter() - begin)])


def _fields(index: int, grade: Grade, seconds: float) -> list[object]:
    return [index, grade.outcome, grade.reward, grade.extracted_answer, grade.reason, grade.parts, seconds]


def _confine(*, parent: int, memory_bytes: int) -> None:
    """Ends with the parent, leaves signals to it, and limits memory; no core file is left behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A thread that watches the parent would not do: it waits for the GIL, which big integers hold for hours.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent ended before its worker began")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _take_standard_output() -> BinaryIO:
    """The standard output, for answers alone; what a library prints goes to the standard error instead."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _send(answers: BinaryIO, document: object) -> None:
    answers.write(json.dumps(document).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
