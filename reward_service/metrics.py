"""What a reward server exports."""

from prometheus_client import Counter, Gauge, Histogram

from reward_service.outcome import Outcome

ANSWERS = Counter("tandem_reward_answers_total", "Items graded, by outcome.", ("outcome",))
GRADE_SECONDS = Histogram(
    "tandem_reward_grade_seconds",
    "Time that the worker spent on one item, in seconds.",
    buckets=(0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
WORKERS = Gauge("tandem_reward_workers", "Workers that are ready to grade.")
WORKER_RESTARTS = Counter(
    "tandem_reward_worker_restarts_total", "Workers that were lost and are replaced, by reason.", ("reason",)
)
QUEUED_ITEMS = Gauge("tandem_reward_queued_items", "Items accepted and not yet graded.")

RESTART_REASONS = ("timed_out", "died", "failed_to_start")

# Every series is there from the start, so that rates and alerts see the first increment.
for _outcome in Outcome:
    ANSWERS.labels(_outcome)
for _reason in RESTART_REASONS:
    WORKER_RESTARTS.labels(_reason)
