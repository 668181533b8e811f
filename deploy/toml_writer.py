"""Writes settings as TOML; the standard library only reads it."""

import json
import re
from collections.abc import Iterator, Mapping

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

Value = str | int | float | bool | list["Value"] | tuple["Value", ...] | Mapping[str, "Value"] | None


def write_toml(tree: Mapping[str, Value]) -> str:
    """The text of a TOML file: plain values first, then one `[table]` after the other.

    Args:
        tree: Values by key; None is left out, since TOML has no such value.

    Raises:
        TypeError: A value of a type that is not listed in `Value`.
    """
    return "\n".join(_lines(tree, path=())).lstrip("\n") + "\n"


def _lines(tree: Mapping[str, Value], *, path: tuple[str, ...]) -> Iterator[str]:
    for key, value in tree.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield f"\n[{'.'.join(map(_key, (*path, key)))}]"
            yield from _lines(value, path=(*path, key))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # JSON's escapes are a subset of TOML's, but TOML also wants the delete character escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items() if v is not None)}}}"
    raise TypeError(f"TOML has no {type(value).__name__}")
