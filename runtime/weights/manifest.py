"""What a push consists of: the tensors in their order, and how they are cut into buckets."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from protos.rollout.v1 import weights_pb2

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes that can be pushed, by their names on the wire."""

ALIGNMENT_BYTES = 256
"""Every tensor begins at a multiple of this, as CUDA's vectorised copies want it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a manifest."""

    name: str
    """Its name in the checkpoint."""
    dtype: str
    """A key of DTYPES."""
    shape: tuple[int, ...]
    """Its sizes, outermost first."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor's place in the staging memory."""

    entry: TensorEntry
    offset: int
    """First byte, from the beginning of the staging memory."""

    def view(self, memory: torch.Tensor, *, origin: int = 0) -> torch.Tensor:
        """The tensor inside a byte buffer that begins at byte `origin` of the staging memory."""
        begin = self.offset - origin
        data = memory[begin : begin + self.entry.size_bytes]
        return data.view(DTYPES[self.entry.dtype]).view(self.entry.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of tensors that is sent in one collective."""

    tensors: tuple[Placed, ...]
    begin: int
    """First byte in the staging memory."""
    end: int
    """One past its last byte."""


@dataclass(frozen=True)
class WeightManifest:
    """Names, dtypes, shapes and the bucket plan; both ends hold an equal one."""

    entries: tuple[TensorEntry, ...]
    bucket_bytes: int
    """A bucket is closed before it would grow past this; a larger tensor has a bucket of its own."""

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The plan, in the order of sending; together the buckets cover the staging memory without gaps."""
        buckets: list[Bucket] = []
        open_bucket: list[Placed] = []
        begin = offset = 0
        for entry in self.entries:
            size = -(-entry.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if open_bucket and offset + size - begin > self.bucket_bytes:
                buckets.append(Bucket(tuple(open_bucket), begin, offset))
                open_bucket, begin = [], offset
            open_bucket.append(Placed(entry, offset))
            offset += size
        if open_bucket:
            buckets.append(Bucket(tuple(open_bucket), begin, offset))
        return tuple(buckets)

    @property
    def staging_bytes(self) -> int:
        """Size of the staging memory that holds all tensors."""
        return self.buckets[-1].end if self.buckets else 0

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over everything in the manifest."""
        content = [self.bucket_bytes, [[entry.name, entry.dtype, list(entry.shape)] for entry in self.entries]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def views(self, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, as a view into the staging memory, in the order of sending."""
        for bucket in self.buckets:
            for placed in bucket.tensors:
                yield placed.entry.name, placed.view(memory)

    def to_proto(self) -> weights_pb2.WeightManifest:
        """The message for JoinGroup."""
        tensors = [weights_pb2.WeightTensor(name=e.name, dtype=e.dtype, shape=e.shape) for e in self.entries]
        return weights_pb2.WeightManifest(tensors=tensors, bucket_bytes=self.bucket_bytes, digest=self.digest)

    @classmethod
    def make(cls, entries: Iterable[TensorEntry], *, bucket_bytes: int) -> "WeightManifest":
        """A manifest of these tensors.

        Raises:
            ValueError: There is no tensor, a name occurs twice, a dtype cannot be pushed, or a bound is broken.
        """
        manifest = cls(tuple(entries), bucket_bytes)
        if bucket_bytes < ALIGNMENT_BYTES:
            raise ValueError(f"bucket_bytes = {bucket_bytes}: must be at least {ALIGNMENT_BYTES}")
        if not manifest.entries:
            raise ValueError("tensors: must hold at least one")
        names: set[str] = set()
        for entry in manifest.entries:
            if entry.dtype not in DTYPES:
                raise ValueError(f"{entry.name}: dtype = {entry.dtype}: must be one of {', '.join(DTYPES)}")
            if entry.name in names:
                raise ValueError(f"{entry.name}: occurs twice; a tied tensor is listed once")
            names.add(entry.name)
        return manifest

    @classmethod
    def from_proto(cls, message: weights_pb2.WeightManifest) -> "WeightManifest":
        """The manifest of a JoinGroup request.

        Raises:
            ValueError: As `make`, or the digest is not that of the content.
        """
        entries = [TensorEntry(t.name, t.dtype, tuple(t.shape)) for t in message.tensors]
        manifest = cls.make(entries, bucket_bytes=message.bucket_bytes)
        if manifest.digest != message.digest:
            raise ValueError(f"manifest digest = {message.digest}: content has {manifest.digest}")
        return manifest
