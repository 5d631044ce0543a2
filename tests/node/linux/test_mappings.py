"""Which file is mapped at an address."""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np

from raylaunch.node.linux.mappings import Mappings, opened_as


def test_a_mapped_file_is_found_and_opened_again() -> None:
    """By the process that has it open, though it has no name."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 3 * mmap.PAGESIZE)
    mapping = np.frombuffer(mmap.mmap(descriptor, 2 * mmap.PAGESIZE, offset=mmap.PAGESIZE), np.uint8)
    address = mapping.ctypes.data
    found = Mappings().at(address + 10, 20)
    assert found is not None
    file, offset = found
    assert offset == mmap.PAGESIZE + 10
    again = opened_as(os.getpid(), file)
    assert again is not None
    assert os.path.sameopenfile(again, descriptor)
    assert os.get_inheritable(again) is False
    assert Mappings().at(address + 10, 2 * mmap.PAGESIZE) is None
    os.close(again)
    os.close(descriptor)


def test_mappings_are_found_in_any_order() -> None:
    """Only those up to an address are read before it is asked for."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 3 * mmap.PAGESIZE)
    mapped = [np.frombuffer(mmap.mmap(descriptor, 3 * mmap.PAGESIZE), np.uint8) for _ in range(3)]
    addresses = sorted(array.ctypes.data for array in mapped)
    mappings = Mappings()
    for address in [addresses[1], addresses[0], addresses[2], addresses[1]]:
        found = mappings.at(address + 7, 3)
        assert found is not None
        assert found[1] == 7
    assert mappings.at(sys.maxsize - 10, 1) is None
    os.close(descriptor)


def test_memory_of_this_process_is_in_no_file() -> None:
    array = np.ones(1_000_000, np.uint8)
    assert Mappings().at(array.ctypes.data, array.nbytes) is None
    assert Mappings().at(1, 1) is None


def test_a_process_that_does_not_have_the_file_open() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 100)
    mapping = np.frombuffer(mmap.mmap(descriptor, 100), np.uint8)
    found = Mappings().at(mapping.ctypes.data, 100)
    os.close(descriptor)  # the mapping has another one
    assert found is not None
    assert opened_as(os.getppid(), found[0]) is None
    assert opened_as(2**30, found[0]) is None
