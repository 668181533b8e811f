"""`tandem serve rollout`: engine, listeners, health and a drained end, put together."""

import asyncio
import os
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import grpc
import structlog

from protos.learner.v1 import learner_pb2, learner_pb2_grpc
from protos.rollout.v1 import rollout_pb2, weights_pb2
from protos.rollout.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from protos.rollout.v1.weights_pb2_grpc import add_WeightServiceServicer_to_server
from rollout_server import metrics
from rollout_server.config import RolloutSettings
from rollout_server.engine import Engine, EngineDeadError
from rollout_server.rollout_service import RolloutServicer, ServedModel, ServerFacts
from rollout_server.samples import Sampling
from rollout_server.served import ServedWeights
from rollout_server.vllm_engine import VllmEngine
from rollout_server.weight_service import WeightServicer
from runtime.credentials import read_token, require_token_off_loopback
from runtime.dialling import dial
from runtime.problems.tokenizer import stop_token_ids, tokenizer_fingerprint
from runtime.process import ReadyFile, wait_for_stop_signal
from runtime.serving import Listener
from runtime.telemetry import serve_metrics

log = structlog.get_logger()

ROLLOUT_SERVICE = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
WEIGHT_SERVICE = weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name

_ANNOUNCE_SECONDS = 60.0


async def serve(settings: RolloutSettings, *, ready_file: Path | None = None) -> None:
    """Runs a rollout server until SIGTERM or SIGINT.

    Args:
        settings: What to load and where to listen.
        ready_file: Where to write the addresses once the server answers.

    Raises:
        ValueError: A setting, the model folder or a port is unusable, or the learner does not take the server in.
        EngineDeadError: vLLM failed; the process must end so that its starter starts it again.
    """
    listen, token = settings.listen, read_token()
    require_token_off_loopback(listen.host, token)
    require_token_off_loopback(listen.admin_host, token)
    folder = Path(settings.model)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model = {settings.model or '(empty)'}: is no folder with a config.json; name the model's")
    model = ServedModel(settings.model, tokenizer_fingerprint(folder), tuple(stop_token_ids(folder)))
    engine = await VllmEngine.start(settings, stop_token_ids=model.stop_token_ids)
    async with AsyncExitStack() as at_end:
        at_end.push_async_callback(engine.close)
        await _warm_up(engine)
        instance_id = uuid.uuid4().hex
        admin, public = await _listen(engine, model, settings, token=token, instance_id=instance_id)
        for listener in (admin, public):
            at_end.push_async_callback(listener.stop, drain_seconds=0)
        metrics.BUILD.info({"tandem": _build(), "vllm": engine.facts.build})
        metrics_address = serve_metrics(host=listen.host, port=listen.metrics_port)
        for listener in (admin, public):
            await listener.set_serving(True)
        log.info("serving", address=public.address, admin_address=admin.address, metrics_address=metrics_address)
        if ready_file is not None:
            ReadyFile(os.getpid(), public.address, metrics_address, instance_id).write(ready_file)
        announce_server = partial(announce, settings.learner_address, public.address, instance_id, token=token)
        await run_until_stopped(engine, public, admin, announce=announce_server, drain_seconds=listen.drain_seconds)


async def _listen(
    engine: Engine, model: ServedModel, settings: RolloutSettings, *, token: str | None, instance_id: str
) -> tuple[Listener, Listener]:
    """Starts the admin listener and the public one, in this order; neither says SERVING yet."""
    listen, served = settings.listen, ServedWeights()
    admin = await Listener.start(
        host=listen.admin_host,
        port=listen.admin_port,
        services=[WEIGHT_SERVICE],
        register=[partial(add_WeightServiceServicer_to_server, WeightServicer(engine, served))],
        token=token,
    )
    facts = ServerFacts(model=model, build=_build(), admin_address=admin.address, instance_id=instance_id)
    servicer = RolloutServicer(engine, served, facts, max_queued_samples=settings.max_queued_samples)
    try:
        public = await Listener.start(
            host=listen.host,
            port=listen.port,
            services=[ROLLOUT_SERVICE],
            register=[partial(add_RolloutServiceServicer_to_server, servicer)],
            token=token,
        )
    except ValueError:
        await admin.stop(drain_seconds=0)
        raise
    return admin, public


def _build() -> str:
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "not installed"


async def _warm_up(engine: Engine) -> None:
    """Samples a few tokens, so that the first caller does not wait for kernels to be compiled."""
    sampling = Sampling(max_tokens=min(2, engine.facts.context_length - 1))
    async for _ in engine.generate([0], sampling, seed=0, progress_every_tokens=0):
        pass


async def announce(learner_address: str, address: str, instance_id: str, *, token: str | None) -> None:
    """Tells the learner that this server serves; nothing is done for an empty address.

    Raises:
        ValueError: The learner does not answer, or refuses the server.
    """
    if not learner_address:
        return
    request = learner_pb2.RegisterServerRequest(
        kind=learner_pb2.SERVER_KIND_ROLLOUT, address=address, instance_id=instance_id
    )
    async with dial(learner_address, token=token) as channel:
        stub = learner_pb2_grpc.LearnerServiceStub(channel)
        try:
            await stub.RegisterServer(request, timeout=_ANNOUNCE_SECONDS, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
            raise ValueError(f"learner_address = {learner_address}: the server is not taken in: {reason}") from error
    log.info("announced", learner_address=learner_address)


async def run_until_stopped(
    engine: Engine,
    public: Listener,
    admin: Listener,
    *,
    announce: Callable[[], Coroutine[Any, Any, None]],
    drain_seconds: float,
) -> None:
    """Announces the server, and drains it at SIGTERM, SIGINT or the engine's end, even if no one has answered yet.

    Raises:
        ValueError: The learner does not take the server in.
        EngineDeadError: The engine has failed.
    """

    async def watch_engine() -> None:
        while not engine.is_dead:  # noqa: ASYNC110 - vLLM has a flag, no event
            await asyncio.sleep(0.5)

    try:
        async with asyncio.TaskGroup() as tasks:
            # The handlers of the signals come first.
            ends = [tasks.create_task(wait_for_stop_signal()), tasks.create_task(watch_engine())]
            announcing = tasks.create_task(announce())
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in (*ends, announcing):
                task.cancel()
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    log.info("draining", is_engine_dead=engine.is_dead, num_running=engine.num_running)
    drain_seconds = 0 if engine.is_dead else drain_seconds
    async with asyncio.TaskGroup() as tasks:
        for listener in (public, admin):
            tasks.create_task(listener.stop(drain_seconds=drain_seconds))
    if engine.is_dead:
        raise EngineDeadError("vLLM's engine has failed; see the lines above")
