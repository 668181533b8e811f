"""The problems of a run: counts, what is left out, the held-out part, rendered prompts."""

import json
from pathlib import Path

import pytest

from deploy.data import left_out, load_problems, render_problems, too_long, with_absolute_paths
from deploy.data_config import DataSection
from deploy.errors import UserError
from deploy.run_file import RunConfig
from tests.runtime.problems.tokenizer_folders import write_words_tokenizer
from tests.shared_data import shared_file

MAX_CHARS = 2_000


def _write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _row(index: int) -> dict[str, str]:
    return {"question": f"What is {index}?", "answer": str(index)}


def _rows(num_rows: int) -> list[object]:
    return [_row(index) for index in range(num_rows)]


def test_arithmetic_gives_as_many_problems_as_are_wanted() -> None:
    problems = load_problems(DataSection(num_train=10, num_held_out=5), seed=3, max_answer_chars=MAX_CHARS)

    assert (len(problems.train), len(problems.held_out)) == (10, 5)


def test_the_seed_draws_the_held_out_part_and_training_keeps_the_order(tmp_path: Path) -> None:
    settings = DataSection(source=_write(tmp_path / "own.jsonl", _rows(40)), num_train=0, num_held_out=10)

    first, again, other = (load_problems(settings, seed=seed, max_answer_chars=MAX_CHARS) for seed in (1, 1, 2))

    assert first == again
    assert set(first.held_out) != set(other.held_out)
    assert sorted(int(problem.answer) for problem in first.train + first.held_out) == list(range(40))
    assert [int(problem.answer) for problem in first.train] == sorted(int(problem.answer) for problem in first.train)


def test_what_is_beyond_num_train_is_counted(tmp_path: Path) -> None:
    settings = DataSection(source=_write(tmp_path / "own.jsonl", _rows(9)), num_train=4, num_held_out=2)

    problems = load_problems(settings, seed=1, max_answer_chars=MAX_CHARS)

    assert (len(problems.train), len(problems.held_out), problems.num_left_over) == (4, 2, 3)


