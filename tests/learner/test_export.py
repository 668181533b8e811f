"""An export is an ordinary model folder with the trained weights."""

import errno
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.export import write_export
from tests.models import save_tiny_qwen2


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    save_tiny_qwen2(tmp_path / "model")
    return tmp_path / "model"


def test_transformers_loads_the_trained_weights(tmp_path: Path, model_folder: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.5)
    folder = write_export(tmp_path, trained.named_parameters(), step=3, model_folder=model_folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert folder == tmp_path / "export" / "step_3"
    for (name, expected), (_, weight) in zip(trained.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(weight, expected), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(model_folder).get_vocab()


def test_no_old_weights_come_along(tmp_path: Path, model_folder: Path) -> None:
    (model_folder / "model-00001-of-00002.safetensors").write_bytes(b"old")
    (model_folder / "model.safetensors.index.json").write_text("{}")
    folder = write_export(tmp_path, [("weight", torch.ones(2))], step=3, model_folder=model_folder)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]


def test_an_export_of_the_same_step_is_replaced(tmp_path: Path, model_folder: Path) -> None:
    for _ in range(2):
        write_export(tmp_path, [("weight", torch.ones(2))], step=3, model_folder=model_folder)
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["step_3"]


def test_a_failed_export_leaves_nothing(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("learner.export.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        write_export(tmp_path, [("weight", torch.ones(2))], step=3, model_folder=model_folder)
    assert list((tmp_path / "export").iterdir()) == []
