"""Log files are followed as they grow, in whole lines and to their end; a large backlog is cut with a notice."""

from __future__ import annotations

import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raylaunch.core.job.job import Job
from raylaunch.core.job.outputs import view
from raylaunch.core.placement.environment import Assignment
from raylaunch.core.record.run_layout import LAYOUTS
from raylaunch.node.linux import scratch
from raylaunch.node.linux.inotify import Inotify
from raylaunch.node.logs import tail
from raylaunch.node.logs.log_times import LogTimes
from raylaunch.node.logs.tail import LinePrefixer, LogOutput, LogTailer
from raylaunch.node.supervisor import process_failure
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.runtime.output_order import OutputOrder
from tests.node.harness import MessagePipe, running, until

MUCH = 1024 * 1024 * 1024


class Followed:
    """The log files of a node, and what is shown of them."""

    def __init__(
        self,
        folder: Path,
        *,
        nproc: int = 1,
        kept: bool = True,
        chunk: int = tail.CHUNK_BYTES,
        max_backlog: int = tail.MAX_BACKLOG_BYTES,
        **settings: object,
    ) -> None:
        self.folder = folder
        self.tails = LogTailer(chunk=chunk, max_backlog=max_backlog)
        self.nproc = nproc
        self.kept = kept
        self.page, fd = SharedPage.create()
        os.close(fd)
        self.view = view(Job(**{"show": "raw"} | settings))  # type: ignore[arg-type]
        self.launch(1)

    def launch(self, attempt: int) -> None:
        part = Assignment(
            attempt=attempt,
            node="node-1",
            node_rank=0,
            nnodes=1,
            base_rank=0,
            nproc=self.nproc,
            world_size=self.nproc,
        )
        self.page.reset(attempt, self.nproc)
        names = LAYOUTS["raylaunch"]
        self.tails.add(tail.log_sources(self.view, part, names, str(self.folder), kept=self.kept, page=self.page))

    def close(self) -> None:
        self.tails.close()
        self.page.close()

    def note(self, stdout: int, stderr: int, *, rank: int = 0) -> None:
        """Make the note of a worker that turns to its other output."""
        notes = self.page.notes(rank)
        at = 1 + 2 * (notes[0] % (len(notes) // 2))
        notes[at], notes[at + 1] = stdout, stderr
        notes[0] += 1

    def write(self, data: bytes, *, rank: int = 0, attempt: int = 1, stream: str = "stdout") -> Path:
        path = self.folder / f"attempt-{attempt}" / f"rank-{rank}" / f"{stream}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(data)
        return path

    def read(self, most: int = MUCH) -> bytes:
        return b"".join(output.data for output in self.outputs(most))

    def outputs(self, most: int = MUCH) -> list[LogOutput]:
        return self.tails.read(most)

    def end(self, attempt: int = 1) -> bytes:
        self.tails.end_attempt(attempt)
        found = b""
        while self.tails.has_backlog:
            found += self.read()
        return found


Follow = Callable[..., Followed]


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[..., Followed]]:
    made: list[Followed] = []

    def make(**settings: object) -> Followed:
        made.append(Followed(tmp_path, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for found in made:
        found.close()


@pytest.fixture
def followed(follow: Follow) -> Followed:
    return follow()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Replaces time.monotonic; set `later[0]` to the time."""
    passed = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    yield passed
    monkeypatch.undo()


# Lines.


@pytest.mark.parametrize(
    ("prefix", "parts", "shown"),
    [
        (b"", [b"one\ntw", b"o\n"], [b"one\n", b"two\n"]),
        (b"[0] ", [b"one\ntwo\nth", b"", b"ree\n"], [b"[0] one\n[0] two\n", b"", b"[0] three\n"]),
        (b"[0] ", [b"\n\n"], [b"[0] \n[0] \n"]),
        (b"[0] ", [b"10%\r20%\r", b"30%\n"], [b"[0] 10%\r[0] 20%\r", b"[0] 30%\n"]),
        (b"[0] ", [b"dos\r\nfile\r\n"], [b"[0] dos\r\n[0] file\r\n"]),
        (b"[0] ", [b"dos\r", b"\nfile\r", b"mac\r"], [b"[0] dos\r", b"\n[0] file\r", b"[0] mac\r"]),
        (b"[0] ", [b"dos\r", b"\n", b"x\n"], [b"[0] dos\r", b"\n", b"[0] x\n"]),
        (b"", [b"\xff\x00\xfe\n\x80"], [b"\xff\x00\xfe\n"]),
        (b"\\1\\g<0>", [b"x\n"], [b"\\1\\g<0>x\n"]),
        (None, [b"one\n", b"\n"], [b"", b""]),
    ],
)
def test_lines(prefix: bytes | None, parts: list[bytes], shown: list[bytes]) -> None:
    """Only whole lines are returned, each with its prefix. A carriage return ends a line."""
    found = LinePrefixer(prefix)
    assert [found.add(part) for part in parts] == shown


def test_a_line_that_is_shown_in_parts_has_one_prefix() -> None:
    """For example a prompt, its answer, and the next line."""
    found = LinePrefixer(b"[0] ")
    assert found.add(b"name? ") == b""
    assert [found.flush(), found.flush()] == [b"[0] name? ", b""]
    assert found.add(b"who") == b""
    assert found.flush() == b"who"
    assert found.add(b"\nnext\n") == b"\n[0] next\n"


def test_a_line_that_never_ends_is_shown_in_parts() -> None:
    """Otherwise it would fill the memory. Nothing of it is lost."""
    found = LinePrefixer(b"[0] ", limit=10)
    parts = [found.add(b"x" * 4) for _ in range(6)]
    assert b"".join(parts) + found.finish() == b"[0] " + b"x" * 24 + b"\n"
    assert parts[:2] == [b"", b""]


@pytest.mark.parametrize(("prefix", "shown"), [(b"[0] ", b"[0] half\n"), (b"", b"half"), (None, b"")])
def test_a_last_line_without_its_end(prefix: bytes | None, shown: bytes) -> None:
    """It gets a line end where lines have prefixes, so that the next line starts anew."""
    found = LinePrefixer(prefix)
    found.add(b"half")
    assert found.finish() == shown


# Files.


def test_a_missing_file_is_empty(followed: Followed) -> None:
    """The file of a worker may appear later, or never."""
    assert followed.read() == b""
    followed.write(b"late\n")
    assert followed.read() == b"late\n"
    assert followed.end() == b""


def test_partial_lines_wait_for_their_end(followed: Followed) -> None:
    """Half a line is not shown until the rest is there."""
    followed.write(b"one\ntw")
    assert [followed.read(), followed.read()] == [b"one\n", b""]
    followed.write(b"o\n")
    assert followed.read() == b"two\n"


def test_at_the_end_the_last_line_needs_no_newline(followed: Followed) -> None:
    """It is shown when the attempt ends, and only once."""
    followed.write(b"one\nhalf", stream="stderr")
    assert followed.end() == b"one\nhalf"
    assert followed.end() == b""


def test_a_prompt_is_shown_after_a_while(followed: Followed, later: list[float]) -> None:
    """If only one rank is shown, so is its incomplete line after a second without a write."""
    followed.launch(2)
    followed.write(b"name? ", attempt=2)
    assert followed.read() == b""
    later[0] = 0.9
    followed.write(b"really? ", attempt=2)
    assert followed.read() == b""
    later[0] = 1.8
    assert followed.read() == b""
    later[0] = 2.0
    assert followed.read() == b"name? really? "
    assert followed.read() == b""


def test_a_prompt_among_several_ranks_waits(follow: Follow, later: list[float]) -> None:
    """Otherwise the line of another rank would follow it on the same line."""
    followed = follow(nproc=2)
    followed.write(b"name? ")
    assert followed.read() == b""
    later[0] = 5.0
    assert followed.read() == b""
    assert followed.end() == b"name? "


def test_each_output_names_its_rank_and_its_stream(follow: Follow) -> None:
    """The driver needs both."""
    followed = follow(nproc=4, show="0,3", tee=2)
    followed.write(b"out\n")
    followed.write(b"not shown\n", rank=1)
    followed.write(b"err\n", rank=3, stream="stderr")
    assert followed.outputs() == [
        LogOutput(rank=0, stream="stdout", data=b"[0] out\n"),
        LogOutput(rank=3, stream="stderr", data=b"[default3]:err\n"),
    ]


def test_a_read_takes_turns_between_files(follow: Follow) -> None:
    """A worker that writes very much delays neither the others nor a restart."""
    followed = follow(nproc=2, chunk=10)
    followed.write(b"flood----\n" * 100)
    followed.write(b"word\n", rank=1)
    assert followed.read(most=20) == b"flood----\nword\nflood----\n"
    assert followed.end() == b"flood----\n" * 98


# The order of stdout and stderr.


def test_output_is_in_the_order_in_which_it_was_written(follow: Follow) -> None:
    """Whatever is read at once: both files are read as far as they were when the worker turned to the other one."""
    followed = follow(nproc=2)
    for rank in range(2):
        followed.write(b"a\n", rank=rank)
        followed.note(2, 0, rank=rank)
        followed.write(b"b\n", rank=rank, stream="stderr")
        followed.note(2, 2, rank=rank)
        followed.write(b"cc\n", rank=rank)
    assert [followed.read().replace(b"\n", b"") for _ in range(2)] == [b"aabbcccc", b""]
    followed.note(5, 2)
    followed.write(b"d\n", stream="stderr")
    followed.note(5, 4)
    followed.write(b"e\n")
    assert followed.read(1) == b"d\n"
    assert followed.read() == b"e\n"
    followed.note(7, 4)
    followed.write(b"f\n", stream="stderr")
    followed.note(7, 6)
    followed.write(b"g\n")
    assert followed.end() == b"f\ng\n"


def test_a_call_reads_few_of_many_small_pieces(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that there is more, and the next one goes on there: an agent has other things to do too."""
    followed = follow(nproc=8)
    text = b"".join(b"%d\n" % number for number in range(100, 500))
    for rank in range(8):
        for size in range(0, len(text), 8):
            followed.note(size // 2, size // 2, rank=rank)
            followed.note(size // 2 + 4, size // 2, rank=rank)
        for stream, first in (("stdout", 0), ("stderr", 4)):
            followed.write(b"".join(text[at : at + 4] for at in range(first, len(text), 8)), rank=rank, stream=stream)
    pread, reads, found, calls = os.pread, [], dict.fromkeys(range(8), b""), 0
    monkeypatch.setattr(tail.os, "pread", lambda *asked: (reads.append(asked), pread(*asked))[1])
    while calls == 0 or followed.tails.has_more:
        before = len(reads)
        for output in followed.outputs():
            found[output.rank] += output.data
        assert len(reads) - before < 300
        calls += 1
    assert found == dict.fromkeys(range(8), text)
    assert calls > 5
    assert followed.read() == b""


def test_output_beyond_the_size_before_the_notes_waits(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been written after a note that has not been read."""
    followed = follow()
    followed.write(b"a\n")
    read = OutputOrder.read

    def late(order: OutputOrder) -> None:
        read(order)
        monkeypatch.undo()
        followed.write(b"b\n", stream="stderr")
        followed.note(2, 2)
        followed.write(b"c\n")

    monkeypatch.setattr(OutputOrder, "read", late)
    assert followed.read() == b"a\n"
    assert followed.read() == b"b\nc\n"


def test_notes_that_do_not_fit_the_files(follow: Follow) -> None:
    """Too many, sizes that a file never has, those of another attempt, a page that is closed: all output is shown."""
    followed = follow()
    for _ in range(len(followed.page.notes(0))):
        followed.note(10**9, 3)
    followed.write(b"a\n")
    followed.write(b"b\n", stream="stderr")
    assert followed.read() == b"a\nb\n"
    followed.page.reset(2, 1)
    followed.write(b"c\n")
    followed.write(b"d\n", stream="stderr")
    followed.page.close()
    assert followed.end() == b"c\nd\n"


def test_the_next_attempt_waits_for_the_end_of_the_one_before(follow: Follow) -> None:
    """The output of one rank stays in order, however fast attempts follow each other."""
    followed = follow(nproc=1, chunk=10)
    followed.write(b"first----\n" * 10 + b"last words")
    followed.launch(2)
    followed.write(b"second\n", attempt=2)
    followed.tails.end_attempt(1)
    found = []
    while followed.tails.has_backlog:
        found.append(followed.read(most=25))
    found.append(followed.read())
    assert len(found) > 3
    assert b"".join(found) == b"first----\n" * 10 + b"last words" + b"second\n"


def test_what_is_written_after_the_attempt_is_not_shown(followed: Followed) -> None:
    """Grandchildren of a worker may go on writing, so the end would never be reached."""
    path = followed.write(b"early\n")
    followed.tails.end_attempt(1)
    followed.write(b"late\n")
    assert followed.read() == b"early\n"
    assert not followed.tails.has_backlog
    assert followed.read() == b""
    assert path.read_bytes() == b"early\nlate\n"


def test_a_log_that_the_script_truncates(followed: Followed) -> None:
    """It is read from its new beginning."""
    path = followed.write(b"long ago\n" * 10)
    followed.read()
    os.truncate(path, 0)
    assert followed.read() == b""
    followed.write(b"anew\n")
    assert followed.read() == b"anew\n"


def test_files_are_opened_once_and_closed_at_the_end(follow: Follow) -> None:
    """So are the files of the filters and of the times, and those of a run that ends early."""
    outside = len(os.listdir("/proc/self/fd"))
    followed = follow(nproc=8, duplicate_stdout_filters=["x"])
    before = outside + 1  # with that of inotify
    for attempt in (1, 2):
        for rank in range(8):
            followed.write(b"x\n", rank=rank, attempt=attempt)
            followed.write(b"y\n", rank=rank, attempt=attempt, stream="stderr")
    for _ in range(3):
        followed.read()
    assert len(os.listdir("/proc/self/fd")) == before + 8 + 2 * 16
    followed.launch(2)
    followed.end(1)
    followed.read()
    assert len(os.listdir("/proc/self/fd")) == before + 8 + 2 * 16
    followed.tails.close()
    assert len(os.listdir("/proc/self/fd")) == outside


def test_of_a_large_backlog_the_end_is_shown_with_a_notice(follow: Follow) -> None:
    """The notice on stderr says how much is left out, and which file has it."""
    followed = follow(nproc=2, max_backlog=20)
    path = followed.write(b"half a line")
    followed.read()
    followed.write(b"a" * 90 + b"b" * 10)
    followed.write(b"short\n", rank=1)
    followed.tails.end_attempt(1)
    found = followed.outputs()
    assert found == [
        LogOutput(rank=0, stream="stdout", data=b"half a line"),
        LogOutput(
            rank=0,
            stream="stderr",
            data=f"raylaunch: 90 bytes of rank 0's stdout are not shown; all of it is in {path}\n".encode(),
        ),
        LogOutput(rank=1, stream="stdout", data=b"short\n"),
        LogOutput(rank=0, stream="stdout", data=b"b" * 10),
    ]
    assert not followed.tails.has_backlog


# Times.


def test_when_logs_grew_is_noted(tmp_path: Path, follow: Follow) -> None:
    """Also of ranks that are not shown, whose files are not read; and once for each look, however much was written."""
    followed = follow(nproc=2, show="0")
    followed.read()
    grown = []
    for rank in (0, 1, 1):
        path = followed.write(b"one\ntwo\n", rank=rank)
        grown.append((followed.read(), followed.tails.has_grown))
    assert grown == [(b"one\ntwo\n", True), (b"", True), (b"", True)]
    assert (followed.read(), followed.tails.has_grown, followed.tails.has_more) == (b"", False, False)
    with path.open("rb") as log:
        times = LogTimes(str(path.with_suffix(".times")), log.fileno())
        noted = list(times.between(0, 16))
        times.close()
        assert noted == [(8, noted[0][1]), (16, os.fstat(log.fileno()).st_mtime)]
    assert followed.end() == b""
    assert sorted(path.name for path in tmp_path.rglob("*.times")) == ["stdout.times"] * 2


def test_logs_that_are_not_kept_have_no_times(tmp_path: Path, follow: Follow) -> None:
    """Nothing is to stay."""
    followed = follow(nproc=2, kept=False)
    for rank in (0, 1):
        followed.write(b"one\n", rank=rank)
    followed.end()
    assert list(tmp_path.rglob("*.times")) == []


# inotify.


def test_the_next_write_to_any_log_wakes_once(follow: Follow) -> None:
    """After that the files must be watched again. `watch` returns False while a file does not exist."""
    followed = follow(nproc=2)
    inotify = followed.tails.inotify
    followed.write(b"one\n")
    followed.read()
    assert not followed.tails.watch(), "the log of rank 1 does not exist yet"
    followed.write(b"two\n", rank=1)
    for stream in ("stdout", "stderr"):
        for rank in range(2):
            followed.write(b"", rank=rank, stream=stream)
    followed.read()
    assert followed.tails.watch()
    assert not _readable(inotify)
    followed.write(b"three\n", rank=1)
    assert _readable(inotify)
    inotify.drain()
    followed.write(b"four\n", rank=1)
    assert not _readable(inotify)
    assert followed.tails.watch()
    followed.write(b"five\n", rank=1)
    assert _readable(inotify)


def test_watches_end_with_their_attempt(follow: Follow) -> None:
    """A log that stays on the disk would keep its watch, and the user has a limited number of them."""
    followed = follow()
    counts = []
    for attempt in range(1, 31):
        if attempt > 1:
            followed.launch(attempt)
        for stream in ("stdout", "stderr"):
            followed.write(b"step 1\n", attempt=attempt, stream=stream)
        followed.read()
        assert followed.tails.watch()
        counts.append(_watches(followed.tails.inotify))
        followed.end(attempt)
    assert counts == [2] * 30
    assert _watches(followed.tails.inotify) == 0


def _watches(inotify: Inotify) -> int:
    return Path(f"/proc/self/fdinfo/{inotify.fileno()}").read_text().count("inotify wd:")


def test_without_inotify(followed: Followed) -> None:
    """`watch` returns False, and `read` works."""
    followed.tails.inotify.close()
    followed.write(b"one\n")
    followed.write(b"", stream="stderr")
    assert followed.read() == b"one\n"
    assert not followed.tails.watch()


def test_an_incomplete_line_needs_a_poll(follow: Follow) -> None:
    """No write wakes the reader when it is time to show it. Among several ranks it is not shown at all."""
    for nproc, interval in ((1, tail.PROMPT_SECONDS), (2, None)):
        followed = follow(nproc=nproc)
        assert followed.tails.poll_interval is None
        followed.write(b"name? ")
        followed.read()
        assert followed.tails.poll_interval == interval
        followed.tails.close()


def _readable(inotify: Inotify) -> bool:
    return bool(select.select([inotify.fileno()], [], [], 0)[0])


# Filters.


def test_matching_lines_are_copied(tmp_path: Path, follow: Follow) -> None:
    """They have torchrun's prefix, are whole, and of all ranks, whatever is shown."""
    followed = follow(nproc=2, show="none", duplicate_stdout_filters=["loss", "acc"])
    for rank in range(2):
        followed.write(b"start\nlo", rank=rank)
        followed.read()
        followed.write(b"ss 1\rloss 2\r\nthe end\nacc 0.9", rank=rank)
    assert followed.end() == b""
    copied = (tmp_path / "attempt-1" / "filtered_stdout.log").read_text().splitlines()
    for rank in range(2):
        prefix = f"[default{rank}]:"
        assert [line for line in copied if line.startswith(prefix)] == [
            f"{prefix}{text}" for text in ("loss 1", "loss 2", "acc 0.9")
        ]
    assert len(copied) == 6
    assert not (tmp_path / "attempt-1" / "filtered_stderr.log").exists()


def test_the_filter_gets_whole_lines(tmp_path: Path, follow: Follow, later: list[float]) -> None:
    """Even if a part of the line was shown before its end."""
    followed = follow(duplicate_stderr_filters=["answer: 42"])
    followed.write(b"answer: ", stream="stderr")
    followed.read()
    later[0] = time.monotonic() + 2.0
    assert followed.read() == b"answer: "
    followed.write(b"42\n", stream="stderr")
    assert followed.read() == b"42\n"
    filtered = tmp_path / "attempt-1" / "filtered_stderr.log"
    assert filtered.read_text() == "[default0]:answer: 42\n"
    assert stat.S_IMODE(filtered.stat().st_mode) == 0o600


def test_the_filtered_log_is_complete_after_a_large_backlog(tmp_path: Path, follow: Follow) -> None:
    """What is left out is only left out of the terminal."""
    followed = follow(max_backlog=100, chunk=100, duplicate_stdout_filters=["x"])
    followed.write(b"".join(b"x%08d\n" % number for number in range(100)))
    shown = followed.end()
    assert b"900 bytes of rank 0's stdout are not shown" in shown
    assert shown.endswith(b"x00000099\n")
    assert b"x00000050" not in shown
    copied = (tmp_path / "attempt-1" / "filtered_stdout.log").read_text().splitlines()
    assert copied == [f"[default0]:x{number:08d}" for number in range(100)]


# Where nothing is kept.


def test_disk_space_is_freed_after_the_read(tmp_path: Path, follow: Follow) -> None:
    """The end of the file stays for the failure report. It is also freed where nothing is shown."""
    followed = follow(kept=False, show="none")
    line = b"x" * 1023 + b"\n"
    path = followed.write(line * 4096)
    if not _punches_holes(tmp_path):
        pytest.skip("this file system cannot punch holes")
    assert followed.read() == b""
    assert path.stat().st_size == 4 * 1024 * 1024
    assert path.stat().st_blocks * 512 < 2 * 1024 * 1024
    followed.write(b"the end\n")
    assert process_failure.tail(path).endswith("xxx\nthe end")
    followed.tails.close()


def test_logs_that_are_not_kept_are_removed_when_all_is_read(tmp_path: Path, follow: Follow) -> None:
    """Else those of a thousand attempts would fill the folder for temporary files."""
    followed = follow(nproc=2, kept=False)
    for attempt in range(1, 31):
        if attempt > 1:
            followed.launch(attempt)
        for rank in range(2):
            for stream in ("stdout", "stderr"):
                path = followed.write(f"{rank}\n".encode(), rank=rank, attempt=attempt, stream=stream)
        (path.parent / "error.json").touch()
        assert followed.read() == b"0\n0\n1\n1\n"
        assert len([*tmp_path.iterdir()]) == 1
        followed.end(attempt)
        assert [*tmp_path.iterdir()] == []


def _punches_holes(folder: Path) -> bool:
    path = folder / "probe"
    path.write_bytes(b"x" * 1024 * 1024)
    with path.open("r+b") as file:
        scratch.discard_before(file.fileno(), 1024 * 1024)
    return path.stat().st_blocks * 512 < 1024 * 1024


def test_a_node_that_keeps_nothing(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """Its workers write to a scratch folder, have no error file, and their failures name no files."""
    with running(run_dir="", preload=()) as node:
        folder = node.supervisor.spec.run_dir
        assert os.stat(folder).st_mode & 0o077 == 0
        node.use_for_test(tmp_path, mark, pipe)
        node.set(run_dir=folder)
        script = node.script("import os; print(repr(os.environ['TORCHELASTIC_ERROR_FILE'])); os.abort()")
        outcome = node.run(script)
        assert outcome.stdout() == "''\n"
        failure = outcome.failure
        assert (failure.stdout, failure.stderr, failure.error_file) == ("", "", "")
        assert "Aborted" in failure.tail
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)


DIES = """
import os, sys, time
from pathlib import Path
from tests.node.harness import Node, basic_env
node = Node(run_dir="", preload=())
node.start()
print(node.supervisor.spec.run_dir, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_scratch_folder_of_a_killed_agent_is_removed() -> None:
    """The subreaper, which outlives the agent, does it."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", DIES], cwd=root, capture_output=True, text=True, timeout=250, check=False
    )
    folder = done.stdout.strip()
    assert folder, done.stderr
    until(lambda: not os.path.exists(folder), "the folder is left")


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    """The failure report has the last twenty lines of stderr, and nothing of a missing file."""
    file = tmp_path / "stderr.log"
    assert process_failure.tail(file) == ""
    file.write_bytes(b"".join(b"%d\n" % number for number in range(100_000)) + b"\xff\n")
    lines = process_failure.tail(file).splitlines()
    assert lines[0] == "99981"
    assert lines[-2:] == ["99999", "\ufffd"]
    assert len(lines) == 20


def test_the_tail_of_an_aborted_process_has_the_error(tmp_path: Path) -> None:
    """NCCL's watchdog prints its error, frames, what it throws, and more frames; faulthandler all threads."""
    frames = "".join(
        f"frame #{number}: c10d::ProcessGroupNCCL::run() + 0x{number}e (0x7f in libtorch_cuda.so)\n"
        for number in range(20)
    )
    error = "Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n"
    threads = "".join(
        f'Thread 0x7f{number} (most recent call first):\n  File "train.py", line 3 in step\n' for number in range(40)
    )
    text = (
        f"epoch 3\n[rank0]:[E117 11:40:54 ProcessGroupNCCL.cpp:1595] {error}For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        f"{frames}\nterminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {error}{frames}"
        f"Fatal Python error: Aborted\n\n{threads}Extension modules: numpy, torch._C (total: 2)\n"
    )
    file = tmp_path / "stderr.log"
    file.write_text(text)
    lines = process_failure.tail(file).splitlines()
    assert lines[0] == "epoch 3"
    assert lines[-1] == f"  what():  {error}".rstrip()
    assert not any(line.startswith("frame") for line in lines)


def test_the_tail_of_a_killed_process_has_its_stack(tmp_path: Path) -> None:
    """After a signal that nothing has thrown for, the stack of Python is all there is."""
    file = tmp_path / "stderr.log"
    error = "epoch 3\nFatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):\n"
    script = '  File "/job/train.py", line 3 in step'
    own = '  File "/code/raylaunch/worker/runtime/entry.py", line 87 in run_script\n' * 9
    file.write_text(f"{error}{script}\n{own}\nExtension modules: {', '.join(map(str, range(129)))} (total: 129)\n")
    assert process_failure.tail(file) == error + script
