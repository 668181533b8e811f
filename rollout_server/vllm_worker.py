"""Our methods inside vLLM's worker process: stage weights in a thread, apply them in one call.

vLLM mixes this class into its worker (`worker_extension_cls`); the engine calls the methods by `collective_rpc`, with
plain arguments, in its busy loop between two steps, so nothing else runs meanwhile.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from runtime.process import exit_with_parent
from runtime.weights.manifest import TensorEntry, WeightManifest
from runtime.weights.receiver import GroupPlace, ReceiverStateError, WeightReceiver

NO_GROUP = "the server is in no weight group"


class WeightWorker:
    """The additions to vLLM's worker; names begin with `tandem_` so that they cannot collide with its own."""

    tandem_receiver: WeightReceiver | None = None

    # What vLLM's worker brings.
    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any

    def tandem_join(
        self,
        group: dict[str, Any],
        entries: Sequence[tuple[str, str, Sequence[int]]],
        bucket_bytes: int,
    ) -> None:
        """Joins a weight group in the background; a group joined before is left.

        Args:
            group: Fields of GroupAddress.
            entries: Name, dtype and shape of every tensor.
            bucket_bytes: As in the manifest.
        """
        exit_with_parent()
        self.tandem_leave()
        first_rank = group.pop("first_rank")
        place = GroupPlace(**group, rank=first_rank + self.rank)
        manifest = WeightManifest.make([TensorEntry(n, d, tuple(s)) for n, d, s in entries], bucket_bytes=bucket_bytes)
        self.tandem_receiver = WeightReceiver(place, manifest, device=self.device)

    def tandem_leave(self) -> None:
        """Leaves the group and frees the staging memory."""
        if self.tandem_receiver is not None:
            self.tandem_receiver.leave()
            self.tandem_receiver = None

    def tandem_begin(self, policy_version: int, timeout_seconds: float) -> str:
        """Starts to receive a version and returns at once: why it cannot, or nothing."""
        if self.tandem_receiver is None:
            return NO_GROUP
        try:
            self.tandem_receiver.begin(policy_version, timeout_seconds=timeout_seconds)
        except ReceiverStateError as error:
            return str(error)
        return ""

    def tandem_drop(self) -> None:
        """Forgets what is staged."""
        if self.tandem_receiver is not None:
            self.tandem_receiver.drop()

    def tandem_check(self, policy_version: int) -> str:
        """Why the version cannot be applied; empty if it can."""
        if self.tandem_receiver is None:
            return NO_GROUP
        try:
            self.tandem_receiver.staged_weights(policy_version)
        except ReceiverStateError as error:
            return str(error)
        return ""

    def tandem_apply(self, policy_version: int) -> float:
        """Puts the staged weights into the model and returns the seconds that it took."""
        assert self.tandem_receiver is not None, "tandem_check comes first"
        begin = time.perf_counter()
        weights = self.tandem_receiver.staged_weights(policy_version)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if self.device.type == "cuda" and self.vllm_config.model_config.quantization is None:
                self.model_runner.model.load_weights(weights)
                torch.cuda.synchronize(self.device)
            else:
                self._reload_layerwise(weights)
        self.tandem_receiver.drop()
        return time.perf_counter() - begin

    def _reload_layerwise(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        # Weights that are packed after loading (CPU) or quantised cannot be overwritten in place.
        # It warns at every reload that modules without weights of their own got none: rotary embeddings, a tied head.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        model = self.model_runner.model
        initialize_layerwise_reload(model)
        model.load_weights(weights)
        finalize_layerwise_reload(model, self.model_runner.model_config)
        # A tied head keeps its old packed copy through the reload: pack it again from the new embedding.
        head = getattr(model, "lm_head", None)
        if self.model_runner.model_config.hf_text_config.tie_word_embeddings and head is not None:
            head.quant_method.process_weights_after_loading(head)