def test_problems_of_the_held_out_file_are_not_trained_on(tmp_path: Path) -> None:
    test_rows: list[object] = [{"problem": "What is 3?", "solution": "so \\boxed{3}"}]
    settings = DataSection(
        source=_write(tmp_path / "own.jsonl", _rows(6)),
        held_out_source=_write(tmp_path / "test.jsonl", test_rows),
        question_column="question",
    )

    problems = load_problems(settings, seed=1, max_answer_chars=MAX_CHARS)

    assert [problem.answer for problem in problems.train] == ["0", "1", "2", "4", "5"]
    assert [problem.answer for problem in problems.held_out] == ["3"]
    assert left_out(problems) == ["1 problems are held out as well, and are not trained on"]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (["x"], r"data\.source = .*own\.jsonl:1: must be a JSON object"),
        ([{"text": "x"}], r"has none of the columns question, problem, prompt; its columns are text; set question_col"),
        (_rows(1), r"data\.num_held_out = 2: must be fewer than the 1 problems"),
        ([], r"own\.jsonl: is empty"),
    ],
)
def test_a_bad_file_is_said_in_one_line(tmp_path: Path, rows: list[object], line: str) -> None:
    source = _write(tmp_path / "own.jsonl", rows)

    with pytest.raises(UserError, match=line):
        load_problems(DataSection(source=source, num_held_out=2), seed=1, max_answer_chars=MAX_CHARS)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"source": "nowhere.jsonl"}, r"data\.source = nowhere\.jsonl: No such file"),
        ({"source": "arithmetics"}, r"data\.source = arithmetics: there is no such file; give arithmetic, a JSONL"),
        (
            {"template": "chatty"},
            r"data\.template: template chatty: No such file.*one of boxed, chat, none, short, simple",
        ),
        ({"num_train": 0}, r"data\.num_train = 0: must be at least 1"),
        ({"source": "x.jsonl", "held_out_split": "test", "num_train": 1}, r"data\.source = x\.jsonl: No such file"),
        ({"held_out_source": "x.jsonl"}, r"data\.held_out_source: source arithmetic makes its own"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(settings: dict[str, str], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        load_problems(DataSection.model_validate(settings), seed=1, max_answer_chars=MAX_CHARS)

    assert "\n" not in str(caught.value)


def _config(folder: Path, *, template: str, context_length: int = 64) -> RunConfig:
    write_words_tokenizer(folder)
    return RunConfig.model_validate(
        {
            "data": {"source": _write(folder / "own.jsonl", _rows(6)), "template": template, "num_held_out": 2},
            "rollout": {"model": str(folder), "context_length": context_length},
        }
    )


def test_training_and_evaluation_see_the_same_rendering(tmp_path: Path) -> None:
    config = _config(tmp_path, template="simple")

    rendered = render_problems(load_problems(config.data, seed=1, max_answer_chars=MAX_CHARS), config)

    prompts = {problem.prompt for part in (rendered.train, rendered.held_out) for problem in part.problems}
    assert prompts == {f"Question:\nWhat is {index}?\nAnswer:\nLet's think step by step.\n" for index in range(6)}


def test_prompts_without_room_for_a_completion_are_left_out(tmp_path: Path) -> None:
    config = _config(tmp_path, template="none")
    _write(tmp_path / "own.jsonl", [*_rows(6), {"question": "What " * 70, "answer": "1"}])

    rendered = render_problems(load_problems(config.data, seed=1, max_answer_chars=MAX_CHARS), config)

    assert len(rendered.train.problems) + len(rendered.held_out.problems) == 6
    assert all(length <= part.limit for part in (rendered.train, rendered.held_out) for length in part.lengths)
    (note,) = too_long(rendered)
    assert note.endswith("have more than 56 tokens (the longest 70) and are left out")


def test_a_context_that_no_prompt_fits_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path, template="simple", context_length=9)

    with pytest.raises(UserError, match=r"data: the shortest of 4 prompts has \d+ tokens"):
        render_problems(load_problems(config.data, seed=1, max_answer_chars=MAX_CHARS), config)


def test_a_model_without_a_chat_template_is_told_to_use_another(tmp_path: Path) -> None:
    config = _config(tmp_path, template="boxed")

    with pytest.raises(UserError, match=r"data\.template = boxed: .* has no chat template; use the template `simple`"):
        render_problems(load_problems(config.data, seed=1, max_answer_chars=MAX_CHARS), config)


def test_paths_survive_a_change_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").touch()
    settings = DataSection(source="own.jsonl", held_out_source="org/name", template="own.toml")

    fixed = with_absolute_paths(settings)

    assert (fixed.source, fixed.held_out_source) == (str(tmp_path / "own.jsonl"), "org/name")
    assert fixed.template == str(tmp_path / "own.toml")
    assert with_absolute_paths(DataSection()) == DataSection()


def test_the_8k_set_is_read_without_its_two_rows_that_have_no_answer() -> None:
    settings = DataSection(source=shared_file("math_lvl3to5_8k.json"), num_train=0)

    problems = load_problems(settings, seed=1, max_answer_chars=MAX_CHARS)

    refused, duplicates = left_out(problems)
    assert refused.endswith("2 of 8523 rows have no answer and are left out: rows 5055, 5159")
    assert duplicates.endswith("have a question that came before, and are left out: row 4008")
    assert len(problems.train) + len(problems.held_out) == 8520


def test_gsm8k_is_read_with_its_own_test_set() -> None:
    settings = DataSection(
        source=shared_file("gsm8k_train.jsonl"), held_out_source=shared_file("gsm8k_test.jsonl"), num_train=0
    )

    problems = load_problems(settings, seed=1, max_answer_chars=MAX_CHARS)

    assert (len(problems.train), len(problems.held_out)) == (7473, 256)
    assert problems.train[0].answer == "72"
    assert all(problem.answer.lstrip("-").replace(".", "", 1).isdigit() for problem in problems.train)
