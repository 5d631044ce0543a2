"""A fleet without Ray: named levers in place of machines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from raylaunch.cluster.agent import AgentUp, Words
from raylaunch.cluster.fleet import Draining, Gone, Granted, Heard
from raylaunch.core.events import WorkersCheckpointed, WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.core.failure import Failure
from raylaunch.core.pulse import Pulse
from raylaunch.core.ranks import Assignment, Rendezvous
from raylaunch.core.stacks import Stack
from raylaunch.node import messages
from raylaunch.node.logs import Output

READY = messages.Ready(start_method="forkserver", why=(), torch=True, pid=1)


class FakeFleet:
    """Obeys at once. `then` are levers: what happens after an attempt of that number runs on all its nodes.

    `beat`: every so many seconds, each node that is up says something, unless it was silenced; 0: nobody does.
    """

    def __init__(self, nodes: int, nproc: int = 2, *, beat: float = 0.0) -> None:
        self.names = [f"node-{index + 1}" for index in range(nodes)]
        self.beat = beat
        self.silenced: set[str] = set()
        #: What the workers of a node are doing, for whoever asks for their stacks.
        self.stacks: dict[str, tuple[Stack, ...]] = {}
        #: How far a node's workers were when a step was proposed to them, once; else just before it.
        self.reached: dict[str, int] = {}
        self._beating: set[str] = set()
        self._closed = threading.Event()
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
        if self.beat:
            threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._closed.wait(self.beat):
            for node in sorted(self._beating):
                self.say(node)

    # Levers.

    def grant(self, node: str) -> None:
        self.tell(Granted(node=node, host=f"id-{node}", address="10.0.0.1"))

    def join(self, node: str) -> None:
        up = AgentUp(node_id=f"id-{node}", address="10.0.0.1", nproc=self.nproc, ready=self.ready)
        self._beating.add(node)
        self.say(node, up)

    def say(
        self,
        node: str,
        *events: Any,
        output: list[Output] | None = None,
        pulse: Pulse | None = None,
        now: float = 0.0,
    ) -> None:
        if node not in self.silenced:
            words = Words(now=now, events=list(events), output=output or [], pulse=pulse)
            self.tell(Heard(node=node, words=words, at=time.monotonic()))

    def silence(self, node: str) -> None:
        self.silenced.add(node)

    def drain(self, node: str, seconds: float = 30.0) -> None:
        self.tell(Draining(host=f"id-{node}", deadline=time.monotonic() + seconds, why="it is being drained"))

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
        self._beating.discard(node)
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

    def ask_checkpoint(self, node: str, attempt: int, step: int) -> None:
        self.sent.append(("checkpoint", node, attempt, step))
        reached = self.reached.pop(node, step - 1)
        self.say(node, messages.Proposed(node=node, attempt=attempt, step=step, reached=reached))

    def settle(self, node: str, attempt: int, step: int) -> None:
        self.sent.append(("settle", node, attempt, step))
        self.say(node, WorkersCheckpointed(at=0.0, attempt=attempt, node=node, step=step))

    def dump_stacks(self, node: str, attempt: int) -> None:
        self.sent.append(("stacks", node, attempt))
        self.say(node, messages.WorkersStacks(node=node, attempt=attempt, stacks=self.stacks.get(node, ())))

    def shun(self, host: str) -> None:
        self.sent.append(("shun", host))

    def readmit(self, host: str) -> None:
        self.sent.append(("readmit", host))

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

    def rest(self) -> None:
        pass

    def close(self) -> None:
        self._closed.set()
        self.sent.append(("close",))


class Notebook:
    """Journal and observer in one."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.lines: list[str] = []
        self.output: list[Output] = []
        self.stacks: dict[int, str] = {}

    def append(self, entry: Any) -> None:
        self.entries.append(entry)

    def write_stacks(self, attempt: int, text: str) -> str:
        self.stacks[attempt] = text
        return f"attempt-{attempt}/stacks.txt"

    def decided(self, entry: Any, machine: Any) -> None:
        pass

    def wrote(self, output: Any) -> None:
        self.output.extend(output)

    def said(self, text: str) -> None:
        self.lines.append(text)
