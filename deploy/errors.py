"""The errors that end a command with one line instead of a stack trace."""

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.disk import is_write_failure


class UserError(Exception):
    """The command cannot be done as asked: what is wrong, where, and what to do; exit code 2."""


class RunFailedError(Exception):
    """A run that had begun could not go on: what ended, where its log is, how to resume; exit code 1."""


def first_cause(group: ExceptionGroup[Exception]) -> Exception:
    """The first error of a task group, whatever groups it lies in; what it cancelled besides is its consequence."""
    first = group.exceptions[0]
    return first_cause(first) if isinstance(first, ExceptionGroup) else first


@contextmanager
def written_or_said(what: str) -> Iterator[None]:
    """Makes what could not be read or written a mistake in one line.

    Args:
        what: What was to be written, as the line begins.

    Raises:
        UserError: The system's words for a failed file; safetensors and tokenizers have no type of their own for one.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or is_write_failure(error)):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{what}: {reason}") from error
