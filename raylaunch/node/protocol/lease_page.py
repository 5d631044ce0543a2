"""The lease of a node on its shared page: how long its processes may live without a word from the driver.

The agent writes the time of expiry; the fork server and the workers read it, so that they end even if the agent hangs.
"""

from __future__ import annotations

from raylaunch.worker.heartbeats.shared_page import LEASE_EXPIRES_AT, SharedPage, lease_clock


def seconds_left(page: SharedPage) -> float | None:
    """Return the seconds until the lease expires; None: there is no lease."""
    until = page.numbers[LEASE_EXPIRES_AT]
    return (until - lease_clock()) / 1e9 if until else None


def has_expired(page: SharedPage) -> bool:
    """Return whether the lease has expired."""
    left = seconds_left(page)
    return left is not None and left <= 0


def renew(page: SharedPage, until_ns: int) -> bool:
    """Let the lease expire at this time, 0: never. A lease that has expired stays so.

    Return whether that is earlier than before: the fork server may be sleeping until then.
    """
    present = page.numbers[LEASE_EXPIRES_AT]
    if has_expired(page):
        return False
    page.numbers[LEASE_EXPIRES_AT] = until_ns
    return until_ns != 0 and (present == 0 or until_ns < present)
