"""Prompt templates: files that turn a question into the text that is tokenised."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.problems.chat_template import load_chat_template
from runtime.problems.tokenizer import TextTokenizer

QUESTION = "{question}"
_FOLDER = Path(__file__).parent / "templates"
_MESSAGE_KEYS = {"role", "content"}


@dataclass(frozen=True, slots=True)
class Template:
    """How a question becomes a prompt; exactly one of `messages` and `text` is there.

    Attributes:
        name: As the run file calls it.
        messages: Pairs of role and content that go through the model's own chat template.
        text: The whole prompt, for models without a chat template.
    """

    name: str
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""


def template_names() -> list[str]:
    """The names of the templates that come with tandem."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_template(name: str) -> Template:
    """Reads a template.

    Args:
        name: One of `template_names()`, or the path of a TOML file with either `text` or a list of `messages`, in one
            of which `{question}` stands where the question goes. Other braces mean nothing.

    Raises:
        ValueError: There is no such template, or the file is none.
    """
    path = _FOLDER / f"{name}.toml" if name in template_names() else Path(name).expanduser()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"template {name}: {error.strerror}; name a TOML file, or one of {', '.join(template_names())}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"template {name}: is no TOML: {error}") from error
    unknown = sorted(content.keys() - {"messages", "text"})
    if unknown:
        raise ValueError(f"template {name}: unknown key {unknown[0]}; the keys are messages and text")
    if len(content) != 1:
        raise ValueError(f"template {name}: must have one of the keys messages and text, has {len(content)}")
    template = _template(name, content)
    if not any(QUESTION in text for text in (template.text, *(content for _, content in template.messages))):
        raise ValueError(f"template {name}: must have {QUESTION} where the question goes")
    return template


def prompt_renderer(template: Template, *, model_folder: Path, tokenizer: TextTokenizer) -> Callable[[str], str]:
    """Question to prompt, for one model. The prompt is encoded as it stands: special tokens are in its text.

    A prompt of messages begins as the model's chat template has it. One of `text` begins with the special token that
    the model's tokenizer puts before texts, if it does.

    Args:
        template: What stands around the question.
        model_folder: Holds the chat template.
        tokenizer: The model's.

    Raises:
        ValueError: The template has messages and the model no chat template; the function raises it as well, if the
            chat template refuses the messages.
    """
    if not template.messages:
        text = template.text
        beginning = "" if text.startswith(tokenizer.beginning) else tokenizer.beginning
        return lambda question: beginning + text.replace(QUESTION, question)
    render = load_chat_template(model_folder)
    return lambda question: render(
        [{"role": role, "content": content.replace(QUESTION, question)} for role, content in template.messages]
    )


def _template(name: str, content: dict[str, Any]) -> Template:
    if "text" in content:
        if not isinstance(content["text"], str):
            raise ValueError(f"template {name}: text must be a text, is {content['text']!r}")
        return Template(name=name, text=content["text"])
    messages = content["messages"]
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ValueError(f"template {name}: messages must be a list of tables with the texts role and content")
    return Template(name=name, messages=tuple((message["role"], message["content"]) for message in messages))


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.keys() == _MESSAGE_KEYS
        and all(isinstance(value, str) for value in message.values())
    )
