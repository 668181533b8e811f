"""Makes the tiny model: random weights with a sense of numbers, then the warm-up."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from deploy.tiny_settings import TinyModelSettings
from deploy.tiny_tokenizer import NUMBERS, save_tiny_tokenizer
from deploy.tiny_warm_up import warm_up
from runtime.problems.arithmetic import arithmetic_problems

_LINES_WITHOUT_TERMINAL = 4


def make_tiny_model(folder: Path, *, settings: TinyModelSettings, seed: int, console: Console) -> None:
    """Writes the tiny model and its tokenizer into an existing folder.

    Args:
        folder: An existing folder.
        settings: Shape and warm-up.
        seed: Of the weights, of the warm-up and of its problems.
        console: Where progress goes: a bar on a terminal, plain lines elsewhere.
    """
    tokenizer = save_tiny_tokenizer(folder)
    problems = arithmetic_problems(seed=seed, num_train=settings.num_problems, num_held_out=0).train
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(tokenizer, settings=settings)
        with _progress(console, num_steps=settings.warm_up.max_steps) as on_step:
            warm_up(
                model,
                tokenizer=tokenizer,
                problems=problems,
                settings=settings.warm_up,
                seed=seed,
                on_step=on_step,
            )
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    with _no_bars():
        model.save_pretrained(folder)


def _new_model(tokenizer: PreTrainedTokenizerFast, *, settings: TinyModelSettings) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        intermediate_size=settings.intermediate_size,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        # Three times the usual one, measured: with 0.02 the warm-up takes twice as many steps.
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    _give_sense_of_numbers(model, tokenizer=tokenizer)
    return model


@torch.no_grad()
def _give_sense_of_numbers(model: Qwen2ForCausalLM, *, tokenizer: PreTrainedTokenizerFast) -> None:
    """Begin the numbers' embeddings on circles of several periods, where sums are rotations.

    Trained models end there by themselves (Nanda et al. 2023, arXiv 2301.05217), after far more steps than a warm-up of
    seconds has.
    """
    embedding = model.get_input_embeddings().weight
    embedding.normal_(std=_EMBEDDING_DEVIATION)
    for number in NUMBERS:
        angles = [2 * math.pi * number / period for period in (2, 4, 5, 10, 20, 25, 50, 100, 200)]
        circles = torch.tensor([part for angle in angles for part in (math.cos(angle), math.sin(angle))])
        row = embedding[tokenizer.convert_tokens_to_ids(str(number))]
        row *= 0.5
        row[: len(circles)] += 1.5 * _EMBEDDING_DEVIATION * circles


_EMBEDDING_DEVIATION = 0.15


@contextmanager
def _no_bars() -> Iterator[None]:
    """Saving one small file needs no bar of its own."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads spin while they wait for each other: on a busy machine two took 540 s where one took 51 s."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress(console: Console, *, num_steps: int) -> Iterator[Callable[[int, float], None]]:
    """Yields what to call after each step: it moves a bar on a terminal, and prints a few plain lines elsewhere."""
    if not console.is_terminal:
        interval = max(1, num_steps // _LINES_WITHOUT_TERMINAL)

        def print_line(step: int, loss: float) -> None:
            if step % interval == 0:
                console.print(f"warm-up of the tiny model: step {step} of {num_steps}, loss {loss:.3f}")

        yield print_line
        return
    columns = (TextColumn("warm-up of the tiny model"), BarColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("warm-up", total=num_steps, loss="")

        def move_bar(step: int, loss: float) -> None:
            progress.update(bar, completed=step, loss=f"loss {loss:.3f}")

        yield move_bar
