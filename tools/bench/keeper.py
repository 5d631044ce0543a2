"""Trains with `State`, and notes when it has restored, and each step, with the time (CLOCK_MONOTONIC) and its host."""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from raylaunch.worker import State


class Big(nn.Module):
    """As large as a model with its optimizer."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(megabytes * 250_000))


def main() -> None:
    folder, megabytes = sys.argv[1], int(sys.argv[2])
    attempt, rank = os.environ["RAYLAUNCH_ATTEMPT"], os.environ["RANK"]
    torch.set_num_threads(1)
    with open(f"{folder}/note.{attempt}.{rank}", "a", buffering=1) as file:

        def note(what: object) -> None:
            file.write(f"{attempt} {rank} {what} {time.monotonic()} {socket.gethostname()}\n")

        big = Big(megabytes)
        state = State(big=big)
        dist.init_process_group("gloo")
        done = state.restore()
        assert not done or int(big.kept[(done - 1) % 1000]) == done - 1
        note("restored")
        for step in range(done, 10**9):
            time.sleep(0.03)
            big.kept[step % 1000] = step
            dist.all_reduce(torch.ones(1))
            state.commit(step)
            note(step)


main()
