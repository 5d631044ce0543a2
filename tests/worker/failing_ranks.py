"""A program: starts two checks at a time, on two forked ranks each, one of which was told to fail.

One check has a rank that stops, in the other many things go wrong. Each leaves its rows and words in a folder of its
own; the exit codes are printed.
"""

import json
import os
import signal
import threading
import traceback

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp

from raylaunch.worker import boot
from raylaunch.worker.selfcheck import bench, collectives, council, course, program, rendezvous, versions

course._GRACE = 2.0
council._MARGIN = 6.0
collectives._BARRIER_LAG = 1.0


def first_time(function, act):
    """Do `act` in place of the first call."""
    calls = []

    def call(*args, **kwargs):
        calls.append(args)
        return act(lambda: function(*args, **kwargs), *args) if len(calls) == 1 else function(*args, **kwargs)

    return call


def wrong_value(really, tensor, *_):
    really()
    tensor += 1


def wrong_order(really, got, *_):
    really()
    got.reverse()


def raising(really, *_):
    raise ValueError("no cable")


def sleeping(really, *_):
    threading.Event().wait()


def stopping(really, *_):
    os.kill(os.getpid(), signal.SIGSTOP)


def unsupported(*_, **__):  # what torch's own base class says
    dist.group.WORLD._get_backend(torch.device("cpu"))._start_coalescing()


def wrong_in_many_ways(rank):
    dist.all_to_all_single = unsupported
    dist.barrier = lambda **_: None
    rendezvous._reads = lambda *_, true=rendezvous._reads: rank == 0 and true(*_)
    if rank == 1:
        rendezvous.init_tcp = raising
        dist.all_reduce = first_time(dist.all_reduce, wrong_value)
        dist.broadcast = first_time(dist.broadcast, raising)
        dist.gather = first_time(dist.gather, sleeping)
        dist.all_gather = first_time(dist.all_gather, wrong_order)
        true_versions = versions.versions()
        versions.versions = lambda: true_versions | {"torch": "1.0", "numpy": "0.1"}
        os.environ |= {"GROUP_RANK": "1", "NCCL_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO"}


def one_stopped(rank):
    if rank == 1:
        dist.reduce = first_time(dist.reduce, stopping)


def started(sabotage):
    """Two ranks, in a folder of the sabotage's name."""
    folder = sabotage.__name__
    os.mkdir(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(bench.free_port()), "WORLD_SIZE": "2"}
    parent = os.getpid()
    return [os.fork() or become(rank, folder, sabotage, parent) for rank in range(2)]


def become(rank, folder, sabotage, parent):
    boot.die_with_parent(parent)
    try:
        os.chdir(folder)
        for fd in (1, 2):
            os.dup2(os.open(f"said-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sabotage(rank)
        os._exit(program.main(["--timeout", "6", "--json", "rows.json", "--backends", "gloo"]))
    except BaseException:  # such as a mistake in here
        traceback.print_exc()
        os._exit(99)


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main():
    wrong, stopped = started(wrong_in_many_ways), started(one_stopped)
    codes = [ended(stopped[0])]
    os.kill(stopped[1], signal.SIGKILL)
    ended(stopped[1])
    print(json.dumps([*codes, *map(ended, wrong)]))


if __name__ == "__main__":
    main()
