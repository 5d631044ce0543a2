"""The stacks of workers, parsed from the output of faulthandler, and grouped by the place in the script.

A kernel of NCCL waits on the GPU, where no stack shows it. torch's Flight Recorder counts the collectives that each
rank has called in each of its process groups, and those that have ended: `missing_call` tells which one is missing, and
on whom.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from raylaunch.core.failures.stack_notes import (
    AFTER_END,
    CHILD_STOPPED,
    FILE_CLOSED,
    IN_THE_KERNEL,
    NO_ANSWER,
    RUNNING_ON,
    STOPPED,
)
from raylaunch.core.text import count, named_ranks, spans

_SILENT_STATES = {"D": IN_THE_KERNEL, "R": RUNNING_ON}
_THREAD = re.compile(r"^(?:(Current thread|Thread) 0x[0-9a-f]+\b.*|Stack )\(most recent call first\):$")
"""`Stack` is the one of the thread that got the signal, where no other's are wanted."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_NO_FRAME = "<no Python frame>"
"""What faulthandler writes of a thread that runs no code of Python; the main thread is the last one."""
_MOST_LINE = 2_000
"""Characters; faulthandler writes at most 500 of a name. A longer line is none of its own."""
_MODULES = "Extension modules: "
"""faulthandler names all modules in C that are imported, up to hundreds, after the stacks of a fatal signal."""
_CUT = "..."
"""What faulthandler writes instead of the threads beyond the hundredth."""
_RUNPY = r"^<frozen (runpy|importlib)|/python3\.10/runpy\.py$"
_OWN = re.compile(rf"(^|/)raylaunch/(worker|node)/(?!selfcheck/)(\w+/)*\w+\.py$|{_RUNPY}")
_LIBRARY = re.compile(r"/lib(64)?/python\d[\d.]*/|/(site|dist)-packages/|/raylaunch/worker/state/|^<")
_WRAPPER = re.compile(r"^_[^_]|^_$|^wrapper|^inner|^decorate|^<")
"""Functions between a line of the script and the function that it meant to call."""
_BACKWARD = re.compile(r"/torch/autograd/\S+ in _engine_run_backward$")
_WAITS_FOR_OTHERS = re.compile(
    rf"/torch/distributed/\S+ in |{_BACKWARD.pattern}|/torch(_\w+)?/(\w+/)\S+ in synchronize$"
)
"""Innermost frames of workers that probably wait for another: in a collective, also one within `backward`."""
_IN_COLLECTIVE = re.compile(r"/torch/distributed/(distributed_c10d|rendezvous|utils)\.py:")
"""Innermost frames of workers that only wait for others, even if waiting takes CPU."""
_IN_COMMIT = "/raylaunch/worker/state/commit_agreement.py:"
"""A frame of workers that wait for other ranks to commit. They look again and again, which takes some CPU."""
_IN_TRANSFER = re.compile(r"/raylaunch/worker/(\S+ in commit_to_restore$|runtime/files_wait\.py:)")
"""Frames of workers that wait for what their agent gets from other nodes: parts of a commit, or files."""
_DATA_LOADER = "/torch/utils/data/"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """The collectives of one rank in one process group."""

    group: str
    """Its name, such as `default_pg`."""
    called: int
    """The number of the last one that the rank has called."""
    ended: int
    """The number of the last one that has ended on it; those before have."""
    waits_in: str = ""
    """The name of the next one, such as `all_reduce`; "": it was not called."""


@dataclass(frozen=True, slots=True)
class MissingCall:
    """A collective that has not ended."""

    ranks: frozenset[int]
    """Those that have not called it; empty if all have."""
    text: str
    """For a person."""


def missing_call(calls: Mapping[int, Iterable[GroupCalls]]) -> MissingCall | None:
    """Return a collective in which ranks wait for others; None: none is known.

    A rank that waits elsewhere itself is not taken for the one that is waited for, if there is another.
    """
    groups: dict[str, dict[int, GroupCalls]] = {}
    for rank, own in calls.items():
        for each in own:
            groups.setdefault(each.group, {})[rank] = each
    waiting = {rank for rank, own in calls.items() if any(each.waits_in for each in own)}
    found = [call for name, members in groups.items() if (call := _missing_in(name, members)) is not None]
    return min(found, key=lambda call: (not call.ranks, not call.ranks.isdisjoint(waiting)), default=None)


