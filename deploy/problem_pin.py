"""A run's problems stay what they were when it began: its cursor and its held-out part depend on it."""

import hashlib
import json
from collections.abc import Sequence

from deploy.data import RenderedProblems
from deploy.errors import UserError
from deploy.run_folder import RunFolder
from runtime.problems.problem import Problem


def pin_problems(folder: RunFolder, problems: RenderedProblems) -> None:
    """Notes digests of the problems in the run folder, or compares with those that are there.

    Raises:
        UserError: The problems are others than the run began with, or the note cannot be written.
    """
    now = {"train": _digest(problems.train.problems), "held_out": _digest(problems.held_out.problems)}
    path = folder.problems_file
    try:
        if not path.is_file():
            path.write_text(json.dumps(now) + "\n", encoding="utf-8")
            return
        begun_with = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    changed = [part for part, digest in now.items() if begun_with.get(part) != digest]
    if changed:
        raise UserError(
            f"{folder.path}: the {' and '.join(changed)} problems are not those that the run began with: its data, "
            "template or a bound on length has changed; put it back (data.revision pins a dataset), or start anew"
        )


def _digest(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(json.dumps([problem.problem_id, problem.prompt, problem.answer]).encode())
    return digest.hexdigest()
