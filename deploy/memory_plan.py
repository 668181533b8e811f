"""How much memory the services of a run take, and how large the key-value cache may be beside them; pure.

A learner and a rollout server that share a GPU start at the same time, so neither can take "what is free": each gets
its part before either starts. The same sum is made for the memory of a machine without GPUs.
"""

from dataclasses import dataclass, replace

from deploy.errors import UserError
from deploy.model_shape import ModelShape
from deploy.run_file import RunConfig

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GIB = 1 << 30
# Logits of a step's samples and what sampling makes of them, a sample and a word. On a GPU measured, with vLLM 0.26:
# 1,024 samples of 49,152 words took 14 GB beyond weights, cache and graphs.
_SAMPLING_BYTES = {False: 16, True: 288}
# A CUDA context, the libraries' workspaces and the allocator's slack; a server's captured graphs as well.
_GPU_LEARNER_OVERHEAD = 2 * _GIB
_GPU_SERVER_OVERHEAD = 2 * _GIB
# What a process has loaded: torch with transformers and DeepSpeed, or vLLM.
_CPU_LEARNER_OVERHEAD = 700 << 20
_CPU_SERVER_OVERHEAD = 1200 << 20
# Ray, the launcher, the reward service and its workers.
_CPU_OTHER_OVERHEAD = 1500 << 20
_KEPT_FREE_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of one device, and which services share it.

    Attributes:
        name: For a person: "GPU 0 (NVIDIA H200)" or "this machine".
        total_bytes: All of it.
        free_bytes: What nobody uses yet.
        is_gpu: Whether it is a GPU's.
        num_servers: Rollout servers on it.
        num_ranks: Learner ranks on it.
    """

    name: str
    total_bytes: int
    free_bytes: int
    is_gpu: bool
    num_servers: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one process of each kind on a device.

    Attributes:
        room: The device.
        server_bytes: A server's weights, the staging memory of a push, and its overhead.
        kv_cache_bytes: A server's key-value cache.
        learner_bytes: A rank's weights, gradients and optimizer states.
        activation_bytes: A rank's largest forward and backward pass.
    """

    room: Room
    server_bytes: int
    kv_cache_bytes: int
    learner_bytes: int
    activation_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Of all processes on the device."""
        servers = self.room.num_servers * (self.server_bytes + self.kv_cache_bytes)
        learners = self.room.num_ranks * (self.learner_bytes + self.activation_bytes)
        return servers + learners + (0 if self.room.is_gpu else _CPU_OTHER_OVERHEAD)

    def line(self) -> str:
        """The plan for a person."""
        parts = [
            f"a rollout server {_gib(self.server_bytes)} and {_gib(self.kv_cache_bytes)} for keys and values",
            f"a learner rank {_gib(self.learner_bytes)} and {_gib(self.activation_bytes)} for a micro-batch",
        ]
        if not self.room.is_gpu:
            parts.append(f"{_gib(_CPU_OTHER_OVERHEAD)} for Ray and the rest")
        needed, free = _gib(self.needed_bytes), _gib(self.room.free_bytes)
        return f"{self.room.name}: {needed} GiB are needed, {free} are free; {', '.join(parts)}"


def plan_memory(config: RunConfig, shape: ModelShape, room: Room) -> MemoryPlan:
    """Shares out a device's memory.

    A `rollout.kv_cache_bytes` that is set stays; otherwise the cache gets what all samples at full length would need,
    or what is left if that is less.

    Raises:
        UserError: The services do not fit, or what is left for the cache does not hold one sample.
    """
    plan = MemoryPlan(
        room=room,
        server_bytes=_server_bytes(config, shape, is_gpu=room.is_gpu),
        kv_cache_bytes=config.rollout.kv_cache_bytes,
        learner_bytes=_learner_bytes(config, shape, is_gpu=room.is_gpu),
        activation_bytes=_activation_bytes(config, shape),
    )
    usable = int(room.free_bytes - _KEPT_FREE_SHARE * room.total_bytes)
    if plan.kv_cache_bytes == 0 and room.num_servers > 0:
        one_sample = shape.num_layers * shape.kv_width * _server_element(config, shape) * config.rollout.context_length
        left = (usable - plan.needed_bytes) // room.num_servers
        plan = replace(plan, kv_cache_bytes=max(one_sample, min(left, one_sample * config.rollout.max_running_samples)))
    if plan.needed_bytes > usable:
        raise UserError(
            f"too little memory on {plan.line()}: lower learner.tokens_per_micro_batch, rollout.context_length or "
            "rollout.num_servers, set learner.dtype = bf16 or learner.gradient_checkpointing, or take a smaller model"
        )
    return plan


def _server_element(config: RunConfig, shape: ModelShape) -> int:
    return _BYTES.get(shape.dtype if config.rollout.dtype == "auto" else config.rollout.dtype, 4)


def _server_bytes(config: RunConfig, shape: ModelShape, *, is_gpu: bool) -> int:
    weights = shape.num_parameters * _server_element(config, shape)
    sampling = _SAMPLING_BYTES[is_gpu] * config.rollout.max_running_samples * shape.vocabulary_size
    staged = shape.num_parameters * (2 if config.learner.dtype == "bf16" else 4)
    return weights + staged + sampling + (_GPU_SERVER_OVERHEAD if is_gpu else _CPU_SERVER_OVERHEAD)


def _learner_bytes(config: RunConfig, shape: ModelShape, *, is_gpu: bool) -> int:
    # fp32: weights, gradients, two moments. bf16: weights and gradients in bf16, and master weights, gradients and
    # moments in fp32. ZeRO shards the states over the ranks; a plan that counts them whole is never too small.
    per_parameter = 16 if config.learner.dtype == "fp32" else 20
    return shape.num_parameters * per_parameter + (_GPU_LEARNER_OVERHEAD if is_gpu else _CPU_LEARNER_OVERHEAD)


def _activation_bytes(config: RunConfig, shape: ModelShape) -> int:
    """What autograd keeps of one micro-batch: about 16 residual-wide and 4 inner tensors a layer, and the logits."""
    learner = config.learner
    element = 4 if learner.dtype == "fp32" else 2
    context = config.rollout.context_length
    of_step = learner.prompts_per_step * learner.rollouts_per_prompt * context
    num_tokens = max(context, min(learner.tokens_per_micro_batch, of_step))
    layer = num_tokens * (16 * shape.hidden_size + 4 * shape.intermediate_size) * element
    kept = num_tokens * shape.hidden_size * element
    layers = layer + shape.num_layers * kept if learner.gradient_checkpointing else shape.num_layers * layer
    # Logits as they come, in fp32, divided by the temperature, and the gradients of the last two.
    return layers + num_tokens * shape.vocabulary_size * (element + 4 * 4)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f}"
