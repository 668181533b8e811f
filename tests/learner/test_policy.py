"""The policy under DeepSpeed equals a plain torch loop, on one rank and on two, at every ZeRO stage."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from learner.config import LearnerSettings
from learner.loss import ClipBounds, clipped_policy_loss
from tests.learner.policy_story import CASES, NUM_STEPS, VOCABULARY, groups_of_step

# More threads than free cores make a small model slower, not faster.
torch.set_num_threads(1)

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
UNMARKED_CASES = ["zero_0", "zero_2"]
FP32_CASES = [name for name in CASES if "bf16" not in name]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_story(model_folder: Path, out: Path, *, num_ranks: int, cases: list[str]) -> dict[str, dict[str, Any]]:
    """Runs the story on some ranks; their processes are killed if they hang."""
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.learner.policy_story", str(model_folder), str(out), *cases]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
    results: dict[str, dict[str, Any]] = torch.load(out / "results.pt", weights_only=True)
    return results


@pytest.fixture(scope="module")
def two_ranks(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_story(model_folder, tmp_path_factory.mktemp("two_ranks"), num_ranks=2, cases=UNMARKED_CASES)


@pytest.fixture(scope="module")
def all_cases(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_story(model_folder, tmp_path_factory.mktemp("all_cases"), num_ranks=2, cases=list(CASES))


@pytest.fixture(scope="module")
def one_rank(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_story(model_folder, tmp_path_factory.mktemp("one_rank"), num_ranks=1, cases=["zero_0"])


@pytest.fixture(scope="module")
def plain(model_folder: Path) -> dict[str, Any]:
    """The same steps in plain torch: one unpadded sequence at a time, log_softmax, AdamW."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    settings = LearnerSettings()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=settings.betas, weight_decay=0.0)
    bounds = ClipBounds(settings.clip_low, settings.clip_high, settings.importance_cap)
    reports = []
    for step in range(NUM_STEPS):
        groups = groups_of_step(step)
        num_tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
        loss, difference = torch.zeros(()), 0.0
        for group in groups:
            for rollout in group.rollouts:
                ids = torch.tensor([[*group.prompt.token_ids, *rollout.token_ids]])
                logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                policy = logprobs[len(group.prompt.token_ids) - 1 :][None]
                behaviour = torch.tensor([rollout.behaviour_logprobs])
                advantages = torch.full_like(behaviour, rollout.advantage)
                mask = torch.ones_like(behaviour)
                one = clipped_policy_loss(policy, behaviour, advantages, mask, bounds=bounds, num_tokens=num_tokens)
                loss = loss + one.loss
                difference = max(difference, (policy - behaviour).abs().max().item())
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm).item()
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        reports.append({"loss": loss.item(), "grad_norm": norm, "difference": difference, "num_tokens": num_tokens})
    return {"reports": reports, "weights": {name: value.detach() for name, value in model.named_parameters()}}


def assert_equals_plain(result: dict[str, Any], plain: dict[str, Any]) -> None:
    for report, expected in zip(result["reports"], plain["reports"], strict=True):
        assert report["micro"] > 1
        assert report["num_tokens"] == expected["num_tokens"]
        assert report["loss"] == pytest.approx(expected["loss"], abs=2e-6)
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert report["max_logprob_difference"] == pytest.approx(expected["difference"], abs=1e-5)
    assert list(result["trained"]) == list(plain["weights"])
    for name, weight in plain["weights"].items():
        # AdamW divides by the root of the second moment: rounding of gradients near zero shows in the weights.
        torch.testing.assert_close(result["trained"][name], weight, atol=2e-4, rtol=1e-3)


def assert_goes_on_from_its_state(result: dict[str, Any]) -> None:
    assert result["restored_version"] == NUM_STEPS
    assert all(torch.equal(result["restored"][name], weight) for name, weight in result["trained"].items())
    assert result["first"] == result["second"]


def assert_skips_what_is_not_finite(result: dict[str, Any]) -> None:
    skipped = result["skipped"]
    assert (skipped["is_applied"], skipped["policy_version"], skipped["grad_norm"]) == (False, NUM_STEPS, math.inf)
    assert result["changed_by_skip"] == []
    assert result["first"]["is_applied"]
    assert result["first"]["policy_version"] == NUM_STEPS + 1


@pytest.mark.slow
def test_one_rank_equals_plain_torch(one_rank: dict[str, Any], plain: dict[str, Any]) -> None:
    assert_equals_plain(one_rank["zero_0"], plain)
    assert_goes_on_from_its_state(one_rank["zero_0"])
    assert_skips_what_is_not_finite(one_rank["zero_0"])


@pytest.mark.parametrize("case", UNMARKED_CASES)
def test_two_ranks_equal_plain_torch(case: str, two_ranks: dict[str, Any], plain: dict[str, Any]) -> None:
    assert_equals_plain(two_ranks[case], plain)


@pytest.mark.parametrize("case", UNMARKED_CASES)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(case: str, two_ranks: dict[str, Any]) -> None:
    assert_goes_on_from_its_state(two_ranks[case])


@pytest.mark.parametrize("case", UNMARKED_CASES)
def test_a_gradient_that_is_not_finite_changes_nothing(case: str, two_ranks: dict[str, Any]) -> None:
    assert_skips_what_is_not_finite(two_ranks[case])


@pytest.mark.parametrize("case", UNMARKED_CASES)
def test_a_rank_that_cannot_write_its_part_holds_nobody_up(case: str, two_ranks: dict[str, Any]) -> None:
    assert two_ranks[case]["is_refused"]


def test_the_manifest_names_what_is_pushed(two_ranks: dict[str, Any]) -> None:
    result = two_ranks["zero_2"]
    pushed = [(name, "float32", tuple(weight.shape)) for name, weight in result["trained"].items()]
    assert result["entries"] == pushed
    assert "lm_head.weight" not in result["trained"]


@pytest.mark.slow
@pytest.mark.parametrize("case", FP32_CASES)
def test_every_zero_stage_equals_plain_torch(case: str, all_cases: dict[str, Any], plain: dict[str, Any]) -> None:
    assert_equals_plain(all_cases[case], plain)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_case_saves_skips_and_survives_a_broken_push(case: str, all_cases: dict[str, Any]) -> None:
    assert_goes_on_from_its_state(all_cases[case])
    assert_skips_what_is_not_finite(all_cases[case])
    assert all_cases[case]["final"]["policy_version"] == NUM_STEPS + 2
    assert all_cases[case]["is_refused"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if "bf16" in name])
def test_bf16_is_near_plain_torch(case: str, all_cases: dict[str, Any], plain: dict[str, Any]) -> None:
    result = all_cases[case]
    assert {dtype for _name, dtype, _shape in result["entries"]} == {"bfloat16"}
    for report, expected in zip(result["reports"], plain["reports"], strict=True):
        assert report["loss"] == pytest.approx(expected["loss"], abs=0.02)
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
