"""The manifest and its buckets, as properties."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.weights.manifest import ALIGNMENT_BYTES, DTYPES, TensorEntry, WeightManifest

names = st.text("abcdef.0123456789", min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
entries = st.builds(TensorEntry, names, st.sampled_from(sorted(DTYPES)), shapes)
manifests = st.builds(
    lambda tensors, bucket_bytes: WeightManifest.make(tensors, bucket_bytes=bucket_bytes),
    st.lists(entries, min_size=1, max_size=12, unique_by=lambda entry: entry.name),
    st.integers(ALIGNMENT_BYTES, 4 * ALIGNMENT_BYTES),
)


@given(manifests)
def test_buckets_cover_the_staging_memory_without_gaps(manifest: WeightManifest) -> None:
    ends = [0, *(bucket.end for bucket in manifest.buckets)]

    assert [bucket.begin for bucket in manifest.buckets] == ends[:-1]
    assert ends[-1] == manifest.staging_bytes


@given(manifests)
def test_every_tensor_is_in_one_bucket_in_the_order_of_the_manifest(manifest: WeightManifest) -> None:
    placed = [placed for bucket in manifest.buckets for placed in bucket.tensors]

    assert tuple(place.entry for place in placed) == manifest.entries


@given(manifests)
def test_tensors_are_aligned_apart_and_inside_their_bucket(manifest: WeightManifest) -> None:
    for bucket in manifest.buckets:
        free = bucket.begin
        for placed in bucket.tensors:
            assert placed.offset % ALIGNMENT_BYTES == 0
            assert placed.offset >= free
            free = placed.offset + placed.entry.size_bytes
        assert free <= bucket.end


@given(manifests)
def test_a_bucket_is_larger_than_its_bound_only_for_one_tensor(manifest: WeightManifest) -> None:
    for bucket in manifest.buckets:
        assert len(bucket.tensors) == 1 or bucket.end - bucket.begin <= manifest.bucket_bytes


@given(manifests)
def test_what_is_written_through_a_bucket_is_read_through_the_views(manifest: WeightManifest) -> None:
    memory = torch.zeros(manifest.staging_bytes, dtype=torch.uint8)
    for bucket in manifest.buckets:
        part = memory[bucket.begin : bucket.end]
        for number, placed in enumerate(bucket.tensors, start=1):
            placed.view(part, origin=bucket.begin).fill_(number)

    expected = [number for bucket in manifest.buckets for number, _ in enumerate(bucket.tensors, start=1)]
    for (name, view), entry, number in zip(manifest.views(memory), manifest.entries, expected, strict=True):
        assert (name, tuple(view.shape), view.dtype) == (entry.name, entry.shape, DTYPES[entry.dtype])
        assert bool((view == number).all())


@given(manifests)
def test_a_manifest_survives_the_wire(manifest: WeightManifest) -> None:
    again = WeightManifest.from_proto(type(manifest.to_proto()).FromString(manifest.to_proto().SerializeToString()))

    assert again == manifest
    assert again.digest == manifest.digest


@given(manifests, st.data())
def test_the_digest_differs_for_any_change(manifest: WeightManifest, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(manifest.entries) - 1))
    entry = manifest.entries[index]
    others = [dtype for dtype in DTYPES if dtype != entry.dtype]
    changed = data.draw(
        st.sampled_from(
            [
                replace(entry, name=entry.name + "x"),
                replace(entry, dtype=others[0]),
                replace(entry, shape=(*entry.shape, 1)),
                replace(entry, shape=(1, *entry.shape, 7)),
            ]
        )
    )
    tensors = (*manifest.entries[:index], changed, *manifest.entries[index + 1 :])

    assert WeightManifest.make(tensors, bucket_bytes=manifest.bucket_bytes).digest != manifest.digest
    assert replace(manifest, bucket_bytes=manifest.bucket_bytes + 1).digest != manifest.digest
    assert replace(manifest, entries=manifest.entries[1:]).digest != manifest.digest


def test_a_manifest_with_another_content_than_its_digest_says_is_refused() -> None:
    message = WeightManifest.make([TensorEntry("a", "float32", (2,))], bucket_bytes=1024).to_proto()
    message.tensors[0].shape[0] = 3

    with pytest.raises(ValueError, match="digest"):
        WeightManifest.from_proto(message)


@pytest.mark.parametrize(
    ("tensors", "bucket_bytes", "words"),
    [
        ([], 1024, "at least one"),
        ([TensorEntry("a", "int8", (2,))], 1024, "a: dtype = int8"),
        ([TensorEntry("a", "float32", (2,)), TensorEntry("a", "float32", (2,))], 1024, "a: occurs twice"),
        ([TensorEntry("a", "float32", (2,))], 255, "bucket_bytes = 255: must be at least 256"),
    ],
)
def test_a_manifest_that_cannot_be_pushed_is_refused(tensors: list[TensorEntry], bucket_bytes: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WeightManifest.make(tensors, bucket_bytes=bucket_bytes)
