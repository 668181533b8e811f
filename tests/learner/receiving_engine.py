"""A scripted engine that really receives weights: a weight receiver stands where vLLM's worker has one."""

from dataclasses import dataclass, field

import torch

from rollout_server.engine import Commit, GroupAddress, WeightsRefusedError
from runtime.weights.manifest import WeightManifest
from runtime.weights.receiver import GroupPlace, ReceiverStateError, WeightReceiver
from tests.rollout_server.scripted_engine import ScriptedEngine


@dataclass
class ReceivingEngine(ScriptedEngine):
    """Serves the tensors that were committed last."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    receiver: WeightReceiver | None = None
    is_recomputed: list[bool] = field(default_factory=list)
    """Of each commit: whether the KV cache of requests in flight was to be recomputed."""
    commit_refusal: str = ""
    """Why a commit is refused; empty if it is not."""
    is_forgetful: bool = False
    """Gives up what it is sent, so that its report is an error and its answers are not."""

    async def join_group(self, address: GroupAddress, manifest: WeightManifest) -> None:
        await super().join_group(address, manifest)
        self._leave()
        place = GroupPlace(
            run_id=address.run_id,
            epoch=address.epoch,
            store_host=address.store_host,
            store_port=address.store_port,
            rank=address.first_rank,
            world_size=address.world_size,
            transport=address.transport,
            timeout_seconds=address.timeout_seconds,
        )
        self.receiver = WeightReceiver(place, manifest, device=torch.device("cpu"))

    async def begin_staging(self, policy_version: int, *, timeout_seconds: float) -> None:
        await super().begin_staging(policy_version, timeout_seconds=timeout_seconds)
        assert self.receiver is not None
        try:
            self.receiver.begin(policy_version, timeout_seconds=timeout_seconds)
        except ReceiverStateError as error:
            raise WeightsRefusedError(str(error)) from error
        if self.is_forgetful:
            self.receiver.drop()

    async def drop_staged(self) -> None:
        await super().drop_staged()
        if self.receiver is not None:
            self.receiver.drop()

    async def commit(self, policy_version: int, *, recompute: bool) -> Commit:
        if self.commit_refusal:
            raise WeightsRefusedError(self.commit_refusal)
        assert self.receiver is not None
        try:
            staged = self.receiver.staged_weights(policy_version)
        except ReceiverStateError as error:
            raise WeightsRefusedError(str(error)) from error
        self.weights = {name: tensor.clone() for name, tensor in staged}
        self.receiver.drop()
        self.is_recomputed.append(recompute)
        return await super().commit(policy_version, recompute=recompute)

    async def close(self) -> None:
        await super().close()
        self._leave()

    def _leave(self) -> None:
        if self.receiver is not None:
            self.receiver.leave()
            self.receiver = None
