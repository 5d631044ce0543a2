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
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayError

from raylaunch.cluster import drains, losses, warm
from raylaunch.cluster.actor import actor_class, close, kill
from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.deeds import Announce, Ask, AskGang, Deed, End, GiveBack, Man
from raylaunch.cluster.fleet import Gone, Granted, Heard, Hopeless, Tell
from raylaunch.cluster.head import HeadWatch
from raylaunch.cluster.placement import Reservation
from raylaunch.cluster.seated import SeatedFleet
from raylaunch.cluster.warm import Pool
from raylaunch.cluster.warmth import Warmth
from raylaunch.core.plan import Plan
from raylaunch.core.words import count
from raylaunch.errors import ClusterError

_JOIN_SECONDS = 2.0
_ASK_SECONDS = 60.0
"""For as long Ray is asked for the same."""
_VALUES_SECONDS = 60.0
"""For as long a node may say nothing while its results come. It may be busy with them, but not gone."""
_LOOK_SECONDS = 1.0
_MOST_FALSE_STARTS = 3


class RayFleet(SeatedFleet):
    """One call to `words` is always pending at each agent, so whatever happens is pushed to us.

    What is asked of Ray is asked in a thread of its own, in the order of the decisions: Ray may make it wait.
    """

    def __init__(self, plan: Plan, told: AgentSettings, say: Callable[[str], None], pool: Pool | None = None) -> None:
        """`say`: takes a line for a person, in the thread that calls us. `pool`: where agents rest between runs."""
        super().__init__(plan, told, say)
        self._plan = plan
        self._reservation = Reservation(spread=plan.spread)
        self._actor_class = actor_class()
        #: All and only the agents that were started and are neither gone nor given up.
        self._actors: dict[str, Any] = {}
        #: When each said something last.
        self._heard: dict[str, float] = {}
        self._to_do: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._pool = pool
        self._warmth: Warmth | None = None
        if pool is not None:
            self._warmth = Warmth(pool, self._reservation.options, self._start, self._take, self._to_do)
        #: Seats that have a host, or had one.
        self._placed: set[int] = set()
        self._addresses: dict[str, str] = {}
        #: This process's own host.
        self._here = ""
        self._hands = threading.Thread(target=self._work, daemon=True, name="raylaunch-fleet")
        self._notices = drains.Notices()
        self._drains = drains.DrainWatch(self._drained)
        self._head = HeadWatch(self._head_is_there, lambda error: self._tell(Hopeless(error=error)))

    def start(self, tell: Tell) -> None:
        """Reserve the gang; each agent starts as soon as its place is granted. The others are asked for then."""
        self._tell = tell
        self._here = ray.get_runtime_context().get_node_id()
        if self._pool is not None:
            self._pool.keep(warm.key(replace(self._told, nproc=bundle.nproc)) for bundle in self._plan.bundles)
        self._decide(self._seats.start)
        try:
            for _ in range(self._to_do.qsize()):
                self._to_do.get()()  # here, so that whoever asked hears what is wrong with it
        except RayError as error:
            raise ClusterError(f"no nodes can be asked for: {losses.in_words(error)}") from error
        self._hands.start()
        self._drains.start()
        self._head.start()

    # Orders.

    def _order(self, node: str, name: str, *args: Any) -> None:
        """One message. Nothing comes back: what goes wrong there, and of a death, `words` tells."""
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
            at = self._heard[node] = time.monotonic()
            self._tell(Heard(node=node, words=pickle.loads(future.result()), at=at))  # noqa: S301
            self._listen(node)

        actor.words.remote().future().add_done_callback(heard)

    def _gone(self, node: str, error: BaseException) -> None:
        if node in self._actors:
            self._tell(Gone(node=node, why=losses.in_words(error), error=error))

    def _drained(self, found: Mapping[str, int]) -> None:
        for notice in drains.now(found, self._notices):
            self._tell(replace(notice, ours=notice.host == self._here))
        self._to_do.put(partial(self._decide, partial(self._seats.drained, found)))

    # Which nodes there are.

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
        return not self._seats.any_came_up and self._seats.false_starts >= _MOST_FALSE_STARTS

    def _lose(self, node: str, *, silent: bool = False) -> float:
        self._up.discard(node)
        return self._decide(partial(self._seats.lost, node, silent=silent))

    # What is done about it, in the thread.

    def _put(self, deed: Deed) -> None:
        self._to_do.put(partial(self._do, deed))

    def _work(self) -> None:
        try:
            while not self._closed.is_set():
                self._work_on()
        except Exception as error:  # noqa: BLE001
            why = f"{type(error).__name__}: {error}"
            self._tell(Hopeless(error=ClusterError(f"no more nodes can be asked for: {why}")))

    def _work_on(self) -> None:
        now = time.monotonic()
        if self._warmth is not None:
            self._warmth.look(now)
        wake = self._wake(now)
        wait = min(_LOOK_SECONDS, _LOOK_SECONDS if wake is None else max(0.0, wake - now))
        try:
            do = self._to_do.get(timeout=wait)
        except queue.Empty:
            self._decide(self._seats.tick)
        else:
            self._persist(do)

    def _persist(self, do: Callable[[], None]) -> None:
        """The head may not answer for a while: it is asked again. Where it is gone for good, its watch tells."""
        until = time.monotonic() + _ASK_SECONDS
        while not self._closed.is_set():
            try:
                return do()
            except AuthenticationError:  # of a head that was started anew: nothing more is to be had of it
                self._closed.wait()
            except (RayError, RuntimeError):
                if time.monotonic() >= until:
                    raise
                self._closed.wait(_LOOK_SECONDS)
        return None

    def _head_is_there(self) -> None:
        self._drains.look()
        with self._lock:
            astray = self._seats.astray()
        if astray:
            self._to_do.put(self._look_where_the_gang_is)

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
                self._reservation.give_back(deed.seat)

    def _watch(self, seat: int) -> None:
        self._reservation.when_granted(seat, lambda: self._to_do.put(partial(self._granted, seat)))

    def _granted(self, seat: int) -> None:
        hosts = self._reservation.hosts(seat)
        self._placed.update(hosts)
        self._decide(partial(self._seats.granted, hosts))
        if self._warmth is not None:  # after what follows of the grant: some may not be wanted there
            self._to_do.put(partial(self._warmth.granted, hosts, self._address))

    def _man(self, deed: Man) -> None:
        told = self._settings(deed)
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
        """Collect the results of the last attempt, however long they take, from nodes that are heard of."""
        asked = {self._actors[node].values.remote(): node for node in nodes if node in self._actors}
        self._await(asked)
        try:
            parts = ray.get([*asked])
        except RayError as error:
            msg = f"the results could not be fetched from the nodes: {losses.in_words(error)}"
            raise ClusterError(msg) from error
        return {rank: value for part in parts for rank, value in part.items()}

    def _await(self, asked: Mapping[Any, str]) -> None:
        """Until all answers are there. Of a host that was cut off, Ray would say nothing for a minute, or ten."""
        began, missing = time.monotonic(), [*asked]
        while missing:
            _, missing = ray.wait(missing, num_returns=len(missing), timeout=_LOOK_SECONDS)
            for node in [asked[ref] for ref in missing]:
                silent = time.monotonic() - max(began, self._heard.get(node, began))
                if silent >= _VALUES_SECONDS:
                    why = f"nothing was heard of it for {silent:.0f} s"
                    raise ClusterError(f"the results of {node} could not be fetched: {why}")

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
        self._head.close()
        self._drains.close()
        self._closed.set()
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
