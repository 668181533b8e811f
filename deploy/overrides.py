"""Overrides on the command line: `--section.key value` or `--section.key=value`, typed by the settings they set."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from deploy.errors import UserError
from runtime.settings import Settings

Tree = dict[str, Any]
"""Settings as they stand in a file: tables are dicts."""


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes the overrides out of a command line; only they have a dot in their name.

    Returns:
        The other arguments in their order, and value by dotted key; of several for one key the last counts.

    Raises:
        UserError: An override without a value.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(argument)
            continue
        if not equals:
            value = next(waiting, "--")
            if value.startswith("--"):
                raise UserError(f"{name}: needs a value, as in {name} VALUE")
        overrides[name.removeprefix("--")] = value
    return rest, overrides


def apply_overrides(tree: Tree, overrides: Mapping[str, str], *, model: type[Settings]) -> Tree:
    """A copy of the tree with the overrides set.

    Args:
        tree: Settings as read from a file.
        overrides: Text by dotted key.
        model: The settings that the tree is for; it decides how a text is read.

    Raises:
        UserError: A key that the settings do not have.
    """
    result = _copy(tree)
    for key, text in overrides.items():
        *tables, leaf = key.split(".")
        table, owner = result, model
        for depth, name in enumerate(tables):
            found = _settings_of(owner, name)
            if found is None:
                raise UserError(f"--{key}: {unknown_key(tuple(key.split('.')[: depth + 1]), model=model)}")
            owner, table = found, table.setdefault(name, {})
            if not isinstance(table, dict):
                raise UserError(f"--{key}: {'.'.join(tables[: depth + 1])} is no table in the run file")
        if leaf not in owner.model_fields:
            raise UserError(f"--{key}: {unknown_key((*tables, leaf), model=model)}")
        if _settings_of(owner, leaf) is not None:
            raise UserError(f"--{key}: is a table; set one of its keys, as in --{key}.{next(iter(_keys(owner, leaf)))}")
        table[leaf] = _read(text, annotation=owner.model_fields[leaf].annotation)
    return result


def unknown_key(path: Sequence[str], *, model: type[Settings]) -> str:
    """The words for a key that the settings do not have, with the nearest that they have."""
    *tables, leaf = path
    owner: type[Settings] | None = model
    for name in tables:
        owner = None if owner is None else _settings_of(owner, name)
    # The right name in the wrong table is likelier than a misspelt one.
    near = [key for key in _dotted_keys(model) if key.rpartition(".")[2] == leaf][:1]
    if not near and owner is not None:
        near = get_close_matches(leaf, owner.model_fields, n=1)
    return "unknown key" + (f", did you mean {near[0]}?" if near else "")


def _read(text: str, *, annotation: object) -> Any:
    """Text stays text where text is wanted; all else is read as in a TOML file, and checked by the settings later."""
    choices = _members(annotation)
    if str in choices or any(isinstance(choice, str) for choice in choices):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _members(annotation: object) -> tuple[object, ...]:
    """The types of a union and the values of a Literal; a plain type stands for itself."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    if isinstance(annotation, type) or get_origin(annotation) in (dict, tuple, list):
        return (annotation,)
    return get_args(annotation) or (annotation,)


def _settings_of(owner: type[Settings], name: str) -> type[Settings] | None:
    """The settings class of a field that is a table; None for any other field, or for none."""
    field = owner.model_fields.get(name)
    found = None if field is None else field.annotation
    return found if isinstance(found, type) and issubclass(found, Settings) else None


def _keys(owner: type[Settings], name: str) -> Iterator[str]:
    found = _settings_of(owner, name)
    return iter(() if found is None else found.model_fields)


def _dotted_keys(model: type[Settings]) -> Iterator[str]:
    for name in model.model_fields:
        found = _settings_of(model, name)
        if found is None:
            yield name
        else:
            yield from (f"{name}.{key}" for key in _dotted_keys(found))


def _copy(tree: Tree) -> Tree:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in tree.items()}
