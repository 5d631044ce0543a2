"""The page is the same memory for all that open it, and nothing else is ever taken for it."""

import os
import subprocess
import sys

import pytest

from raylaunch.worker import page
from raylaunch.worker.page import Page, slot


@pytest.fixture
def created():
    made, fd = Page.create()
    yield made, fd, f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def open_fds():
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


def test_what_one_writes_another_reads(created):
    made, _, path = created
    other = Page.open(path)
    made.numbers[page.LEASE] = 1 << 62
    other.numbers[slot(7) + page.MARKS] = 5
    assert (other.numbers[page.LEASE], made.numbers[slot(7) + page.MARKS]) == (1 << 62, 5)


def test_another_process_writes_it(created):
    made, _, path = created
    text = f"from raylaunch.worker import page; page.Page.open({path!r}).numbers[page.slot(1) + page.STEP] = 9"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=250)
    assert made.numbers[slot(1) + page.STEP] == 9


def test_an_opened_page_keeps_no_file_open(created):
    _, _, path = created
    before = open_fds()
    opened = Page.open(path)
    assert open_fds() == before
    opened.numbers[0] = 1


def test_it_outlives_the_file(created):
    made, fd, path = created
    opened = Page.open(path)
    spare = os.dup(fd)
    os.close(fd)
    opened.numbers[page.LEASE] = 3
    assert made.numbers[page.LEASE] == 3
    os.dup2(spare, fd)
    os.close(spare)


def test_a_new_attempt_begins_with_nothing_of_the_one_before(created):
    made = created[0]
    for index in range(len(made.numbers)):
        made.numbers[index] = 1
    made.begin(4, 2)
    assert (made.numbers[page.ASK], made.numbers[page.SETTLED], made.numbers[page.ATTEMPT]) == (0, 0, 4)
    assert set(made.numbers[slot(0) : slot(2)]) == {0}
    assert made.numbers[page.LEASE] == 1, "the lease is the node's, not the attempt's"


def test_every_worker_has_a_slot_of_its_own(created):
    made = created[0]
    assert slot(1) - slot(0) > page.OWNER
    assert slot(page.MOST_WORKERS) == len(made.numbers)


@pytest.mark.parametrize("path", ["/proc/999999999/fd/3", "/no/such/file", ""])
def test_a_path_that_leads_nowhere_is_an_os_error(path):
    with pytest.raises(OSError, match="No such file"):
        Page.open(path)


def test_another_file_is_never_written(tmp_path):
    """Process ids and file numbers come again; what has them then must not be harmed."""
    with (tmp_path / "weights").open("w+b") as file:
        file.write(b"\1" * 1_000_000)
        file.flush()
        with pytest.raises(OSError, match="there is no page"):
            Page.open(f"/proc/{os.getpid()}/fd/{file.fileno()}")
