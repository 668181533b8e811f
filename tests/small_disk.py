"""A disk that is full at will: a small file system of its own, where the tests may mount one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_BLOCK = 4096


class SmallDisk:
    """A file system of a few MB."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Uses up what is free, but for the bytes that are named."""
        self.free()
        with self._filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(_BLOCK)):
                    pass
            except OSError:
                file.truncate(max(0, file.tell() - leave_bytes))

    def free(self) -> None:
        """Gives it back."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, *, size_bytes: int) -> Iterator[SmallDisk]:
    """Mounts a file system in memory at a folder, and takes it away again; skips the test where that is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a small file system, as root may: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        # Lazily: whoever still has a file of it open must not keep it in place.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
