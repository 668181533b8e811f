"""What the ranks of test_policy.py do: `python -m tests.learner.policy_story MODEL OUT CASE...` on each."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from learner.batch import pack
from learner.config import LearnerSettings
from learner.policy import Policy, StateNotWrittenError
from learner.ranks import Leader, follow
from learner.records import Prompt, ScoredGroup, ScoredRollout

VOCABULARY = 50
NUM_STEPS = 3
CASES = {
    "zero_0": LearnerSettings(zero_stage=0),
    "zero_1": LearnerSettings(zero_stage=1),
    "zero_2": LearnerSettings(zero_stage=2),
    "zero_3": LearnerSettings(zero_stage=3),
    "zero_3_checkpointed": LearnerSettings(zero_stage=3, gradient_checkpointing=True),
    "zero_0_bf16": LearnerSettings(zero_stage=0, dtype="bf16"),
    "zero_1_bf16": LearnerSettings(zero_stage=1, dtype="bf16"),
    "zero_2_bf16": LearnerSettings(zero_stage=2, dtype="bf16"),
    "zero_3_bf16": LearnerSettings(zero_stage=3, dtype="bf16"),
}


def groups_of_step(step: int, *, scale: float = 1.0) -> list[ScoredGroup]:
    """Groups whose lengths and values differ, the same in every process."""
    generator = torch.Generator().manual_seed(step)

    def tokens(size: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY, (size,), generator=generator).tolist())

    groups = []
    for position in range(5):
        rollouts = []
        for index in range(4):
            size = 1 + (3 * position + 5 * index + step) % 9
            logprobs = (-3.5 - torch.rand(size, generator=generator)).tolist()
            sample = f"g{position}-s{index}"
            rollouts.append(
                ScoredRollout(
                    sample, tokens(size), tuple(logprobs), ((0, step),), "stop", 1.0, "correct", scale * (index - 1.5)
                )
            )
        prompt = Prompt(f"e0-p{position}", position, "problem", tokens(3 + position), "1")
        groups.append(ScoredGroup(f"g{position}", prompt, tuple(rollouts)))
    return groups


def lead(policy: Policy, folder: Path) -> dict[str, Any]:
    """Trains, fails to save, saves, trains on, goes back, trains again, and meets a gradient that is not finite."""
    leader = Leader(policy)

    def update(scale: float = 1.0) -> dict[str, Any]:
        shares = pack(
            groups_of_step(policy.policy_version, scale=scale),
            num_ranks=policy.num_ranks,
            tokens_per_micro_batch=60,
            tokens_per_shared_row=20,
            policy_version=policy.policy_version,
        )
        report = leader.update(shares)
        return {field: getattr(report, field) for field in report.__slots__} | {"micro": len(shares[0].micro_batches)}

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in leader.parameters_for_push()}

    reports = [update() for _ in range(NUM_STEPS)]
    trained = weights()
    is_refused = _is_refused(leader, folder / "refused", num_ranks=policy.num_ranks)
    (folder / "state").mkdir()
    leader.save_state(folder / "state")
    before_skip = weights()
    skipped = update(scale=float("inf"))
    after_skip = weights()
    first = update()
    leader.load_state(folder / "state")
    restored, restored_version = weights(), policy.policy_version
    second = update()
    # A push that breaks off: the other ranks are in the gather all the same.
    broken_off = leader.parameters_for_push()
    next(broken_off)
    broken_off.close()
    final = update()
    leader.stop()
    return {
        "reports": reports,
        "trained": trained,
        "is_refused": is_refused,
        "skipped": skipped,
        "changed_by_skip": [name for name in before_skip if not torch.equal(before_skip[name], after_skip[name])],
        "restored": restored,
        "restored_version": restored_version,
        "first": first,
        "second": second,
        "final": final,
        "entries": [(entry.name, entry.dtype, entry.shape) for entry in policy.manifest_entries()],
    }


def _is_refused(leader: Leader, folder: Path, *, num_ranks: int) -> bool:
    """Saves where the last rank alone cannot write its files."""
    for name in (f"random_rank_{num_ranks - 1}.pt", f"policy/zero_pp_rank_{num_ranks - 1}_mp_rank_00_optim_states.pt"):
        (folder / name).mkdir(parents=True)
    try:
        leader.save_state(folder)
    except StateNotWrittenError:
        return True
    return False


def main(model_folder: Path, out: Path, *cases: str) -> None:
    """Runs some cases with all ranks."""
    results = {}
    for name in cases:
        changes = {"learning_rate": 1e-2, "warmup_steps": 1, "bucket_bytes": 1 << 16}
        policy = Policy.load(model_folder, CASES[name].model_copy(update=changes))
        if policy.rank > 0:
            follow(policy)
            continue
        folder = out / name
        folder.mkdir()
        results[name] = lead(policy, folder)
    if int(os.environ["RANK"]) == 0:
        torch.save(results, out / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
