"""Buckets to flat bytes and back, whatever is in them; layouts and manifests through JSON; damage is named."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_transport import from_bytes, manifest_of, tensors, updates
from lockstep.errors import TransportError
from lockstep.transport.base import raw_bytes, tensor_line
from lockstep.transport.packet import (
    ALIGN,
    DTYPES,
    layout_from_json,
    layout_to_json,
    manifest_from_json,
    manifest_to_json,
    pack,
    packet_bytes,
    split_bucket,
    unpack,
)
from lockstep.types import Bucket, Manifest


@settings(max_examples=150, deadline=None)
@given(updates(), st.sampled_from([1, 100, 4096]))
def test_what_is_packed_is_unpacked_bit_by_bit(update, at_least):
    named, _ = update
    manifest = manifest_of(named)
    capacity = packet_bytes(manifest, at_least)
    found = []
    for layout, part in split_bucket(Bucket(tuple(named)), capacity):
        assert layout.nbytes <= capacity
        flat = torch.full((capacity,), 0xAB, dtype=torch.uint8)
        pack(part, layout, flat)
        back = layout_from_json(json.loads(json.dumps(layout_to_json(layout))), capacity)
        assert back == layout
        found += [tensor_line(name, tensor) for name, tensor in unpack(flat, back).items()]
    assert found == [tensor_line(name, tensor) for name, tensor in named]


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_raw_bytes_are_those_of_a_plain_copy(tensor):
    plain = tensor.resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    assert torch.equal(raw_bytes(tensor), plain)


def test_every_dtype_that_torch_can_copy_travels():
    """All of torch's, less what has no plain bytes: quantized ones, and sub-byte integers that torch itself cannot copy."""
    missing = {
        str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)
    } - DTYPES.keys()
    assert all(name[:1] == "q" or name.startswith(("int", "uint", "bits")) for name in missing), missing
    assert not missing & {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}


def test_capacity_is_bounded_by_the_update_and_by_its_largest_tensor():
    named = [("a", torch.zeros(100)), ("b", torch.zeros(30)), ("c", torch.zeros(()))]
    assert packet_bytes(manifest_of(named), 1) == 448  # 400 bytes, aligned
    assert packet_bytes(manifest_of(named), 500) == 512
    assert packet_bytes(manifest_of(named), 1 << 30) == 448 + 128 + 64
    assert packet_bytes(manifest_of([]), 1 << 30) == ALIGN


def test_packets_hold_whole_tensors_in_order():
    bucket = Bucket(tuple((str(i), torch.zeros(16)) for i in range(5)))
    parts = [[name for name, _ in part.items()] for _, part in split_bucket(bucket, 128)]
    assert parts == [["0", "1"], ["2", "3"], ["4"]]


def test_a_tensor_larger_than_the_manifest_says_is_named():
    with pytest.raises(TransportError, match=r"tensor 'big' .* takes 448 bytes, a packet has 64"):
        list(split_bucket(Bucket((("big", torch.zeros(100)),)), 64))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nbytes": 5000}, "cut short"),
        ({"pieces": [["a", [4], "float32", 60]]}, "layout is damaged"),
        ({"pieces": [["a", [400], "float32", 0]]}, "layout is damaged"),
        ({"pieces": [["a", [4], "float32", -64]]}, "layout is damaged"),
        ({"pieces": [["a", [-4], "float32", 0]]}, "not negative"),
        ({"pieces": [["a", [4], "float33", 0]]}, "'float33' is not known"),
        ({"pieces": [["a", [4], "load", 0]]}, "'load' is not known"),
    ],
)
def test_damaged_layouts_are_refused(change, words):
    good = {"nbytes": 64, "pieces": [["a", [4], "float32", 0]]}
    layout_from_json(good, 64)
    with pytest.raises(TransportError, match=words):
        layout_from_json({**good, **change}, 64)


def test_manifests_survive_json():
    named = [(f"x.{name}", from_bytes(dtype, (2, 3), 0)) for name, dtype in DTYPES.items()]
    manifest = Manifest(7, "adapter", manifest_of(named).specs, {"r": 8, "target_modules": ["q", "v"]})
    assert manifest_from_json(json.loads(json.dumps(manifest_to_json(manifest)))) == manifest
    empty = Manifest(8, "merged", ())
    assert manifest_from_json(json.loads(json.dumps(manifest_to_json(empty)))) == empty
    with pytest.raises(TransportError, match="kind 'delta'"):
        manifest_from_json({**manifest_to_json(empty), "kind": "delta"})


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(3, device="meta"), torch.eye(3).to_sparse()],
    ids=["meta", "sparse"],
)
def test_tensors_without_bytes_are_refused(tensor):
    with pytest.raises(TransportError, match="has no bytes to send"):
        raw_bytes(tensor)


def test_lines_of_odd_names_cannot_be_mistaken_for_others():
    """A name with a line break must not look like two tensors."""
    one = tensor_line("a", torch.zeros(2))
    assert "\n" not in tensor_line(f"{one}\nb", torch.zeros(2))


@pytest.mark.parametrize("num", [0, 1])
def test_short_tensors_of_odd_strides_have_bytes(num):
    """torch calls them contiguous and refuses to view them as bytes."""
    tensor = torch.arange(10.0)[::5][:num]
    assert tensor.stride() == (5,)
    assert raw_bytes(tensor).tolist() == raw_bytes(tensor.clone(memory_format=torch.contiguous_format)).tolist()
    assert raw_bytes(tensor).numel() == 4 * num
