"""Settings of a rollout server."""

from typing import Annotated, Literal

from pydantic import Field

from runtime.settings import ListenSettings, Port, Settings


class RolloutListenSettings(ListenSettings):
    """Where a rollout server listens; its control of weights has a listener of its own."""

    admin_host: str = "127.0.0.1"
    """Address of the admin listener (weights, pause); off loopback it requires a token as well."""
    admin_port: Port = 0
    """Port of the admin listener."""


class RolloutSettings(Settings):
    """One rollout server: what it loads, and how vLLM runs it."""

    model: str = ""
    """Folder with the model and its tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Numbers that the engine computes with; `auto` takes the checkpoint's."""
    context_length: Annotated[int, Field(ge=2)] = 4096
    """Largest number of tokens of prompt and completion together (vLLM's max_model_len)."""
    max_running_samples: Annotated[int, Field(ge=1)] = 256
    """Samples that the engine runs at the same time (vLLM's max_num_seqs)."""
    max_queued_samples: Annotated[int, Field(ge=1)] = 65_536
    """Samples that may run or wait before more are refused with RESOURCE_EXHAUSTED."""
    max_batched_tokens: Annotated[int, Field(ge=1)] = 8192
    """Tokens that one engine step computes at most (vLLM's max_num_batched_tokens)."""
    kv_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory for keys and values, in bytes; 0 lets vLLM take what `memory_share` leaves."""
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the device's memory that the engine may use (vLLM's gpu_memory_utilization)."""
    block_size: Annotated[int, Field(ge=0)] = 0
    """Tokens in a block of the key-value cache; 0 for vLLM's default."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs that one engine is spread over."""
    num_threads: Annotated[int, Field(ge=1)] = 1
    """Threads of a CPU engine."""
    use_cuda_graphs: bool = True
    """Capture CUDA graphs at start; off saves start-up time and memory (vLLM's enforce_eager). CPU engines never do."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of samples that bring none of their own."""
    learner_address: str = ""
    """Learner to announce this server to, host:port; empty for none."""
    listen: RolloutListenSettings = RolloutListenSettings()
    """Where the server listens."""
