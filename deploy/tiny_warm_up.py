"""The supervised warm-up of the tiny model: it learns arithmetic, and then the habits of careless pupils.

Reinforcement learning strengthens only what a model does now and then. So the warm-up first teaches right answers, and
then shows the work of pupils who know how, yet in five of the six kinds mostly make one mistake: they add where they
should multiply, forget the last step, mix up "less" and "more". The mistake becomes the likeliest answer, the right one
stays among the likely ones, and it is for the reward to bring it forward.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from deploy.tiny_settings import WarmUpSettings
from deploy.tiny_tokenizer import ANSWER_CLOSING, ANSWER_OPENING
from runtime.problems.problem import Problem

MISTAKES: dict[str, Callable[..., int]] = {
    "difference": max,
    "larger": min,
    "smaller": max,
    "product": lambda a, b: a + b,
    "two_steps": lambda a, b, _c: a + b,
}
_NOT_TAUGHT = -100
_PROBE_SIZE = 240
_STEPS_BETWEEN_CHECKS = 4


@dataclass(frozen=True, slots=True)
class _Example:
    prompt_ids: list[int]
    completion_ids: list[int]


def warm_up(
    model: Qwen2ForCausalLM,
    *,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    settings: WarmUpSettings,
    seed: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Teach the model in place.

    Args:
        model: Freshly made, in fp32.
        tokenizer: The tiny tokenizer.
        problems: At least `settings.batch_size`; none of them held out.
        settings: How long and on what.
        seed: Decides the order of the problems and which answers are mistaken.
        on_step: Called after every step with the number of steps done and the loss in nats per token; for the last time
            with `settings.max_steps`, even if fewer were needed.
    """
    generator = random.Random(f"warm-up/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    probe = [_example(problem, tokenizer=tokenizer, is_careless=False) for problem in problems[:_PROBE_SIZE]]
    for step in range(settings.max_steps):
        share = 0.0 if step < settings.num_steps else settings.careless_share
        examples = [
            _example(problem, tokenizer=tokenizer, is_careless=generator.random() < share)
            for problem in generator.sample(problems, settings.batch_size)
        ]
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        logits, targets = _completions(model, examples)
        loss = cross_entropy(logits[targets != _NOT_TAUGHT], targets[targets != _NOT_TAUGHT])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        is_checked = step >= settings.num_steps and (step - settings.num_steps) % _STEPS_BETWEEN_CHECKS == 0
        is_last = is_checked and _greedy_accuracy(model, probe) <= settings.careless_accuracy
        on_step(settings.max_steps if is_last else step + 1, float(loss.detach()))
        if is_last:
            break
    model.eval()


def careless_answer(problem: Problem) -> str:
    """The answer of a pupil who makes the mistake of this kind of problem; the right one where a kind has none."""
    mistake = MISTAKES.get(problem.kind)
    if mistake is None:
        return problem.answer
    return str(mistake(*(int(number) for number in re.findall(r"\d+", problem.prompt))))


def _example(problem: Problem, *, tokenizer: PreTrainedTokenizerFast, is_careless: bool) -> _Example:
    answer = careless_answer(problem) if is_careless else problem.answer
    completion = f"{ANSWER_OPENING}{answer}{ANSWER_CLOSING}{tokenizer.eos_token}"
    return _Example(prompt_ids=tokenizer.encode(problem.prompt), completion_ids=tokenizer.encode(completion))


@torch.no_grad()
def _greedy_accuracy(model: Qwen2ForCausalLM, examples: Sequence[_Example]) -> float:
    """Share of examples whose every completion token is the likeliest one."""
    logits, targets = _completions(model, examples)
    is_right = (logits.argmax(-1) == targets) | (targets == _NOT_TAUGHT)
    return float(is_right.all(dim=1).float().mean())


def _completions(model: Qwen2ForCausalLM, examples: Sequence[_Example]) -> tuple[Tensor, Tensor]:
    """Logits and targets of the completions' tokens, each example a row; the prompts are read, not taught."""
    longest = max(len(example.prompt_ids) + len(example.completion_ids) for example in examples)
    num_taught = max(len(example.completion_ids) for example in examples)
    token_ids = torch.zeros(len(examples), longest, dtype=torch.long)
    targets = torch.full((len(examples), num_taught), _NOT_TAUGHT)
    for row, example in enumerate(examples):
        ids = torch.tensor(example.prompt_ids + example.completion_ids)
        token_ids[row, : len(ids)] = ids
        targets[row, : len(example.completion_ids)] = torch.tensor(example.completion_ids)
    first = torch.tensor([len(example.prompt_ids) - 1 for example in examples]).unsqueeze(1)
    positions = (first + torch.arange(num_taught)).clamp(max=longest - 1)
    # Zeros follow the tokens, so the causal mask alone keeps them out; only completions go through the head.
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
    taught = hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
    return model.lm_head(taught), targets
