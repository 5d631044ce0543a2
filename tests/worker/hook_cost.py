"""A program: what watching costs a step of an optimizer.

`python -m tests.worker.hook_cost` prints nanoseconds: a step that does nothing, a hook that does nothing, ours, and
`should_checkpoint`. Exit code 1 where one of ours takes 5 microseconds or more.
"""

import json
import os
import sys
from functools import partial
from time import perf_counter_ns

import torch

from raylaunch.worker import attach, page, should_checkpoint

ROUNDS = 30
STEPS = 2000
GOAL_NS = 5000


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
    costs["should_checkpoint"] = partial(should_checkpoint, 7)
    found = {f"{name}_ns": round(nanoseconds(call)) for name, call in costs.items()}
    print(json.dumps(found))
    return int(max(found["our_hook_ns"], found["should_checkpoint_ns"]) >= GOAL_NS)


if __name__ == "__main__":
    sys.exit(main())
