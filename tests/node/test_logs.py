"""Log files are followed as they grow, in whole lines, to their end, and a flood is cut with a notice."""

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

from raylaunch.core.contract import LAYOUTS
from raylaunch.core.job import Job
from raylaunch.core.ranks import Assignment
from raylaunch.core.streams import view
from raylaunch.node import deaths, lines, logs, spool
from raylaunch.node.growth import Growth
from raylaunch.node.lines import Lines
from raylaunch.node.logs import Output, Tails
from tests.node.harness import Ears, running, until

MUCH = 1024 * 1024 * 1024


class Followed:
    """The logs of one attempt on one node, and what is shown of them."""

    def __init__(self, folder: Path, *, nproc: int = 1, kept: bool = True, **settings: object) -> None:
        self.folder = folder
        self.tails = Tails()
        self.nproc = nproc
        self.kept = kept
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
        self.tails.add(logs.sources(self.view, part, LAYOUTS["raylaunch"], str(self.folder), kept=self.kept))

    def write(self, data: bytes, *, rank: int = 0, attempt: int = 1, stream: str = "stdout") -> Path:
        path = self.folder / f"attempt-{attempt}" / f"rank-{rank}" / f"{stream}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(data)
        return path

    def read(self, most: int = MUCH) -> bytes:
        return b"".join(output.data for output in self.outputs(most))

    def outputs(self, most: int = MUCH) -> list[Output]:
        return self.tails.read(most)

    def end(self, attempt: int = 1) -> bytes:
        self.tails.end(attempt)
        found = b""
        while self.tails.behind:
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
        found.tails.close()


@pytest.fixture
def followed(follow: Follow) -> Followed:
    return follow()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds that have passed."""
    passed = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    yield passed
    monkeypatch.undo()


# Lines.


@pytest.mark.parametrize(
    ("header", "parts", "shown"),
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
def test_lines(header: bytes | None, parts: list[bytes], shown: list[bytes]) -> None:
    """Whole ones only, each with its header; a carriage return ends one, and keeps its newline."""
    found = Lines(header)
    assert [found.add(part) for part in parts] == shown


def test_a_line_of_which_a_part_was_shown_has_one_header() -> None:
    """A prompt, its answer, the next line."""
    found = Lines(b"[0] ")
    assert found.add(b"name? ") == b""
    assert [found.so_far(), found.so_far()] == [b"[0] name? ", b""]
    assert found.add(b"who") == b""
    assert found.so_far() == b"who"
    assert found.add(b"\nnext\n") == b"\n[0] next\n"


def test_a_line_that_never_ends_is_shown_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot hold back the following for good, nor fill the memory; nothing of it is lost."""
    monkeypatch.setattr(lines, "_LONGEST", 10)
    found = Lines(b"[0] ")
    parts = [found.add(b"x" * 4) for _ in range(6)]
    assert b"".join(parts) + found.finish() == b"[0] " + b"x" * 24 + b"\n"
    assert parts[:2] == [b"", b""]


@pytest.mark.parametrize(("header", "shown"), [(b"[0] ", b"[0] half\n"), (b"", b"half"), (None, b"")])
def test_a_last_line_without_its_end(header: bytes | None, shown: bytes) -> None:
    """Where lines have headers it gets one, so that the next does not stand behind it."""
    found = Lines(header)
    found.add(b"half")
    assert found.finish() == shown


# Files.


def test_a_missing_file_is_empty(followed: Followed) -> None:
    """A worker that has not begun has said nothing; its file may come later, or never."""
    assert followed.read() == b""
    followed.write(b"late\n")
    assert followed.read() == b"late\n"
    assert followed.end() == b""


def test_partial_lines_wait_for_their_end(followed: Followed) -> None:
    """Half a line is held back until the rest comes."""
    followed.write(b"one\ntw")
    assert [followed.read(), followed.read()] == [b"one\n", b""]
    followed.write(b"o\n")
    assert followed.read() == b"two\n"


def test_at_the_end_the_last_line_needs_no_newline(followed: Followed) -> None:
    """The last words of a dying worker are shown, and only once."""
    followed.write(b"one\nhalf", stream="stderr")
    assert followed.end() == b"one\nhalf"
    assert followed.end() == b""


def test_a_prompt_is_shown_after_a_while(followed: Followed, later: list[float]) -> None:
    """Where one rank alone is shown."""
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
    """It would stand before the line of another."""
    followed = follow(nproc=2)
    followed.write(b"name? ")
    assert followed.read() == b""
    later[0] = 5.0
    assert followed.read() == b""
    assert followed.end() == b"name? "


