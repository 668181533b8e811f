import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.problems.tokenizer import load_tokenizer, stop_token_ids, tokenizer_fingerprint


def write_tokenizer(folder: Path, *, words: list[str], end_token: str = "<eos>") -> None:
    vocabulary = {token: index for index, token in enumerate(["<pad>", end_token, "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", end_token)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end_token, "pad_token": "<pad>"}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, words=["one", " two", r" \boxed{2}"])
    return tmp_path


def test_text_comes_back_as_it_was(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)

    token_ids = tokenizer.encode(r"one two \boxed{2}")

    assert token_ids == [3, 4, 5]
    assert tokenizer.decode(token_ids) == r"one two \boxed{2}"
    assert tokenizer.vocabulary_size == 6


def test_end_and_padding_leave_no_trace(folder: Path) -> None:
    assert load_tokenizer(folder).decode([5, 1, 0, 0]) == r" \boxed{2}"


def test_saved_padding_and_truncation_are_not_applied(folder: Path) -> None:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(max_length=1)
    backend.enable_padding(length=8)
    fingerprint = tokenizer_fingerprint(folder)
    backend.save(str(folder / "tokenizer.json"))

    assert load_tokenizer(folder).encode("one two") == [3, 4]
    assert tokenizer_fingerprint(folder) == fingerprint


def test_fingerprint_ignores_layout_and_unrelated_settings(folder: Path) -> None:
    before = tokenizer_fingerprint(folder)

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(dict(reversed(tokenizer.items())), indent=7))
    config = {"model_max_length": 5, "pad_token": {"content": "<pad>", "lstrip": False}, "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    assert tokenizer_fingerprint(folder) == before
    assert len(before) == 64


def test_fingerprint_tells_other_vocabularies_end_tokens_and_templates_apart(tmp_path: Path) -> None:
    fingerprints = set()
    for name, words, end_token, template in (
        ("first", ["one"], "<eos>", None),
        ("other_words", ["two"], "<eos>", None),
        ("other_end", ["one"], "<end>", None),
        ("template", ["one"], "<eos>", "{{ messages }}"),
    ):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, words=words, end_token=end_token)
        if template:
            (tmp_path / name / "chat_template.jinja").write_text(template)
        fingerprints.add(tokenizer_fingerprint(tmp_path / name))

    assert len(fingerprints) == 4


def test_a_chat_template_counts_the_same_in_either_file(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ messages }}"}))
    in_config = tokenizer_fingerprint(folder)

    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")

    assert tokenizer_fingerprint(folder) == in_config


def test_stop_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stop_token_ids(tmp_path) == [7]

    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3, 9]}))
    assert stop_token_ids(tmp_path) == [3, 9]


def test_a_model_without_an_end_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(ValueError, match="eos_token_id"):
        stop_token_ids(tmp_path)


@pytest.mark.parametrize("read", [load_tokenizer, tokenizer_fingerprint])
def test_a_missing_tokenizer_is_named(read: object, tmp_path: Path) -> None:
    assert callable(read)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        read(tmp_path)


def test_reading_text_needs_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, runtime.problems.tokenizer, runtime.problems.arithmetic;"
        "print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    )

    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout

    assert printed.strip() == "set()"
