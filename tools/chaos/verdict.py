"""What a job's event log and its steps prove together: planned ends lost nothing, and nobody paid for lost nodes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from raylaunch.core.machine.machine import Machine
from raylaunch.core.record import journal
from tools.chaos.check_steps import AttemptSteps

Lines = Iterable[dict[str, Any]]
_BLOW_SECONDS = 30.0
"""How long after a blow its host may be noticed as lost."""


def planned_ends(lines: Lines) -> set[int]:
    """Attempts whose workers were asked to save, and to whom nothing else happened before they were stopped."""
    asked: set[int] = set()
    found: set[int] = set()
    for line in lines:
        for action in line["actions"]:
            if action["is"] == "RequestCheckpoint":
                asked.add(action["attempt"])
            elif action["is"] == "Stop" and action["attempt"] in asked:
                asked.remove(action["attempt"])
                found |= set() if _is_a_blow(line["event"]) else {action["attempt"]}
    return found


def _is_a_blow(event: dict[str, Any]) -> bool:
    return event["is"] in ("NodeLost", "WorkersHung", "StopRequested") or bool(event.get("failures"))


def lost_steps(lines: Lines, found: Sequence[AttemptSteps], *, in_memory: bool) -> Iterator[str]:
    """A planned end loses none, whether or not the workers answered.

    `in_memory`: the job saves by `State`. Then a node that is lost before the next step may take steps with it, which
    `lost_commits` and `lost_copies` judge.
    """
    lines = [*lines]
    planned = planned_ends(lines)
    for before, after in pairwise(found):
        if before.attempt not in planned or after.first == before.last + 1:
            continue
        is_node_lost = any(not each.is_released for each in _gone(lines, before.attempt, after.attempt))
        if not (in_memory and is_node_lost):
            lost = before.last + 1 - after.first
            yield f"the planned end of attempt {before.attempt} lost {lost} steps: step {after.first} is the next"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """A fault that takes the memory of a host away, or the host from the others. `at`: seconds since 1970."""

    at: float
    address: str


def lost_commits(
    lines: Lines, found: Sequence[AttemptSteps], committed: Mapping[int, int], blows: Iterable[Blow]
) -> Iterator[str]:
    """No committed step is lost, except with a host that a blow has struck.

    `committed`: by attempt, the last step that all its ranks have committed.
    """
    blows = [*blows]
    lines = [*lines]
    for attempt, last, one in committed_again(found, committed):
        if not _are_struck(lines, attempt, one.attempt, blows):
            gone = ", ".join(each.node for each in _gone(lines, attempt, one.attempt)) or "no node"
            yield (
                f"attempt {one.attempt} begins with step {one.first}, and step {last} was committed in attempt {attempt};"
                f" {gone} was lost, and no host by a fault that may take its memory"
            )


def committed_again(
    found: Sequence[AttemptSteps], committed: Mapping[int, int]
) -> Iterator[tuple[int, int, AttemptSteps]]:
    """Yield attempts that have done committed steps again, each with the attempt that had committed, and its last step."""
    last: int | None = None
    attempt = 0
    for one in found:
        if last is not None and one.first <= last:
            yield attempt, last, one
        if one.attempt in committed:
            last, attempt = committed[one.attempt], one.attempt
        elif last is not None:
            last = one.first - 1


def lost_copies(lines: Lines, found: Sequence[AttemptSteps], blows: Iterable[Blow]) -> Iterator[str]:
    """What all nodes of a world had copied is only lost if two neighbours of that world, or of a later one, are gone.

    Each host has one node, which tells the driver what it has copied.
    """
    lines, blows = [*lines], [*blows]
    worlds, copied = _worlds(lines), _copied(lines)
    safe, since = 0, 0
    for one in found:
        if one.first <= safe:
            gone = {each.node for each in _gone(lines, since, one.attempt) if each.is_released or each.is_struck(blows)}
            rosters = [roster for attempt, roster in worlds.items() if since <= attempt < one.attempt]
            if not any(_neighbours_are_gone(roster, gone) for roster in rosters):
                yield (
                    f"attempt {one.attempt} begins with step {one.first}, and step {safe} was copied to other hosts in "
                    f"attempt {since}; of no two neighbours was the memory lost, but of {sorted(gone) or 'no node'}"
                )
            safe = one.first - 1
        if one.attempt in copied:
            safe, since = copied[one.attempt], one.attempt


def _worlds(lines: Sequence[dict[str, Any]]) -> dict[int, list[str]]:
    """Return the nodes of each attempt, in the order of their ranks: each copies to the next one."""
    launches = [action for line in lines for action in line["actions"] if action["is"] == "Launch"]
    return {launch["attempt"]: launch["roster"] for launch in launches}


def _copied(lines: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Return by attempt how many steps the newest commit has that all of its nodes have copied."""
    told = [line["event"] for line in lines if line["event"]["is"] == "Progressed" and line["event"].get("copied")]
    return {event["attempt"]: event["copied"] for event in told}


def _neighbours_are_gone(roster: Sequence[str], gone: Container[str]) -> bool:
    return any(one in gone and after in gone for one, after in pairwise([*roster, roster[0]]))


def _are_struck(lines: Sequence[dict[str, Any]], before: int, after: int, blows: Sequence[Blow]) -> bool:
    """Return whether one of the nodes that are gone between two attempts was on a host that was struck before."""
    return any(each.is_struck(blows) for each in _gone(lines, before, after))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gone:
    """A node that was lost, or given back; `is_released`: its memory was freed then."""

    node: str
    address: str
    at: float
    is_released: bool

    def is_struck(self, blows: Iterable[Blow]) -> bool:
        """Return whether its host was struck before."""
        return any(blow.address == self.address and 0.0 <= self.at - blow.at <= _BLOW_SECONDS for blow in blows)


def _gone(lines: Sequence[dict[str, Any]], before: int, after: int) -> Iterator[_Gone]:
    """Yield the nodes of attempts from `before` on that are gone when `after` begins."""
    addresses: dict[str, str] = {}
    known: set[str] = set()
    attempt = 0
    for line in lines:
        event = line["event"]
        if event["is"] == "NodeJoined":
            addresses[event["node"]] = event["address"]
        lost = [(event["node"], False)] if event["is"] == "NodeLost" else []
        released = [action for action in line["actions"] if action["is"] == "Release"]
        lost += [(action["node"], action["frees_memory"]) for action in released]
        for node, is_released in lost:
            if node in known:
                yield _Gone(node=node, address=addresses.get(node, ""), at=event["at"], is_released=is_released)
        for action in line["actions"]:
            if action["is"] == "Launch":
                attempt = action["attempt"]
                known |= set(action["roster"]) if before <= attempt else set()
        if attempt >= after:
            return


def replayed(events: Path, may_spend: int) -> Iterator[str]:
    """The log leads to the same decisions again; `may_spend`: how many restarts the faults may have taken in all."""
    of, entries = journal.read(events.read_text().splitlines())
    machine = Machine(of)
    machine.start()
    for entry in entries:
        if entry.event is not None and tuple(machine.handle(entry.event)) != entry.actions:
            yield f"the log does not lead to the decision in it on {entry.event}"
            return
    if machine.restarts > may_spend:
        yield f"{machine.restarts} restarts are spent, for {may_spend} faults that may take one"
