"""The engine: vLLM's AsyncLLM behind the Engine protocol."""

import asyncio
import gc
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from rollout_server.config import RolloutSettings
from rollout_server.engine import (
    Commit,
    EngineDeadError,
    EngineFacts,
    EngineProgress,
    EngineSample,
    GroupAddress,
    WeightsRefusedError,
)
from rollout_server.samples import FinishReason, Sampling, VersionSpan
from runtime.weights.manifest import WeightManifest


def set_engine_environment(settings: RolloutSettings) -> None:
    """Sets the variables that vLLM reads; before its first import."""
    fixed = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Routes that change weights belong to the admin listener only.
        "VLLM_SERVER_DEV_MODE": "0",
        # Not in requirements/cuda.txt, and its sampler does not give the logprobs that we report.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if settings.dtype == "float32":
        # Triton's attention would multiply fp32 as TF32: logprobs 2e-3 off, where the learner's are within 1e-4.
        fixed["TRITON_F32_DEFAULT"] = "ieee"
    chosen = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        # `auto` would pin every engine of the machine to the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # gloo would listen on the address that the host's name has, for groups that end on this machine. The weight
        # group names its address itself.
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(settings.num_threads),
    }
    os.environ.update(fixed)
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


class VllmEngine:
    """AsyncLLM with our scheduler and worker extension."""

    def __init__(self, llm: Any, facts: EngineFacts, stop_token_ids: tuple[int, ...]) -> None:
        self._llm, self._facts, self._stop_token_ids = llm, facts, stop_token_ids
        # Version of every epoch of the scheduler; a resume after a pause begins the next one.
        self._versions = [0]
        self._version = 0
        self._num_running = 0
        self._is_paused = False
        self._has_failed = False

    @classmethod
    async def start(cls, settings: RolloutSettings, *, stop_token_ids: tuple[int, ...]) -> "VllmEngine":
        """Loads the model and starts the engine's process.

        Args:
            settings: The server's settings.
            stop_token_ids: Tokens that end a completion.

        Raises:
            ValueError: vLLM refuses the model or the settings.
        """
        set_engine_environment(settings)
        # Imports make 600,000 objects that stay: collecting among them takes 4 of their 13 s, and 10 s when the process
        # ends. Frozen, they are walked no more, here and in a forked engine.
        gc.disable()
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            # The first request with logprobs otherwise waits 17 s for a compilation.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
            # Keeps the one worker in the engine's process; vLLM would give it a process of its own on a CPU.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if settings.tensor_parallel_size == 1 else "1")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = _engine_arguments(settings, is_cpu=current_platform.is_cpu())
        config = AsyncEngineArgs(**arguments).create_engine_config()
        gc.freeze()
        gc.enable()
        if current_platform.is_cpu() and settings.num_threads == 1:
            # vLLM's CPU platform has just asked for spawn, for the sake of OpenMP's threads. With one thread there are
            # none to lose, and a forked engine does not import everything again: 14 s of CPU time and 200 MB less.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            # OMP_NUM_THREADS was read when torch was loaded.
            torch.set_num_threads(1)

        class ClosedByHand(AsyncLLM):
            def __del__(self) -> None:
                """Nothing: vLLM's own fails when the interpreter has already taken its modules apart."""

        llm = ClosedByHand.from_vllm_config(config)
        return cls(llm, _facts(llm, settings, is_cpu=current_platform.is_cpu()), stop_token_ids)

    @property
    def facts(self) -> EngineFacts:
        """What the engine is."""
        return self._facts

    @property
    def policy_version(self) -> int:
        """The version that tokens sampled from now on are booked under."""
        return self._version

    @property
    def num_running(self) -> int:
        """Samples that run or wait."""
        return self._num_running

    @property
    def is_dead(self) -> bool:
        """Whether it has failed for good."""
        return self._has_failed or bool(self._llm.errored)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, seed: int | None, progress_every_tokens: int
    ) -> AsyncGenerator[EngineSample | EngineProgress, None]:
        """Samples one completion; see the protocol."""
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        parameters = self._sampling_parameters(sampling, seed=seed, progress_every_tokens=progress_every_tokens)
        tokens: list[int] = []
        logprobs: list[float] = []
        self._num_running += 1
        try:
            prompt = {"type": "token", "prompt_token_ids": list(prompt_token_ids)}
            async for output in self._llm.generate(prompt, parameters, request_id=uuid.uuid4().hex):
                completion = output.outputs[0]
                tokens.extend(completion.token_ids)
                if completion.logprobs is not None:
                    logprobs.extend(completion.logprobs.logprobs)
                if output.finished:
                    yield self._sample(output, tokens, logprobs)
                else:
                    yield EngineProgress(len(tokens))
        except VllmDeadError as error:
            raise EngineDeadError(str(error)) from error
        finally:
            self._num_running -= 1

    def _sampling_parameters(self, sampling: Sampling, *, seed: int | None, progress_every_tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stop = () if sampling.ignore_stop_tokens else (*self._stop_token_ids, *sampling.stop_token_ids)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=seed,
            stop_token_ids=list(stop),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            # Made for one request, so vLLM need not copy it for itself.
            skip_clone=True,
            # The scheduler delivers a sample whole, or in chunks when progress is asked for.
            output_kind=RequestOutputKind.DELTA,
            extra_args={"tandem_flush_tokens": progress_every_tokens} if progress_every_tokens else None,
        )

    def _sample(self, output: Any, tokens: list[int], logprobs: list[float]) -> EngineSample:
        completion = output.outputs[0]
        spans = (output.kv_transfer_params or {}).get("tandem_spans", [])
        reason = FinishReason(completion.finish_reason) if completion.finish_reason in ("stop", "length") else None
        is_whole = len(logprobs) == len(tokens) and bool(np.isfinite(logprobs).all())
        return EngineSample(
            token_ids=tokens,
            behaviour_logprobs=logprobs,
            version_spans=tuple(VersionSpan(first, self._versions[epoch]) for epoch, first in spans),
            # A sample with a logprob that is no number must not be trained on.
            finish_reason=reason if reason is not None and is_whole else FinishReason.ABORTED,
            num_cached_prompt_tokens=output.num_cached_tokens or 0,
        )

    async def join_group(self, address: GroupAddress, manifest: WeightManifest) -> None:
        """Lets the workers join in the background."""
        entries = [(entry.name, entry.dtype, list(entry.shape)) for entry in manifest.entries]
        await self._workers("tandem_join", asdict(address), entries, manifest.bucket_bytes)

    async def leave_group(self) -> None:
        """Leaves the group and frees the staging memory."""
        await self._workers("tandem_leave")

    async def begin_staging(self, policy_version: int, *, timeout_seconds: float) -> None:
        """Lets the workers receive a version in the background."""
        await self._require("tandem_begin", policy_version, timeout_seconds)

    async def drop_staged(self) -> None:
        """Forgets what is staged."""
        await self._workers("tandem_drop")

    async def commit(self, policy_version: int, *, recompute: bool) -> Commit:
        """Serves the staged weights between two steps; see the protocol."""
        await self._require("tandem_check", policy_version)
        was_paused, begin = self._is_paused, time.perf_counter()
        try:
            if not was_paused:
                await self.pause()
            num_kept = self._num_running
            seconds = await self._workers("tandem_apply", policy_version)
            if recompute:
                await self._llm.engine_core.call_utility_async("reset_prefix_cache", True)
            self._version = policy_version
            if not was_paused:
                await self.resume()
        except BaseException as error:
            # Whatever ended it half-way: the weights may be neither old nor new, so nothing may be sampled from them.
            self._has_failed = True
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"applying policy version {policy_version} failed: {error}") from error
        return Commit(time.perf_counter() - begin, max(seconds), num_kept)

    async def pause(self) -> None:
        """Stops sampling; requests are held."""
        self._is_paused = True
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Goes on after `pause`."""
        # Before the scheduler begins the epoch, so that its first token finds its version.
        self._versions.append(self._version)
        await self._llm.engine_core.resume_scheduler_async()
        self._is_paused = False

    async def close(self) -> None:
        """Ends the engine and its processes."""
        self._has_failed = True
        if self._llm.output_handler is not None:
            # It would report the end of the engine as a failure.
            self._llm.output_handler.cancel()
        # vLLM warns of every engine that it ends by force. Nothing is in flight any more, and an orderly end takes the
        # engine's process seconds of collecting garbage.
        logging.getLogger("vllm.v1.utils").setLevel(logging.ERROR)
        await asyncio.to_thread(self._llm.shutdown, timeout=0)

    async def _require(self, method: str, *arguments: Any) -> None:
        reasons = [reason for reason in await self._workers(method, *arguments) if reason]
        if reasons:
            raise WeightsRefusedError(reasons[0])

    async def _workers(self, method: str, *arguments: Any) -> list[Any]:
        result: list[Any] = await self._llm.engine_core.collective_rpc_async(method, None, arguments)
        return result


def _engine_arguments(settings: RolloutSettings, *, is_cpu: bool) -> dict[str, Any]:
    scheduler = "VersionedScheduler" if is_cpu else "VersionedAsyncScheduler"
    # On a CPU a step holds whole prompts. vLLM winds a seeded generator back when a prompt is computed in parts, and
    # torch's CPU generator cannot be: "CPU Generator does not use offset" ends the engine.
    shortest_step = settings.context_length if is_cpu else 1
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.context_length,
        "max_num_seqs": settings.max_running_samples,
        "max_num_batched_tokens": max(settings.max_batched_tokens, settings.max_running_samples, shortest_step),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.memory_share,
        "seed": settings.seed,
        "enforce_eager": is_cpu or not settings.use_cuda_graphs,
        "async_scheduling": not is_cpu,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "enable_chunked_prefill": not is_cpu,
        "disable_log_stats": False,
        "scheduler_cls": f"rollout_server.vllm_scheduler.{scheduler}",
        "worker_extension_cls": "rollout_server.vllm_worker.WeightWorker",
    }
    if settings.tensor_parallel_size == 1:
        arguments["distributed_executor_backend"] = (
            "uni" if is_cpu else "rollout_server.vllm_executor.FileStoreExecutor"
        )
    if settings.kv_cache_bytes:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if settings.block_size:
        arguments["block_size"] = settings.block_size
    return arguments


def _facts(llm: Any, settings: RolloutSettings, *, is_cpu: bool) -> EngineFacts:
    import vllm

    arguments = _engine_arguments(settings, is_cpu=is_cpu)
    return EngineFacts(
        vocabulary_size=llm.model_config.get_vocab_size(),
        context_length=llm.model_config.max_model_len,
        max_running_samples=settings.max_running_samples,
        num_weight_ranks=settings.tensor_parallel_size,
        transports=("gloo",) if is_cpu else ("nccl", "gloo"),
        build=vllm.__version__,
        settings={name: str(value) for name, value in arguments.items()},
    )
