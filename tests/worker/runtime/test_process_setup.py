"""Only the user can read the folders of a run, on every node and whatever the umask."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.worker.runtime import process_setup
from raylaunch.worker.runtime.process_setup import (
    close_other_fds,
    is_of_nvml,
    make_private_dir,
    refuse_strangers,
    without_waiting,
)


@pytest.fixture(autouse=True)
def umask_0() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_of_a_run_are_private(tmp_path):
    """Folders above the run's have the mode that the umask gives."""
    rank = tmp_path / "runs" / "name" / "run" / "attempt-1" / "rank-0"
    make_private_dir(str(rank), private_parents=2)
    make_private_dir(str(rank.with_name("rank-1")), private_parents=2)
    assert [mode(path) for path in (rank, *rank.parents[:4])] == [0o700, 0o700, 0o700, 0o777, 0o777]
    assert mode(rank.with_name("rank-1")) == 0o700


def test_an_existing_folder_is_left_as_it_is(tmp_path):
    """Another worker may have just made it. A file of that name is an error."""
    (tmp_path / "file").touch()
    make_private_dir(str(tmp_path), private_parents=2)
    with pytest.raises(NotADirectoryError):
        make_private_dir(str(tmp_path / "file" / "rank-0"), private_parents=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_what_a_stranger_prepared_is_refused(tmp_path):
    """A folder may belong to the driver's user, who need not be the worker's; a link may not."""
    shared = tmp_path / "shared"
    run, link = shared / "run", shared / "link"
    run.mkdir(parents=True)
    link.symlink_to(run)
    shared.chmod(0o1777)
    for path in (run, link):
        refuse_strangers(str(path), ())
        os.chown(path, 12345, 12345, follow_symlinks=False)
        refuse_strangers(str(path), [12345])
        with pytest.raises(PermissionError, match=f"{path} belongs to another user"):
            refuse_strangers(str(path), ())
    refuse_strangers(str(run), (), links_only=True)
    with pytest.raises(PermissionError, match=f"{link} belongs to another user"):
        refuse_strangers(str(link / "."), (), links_only=True)
    shared.chmod(0o755)
    refuse_strangers(str(link), ())


REDIRECTS = """
import os, sys
from raylaunch.worker.runtime import process_setup
process_setup.append_output("run/first/out", "run/first/err")
os.dup2(os.open("mine", os.O_RDWR | os.O_CREAT), 1)
process_setup.append_output("run/next/out", "run/next/err")
os.write(1, b"output")
os.write(2, b"error")
os.close(2)
process_setup.append_output("run/last/out", "run/last/err")
assert os.open("checkpoint", os.O_RDWR | os.O_CREAT) == 2
"""


def test_a_stream_that_the_script_has_redirected_or_closed_stays_so(tmp_path):
    """A worker that stays in another attempt gets other log files, only for streams that are still its own."""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", REDIRECTS], cwd=tmp_path, env={"PYTHONPATH": str(root)}, check=True)
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: text for path, text in written.items() if text} == {"mine": "output", "run/next/err": "error"}


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND])
def test_a_named_pipe_in_the_place_of_a_file(tmp_path, flags):
    """It is refused at once, with or without a process at its other end; a file is opened as ever."""
    path = str(tmp_path / "stderr.log")
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        without_waiting(path, flags)
    other = os.open(path, os.O_RDWR)
    with pytest.raises(OSError, match="not a regular file"):
        without_waiting(path, flags)
    os.close(other)
    os.unlink(path)
    (tmp_path / "stderr.log").touch()
    fd = without_waiting(path, flags)
    assert os.get_blocking(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/dev/nvidiactl", True), ("/dev/nvidia0", True), ("/dev/nvidia-uvm", False), ("/dev/kfd", False), ("/", False)],
)
def test_which_files_are_nvml_s(path, expected):
    assert is_of_nvml(path) is expected


def test_files_of_nvml_stay_open(tmp_path, monkeypatch):
    """NVML may have been begun in the process that this one was forked from: it would use files that are closed."""
    (tmp_path / "nvidiactl").touch()
    opened = [os.open(path, os.O_RDONLY) for path in (tmp_path / "nvidiactl", os.devnull, os.devnull)]
    monkeypatch.setattr(process_setup, "is_of_nvml", lambda path: path == str(tmp_path / "nvidiactl"))
    pid = os.fork()
    if not pid:
        close_other_fds(opened[2])
        left = {int(name) for name in os.listdir("/proc/self/fd") if int(name) in opened}
        os._exit(0 if left == {opened[0], opened[2]} else 1)
    assert os.waitpid(pid, 0)[1] == 0
    for fd in opened:
        os.close(fd)
