"""Whether a run has room on its disk is known before it starts, and a run that has not is refused in one line."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.disk import DiskWatch, check_folder, check_room, disk_needs
from deploy.errors import UserError
from deploy.model_shape import read_model_shape
from deploy.run_file import RunConfig, load_run_file
from deploy.run_records import append_evaluation, read_evaluations
from tests.deploy.run_samples import evaluation_record
from tests.mistakes.cases import is_where_parts_meet
from tests.models import save_tiny_qwen2
from tests.small_disk import SmallDisk, small_disk

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size_bytes=64 * MIB) as disk:
        yield disk


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_qwen2(folder)
    return folder


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    file = tmp_path / "run.toml"
    file.touch()
    return str(file)


def config(folder: Path, **overrides: str) -> RunConfig:
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_run_file(None, {"run.folder": str(folder), "learner.num_steps": "10"} | changes)


def test_a_run_needs_its_checkpoints_and_one_more(tmp_path: Path, model: Path) -> None:
    shape = read_model_shape(model)
    assert shape is not None

    two, three = (disk_needs(config(tmp_path, learner__checkpoints_kept=kept), shape) for kept in ("2", "3"))

    assert (two.num_checkpoints, three.num_checkpoints) == (3, 4)
    assert three.total_bytes - two.total_bytes == two.checkpoint_bytes > 12 * shape.num_parameters
    assert two.export_bytes == 4 * shape.num_parameters


def test_a_longer_run_has_a_larger_ledger_within_a_bound_on_texts(tmp_path: Path) -> None:
    short, long = (disk_needs(config(tmp_path, learner__num_steps=steps), None) for steps in ("10", "1000000"))

    assert short.log_bytes < 40 * MIB
    assert long.log_bytes > 256 * MIB
    assert (long.checkpoint_bytes, long.export_bytes) == (0, 0)


def test_a_disk_without_room_is_refused_with_what_is_needed_and_free(disk: SmallDisk, model: Path) -> None:
    run = config(disk.folder / "runs")
    check_room(run, model_folder=model, resumed=None)
    disk.fill(leave_bytes=20 * MIB)

    with pytest.raises(
        UserError,
        match=r"too little room on the disk of .*runs: .* MiB are needed for 3 checkpoints of .* 20\.0 MiB are",
    ):
        check_room(run, model_folder=model, resumed=None)


def test_what_a_resumed_run_has_written_counts_as_room(disk: SmallDisk, model: Path) -> None:
    run_folder = disk.folder / "run"
    run_folder.mkdir()
    (run_folder / "ledger.sqlite").write_bytes(bytes(30 * MIB))
    disk.fill(leave_bytes=25 * MIB)

    check_room(config(disk.folder), model_folder=model, resumed=run_folder)
    with pytest.raises(UserError, match="too little room"):
        check_room(config(disk.folder), model_folder=model, resumed=None)


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(UserError, match=r"run\.folder = .*file/runs: .*file is no folder"):
        check_folder(config(tmp_path / "file" / "runs"))


def test_a_place_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write anywhere but on a disk that nobody may write to.
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    with pytest.raises(UserError, match=r"run\.folder = .*runs: .* may not be written"):
        check_folder(config(tmp_path / "runs"))


def test_the_command_refuses_a_full_disk_in_one_line_and_leaves_nothing(
    disk: SmallDisk, model: Path, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.fill()

    settings = ["--run.folder", str(disk.folder / "runs"), "--model.source", str(model)]
    code = main(["train", run_file, *settings, "--rollout.context_length", "128"])

    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert is_where_parts_meet("a disk that is full", line), line
    assert [path.name for path in disk.folder.iterdir()] == ["filler"]


def test_a_model_cache_on_a_full_disk_is_said_in_one_line(
    disk: SmallDisk, tmp_path: Path, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.fill()

    places = ["--run.folder", str(tmp_path / "runs"), "--model.cache_folder", str(disk.folder / "models")]
    code = main(["train", run_file, *places])

    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tandem: model.cache_folder = {disk.folder}/models: No space left on device")
    assert not (tmp_path / "runs").exists()


def test_a_disk_that_fills_is_noted_once_and_so_is_room_again(disk: SmallDisk) -> None:
    watch = DiskWatch(disk.folder, checkpoint_bytes=5 * MIB)
    before = watch.news()
    disk.fill(leave_bytes=MIB)

    full, again = watch.news(), watch.news()
    disk.free()

    assert before == again == ""
    assert full.startswith(
        "ALARM: the disk of the run folder is nearly full: 1.0 MiB are free, a checkpoint takes 5.0 MiB"
    )
    assert watch.news().startswith("the disk of the run folder has room again")


def test_an_evaluation_without_room_leaves_those_before(disk: SmallDisk) -> None:
    path = disk.folder / "evaluations.jsonl"
    append_evaluation(path, known := evaluation_record("before", step=0, accuracy=0.5))
    disk.fill()

    def append_many() -> None:
        for step in range(1, 100):
            append_evaluation(path, evaluation_record("during", step=step, accuracy=0.5))

    with pytest.raises(OSError, match="No space left"):
        append_many()
    kept = read_evaluations(path)
    disk.free()
    append_evaluation(path, evaluation_record("after", step=100, accuracy=0.5))

    assert kept[0] == known
    assert [record.step for record in read_evaluations(path)] == [*(record.step for record in kept), 100]
