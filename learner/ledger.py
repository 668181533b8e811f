"""Every sample's life, in SQLite: issued once, ended exactly once, across crashes and resumes."""

import sqlite3
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from learner import metrics
from learner.ledger_schema import ENDS_BY_REASON, OPEN, RUN_ENDED, SCHEMA, STEP_LOST, TRAINED_AFTER, End
from learner.records import Prompt, ScoredRollout
from runtime.disk import NotWrittenError

log = structlog.get_logger()

MAX_UNWRITTEN_ROWS = 1_000_000
"""So many rows that a full disk has no room for, some 500 MB of memory, end the run."""
_MAX_UNWRITTEN_TEXTS = 1000
_RETRY_SECONDS = 1.0
_RETRY_SHARE = 0.05
"""Most of the time that may go into tries to write to a disk that is full."""
_INSERT_SAMPLE = "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, 1)"
_COUNT_RETRY = "UPDATE samples SET attempts = attempts + 1 WHERE sample_id = ?"
_INSERT_TRAINED = """
INSERT INTO ends (sample_id, incarnation, end, step, oldest_version, reward, outcome, num_tokens)
VALUES (?, ?, 'trained', ?, ?, ?, ?, ?)
"""
_INSERT_END = "INSERT INTO ends (sample_id, incarnation, end, reason) VALUES (?, ?, ?, ?)"
_END_INCARNATION = "UPDATE incarnations SET ended_at = ?, end_reason = ? WHERE incarnation = ?"
_INSERT_TEXT = "INSERT INTO texts VALUES (NULL, ?, ?, ?, ?, ?)"

Rows = Sequence[Sequence[Any]]


class LedgerUnwritableError(NotWrittenError):
    """The disk has no room for the ledger; what it could not write it holds, and `counts` is right all the same."""


