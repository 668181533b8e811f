"""From segments to what may attend to what, and from logits to log-probabilities: pure functions of tensors."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def shared_prompt_mask(segments: Int64[Tensor, "rows length"]) -> Bool[Tensor, "rows 1 length length"]:
    """Who attends to whom in rows whose completions share a prompt: each token to the prompt and its own completion.

    Args:
        segments: 0 on the prompt, 1, 2, ... on its completions, -1 on padding.

    Returns:
        True where the query (last but one axis) sees the key (last axis), itself always included.
    """
    length = segments.shape[1]
    is_earlier = torch.ones((length, length), dtype=torch.bool, device=segments.device).tril()
    is_same = segments[:, :, None] == segments[:, None, :]
    is_prompt = (segments == 0)[:, None, :]
    return (is_earlier & (is_same | is_prompt))[:, None]


def token_logprobs(
    logits: Float[Tensor, "rows kept vocabulary"],
    input_ids: Int64[Tensor, "rows length"],
    sources: Int64[Tensor, "rows length"],
    *,
    temperature: float,
) -> Float[Tensor, "rows length"]:
    """The log-probability of each token under the distribution that was sampled from, in fp32.

    Args:
        logits: Of the last `kept` places of each row.
        input_ids: The tokens.
        sources: The place whose logits predict the token.
        temperature: Divides the logits.

    Returns:
        log_softmax(logits / temperature) of each token; arbitrary where the source is not among the places kept.
    """
    scaled = logits.float() / temperature
    kept, vocabulary = scaled.shape[1:]
    source = (sources - (input_ids.shape[1] - kept)).clamp(min=0)
    # Two gathers of single values: log_softmax would make another tensor of the size of the logits.
    chosen = scaled.flatten(1).gather(1, source * vocabulary + input_ids)
    return chosen - scaled.logsumexp(-1).gather(1, source)
