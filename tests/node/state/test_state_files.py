"""Which copy of a part a node gives up for another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.node.state.fast_dir import FastDir
from raylaunch.node.state.state_files import FIRST_COPY, Key, StateFiles
from raylaunch.worker.state.commit_buffer import HEADER_BYTES

UNIT = HEADER_BYTES
"""Sizes are multiples of this, and so is what the node may use."""
RANK = 0


@dataclass(frozen=True)
class Copy:
    """One that comes. `is_whole`: whether all of it does."""

    commit: Commit
    size: int
    is_marked: bool
    staying: int
    is_whole: bool = True


@dataclass(frozen=True)
class There:
    """A file for copies. `commit`: of its part; None: it has no whole one."""

    commit: Commit | None
    is_marked: bool
    size: int


@contextmanager
def files_of(most: int) -> Iterator[StateFiles]:
    files = StateFiles("", most * UNIT, FastDir())
    try:
        yield files
    finally:
        files.close()


def write(files: StateFiles, copy: Copy, spared: set[Commit]) -> str:
    """Write a copy; return why that could not be."""
    part = HeldCommit(rank=RANK, world_size=2, commit=copy.commit)
    with files.writing_copy(part, copy.size * UNIT, spared, staying=copy.staying) as file:
        if isinstance(file, str):
            return file
        assert file.held() is None
        assert file.size >= copy.size * UNIT
        if copy.is_whole:
            file.header().seal(part, tensors=0, pickled=0, kept=copy.is_marked)
    return ""


def there(files: StateFiles) -> dict[Key, There]:
    return {
        key: There(
            held.commit if (held := file.held()) is not None else None, file.kept() is not None, file.size // UNIT
        )
        for key, file in files
    }


def safe(before: dict[Key, There], copy: Copy, staying: int, spared: set[Commit]) -> set[Commit]:
    """Return the commits whose copies must not be given up for another commit."""
    others = {one.commit for one in before.values() if one.commit is not None} - {copy.commit}
    marked = {one.commit for one in before.values() if one.is_marked and one.commit is not None} & others
    last = sorted(commit for commit in marked if commit.attempt == copy.commit.attempt)[::-1][:staying]
    return {*last} | (others & spared if len(last) < staying or not staying else set())


def has_room(before: dict[Key, There], copy: Copy, kept: set[Commit], most: int) -> bool:
    """Return whether the copy fits without giving up any of these commits."""
    again = [one for one in before.values() if one.commit == copy.commit]
    free = again or [one for one in before.values() if one.commit not in kept]
    used = sum(one.size for one in before.values())
    return used + copy.size - max((min(one.size, copy.size) for one in free), default=0) <= most


commits = st.builds(Commit, st.integers(1, 2), st.integers(1, 5))
copies = st.builds(
    Copy, commits, st.integers(1, 4), st.booleans(), st.integers(0, 2), is_whole=st.sampled_from((True, True, False))
)


@given(st.lists(copies, max_size=12), st.sets(commits, max_size=2), st.integers(2, 12))
def test_a_copy_costs_no_other_one_that_is_safe_and_none_where_it_has_no_memory(all_copies, spared, most):
    """Whatever came before, and whatever the size of parts, which changes with the number of ranks."""
    with files_of(most) as files:
        for copy in all_copies:
            before = there(files)
            why = write(files, copy, spared)
            after = there(files)
            kept = safe(before, copy, copy.staying, spared)
            if copy.staying > 1 and not has_room(before, copy, kept, most):
                kept = safe(before, copy, 1, spared)
            assert (why == "") == has_room(before, copy, kept, most)
            if why:
                assert before == after
            changed = [key for key in before if before[key] != after[key]]
            assert len(changed) <= 1
            if any(one.commit == copy.commit for one in before.values()):
                assert all(before[key].commit == copy.commit for key in changed)
            assert kept <= {one.commit for one in after.values()}
            assert sum(one.size for one in after.values()) <= most


def test_a_copy_that_needs_more_memory_than_there_is_costs_none():
    """Neither the copy in whose place it would come, nor another one."""
    with files_of(4) as files:
        for steps in (1, 2):
            assert write(files, Copy(Commit(1, steps), 1, is_marked=True, staying=1), set()) == ""
        before = there(files)
        assert "may use" in write(files, Copy(Commit(1, 3), 5, is_marked=True, staying=1), set())
        assert there(files) == before


def test_of_two_copies_the_one_is_given_up_that_need_not_grow_and_first_one_that_is_torn():
    with files_of(6) as files:
        for steps, size in ((1, 1), (2, 2), (3, 2)):
            assert (
                write(files, Copy(Commit(1, steps), size, is_marked=False, staying=2), {Commit(1, 1), Commit(1, 2)})
                == ""
            )
        files.get((RANK, FIRST_COPY + 2)).header().unseal()
        assert write(files, Copy(Commit(1, 4), 2, is_marked=False, staying=2), set()) == ""
        assert [one.commit and one.commit.steps for one in there(files).values()] == [1, 2, 4]
        assert write(files, Copy(Commit(1, 5), 2, is_marked=False, staying=2), set()) == ""
        assert [one.commit and one.commit.steps for one in there(files).values()] == [1, 5, 4]
