"""The sending end of weight pushes to one server, as the learner has it, with blocking calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from protos.rollout.v1 import weights_pb2, weights_pb2_grpc
from runtime.weights.group import WeightGroup, open_store
from runtime.weights.manifest import TensorEntry, WeightManifest
from runtime.weights.sender import WeightSender

TIMEOUT_SECONDS = 30.0


@dataclass(slots=True)
class WeightPusher:
    """Rank 0 of a group with one server."""

    stub: weights_pb2_grpc.WeightServiceStub
    group: WeightGroup
    sender: WeightSender
    manifest: WeightManifest
    version: int = 0

    @classmethod
    def join(cls, admin_address: str, weights: Mapping[str, torch.Tensor]) -> "WeightPusher":
        """Makes the group for tensors of these names and shapes."""
        entries = [TensorEntry(name, "float32", tuple(tensor.shape)) for name, tensor in weights.items()]
        manifest = WeightManifest.make(entries, bucket_bytes=1 << 18)
        store, port = open_store("127.0.0.1")
        stub = weights_pb2_grpc.WeightServiceStub(grpc.insecure_channel(admin_address))
        request = weights_pb2.JoinGroupRequest(
            run_id="test",
            epoch=1,
            store_host="127.0.0.1",
            store_port=port,
            world_size=2,
            first_rank=1,
            transport="gloo",
            manifest=manifest.to_proto(),
            timeout_seconds=TIMEOUT_SECONDS,
        )
        stub.JoinGroup(request, timeout=TIMEOUT_SECONDS)
        group = WeightGroup.join(
            store,
            name="weights/test/1",
            rank=0,
            world_size=2,
            transport="gloo",
            own_host="127.0.0.1",
            timeout_seconds=TIMEOUT_SECONDS,
        )
        return cls(stub, group, WeightSender(group, manifest, device=torch.device("cpu")), manifest)

    def push(
        self, weights: Mapping[str, torch.Tensor], *, recompute: bool = False
    ) -> weights_pb2.CommitWeightsResponse:
        """Stages and commits the next version."""
        self.version += 1
        names: dict[str, Any] = {"run_id": "test", "epoch": 1, "policy_version": self.version}
        self.stub.StageWeights(
            weights_pb2.StageWeightsRequest(**names, timeout_seconds=TIMEOUT_SECONDS), timeout=TIMEOUT_SECONDS
        )
        self.sender.confirm(
            self.sender.send(weights.items(), policy_version=self.version), timeout_seconds=TIMEOUT_SECONDS
        )
        kv = weights_pb2.KV_ON_COMMIT_RECOMPUTE if recompute else weights_pb2.KV_ON_COMMIT_KEEP
        return self.stub.CommitWeights(
            weights_pb2.CommitWeightsRequest(**names, kv_on_commit=kv), timeout=TIMEOUT_SECONDS
        )
