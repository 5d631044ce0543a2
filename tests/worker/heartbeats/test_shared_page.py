"""All processes that open the page share its memory, and no other file is taken for a page."""

import os
import subprocess
import sys

import pytest

from raylaunch.worker.heartbeats import shared_page
from raylaunch.worker.heartbeats.shared_page import SharedPage, slot_offset


@pytest.fixture
def created():
    made, fd = SharedPage.create()
    yield made, fd, f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def open_fds():
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


def test_two_mappings_share_memory(created):
    made, _, path = created
    other = SharedPage.open(path)
    made.numbers[shared_page.LEASE_EXPIRES_AT] = 1 << 62
    other.numbers[slot_offset(7) + shared_page.PROGRESS] = 5
    assert (other.numbers[shared_page.LEASE_EXPIRES_AT], made.numbers[slot_offset(7) + shared_page.PROGRESS]) == (
        1 << 62,
        5,
    )


def test_another_process_writes_it(created):
    made, _, path = created
    text = f"from raylaunch.worker.heartbeats import shared_page as page; page.SharedPage.open({path!r}).numbers[page.slot_offset(1) + page.LAST_STEP] = 9"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=250)
    assert made.numbers[slot_offset(1) + shared_page.LAST_STEP] == 9


def test_an_opened_page_keeps_no_file_open(created):
    _, _, path = created
    before = open_fds()
    opened = SharedPage.open(path)
    assert open_fds() == before
    opened.numbers[0] = 1


def test_the_mapping_outlives_the_file_descriptor(created):
    made, fd, path = created
    opened = SharedPage.open(path)
    spare = os.dup(fd)
    os.close(fd)
    opened.numbers[shared_page.LEASE_EXPIRES_AT] = 3
    assert made.numbers[shared_page.LEASE_EXPIRES_AT] == 3
    os.dup2(spare, fd)
    os.close(spare)


def test_reset_clears_everything_but_the_lease(created):
    made = created[0]
    for index in range(len(made.numbers)):
        made.numbers[index] = 1
    made.reset(4, 2)
    assert (
        made.numbers[shared_page.PROPOSED_STEP],
        made.numbers[shared_page.COMMITTED_STEP],
        made.numbers[shared_page.ATTEMPT],
    ) == (
        0,
        0,
        4,
    )
    assert set(made.numbers[slot_offset(0) : slot_offset(2)]) == {0}
    assert made.numbers[shared_page.LEASE_EXPIRES_AT] == 1, "the lease is the node's, not the attempt's"


def test_every_worker_has_a_slot_of_its_own(created):
    made = created[0]
    assert slot_offset(1) - slot_offset(0) > shared_page.OWNER_PID
    slots = slot_offset(shared_page.MAX_WORKERS)
    made.notes(0)[0], made.notes(1)[0] = 7, 8
    assert (made.numbers[slots], made.numbers[slots + len(made.notes(0))]) == (7, 8)
    assert slots + shared_page.MAX_WORKERS * len(made.notes(0)) == len(made.numbers)
    made.reset(2, 1)
    assert (made.notes(0)[0], made.notes(1)[0]) == (0, 8)


@pytest.mark.parametrize("path", ["/proc/999999999/fd/3", "/no/such/file", ""])
def test_a_missing_path_is_an_os_error(path):
    with pytest.raises(OSError, match="No such file"):
        SharedPage.open(path)


def test_another_file_is_never_written(tmp_path):
    """Process ids and file descriptors are used again, and may belong to any file then."""
    with (tmp_path / "weights").open("w+b") as file:
        file.write(b"\1" * 1_000_000)
        file.flush()
        with pytest.raises(OSError, match="there is no page"):
            SharedPage.open(f"/proc/{os.getpid()}/fd/{file.fileno()}")
