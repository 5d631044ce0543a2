"""The three ways to make a process group: `init_method` env://, tcp:// and file://."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from raylaunch.worker.selfcheck.check_context import CheckContext, free_port
from raylaunch.worker.selfcheck.coordinator import Coordinator


def launch_store(rank: int, size: int, timeout: timedelta) -> Any:
    """Return the store that `init_process_group()` would use, with a prefix of the self-check."""
    import torch.distributed as dist  # noqa: PLC0415

    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    return dist.PrefixStore("selfcheck", store)


def init_env(ctx: CheckContext) -> None:
    """Make a group with env://, as most scripts do. Only once per backend: a second group would find the same keys."""
    ctx.init_group(init_method="env://")
    ctx.verify_group()


def init_tcp(ctx: CheckContext, port: int) -> None:
    """Make a group with tcp://, and so with a second store on a free port of rank 0's node.

    Under TORCHELASTIC_USE_AGENT_STORE torch would wait for a server that nobody starts (pytorch#192113).
    """
    host = os.environ["MASTER_ADDR"]
    use_agent_store = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        ctx.init_group(init_method=f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    finally:
        if use_agent_store is not None:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = use_agent_store
    ctx.verify_group()


def init_file(ctx: CheckContext, path: str) -> None:
    """Make a group with file://; all ranks must see the file."""
    ctx.init_group(init_method=f"file://{path}")
    ctx.verify_group()


def free_port_of_rank_0(coordinator: Coordinator, timeout: float) -> int:
    """Return, on all ranks, a free port of rank 0's node."""
    return int(coordinator.decide(None, lambda _: free_port(), timeout=timeout))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPath:
    """Where the files of file:// begin, or why there is no such place."""

    prefix: str = ""
    why_not: str = ""


def find_shared_path(coordinator: Coordinator, given: str | None, timeout: float) -> SharedPath:
    """Find a path at which all ranks see what rank 0 writes.

    That is the given one, or else in the working folder or the temporary folder of rank 0.
    """
    why_not = ""
    for folder in [given] if given else ["", tempfile.gettempdir()]:
        result = coordinator.decide(None, functools.partial(_write_probe, folder, given), timeout=timeout)
        if "why" in result:
            why_not = result["why"]
            continue
        has_read = can_read(result["prefix"], result["token"])
        is_shared = coordinator.decide(has_read, lambda values: all(values.values()), timeout=timeout)
        if coordinator.rank == 0:
            _remove(f"{result['prefix']}.probe")
        if is_shared:
            return SharedPath(prefix=result["prefix"])
        why_not = "the nodes share no file system; give a path on one with `--file`"
    return SharedPath(why_not=why_not)


def _write_probe(folder: str, given: str | None, _values: dict[int, None]) -> dict[str, str]:
    token = secrets.token_hex(8)
    prefix = os.path.abspath(given or os.path.join(folder, f"raylaunch-check-{token}"))
    try:
        with open(f"{prefix}.probe", "x", encoding="utf-8") as file:
            file.write(token)
    except OSError as error:
        return {"why": f"rank 0 cannot write `{prefix}.probe`: {error.strerror}"}
    return {"prefix": prefix, "token": token}


def can_read(prefix: str, token: str) -> bool:
    """Return whether this rank sees the file that rank 0 wrote."""
    try:
        with open(f"{prefix}.probe", encoding="utf-8") as file:
            return file.read() == token
    except OSError:
        return False


@contextlib.contextmanager
def removed_after(path: str, *, by_this_rank: bool) -> Iterator[None]:
    """Remove the file after the block, whatever happens in it.

    Only one rank does so, because another one may be in the next group by then.
    """
    try:
        yield
    finally:
        if by_this_rank:
            _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
