"""What is said of a model folder that cannot be trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deploy.errors import UserError
from deploy.model_folder import check_context_length, check_model_folder
from learner.export import write_export
from tests.models import SHAPES, Shape, save_tiny_model, save_tiny_qwen2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    save_tiny_qwen2(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(config), encoding="utf-8")


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(content, encoding="utf-8")

    return damage


def change(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **changes)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def without_end_token(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change_config(folder, eos_token_id=None)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tested_family_passes(shape: Shape, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, shape)

    check_model_folder(tmp_path)
    check_context_length(tmp_path, 1024)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (remove("config.json"), r"is no model folder, it has no config\.json$"),
        (adapter, "it is an adapter: merge it"),
        (write("config.json", "{"), r"config\.json: is no JSON: .*; fetch it again"),
        (write("config.json", "[]"), r"config\.json: is no JSON object"),
        (change(architectures=["BertModel"]), "architectures = BertModel: is no causal language model"),
        (change(architectures=["Qwen2VLForConditionalGeneration"]), "is no causal language model"),
        (change(architectures=None), "architectures = none"),
        (change(quantization_config={"quant_method": "awq"}), "quantised weights cannot be trained"),
        (remove("model.safetensors"), r"has no weights: neither model\.safetensors nor"),
        (only_bin, r"has pytorch_model\.bin and no model\.safetensors; load it with transformers and save it"),
        (cut, r"model\.safetensors: is cut short: [\d,]+ of [\d,]+ bytes"),
        (cut_in_header, r"model\.safetensors: is cut short within its header"),
        (write("model.safetensors", ""), r"model\.safetensors: is no safetensors file"),
        (write("model.safetensors", "\x08" + "\0" * 7 + "no json!"), r"model\.safetensors: is no safetensors file"),
        (write("model.safetensors", POINTER), r"model\.safetensors: is a Git LFS pointer.*git lfs pull"),
        (write("tokenizer.json", POINTER), r"tokenizer\.json: is a Git LFS pointer"),
        (remove("tokenizer.json"), r"has no tokenizer\.json; save the fast tokenizer there"),
        (without_end_token, r"names no end token; write its eos_token_id into generation_config\.json"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(damage: Callable[[Path], None], line: str, folder: Path) -> None:
    damage(folder)

    with pytest.raises(UserError, match=line) as caught:
        check_model_folder(folder)

    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def save_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for key, name in names.items():
        save_file({key: torch.zeros(4)}, folder / name)
    index = json.dumps({"metadata": {}, "weight_map": names})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def test_shards_pass_when_all_are_there(folder: Path) -> None:
    save_shards(folder)

    check_model_folder(folder)


def test_the_first_missing_shard_is_named(folder: Path) -> None:
    save_shards(folder)
    for path in folder.glob("model-*"):
        path.unlink()

    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors: is missing \(and 1 more\)"):
        check_model_folder(folder)


def test_a_shard_that_is_cut_short_is_named(folder: Path) -> None:
    save_shards(folder)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors: is cut short"):
        check_model_folder(folder)


def test_an_export_of_a_sharded_model_passes_with_everything_but_old_weights(folder: Path, tmp_path: Path) -> None:
    save_shards(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")

    export = write_export(tmp_path, [("a", torch.ones(4)), ("b", torch.ones(4))], step=1, model_folder=folder)

    check_model_folder(export)
    names = {path.name for path in export.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"} <= names
    assert [path.name for path in export.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({}, 1024),
        ({"rope_type": "llama3", "factor": 8.0}, 1024),
        ({"rope_type": "linear", "factor": 2.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
    ],
)
def test_a_context_longer_than_the_model_knows_is_refused(rope: dict[str, Any], limit: int, folder: Path) -> None:
    change_config(folder, rope_parameters=rope)

    check_context_length(folder, limit)
    with pytest.raises(
        UserError, match=rf"rollout\.context_length = {limit + 1}: must be at most {limit}, the max_pos"
    ):
        check_context_length(folder, limit + 1)
