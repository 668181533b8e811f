"""GetServerInfo and Generate."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from rollout_server import metrics
from rollout_server.engine import Engine, EngineDeadError, EngineProgress, EngineSample
from rollout_server.samples import FinishReason, Sampling
from rollout_server.served import ServedWeights
from runtime.errors import BusyError, InvalidRequestError, UnavailableError, WrongStateError
from runtime.grpc_options import MAX_ID_CHARACTERS
from runtime.interceptors import Context

_FINISH_REASONS = {
    FinishReason.STOP: rollout_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: rollout_pb2.FINISH_REASON_ABORTED,
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the model's folder says."""

    folder: str
    tokenizer_fingerprint: str
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What GetServerInfo says besides the engine's facts and the served weights."""

    model: ServedModel
    build: str
    admin_address: str
    instance_id: str


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """The data plane of one server."""

    def __init__(self, engine: Engine, served: ServedWeights, facts: ServerFacts, *, max_queued_samples: int) -> None:
        self._engine, self._served, self._facts = engine, served, facts
        self._max_queued_samples = max_queued_samples
        self._num_admitted = 0

    async def GetServerInfo(
        self, request: rollout_pb2.GetServerInfoRequest, context: Context
    ) -> rollout_pb2.GetServerInfoResponse:
        """Says what this server serves."""
        engine, facts = self._engine.facts, self._facts
        return rollout_pb2.GetServerInfoResponse(
            model=facts.model.folder,
            tokenizer_fingerprint=facts.model.tokenizer_fingerprint,
            vocabulary_size=engine.vocabulary_size,
            context_length=engine.context_length,
            stop_token_ids=facts.model.stop_token_ids,
            logprob_semantics=rollout_pb2.LOGPROB_SEMANTICS_PROCESSED,
            lineage=self._served.lineage,
            policy_version=self._served.policy_version,
            max_running_samples=engine.max_running_samples,
            num_running_samples=self._num_admitted,
            build=facts.build,
            engine_build=engine.build,
            engine_settings=engine.settings,
            admin_address=facts.admin_address,
            num_weight_ranks=engine.num_weight_ranks,
            transports=engine.transports,
            instance_id=facts.instance_id,
        )

    # A coroutine that writes, not a generator: gRPC cancels it at once, and TaskGroup cannot span a generator's yield.
    async def Generate(  # type: ignore[override]  # the published types know generators only
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> None:
        """Samples completions; each is sent when it ends. A cancel or a passed deadline aborts those that run."""
        sampling = self._check(request)
        self._admit(request)
        events: asyncio.Queue[rollout_pb2.GenerateResponse] = asyncio.Queue()
        waiting = len(request.samples)
        self._count(waiting)
        try:
            async with asyncio.TaskGroup() as tasks:
                for sample in request.samples:
                    tasks.create_task(self._sample(request, sample, sampling, events))
                while waiting:
                    event = await events.get()
                    await context.write(event)
                    waiting -= event.HasField("sample")
        except ExceptionGroup as errors:
            # One sample's failure has ended the others; the first one says why.
            first = errors.exceptions[0]
            if isinstance(first, EngineDeadError):
                raise UnavailableError(f"the engine has failed: {first}") from first
            raise first from None
        finally:
            self._count(-len(request.samples))

    def _count(self, change: int) -> None:
        self._num_admitted += change
        metrics.RUNNING_SAMPLES.set(self._num_admitted)

    async def _sample(
        self,
        request: rollout_pb2.GenerateRequest,
        wanted: rollout_pb2.SampleRequest,
        sampling: Sampling,
        events: "asyncio.Queue[rollout_pb2.GenerateResponse]",
    ) -> None:
        seed = wanted.seed if wanted.HasField("seed") else None
        is_complete = False
        engine_events = self._engine.generate(
            request.prompt_token_ids, sampling, seed=seed, progress_every_tokens=request.progress_every_tokens
        )
        try:
            async with aclosing(engine_events):
                async for event in engine_events:
                    if isinstance(event, EngineProgress):
                        progress = rollout_pb2.SampleProgress(
                            sample_id=wanted.sample_id, attempt=wanted.attempt, num_tokens=event.num_tokens
                        )
                        events.put_nowait(rollout_pb2.GenerateResponse(progress=progress))
                    else:
                        _check_exact_version(request, event)
                        events.put_nowait(rollout_pb2.GenerateResponse(sample=_message(wanted, event)))
                        is_complete = True
                        metrics.SAMPLES.labels(event.finish_reason.value).inc()
                        metrics.GENERATED_TOKENS.inc(len(event.token_ids))
        finally:
            if not is_complete:
                metrics.CANCELLED_SAMPLES.inc()

    def _admit(self, request: rollout_pb2.GenerateRequest) -> None:
        if self._engine.is_dead:
            raise UnavailableError("the engine has failed")
        version = self._served.policy_version
        if request.HasField("min_policy_version") and version < request.min_policy_version:
            raise WrongStateError(f"min_policy_version = {request.min_policy_version}: the server serves {version}")
        if request.HasField("exact_policy_version") and version != request.exact_policy_version:
            raise WrongStateError(f"exact_policy_version = {request.exact_policy_version}: the server serves {version}")
        if self._num_admitted + len(request.samples) > self._max_queued_samples:
            raise BusyError(
                f"{self._num_admitted} samples run or wait: with {len(request.samples)} more they would pass "
                f"max_queued_samples = {self._max_queued_samples}"
            )

    def _check(self, request: rollout_pb2.GenerateRequest) -> Sampling:
        """Checks every field against its bound; a bad token id would end the engine, not the request."""
        facts, prompt = self._engine.facts, request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError("prompt_token_ids", "[]", "at least one token id")
        if max(prompt) >= facts.vocabulary_size:
            raise InvalidRequestError(
                "prompt_token_ids", max(prompt), f"below vocabulary_size = {facts.vocabulary_size}"
            )
        if len(request.group_id) > MAX_ID_CHARACTERS:
            raise InvalidRequestError("group_id", request.group_id, f"at most {MAX_ID_CHARACTERS} characters")
        _check_samples(request)
        sampling = _sampling(request.sampling, vocabulary_size=facts.vocabulary_size)
        room = facts.context_length - len(prompt)
        if sampling.max_tokens > room:
            raise InvalidRequestError(
                "sampling.max_tokens",
                sampling.max_tokens,
                f"at most {room}: the prompt has {len(prompt)} tokens and context_length = {facts.context_length}",
            )
        return sampling


def _check_exact_version(request: rollout_pb2.GenerateRequest, sample: EngineSample) -> None:
    if not request.HasField("exact_policy_version"):
        return
    versions = {span.policy_version for span in sample.version_spans}
    if versions != {request.exact_policy_version}:
        raise WrongStateError(
            f"exact_policy_version = {request.exact_policy_version}: tokens came from {sorted(versions)}"
        )


def _check_samples(request: rollout_pb2.GenerateRequest) -> None:
    if not request.samples:
        raise InvalidRequestError("samples", "[]", "at least one sample")
    ids = [sample.sample_id for sample in request.samples]
    for sample_id in ids:
        if not 0 < len(sample_id) <= MAX_ID_CHARACTERS:
            raise InvalidRequestError("samples.sample_id", sample_id, f"1 to {MAX_ID_CHARACTERS} characters")
    if len(set(ids)) != len(ids):
        twice = next(sample_id for sample_id in ids if ids.count(sample_id) > 1)
        raise InvalidRequestError("samples.sample_id", twice, "unique within the request")
    for sample in request.samples:
        if sample.HasField("seed") and sample.seed >= 2**63:
            raise InvalidRequestError("samples.seed", sample.seed, "below 2^63")


def _sampling(message: rollout_pb2.SamplingParameters, *, vocabulary_size: int) -> Sampling:
    temperature = message.temperature if message.HasField("temperature") else 1.0
    if not 0 <= temperature <= 100:
        raise InvalidRequestError("sampling.temperature", temperature, "in [0, 100]")
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidRequestError("sampling.top_p", top_p, "in (0, 1]")
    if message.max_tokens < 1:
        raise InvalidRequestError("sampling.max_tokens", message.max_tokens, "at least 1")
    for token_id in message.stop_token_ids:
        if token_id >= vocabulary_size:
            raise InvalidRequestError("sampling.stop_token_ids", token_id, f"below vocabulary_size = {vocabulary_size}")
    return Sampling(
        temperature=temperature,
        max_tokens=message.max_tokens,
        top_p=top_p,
        top_k=message.top_k,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_stop_tokens=message.ignore_stop_tokens,
    )


def _message(wanted: rollout_pb2.SampleRequest, sample: EngineSample) -> rollout_pb2.Sample:
    spans = [
        rollout_pb2.VersionSpan(first_token=span.first_token, policy_version=span.policy_version)
        for span in sample.version_spans
    ]
    is_stop = sample.finish_reason == FinishReason.STOP
    return rollout_pb2.Sample(
        sample_id=wanted.sample_id,
        attempt=wanted.attempt,
        token_ids=sample.token_ids,
        behaviour_logprobs=sample.behaviour_logprobs,
        version_spans=spans,
        finish_reason=_FINISH_REASONS[sample.finish_reason],
        stop_token_id=sample.token_ids[-1] if is_stop else None,
        num_cached_prompt_tokens=sample.num_cached_prompt_tokens,
    )
