"""What the learner exports."""

from prometheus_client import Counter, Gauge, Histogram

STEP = Gauge("tandem_learner_step", "Optimizer steps done; the learner's policy version.")
LAST_STEP = Gauge("tandem_learner_last_step_timestamp_seconds", "Unix time of the end of the last step.")
STEP_SECONDS = Histogram(
    "tandem_learner_step_seconds",
    "Time of a step by phase, in seconds.",
    ("phase",),
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
LOSS = Gauge("tandem_learner_loss", "Loss of the last step.")
GRAD_NORM = Gauge("tandem_learner_grad_norm", "Gradient norm of the last step, before it was clipped.")
REWARD = Gauge("tandem_learner_reward", "Mean reward of the last step.")
ACCURACY = Gauge("tandem_learner_accuracy_ratio", "Share of correct rollouts in the last step.")
MISMATCH_KL = Gauge("tandem_learner_mismatch_kl", "Estimate of KL(behaviour, policy) in the last step, in nats.")
CLIP = Gauge("tandem_learner_clip_ratio", "Share of tokens clipped in the last step.")
TRUNCATED = Gauge("tandem_learner_truncated_ratio", "Share of tokens with a truncated weight in the last step.")
LOGPROB_DIFFERENCE = Gauge(
    "tandem_learner_max_logprob_difference",
    "Largest difference between learner's and server's logprobs of the same weights, in the last step.",
)
STALENESS = Histogram(
    "tandem_learner_staleness_versions",
    "Staleness of rollouts that were trained on, in policy versions.",
    buckets=(0, 1, 2, 3, 4, 6, 8, 16),
)
TOKENS = Counter("tandem_learner_tokens_total", "Completion tokens trained on.")
SAMPLES = Counter("tandem_learner_samples_total", "Samples ended, by end and reason.", ("end", "reason"))
NONFINITE_STEPS = Counter("tandem_learner_nonfinite_steps_total", "Steps skipped because of a loss or gradient.")
PUSHES = Counter("tandem_learner_weight_pushes_total", "Weight pushes, by result.", ("result",))
ROLLOUT_SERVERS = Gauge("tandem_learner_rollout_servers", "Rollout servers in the fleet.")
CHECKPOINTS = Counter("tandem_learner_checkpoints_total", "Checkpoints written.")
CHECKPOINT_FAILURES = Counter("tandem_learner_checkpoint_failures_total", "Checkpoints that could not be written.")
LEDGER_UNWRITTEN = Gauge(
    "tandem_learner_ledger_unwritten_rows", "Rows of the ledger that wait for room on the disk; 0 in a healthy run."
)
LAST_CHECKPOINT = Gauge("tandem_learner_last_checkpoint_timestamp_seconds", "Unix time of the last checkpoint.")
