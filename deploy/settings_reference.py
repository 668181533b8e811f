"""Writes docs/run_file.md, the reference of the run file, from the settings themselves.

python -m deploy.settings_reference > docs/run_file.md
"""

import json
import os
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt, MaxLen, MinLen
from pydantic.fields import FieldInfo

from deploy.run_file import RunConfig
from runtime.settings import Settings

_HEAD = """\
# The run file

A run file is TOML; every setting has a default, and whatever is left out has it. `tandem train RUN.toml --dry-run`
prints all settings as they stand. Any of them can be overridden on the command line: `--learner.num_steps 20`. A key
that does not exist, a value of the wrong type and one out of bounds are refused with the line that says so.

This page is made from the settings by `python -m deploy.settings_reference`.
"""
_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false"}
_SIGNS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}


def reference() -> str:
    """The page as Markdown."""
    return "\n".join([_HEAD, *_sections(RunConfig, path="")])


def _sections(model: type[Settings], *, path: str) -> Iterator[str]:
    fields = model.model_fields.items()
    rows = [_row(name, field) for name, field in fields if _table_of(field) is None]
    if rows:
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        yield from rows
        yield ""
    for name, field in fields:
        table = _table_of(field)
        if table is not None:
            dotted = f"{path}.{name}" if path else name
            yield f"## [{dotted}]\n\n{_one_line(field.description)}\n"
            yield from _sections(table, path=dotted)


def _row(name: str, field: FieldInfo) -> str:
    default = "" if field.is_required() else _default(name, field)
    return f"| `{name}` | {_type(field)} | {default} | {_one_line(field.description)} |"


def _default(name: str, field: FieldInfo) -> str:
    # It differs from machine to machine, and this page must not.
    if name == "num_workers" and field.default == (os.cpu_count() or 1):
        return "the machine's cores"
    return f"`{json.dumps(field.get_default(call_default_factory=True))}`"


def _type(field: FieldInfo) -> str:
    bounds = " and ".join(bound for part in field.metadata for bound in _bounds(part))
    return f"{_type_name(field.annotation)}{f' {bounds}' if bounds else ''}"


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part) for part in get_args(annotation) if part is not NoneType)
    if origin in (tuple, list):
        parts = [part for part in get_args(annotation) if part is not Ellipsis]
        return f"list of {_type_name(parts[0])}"
    if get_args(annotation):
        return _type_name(get_args(annotation)[0])
    return _TYPES.get(annotation, "table")


def _bounds(part: Any) -> Iterator[str]:
    if isinstance(part, Interval):
        for bound in part:
            yield from _bounds(bound)
    for kind, (attribute, sign) in _SIGNS.items():
        if isinstance(part, kind):
            yield f"{sign} {getattr(part, attribute):,}"
    if isinstance(part, MaxLen):
        yield f"of at most {part.max_length} characters"
    if isinstance(part, MinLen):
        yield f"of at least {part.min_length} characters"


def _table_of(field: FieldInfo) -> type[Settings] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Settings) else None


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
