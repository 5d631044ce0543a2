"""Decides after which steps `State` commits: each, every Nth, or as often as costs little."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

COST_SHARE = 0.02
"""With `every="auto"`: what commits may cost, as a share of the time between them."""
_AIMED_SHARE = 0.9 * COST_SHARE
"""What `auto` aims at."""
_LIGHT_SHARE = 0.65 * COST_SHARE
"""What light commits may cost."""
_LONGEST_LIGHT_INTERVAL = 4
"""Steps: rarer ones are seldom of use. On a CUDA device each waits until the step is done, which may take too long."""
_SHARE_BESIDE_LIGHT = 0.2 * COST_SHARE
"""What other commits cost if a light one follows each step, since few failures need them then."""
_MOST_DEBT = 8
"""Time over budget lengthens later intervals; at most this many commits' worth is carried over."""
_WARM_AFTER = 3
"""Commits of an attempt, the first to be measured included: the two before fill the pages of the two buffers."""
_STEPS_MEASURED = 16
_SOONER = 64
"""The first commit after a restore follows after this part of the interval, so that a script that fails again and again
gets further. Light commits, beside which the interval is longer, begin after it."""
_MOST_GROWTH = 4
"""How many times as long as the last interval the next one may be: the first commit that is measured may be slow by
chance, and a long interval is only found to be wrong at its end."""
_COSTS_AVERAGED = 8
"""Commits in the mean cost: on a busy machine one may take several times as long as the next."""

Every = Literal["auto"] | int
"""How often to commit."""


class CommitSchedule:
    """Decides whether a step is followed by a commit, in the same way on all ranks.

    With `auto`, rank 0 measures and proposes an interval with each commit. All ranks use it from the next commit on,
    before which they have all got it: see `CommitAgreement`.
    """

    def __init__(self, every: Every) -> None:
        """Raise TypeError or ValueError where `every` is neither `auto` nor a number from 1 on."""
        if every != "auto" and (isinstance(every, bool) or not isinstance(every, int)):
            msg = f'`every` is "auto" or a number of steps; got {every!r}'
            raise TypeError(msg)
        if isinstance(every, int) and every < 1:
            msg = f"`every` is a number of steps from 1 on; got {every}"
            raise ValueError(msg)
        self._every = every
        self._next = 0
        #: After how many steps the next commit follows the last one.
        self.interval = 1
        #: After how many steps there is a light commit, if those are of use; 0: there are none.
        self.light_interval = 1
        self._light_costs: deque[float] = deque(maxlen=_STEPS_MEASURED)
        #: Light commits since the last full commit.
        self._light_since = 0
        #: What a light commit has taken in the present call.
        self._light_cost = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS_MEASURED)
        self._costs: deque[float] = deque(maxlen=_COSTS_AVERAGED)
        #: When the last call of `State.commit` has returned, and when the present one has begun.
        self._called_at: float | None = None
        self._entered_at = 0.0
        #: Seconds of all calls beyond the share that they may have, since costs are measured; None: not yet.
        self._debt: float | None = None

    @property
    def is_automatic(self) -> bool:
        """Whether the ranks have to agree on the interval."""
        return self._every == "auto"

    def is_due(self, completed: int) -> bool:
        """Return whether to commit after this step."""
        return completed >= self._next if isinstance(self._every, str) else completed % self._every == 0

    def restored(self, completed: int, interval: int) -> None:
        """Note what was restored, and the interval that all ranks had agreed on then: it need not be found again."""
        self.interval = interval
        self._next = completed + math.ceil(interval / _SOONER)

    def committed(self, completed: int, interval: int, light_interval: int = 1) -> None:
        """Note a commit, and the intervals that all ranks have agreed on before."""
        self.interval = interval
        self.light_interval = light_interval
        self._next = completed + interval
        if not self._light_since:
            self._light_costs.clear()  # earlier ones say nothing any more
        self._light_since = 0

    def is_light_due(self, completed: int) -> bool:
        """Return whether to make a light commit after this step, if it is of use."""
        return self.is_automatic and self.light_interval > 0 and completed % self.light_interval == 0

    def light_committed(self, cost: float) -> None:
        """Note what a light commit has cost, in seconds."""
        self._light_costs.append(cost)
        self._light_cost = cost
        self._light_since += 1

    # Measuring, on rank 0.

    def step_ended(self, now: float) -> None:
        """Note that the script has done a step: `State.commit` is called. Times are in seconds."""
        if self._called_at is not None:
            self._steps.append(now - self._called_at)
        self._entered_at = now

    def step_begins(self, now: float) -> None:
        """Note that `State.commit` returns, so that the time of the next step begins."""
        if self._debt is not None and self._called_at is not None:
            self._debt += now - self._entered_at - self._light_cost - self._share * (now - self._called_at)
        self._called_at, self._light_cost = now, 0.0

    @property
    def _share(self) -> float:
        """What commits that are not light may cost."""
        if not self._light_costs:
            return _AIMED_SHARE
        if self.light_interval == 1 or not self.step_seconds:
            return _SHARE_BESIDE_LIGHT
        rest = _AIMED_SHARE - self.light_seconds / (max(1, self.light_interval) * self.step_seconds)
        return max(_SHARE_BESIDE_LIGHT, rest)

    @property
    def light_seconds(self) -> float:
        """The median time of the last light commits; 0: there was none."""
        return sorted(self._light_costs)[len(self._light_costs) // 2] if self._light_costs else 0.0

    @property
    def proposed_light_interval(self) -> int:
        """The interval of light commits, in steps, from the next commit on; 0: they cost too much."""
        if len(self._light_costs) < _STEPS_MEASURED or not self.light_interval:
            return self.light_interval
        found = max(1, math.ceil(self.light_seconds / (_LIGHT_SHARE * self.step_seconds)))
        return found if found <= _LONGEST_LIGHT_INTERVAL else 0

    @property
    def step_seconds(self) -> float:
        """The median time of the last steps, without commits; 0 before the second."""
        return sorted(self._steps)[len(self._steps) // 2] if self._steps else 0.0

    def proposed_interval(self, commits: int, cost: float) -> int:
        """Return the interval, in steps, for a commit that costs `cost` seconds. `commits`: made in this attempt.

        It follows the next commit: the interval until that one is known to all ranks already.
        """
        if commits < _WARM_AFTER or not self.step_seconds:
            return self.interval
        self._costs.append(cost)
        mean, earned = sum(self._costs) / len(self._costs), self._share * self.step_seconds
        left = 0.0 if self._debt is None else max(0.0, self._debt) + cost - earned * self.interval
        self._debt = max(0.0, self._debt or 0.0)
        found = max(1, math.ceil((mean + min(max(0.0, left), _MOST_DEBT * mean)) / earned))
        return min(found, _MOST_GROWTH * self.interval)
