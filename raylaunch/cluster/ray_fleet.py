"""Agents as Ray actors: what the seats say is to be done, done with Ray."""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from raylaunch.cluster import drains, losses, warm
from raylaunch.cluster.actor import actor_class, close, kill
from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.deeds import Announce, Ask, AskGang, Deed, End, GiveBack, Man
from raylaunch.cluster.fleet import Gone, Granted, Heard, Tell
from raylaunch.cluster.placement import Reservation
from raylaunch.cluster.seats import Seats
from raylaunch.cluster.warm import Pool
from raylaunch.cluster.warmth import Warmth
from raylaunch.core.plan import Plan
from raylaunch.core.ranks import Assignment, Rendezvous
from raylaunch.core.words import count
from raylaunch.errors import ClusterError

_JOIN_SECONDS = 2.0
_VALUES_SECONDS = 600.0
_LOOK_SECONDS = 1.0
_MOST_FALSE_STARTS = 3

Answer = TypeVar("Answer")


class RayFleet:
    """One call to `words` is always pending at each agent, so whatever happens is pushed to us.

    What is asked of Ray is asked in a thread of its own, in the order of the decisions: Ray may make it wait.
    """

    def __init__(self, plan: Plan, told: AgentSettings, say: Callable[[str], None], pool: Pool | None = None) -> None:
        """`say`: takes a line for a person, in the thread that calls us. `pool`: where agents rest between runs."""
        self._plan = plan
        self._told = told
        self._say = say
        self._seats = Seats(plan.bundles, plan.min_nodes, spread=plan.spread)
        self._reservation = Reservation(spread=plan.spread)
        self._actor_class = actor_class()
        #: All and only the agents that were started and are neither gone nor given up.
        self._actors: dict[str, Any] = {}
        self._up: set[str] = set()
        self._any_came_up = False
        self._tell: Tell = lambda _: None
        #: Guards `_seats`, and the order in which its deeds are put into `_to_do`.
        self._lock = threading.Lock()
        self._to_do: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed = False
        self._pool = pool
        self._warmth: Warmth | None = None
        if pool is not None:
            self._warmth = Warmth(pool, self._reservation.options, self._start, self._take, self._to_do)
        #: Seats that have a host, or had one.
        self._placed: set[int] = set()
        self._addresses: dict[str, str] = {}
        self._hands = threading.Thread(target=self._work, daemon=True, name="raylaunch-fleet")
        self._notices = drains.Notices()
        self._drains = drains.DrainWatch(self._drained)

    def start(self, tell: Tell) -> None:
        """Reserve the gang; each agent starts as soon as its place is granted. The others are asked for then."""
        self._tell = tell
        if self._pool is not None:
            self._pool.keep(warm.key(replace(self._told, nproc=bundle.nproc)) for bundle in self._plan.bundles)
        self._decide(self._seats.start)
        while not self._to_do.empty():
            self._to_do.get()()  # here, so that whoever asked hears what is wrong with it
        self._hands.start()
        self._drains.start()

    # Orders.

    def launch(self, node: str, part: Assignment, meeting: Rendezvous) -> None:
        """One message to the node."""
        self._order(node, "launch", part, meeting)

    def stop(self, node: str, attempt: int, grace: float, signal: str) -> None:
        """One message to the node."""
        self._order(node, "stop", attempt, grace, signal)

    def forward(self, node: str, attempt: int, signal: str) -> None:
        """One message to the node."""
        self._order(node, "forward", attempt, signal)

    def open_store(self, node: str, attempt: int) -> None:
        """One message to the node."""
        self._order(node, "open_store", attempt)

    def ask_checkpoint(self, node: str, attempt: int, step: int) -> None:
        """One message to the node."""
        self._order(node, "ask_checkpoint", attempt, step)

    def settle(self, node: str, attempt: int, step: int) -> None:
        """One message to the node."""
        self._order(node, "settle", attempt, step)

    def dump_stacks(self, node: str, attempt: int) -> None:
        """One message to the node."""
        self._order(node, "dump_stacks", attempt)

    def _order(self, node: str, name: str, *args: Any) -> None:
        """Nothing comes back: what goes wrong there, and of a death, `words` tells."""
        actor = self._actors.get(node)
        if actor is not None:
            actor.order.remote(pickle.dumps((name, args)))

    # What is heard.

    def _listen(self, node: str) -> None:
        actor = self._actors.get(node)
        if actor is None:
            return

        def heard(future: Any) -> None:
            error = future.exception()
            if error is not None:
                self._gone(node, error)
                return
            at = time.monotonic()
            self._tell(Heard(node=node, words=pickle.loads(future.result()), at=at))  # noqa: S301
            self._listen(node)

        actor.words.remote().future().add_done_callback(heard)

    def _gone(self, node: str, error: BaseException) -> None:
        if node in self._actors:
            self._tell(Gone(node=node, why=losses.in_words(error), error=error))

    def _drained(self, found: Mapping[str, int]) -> None:
        for notice in drains.now(found, self._notices):
            self._tell(notice)
        self._decide(partial(self._seats.drained, found))

    # Which nodes there are.

    def joined(self, node: str, node_id: str) -> bool:
        """Remember where it is; whoever else was asked for in its stead is taken back."""
        wanted = self._decide(partial(self._seats.joined, node, node_id))
        if wanted:
            self._any_came_up = True
            self._up.add(node)
        return wanted

    def release(self, node: str) -> None:
        """Kill the agent, whose fork server then ends its workers."""
        self._lose(node)

    def replace(self, gone: Gone) -> None:
        """Its seat stays ours and is manned again; where agents are spread, another one is asked for too."""
        never_came_up = gone.node in self._actors and gone.node not in self._up
        host = self._seats.host(gone.node)
        pause = self._lose(gone.node, silent=gone.silent)
        if never_came_up and self._is_hopeless(gone):
            raise _cannot_start(gone)
        if pause:
            where = f"on the host {host[:8]}" if host else "at its place"
            self._say(f"agents die one after the other {where}: the next is started in {count(pause, 'second')}")

    def _is_hopeless(self, gone: Gone) -> bool:
        """Whether waiting would not mend it: on one host of several, it may."""
        if losses.hopeless(gone.error):
            return len(self._up) < self._plan.min_nodes
        return not self._any_came_up and self._seats.false_starts >= _MOST_FALSE_STARTS

    def _lose(self, node: str, *, silent: bool = False) -> float:
        self._up.discard(node)
        return self._decide(partial(self._seats.lost, node, silent=silent))

    def shun(self, host: str) -> None:
        """What is asked for there is taken back."""
        self._decide(partial(self._seats.shun, host))

    def readmit(self, host: str) -> None:
        """It may be used again."""
        self._decide(partial(self._seats.readmit, host))

    def _decide(self, ask: Callable[[float], Answer]) -> Answer:
        """Tell the seats something, and have done what follows."""
        with self._lock:
            answer = ask(time.monotonic())
            for deed in self._seats.take():
                self._to_do.put(partial(self._do, deed))
        return answer

    # What is done about it, in the thread.

    def _work(self) -> None:
        looked = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            with self._lock:
                astray, wake = self._seats.astray(), self._seats.wake(now)
            if astray and now - looked >= _LOOK_SECONDS:
                looked = now
                self._look_where_the_gang_is()
            if self._warmth is not None:
                self._warmth.look(now)
            wait = min(_LOOK_SECONDS, _LOOK_SECONDS if wake is None else max(0.0, wake - now))
            try:
                self._to_do.get(timeout=wait)()
            except queue.Empty:
                self._decide(self._seats.tick)

    def _look_where_the_gang_is(self) -> None:
        with contextlib.suppress(RayError, RuntimeError):  # the head does not answer; it is asked again
            self._decide(partial(self._seats.moved, self._reservation.gang_hosts()))

    def _do(self, deed: Deed) -> None:
        match deed:
            case AskGang():
                self._reservation.gang(deed.bundles)
                self._watch(next(iter(deed.bundles)))
            case Ask():
                self._reservation.one(deed.seat, deed.bundle, deed.off)
                self._watch(deed.seat)
            case Man():
                self._man(deed)
            case Announce():
                self._tell(Granted(node=deed.node, host=deed.host, address=self._address(deed.host)))
            case End():
                self._end(deed)
            case GiveBack():
                with contextlib.suppress(Exception):
                    self._reservation.give_back(deed.seat)

    def _watch(self, seat: int) -> None:
        self._reservation.when_granted(seat, lambda: self._to_do.put(partial(self._granted, seat)))

    def _granted(self, seat: int) -> None:
        try:
            hosts = self._reservation.hosts(seat)
        except (RayError, RuntimeError):  # the head does not answer; it is asked again
            self._to_do.put(partial(self._granted, seat))
        else:
            self._placed.update(hosts)
            self._decide(partial(self._seats.granted, hosts))
            if self._warmth is not None:  # after what follows of the grant: some may not be wanted there
                self._to_do.put(partial(self._warmth.granted, hosts, self._address))

    def _man(self, deed: Man) -> None:
        settings = replace(self._told.settings, node=deed.node)
        told = replace(self._told, nproc=deed.bundle.nproc, settings=settings)
        if self._warmth is not None and deed.seat not in self._placed:
            self._warmth.wants(deed, told)
        else:
            self._start(deed, told, self._reservation.options(deed.seat, deed.bundle))

    def _start(self, deed: Man, told: AgentSettings, options: Mapping[str, Any]) -> None:
        try:
            actor = self._actor_class.options(**options).remote(told)
        except (RayError, RuntimeError) as error:
            self._tell(Gone(node=deed.node, why=losses.in_words(error), error=error))
        else:
            self._take(deed.node, actor)

    def _take(self, node: str, actor: Any) -> None:
        self._actors[node] = actor
        self._listen(node)

    def _address(self, host: str) -> str:
        if self._told.address:
            return self._told.address
        if host not in self._addresses:
            self._addresses = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes()}
        return self._addresses.get(host, "")

    def _end(self, deed: End) -> None:
        if self._warmth is not None:
            self._warmth.ended(deed.node)
        actor = self._actors.pop(deed.node, None)
        if actor is not None:
            with contextlib.suppress(Exception):  # dead already
                ray.kill(actor)
        if deed.why:
            self._tell(Gone(node=deed.node, why=deed.why))

    # The end.

    def values(self, nodes: Mapping[str, Any]) -> dict[int, bytes]:
        """Collect the results of the last attempt."""
        refs = [self._actors[node].values.remote() for node in nodes if node in self._actors]
        try:
            parts = ray.get(refs, timeout=_VALUES_SECONDS)
        except RayError as error:
            msg = f"the results could not be fetched from the nodes: {losses.in_words(error)}"
            raise ClusterError(msg) from error
        return {rank: value for part in parts for rank, value in part.items()}

    def rest(self) -> None:
        """Where they are to be kept warm, have those agents rest that are well and on hosts that are not left."""
        if self._warmth is None:
            return
        self._stop_working()
        staying = [node for node in self._actors if self._seats.stays(node) and self._warmth.can_rest(node)]
        self._warmth.rest({node: self._actors.pop(node) for node in staying}, self._told.keep_warm)

    def close(self) -> None:
        """Have each agent end its processes and wait for that, within seconds; then kill it and give its place back."""
        self._stop_working()
        if self._warmth is not None:
            self._warmth.close()
        actors, self._actors = dict(self._actors), {}
        close([actor for node, actor in actors.items() if node in self._up])
        kill(list(actors.values()), then=self._reservation.cancel)

    def _stop_working(self) -> None:
        self._drains.close()
        self._closed = True
        self._to_do.put(lambda: None)
        if self._hands.ident is not None:
            self._hands.join(_JOIN_SECONDS)


def _cannot_start(gone: Gone) -> ClusterError:
    if "No module named 'raylaunch'" in str(gone.error):
        return ClusterError(
            "raylaunch is not installed on the nodes of the cluster",
            hint="install it there, or name it in the `pip` of the job's runtime environment",
        )
    return ClusterError(f"the agent of {gone.node} cannot start: {gone.why}")
