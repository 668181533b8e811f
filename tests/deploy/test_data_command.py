"""`tandem data check` as a user meets it."""

import json
from pathlib import Path

import pytest

from deploy.cli import main
from tests.models import save_tiny_qwen2


def test_the_check_shows_counts_lengths_and_rendered_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_qwen2(tmp_path / "model")
    rows = [
        {"question": f"How many in [/red]{index}[/]?", "answer": str(index), "level": index % 2} for index in range(20)
    ]
    rows[4]["answer"] = ""
    rows[7]["question"] = rows[6]["question"]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.toml").write_text(
        f"[model]\nsource = '{tmp_path / 'model'}'\n[data]\nsource = '{tmp_path / 'own.jsonl'}'\n"
        "template = 'simple'\nnum_held_out = 3\n"
    )

    code = main(
        ["data", "check", str(tmp_path / "run.toml"), "--data.num_train", "11", "--rollout.context_length", "1024"]
    )

    printed = capsys.readouterr().out
    assert code == 0
    assert "own.jsonl: 20 lines, 18 distinct problems" in printed
    assert "4 problems are beyond data.num_train = 11" in printed
    assert "train       11 problems" in printed
    assert "held out    3 problems" in printed
    assert "answers   integer 11" in printed
    assert "1 of 20 lines have no answer and are left out: line 5" in printed
    assert "1 of 20 lines have a question that came before, 1 of them another answer" in printed
    assert printed.count("Question:\nHow many in [/red]") == 10
    assert printed.count("\n=> ") == 10


def test_a_mistake_ends_with_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[data]\nsource = 'nowhere.jsonl'\n")

    code = main(["data", "check", str(tmp_path / "run.toml")])

    assert code == 2
    assert capsys.readouterr().err == "tandem: data.source = nowhere.jsonl: No such file or directory\n"
