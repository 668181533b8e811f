"""The `tandem` command as a user meets it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.run_file import load_run_file
from learner.ledger import Ledger


def test_help_answers_within_a_second() -> None:
    begin = time.monotonic()

    done = subprocess.run([sys.executable, "-m", "deploy.cli", "--help"], capture_output=True, text=True, check=True)

    assert "train" in done.stdout
    assert time.monotonic() - begin < 1.0


def test_a_mistake_ends_with_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[learner]\nnum_step = 3\n", encoding="utf-8")

    code = main(["train", str(path)])

    assert code == 2
    assert capsys.readouterr().err == f"tandem: {path}: learner.num_step: unknown key, did you mean num_steps?\n"


def test_debug_shows_the_stack_of_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--debug", "train", str(tmp_path / "none.toml")])

    said = capsys.readouterr().err
    assert code == 2
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith(f"tandem: {tmp_path}/none.toml: No such file")


def test_a_dry_run_prints_settings_that_load_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f"[run]\nfolder = '{tmp_path / 'runs'}'\n", encoding="utf-8")

    code = main(["train", str(path), "--dry-run", "--learner.num_steps", "7"])

    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out, encoding="utf-8")
    assert code == 0
    assert load_run_file(printed, {}).learner.num_steps == 7
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train"], "train: name a run file"),
        (["train", "x.toml", "--resume", "latest"], "train: x.toml and --resume latest: a resumed run has its own"),
        (["train", "--resume", "nowhere"], "nowhere: is no run folder"),
        (["train", "--learner.num_steps"], "--learner.num_steps: needs a value"),
        (["ledger", "verify", "nowhere"], "no ledger at nowhere"),
        (["serve", "learner"], "serve learner: --run-folder FOLDER is required"),
        (["serve", "rollout"], "model = (empty): is no folder"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(arguments)

    assert code == 2
    assert capsys.readouterr().err.startswith(f"tandem: {line}")


def test_the_default_run_file_is_right() -> None:
    load_run_file(Path(__file__).parents[2] / "deploy" / "runs" / "tiny.toml", {})


def test_a_sound_ledger_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(tmp_path / "ledger.sqlite", start_step=0).close_run("run_ended")

    code = main(["ledger", "verify", str(tmp_path)])

    assert code == 0
    assert capsys.readouterr().out == "0 samples issued: 0 trained on, 0 open, 0 lost, 0 trained on twice\n"


@pytest.mark.parametrize("key", ["run.seed", "learner.num_ranks", "data.num_train"])
def test_a_resumed_run_keeps_what_its_checkpoints_depend_on(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text("", encoding="utf-8")

    code = main(["train", "--resume", str(tmp_path), f"--{key}", "2"])

    assert code == 2
    assert f"{key} cannot change in the middle of a run" in capsys.readouterr().err
    assert (tmp_path / "config.toml").read_text(encoding="utf-8") == ""
