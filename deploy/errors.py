"""The errors that end a command with one line instead of a stack trace."""


class UserError(Exception):
    """The command cannot be done as asked: what is wrong, where, and what to do; exit code 2."""


class RunFailedError(Exception):
    """A run that had begun could not go on: what ended, where its log is, how to resume; exit code 1."""


def first_cause(group: ExceptionGroup[Exception]) -> Exception:
    """The first error of a task group, whatever groups it lies in; what it cancelled besides is its consequence."""
    first = group.exceptions[0]
    return first_cause(first) if isinstance(first, ExceptionGroup) else first