@dataclass(frozen=True, slots=True)
class SampleText:
    """What a sample said, for the viewer."""

    sample_id: str
    prompt: str
    completion: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """How the samples of a run stand.

    Attributes:
        issued: Samples asked for.
        trained: Those that an optimizer step used.
        dropped: Count per reason.
        failed: Count per reason.
        open: Those without an end so far.
        ended_twice: Ends of samples that were not open: a mistake of ours, 0 in a sound run.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    open: int
    ended_twice: int


class Ledger:
    """The accounts of one run, written by its rank 0. Threads may share it.

    Every call is one transaction; a process killed at any moment leaves whole transactions only. The write-ahead log
    is flushed to the disk by `sync`, which belongs before a checkpoint: a power cut may then lose what came after
    that checkpoint, and nothing before it.

    A disk that is full ends no run: what cannot be written is held in order and written as soon as there is room, whole
    calls at a time. The file is then behind, and sound: a run that dies meanwhile is resumed from a checkpoint, which
    is not made before all is written.
    """

    def __init__(self, path: Path, *, start_step: int, max_text_bytes: int = 256 << 20) -> None:
        """Opens the ledger, new or old, and begins an incarnation of the run.

        What earlier incarnations trained in steps after `start_step` is taken back (dropped, step_lost), and what
        they left open is dropped (run_ended).

        Args:
            path: The file; made if it is missing.
            start_step: Step of the checkpoint that the learner begins with; 0 for the initial model.
            max_text_bytes: Bound on the texts kept; the oldest are deleted beyond it.

        Raises:
            ValueError: The file cannot be written.
        """
        self._lock = threading.Lock()
        self._unwritten: list[tuple[str, Rows]] = []
        self._unwritten_texts: list[SampleText] = []
        self._is_holding, self._next_try = False, 0.0
        self._max_text_bytes = max_text_bytes
        self._open: set[str] = set()
        self._ended_twice = 0
        self._ends: Counter[tuple[str, str]] = Counter()
        try:
            self._begin(path, start_step=start_step)
        except sqlite3.OperationalError as error:
            raise ValueError(f"{path}: cannot be written: {error}") from error

    def _begin(self, path: Path, *, start_step: int) -> None:
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        # Copying the log into the file waits for the disk; every 16 MiB is seldom enough.
        self._connection.execute("PRAGMA wal_autocheckpoint = 4000")
        self._connection.executescript(SCHEMA)
        (self._text_bytes,) = self._connection.execute("SELECT coalesce(sum(size_bytes), 0) FROM texts").fetchone()
        with self._transaction() as execute:
            execute("UPDATE incarnations SET ended_at = ?, end_reason = 'killed' WHERE ended_at IS NULL", (_now(),))
            cursor = execute("INSERT INTO incarnations (started_at, start_step) VALUES (?, ?)", (_now(), start_step))
            self.incarnation = int(cursor.lastrowid or 0)
            step_lost = [sample for (sample,) in execute(TRAINED_AFTER, (start_step,))]
            left_open = [sample for (sample,) in execute(OPEN)]
            self._connection.executemany(_INSERT_END, self._end_rows("dropped", STEP_LOST, step_lost))
            self._connection.executemany(_INSERT_END, self._end_rows("dropped", RUN_ENDED, left_open))
        if step_lost or left_open:
            log.info("ledger resumed", step=start_step, step_lost=len(step_lost), run_ended=len(left_open))
        for end, reason, count in self._connection.execute(ENDS_BY_REASON):
            self._ends[end, reason] = count

    def issue(self, *, group_id: str, prompt: Prompt, sample_ids: Sequence[str], policy_version: int) -> None:
        """Records the samples of one group, before any server is asked for them.

        Args:
            group_id: Id of the group.
            prompt: What is continued.
            sample_ids: One per rollout wanted; never used before in this run.
            policy_version: The learner's, now.
        """
        shared = (group_id, prompt.prompt_id, prompt.position, _now(), policy_version, self.incarnation)
        with self._lock:
            self._write(_INSERT_SAMPLE, [(sample, *shared) for sample in sample_ids])
            self._open.update(sample_ids)

    def record_retry(self, sample_ids: Iterable[str]) -> None:
        """Counts one more attempt at each of these samples."""
        with self._lock:
            self._write(_COUNT_RETRY, [(sample,) for sample in sample_ids])

    def end_trained(self, *, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        """Ends the samples that an optimizer step used.

        Args:
            step: The policy version that the step made.
            rollouts: What it used.
        """
        rows = [
            (
                rollout.sample_id,
                self.incarnation,
                step,
                rollout.oldest_version,
                rollout.reward,
                rollout.outcome,
                len(rollout.token_ids),
            )
            for rollout in rollouts
        ]
        with self._lock:
            self._write(_INSERT_TRAINED, rows)
            self._close("trained", "", [row[0] for row in rows])

    def end_dropped(self, sample_ids: Sequence[str], *, reason: str) -> None:
        """Ends samples that are not trained on although nothing failed, e.g. reason "stale"."""
        self._end("dropped", reason, sample_ids)

    def end_failed(self, sample_ids: Sequence[str], *, reason: str) -> None:
        """Ends samples that could not be generated or scored, e.g. reason "rollout_deadline"."""
        self._end("failed", reason, sample_ids)

    def keep_texts(self, texts: Sequence[SampleText]) -> None:
        """Keeps what samples said, for the viewer; written with what comes next: a kill or a full disk loses some."""
        with self._lock:
            self._unwritten_texts += texts

    def counts(self) -> LedgerCounts:
        """How the samples stand, without reading the file."""
        with self._lock:
            ends = self._ends
            return LedgerCounts(
                issued=ends.total() + len(self._open),
                trained=ends["trained", ""],
                dropped={reason: count for (end, reason), count in ends.items() if end == "dropped"},
                failed={reason: count for (end, reason), count in ends.items() if end == "failed"},
                open=len(self._open),
                ended_twice=self._ended_twice,
            )

    def sync(self) -> None:
        """Brings everything recorded so far to the disk itself.

        Raises:
            LedgerUnwritableError: The disk has no room for it.
        """
        with self._lock:
            self._write_all()
            try:
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except sqlite3.OperationalError as error:
                if not _is_disk(error):
                    raise
                raise LedgerUnwritableError(f"the ledger could not be written: {error}") from error

    def close_run(self, reason: str = RUN_ENDED) -> None:
        """Drops what is open (run_ended), ends the incarnation and closes the file; `counts` still answers.

        Args:
            reason: Why the incarnation ends.

        Raises:
            LedgerUnwritableError: The disk has no room for it: the file stays that of an incarnation that was killed.
        """
        with closing(self._connection):
            self._end("dropped", RUN_ENDED, sorted(self._open))
            self._end_incarnation(reason)

    def _end_incarnation(self, reason: str) -> None:
        with self._lock:
            self._write(_END_INCARNATION, [(_now(), reason, self.incarnation)])
            self._write_all()

    def _end(self, end: End, reason: str, sample_ids: Sequence[str]) -> None:
        with self._lock:
            # Before the write, which may fail for good: the counts are right all the same.
            self._close(end, reason, sample_ids)
            self._write(_INSERT_END, self._end_rows(end, reason, sample_ids))

    def _end_rows(self, end: End, reason: str, sample_ids: Sequence[str]) -> Rows:
        return [(sample, self.incarnation, end, reason) for sample in sample_ids]

    def _close(self, end: End, reason: str, sample_ids: Sequence[str]) -> None:
        for sample in sample_ids:
            if sample in self._open:
                self._open.remove(sample)
                self._ends[end, reason] += 1
            else:
                self._ended_twice += 1
                log.error("sample ended twice", sample_id=sample, end=end, reason=reason)

    def _write(self, statement: str, rows: Rows) -> None:
        """Writes rows behind all that is held; where there is no room for them they are held as well."""
        self._unwritten.append((statement, rows))
        if self._is_holding and time.monotonic() < self._next_try:
            return
        try:
            self._write_all()
        except LedgerUnwritableError:
            num_rows = sum(len(rows) for _statement, rows in self._unwritten)
            metrics.LEDGER_UNWRITTEN.set(num_rows)
            if num_rows > MAX_UNWRITTEN_ROWS:
                raise
        except sqlite3.Error:
            # Ours is the faulty one, unless others were held before it: then the accounts cannot go on.
            if len(self._unwritten) == 1:
                self._unwritten.clear()
            raise

    def _write_all(self) -> None:
        begin = time.monotonic()
        try:
            with self._transaction():
                for statement, rows in self._unwritten:
                    self._connection.executemany(statement, rows)
                text_bytes = self._write_texts()
        except sqlite3.OperationalError as error:
            if not _is_disk(error):
                raise
            self._hold(error, seconds=time.monotonic() - begin)
            raise LedgerUnwritableError(f"the ledger could not be written: {error}") from error
        self._text_bytes = text_bytes
        self._unwritten.clear()
        self._unwritten_texts.clear()
        if self._is_holding:
            self._is_holding = False
            metrics.LEDGER_UNWRITTEN.set(0)
            log.info("ledger written again")

    def _hold(self, error: sqlite3.Error, *, seconds: float) -> None:
        if not self._is_holding:
            log.error("ledger cannot be written: its rows are held until it can", reason=str(error))
        self._is_holding = True
        self._next_try = time.monotonic() + max(_RETRY_SECONDS, seconds / _RETRY_SHARE)
        del self._unwritten_texts[:-_MAX_UNWRITTEN_TEXTS]

    def _write_texts(self) -> int:
        """Returns the size of all texts that are then kept."""
        rows = [_text_row(text) for text in self._unwritten_texts]
        self._connection.executemany(_INSERT_TEXT, rows)
        text_bytes: int = self._text_bytes + sum(row[-1] for row in rows)
        excess = text_bytes - self._max_text_bytes
        if excess <= 0:
            return text_bytes
        # A tenth more than needed, so that the next group does not have to delete again.
        excess += self._max_text_bytes // 10
        oldest = self._connection.execute("SELECT text_id, size_bytes FROM texts ORDER BY text_id")
        while excess > 0 and (text := oldest.fetchone()):
            self._connection.execute("DELETE FROM texts WHERE text_id = ?", (text[0],))
            text_bytes -= text[1]
            excess -= text[1]
        return text_bytes

    @contextmanager
    def _transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection.execute
            self._connection.execute("COMMIT")
        except BaseException:
            # SQLite itself rolls back where a disk is full.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def _is_disk(error: sqlite3.OperationalError) -> bool:
    # A quota, and a file in shared memory that cannot grow, are errors of input and output to SQLite.
    return error.sqlite_errorcode & 0xFF in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}


def _text_row(text: SampleText) -> tuple[str, str, str, bytes, int]:
    ids = array("i", text.token_ids)
    size = len(text.prompt) + len(text.completion) + 4 * len(ids)
    return text.sample_id, text.prompt, text.completion, ids.tobytes(), size


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
