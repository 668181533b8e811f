"""A file that lines are appended to, on a disk that may be full for a while."""

import io
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any, TextIO

MAX_HELD = 10_000
"""Lines that wait for room; beyond it the oldest are given up."""


class PatientFile(io.RawIOBase):
    """Appends what it is given and never fails: what cannot be written is held, and written before what comes next.

    Threads may share it. Each `write` should be one line, as a line is what is given up where too many are held; one
    that was written in part is never given up.
    """

    def __init__(self, file: Path | int, *, max_held: int = MAX_HELD) -> None:
        """Opens nothing yet.

        Args:
            file: Path of a file that is made if it is missing; or the descriptor of one, which stays open.
            max_held: Bound on the lines that wait.
        """
        self._path = file if isinstance(file, Path) else None
        self._descriptor = file if isinstance(file, int) else None
        # An end of a process may log while it writes.
        self._lock = threading.RLock()
        self._rest = b""
        self._held: deque[bytes] = deque(maxlen=max_held)

    @property
    def num_held(self) -> int:
        """Lines that wait for room."""
        return len(self._held) + bool(self._rest)

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor.

        Raises:
            OSError: The file could not be opened.
        """
        if self._descriptor is None:
            assert self._path is not None, "there is one of both"
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self._descriptor

    def write(self, content: Any, /) -> int:
        """Takes a line; returns its length, whether it was written or is held."""
        if self.closed:
            raise ValueError("the file is closed")
        line = bytes(content)
        with self._lock:
            self._held.append(line)
            self.write_held()
        return len(line)

    def write_held(self) -> bool:
        """Writes what there is room for; returns whether nothing is left."""
        with self._lock:
            try:
                while self._rest or self._held:
                    self._rest = self._rest or self._held.popleft()
                    written = os.write(self.fileno(), self._rest)
                    self._rest = self._rest[written:]
            except OSError:
                return False
            return True

    def close(self) -> None:
        """Tries once more, and closes what it has opened."""
        if self.closed:
            return
        self.write_held()
        super().close()
        if self._path is not None and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def patient_lines(file: Path | int) -> TextIO:
    """A text file of lines that hands each one to a PatientFile."""
    # Without a BufferedWriter between, which would keep what it could not write and fail over it at the end.
    return io.TextIOWrapper(PatientFile(file), encoding="utf-8", errors="replace", line_buffering=True)  # type: ignore[type-var]
