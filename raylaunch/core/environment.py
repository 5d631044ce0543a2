"""The environment that the workers of a node share, before each gets its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raylaunch.core.ranks import omp_env
from raylaunch.core.rules import Place, expand

_OF_THE_HOST = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "TERM", "LANG"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "DISPLAY"),
        *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "MAIL", "_"),
    )
)
_PREFIXES_OF_THE_HOST = ("SSH_", "XDG_", "KUBERNETES_", "SLURM_", "DBUS_", "RAY_", "LC_")

_RAY_KEPT = frozenset(("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"))
"""What `ray.init()` in a script needs to find the same cluster, besides RAY_ADDRESS."""

_RAYS_DEBUGGER = ("PYTHONBREAKPOINT", "ray.util.rpdb._driver_set_trace")
"""`ray.init()` leaves it in the process that called it, also for a run that comes later."""

_SET_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")
"""What Ray sets in its own workers for itself; a node's own values of these are not known any more."""


def submitted(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the submitter's environment goes along to the nodes, as `torchrun` workers inherit it.

    Left behind is what describes the submitter's machine rather than the job, and what Ray set in his process.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_THE_HOST and not name.startswith(_PREFIXES_OF_THE_HOST) and (name, value) != _RAYS_DEBUGGER
    }


def base_env(
    node: Mapping[str, str],
    submitter: Mapping[str, str],
    given: Iterable[Mapping[str, str]],
    *,
    place: Place,
    nproc: int,
    ray_address: str,
) -> dict[str, str]:
    """The node's own environment without Ray's additions, then the submitter's, then what the job gives.

    `given`: the job's `env`, then those of the rules that match the node; each may build on what is below it.
    `ray_address` `""`: there is no Ray, and nothing in the environment is of its making.
    Raises ValueError for a value that this node cannot fill in.
    """
    env = _without_rays(node) | {"RAY_ADDRESS": ray_address} if ray_address else dict(node)
    env |= submitted(submitter)
    for values in given:
        env |= expand(values, place, env)
    return env | omp_env(nproc, env)


def _without_rays(node: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in node.items()
        if name not in _SET_BY_RAY and (not name.startswith("RAY_") or name in _RAY_KEPT)
    }
