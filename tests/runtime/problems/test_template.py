"""Prompts as they are tokenised: templates, chat templates as transformers renders them, the token at the beginning."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from runtime.problems.template import Template, load_template, prompt_renderer, template_names
from runtime.problems.tokenizer import load_tokenizer
from tests.runtime.problems.tokenizer_folders import write_words_tokenizer

CHATML = (
    "{% for message in messages %}\n"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}\n{{ '<|im_start|>assistant\n' }}\n{% endif %}"
)
LLAMA = (
    "{{- bos_token }}{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "[INST] {{ message['content'] | trim }} [/INST]{% endfor %}"
    "{% if tools is not none %}tools{% endif %}{{ eos_token }}"
)
ODD = (
    "{% for message in messages %}{% generation %}{{ message | tojson }}{% endgeneration %}{{ pad_token }}{% endfor %}"
    "    {% if documents %}\n    documents{% endif %}\n  end"
)
QUESTION = "If $x = \\frac{1}{2}$ and {question} < é, what is <x>?"


def _render(folder: Path, template: Template) -> str:
    return prompt_renderer(template, model_folder=folder, tokenizer=load_tokenizer(folder))(QUESTION)


@pytest.mark.parametrize("name", ["chat", "boxed"])
@pytest.mark.parametrize(
    "chat_template",
    [CHATML, LLAMA, ODD, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]],
)
def test_chats_are_rendered_as_transformers_does(tmp_path: Path, name: str, chat_template: Any) -> None:
    write_words_tokenizer(tmp_path, chat_template=chat_template)
    template = load_template(name)
    messages = [{"role": role, "content": text.replace("{question}", QUESTION)} for role, text in template.messages]

    prompt = _render(tmp_path, template)

    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert prompt == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    token_ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert load_tokenizer(tmp_path).encode(prompt) == token_ids


def test_a_chat_template_of_its_own_file_counts_more(tmp_path: Path) -> None:
    write_words_tokenizer(tmp_path, chat_template="no")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")

    assert _render(tmp_path, load_template("chat")) == f"{QUESTION}!"


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_a_text_begins_as_the_models_tokenizer_begins_it(
    tmp_path: Path, adds_bos: bool, config: dict[str, Any]
) -> None:
    write_words_tokenizer(tmp_path, adds_bos=adds_bos, config=config)

    prompt = _render(tmp_path, load_template("none"))

    assert load_tokenizer(tmp_path).encode(prompt) == AutoTokenizer.from_pretrained(tmp_path)(QUESTION)["input_ids"]


def test_the_templates_that_come_along() -> None:
    assert template_names() == ["boxed", "chat", "none", "short", "simple"]
    assert load_template("none").text == "{question}"
    assert load_template("simple").text == "Question:\n{question}\nAnswer:\nLet's think step by step.\n"
    assert load_template("chat").messages == (("user", "{question}"),)
    assert load_template("boxed").messages == (
        ("system", "You are a helpful assistant."),
        ("user", "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."),
    )


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('text = "Q:"', r"own\.toml: must have \{question\} where the question goes"),
        ('txt = "{question}"', r"own\.toml: unknown key txt; the keys are messages and text"),
        ("", r"own\.toml: must have one of the keys messages and text, has 0"),
        ("text = 3", r"own\.toml: text must be a text, is 3"),
        ('messages = [{role = "user"}]', r"own\.toml: messages must be a list of tables"),
        ("text = ", r"own\.toml: is no TOML"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, content: str, line: str) -> None:
    (tmp_path / "own.toml").write_text(content)

    with pytest.raises(ValueError, match=line):
        load_template(str(tmp_path / "own.toml"))


@pytest.mark.parametrize(
    ("chat_template", "line"),
    [
        (None, "has no chat template; use the template `simple` or `none`"),
        ("{% if", "its chat template cannot be read"),
        ("{{ raise_exception('no system turn') }}", "its chat template refuses the messages: no system turn"),
        ("{{ messages.__class__.__mro__ }}", "its chat template refuses the messages"),
    ],
)
def test_a_chat_template_that_does_not_go_is_one_line(tmp_path: Path, chat_template: str | None, line: str) -> None:
    write_words_tokenizer(tmp_path, chat_template=chat_template)

    with pytest.raises(ValueError, match=line):
        _render(tmp_path, load_template("boxed"))
