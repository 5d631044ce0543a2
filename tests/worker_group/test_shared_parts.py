"""Values whose buffers processes of one machine map."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

from raylaunch.worker_group.object_lender import ObjectLender, StoredParts
from raylaunch.worker_group.rank import packing, shared_parts

VALUE = {"array": np.arange(10_000), "empty": np.empty(0), "tensor": torch.ones(5_000), "text": "x" * 10_000}


def assert_is_value(found: dict[str, Any]) -> None:
    assert np.array_equal(found["array"], VALUE["array"])
    assert found["empty"].size == 0
    assert torch.equal(found["tensor"], VALUE["tensor"])
    assert found["text"] == VALUE["text"]


def leases() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "raylaunch-lease"]


def test_what_is_mapped_can_be_written_to() -> None:
    """Each time anew; the file need only be there until then."""
    shared, own = shared_parts.share(packing.packed(VALUE))
    first, second = pickle.loads(shared.dumped()), packing.unpacked(shared.parts())
    os.close(own)
    first["array"] += 1
    first["tensor"] += 1
    assert_is_value(second)
    with pytest.raises(FileNotFoundError):
        shared.parts()


def test_a_holder_that_dies_is_noticed_as_long_as_anything_refers_to_what_it_held() -> None:
    shared, own = shared_parts.share([b"", np.full(5_000, 1)])
    reading, writing = os.pipe()
    parts = shared_parts.SharedParts(stream=b"", buffers=shared.buffers, lease=shared_parts.path_of(writing)).parts()
    os.close(writing)
    assert not shared_parts.is_any_lost()
    os.close(reading)
    assert shared_parts.is_any_lost()
    del parts
    assert not shared_parts.is_any_lost()
    os.close(own)


def test_only_empty_buffers_can_be_mapped() -> None:
    shared, own = shared_parts.share(packing.packed(np.empty(0)))
    assert pickle.loads(shared.dumped()).size == 0
    os.close(own)


def test_a_kept_file_is_mapped_once_to_read_only() -> None:
    """What is written to the file later is seen: it is Ray's store, which others write to."""
    shared, own = shared_parts.share([b"", np.full(5_000, 1), np.full(5_000, 2)])
    path = shared_parts.path_of(own)
    kept = shared_parts.SharedParts(stream=b"", buffers=shared.buffers, kept=path)
    (_, one, two), (_, again, _) = kept.parts(), kept.parts()
    assert one.readonly
    assert np.frombuffer(two, int).tolist() == [2] * 5_000
    assert np.frombuffer(one, int).ctypes.data == np.frombuffer(again, int).ctypes.data
    os.pwrite(own, np.full(1, 7).tobytes(), 0)
    assert np.frombuffer(again, int)[0] == 7
    os.close(own)


def test_what_was_lent_is_held_until_nobody_refers_to_it() -> None:
    """Also after its call, and when others that were lent in the same call are not referred to any more."""
    lender = ObjectLender()
    found = pickle.loads(lender.lend(1, VALUE))
    (held,) = leases()
    pickle.loads(lender.lend(1, VALUE))
    (other,) = {*leases()} - {held}
    assert_is_value(found)
    lender.release(1)
    other.join()
    array = found["array"]
    del found
    assert held.is_alive()
    assert array[9] == 9
    del array
    held.join()


def test_what_has_no_buffers_needs_no_lease() -> None:
    lender = ObjectLender()
    assert pickle.loads(lender.lend(1, {"text": "x"})) == {"text": "x"}
    assert leases() == []


def test_what_ray_stores_is_the_value() -> None:
    """Its buffers are apart, as Ray wants them; arguments stay packed."""
    shared, own = shared_parts.share(packing.packed(VALUE))
    for_readers, _ = ObjectLender().store(shared)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(for_readers, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 15_000
    assert_is_value(pickle.loads(stream, buffers=buffers))
    first, *rest = shared.parts()
    packed = StoredParts(bytes(first), rest)
    again = pickle.loads(pickle.dumps(packed, protocol=5))
    assert_is_value(packing.unpacked(again.parts))
    os.close(own)
