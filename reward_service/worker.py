"""A worker process: reads items from its standard input, grades them one by one, answers each on its standard output.

One JSON document a line, both ways; the pool holds the other ends and kills the process at an item's deadline.

    started with  {"parent": pid, "memory_bytes": n, "limits": {...}} as its only argument
    first answer  {"ready": true}
    an item       [reward function, completion, reference answer]
    its answer    [outcome, reward or null, extracted answer, reason, parts, seconds]
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

from reward_service.outcome import AnswerLimits

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
    from reward_service.grade import grade  # noqa: PLC0415

    # math-verify warns that its timeouts are off.
    logging.disable(logging.WARNING)
    # The first parse builds the tables of the parser, 0.2 s that no item should be charged for.
    grade(reward_function="math", completion="\\boxed{\\sqrt{2}}", reference_answer="\\sqrt{3}", limits=limits)
    _answer(answers, {"ready": True})
    for line in sys.stdin.buffer:
        reward_function, completion, reference_answer = json.loads(line)
        begin = time.perf_counter()
        verdict = grade(
            reward_function=reward_function, completion=completion, reference_answer=reference_answer, limits=limits
        )
        seconds = time.perf_counter() - begin
        _answer(
            answers,
            [
                verdict.outcome,
                verdict.reward,
                verdict.extracted_answer,
                verdict.reason,
                verdict.parts,
                seconds,
            ],
        )


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
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _answer(answers: BinaryIO, document: object) -> None:
    answers.write(json.dumps(document).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
