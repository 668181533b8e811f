"""Run folders: made, and found again."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploy.errors import UserError
from deploy.run_file import RunConfig, load_run_file
from deploy.run_folder import find_run_folder, make_run_folder

NOON = datetime(2030, 1, 2, 12, 0, 0, tzinfo=UTC)


def _config(folder: Path) -> RunConfig:
    return load_run_file(None, {"run.folder": str(folder), "run.name": "tiny"})


def test_a_folder_is_called_after_the_run_and_the_time(tmp_path: Path) -> None:
    folder = make_run_folder(_config(tmp_path / "runs"), planned=_config(tmp_path / "runs"), now=NOON)

    assert folder.path == tmp_path / "runs" / "tiny-20300102-120000"
    assert load_run_file(folder.config_file, {}) == _config(tmp_path / "runs")


def test_two_runs_of_the_same_second_have_two_folders(tmp_path: Path) -> None:
    first, second = (make_run_folder(_config(tmp_path), planned=_config(tmp_path), now=NOON) for _ in range(2))

    assert first.path != second.path


def test_the_latest_run_is_found(tmp_path: Path) -> None:
    make_run_folder(_config(tmp_path), planned=_config(tmp_path), now=NOON)
    newest = make_run_folder(_config(tmp_path), planned=_config(tmp_path), now=NOON)

    assert find_run_folder("latest", runs=tmp_path) == newest


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no run folder, it has no config\.toml"):
        find_run_folder(str(tmp_path), runs=tmp_path)
    with pytest.raises(UserError, match="there is no run under"):
        find_run_folder("latest", runs=tmp_path)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way", encoding="utf-8")

    with pytest.raises(UserError, match=r"run\.folder = .*runs: "):
        make_run_folder(_config(tmp_path / "runs"), planned=_config(tmp_path / "runs"), now=NOON)
