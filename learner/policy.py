"""The policy under DeepSpeed: log-probabilities, updates, its weights for a push, its state for a checkpoint."""

import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from learner.batch import MicroBatch, RankShare
from learner.config import LearnerSettings
from learner.logprobs import shared_prompt_mask, token_logprobs
from learner.loss import ClipBounds, clipped_policy_loss, max_logprob_difference
from learner.rendezvous import RANKS_TIMEOUT, interface_towards, rank_store
from learner.schedule import learning_rate_at
from runtime.disk import NotWrittenError, is_write_failure
from runtime.weights.manifest import TensorEntry

STATE_TAG = "policy"
"""DeepSpeed's name for the folder of its files within a checkpoint."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one optimizer step did; the same on every rank.

    Attributes:
        is_applied: False if the loss or the gradient was not finite: then the weights are what they were.
        policy_version: Of the weights afterwards.
        loss: Over the tokens of all ranks.
        grad_norm: Before clipping; infinite if the step was skipped.
        clip_share: Of the tokens that were computed, like what follows: share whose ratio has left the clip range.
        truncated_share: Share of tokens whose importance weight was truncated.
        mismatch_kl: Estimate of KL(behaviour, policy) in nats.
        max_logprob_difference: Between policy and behaviour, over tokens whose whole prefix was sampled under the
            learner's own version; None if there were none.
        num_tokens: Completion tokens trained on.
        learning_rate: Of this step.
    """

    is_applied: bool
    policy_version: int
    loss: float
    grad_norm: float
    clip_share: float
    truncated_share: float
    mismatch_kl: float
    max_logprob_difference: float | None
    num_tokens: int
    learning_rate: float


class StateNotWrittenError(NotWrittenError):
    """Some rank could not write its part of the state; every rank raises it."""


