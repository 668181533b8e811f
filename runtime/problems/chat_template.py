"""A model's own chat template, rendered as transformers does it, without importing transformers."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from runtime.problems.tokenizer import chat_template, special_tokens

Message = Mapping[str, str]
"""One turn: its "role" and its "content"."""


def load_chat_template(folder: Path) -> Callable[[Sequence[Message]], str]:
    """Compiles the chat template of a model folder.

    Args:
        folder: Holds `chat_template.jinja`, or `tokenizer_config.json` with a `chat_template`.

    Returns:
        Messages to the text up to where the model's turn begins. It raises ValueError if the template refuses them.

    Raises:
        ValueError: The model has no chat template, or it is no template.

    Source: transformers 5, utils/chat_template_utils.py, which decides what templates may use.
    """
    # 0.1 s, which only chat templates need.
    from jinja2 import TemplateError, ext  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    text = _default(chat_template(folder))
    if not text:
        raise ValueError(f"{folder} has no chat template; use the template `simple` or `none`, or one with a text")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_blocks(), ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    variables = {name: token for name, token in special_tokens(folder).items() if isinstance(token, str)}
    try:
        compiled = environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"{folder}: its chat template cannot be read: {error}") from error

    def render(messages: Sequence[Message]) -> str:
        try:
            return compiled.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **variables,
            )
        except TemplateError as error:
            raise ValueError(f"{folder}: its chat template refuses the messages: {error}") from error

    return render


def _default(template: Any) -> str:
    """The template for plain chats, of the named ones that older folders list."""
    if isinstance(template, list):
        return str(next((entry["template"] for entry in template if entry["name"] == "default"), ""))
    return str(template or "")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes what HTML would take for markup.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError  # noqa: PLC0415

    raise TemplateError(message)


def _generation_blocks() -> type[Any]:
    """The extension for `{% generation %}`, with which templates mark the model's words; it changes no text."""
    from jinja2 import nodes  # noqa: PLC0415
    from jinja2.ext import Extension  # noqa: PLC0415
    from jinja2.parser import Parser  # noqa: PLC0415

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012  jinja2 wants a plain set

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlocks
