"""A fleet without Ray: named levers in place of machines, and a clock that only moves when it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raylaunch.cluster.agent import AgentUp, Words
from raylaunch.cluster.fleet import Gone, Heard
from raylaunch.core.events import WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.core.failure import Failure
from raylaunch.core.ranks import Assignment, Rendezvous
from raylaunch.node import messages
from raylaunch.node.logs import Output

READY = messages.Ready(start_method="forkserver", why=(), torch=True, pid=1)


class FakeFleet:
    """Obeys at once. `then` are levers: what happens after an attempt of that number runs on all its nodes."""

    def __init__(self, nodes: int, nproc: int = 2) -> None:
        self.names = [f"node-{index + 1}" for index in range(nodes)]
        self.nproc = nproc
        self.sent: list[tuple[Any, ...]] = []
        self.tell: Callable[[Any], None] = lambda _: None
        self.then: dict[int, Callable[[], None]] = {}
        self.ready = READY
        self.given_up: set[str] = set()
        self._parts: dict[str, Assignment] = {}
        self._up: set[str] = set()

    def start(self, tell) -> None:
        self.tell = tell
        for node in self.names:
            self.join(node)

    # Levers.

    def join(self, node: str) -> None:
        up = AgentUp(node_id=f"id-{node}", address="10.0.0.1", nproc=self.nproc, ready=self.ready)
        self.say(node, up)

    def say(self, node: str, *events: Any, output: list[Output] | None = None, now: float = 0.0) -> None:
        self.tell(Heard(node=node, words=Words(now=now, events=list(events), output=output or [])))

    def fail(self, rank: int, *, at: float = 0.0, now: float = 0.0) -> None:
        part = next(part for part in self._parts.values() if rank in part.ranks)
        failure = Failure(
            attempt=part.attempt,
            node=part.node,
            rank=rank,
            local_rank=rank - part.base_rank,
            pid=1,
            at=at,
            exit_code=-9,
        )
        self.say(part.node, WorkersExited(at=at, attempt=part.attempt, node=part.node, failures=(failure,)), now=now)

    def finish(self) -> None:
        for node, part in self._parts.items():
            self.say(node, WorkersExited(at=0.0, attempt=part.attempt, node=node))

    def lose(self, node: str) -> None:
        self._parts.pop(node, None)
        self.tell(Gone(node=node, why="its agent died"))

    # What the driver asks for.

    def launch(self, node: str, part: Assignment, meeting: Rendezvous) -> None:
        self.sent.append(("launch", node, part.attempt, meeting.master_port))
        self._parts[node] = part
        self._up.add(node)
        self.say(node, WorkersStarted(at=0.0, attempt=part.attempt, node=node))
        if len(self._up) == part.nnodes:
            self._up.clear()
            self.then.get(part.attempt, self.finish)()

    def stop(self, node: str, attempt: int, grace: float, signal: str) -> None:
        self.sent.append(("stop", node, attempt, grace, signal))
        self.say(node, WorkersStopped(at=0.0, attempt=attempt, node=node))

    def forward(self, node: str, attempt: int, signal: str) -> None:
        self.sent.append(("forward", node, attempt, signal))

    def open_store(self, node: str, attempt: int) -> None:
        self.sent.append(("store", node, attempt))
        self.say(node, messages.StoreOpen(attempt=attempt, port=5000 + attempt))

    def joined(self, node: str, node_id: str) -> bool:
        self.sent.append(("joined", node, node_id))
        return node not in self.given_up

    def release(self, node: str) -> None:
        self.sent.append(("release", node))

    def replace(self, gone: Gone) -> None:
        self.sent.append(("replace", gone.node))

    def values(self, nodes: Mapping[str, Any]) -> dict[int, bytes]:
        return {}

    def close(self) -> None:
        self.sent.append(("close",))


class Notebook:
    """Journal and observer in one."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.lines: list[str] = []
        self.output: list[Output] = []

    def append(self, entry: Any) -> None:
        self.entries.append(entry)

    def decided(self, entry: Any, machine: Any) -> None:
        pass

    def wrote(self, output: Any) -> None:
        self.output.extend(output)

    def said(self, text: str) -> None:
        self.lines.append(text)
