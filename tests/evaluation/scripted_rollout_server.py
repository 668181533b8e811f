"""A rollout server that answers prompts from a script, token by token as a real one would, without an engine."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc

from protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from runtime.errors import WrongStateError
from runtime.serving import Listener

Context = grpc.aio.ServicerContext[Any, Any]
Script = Callable[[tuple[int, ...]], Sequence[int]]
"""Token ids of the completion of a prompt; the stop token ends it."""

STOP_TOKEN_ID = 1


class ScriptedRolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers from a script; counts the calls that it answers at the same time."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.policy_version = 0

    async def GetServerInfo(
        self, request: rollout_pb2.GetServerInfoRequest, context: Context
    ) -> rollout_pb2.GetServerInfoResponse:
        return rollout_pb2.GetServerInfoResponse(
            model="scripted",
            tokenizer_fingerprint="scripted",
            vocabulary_size=1000,
            context_length=64,
            stop_token_ids=[STOP_TOKEN_ID],
            logprob_semantics=rollout_pb2.LOGPROB_SEMANTICS_PROCESSED,
            policy_version=self.policy_version,
            instance_id="scripted",
        )

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        if request.HasField("exact_policy_version") and request.exact_policy_version != self.policy_version:
            raise WrongStateError(f"exact_policy_version: the server serves {self.policy_version}")
        token_ids = list(self._script(tuple(request.prompt_token_ids)))[: request.sampling.max_tokens]
        is_stopped = token_ids[-1] == STOP_TOKEN_ID
        for sample in request.samples:
            yield rollout_pb2.GenerateResponse(
                sample=rollout_pb2.Sample(
                    sample_id=sample.sample_id,
                    attempt=sample.attempt,
                    token_ids=token_ids,
                    behaviour_logprobs=[-0.5] * len(token_ids),
                    version_spans=[rollout_pb2.VersionSpan(first_token=0, policy_version=self.policy_version)],
                    finish_reason=rollout_pb2.FINISH_REASON_STOP if is_stopped else rollout_pb2.FINISH_REASON_LENGTH,
                    stop_token_id=STOP_TOKEN_ID if is_stopped else None,
                )
            )


@asynccontextmanager
async def scripted_rollout_server(servicer: ScriptedRolloutServicer) -> AsyncIterator[str]:
    """Serves on a free port and yields its address."""
    listener = await Listener.start(
        host="127.0.0.1",
        port=0,
        services=["protos.rollout.v1.RolloutService"],
        register=[partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer)],
        token=None,
    )
    await listener.set_serving(True)
    try:
        yield listener.address
    finally:
        await listener.stop(drain_seconds=0)
