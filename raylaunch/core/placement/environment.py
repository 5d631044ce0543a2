"""What each worker is told: its ranks, and its environment variables.

The environment of a worker is the node's, updated by the submitter's and the job's (`base_env`, once for each node),
and then by the ranks and the rendezvous of the attempt (`worker_env`).
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from raylaunch.core.environ import snapshot
from raylaunch.core.job.node_rules import NodeAttributes, expand
from raylaunch.core.newtypes import NO_HOST, HostId, NodeId
from raylaunch.core.placement import devices

_HOST_VARIABLES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "TERM", "LANG"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "DISPLAY"),
        *("CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "MAIL", "_", *devices.VARIABLES),
    )
)
_HOST_PREFIXES = ("SSH_", "XDG_", "KUBERNETES_", "SLURM_", "DBUS_", "RAY_", "LC_")

_KEPT_RAY_VARIABLES = frozenset(("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"))
"""Variables that `ray.init()` in a script needs to find the same cluster, besides RAY_ADDRESS."""

_RAY_DEBUGGER = "driver_set_trace"
"""`ray.init()` sets PYTHONBREAKPOINT to a function whose name ends so, and it stays after `ray.shutdown()`."""

_SET_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")
"""Variables that Ray overwrites in its own workers, so that the node's own values are not known."""


_SEVERAL = 2
"""CPUs from which on a worker has one thread for each. `cpus_per_worker` is 1 by default, which says nothing."""


# Ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node that joined, and can be part of a world."""

    node: NodeId
    address: str
    nproc: int
    draining: bool = False
    host: HostId = NO_HOST
    """The id of the host (of the Ray node), the same for all agents that run there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The ranks of one node in one attempt: `base_rank` to `base_rank + nproc - 1`."""

    attempt: int
    node: NodeId
    node_rank: int
    nnodes: int
    base_rank: int
    nproc: int
    world_size: int
    nhosts: int = 1
    """The number of hosts of the world. Several nodes may share a host."""
    host_workers: int = 0
    """The number of the attempt's workers on its host, on other nodes there too; 0: not known."""

    @property
    def ranks(self) -> range:
        """The global ranks of its workers."""
        return range(self.base_rank, self.base_rank + self.nproc)


@lru_cache(maxsize=1 << 16)
def natural_key(text: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key for natural sort order: 10.0.0.9 before 10.0.0.10, node-2 before node-10."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", text) if part)


def order(candidates: Iterable[Member], survivors: Sequence[NodeId]) -> tuple[Member, ...]:
    """Sort candidates into rank order: survivors as they were, then newcomers by address and name."""
    new = {member.node: member for member in candidates}
    kept = [new.pop(node) for node in survivors if node in new]
    return (*kept, *sorted(new.values(), key=lambda member: (natural_key(member.address), natural_key(member.node))))


def assign(attempt: int, roster: Sequence[Member]) -> tuple[Assignment, ...]:
    """Assign ranks in the order of the roster: `base_rank` is the number of workers of the nodes before."""
    world_size = sum(member.nproc for member in roster)
    nhosts = len({member.host for member in roster})
    host_workers: Counter[HostId] = Counter()
    for member in roster:
        host_workers[member.host] += member.nproc
    found: list[Assignment] = []
    base = 0
    for node_rank, member in enumerate(roster):
        found.append(
            Assignment(
                attempt=attempt,
                node=member.node,
                node_rank=node_rank,
                nnodes=len(roster),
                base_rank=base,
                nproc=member.nproc,
                world_size=world_size,
                nhosts=nhosts,
                host_workers=host_workers[member.host] if member.host != NO_HOST else 0,
            )
        )
        base += member.nproc
    return tuple(found)


# The environment.


