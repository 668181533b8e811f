"""Proves a ledger's accounting from its file alone; behind `tandem ledger verify RUN`."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from learner.ledger_schema import ENDS_BY_REASON


@dataclass(frozen=True, slots=True)
class LedgerVerdict:
    """What a ledger proves.

    Attributes:
        issued: Samples asked for; the sum of the counts that follow, `lost` included.
        trained: Samples whose end is an optimizer step.
        dropped: Count per reason.
        failed: Count per reason.
        open: Without an end, in an incarnation that has not ended: it runs, or was killed and not resumed.
        lost: Without an end, although their incarnation has ended.
        trained_twice: Samples that two steps used, neither of them taken back by a resume.
        problems: One line each; empty if the accounts are sound.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    open: int
    lost: int
    trained_twice: int
    problems: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Nothing lost, nothing trained twice, nothing out of order."""
        return not self.problems


_ENDLESS = """
SELECT ended_at IS NOT NULL, count(*)
FROM sample_ends LEFT JOIN incarnations USING (incarnation) WHERE end IS NULL GROUP BY 1
"""

# A resume takes an end back before another may follow.
_ENDED_TWICE = """
SELECT sample_id, sum(end = 'trained') - sum(reason IS 'step_lost') > 1
FROM ends GROUP BY sample_id HAVING sum(reason IS NOT 'step_lost') - sum(reason IS 'step_lost') > 1
"""

_SECOND_GROUPS = """
SELECT position, count(DISTINCT group_id) FROM sample_ends WHERE end = 'trained'
GROUP BY position HAVING count(DISTINCT group_id) > 1
"""

_NEVER_ISSUED = "SELECT DISTINCT sample_id FROM ends WHERE sample_id NOT IN (SELECT sample_id FROM samples)"


def verify(path: Path) -> LedgerVerdict:
    """Counts how the samples of a run ended and looks for whatever must not be.

    Args:
        path: The ledger's file; it is only read, and the run may go on meanwhile.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no ledger, or is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no ledger at {path}; name a run folder, or `latest`")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            # One transaction, so that all queries see the same moment of a run that goes on.
            connection.execute("BEGIN")
            return _verdict(connection)
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is no ledger: {error}") from error


def _verdict(connection: sqlite3.Connection) -> LedgerVerdict:
    (issued,) = connection.execute("SELECT count(*) FROM samples").fetchone()
    ends = [(end, reason, count) for end, reason, count in connection.execute(ENDS_BY_REASON)]
    endless = {bool(is_over): count for is_over, count in connection.execute(_ENDLESS)}
    ended_twice = connection.execute(_ENDED_TWICE).fetchall()
    problems = [
        *(f"sample {sample} ended twice" for sample, _was_trained in ended_twice),
        *(
            f"prompt at position {position} was trained on as {groups} groups"
            for position, groups in connection.execute(_SECOND_GROUPS)
        ),
        *(f"sample {sample} ended but was never issued" for (sample,) in connection.execute(_NEVER_ISSUED)),
    ]
    if lost := endless.get(True, 0):
        problems.append(f"{lost} samples are lost: their run has ended and they have no end")
    return LedgerVerdict(
        issued=issued,
        trained=sum(count for end, _reason, count in ends if end == "trained"),
        dropped={reason: count for end, reason, count in ends if end == "dropped"},
        failed={reason: count for end, reason, count in ends if end == "failed"},
        open=endless.get(False, 0),
        lost=lost,
        trained_twice=sum(bool(was_trained) for _sample, was_trained in ended_twice),
        problems=tuple(problems),
    )
