"""A program that runs two self-checks at a time, each on two forked ranks, one of which is made to fail.

In one check a rank does not come back from an operation, in the other many operations fail. Each writes its rows and
its output to a folder of its own. The program prints the exit codes.
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

from raylaunch.worker.runtime import process_setup
from raylaunch.worker.selfcheck import checks, program, versions

program._MARGIN = 6.0  # noqa: SLF001


def first_time(function, act):
    """Call `act` in place of the first call of `function`."""
    calls = []

    def call(*args, **kwargs):
        calls.append(args)
        return act(lambda: function(*args, **kwargs), *args) if len(calls) == 1 else function(*args, **kwargs)

    return call


def wrong_value(really, tensor, *_):
    really().wait()
    tensor += 1


def wrong_order(really, got, *_):
    really()
    got.reverse()


def raising(really, *_):
    raise ValueError("no cable")


def sleeping(really, *_):
    threading.Event().wait()


def unsupported(*_, **__):  # raises what torch's base class of backends raises
    dist.group.WORLD._get_backend(torch.device("cpu"))._start_coalescing()  # noqa: SLF001


def wrong_in_many_ways(rank):
    dist.all_to_all_single = unsupported
    dist.barrier = lambda **_: None
    if rank == 1:
        dist.all_reduce = first_time(dist.all_reduce, wrong_value)
        dist.all_gather_object = first_time(dist.all_gather_object, wrong_order)
        dist.batch_isend_irecv = first_time(dist.batch_isend_irecv, raising)
        true_versions = versions.versions()
        versions.versions = lambda: true_versions | {"torch": "1.0", "numpy": "0.1"}
        os.environ |= {"GROUP_RANK": "1", "NCCL_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO"}


def one_stuck(rank):
    if rank == 1:
        dist.reduce = first_time(dist.reduce, sleeping)


def start(sabotage):
    """Fork two ranks in a folder with the name of the sabotage."""
    folder = sabotage.__name__
    os.mkdir(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(checks.free_port()), "WORLD_SIZE": "2"}
    parent = os.getpid()
    return [os.fork() or run_rank(rank, folder, sabotage, parent) for rank in range(2)]


def run_rank(rank, folder, sabotage, parent):
    process_setup.die_with_parent(parent)
    try:
        os.chdir(folder)
        for fd in (1, 2):
            os.dup2(os.open(f"said-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sabotage(rank)
        os._exit(program.main(["--timeout", "6", "--json", "rows.json", "--backends", "gloo"]))
    except BaseException:  # a mistake in this program
        traceback.print_exc()
        os._exit(99)


def exit_code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main():
    wrong, stuck = start(wrong_in_many_ways), start(one_stuck)
    codes = [exit_code(stuck[0])]
    os.kill(stuck[1], signal.SIGKILL)
    exit_code(stuck[1])
    print(json.dumps([*codes, *map(exit_code, wrong)]))


if __name__ == "__main__":
    main()
