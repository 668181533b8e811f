"""The policy trains and exports every tested family, with a head of its own and with a tied one."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deploy.model_folder import check_model_folder
from tests.models import SHAPES, Shape, save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class Told:
    folder: Path
    results: dict[str, Any]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("families")
    for shape in SHAPES:
        save_tiny_model(folder / "models" / str(shape), shape)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    models = [str(folder / "models" / str(shape)) for shape in SHAPES]
    done = subprocess.run(
        [sys.executable, "-m", "tests.learner.family_story", str(folder), *models],
        env=os.environ | rank,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    return Told(folder, torch.load(folder / "results.pt", weights_only=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_completions_that_share_their_prompts_row_have_their_own_logprobs(shape: Shape, told: Told) -> None:
    result = told.results[str(shape)]
    model = AutoModelForCausalLM.from_pretrained(told.folder / "models" / str(shape))

    assert result["shared"].keys() == result["alone"].keys()
    for (prompt, completion), shared in result["shared"].items():
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        expected = logprobs[len(prompt) - 1 :].tolist()
        assert shared == pytest.approx(result["alone"][prompt, completion], abs=1e-5)
        assert shared == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_parameter_is_pushed_once_and_has_moved(shape: Shape, told: Told) -> None:
    result = told.results[str(shape)]
    before = dict(AutoModelForCausalLM.from_pretrained(told.folder / "models" / str(shape)).named_parameters())

    assert result["is_applied"]
    assert result["entries"] == [(name, "float32", tuple(tensor.shape)) for name, tensor in before.items()]
    assert list(result["trained"]) == list(before)
    assert ("lm_head.weight" in before) != shape.is_tied
    for name, tensor in result["trained"].items():
        assert not torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_export_is_a_whole_folder_with_the_trained_weights(shape: Shape, told: Told) -> None:
    export = told.folder / str(shape) / "export" / "step_1"

    check_model_folder(export)
    loaded = AutoModelForCausalLM.from_pretrained(export)
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, told.results[str(shape)]["trained"][name]), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == shape.is_tied
