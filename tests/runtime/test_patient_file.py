"""Lines that a full disk has no room for are written once it has."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from runtime.disk import free_bytes, is_no_room, size_in_words
from runtime.patient_file import PatientFile
from runtime.telemetry import set_up_logging
from tests.small_disk import SmallDisk, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        yield disk


def lines_in(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def write(file: PatientFile, *numbers: int) -> None:
    for number in numbers:
        file.write(f"line {number:04} {'x' * 500}\n".encode())


def test_lines_are_held_in_order_until_there_is_room(disk: SmallDisk) -> None:
    path = disk.folder / "log"
    file = PatientFile(path)
    write(file, 0)
    disk.fill()

    write(file, *range(1, 50))
    num_held = file.num_held
    disk.free()
    write(file, 50)

    assert num_held > 30
    assert file.num_held == 0
    assert [line[:9] for line in lines_in(path)] == [f"line {number:04}" for number in range(51)]


def test_what_was_written_in_part_is_completed_and_the_oldest_others_go(disk: SmallDisk) -> None:
    path = disk.folder / "log"
    file = PatientFile(path, max_held=5)
    write(file, 0)
    disk.fill()

    write(file, *range(1, 50))
    disk.free()
    file.close()

    lines = lines_in(path)
    assert {len(line) for line in lines} == {510}
    assert [line[:9] for line in lines[-5:]] == [f"line {number:04}" for number in range(45, 50)]


def test_a_file_that_cannot_be_made_yet_is_made_later(disk: SmallDisk) -> None:
    folder = disk.folder / "folder"
    file = PatientFile(folder / "log")

    write(file, 1)
    assert file.num_held == 1
    folder.mkdir()

    assert file.write_held()
    assert len(lines_in(folder / "log")) == 1


def test_a_log_on_a_full_disk_disturbs_nobody(disk: SmallDisk) -> None:
    set_up_logging(service="test", file=disk.folder / "log")
    log = structlog.get_logger()
    disk.fill()
    for number in range(50):
        log.info("event", number=number, padding="x" * 500)
    disk.free()
    log.info("last")

    assert len(lines_in(disk.folder / "log")) == 51


def test_sizes_and_errors_are_told_in_words(disk: SmallDisk) -> None:
    disk.fill()

    assert free_bytes(disk.folder / "not" / "there") == 0
    with pytest.raises(OSError, match="No space left") as caught:
        (disk.folder / "log").write_bytes(os.urandom(10))
    assert is_no_room(caught.value)
    assert [size_in_words(size) for size in (0, 1023, 1536, 5 << 30)] == ["0 bytes", "1023 bytes", "1.5 KiB", "5.0 GiB"]
