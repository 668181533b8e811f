"""Our scheduler inside vLLM's engine process: exact version spans, a cache salt per version, samples delivered whole.

vLLM's scheduler decides as ever; this class adds what a rollout server needs to know about it, in three places:
- every resume after a pause begins a new *epoch* (weights are only ever exchanged under a pause); each token is booked
  under the epoch that sampled it;
- every request without a sampled token is computed under the salt of the present epoch, so that no block of the prefix
  cache is ever shared across weights, and a sample whose tokens are all of one epoch has its whole prompt from it;
- tokens and logprobs are held back until the sample ends, so that the front end wakes once a sample, not once a token.
"""

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from runtime.process import exit_with_parent

SPANS_KEY = "tandem_spans"
"""Key of an output's `kv_transfer_params` under which the spans travel: a list of [epoch, index of first token]."""
FLUSH_KEY = "tandem_flush_tokens"
"""Key of a request's `extra_args`: deliver what is held each time that many tokens have been sampled."""


@dataclass(slots=True)
class _Held:
    """What a request has produced and the front end has not yet seen."""

    flush_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)
    prefill_stats: Any = None
    spans: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0


class VersionedScheduling:
    """The additions, as a mixin for either of vLLM's scheduler classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The engine process outlives a killed server by many seconds otherwise, and would stay in the weight group.
        exit_with_parent()
        # A terminal sends SIGINT to the whole process group, and the server still drains what runs here.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._epoch = 0
        self._held: dict[str, _Held] = {}

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Begins a new epoch when generation goes on after a pause."""
        resumes = self._pause_state != PauseState.UNPAUSED and pause_state == PauseState.UNPAUSED  # type: ignore[attr-defined]
        if resumes:
            self._epoch += 1
            self._take_back_prefills()
            for request in self.requests.values():  # type: ignore[attr-defined]
                if request.num_computed_tokens == 0:
                    self._salt(request)
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def _take_back_prefills(self) -> None:
        """Sends requests whose prompt is computed in part back to the queue."""
        running: list[Request] = self.running  # type: ignore[has-type]
        started = [request for request in running if request.num_output_tokens == 0]
        self.running = [request for request in running if request.num_output_tokens > 0]
        for request in reversed(started):
            self._preempt_request(request, time.monotonic())  # type: ignore[attr-defined]
            # It may be scheduled again in the very next step, which the model runner must see as a new beginning.
            self.prev_step_scheduled_req_ids.discard(request.request_id)  # type: ignore[attr-defined]

    def add_request(self, request: Request) -> None:
        """Salts and admits a request."""
        self._salt(request)
        flush_tokens = (request.sampling_params.extra_args or {}).get(FLUSH_KEY, 0) if request.sampling_params else 0
        self._held[request.request_id] = _Held(flush_tokens)
        super().add_request(request)  # type: ignore[misc]

    def _salt(self, request: Request) -> None:
        request.cache_salt = f"epoch-{self._epoch}"
        request.block_hashes = []
        request.update_block_hashes()

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Aborts requests, and forgets what was held for them."""
        aborted: list[Request] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in aborted:
            self._held.pop(request.request_id, None)
        return aborted

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Books the tokens of a step, and lets only finished samples (and flushes) through."""
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for of_client in outputs.values():
            of_client.outputs = [output for output in of_client.outputs if self._passes(output)]
        return outputs

    def _passes(self, output: EngineCoreOutput) -> bool:
        held = self._held.get(output.request_id)
        if held is None:
            return True
        if output.new_token_ids:
            if not held.spans or held.spans[-1][0] != self._epoch:
                held.spans.append([self._epoch, held.num_tokens])
            held.num_tokens += len(output.new_token_ids)
            held.token_ids.extend(output.new_token_ids)
        if output.new_logprobs is not None:
            held.logprobs.append(output.new_logprobs)
        held.prefill_stats = held.prefill_stats or output.prefill_stats
        flush = 0 < held.flush_tokens <= len(held.token_ids)
        if output.finish_reason is None and not flush:
            return False
        output.new_token_ids, held.token_ids = held.token_ids, []
        output.new_logprobs, held.logprobs = _joined(held.logprobs), []
        output.prefill_stats, held.prefill_stats = held.prefill_stats, None
        if output.finish_reason is not None:
            output.kv_transfer_params = {SPANS_KEY: held.spans}
            del self._held[output.request_id]
        return True


def _joined(pieces: list[LogprobsLists]) -> LogprobsLists | None:
    if not pieces:
        return None
    columns = (np.concatenate([np.asarray(piece[column]) for piece in pieces]) for column in range(3))
    return LogprobsLists(*columns, None)


class VersionedScheduler(VersionedScheduling, Scheduler):
    """For engines that schedule a step after the one before has ended (CPU)."""


class VersionedAsyncScheduler(VersionedScheduling, AsyncScheduler):
    """For engines that schedule a step while the one before still runs (CUDA)."""
