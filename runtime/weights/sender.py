"""The sending end of a push: packs tensors into buckets, broadcasts them, and compares digests."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from runtime.weights.digests import digest_values, tensor_digest
from runtime.weights.group import WeightGroup
from runtime.weights.manifest import WeightManifest


class WeightsDifferError(Exception):
    """A receiver holds other bits than were sent, or failed to receive them."""


@dataclass(frozen=True, slots=True)
class SentWeights:
    """What was sent in one push."""

    policy_version: int
    digests: tuple[int, ...]
    """One per tensor, in the order of the manifest."""
    size_bytes: int
    """Bytes broadcast, padding included."""


class WeightSender:
    """Rank 0 of a weight group."""

    def __init__(self, group: WeightGroup, manifest: WeightManifest, *, device: torch.device) -> None:
        self._group, self._manifest = group, manifest
        largest = max(bucket.end - bucket.begin for bucket in manifest.buckets)
        # A GPU copies to pinned memory several times as fast.
        self._is_pinned = device.type == "cpu" and torch.cuda.is_available()
        # Two buckets: one fills while the other is on its way.
        self._buffers = [
            torch.empty(largest, dtype=torch.uint8, device=device, pin_memory=self._is_pinned) for _ in range(2)
        ]

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], *, policy_version: int) -> SentWeights:
        """Broadcasts all tensors, in the order of the manifest.

        Args:
            tensors: Name and full tensor, exactly those of the manifest in its order; another dtype is converted to
                the manifest's.
            policy_version: The version that they are.

        Raises:
            ValueError: A name or shape is not the manifest's. The group is of no use any more.
            RuntimeError: A collective failed or passed its deadline.
        """
        digests: list[torch.Tensor] = []
        sending: list[Any] = [None, None]
        source = iter(tensors)
        for index, bucket in enumerate(self._manifest.buckets):
            side = index % 2
            if sending[side] is not None:
                sending[side].wait()
            buffer = self._buffers[side][: bucket.end - bucket.begin]
            for placed in bucket.tensors:
                name, tensor = next(source, ("nothing", None))
                view = placed.view(buffer, origin=bucket.begin)
                if tensor is None or (name, tensor.shape) != (placed.entry.name, view.shape):
                    raise ValueError(f"push of {name}: the manifest has {placed.entry} here")
                sent = tensor.detach().to(view.dtype).contiguous()
                # Where the tensor is: a GPU digests in microseconds what takes a core a second.
                digests.append(tensor_digest(sent))
                view.copy_(sent, non_blocking=True)
            if self._is_pinned:
                torch.cuda.current_stream().synchronize()
            sending[side] = self._group.broadcast(buffer)
        if (name := next(source, ("", None))[0]) != "":
            raise ValueError(f"push of {name}: the manifest has no more tensors")
        for work in sending:
            if work is not None:
                work.wait()
        return SentWeights(policy_version, tuple(digest_values(digests)), self._manifest.staging_bytes)

    def confirm(self, sent: SentWeights, *, timeout_seconds: float) -> None:
        """Waits until every receiver has reported, and compares its digests with ours.

        Raises:
            TimeoutError: A receiver said nothing in time.
            WeightsDifferError: A receiver failed, or holds other bits; rank and tensor are named.
        """
        reports = self._group.reports(f"staged/{sent.policy_version}", timeout_seconds=timeout_seconds)
        for rank, report in reports.items():
            if "error" in report:
                raise WeightsDifferError(f"rank {rank} could not receive: {report['error']}")
            for entry, ours, theirs in zip(self._manifest.entries, sent.digests, report["digests"], strict=True):
                if ours != theirs:
                    raise WeightsDifferError(f"rank {rank} holds other bits of {entry.name} than were sent")
