"""The environment variables that all workers of a node share, before each gets its ranks."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping

from raylaunch.core.job.node_rules import NodeAttributes, expand
from raylaunch.core.placement.ranks import omp_env

_HOST_VARIABLES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "TERM", "LANG"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "DISPLAY"),
        *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "MAIL", "_"),
    )
)
_HOST_PREFIXES = ("SSH_", "XDG_", "KUBERNETES_", "SLURM_", "DBUS_", "RAY_", "LC_")

_KEPT_RAY_VARIABLES = frozenset(("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"))
"""Variables that `ray.init()` in a script needs to find the same cluster, besides RAY_ADDRESS."""

_RAY_DEBUGGER = ("PYTHONBREAKPOINT", "ray.util.rpdb._driver_set_trace")
"""`ray.init()` sets this variable in its process, and it stays after `ray.shutdown()`."""

_SET_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")
"""Variables that Ray overwrites in its own workers, so that the node's own values are not known."""


def submitted(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the submitting process that the workers inherit, as those of torchrun inherit all.

    Variables that describe the submitter's machine, and those that Ray set in its process, are left out.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _HOST_VARIABLES and not name.startswith(_HOST_PREFIXES) and (name, value) != _RAY_DEBUGGER
    }


def base_env(
    node: Mapping[str, str],
    submitter: Mapping[str, str],
    given: Iterable[Mapping[str, str]],
    *,
    place: NodeAttributes,
    nproc: int,
    ray_address: str,
) -> dict[str, str]:
    """Return the node's own environment, updated by the submitter's, then by what the job gives.

    `given` has the job's `env`, then that of each rule that matches the node; values may refer to earlier ones.
    `ray_address` is "" without Ray; else variables that Ray set for itself are removed. Raise ValueError for a value
    with a placeholder that this node cannot fill in.
    """
    env = _without_ray_variables(node) | {"RAY_ADDRESS": ray_address} if ray_address else dict(node)
    env |= submitted(submitter)
    for values in given:
        env |= expand(values, place, env)
    return env | omp_env(nproc, env)


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
    and Ubuntu a host's name leads to 127.0.1.1. `host_addresses`: those that are this machine's own, in the resolver's
    order. `bridges`: the names of interfaces that are bridges.
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
    names = list(place.interfaces)
    for wanted in ("ib",), ("",), ("docker",), ("lo",):
        for name in names:
            if name.startswith(wanted) and (wanted != ("",) or not name.startswith(("docker", "lo"))):
                return name
    return ""


def _is_lo(name: str, place: NodeAttributes) -> bool:
    return any(_is_loopback(address) for address in place.interfaces[name])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


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