def submitted(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the submitting process's variables that the workers inherit; torchrun's inherit all.

    Variables that describe the submitter's machine, or that Ray set in its process, are left out.
    """
    return {
        name: value
        for name, value in snapshot(environ).items()
        if name not in _HOST_VARIABLES
        and not name.startswith(_HOST_PREFIXES)
        and not (name == "PYTHONBREAKPOINT" and value.endswith(_RAY_DEBUGGER))
    }


def base_env(
    node: Mapping[str, str],
    submitter: Mapping[str, str],
    given: Iterable[Mapping[str, str]],
    *,
    place: NodeAttributes,
    nproc: int,
    cpus_per_worker: float = 1.0,
    ray_address: str,
) -> dict[str, str]:
    """Return the node's own environment, updated by the submitter's, then by what the job gives.

    `given` has the `env` of the job, then of each rule that matches the node; values may refer to earlier ones.
    `ray_address` is "" without Ray; else variables that Ray set for itself are removed. Raise ValueError for a value
    with a placeholder that this node cannot fill in.
    """
    env = _without_ray_variables(node) | {"RAY_ADDRESS": ray_address} if ray_address else dict(node)
    env |= submitted(submitter)
    for values in given:
        env |= expand(values, place, env)
    return env | omp_env(nproc, cpus_per_worker, env)


def _without_ray_variables(node: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in node.items()
        if name not in _SET_BY_RAY and (not name.startswith("RAY_") or name in _KEPT_RAY_VARIABLES)
    }


def interface_env(
    place: NodeAttributes, host_addresses: Iterable[str], bridges: Collection[str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables by which workers of a world of several hosts use the interface with the node's address.

    There is one for each library that would choose a loopback address or a bridge by itself, such as docker0, unless
    `given`, the worker's environment, has it. gloo and TensorPipe use the address to which the host's own name leads,
    and a loopback address if it leads to none (torch 2.13, `ProcessGroupGloo.cpp`, `tensorpipe_agent.cpp`). On Debian
    and Ubuntu a host's name leads to 127.0.1.1. `host_addresses`: where the host's name leads, as far as these are the
    machine's own addresses, in the resolver's order. `bridges`: the names of interfaces that are bridges.
    """
    own = _interface_of(place.address, place)
    if not own or _is_loopback(place.address):
        return {}
    by_name = next((_interface_of(address, place) for address in host_addresses), "")
    chosen = {
        "GLOO_SOCKET_IFNAME": (by_name, own),
        "TP_SOCKET_IFNAME": (by_name, own),
        "NCCL_SOCKET_IFNAME": (_nccl_interface(place), f"={own}"),  # without `=` it is a prefix
    }
    return {
        name: value
        for name, (choice, value) in chosen.items()
        if not given.get(name) and choice != own and (not choice or choice in bridges or _is_lo(choice, place))
    }


def _interface_of(address: str, place: NodeAttributes) -> str:
    """Return the name of the interface that has an address, "" for none. Only one address of 127.0.0.0/8 has one."""
    return next((name for name, addresses in place.interfaces.items() if address in addresses), "")


def _nccl_interface(place: NodeAttributes) -> str:
    """Return the first interface that NCCL would use (NCCL 2.28, `ncclFindInterfaces` in `src/misc/socket.cc`).

    Earlier versions do not avoid virbr0.
    """
    order = {"ib": 0, "docker": 2, "lo": 3}
    return min(
        place.interfaces, key=lambda name: min((order[kind] for kind in order if name.startswith(kind)), default=1)
    )


def _is_lo(name: str, place: NodeAttributes) -> bool:
    return any(_is_loopback(address) for address in place.interfaces[name])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """What all workers of an attempt have in common: the address of their TCPStore, and facts of the run."""

    master_addr: str
    master_port: int
    run_id: str
    max_restarts: int
    restart_count: int
    """Restarts spent on failures of workers of any node. Nodes that come and go do not count."""
    role: str = "default"
    signals_to_handle: tuple[str, ...] = ()


def worker_env(
    part: Assignment, local_rank: int, meeting: Rendezvous, *, error_file: str, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that torchrun sets (torch 2.13, `elastic/agent/server/local_elastic_agent.py`).

    `given` is the rest of the worker's environment: OMP_NUM_THREADS and TORCH_NCCL_ASYNC_ERROR_HANDLING are set only
    if they are not in it. The restart count is the same on all nodes. There is one role, so ROLE_RANK is RANK.
    """
    rank = part.base_rank + local_rank
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(part.world_size),
        "LOCAL_WORLD_SIZE": str(part.nproc),
        "GROUP_RANK": str(part.node_rank),
        "GROUP_WORLD_SIZE": str(part.nnodes),
        "ROLE_NAME": meeting.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(part.world_size),
        "MASTER_ADDR": meeting.master_addr,
        "MASTER_PORT": str(meeting.master_port),
        "TORCHELASTIC_RUN_ID": meeting.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(meeting.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(meeting.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(meeting.signals_to_handle),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return env | omp_env(max(part.nproc, part.host_workers), 1.0, given)


def omp_env(workers: int, cpus_per_worker: float, given: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS for a worker whose host has this number of workers, itself included, unless it is set.

    It is as many threads as the worker has CPUs, if the job gives it several. Else it is one if it shares the host, as
    torchrun has it for those that share a node (torch 2.13, `distributed/run.py`). A worker alone has all CPUs.
    """
    if "OMP_NUM_THREADS" in given or (workers == 1 and cpus_per_worker < _SEVERAL):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, int(cpus_per_worker)))}


_TERMINAL_VARIABLES = frozenset(
    (
        *("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "COLORTERM", "NO_COLOR", "FORCE_COLOR"),
        *("WINDOWID", "WINDOWPATH", "WINDOW", "STY", "GPG_TTY", "XDG_SESSION_ID", "XDG_SEAT", "XDG_VTNR"),
        *("INVOCATION_ID", "JOURNAL_STREAM"),
    )
)
_TERMINAL_PREFIXES = (
    *("TERM", "TMUX", "SSH_", "VTE_", "KITTY_", "WEZTERM_", "ALACRITTY_", "ITERM_", "KONSOLE_", "VSCODE_"),
    *("GNOME_TERMINAL_", "LC_TERMINAL", "ZELLIJ"),
)


def is_of_a_terminal(variable: str) -> bool:
    """Whether a variable describes the terminal of a command, and not what is to be run."""
    return variable in _TERMINAL_VARIABLES or variable.startswith(_TERMINAL_PREFIXES)
