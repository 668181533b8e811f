r"""GRPO on the default task in one script, without services: the peer that the whole system is compared with.

One process holds a vLLM engine and a plain torch trainer. It samples, grades, trains and copies the weights over, one
after the other, with nothing in between: no gRPC, no Ray, no DeepSpeed, no ledger, no checkpoints. Problems, model,
batch, lengths, loss and optimizer are those of deploy/runs/tiny.toml. Two things differ: staleness is always 0, and
answers are compared as text, because math-verify would take seconds a step in one process.

    python -m benchmarks.single_script [--seed 1] [--steps 150] [--json FILE]
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# vLLM and torch read these when they are imported. One thread, one process; without TORCHDYNAMO_DISABLE the first
# request with logprobs waits 17 s for a compilation.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from deploy.tiny_model import ensure_tiny_model
from learner.advantage import group_advantages
from runtime.problems.arithmetic import arithmetic_problems
from runtime.problems.problem import Problem
from runtime.problems.tokenizer import TextTokenizer, load_tokenizer, stop_token_ids

PROMPTS_PER_STEP = 16
ROLLOUTS_PER_PROMPT = 8
MAX_TOKENS = 8
LEARNING_RATE = 5e-4
WARMUP_STEPS = 5
CLIP_LOW, CLIP_HIGH, IMPORTANCE_CAP = 0.2, 0.2, 2.0
NUM_TRAIN, NUM_HELD_OUT = 4096, 256
STEPS_BEFORE_TIMING = 10


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion: its tokens and their logprobs under the weights that sampled it."""

    prompt_ids: list[int]
    token_ids: list[int]
    behaviour_logprobs: list[float]


@dataclass(slots=True)
class Times:
    """Seconds of each part of each step."""

    rollout: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    push: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to; the shares are of the median step's time."""

    steps_per_minute: float
    accuracy_before: float
    accuracy_after: float
    steps: int
    rollout_share: float
    reward_share: float
    train_share: float
    push_share: float
    max_logprob_difference: float
    seconds_total: float


