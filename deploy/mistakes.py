"""Checks settings and says in one line what is wrong with them."""

import json
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deploy.errors import UserError
from deploy.overrides import unknown_key
from runtime.settings import Settings

SomeSettings = TypeVar("SomeSettings", bound=Settings)


def check_settings(tree: Mapping[str, Any], *, model: type[SomeSettings], source: str) -> SomeSettings:
    """Settings from the tables of a run file; no value is bent to fit (`"5"` is no number, `1` is no truth value).

    Args:
        tree: Values by key, as a TOML reader gives them.
        model: The settings wanted.
        source: What the line about a mistake begins with, usually the file's name.

    Raises:
        UserError: The first mistake in one line: where, which value, what it must be; and how many more there are.
    """
    try:
        # Strict checks of JSON take a list for a tuple and a text for a path, which those of Python objects refuse.
        return model.model_validate_json(json.dumps(tree, default=_refuse), strict=True)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        raise UserError(f"{source}: {_line(mistakes[0], model=model)}{more}") from error
    except TypeError as error:
        raise UserError(f"{source}: {error}") from error


def _refuse(value: object) -> str:
    kind = "date or time" if isinstance(value, date | time | datetime) else type(value).__name__
    raise TypeError(f"{value}: a {kind} is not used in run files; put it in quotes if it is text")


def _line(mistake: ErrorDetails, *, model: type[Settings]) -> str:
    path = tuple(str(part) for part in mistake["loc"])
    where = ".".join(path)
    message = mistake["msg"]
    match mistake["type"]:
        case "extra_forbidden":
            return f"{where}: {unknown_key(path, model=model)}"
        case "missing":
            return f"{where}: is required"
        case "value_error":
            # Our own validators name the field, the value and the bound themselves.
            return f"{where + ': ' if where else ''}{message.removeprefix('Value error, ')}"
        case "model_type":
            return f"{where}: must be a table, as in [{where}]"
    return f"{where} = {_shown(mistake['input'])}: {_must(message)}"


def _must(message: str) -> str:
    return message.replace("Input should be", "must be").replace("String should", "must")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
