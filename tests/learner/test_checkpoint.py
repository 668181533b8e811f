"""A checkpoint counts only when it is whole; the one before it is taken otherwise."""

import errno
import os
from pathlib import Path

import pytest
import torch

from learner.checkpoint import CheckpointError, Progress, newest_complete, prune, write_checkpoint
from learner.prompts import PromptState


def progress(step: int) -> Progress:
    prompts = PromptState(num_problems=100, seed=1, cursor=16 * step, unfinished=(3, 5))
    return Progress("run", seed=1, step=step, policy_version=step, prompts=prompts, samples_issued=9, num_ranks=1)


def save_state(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "weights.pt").write_bytes(os.urandom(1000))


def write(run_folder: Path, *steps: int) -> None:
    for step in steps:
        write_checkpoint(run_folder, progress(step), save_state=save_state)


def names(run_folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder / "checkpoints").iterdir())


def newest_step(run_folder: Path) -> int | None:
    checkpoint = newest_complete(run_folder)
    return checkpoint.progress.step if checkpoint else None


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) is None


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, progress(7), save_state=save_state)
    found = newest_complete(tmp_path)
    assert found == written
    assert (written.state_folder / "policy" / "weights.pt").is_file()


def test_the_newest_is_the_highest_number(tmp_path: Path) -> None:
    write(tmp_path, 9, 10, 2)
    assert newest_step(tmp_path) == 10


@pytest.mark.parametrize("name", ["state/policy/weights.pt", "progress.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path, 1, 2)
    file = tmp_path / "checkpoints" / "step_2" / name
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    assert newest_step(tmp_path) == 1


def test_a_checkpoint_that_was_interrupted_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step_2").rename(tmp_path / "checkpoints" / "step_2.part")
    assert newest_step(tmp_path) == 1


def test_a_full_disk_leaves_the_one_before_whole(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def fill(folder: Path) -> None:
        (folder / "weights.pt").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 2 could not be written.*No space left"):
        write_checkpoint(tmp_path, progress(2), save_state=fill)
    assert names(tmp_path) == ["step_1"]
    assert newest_step(tmp_path) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_for_torch_is_told_alike(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        write_checkpoint(tmp_path, progress(2), save_state=lambda _folder: torch.save(torch.zeros(9), "/dev/full"))
    assert newest_complete(tmp_path) is None


def test_a_mistake_that_is_not_the_disk_is_let_through(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        write_checkpoint(tmp_path, progress(2), save_state=fail)


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    write(tmp_path, 1, 1)
    assert newest_step(tmp_path) == 1


def test_old_ones_and_leavings_are_pruned(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 10)
    (tmp_path / "checkpoints" / "step_11.part").mkdir()
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["step_10", "step_2"]
    prune(tmp_path, keep=5)
    assert names(tmp_path) == ["step_10", "step_2"]