def test_each_output_names_its_rank_and_its_stream(follow: Follow) -> None:
    """So that the driver knows where it goes."""
    followed = follow(nproc=4, show="0,3", tee=2)
    followed.write(b"out\n")
    followed.write(b"not shown\n", rank=1)
    followed.write(b"err\n", rank=3, stream="stderr")
    assert followed.outputs() == [
        Output(rank=0, stream="stdout", data=b"[0] out\n"),
        Output(rank=3, stream="stderr", data=b"[default3]:err\n"),
    ]


def test_one_turn_reads_little_of_each(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that floods its log delays neither the others nor a restart."""
    monkeypatch.setattr(logs, "_CHUNK", 10)
    followed = follow(nproc=2)
    followed.write(b"flood----\n" * 100)
    followed.write(b"word\n", rank=1)
    assert followed.read(most=20) == b"flood----\nword\nflood----\n"
    assert followed.end() == b"flood----\n" * 98


def test_the_next_attempt_waits_for_the_end_of_the_one_before(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output of one rank stays in order, however fast attempts follow each other, and however long the last words."""
    monkeypatch.setattr(logs, "_CHUNK", 10)
    followed = follow(nproc=1)
    followed.write(b"first----\n" * 10 + b"last words")
    followed.launch(2)
    followed.write(b"second\n", attempt=2)
    followed.tails.end(1)
    found = []
    while followed.tails.behind:
        found.append(followed.read(most=25))
    found.append(followed.read())
    assert len(found) > 3
    assert b"".join(found) == b"first----\n" * 10 + b"last words" + b"second\n"


def test_what_grandchildren_write_later_is_in_the_file_alone(followed: Followed) -> None:
    """An attempt that has ended is followed no further, or its end would never be told."""
    path = followed.write(b"early\n")
    followed.tails.end(1)
    followed.write(b"late\n")
    assert followed.read() == b"early\n"
    assert not followed.tails.behind
    assert followed.read() == b""
    assert path.read_bytes() == b"early\nlate\n"


def test_a_log_that_the_script_truncates(followed: Followed) -> None:
    """It is followed from its new beginning."""
    path = followed.write(b"long ago\n" * 10)
    followed.read()
    os.truncate(path, 0)
    assert followed.read() == b""
    followed.write(b"anew\n")
    assert followed.read() == b"anew\n"


def test_files_are_opened_once_and_closed_at_the_end(follow: Follow) -> None:
    """However often they are looked at; with those of the filters, and when the run ends early."""
    outside = len(os.listdir("/proc/self/fd"))
    followed = follow(nproc=8, duplicate_stdout_filters=["x"])
    before = outside + 1  # with the one that tells of growth
    for attempt in (1, 2):
        for rank in range(8):
            followed.write(b"x\n", rank=rank, attempt=attempt)
            followed.write(b"y\n", rank=rank, attempt=attempt, stream="stderr")
    for _ in range(3):
        followed.read()
    assert len(os.listdir("/proc/self/fd")) == before + 8 + 16
    followed.launch(2)
    followed.end(1)
    followed.read()
    assert len(os.listdir("/proc/self/fd")) == before + 8 + 16
    followed.tails.close()
    assert len(os.listdir("/proc/self/fd")) == outside


def test_of_a_flood_the_end_is_shown_with_a_notice(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is far ahead when its attempt ends; how much is left out, and where it is, is said on stderr."""
    monkeypatch.setattr(logs, "_MOST_AT_THE_END", 20)
    followed = follow(nproc=2)
    path = followed.write(b"half a line")
    followed.read()
    followed.write(b"a" * 90 + b"b" * 10)
    followed.write(b"short\n", rank=1)
    followed.tails.end(1)
    found = followed.outputs()
    assert found == [
        Output(rank=0, stream="stdout", data=b"half a line"),
        Output(
            rank=0,
            stream="stderr",
            data=f"raylaunch: 90 bytes of rank 0's stdout are not shown; all of it is in {path}\n".encode(),
        ),
        Output(rank=1, stream="stdout", data=b"short\n"),
        Output(rank=0, stream="stdout", data=b"b" * 10),
    ]
    assert not followed.tails.behind


# Growth.


def test_the_next_write_to_any_log_is_told_of_once(follow: Follow) -> None:
    """Of those that are there; then they must be watched again, so that who writes on and on costs nothing."""
    followed = follow(nproc=2)
    growth = followed.tails.growth
    followed.write(b"one\n")
    followed.read()
    assert not followed.tails.watch(), "the log of rank 1 is not there yet"
    followed.write(b"two\n", rank=1)
    for stream in ("stdout", "stderr"):
        for rank in range(2):
            followed.write(b"", rank=rank, stream=stream)
    followed.read()
    assert followed.tails.watch()
    assert not _readable(growth)
    followed.write(b"three\n", rank=1)
    assert _readable(growth)
    growth.heard()
    followed.write(b"four\n", rank=1)
    assert not _readable(growth)
    assert followed.tails.watch()
    followed.write(b"five\n", rank=1)
    assert _readable(growth)


def test_where_the_kernel_cannot_tell(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said, and logs are read as ever."""
    followed.tails.growth.close()
    followed.write(b"one\n")
    followed.write(b"", stream="stderr")
    assert followed.read() == b"one\n"
    assert not followed.tails.watch()


def test_a_prompt_is_waited_for_no_longer_than_it_takes(follow: Follow) -> None:
    """Nothing is written any more when it is to be shown, so nobody tells; a line that others may follow can wait."""
    for nproc, patience in ((1, logs._QUIET_SECONDS), (2, None)):
        followed = follow(nproc=nproc)
        assert followed.tails.patience is None
        followed.write(b"name? ")
        followed.read()
        assert followed.tails.patience == patience
        followed.tails.close()


def _readable(growth: Growth) -> bool:
    return bool(select.select([growth.fileno()], [], [], 0)[0])


# Filters.


def test_lines_of_interest_are_copied(tmp_path: Path, follow: Follow) -> None:
    """With torchrun's header, of all ranks, in whole lines, whatever is shown."""
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


def test_the_filter_sees_lines_whole(tmp_path: Path, follow: Follow, later: list[float]) -> None:
    """Though a part of one was shown before its end."""
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


def test_the_filtered_log_is_complete_though_the_terminal_is_not(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a flood leaves out is left out of the terminal alone."""
    monkeypatch.setattr(logs, "_MOST_AT_THE_END", 100)
    monkeypatch.setattr(logs, "_CHUNK", 100)
    followed = follow(duplicate_stdout_filters=["x"])
    followed.write(b"".join(b"x%08d\n" % number for number in range(100)))
    shown = followed.end()
    assert b"900 bytes of rank 0's stdout are not shown" in shown
    assert shown.endswith(b"x00000099\n")
    assert b"x00000050" not in shown
    copied = (tmp_path / "attempt-1" / "filtered_stdout.log").read_text().splitlines()
    assert copied == [f"[default0]:x{number:08d}" for number in range(100)]


# Where nothing is kept.


def test_what_was_read_is_given_back_to_the_disk(tmp_path: Path, follow: Follow) -> None:
    """But for the last of it, which the failure report quotes; also of what is not shown."""
    followed = follow(kept=False, show="none")
    line = b"x" * 1023 + b"\n"
    path = followed.write(line * 4096)
    if not _punches_holes(tmp_path):
        pytest.skip("this file system cannot give a part of a file back")
    assert followed.read() == b""
    assert path.stat().st_size == 4 * 1024 * 1024
    assert path.stat().st_blocks * 512 < 2 * 1024 * 1024
    followed.write(b"the end\n")
    assert deaths.tail(path).endswith("xxx\nthe end")
    followed.tails.close()


def _punches_holes(folder: Path) -> bool:
    path = folder / "probe"
    path.write_bytes(b"x" * 1024 * 1024)
    with path.open("r+b") as file:
        spool.forget(file.fileno(), 1024 * 1024)
    return path.stat().st_blocks * 512 < 1024 * 1024


def test_a_node_that_keeps_nothing(tmp_path: Path, mark: str, ears: Ears) -> None:
    """Its workers write to a folder of its own, have no error file, and their failures name no files."""
    with running(kept=False, preload=()) as node:
        folder = node.supervisor.settings.run_dir
        assert os.stat(folder).st_mode & 0o077 == 0
        node.move_to(tmp_path, mark, ears)
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
node = Node(kept=False, preload=())
node.start()
print(node.supervisor.settings.run_dir, flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_was_kept_for_an_agent_goes_with_it_though_it_is_killed() -> None:
    """Those that outlive it remove the folder."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", DIES], cwd=root, capture_output=True, text=True, timeout=250, check=False
    )
    folder = done.stdout.strip()
    assert folder, done.stderr
    until(lambda: not os.path.exists(folder), "the folder is left")


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    """Of a long stderr the report shows the last twenty lines; of a missing one, nothing; bad bytes are no obstacle."""
    file = tmp_path / "stderr.log"
    assert deaths.tail(file) == ""
    file.write_bytes(b"".join(b"%d\n" % number for number in range(100_000)) + b"\xff\n")
    lines = deaths.tail(file).splitlines()
    assert lines[0] == "99981"
    assert lines[-2:] == ["99999", "\ufffd"]
    assert len(lines) == 20
