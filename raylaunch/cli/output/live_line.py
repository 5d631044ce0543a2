"""The line at the bottom of a terminal: what the run does at this moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from raylaunch.cli.output.progress_line import rate_text
from raylaunch.core.history.attempt_times import mean_rate
from raylaunch.core.history.time_per_state import StatesBuilder, seconds_per_state
from raylaunch.core.machine.events_and_actions import Progressed
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase
from raylaunch.core.monitoring.progress_report import ProgressSample
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.text import count, duration

_PREFIX = "raylaunch: "
_SEPARATOR = " | "
_COLOURS = {Phase.RUNNING: "32"}
"""SGR codes; all other phases are yellow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStatus:
    """What the line shows: the state and the progress of a run at one moment."""

    phase: Phase = Phase.GATHERING
    seconds: float = 0.0
    """Since the run began."""
    ready: int = 0
    wanted: str = ""
    """The nodes that are ready and, as text, those that the job wants."""
    nodes: int = 0
    workers: int = 0
    """Those of the present attempt."""
    alive: int | None = None
    """The workers that were seen alive; None: not known yet."""
    progress: Progressed | None = None
    """The latest steps, which may be of an earlier attempt."""
    behind: int = 0
    """How many steps the slowest worker is behind the fastest; 0: hardly any."""
    restarts: int = 0
    goodput: float | None = None
    """The part of the run's time in which it trained, from 0 to 1; None: not known yet."""


def line(status: LiveStatus, columns: int) -> str:
    """Return the line, in at most `columns` ASCII characters. A narrow terminal loses the least important parts."""
    parts = [(text, rank) for text, rank in _parts(status) if text]
    while len(parts) > 1 and len(_PREFIX + _joined(parts)) > columns:
        if len(_joined(parts)) <= columns:
            return _joined(parts)
        parts.remove(max(parts, key=lambda part: part[1]))
    text = _joined(parts)
    return (text if len(_PREFIX + text) > columns else _PREFIX + text)[:columns]


def coloured(text: str, phase: Phase) -> str:
    """Return the line with the prefix dim and the phase in its colour."""
    head, prefix, rest = text.rpartition(_PREFIX) if text.startswith(_PREFIX) else ("", "", text)
    state = str(phase)
    if rest.startswith(state):
        rest = f"\x1b[{_COLOURS.get(phase, '33')}m{state}\x1b[0m{rest.removeprefix(state)}"
    return f"{head}\x1b[2m{prefix}\x1b[0m{rest}" if prefix else rest


def _joined(parts: list[tuple[str, int]]) -> str:
    return _SEPARATOR.join(text for text, _ in parts)


def _parts(status: LiveStatus) -> Iterator[tuple[str, int]]:
    """Yield the parts in the order of the line, each with its rank: the part with the highest goes first."""
    progress = status.progress
    yield _state(status), 0
    if progress is not None:
        yield count(progress.marks, "step") if progress.high is None else f"step {progress.high}", 1
        if status.phase is Phase.RUNNING:
            yield rate_text(progress.rate), 2
    if status.behind:
        yield f"rank {progress.slowest if progress else 0} is {count(status.behind, 'step')} behind", 4
    if status.phase is not Phase.GATHERING and status.workers:
        yield _workers(status), 6
    yield count(status.restarts, "restart") if status.restarts else "", 3
    yield f"goodput {100 * status.goodput:.0f} %" if status.goodput is not None else "", 7
    yield duration(int(status.seconds)), 5


def _state(status: LiveStatus) -> str:
    if status.phase is Phase.GATHERING:
        return f"{status.phase}: {status.ready} of {status.wanted} nodes ready"
    return str(status.phase)


def _workers(status: LiveStatus) -> str:
    nodes = count(status.nodes, "node")
    if status.alive is None or status.alive == status.workers or status.phase is not Phase.RUNNING:
        return f"{count(status.workers, 'worker')} on {nodes}"
    return f"{status.alive} of {count(status.workers, 'worker')} alive on {nodes}"


@dataclass(slots=True)
class LiveLine:
    """Keeps what the line shows. The driver's thread updates it; any thread may ask for its text."""

    is_coloured: bool
    clock: Callable[[], float] = time.monotonic
    #: The status, and the time on the clock to which it belongs. Replaced as a whole.
    _latest: tuple[LiveStatus, float] | None = field(default=None, init=False)
    _states: StatesBuilder = field(default_factory=StatesBuilder, init=False)

    def on_entry(self, entry: JournalEntry, machine: Machine) -> None:
        """Take over the state of the run after an event."""
        self._states.add(entry)
        before = self.status
        low, high = machine.job.min_nodes, machine.job.max_nodes
        is_new = machine.phase is Phase.STARTING
        self.on_status(
            replace(
                before,
                phase=machine.phase,
                seconds=max(before.seconds, machine.now),
                ready=len(machine.members),
                wanted=f"{low}" if low == high else f"{low} to {high}",
                nodes=len(machine.roster),
                workers=machine.world.size,
                restarts=max(0, machine.attempt - 1),
                alive=None if is_new else before.alive,
                behind=0 if is_new else before.behind,
            )
        )

    def on_progress(self, sample: ProgressSample) -> None:
        """Take over how far the attempt is."""
        goodput = self._states.goodput(sample.at, sample.progress)
        found = replace(self.status, seconds=sample.at, alive=sample.alive, behind=sample.behind, goodput=goodput)
        self.on_status(found if sample.progress is None else replace(found, progress=sample.progress))

    def ending(self) -> str:
        """Return what to say at the end of the run: its steps, their mean rate, and how it spent its time."""
        steps = sum(attempt.steps - (attempt.lost_steps or 0) for attempt in self._states.attempts)
        rate = mean_rate(self._states.attempts)
        parts = [count(steps, "step"), *([rate_text(rate)] if rate is not None else [])] if steps else []
        per_state = seconds_per_state(self._states.spans())
        times = [f"{state} {duration(int(seconds))}" for state, seconds in per_state.items() if seconds >= 1]
        return "; ".join(", ".join(part) for part in (parts, times) if part)

    def on_status(self, status: LiveStatus) -> None:
        """Replace what the line shows, as for a run that this process does not drive."""
        self._latest = status, self.clock()

    @property
    def status(self) -> LiveStatus:
        """What is known, at this moment."""
        latest = self._latest
        if latest is None:
            return LiveStatus()
        status, at = latest
        return replace(status, seconds=status.seconds + (self.clock() - at))

    def text(self, columns: int) -> str:
        """Return the line for a terminal, with its colours; "" as long as nothing is known of the run."""
        if self._latest is None:
            return ""
        status = self.status
        text = line(status, columns)
        return coloured(text, status.phase) if self.is_coloured else text
