"""A program that measures what the optimizer hook and `should_checkpoint` cost.

`python -m tests.worker.hook_cost` prints nanoseconds of a step that does nothing, a hook that does nothing, our hook,
and `should_checkpoint`. The exit code is 1 if one of the last two takes 5 microseconds or more.
"""

import json
import os
import sys
from functools import partial
from time import perf_counter_ns

import torch

from raylaunch.worker import should_checkpoint
from raylaunch.worker.heartbeats import heartbeat_writer, shared_page

ROUNDS = 30
STEPS = 2000
GOAL_NS = 5000


class NoOpOptimizer(torch.optim.Optimizer):
    """Its step does nothing, so that only the cost of hooks is measured."""

    def __init__(self):
        super().__init__([torch.nn.Parameter(torch.zeros(1))], {})
        self.state[self.param_groups[0]["params"][0]]["step"] = torch.tensor(5.0)

    def step(self):
        pass


def nanoseconds(step):
    """Return the time of one step in the fastest round."""
    found = []
    for _ in range(ROUNDS):
        began = perf_counter_ns()
        for _ in range(STEPS):
            step()
        found.append(perf_counter_ns() - began)
    return min(found) / STEPS


def our_hook():
    """Return our hook, with a page of its own and a lease that does not expire."""
    shared, fd = shared_page.SharedPage.create()
    shared.numbers[shared_page.LEASE_EXPIRES_AT] = 1 << 62
    os.environ[shared_page.PAGE_VARIABLE] = f"/proc/{os.getpid()}/fd/{fd}:0"
    hooks = []
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook = hooks.append
    heartbeat_writer.claim()
    return hooks[0]


def main():
    optimizer = NoOpOptimizer()
    costs = {"step": optimizer.step}
    for name, hook in (("trivial_hook", lambda *_: None), ("our_hook", our_hook())):
        costs[name] = partial(hook, optimizer, (), {})
    costs["should_checkpoint"] = partial(should_checkpoint, 7)
    found = {f"{name}_ns": round(nanoseconds(call)) for name, call in costs.items()}
    print(json.dumps(found))
    return int(max(found["our_hook_ns"], found["should_checkpoint_ns"]) >= GOAL_NS)


if __name__ == "__main__":
    sys.exit(main())
