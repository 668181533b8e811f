"""What the process of test_families.py does: `python -m tests.learner.family_story OUT MODEL...`."""

import sys
from pathlib import Path
from typing import Any

import torch

from learner.batch import RankShare, pack
from learner.config import LearnerSettings
from learner.export import write_export
from learner.policy import Policy
from tests.learner.policy_story import groups_of_step

Logprobs = dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]]


def share_of(policy: Policy, *, tokens_per_shared_row: int) -> RankShare:
    (share,) = pack(
        groups_of_step(0),
        num_ranks=1,
        tokens_per_micro_batch=200,
        tokens_per_shared_row=tokens_per_shared_row,
        policy_version=policy.policy_version,
    )
    return share


def logprobs_of(policy: Policy, share: RankShare) -> Logprobs:
    """Of every completion, by prompt and completion."""
    found: Logprobs = {}
    for micro_batch in share.micro_batches:
        with torch.no_grad():
            logprobs = policy.logprobs(micro_batch)
        for ids, segments, values in zip(micro_batch.input_ids, micro_batch.segments, logprobs, strict=True):
            prompt = tuple(ids[segments == 0].tolist())
            for segment in range(1, int(segments.max()) + 1):
                places = segments == segment
                found[prompt, tuple(ids[places].tolist())] = values[places].tolist()
    return found


def tell(model_folder: Path, out: Path) -> dict[str, Any]:
    """Logprobs in shared rows and in rows of their own, one update, and an export."""
    settings = LearnerSettings(zero_stage=0, learning_rate=1e-2)
    policy = Policy.load(model_folder, settings)
    shared, alone = (share_of(policy, tokens_per_shared_row=size) for size in (60, 0))
    assert any(micro_batch.is_shared for micro_batch in shared.micro_batches)
    assert not any(micro_batch.is_shared for micro_batch in alone.micro_batches)
    result: dict[str, Any] = {
        "shared": logprobs_of(policy, shared),
        "alone": logprobs_of(policy, alone),
        "entries": [(entry.name, entry.dtype, entry.shape) for entry in policy.manifest_entries()],
        "is_applied": policy.update(shared).is_applied,
        "trained": {name: tensor.clone() for name, tensor in policy.parameters_for_push()},
    }
    write_export(out / model_folder.name, policy.parameters_for_push(), step=1, model_folder=model_folder)
    return result


def main(out: Path, *model_folders: str) -> None:
    """Tells of every model."""
    torch.save({Path(folder).name: tell(Path(folder), out) for folder in model_folders}, out / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
