"""How long a node may go on without a word from the driver. Its agent says so on the page; nobody needs the agent for
knowing that it is over.
"""

from __future__ import annotations

from raylaunch.worker.page import LEASE, Page, lease_clock


def seconds_left(page: Page) -> float | None:
    """Until it is over; None: there is none."""
    until = page.numbers[LEASE]
    return (until - lease_clock()) / 1e9 if until else None


def is_over(page: Page) -> bool:
    """Whether this node counts as lost by now."""
    left = seconds_left(page)
    return left is not None and left <= 0


def must_be_told(page: Page, until_ns: int) -> bool:
    """Whether somebody who sleeps until the present lease is over would oversleep this one."""
    present = page.numbers[LEASE]
    return until_ns != 0 and (present == 0 or until_ns < present)