class Policy:
    """One rank's part of the model that is trained. What is said of all ranks must be called on all ranks."""

    def __init__(self, engine: Any, settings: LearnerSettings) -> None:
        """Use `load`."""
        self._engine = engine
        self._settings = settings
        self._device = torch.device(engine.device)
        self._bounds = ClipBounds(settings.clip_low, settings.clip_high, settings.importance_cap)
        self.policy_version = 0
        """Optimizer steps behind the weights."""
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._write_failures: list[Exception] = []
        write = engine.checkpoint_engine.save
        # A rank that broke off in the middle would leave the others alone in DeepSpeed's next collective.
        engine.checkpoint_engine.save = lambda state_dict, path: self._try(lambda: write(state_dict, path))
        # A script of DeepSpeed's that nobody needs here, whose copy may fail as well.
        assert hasattr(engine, "_copy_recovery_script"), "DeepSpeed has renamed it"
        engine._copy_recovery_script = lambda _folder: None

    @classmethod
    def load(cls, model_folder: Path, settings: LearnerSettings) -> Self:
        """Joins the group of ranks and loads the model; to be called on all ranks, once in a process.

        RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the environment say who and where the ranks are.

        Args:
            model_folder: A folder that transformers loads.
            settings: Of the run.
        """
        torch.set_num_threads(settings.threads_per_rank)
        _join_ranks()
        # Dropout would make the learner's logprobs differ from the rollout server's.
        model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, attn_implementation="sdpa", attention_dropout=0.0
        )
        model.config.use_cache = False
        model.train()
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_deepspeed_config(settings, num_parameters=num_parameters)
        )
        return cls(engine, settings)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._device

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """The log-probability of each completion token under the sampling temperature; to be called on all ranks.

        Returns:
            fp32 [rows, length] on the device, with a gradient unless `torch.no_grad` is on; arbitrary elsewhere.
        """
        input_ids = micro_batch.input_ids.to(self._device)
        segments = micro_batch.segments.to(self._device)
        kept = input_ids.shape[1] - micro_batch.num_prompt_tokens + 1
        logits = self._engine(
            input_ids=input_ids,
            # Without a mask attention is causal, and nothing but padding comes after a lone completion.
            attention_mask=shared_prompt_mask(segments) if micro_batch.is_shared else None,
            position_ids=micro_batch.position_ids.to(self._device),
            logits_to_keep=kept,
        ).logits
        temperature = self._settings.sampling.temperature
        return token_logprobs(logits, input_ids, micro_batch.sources.to(self._device), temperature=temperature)

    def update(self, share: RankShare) -> UpdateReport:
        """One optimizer step on the shares of all ranks; to be called on all ranks."""
        learning_rate = learning_rate_at(self.policy_version + 1, self._settings)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        sums = torch.zeros(4, device=self._device)
        difference = torch.tensor(-1.0, device=self._device)
        for index, micro_batch in enumerate(share.micro_batches, start=1):
            # The loss is divided by the step's tokens already, so DeepSpeed must know nothing of accumulation but its
            # end. Its gradients are means over ranks: hence the factor.
            self._engine.set_gradient_accumulation_boundary(index == len(share.micro_batches))
            logprobs = self.logprobs(micro_batch)
            behaviour = micro_batch.behaviour_logprobs.to(self._device)
            parts = clipped_policy_loss(
                logprobs,
                behaviour,
                micro_batch.advantages.to(self._device),
                micro_batch.completion_mask.to(self._device),
                bounds=self._bounds,
                num_tokens=share.num_tokens,
            )
            self._engine.backward(parts.loss * self.num_ranks)
            sums += torch.stack((parts.loss.detach(), parts.clip_share, parts.truncated_share, parts.mismatch_kl))
            on_policy = micro_batch.on_policy_mask.to(self._device)
            difference = torch.maximum(difference, max_logprob_difference(logprobs, behaviour, on_policy))
        dist.all_reduce(sums)
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        grad_norm = self._step()
        is_applied = math.isfinite(grad_norm)
        self.policy_version += is_applied
        loss, *shares = sums.tolist()
        # What the loss divided by all tokens is a share of those that were computed.
        clip_share, truncated_share, mismatch_kl = (x * share.num_tokens / share.num_packed_tokens for x in shares)
        return UpdateReport(
            is_applied=is_applied,
            policy_version=self.policy_version,
            loss=loss,
            grad_norm=grad_norm,
            clip_share=clip_share,
            truncated_share=truncated_share,
            mismatch_kl=mismatch_kl,
            max_logprob_difference=difference.item() if difference >= 0 else None,
            num_tokens=share.num_tokens,
            learning_rate=learning_rate,
        )

    def manifest_entries(self) -> list[TensorEntry]:
        """Name, dtype and shape of what `parameters_for_push` yields, without moving data; on any rank."""
        return [
            TensorEntry(name, str(parameter.dtype).removeprefix("torch."), tuple(_full_shape(parameter)))
            for name, parameter in self._engine.module.named_parameters()
        ]

    def parameters_for_push(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, in a fixed order, tied ones once; to be exhausted on all ranks.

        ZeRO-3 shards are gathered one bucket at a time; a tensor is valid until the next one is asked for.
        """
        named = list(self._engine.module.named_parameters())
        for bucket in _buckets(named, self._settings.bucket_bytes):
            with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter for _name, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.detach()

    def save_state(self, folder: Path) -> None:
        """Writes weights, optimizer, policy version and random numbers of all ranks; to be called on all ranks.

        Args:
            folder: Exists, is empty, and is the same on all ranks.

        Raises:
            StateNotWrittenError: A rank could not write, for want of space or permission; what the folder holds is
                useless.
        """
        self._write_failures.clear()
        version = {"policy_version": self.policy_version}
        self._engine.save_checkpoint(str(folder), tag=STATE_TAG, client_state=version, save_latest=False)
        random_state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random_state["cuda"] = torch.cuda.get_rng_state(self._device)
        self._try(lambda: torch.save(random_state, _random_state_file(folder, self.rank)))
        # Ends together on all ranks, as a barrier does.
        num_failed = torch.tensor(len(self._write_failures), device=self._device)
        dist.all_reduce(num_failed)
        if num_failed > 0:
            own = [str(failure) for failure in self._write_failures]
            raise StateNotWrittenError(own[0] if own else "another rank could not write its part; its log says why")

    def _try(self, write: Callable[[], None]) -> None:
        """Writes a file of the state; why it could not be is kept for the end, when the ranks agree."""
        try:
            write()
        except (OSError, RuntimeError) as error:
            if not is_write_failure(error):
                raise
            self._write_failures.append(error)

    def load_state(self, folder: Path) -> None:
        """Reads what `save_state` wrote with as many ranks; to be called on all ranks.

        Raises:
            ValueError: The folder holds no state that fits this policy.
        """
        path, client_state = self._engine.load_checkpoint(str(folder), tag=STATE_TAG)
        if path is None:
            raise ValueError(f"{folder} holds no state of a policy")
        self.policy_version = int(client_state["policy_version"])
        random_state = torch.load(_random_state_file(folder, self.rank), weights_only=True)
        torch.set_rng_state(random_state["cpu"])
        if self._device.type == "cuda" and "cuda" in random_state:
            torch.cuda.set_rng_state(random_state["cuda"], self._device)

    def _step(self) -> float:
        """Clips and applies the gradients; returns their norm, infinite if it is not finite and nothing was applied."""
        if self._settings.zero_stage == 0 and self._settings.dtype == "fp32":
            # DeepSpeed's bare engine would apply gradients that are not finite.
            norm = torch.nn.utils.clip_grad_norm_(self._engine.module.parameters(), self._settings.max_grad_norm)
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return math.inf
            self._engine.step()
            return norm.item()
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.inf


def _join_ranks() -> None:
    # torch tells DeepSpeed's authors that names of collectives change; a user can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed_logger.setLevel("WARNING")
    disable_progress_bar()
    # Its collectives in shared memory need a compiler and 17 s at first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(os.environ["MASTER_ADDR"]))
    dist.init_process_group(
        backend, store=rank_store(rank, num_ranks), rank=rank, world_size=num_ranks, timeout=RANKS_TIMEOUT
    )
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)


def _deepspeed_config(settings: LearnerSettings, *, num_parameters: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "bf16": {"enabled": settings.dtype == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": settings.zero_stage,
            # DeepSpeed allocates buffers of this many elements, 500 million by default, however small the model.
            "reduce_bucket_size": min(num_parameters, 500_000_000),
            "allgather_bucket_size": min(num_parameters, 500_000_000),
        },
        "steps_per_print": None,
    }


def _buckets(named: list[tuple[str, Any]], bucket_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, parameter in named:
        num_bytes = math.prod(_full_shape(parameter)) * parameter.element_size()
        if bucket and size + num_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += num_bytes
    if bucket:
        yield bucket


def _full_shape(parameter: Any) -> torch.Size:
    """Of the whole parameter: a shard of ZeRO-3 says 0 of itself."""
    return torch.Size(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def _random_state_file(folder: Path, rank: int) -> Path:
    return folder / f"random_rank_{rank}.pt"
