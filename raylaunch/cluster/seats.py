"""Which nodes a run wants, where they sit, and what to ask of the cluster next. It knows no Ray and no clock.

A seat is a bundle of resources on some host: one of the gang, which stays ours as long as any of them is needed, since
Ray takes no group back in part, or one of a group of its own. At most one agent, a node of the run, is at a seat. Where
a node was lost, its seat is manned again and, where agents are spread over hosts, another seat is asked for as well:
whoever comes up first is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from raylaunch.cluster.deeds import Announce, Ask, AskGang, Deed, End, GiveBack, Man
from raylaunch.cluster.patience import Patience
from raylaunch.core.layout import Bundle

NOT_NEEDED = "it is not needed any more"
_LEAVES = "its host is to be left"
_OCCUPIED = "its host has an agent already"

_CUT_OFF_SECONDS = 70.0
"""For as long Ray may take a host that was cut off for a good one, and give places there that nobody can reach."""


@dataclass(slots=True, kw_only=True)
class _Seat:
    number: int
    bundle: Bundle
    gang: bool
    off: frozenset[str] = frozenset()
    #: Where it is, or was when last seen; "": not known.
    host: str = ""
    #: Who is here or starts here; "": nobody.
    node: str = ""
    up_at: float | None = None
    announced: bool = False
    #: A node was lost here, or is slow to come up: it may still come, but is not counted on.
    failed: bool = False
    granted_at: float = inf
    #: Not manned before.
    due: float = 0.0

    @property
    def up(self) -> bool:
        return self.up_at is not None


class Seats:
    """All seats of a run. Whatever is told leaves deeds behind, which `take` hands out."""

    def __init__(self, bundles: Sequence[Bundle], gang: int, *, spread: bool) -> None:
        """`bundles`: one for each node that is wanted, of which the first `gang` are worth nothing without each other.

        `spread`: each on a host of its own.
        """
        same: dict[Bundle, Bundle] = {}
        #: Equal ones are one and the same, which is quick to tell.
        self._bundles = tuple(same.setdefault(bundle, bundle) for bundle in bundles)
        self._kinds = tuple(same)
        self._wanted = Counter(self._bundles)
        self._spread = spread
        self._count = 0
        self._nodes = 0
        self._deeds: list[Deed] = []
        self._seats: dict[int, _Seat] = {}
        self._by_node: dict[str, _Seat] = {}
        #: How many nodes are up on a host.
        self._up_on: Counter[str] = Counter()
        #: How many nodes with a bundle are up.
        self._up: Counter[Bundle] = Counter()
        self._gang = [self._add(bundle, gang=True) for bundle in self._bundles[:gang]]
        #: Nothing beyond the gang is asked for before it is there: a single seat might take a host that it needs.
        self._complete = False
        self._draining: frozenset[str] = frozenset()
        self._shunned: frozenset[str] = frozenset()
        self._cut_off: dict[str, float] = {}
        #: One for all seats with equal ones: where many nodes are lost, many are asked for off all other hosts.
        self._latest_off: frozenset[str] = frozenset()
        self._patience = Patience()
        self.any_came_up = False
        self.false_starts = 0
        """Agents that died before they came up, since one last came up."""

    # What is told.

    def start(self, now: float) -> None:
        """Ask for the gang."""
        self._deeds.append(AskGang({seat.number: seat.bundle for seat in self._seats.values()}))
        self._settle(now)

    def granted(self, hosts: Mapping[int, str], now: float) -> None:
        """Seats were granted: where they are, by number."""
        manned = Counter(seat.host for seat in self._by_node.values() if seat.number not in hosts)
        for number, host in hosts.items():
            seat = self._seats.get(number)
            if seat is None:
                continue
            self._complete = True
            if seat.up:
                continue
            seat.host = host
            if not seat.node:
                continue
            if not self._is_bad(seat) and not (self._spread and manned[host]):
                manned[host] += 1
                seat.announced, seat.granted_at = True, now
                self._deeds.append(Announce(seat.node, host))
            else:
                self._clear(seat, _OCCUPIED)
        self._settle(now)

    def moved(self, hosts: Mapping[int, str], now: float) -> None:
        """Where seats of the gang are by now, by number: those of a host that died are moved."""
        for number, host in hosts.items():
            seat = self._seats.get(number)
            if seat is not None and not seat.up and host and host != seat.host:
                seat.host, seat.due = host, now
        self._settle(now)

    def joined(self, node: str, host: str, now: float) -> bool:
        """A node came up. False: it is not wanted."""
        seat = self._at(node)
        if seat is None:
            return False
        seat.host = host
        wanted = not self._is_bad(seat) and self._missing()[seat.bundle] > 0
        if seat.granted_at < inf:
            self._patience.came_up(now - seat.granted_at)
        if wanted:
            seat.up_at, seat.failed, seat.announced = now, False, True
            self._up_on[host] += 1
            self._up[seat.bundle] += 1
            self.any_came_up, self.false_starts = True, 0
            self._cut_off.pop(host, None)
        else:
            self._clear(seat, _OCCUPIED)
        self._settle(now)
        return wanted

    def lost(self, node: str, now: float, *, silent: bool = False) -> float:
        """A node is gone, or is not to be waited for. After how many seconds another starts at its seat."""
        seat = self._at(node)
        if seat is None:
            return 0.0
        lived = 0.0 if seat.up_at is None else now - seat.up_at
        pause = self._patience.died(seat.host or f"seat {seat.number}", lived, silent=silent)
        if seat.up_at is None:
            self.false_starts += 1
        if silent and seat.host:
            self._cut_off[seat.host] = now + _CUT_OFF_SECONDS
        self._leave(seat)
        seat.due = now + pause
        self._deeds.append(End(node, ""))
        self._settle(now)
        return pause

    def drained(self, hosts: Iterable[str], now: float) -> None:
        """These hosts, and no others, are being drained."""
        self._draining = frozenset(hosts)
        self._settle(now)

    def shun(self, host: str, now: float) -> None:
        """No more nodes on this host."""
        self._shunned |= {host}
        self._settle(now)

    def readmit(self, host: str, now: float) -> None:
        """It may be used again."""
        self._shunned -= {host}
        self._settle(now)

    def tick(self, now: float) -> None:
        """Time passed."""
        self._settle(now)

    # What is asked.

    def take(self) -> list[Deed]:
        """What is to be done, in this order."""
        deeds, self._deeds = self._deeds, []
        return deeds

    @property
    def up(self) -> int:
        """Nodes that are up, wherever they are."""
        return sum(seat.up for seat in self._seats.values())

    def host(self, node: str) -> str:
        """Where a node is, as far as known."""
        seat = self._at(node)
        return "" if seat is None else seat.host

    def stays(self, node: str) -> bool:
        """Whether it is up on a host that is to be kept."""
        seat = self._at(node)
        return seat is not None and seat.up and seat.host not in self._draining | self._shunned

    def astray(self) -> bool:
        """Whether seats of the gang may be on other hosts than they were."""
        return any(seat.gang and seat.failed for seat in self._seats.values())

    def wake(self, now: float) -> float | None:
        """When `tick` should come, if nothing comes before."""
        dues = [seat.due for seat in self._seats.values() if seat.failed and not seat.node]
        slow = [self._slow_at(seat) for seat in self._seats.values() if seat.node and not seat.up and not seat.failed]
        return min((at for at in (*dues, *slow, *self._cut_off.values()) if now < at < inf), default=None)

    # What follows.

    def _settle(self, now: float) -> None:
        self._cut_off = {host: until for host, until in self._cut_off.items() if until > now}
        for seat in list(self._seats.values()):
            if seat.up:
                continue
            if (seat.node or not seat.gang) and self._is_bad(seat):
                self._clear(seat, _OCCUPIED if self._is_occupied(seat) else _LEAVES)
            seat.failed |= self._slow_at(seat) <= now
        missing = self._missing()
        for bundle in self._kinds:
            self._settle_kind(bundle, missing[bundle], now)
        self._renew_outdated()
        self._leave_gang()

    def _settle_kind(self, bundle: Bundle, need: int, now: float) -> None:
        """Have as many seats asked for as nodes with this bundle are missing, beside those manned again."""
        waiting = [seat for seat in self._seats.values() if not seat.up and seat.bundle is bundle]
        for seat in waiting:
            if need == 0 and seat.failed:
                self._clear(seat, NOT_NEEDED)
            elif not seat.node and seat.due <= now and not self._is_bad(seat):
                self._man(seat)
        hopeful = [seat for seat in waiting if seat.number in self._seats and self._is_hopeful(seat)]
        if self._complete:
            for _ in range(need - len(hopeful)):
                self._ask(bundle)
        spare = [seat for seat in hopeful if not seat.gang]
        spare.sort(key=lambda seat: (seat.host != "", -seat.number))
        for seat in spare[: max(0, len(hopeful) - need)]:
            self._clear(seat, NOT_NEEDED)

    def _renew_outdated(self) -> None:
        """Seats that may now be where they were to be kept off, and those that are to be kept off more."""
        found: dict[tuple[int, int], bool] = {}  # the same for all seats that are kept off the same hosts
        for seat in list(self._seats.values()):
            if seat.gang or seat.host:
                continue
            alike = id(seat.off), id(seat.bundle)
            if alike not in found:
                found[alike] = bool(seat.off - self._off(seat.bundle) or self._shunned - seat.off)
            if found[alike]:
                self._clear(seat, NOT_NEEDED)
                self._ask(seat.bundle)

    def _leave_gang(self) -> None:
        """Nobody of it is needed any more: else it would keep hosts from others, and ask for those that died."""
        is_empty = self._gang and not any(seat.node for seat in self._gang)
        if self._complete and is_empty and not self._missing():
            for seat in self._gang:
                self._give_back(seat)
            self._gang = []

    def _missing(self) -> Counter[Bundle]:
        """Of the wanted nodes, those that are not up on a host that is to be kept."""
        leaving = self._draining | self._shunned
        if not leaving:
            return self._wanted - self._up
        return self._wanted - Counter(
            seat.bundle for seat in self._seats.values() if seat.up and seat.host not in leaving
        )

    def _is_hopeful(self, seat: _Seat) -> bool:
        """Whether it may be counted on. Its host may be gone where an agent was lost, and another one will do then."""
        if self._is_bad(seat):
            return False
        return not seat.failed or not self._spread or not seat.host

    def _is_bad(self, seat: _Seat) -> bool:
        """Whether no node is wanted on its host."""
        return seat.host in self._draining | self._shunned or self._is_occupied(seat)

    def _is_occupied(self, seat: _Seat) -> bool:
        return self._spread and self._up_on[seat.host] > seat.up

    def _off(self, bundle: Bundle) -> frozenset[str]:
        """Hosts to keep a seat off that is asked for now."""
        off = self._shunned.union(bundle.avoid)
        if self._spread:
            off = off.union(self._cut_off, (seat.host for seat in self._seats.values() if seat.host))
        return off

    def _slow_at(self, seat: _Seat) -> float:
        return seat.granted_at + self._patience.slow_after

    # How it is done.

    def _at(self, node: str) -> _Seat | None:
        return self._by_node.get(node)

    def _add(self, bundle: Bundle, *, gang: bool, off: frozenset[str] = frozenset()) -> _Seat:
        self._count += 1
        seat = _Seat(number=self._count, bundle=bundle, gang=gang, off=off)
        self._seats[seat.number] = seat
        return seat

    def _ask(self, bundle: Bundle) -> None:
        off = self._off(bundle)
        if off != self._latest_off:
            self._latest_off = off
        seat = self._add(bundle, gang=False, off=self._latest_off)
        self._deeds.append(Ask(seat.number, bundle, seat.off))
        self._man(seat)

    def _man(self, seat: _Seat) -> None:
        self._nodes += 1
        seat.node, seat.granted_at = f"node-{self._nodes}", inf
        self._by_node[seat.node] = seat
        self._deeds.append(Man(seat.number, seat.node, seat.bundle))

    def _leave(self, seat: _Seat) -> None:
        """Nobody is there any more."""
        self._by_node.pop(seat.node, None)
        if seat.up:
            self._up_on[seat.host] -= 1
            self._up[seat.bundle] -= 1
        seat.node, seat.up_at, seat.announced, seat.failed = "", None, False, True

    def _clear(self, seat: _Seat, why: str) -> None:
        """Have nobody there. A seat of its own is given back; one of the gang stays, for the next who needs it."""
        if seat.node:
            self._deeds.append(End(seat.node, why if seat.announced else ""))
        self._leave(seat)
        if not seat.gang:
            self._give_back(seat)

    def _give_back(self, seat: _Seat) -> None:
        del self._seats[seat.number]
        self._deeds.append(GiveBack(seat.number))
