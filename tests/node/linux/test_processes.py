"""The fork server keeps its memory in huge pages, so that forks and exits of workers are fast."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from raylaunch.node.linux import processes
from tests.node.harness import Node

HUGE_PAGE = 2 * 1024 * 1024
COLLAPSE = 25


def kernel_collapses_pages() -> bool:
    with mmap.mmap(-1, 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"." * 2 * HUGE_PAGE)
        view = ctypes.c_char.from_buffer(memory)
        begin = -(-ctypes.addressof(view) // HUGE_PAGE) * HUGE_PAGE
        done = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(HUGE_PAGE), COLLAPSE)
        del view
    return done == 0


def kilobytes(pid: int, name: str) -> int:
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return next(int(row[1]) for row in rows if row[0] == f"{name}:")


@pytest.mark.skipif(not kernel_collapses_pages(), reason="this kernel has no MADV_COLLAPSE")
def test_most_of_the_fork_servers_memory_is_in_huge_pages(torch_node: Node) -> None:
    """Some huge pages are split again in each attempt, so it is not all of the memory."""
    pid = torch_node.supervisor.client.pid

    assert kilobytes(pid, "AnonHugePages") > kilobytes(pid, "Anonymous") / 4


def test_a_mapped_file_whose_name_is_not_utf8(tmp_path: Path) -> None:
    """Python, or a library, may be in such a folder, with line ends of other systems in its name."""
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9\r\x0b\x85\xc2\x85 x.so")
    with open(path, "w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            assert any(os.fsdecode(path) in line for line in processes.lines_of("/proc/self/maps"))
            processes.release_memory()
            processes._collapse_into_huge_pages()  # noqa: SLF001
