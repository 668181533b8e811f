"""Log-probabilities of rows whose completions share a prompt equal those of each sequence by itself."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from learner.batch import pack
from learner.logprobs import shared_prompt_mask, token_logprobs
from learner.records import Prompt, ScoredGroup, ScoredRollout

# More threads than free cores make a small model slower, not faster.
torch.set_num_threads(1)

PAD = 0


def group_with_padding_tokens() -> ScoredGroup:
    """Completions of several lengths; some contain the id that padding has too."""
    completions = [(3, PAD, 7), (PAD,), (9, 9, PAD, PAD), (4,)]
    rollouts = tuple(
        ScoredRollout(f"s{index}", tokens, (-1.0,) * len(tokens), ((0, 0),), "stop", 1.0, "correct", 1.0)
        for index, tokens in enumerate(completions)
    )
    return ScoredGroup("g", Prompt("e0-p0", 0, "problem", (5, PAD, 6, 8), "1"), rollouts)


@pytest.mark.parametrize("tokens_per_shared_row", [0, 9, 100])
def test_packed_logprobs_equal_those_of_each_sequence(tokens_per_shared_row: int) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config).eval()
    group = group_with_padding_tokens()
    (share,) = pack(
        [group],
        num_ranks=1,
        tokens_per_micro_batch=100,
        tokens_per_shared_row=tokens_per_shared_row,
        policy_version=0,
    )
    packed: dict[tuple[int, ...], torch.Tensor] = {}
    with torch.no_grad():
        for batch in share.micro_batches:
            logits = model(
                input_ids=batch.input_ids,
                attention_mask=shared_prompt_mask(batch.segments) if batch.is_shared else None,
                position_ids=batch.position_ids,
                logits_to_keep=batch.input_ids.shape[1] - batch.num_prompt_tokens + 1,
            ).logits
            logprobs = token_logprobs(logits, batch.input_ids, batch.sources, temperature=0.7)
            for row, segment in torch.cartesian_prod(torch.arange(len(logprobs)), torch.arange(1, 5)).tolist():
                places = batch.segments[row] == segment
                packed[tuple(batch.input_ids[row][places].tolist())] = logprobs[row][places]
        for rollout in group.rollouts:
            ids = torch.tensor([[*group.prompt.token_ids, *rollout.token_ids]])
            alone = (model(input_ids=ids).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(packed[rollout.token_ids], alone[3:], atol=2e-6, rtol=1e-5)


def test_a_token_sees_its_prompt_and_its_own_completion() -> None:
    mask = shared_prompt_mask(torch.tensor([[0, 0, 1, 1, 2, -1]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
