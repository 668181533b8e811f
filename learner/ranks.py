"""How rank 0 leads the other ranks: it says what to do and hands out what to do it with, as plain tensors."""

from collections.abc import Generator, Sequence
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from learner.batch import MicroBatch, RankShare
from learner.policy import Policy, StateNotWrittenError, UpdateReport

log = structlog.get_logger()

_NUM_TENSORS = 4
"""Of each kind in a MicroBatch: first as many of integers, then as many of floats."""
_HEADER_SIZE = 4


class Command(IntEnum):
    """What all ranks do next. The header that carries it has three more numbers."""

    UPDATE = 1
    """One optimizer step; numbers: micro-batches of each rank, tokens of the step, packed ones; the share follows."""
    SAVE = 2
    """Save the state; number: bytes of the folder's name, which follows."""
    LOAD = 3
    """Load the state; as SAVE."""
    GATHER = 4
    """Take part in gathering all parameters."""
    LOGPROBS = 5
    """Take part in a forward pass without gradients; number: 1 micro-batch; the share follows."""
    STOP = 6
    """Leave."""


class Leader:
    """Rank 0: each method is done on all ranks, the others being in `follow`."""

    def __init__(self, policy: Policy) -> None:
        """To be called while the other ranks enter `follow`."""
        self._policy = policy
        self._group = _control_group()

    def update(self, shares: Sequence[RankShare]) -> UpdateReport:
        """One optimizer step; the shares are by rank."""
        own, *others = shares
        self._say(Command.UPDATE, len(own.micro_batches), own.num_tokens, own.num_packed_tokens)
        for rank, share in enumerate(others, start=1):
            _send_share(share, rank=rank, group=self._group)
        return self._policy.update(own)

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """The log-probability of each completion token, as `Policy.logprobs`, without gradients, on the CPU."""
        self._say(Command.LOGPROBS, 1)
        share = RankShare(0, 0, (micro_batch,))
        for rank in range(1, self._policy.num_ranks):
            _send_share(share, rank=rank, group=self._group)
        with torch.no_grad():
            return self._policy.logprobs(micro_batch).cpu()

    def save_state(self, folder: Path) -> None:
        """Saves the state of all ranks in a folder that exists and is empty.

        Raises:
            StateNotWrittenError: A rank could not write its part; the ranks go on.
        """
        self._say_folder(Command.SAVE, folder)
        self._policy.save_state(folder)

    def load_state(self, folder: Path) -> None:
        """Loads the state of all ranks.

        Raises:
            ValueError: The folder holds no state that fits.
        """
        self._say_folder(Command.LOAD, folder)
        self._policy.load_state(folder)

    def parameters_for_push(self) -> Generator[tuple[str, Tensor], None, None]:
        """Every parameter whole, as `Policy.parameters_for_push`; what the caller leaves is gathered all the same."""
        self._say(Command.GATHER)
        parameters = self._policy.parameters_for_push()
        try:
            # Not `yield from`, which would close the inner generator along with this one.
            for parameter in parameters:  # noqa: UP028
                yield parameter
        finally:
            # The other ranks are in every gather, whatever became of the push.
            for _ in parameters:
                pass

    def stop(self) -> None:
        """Lets the other ranks leave."""
        self._say(Command.STOP)

    def _say(self, command: Command, *numbers: int) -> None:
        header = torch.zeros(_HEADER_SIZE, dtype=torch.int64)
        header[: 1 + len(numbers)] = torch.tensor([command, *numbers])
        dist.broadcast(header, src=0, group=self._group)

    def _say_folder(self, command: Command, folder: Path) -> None:
        name = torch.tensor(list(str(folder).encode()), dtype=torch.int64)
        self._say(command, len(name))
        dist.broadcast(name, src=0, group=self._group)


def follow(policy: Policy) -> None:
    """What every rank but 0 does: whatever rank 0 says, until it says stop."""
    group = _control_group()
    while True:
        header = torch.zeros(_HEADER_SIZE, dtype=torch.int64)
        dist.broadcast(header, src=0, group=group)
        command, *numbers = header.tolist()
        match Command(command):
            case Command.UPDATE:
                policy.update(_receive_share(*numbers, group=group))
            case Command.LOGPROBS:
                share = _receive_share(*numbers, group=group)
                with torch.no_grad():
                    policy.logprobs(share.micro_batches[0])
            case Command.SAVE:
                folder = _receive_folder(numbers[0], group=group)
                try:
                    policy.save_state(folder)
                except StateNotWrittenError as error:
                    log.error("state not written", reason=str(error))  # noqa: TRY400 - rank 0 has it as well
            case Command.LOAD:
                policy.load_state(_receive_folder(numbers[0], group=group))
            case Command.GATHER:
                for _ in policy.parameters_for_push():
                    pass
            case Command.STOP:
                return


def _control_group() -> Any:
    # Apart from the data's group: on the CPU whatever that is, and without a deadline, for rank 0 may wait for rollouts
    # longer than any collective may take.
    return dist.new_group(backend="gloo", timeout=timedelta(days=365))


def _send_share(share: RankShare, *, rank: int, group: Any) -> None:
    shapes = [[*batch.input_ids.shape, batch.num_prompt_tokens] for batch in share.micro_batches]
    dist.send(torch.tensor(shapes, dtype=torch.int64), dst=rank, group=group)
    for batch in share.micro_batches:
        dist.send(torch.stack((batch.input_ids, batch.position_ids, batch.segments, batch.sources)), rank, group)
        dist.send(
            torch.stack((batch.completion_mask, batch.on_policy_mask, batch.behaviour_logprobs, batch.advantages)),
            rank,
            group,
        )


def _receive_share(num_micro_batches: int, num_tokens: int, num_packed_tokens: int, *, group: Any) -> RankShare:
    shapes = torch.zeros((num_micro_batches, 3), dtype=torch.int64)
    dist.recv(shapes, src=0, group=group)
    micro_batches = []
    for rows, length, num_prompt_tokens in shapes.tolist():
        integers = torch.zeros((_NUM_TENSORS, rows, length), dtype=torch.int64)
        floats = torch.zeros((_NUM_TENSORS, rows, length), dtype=torch.float32)
        dist.recv(integers, src=0, group=group)
        dist.recv(floats, src=0, group=group)
        micro_batches.append(MicroBatch(num_prompt_tokens, *integers, *floats))
    return RankShare(num_tokens, num_packed_tokens, tuple(micro_batches))


def _receive_folder(num_bytes: int, *, group: Any) -> Path:
    name = torch.zeros(num_bytes, dtype=torch.int64)
    dist.broadcast(name, src=0, group=group)
    return Path(bytes(name.tolist()).decode())
