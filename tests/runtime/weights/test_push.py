"""A sender and its receivers over real gloo: bit-equal, or refused with the reason, within the time."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from runtime.weights.group import WeightGroup, connect_store, open_store
from runtime.weights.manifest import DTYPES, TensorEntry, WeightManifest
from runtime.weights.receiver import GroupPlace, ReceiverStateError, WeightReceiver
from runtime.weights.sender import WeightsDifferError, WeightSender

CPU = torch.device("cpu")
MANIFEST = WeightManifest.make(
    [
        TensorEntry("embedding", "float32", (50, 16)),
        TensorEntry("norm", "bfloat16", (16,)),
        TensorEntry("scale", "float16", ()),
        TensorEntry("head", "float32", (16, 50)),
    ],
    bucket_bytes=2048,
)


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (entry.name, torch.randn(entry.shape, generator=generator).to(DTYPES[entry.dtype]))
        for entry in MANIFEST.entries
    ]


def assert_bit_equal(one: list[tuple[str, torch.Tensor]], other: list[tuple[str, torch.Tensor]]) -> None:
    for (name, tensor), (other_name, other_tensor) in zip(one, other, strict=True):
        assert name == other_name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other_tensor.reshape(-1).view(torch.uint8))


def place(port: int, *, rank: int, world_size: int, timeout_seconds: float) -> GroupPlace:
    return GroupPlace("run", 1, "127.0.0.1", port, rank, world_size, "gloo", timeout_seconds)


def join_as_sender(store: dist.Store, *, world_size: int, timeout_seconds: float) -> WeightGroup:
    return WeightGroup.join(
        store,
        name="weights/run/1",
        rank=0,
        world_size=world_size,
        transport="gloo",
        own_host="127.0.0.1",
        timeout_seconds=timeout_seconds,
    )


@dataclass(frozen=True, slots=True)
class Pushing:
    group: WeightGroup
    sender: WeightSender
    receivers: tuple[WeightReceiver, ...]

    def begin(self, version: int, *, timeout_seconds: float = 30) -> None:
        for receiver in self.receivers:
            receiver.begin(version, timeout_seconds=timeout_seconds)

    def push(self, version: int, *, seed: int) -> None:
        self.begin(version)
        sent = self.sender.send(weights(seed), policy_version=version)
        self.sender.confirm(sent, timeout_seconds=10)


@contextmanager
def pushing(*, num_receivers: int = 2, timeout_seconds: float = 10) -> Iterator[Pushing]:
    store, port = open_store("127.0.0.1")
    world_size = 1 + num_receivers
    receivers = tuple(
        WeightReceiver(
            place(port, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds), MANIFEST, device=CPU
        )
        for rank in range(1, world_size)
    )
    group = join_as_sender(store, world_size=world_size, timeout_seconds=timeout_seconds)
    group.reports("joined", timeout_seconds=timeout_seconds)
    try:
        yield Pushing(group, WeightSender(group, MANIFEST, device=CPU), receivers)
    finally:
        for receiver in receivers:
            receiver.leave()
        group.abort()


def test_every_receiver_holds_the_bits_that_were_sent() -> None:
    with pushing() as push:
        for version, seed in ((1, 11), (2, 12)):
            push.push(version, seed=seed)
            for receiver in push.receivers:
                assert_bit_equal(receiver.staged_weights(version), weights(seed))


def test_another_dtype_is_converted_to_the_manifests() -> None:
    with pushing(num_receivers=1) as push:
        push.begin(1)
        sent = push.sender.send(((name, tensor.double()) for name, tensor in weights(3)), policy_version=1)
        push.sender.confirm(sent, timeout_seconds=10)

        assert_bit_equal(push.receivers[0].staged_weights(1), weights(3))


def test_only_the_staged_version_is_given_out() -> None:
    with pushing(num_receivers=1) as push:
        receiver = push.receivers[0]
        with pytest.raises(ReceiverStateError, match="version 1 is not staged"):
            receiver.staged_weights(1)
        push.push(1, seed=1)
        with pytest.raises(ReceiverStateError, match=r"version 2 is not staged \(staged: 1\)"):
            receiver.staged_weights(2)
        receiver.drop()
        with pytest.raises(ReceiverStateError, match="not staged"):
            receiver.staged_weights(1)


def test_staged_weights_expire() -> None:
    with pushing(num_receivers=1) as push:
        push.begin(1, timeout_seconds=0.0)
        push.sender.confirm(push.sender.send(weights(1), policy_version=1), timeout_seconds=10)

        with pytest.raises(ReceiverStateError, match="expired"):
            push.receivers[0].staged_weights(1)


def test_a_version_may_be_staged_again() -> None:
    with pushing(num_receivers=1) as push:
        push.push(1, seed=1)
        push.push(1, seed=2)

        assert_bit_equal(push.receivers[0].staged_weights(1), weights(2))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([("another", torch.zeros(50, 16))], "push of another: the manifest has .*embedding"),
        ([("embedding", torch.zeros(50, 15))], "push of embedding: the manifest has .*embedding"),
        (weights(1)[:2], "push of nothing: the manifest has .*scale"),
        ([*weights(1), ("extra", torch.zeros(1))], "push of extra: the manifest has no more"),
    ],
)
def test_a_wrong_tensor_is_refused(tensors: list[tuple[str, torch.Tensor]], words: str) -> None:
    with pushing(num_receivers=1, timeout_seconds=2) as push:
        push.begin(1)
        with pytest.raises(ValueError, match=words):
            push.sender.send(tensors, policy_version=1)


def test_a_push_that_was_broken_off_leaves_nothing_staged_and_no_group_to_use() -> None:
    with pushing(num_receivers=1, timeout_seconds=1) as push:
        push.begin(1)
        with pytest.raises(ValueError, match="another"):
            push.sender.send([*weights(1)[:3], ("another", torch.zeros(1))], policy_version=1)
        receiver = push.receivers[0]
        with pytest.raises(ReceiverStateError, match="has not ended"):
            receiver.begin(2, timeout_seconds=30)

        report = push.group.reports("staged/1", timeout_seconds=10)[1]

        assert "error" in report
        with pytest.raises(ReceiverStateError, match="receiving policy version 1 failed"):
            receiver.begin(2, timeout_seconds=30)
        with pytest.raises(ReceiverStateError, match="not staged"):
            receiver.staged_weights(1)


def test_bits_that_differ_are_named() -> None:
    with pushing(num_receivers=1) as push:
        push.begin(1)
        sent = push.sender.send(weights(1), policy_version=1)
        push.group.reports("staged/1", timeout_seconds=10)
        wrong = type(sent)(1, (*sent.digests[:3], sent.digests[3] + 1), sent.size_bytes)

        with pytest.raises(WeightsDifferError, match="rank 1 holds other bits of head"):
            push.sender.confirm(wrong, timeout_seconds=10)


def test_receivers_that_say_nothing_are_named() -> None:
    with pushing(num_receivers=3) as push:
        push.receivers[1].begin(1, timeout_seconds=30)
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(push.sender.send, weights(1), policy_version=1)
            for receiver in (push.receivers[0], push.receivers[2]):
                # They take part, but do not stage: what they would report is withheld.
                receiver._group.report = lambda key, content: None  # type: ignore[union-attr,method-assign]
                receiver.begin(1, timeout_seconds=30)
            sent = sending.result()

        with pytest.raises(TimeoutError, match=r"ranks \[1, 3\] said nothing of staged/1 within 0.3 s"):
            push.sender.confirm(sent, timeout_seconds=0.3)


def test_a_join_without_every_rank_ends_with_its_time() -> None:
    store, port = open_store("127.0.0.1")
    receiver = WeightReceiver(place(port, rank=1, world_size=3, timeout_seconds=1), MANIFEST, device=CPU)
    begin = time.monotonic()

    with pytest.raises(RuntimeError):
        join_as_sender(store, world_size=3, timeout_seconds=1)
    receiver._joining.join(10)

    assert time.monotonic() - begin < 8
    with pytest.raises(ReceiverStateError, match="the group was not joined"):
        receiver.begin(1, timeout_seconds=10)


def test_a_receiver_that_leaves_while_it_joins_is_in_no_group() -> None:
    store, port = open_store("127.0.0.1")
    receiver = WeightReceiver(place(port, rank=1, world_size=2, timeout_seconds=10), MANIFEST, device=CPU)
    receiver.leave()

    group = join_as_sender(store, world_size=2, timeout_seconds=10)
    receiver._joining.join(10)

    assert receiver._group is None
    group.abort()


def test_a_store_is_bound_to_its_address_only() -> None:
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1 for the weight store"):
        open_store("192.0.2.1")


def receive_and_hang(port: int) -> None:
    """A receiver of 1 MiB buckets that takes part in the first one only."""
    connect_store("127.0.0.1", port, timeout_seconds=20).set("up", "")
    place_of_it = place(port, rank=2, world_size=3, timeout_seconds=20)
    receiver = WeightReceiver(place_of_it, LARGE, device=CPU)
    receiver._joining.join(20)
    group = receiver._group
    assert group is not None
    group.broadcast(torch.empty(LARGE.buckets[0].end, dtype=torch.uint8)).wait()
    group.report("first", {})
    threading.Event().wait()


LARGE = WeightManifest.make(
    [TensorEntry(f"t{index}", "float32", (256, 1024)) for index in range(4)], bucket_bytes=1 << 20
)


def push(sender: WeightSender, tensors: Iterator[tuple[str, torch.Tensor]], *, timeout_seconds: float) -> None:
    sender.confirm(sender.send(tensors, policy_version=1), timeout_seconds=timeout_seconds)


def test_a_receiver_that_is_killed_in_mid_push_ends_it_for_all_within_the_time() -> None:
    timeout_seconds = 5.0
    store, port = open_store("127.0.0.1")
    process = multiprocessing.get_context("spawn").Process(target=receive_and_hang, args=(port,))
    process.start()
    store.wait(["up"])
    survivor = WeightReceiver(place(port, rank=1, world_size=3, timeout_seconds=timeout_seconds), LARGE, device=CPU)
    try:
        group = join_as_sender(store, world_size=3, timeout_seconds=20)
        survivor._joining.join(20)
        survivor.begin(1, timeout_seconds=60)
        killed = threading.Event()

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for index, entry in enumerate(LARGE.entries):
                if index == 1:
                    store.wait(["weights/run/1/first/2"])
                    process.kill()
                    process.join()
                    killed.set()
                yield entry.name, torch.zeros(entry.shape)

        begin = time.monotonic()
        with pytest.raises((RuntimeError, WeightsDifferError, TimeoutError)):
            push(WeightSender(group, LARGE, device=CPU), tensors(), timeout_seconds=timeout_seconds)

        assert killed.is_set()
        with pytest.raises(ReceiverStateError):
            survivor.staged_weights(1)
        group._store.wait(["staged/1/1"])
        with pytest.raises(ReceiverStateError, match="failed"):
            survivor.begin(2, timeout_seconds=10)
        assert time.monotonic() - begin < 4 * timeout_seconds
    finally:
        survivor.leave()
        process.kill()
        process.join()
