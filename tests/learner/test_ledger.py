"""The ledger keeps every sample's one end, over kills and resumes."""

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from learner.ledger import Ledger, SampleText
from learner.ledger_verdict import verify
from learner.records import Prompt, ScoredRollout


def prompt_at(position: int) -> Prompt:
    return Prompt(f"e0-p{position}", position, f"problem-{position}", (5, 6, 7), "42")


def rollout(sample_id: str, *, version: int = 0) -> ScoredRollout:
    return ScoredRollout(sample_id, (1, 2), (-0.5, -0.25), ((0, version),), "stop", 1.0, "correct", 0.5)


def issue(ledger: Ledger, *, position: int, size: int = 2) -> list[str]:
    group = f"i{ledger.incarnation}-g{position}"
    samples = [f"{group}-s{index}" for index in range(size)]
    ledger.issue(group_id=group, prompt=prompt_at(position), sample_ids=samples, policy_version=0)
    return samples


def train(ledger: Ledger, samples: list[str], *, step: int) -> None:
    ledger.end_trained(step=step, rollouts=[rollout(sample) for sample in samples])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_every_sample_of_a_finished_run_has_one_end(path: Path) -> None:
    ledger = Ledger(path, start_step=0)
    train(ledger, issue(ledger, position=0), step=1)
    ledger.end_dropped(issue(ledger, position=1), reason="stale")
    ledger.end_failed(issue(ledger, position=2), reason="rollout_deadline")
    issue(ledger, position=3)
    ledger.close_run()
    verdict = verify(path)
    assert (verdict.issued, verdict.trained, verdict.lost, verdict.open, verdict.trained_twice) == (8, 2, 0, 0, 0)
    assert verdict.dropped == {"stale": 2, "run_ended": 2}
    assert verdict.failed == {"rollout_deadline": 2}
    assert verdict.is_sound


def test_counts_agree_with_the_file(path: Path) -> None:
    ledger = Ledger(path, start_step=0)
    train(ledger, issue(ledger, position=0), step=1)
    ledger.end_dropped(issue(ledger, position=1), reason="stale")
    issue(ledger, position=2)
    counts, verdict = ledger.counts(), verify(path)
    assert (counts.issued, counts.trained, counts.dropped, counts.failed, counts.open) == (
        verdict.issued,
        verdict.trained,
        verdict.dropped,
        verdict.failed,
        verdict.open,
    )


def test_a_resume_takes_back_steps_after_the_checkpoint(path: Path) -> None:
    first = Ledger(path, start_step=0)
    train(first, issue(first, position=0), step=1)
    train(first, issue(first, position=1), step=2)
    issue(first, position=2)
    second = Ledger(path, start_step=1)
    train(second, issue(second, position=1), step=2)
    second.close_run()
    verdict = verify(path)
    assert verdict.trained == 4
    assert verdict.dropped == {"step_lost": 2, "run_ended": 2}
    assert verdict.is_sound
    assert second.counts().issued == 8


def test_the_end_that_was_taken_back_is_kept(path: Path) -> None:
    train(first := Ledger(path, start_step=0), samples := issue(first, position=0, size=1), step=1)
    Ledger(path, start_step=0)
    with sqlite3.connect(path) as connection:
        ends = connection.execute("SELECT incarnation, end, reason, step FROM ends ORDER BY end_id").fetchall()
    assert samples == ["i1-g0-s0"]
    assert ends == [(1, "trained", None, 1), (2, "dropped", "step_lost", None)]


def test_a_second_resume_from_the_same_step_changes_nothing(path: Path) -> None:
    first = Ledger(path, start_step=0)
    train(first, issue(first, position=0), step=1)
    Ledger(path, start_step=0)
    Ledger(path, start_step=0)
    assert verify(path).dropped == {"step_lost": 2}
    assert verify(path).is_sound


def test_a_sample_that_ends_twice_is_counted_and_found(path: Path) -> None:
    ledger = Ledger(path, start_step=0)
    samples = issue(ledger, position=0)
    train(ledger, samples, step=1)
    train(ledger, samples, step=2)
    assert ledger.counts().ended_twice == 2
    verdict = verify(path)
    assert verdict.trained_twice == 2
    assert not verdict.is_sound


