"""What a disk has free, and which errors say that something could not be written to it."""

import errno
import shutil
from pathlib import Path

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITTEN = _NO_ROOM | {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ENOTDIR}
# torch reports a file that it could not write as a RuntimeError; safetensors and tokenizers have the system's words.
_WRITE_FAILURES = (
    "PytorchStreamWriter",
    "open file failed",
    "Parent directory",
    "file write failed",
    "iostream error",
    "unexpected pos",
    "No space left on device",
    "quota exceeded",
)


class NotWrittenError(Exception):
    """Something that a run must leave behind could not be written, for want of space or permission."""


def is_write_failure(error: BaseException) -> bool:
    """Whether an error says that a file could not be written: no room, no permission, or a broken disk."""
    if isinstance(error, OSError):
        return error.errno in _NOT_WRITTEN
    return any(words in str(error) for words in _WRITE_FAILURES)


def is_no_room(error: OSError) -> bool:
    """Whether an error says that the disk, or a quota on it, is used up."""
    return error.errno in _NO_ROOM


def free_bytes(path: Path) -> int:
    """What this process may still write where a file or folder lies, or would be made."""
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def size_in_words(num_bytes: int) -> str:
    """A size for a person, e.g. `1.5 GiB`."""
    size, units = float(num_bytes), ("bytes", "KiB", "MiB", "GiB")
    for unit in units:
        if size < 1024 or unit == units[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