class SingleScript:
    """The engine, the trainer, and what moves between them."""

    def __init__(self, model_folder: Path, *, seed: int) -> None:
        torch.set_num_threads(1)
        self.tokenizer: TextTokenizer = load_tokenizer(model_folder)
        self.stop_ids = stop_token_ids(model_folder)
        self.engine = LLM(
            model=str(model_folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=256,
            kv_cache_memory_bytes=64 << 20,
            logprobs_mode="processed_logprobs",
            skip_tokenizer_init=True,
            disable_log_stats=True,
            seed=seed,
        )
        self.model = Qwen2ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.max_logprob_difference = 0.0

    def sample(self, problems: list[Problem], *, num_rollouts: int, temperature: float) -> list[Rollout]:
        """Complete each problem `num_rollouts` times; the rollouts of one problem follow each other."""
        prompts = [self.tokenizer.encode(problem.prompt) for problem in problems for _ in range(num_rollouts)]
        parameters = SamplingParams(
            temperature=temperature,
            max_tokens=MAX_TOKENS,
            stop_token_ids=self.stop_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        outputs = self.engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        return [
            Rollout(prompt, list(completion.token_ids), list(completion.logprobs.logprobs))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def is_right(self, rollout: Rollout, problem: Problem) -> bool:
        """Compare the completion's text; the answers are whole numbers, and math-verify takes 20 ms for each."""
        return self.tokenizer.decode(rollout.token_ids) == rf"\boxed{{{problem.answer}}}"

    def accuracy(self, problems: list[Problem]) -> float:
        """Share of problems whose greedy answer is right."""
        rollouts = self.sample(problems, num_rollouts=1, temperature=0.0)
        return statistics.fmean(map(self.is_right, rollouts, problems))

    def train(self, rollouts: list[Rollout], rewards: list[float], *, step: int) -> None:
        """One optimizer step on the whole batch, padded to its longest row."""
        groups = [rewards[first : first + ROLLOUTS_PER_PROMPT] for first in range(0, len(rewards), ROLLOUTS_PER_PROMPT)]
        advantages = torch.tensor([advantage for group in groups for advantage in group_advantages(group)])
        length = max(len(rollout.prompt_ids) + len(rollout.token_ids) for rollout in rollouts)
        token_ids = torch.zeros(len(rollouts), length, dtype=torch.long)
        behaviour, mask = torch.zeros(len(rollouts), length), torch.zeros(len(rollouts), length)
        for row, rollout in enumerate(rollouts):
            begin, end = len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.token_ids)
            token_ids[row, :end] = torch.tensor(rollout.prompt_ids + rollout.token_ids)
            behaviour[row, begin:end] = torch.tensor(rollout.behaviour_logprobs)
            mask[row, begin:end] = 1.0
        loss = self._loss(token_ids, behaviour, mask, advantages)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        self.optimizer.step()

    def _loss(self, token_ids: Tensor, behaviour: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        counts = mask[:, 1:] > 0
        hidden = self.model.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1][counts]
        targets = token_ids[:, 1:][counts].unsqueeze(1)
        logprobs = self.model.lm_head(hidden).log_softmax(-1).gather(1, targets).squeeze(1)
        difference = logprobs - behaviour[:, 1:][counts]
        self.max_logprob_difference = max(self.max_logprob_difference, float(difference.detach().abs().max()))
        advantage = advantages.unsqueeze(1).expand_as(counts)[counts]
        ratio = difference.exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        return -torch.minimum(ratio.clamp(max=IMPORTANCE_CAP) * advantage, clipped * advantage).mean()

    def push(self) -> None:
        """Copy the trainer's weights into the engine, and forget what it computed with the old ones."""
        weights = [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]
        self.engine.collective_rpc(_load_weights, args=(weights,))
        self.engine.reset_prefix_cache()


def _load_weights(worker: Any, weights: list[tuple[str, Tensor]]) -> None:
    model = worker.model_runner.model
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights(weights)
        finalize_layerwise_reload(model, worker.model_runner.model_config)
        # A tied head keeps its old packed copy through the reload.
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def run(*, model_folder: Path, seed: int, num_steps: int, on_line: Any = print) -> Result:
    """Train for some steps and measure.

    Args:
        model_folder: The tiny model of the same seed.
        seed: Of the problems and of the sampling.
        num_steps: Optimizer steps, more than `STEPS_BEFORE_TIMING`.
        on_line: Called with a line of text every 25 steps.

    Raises:
        ValueError: Too few steps to time any.
    """
    if num_steps <= STEPS_BEFORE_TIMING:
        raise ValueError(f"num_steps is {num_steps}; it must be more than {STEPS_BEFORE_TIMING}")
    begin = time.perf_counter()
    problems = arithmetic_problems(seed=seed, num_train=NUM_TRAIN, num_held_out=NUM_HELD_OUT)
    script = SingleScript(model_folder, seed=seed)
    held_out = list(problems.held_out)
    accuracy_before = script.accuracy(held_out)
    generator = torch.Generator().manual_seed(seed)
    times = Times()
    order: list[int] = []
    for step in range(num_steps):
        if len(order) < PROMPTS_PER_STEP:
            order = torch.randperm(len(problems.train), generator=generator).tolist()
        batch = [problems.train[order.pop()] for _ in range(PROMPTS_PER_STEP)]
        reward = _step(script, batch, step=step, times=times)
        if (step + 1) % 25 == 0:
            on_line(f"step {step + 1}: reward {reward:.3f}, {_steps_per_minute(times):.0f} steps a minute")
    accuracy_after = script.accuracy(held_out)
    return _result(
        script,
        times,
        accuracy_before=accuracy_before,
        accuracy_after=accuracy_after,
        seconds_total=time.perf_counter() - begin,
    )


def _step(script: SingleScript, batch: list[Problem], *, step: int, times: Times) -> float:
    """Sample, grade, train, push; returns the mean reward."""
    marks = [time.perf_counter()]
    rollouts = script.sample(batch, num_rollouts=ROLLOUTS_PER_PROMPT, temperature=1.0)
    marks.append(time.perf_counter())
    asked = [problem for problem in batch for _ in range(ROLLOUTS_PER_PROMPT)]
    rewards = [float(script.is_right(rollout, problem)) for rollout, problem in zip(rollouts, asked, strict=True)]
    marks.append(time.perf_counter())
    script.train(rollouts, rewards, step=step)
    marks.append(time.perf_counter())
    script.push()
    marks.append(time.perf_counter())
    parts = (times.rollout, times.reward, times.train, times.push)
    for part, first, last in zip(parts, marks, marks[1:], strict=False):
        part.append(last - first)
    return statistics.fmean(rewards)


def _step_seconds(times: Times) -> list[float]:
    steps = [sum(parts) for parts in zip(times.rollout, times.reward, times.train, times.push, strict=True)]
    return steps[min(STEPS_BEFORE_TIMING, len(steps) - 1) :]


def _steps_per_minute(times: Times) -> float:
    return 60 / statistics.median(_step_seconds(times))


def _result(
    script: SingleScript, times: Times, *, accuracy_before: float, accuracy_after: float, seconds_total: float
) -> Result:
    median = statistics.median(_step_seconds(times))
    shares = {
        name: statistics.median(part[STEPS_BEFORE_TIMING:]) / median
        for name, part in (
            ("rollout_share", times.rollout),
            ("reward_share", times.reward),
            ("train_share", times.train),
            ("push_share", times.push),
        )
    }
    return Result(
        steps_per_minute=_steps_per_minute(times),
        accuracy_before=accuracy_before,
        accuracy_after=accuracy_after,
        steps=len(times.train),
        max_logprob_difference=script.max_logprob_difference,
        seconds_total=seconds_total,
        **shares,
    )


def main() -> None:
    """Make the model where it is missing, train, and print the figures."""
    parser = argparse.ArgumentParser(description="GRPO on the default task in one script, without services.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/tandem"), help="where the tiny model is kept")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    model_folder = ensure_tiny_model(cache_folder=arguments.cache.expanduser(), seed=arguments.seed)
    result = run(model_folder=model_folder, seed=arguments.seed, num_steps=arguments.steps)
    for name, value in asdict(result).items():
        print(f"{name}: {value:.4g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result) | {"ratios": {}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
