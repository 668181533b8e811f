"""The tables of `ledger.sqlite`, and the words that stand in them."""

from typing import Literal

End = Literal["trained", "dropped", "failed"]

RUN_ENDED = "run_ended"
"""Reason of a sample that was in flight when its run, or its incarnation of the run, ended."""
STEP_LOST = "step_lost"
"""Reason of a sample that was trained in a step after the checkpoint that the run was resumed from."""

SCHEMA = """
-- One row for each time that the learner was started on this run.
CREATE TABLE IF NOT EXISTS incarnations (
    incarnation INTEGER PRIMARY KEY,   -- 1, 2, ...
    started_at TEXT NOT NULL,          -- UTC
    start_step INTEGER NOT NULL,       -- step of the checkpoint it began with; 0 is the initial one
    ended_at TEXT,                     -- UTC; NULL while it runs, or if it was killed
    end_reason TEXT
);

-- One row for each rollout asked for.
CREATE TABLE IF NOT EXISTS samples (
    sample_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL,
    prompt_id TEXT NOT NULL,
    position INTEGER NOT NULL,         -- of the prompt, in the endless seeded order
    issued_at TEXT NOT NULL,           -- UTC
    policy_version INTEGER NOT NULL,   -- of the learner, when it was issued
    incarnation INTEGER NOT NULL,
    attempts INTEGER NOT NULL          -- how often rollout servers were asked for it
) WITHOUT ROWID;

-- Append-only: how samples ended. A second row takes the first one back; only a resume may write one.
CREATE TABLE IF NOT EXISTS ends (
    end_id INTEGER PRIMARY KEY,
    sample_id TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    end TEXT NOT NULL,                 -- trained, dropped, failed
    reason TEXT,                       -- NULL if trained
    step INTEGER,                      -- NULL unless trained: the policy version that the step made
    oldest_version INTEGER,            -- the rest: NULL unless trained
    reward REAL,
    outcome TEXT,
    num_tokens INTEGER
);
CREATE INDEX IF NOT EXISTS ends_by_sample ON ends (sample_id);

-- What samples said; the oldest rows go when the table outgrows its bound.
CREATE TABLE IF NOT EXISTS texts (
    text_id INTEGER PRIMARY KEY,
    sample_id TEXT NOT NULL,
    prompt TEXT NOT NULL,
    completion TEXT NOT NULL,
    token_ids BLOB NOT NULL,           -- of the completion; int32 of the machine, little-endian on all that we run on
    size_bytes INTEGER NOT NULL
);

-- Every sample with the end that counts: its last one, or none.
CREATE VIEW IF NOT EXISTS sample_ends AS
SELECT samples.*, ends.end, ends.reason, ends.step, ends.oldest_version, ends.reward, ends.outcome, ends.num_tokens
FROM samples LEFT JOIN ends ON end_id = (SELECT max(end_id) FROM ends AS own WHERE own.sample_id = samples.sample_id);
"""

ENDS_BY_REASON = """
SELECT end, coalesce(reason, ''), count(*) FROM sample_ends WHERE end IS NOT NULL GROUP BY end, reason
"""
OPEN = "SELECT sample_id FROM sample_ends WHERE end IS NULL"
TRAINED_AFTER = "SELECT sample_id FROM sample_ends WHERE end = 'trained' AND step > ?"
