"""The settings of a run's learner: what is trained, how, and on how many ranks."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from runtime.settings import ListenSettings, Settings

Seconds = Annotated[float, Field(gt=0, le=86400)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class SamplingSettings(Settings):
    """How training rollouts are sampled. Whatever renormalises the distribution (top-p, top-k) is not offered."""

    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Divides the logits, on the rollout server and in the loss alike."""
    max_tokens: Annotated[int, Field(ge=1)] = 8
    """Most tokens that a completion may have."""


class LearnerSettings(Settings):
    """Everything that decides what the learner does with one run."""

    num_steps: Annotated[int, Field(ge=1)] = 300
    """Optimizer steps of the run."""
    prompts_per_step: Annotated[int, Field(ge=1)] = 16
    """Groups that one optimizer step trains on."""
    rollouts_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Rollouts in a group; advantages are relative within it."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Oldest rollout that may be trained on, in optimizer steps; 0 is exactly synchronous training."""
    sampling: SamplingSettings = SamplingSettings()
    """How training rollouts are sampled."""

    advantage: Literal["grpo"] = "grpo"
    """How the rewards of a group become advantages."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio of policy to behaviour probability is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    importance_cap: Annotated[float, Field(ge=1)] = 2.0
    """No token's importance weight goes beyond this, clipped or not."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Steps over which the learning rate rises linearly."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What becomes of the learning rate after the warm-up; it reaches its floor with the run's last step."""
    learning_rate_floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where the learning rate ends, as a share of `learning_rate`."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm above which gradients are scaled down."""

    tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 8192
    """Most tokens, padding included, of one forward pass; a longer row gets a micro-batch of its own."""
    tokens_per_shared_row: Annotated[int, Field(ge=0)] = 512
    """Completions of a group share a row, their prompt computed once, while it is no longer than this; 0 is never."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO stage: 1 shards optimizer states, 2 gradients as well, 3 parameters as well."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Numbers of the forward and backward pass; the optimizer keeps fp32 master weights in any case."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more work."""
    num_ranks: Annotated[int, Field(ge=1)] = 1
    """Processes that train together, one per GPU where there are GPUs."""
    threads_per_rank: Annotated[int, Field(ge=1)] = 1
    """Threads that torch computes with on the CPU, per rank."""

    checkpoint_every_steps: Annotated[int, Field(ge=1)] = 50
    """A checkpoint is written after every this many steps, and at the end."""
    checkpoints_kept: Annotated[int, Field(ge=1)] = 2
    """The newest this many checkpoints are kept."""

    group_timeout_seconds: Seconds = 300.0
    """Deadline for all rollouts of a group, retries included."""
    push_timeout_seconds: Seconds = 120.0
    """Deadline for each phase of a weight push; a server that misses it leaves the fleet."""
    fleet_timeout_seconds: Seconds = 600.0
    """How long the learner waits for a rollout server when none is left, before the run ends."""
    bucket_bytes: Annotated[int, Field(ge=1 << 16)] = 64 << 20
    """Weights are gathered and sent in buckets of about this size; a larger tensor is a bucket of its own."""
    transport: Literal["auto", "gloo", "nccl"] = "auto"
    """How weights travel; `auto` is NCCL between GPUs and gloo otherwise."""
    kv_on_commit: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of requests in flight when new weights are committed."""

    listen: ListenSettings = ListenSettings()
    """Where rank 0 serves LearnerService and `/metrics`."""

    @model_validator(mode="after")
    def _importance_cap_lets_the_clip_act(self) -> Self:
        if self.importance_cap < 1 + self.clip_high:
            raise ValueError(
                f"importance_cap = {self.importance_cap}: must be at least 1 + clip_high = {1 + self.clip_high}"
            )
        return self