def _missing_in(group: str, members: Mapping[int, GroupCalls]) -> MissingCall | None:
    waiting = {rank: each for rank, each in members.items() if each.waits_in}
    if not waiting:
        return None
    number = min(each.ended for each in waiting.values()) + 1
    inside = [rank for rank, each in waiting.items() if each.ended + 1 == number]
    name = waiting[inside[0]].waits_in
    absent = frozenset(rank for rank, each in members.items() if each.called < number)
    if absent:
        who, others = named_ranks(absent), named_ranks(inside)
        has, wait = "have" if len(absent) > 1 else "has", "wait" if len(inside) > 1 else "waits"
        text = f"{who} {has} not called {name}, number {number} of {group}, in which {others} {wait}"
        return MissingCall(absent, text)
    return MissingCall(absent, f"all ranks have called {name}, number {number} of {group}, and it does not end")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUsage:
    """The resources that a worker has used since it started."""

    cpu: float = 0.0
    """CPU seconds of the worker process."""
    cpu_of_others: float = 0.0
    """CPU seconds of all processes that it started."""
    bytes: int = 0
    """Bytes read and written by all of them."""
    wakes: int = 0
    """Voluntary context switches of its main thread: how often it waited for something and went on."""

    def __sub__(self, before: ResourceUsage) -> ResourceUsage:
        return ResourceUsage(
            cpu=self.cpu - before.cpu,
            cpu_of_others=self.cpu_of_others - before.cpu_of_others,
            bytes=self.bytes - before.bytes,
            wakes=self.wakes - before.wakes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The stack of one worker, and what the node knows of the process."""

    rank: int
    state: str
    """The process state as in /proc: `R` running, `S` sleeping, `T` stopped, `D` uninterruptible, ..."""
    text: str
    """What faulthandler wrote; "" if the process did not answer."""
    effort: ResourceUsage = ResourceUsage()
    child_stopped: bool = False
    """Whether a process that it started is stopped."""
    file_closed: bool = False
    """Whether the script has closed the worker's descriptor of the file for stacks."""
    has_nccl: bool = False
    """Whether it has a process group of NCCL."""
    calls: tuple[GroupCalls, ...] = ()
    """What torch's Flight Recorder says of its collectives, if it says anything."""
    gpu_faults: str = ""
    """What the driver says is wrong with its GPUs, where all threads are written."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.state in ("T", "t")

    @property
    def may_wait_for_gpu(self) -> bool:
        """Whether it may wait for a kernel, such as one of NCCL that waits for other ranks. That takes CPU."""
        return self.has_nccl and self.state == "R"

    @property
    def why_empty(self) -> str:
        """Why there is no text, for a person."""
        return FILE_CLOSED if self.file_closed else NO_ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Workers whose main threads were at the same place."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]
    """`file:line in function` of the main thread, innermost first."""
    note: str = ""
    """What else is known, such as that the process was stopped by a signal or did not answer; or ""."""
    may_wait_for_gpu: bool = False
    """Whether all of them may wait for a kernel: see `Stack`."""

    @property
    def waits(self) -> bool:
        """Whether they probably wait for other ranks."""
        return in_commit(self.frames) or (bool(self.frames) and bool(_WAITS_FOR_OTHERS.search(self.frames[0])))

    @property
    def waits_for_node(self) -> bool:
        """Whether they probably wait for another node: for ranks there, or for what their agent gets from it."""
        return self.waits or any(map(_IN_TRANSFER.search, self.frames))

    @property
    def in_collective(self) -> bool:
        """Whether they only wait for other ranks."""
        return bool(self.frames) and bool(_IN_COLLECTIVE.search(self.frames[0]))

    @property
    def in_backward(self) -> bool:
        """Whether they are in `backward`: computing, or waiting for other ranks."""
        return bool(self.frames) and bool(_BACKWARD.search(self.frames[0]))

    @property
    def loads_data(self) -> bool:
        """Whether they wait for a data loader."""
        return any(_DATA_LOADER in frame for frame in self.frames)

    @property
    def place(self) -> str:
        """`file:line` of the script, else of the innermost frame; "" without frames."""
        return self.frames[self._script()].rpartition(" in ")[0] if self.frames else ""

    @property
    def doing(self) -> str:
        """What they do, for a person: `at train.py:33 in fetch`, `in all_reduce (train.py:41)`, or the note."""
        if not self.frames:
            return self.note
        script = self._script()
        place, _, function = self.frames[script].rpartition(" in ")
        called = [frame.rpartition(" in ")[2] for frame in reversed(self.frames[:script])]
        inner = next((name for name in called if not _WRAPPER.search(name)), called[-1] if called else "")
        short = place.rpartition("/")[2]
        where = f"in {inner} ({short})" if inner else f"at {short} in {function}"
        return f"{where}, {self.note}" if self.note else where

    def _script(self) -> int:
        """Return the index of the innermost frame that is not in a library; 0 if all are."""
        return next((at for at, frame in enumerate(self.frames) if not _LIBRARY.search(frame)), 0)

    def __str__(self) -> str:
        waits = (" waits" if len(self.ranks) == 1 else " wait") if self.waits else ""
        comma = "," if self.frames == () else ""
        return f"{count(len(self.ranks), 'rank')}{waits}{comma} {self.doing}: {spans(self.ranks)}"


def grouped(stacks: Iterable[Stack], ranks: Iterable[int]) -> list[StackGroup]:
    """Group stacks by frames and note. Ranks in `ranks` without a stack did not answer."""
    members: dict[tuple[tuple[str, ...], str], list[int]] = {}
    heard = {stack.rank: stack for stack in stacks}
    for rank in sorted({*heard, *ranks}):
        stack = heard.get(rank)
        frames = main_thread(stack.text) if stack else ()
        note = _note(stack, answered=bool(frames))
        members.setdefault((frames, note), []).append(rank)
    return [
        StackGroup(
            ranks=tuple(own),
            frames=frames,
            note=note,
            may_wait_for_gpu=all(rank in heard and heard[rank].may_wait_for_gpu for rank in own),
        )
        for (frames, note), own in members.items()
    ]


def _note(stack: Stack | None, *, answered: bool) -> str:
    if stack is None:
        return NO_ANSWER
    if stack.is_stopped:
        return STOPPED
    if answered:
        return CHILD_STOPPED if stack.child_stopped else ""
    if stack.text.rstrip().endswith(_NO_FRAME):
        return AFTER_END
    return stack.why_empty if stack.file_closed else _SILENT_STATES.get(stack.state, NO_ANSWER)


def in_commit(frames: Iterable[str]) -> bool:
    """Return whether a thread with these frames waits in `State.commit` or `restore` for other ranks."""
    return any(_IN_COMMIT in frame for frame in frames)


def main_thread(text: str) -> tuple[str, ...]:
    """Return the main thread's frames, innermost first, without raylaunch's frames that called the script.

    faulthandler writes the oldest thread last: that is the main thread. With more than a hundred threads it omits the
    oldest; then take the thread that got the signal, which usually is the main thread.
    """
    threads: list[tuple[bool, list[str]]] = []
    cut = False
    for line in text.splitlines():
        if len(line) > _MOST_LINE:
            continue
        if head := _THREAD.match(line):
            threads.append((head[1] == "Current thread", []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(f"{frame[1]}:{frame[2]} in {frame[3]}")
        cut = cut or line == _CUT
    if not threads:
        return ()
    frames = next((own for current, own in threads if current), []) if cut else threads[-1][1]
    paths = [frame.rpartition(" in ")[0].rpartition(":")[0] for frame in frames]
    return tuple(frames[: _above_ours(paths)])


def shortened(lines: Iterable[str]) -> list[str]:
    """Return a text of faulthandler without the frames of raylaunch that called the script, and the list of modules.

    Other lines may stand before and after. A thread of raylaunch's own keeps its frames.
    """
    found: list[str] = []
    frames: list[tuple[str, str]] = []
    for line in [*lines, ""]:
        if len(line) <= _MOST_LINE and (frame := _FRAME.match(line)):
            frames.append((frame[1], line))
            continue
        found += [text for _, text in frames[: _above_ours([path for path, _ in frames])]]
        frames.clear()
        if not line.startswith(_MODULES):
            found.append(line)
    return found[:-1]


def _above_ours(paths: Sequence[str]) -> int:
    """Return how many frames of a stack are left without the last ones, which are raylaunch's; all if all are."""
    last = len(paths)
    while last and _OWN.search(paths[last - 1]):
        last -= 1
    return last or len(paths)


def report(stacks: Iterable[Stack], groups: Iterable[StackGroup]) -> str:
    """Return the text of a stack report: the groups with their frames, then what each worker has written."""
    stacks = [*stacks]
    missing = missing_call({stack.rank: stack.calls for stack in stacks})
    recorded = [f"Flight Recorder: {missing.text}", ""] if missing is not None else []
    return "\n".join([*_summary(groups), *recorded, *_in_full(stacks)]) + "\n"


def _summary(groups: Iterable[StackGroup]) -> Iterator[str]:
    for group in groups:
        yield str(group)
        yield from (f"    {frame}" for frame in group.frames)
        yield ""


def _in_full(stacks: Iterable[Stack]) -> Iterator[str]:
    for stack in sorted(stacks, key=lambda stack: stack.rank):
        yield f"--- rank {stack.rank}, state {stack.state}"
        yield "\n".join(shortened(stack.text.splitlines())).rstrip() or stack.why_empty
        yield ""
