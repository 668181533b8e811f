import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer, Qwen2ForCausalLM

from deploy.tiny_model import ensure_tiny_model
from deploy.tiny_settings import TinyModelSettings, WarmUpSettings
from deploy.tiny_tokenizer import ANSWER_CLOSING, ANSWER_OPENING, save_tiny_tokenizer
from deploy.tiny_warm_up import MISTAKES, careless_answer
from runtime.problems.arithmetic import KINDS, ArithmeticProblems, arithmetic_problems
from runtime.problems.tokenizer import load_tokenizer, stop_token_ids, tokenizer_fingerprint

TWO_STEPS = TinyModelSettings(num_problems=64, warm_up=WarmUpSettings(num_steps=1, max_careless_steps=1, batch_size=8))


@pytest.fixture(scope="module")
def problems() -> ArithmeticProblems:
    return arithmetic_problems(seed=3, num_train=2000, num_held_out=256)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(
        cache_folder=tmp_path_factory.mktemp("cache"), seed=1, settings=TWO_STEPS, console=Console(file=io.StringIO())
    )


def test_every_problem_and_answer_comes_back_as_it_was(model_folder: Path, problems: ArithmeticProblems) -> None:
    tokenizer = load_tokenizer(model_folder)

    for problem in problems.train + problems.held_out:
        text = f"{problem.prompt}{ANSWER_OPENING}{problem.answer}{ANSWER_CLOSING}"
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_prompts_and_completions_are_short(model_folder: Path, problems: ArithmeticProblems) -> None:
    tokenizer = load_tokenizer(model_folder)

    for problem in problems.train + problems.held_out:
        assert len(tokenizer.encode(problem.prompt)) <= 15, problem.prompt
        assert len(tokenizer.encode(f"{ANSWER_OPENING}{problem.answer}{ANSWER_CLOSING}")) == 3, problem.answer


def test_any_text_is_encoded(model_folder: Path) -> None:
    text = "Über 123 Leute:\n\tif x == 12.5: print('ok')"
    tokenizer = load_tokenizer(model_folder)

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_reads_text_as_the_services_do(model_folder: Path, problems: ArithmeticProblems) -> None:
    theirs = AutoTokenizer.from_pretrained(model_folder)
    ours = load_tokenizer(model_folder)

    assert len(theirs) == ours.vocabulary_size
    for problem in problems.held_out:
        assert theirs.encode(problem.prompt) == ours.encode(problem.prompt)


def test_the_tokenizer_is_always_the_same(model_folder: Path, tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)

    assert tokenizer_fingerprint(tmp_path) == tokenizer_fingerprint(model_folder)


def test_transformers_loads_the_model(model_folder: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(model_folder)

    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 1_000_000 <= model.num_parameters() <= 2_000_000
    assert model.config.vocab_size == load_tokenizer(model_folder).vocabulary_size
    assert stop_token_ids(model_folder) == [model.config.eos_token_id] == [model.generation_config.eos_token_id]


def test_the_second_call_finds_the_model_of_the_first(model_folder: Path) -> None:
    written = (model_folder / "model.safetensors").stat().st_mtime_ns

    again = ensure_tiny_model(cache_folder=model_folder.parent, seed=1, settings=TWO_STEPS)

    assert again == model_folder
    assert (model_folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in model_folder.parent.iterdir()] == [model_folder.name]


def test_seeds_and_settings_have_folders_of_their_own(model_folder: Path) -> None:
    console = Console(file=io.StringIO())
    settings = replace(TWO_STEPS, num_problems=65)

    other_seed = ensure_tiny_model(cache_folder=model_folder.parent, seed=2, settings=TWO_STEPS, console=console)
    other_settings = ensure_tiny_model(cache_folder=model_folder.parent, seed=1, settings=settings, console=console)

    assert len({model_folder, other_seed, other_settings}) == 3


def test_a_warm_up_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    impossible = replace(TWO_STEPS, num_problems=4)

    with pytest.raises(ValueError, match="larger than population"):
        ensure_tiny_model(cache_folder=tmp_path, seed=1, settings=impossible, console=Console(file=io.StringIO()))

    assert list(tmp_path.iterdir()) == []


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    output = io.StringIO()

    ensure_tiny_model(cache_folder=tmp_path, seed=1, settings=TWO_STEPS, console=Console(file=output))

    assert "step 2 of 2" in output.getvalue()
    assert "\x1b" not in output.getvalue()


def test_careless_pupils_are_wrong_in_kinds_that_have_a_mistake(problems: ArithmeticProblems) -> None:
    assert set(MISTAKES) < {kind.name for kind in KINDS}
    for problem in problems.train:
        # Two bags of two have as many as two and two more.
        if problem.kind not in MISTAKES or " 2 bags of 2 " in problem.prompt:
            assert careless_answer(problem) == problem.answer
        else:
            assert careless_answer(problem) != problem.answer
