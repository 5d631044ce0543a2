"""A program: what watching costs a step of an optimizer.

`python -m tests.worker.hook_cost` prints nanoseconds: a step that does nothing, a hook that does nothing, ours.
"""

import json
import os
import sys
from functools import partial
from time import perf_counter_ns

import torch

from raylaunch.worker import attach, page

ROUNDS = 30
STEPS = 2000


class Still(torch.optim.Optimizer):
    """Its step does nothing, so that what remains is the cost of hooks."""

    def __init__(self):
        super().__init__([torch.nn.Parameter(torch.zeros(1))], {})
        self.state[self.param_groups[0]["params"][0]]["step"] = torch.tensor(5.0)

    def step(self):
        pass


def nanoseconds(step):
    """Of one, in the quietest round."""
    found = []
    for _ in range(ROUNDS):
        began = perf_counter_ns()
        for _ in range(STEPS):
            step()
        found.append(perf_counter_ns() - began)
    return min(found) / STEPS


def our_hook():
    """Ours, on a page of its own with a lease that holds."""
    shared, fd = page.Page.create()
    shared.numbers[page.LEASE] = 1 << 62
    os.environ[page.VARIABLE] = f"/proc/{os.getpid()}/fd/{fd}:0"
    hooks = []
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook = hooks.append
    attach.begin()
    return hooks[0]


def main():
    optimizer = Still()
    costs = {"step": optimizer.step}
    for name, hook in (("trivial_hook", lambda *_: None), ("our_hook", our_hook())):
        costs[name] = partial(hook, optimizer, (), {})
    print(json.dumps({f"{name}_ns": round(nanoseconds(call)) for name, call in costs.items()}))


if __name__ == "__main__":
    main()