def test_a_prompt_trained_on_as_two_groups_is_found(path: Path) -> None:
    first = Ledger(path, start_step=0)
    train(first, issue(first, position=0), step=1)
    second = Ledger(path, start_step=1)
    train(second, issue(second, position=0), step=2)
    assert verify(path).problems == ("prompt at position 0 was trained on as 2 groups",)


def test_a_sample_without_an_end_in_an_ended_run_is_lost(path: Path) -> None:
    ledger = Ledger(path, start_step=0)
    issue(ledger, position=0)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE incarnations SET ended_at = 'now'")
    assert verify(path).lost == 2
    assert not verify(path).is_sound


def test_a_sample_id_is_issued_once(path: Path) -> None:
    ledger = Ledger(path, start_step=0)
    issue(ledger, position=0)
    with pytest.raises(sqlite3.IntegrityError):
        issue(ledger, position=0)
    assert ledger.counts().issued == 2


def test_retries_are_counted(path: Path) -> None:
    ledger = Ledger(path, start_step=0)
    samples = issue(ledger, position=0)
    ledger.record_retry(samples[:1])
    ledger.close_run()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT attempts FROM samples ORDER BY sample_id").fetchall() == [(2,), (1,)]


def test_the_oldest_texts_go_when_the_bound_is_reached(path: Path) -> None:
    ledger = Ledger(path, start_step=0, max_text_bytes=1000)
    for index in range(50):
        ledger.keep_texts([SampleText(f"s{index}", "p" * 50, "c" * 42, [1, 2])])
    ledger.close_run()
    with sqlite3.connect(path) as connection:
        kept = connection.execute("SELECT sample_id, size_bytes FROM texts ORDER BY text_id").fetchall()
    assert sum(size for _sample, size in kept) <= 1000
    assert len(kept) >= 8
    assert [sample for sample, _size in kept] == [f"s{index}" for index in range(50 - len(kept), 50)]


def test_a_file_that_is_no_ledger_is_refused(path: Path) -> None:
    path.write_text("x" * 5000)
    with pytest.raises(ValueError, match="is no ledger"):
        verify(path)


WRITER = """
import sys
from pathlib import Path
from tests.learner.test_ledger import issue, train
from learner.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), start_step=0)
for position in range(1_000_000):
    samples = issue(ledger, position=position, size=8)
    train(ledger, samples, step=position + 1)
    print(position, flush=True)
"""


def test_a_killed_writer_leaves_sound_accounts(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as writer:
        assert writer.stdout is not None
        for _ in range(50):
            writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
    killed = verify(path)
    assert killed.issued >= 400
    assert killed.is_sound
    Ledger(path, start_step=20).close_run()
    resumed = verify(path)
    assert resumed.trained == 160
    assert resumed.dropped["step_lost"] + resumed.dropped.get("run_ended", 0) == resumed.issued - 160
    assert resumed.is_sound


class LedgerStory(RuleBasedStateMachine):
    """Any order of issues, ends, kills and resumes leaves sound accounts."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.ledger = Ledger(self.path, start_step=0)
        self.step = 0
        self.position = 0
        self.in_flight: list[list[str]] = []

    @rule()
    def issues(self) -> None:
        self.in_flight.append(issue(self.ledger, position=self.position))
        self.position += 1

    @precondition(lambda self: self.in_flight)
    @rule()
    def trains(self) -> None:
        self.step += 1
        train(self.ledger, self.in_flight.pop(0), step=self.step)

    @precondition(lambda self: self.in_flight)
    @rule()
    def drops(self) -> None:
        self.ledger.end_dropped(self.in_flight.pop(), reason="stale")

    @rule(back=st.integers(0, 3))
    def is_killed_and_resumes(self, back: int) -> None:
        self.step = max(0, self.step - back)
        self.ledger = Ledger(self.path, start_step=self.step)
        self.in_flight.clear()

    @invariant()
    def accounts_are_sound(self) -> None:
        verdict = verify(self.path)
        assert verdict.is_sound
        assert verdict.open == 2 * len(self.in_flight)
        assert verdict.trained == 2 * self.step
        assert verdict.issued == 2 * self.position == self.ledger.counts().issued

    def teardown(self) -> None:
        self.ledger.close_run()
        self.folder.cleanup()


TestLedgerStory = LedgerStory.TestCase
TestLedgerStory.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
