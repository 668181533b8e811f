"""What a rollout server exports besides vLLM's own metrics, which stand in the same registry."""

from prometheus_client import Counter, Gauge, Histogram, Info

SAMPLES = Counter("tandem_rollout_samples_total", "Samples ended, by finish reason.", ("finish_reason",))
GENERATED_TOKENS = Counter("tandem_rollout_generated_tokens_total", "Tokens of finished samples.")
CANCELLED_SAMPLES = Counter("tandem_rollout_cancelled_samples_total", "Samples aborted because their caller went away.")
RUNNING_SAMPLES = Gauge("tandem_rollout_running_samples", "Samples that run or wait.")
POLICY_VERSION = Gauge("tandem_rollout_policy_version", "Policy version that is served.")
WEIGHT_PUSHES = Counter("tandem_rollout_weight_pushes_total", "Weight pushes, by result.", ("result",))
STOPPED_SECONDS = Histogram(
    "tandem_rollout_stopped_seconds",
    "Time per push in which no token was sampled, in seconds.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
APPLY_SECONDS = Histogram(
    "tandem_rollout_apply_seconds",
    "Time per push to put staged weights into the model, in seconds.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
BUILD = Info("tandem_rollout_build", "Versions that the server runs.")
