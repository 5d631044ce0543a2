"""The three ways into a process group: env://, tcp:// and file://."""

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

from raylaunch.worker.selfcheck.bench import Bench, free_port
from raylaunch.worker.selfcheck.council import Council


def launch_store(rank: int, size: int, timeout: timedelta) -> Any:
    """The store that `init_process_group()` would use, at a place of our own in it."""
    import torch.distributed as dist  # noqa: PLC0415

    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    return dist.PrefixStore("selfcheck", store)


def init_env(on: Bench) -> None:
    """As most scripts do it. Once for each backend: two groups of one backend would meet the same keys."""
    on.join(init_method="env://")
    on.prove()


def init_tcp(on: Bench, port: int) -> None:
    """A second store, on a port that rank 0's node had free.

    Under torchrun torch would take it for one that torchrun serves, and wait for it in vain (pytorch#192113).
    """
    host = os.environ["MASTER_ADDR"]
    served = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        on.join(init_method=f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    finally:
        if served is not None:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = served
    on.prove()


def init_file(on: Bench, path: str) -> None:
    """A file that all ranks see."""
    on.join(init_method=f"file://{path}")
    on.prove()


def tell_port(council: Council, patience: float) -> int:
    """A free port of rank 0's node."""
    return int(council.decide(None, lambda _: free_port(), patience=patience))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Where files for file:// may be, or why there is no such place."""

    prefix: str = ""
    why_not: str = ""


def find_shared(council: Council, given: str | None, patience: float) -> Shared:
    """Where all ranks see what rank 0 writes: the place given, else its working folder, else its temporary one."""
    why_not = ""
    for place in [given] if given else ["", tempfile.gettempdir()]:
        told = council.decide(None, functools.partial(_leave_probe, place, given), patience=patience)
        if "why" in told:
            why_not = told["why"]
            continue
        read = _reads(told["prefix"], told["token"])
        seen = council.decide(read, lambda words: all(words.values()), patience=patience)
        if council.rank == 0:
            _remove(f"{told['prefix']}.probe")
        if seen:
            return Shared(prefix=told["prefix"])
        why_not = "the nodes share no file system; give a path on one with `--file`"
    return Shared(why_not=why_not)


def _leave_probe(place: str, given: str | None, _words: dict[int, None]) -> dict[str, str]:
    token = secrets.token_hex(8)
    prefix = os.path.abspath(given or os.path.join(place, f"raylaunch-check-{token}"))
    try:
        with open(f"{prefix}.probe", "x", encoding="utf-8") as file:
            file.write(token)
    except OSError as error:
        return {"why": f"rank 0 cannot write `{prefix}.probe`: {error.strerror}"}
    return {"prefix": prefix, "token": token}


def _reads(prefix: str, token: str) -> bool:
    try:
        with open(f"{prefix}.probe", encoding="utf-8") as file:
            return file.read() == token
    except OSError:
        return False


@contextlib.contextmanager
def removed_after(path: str, *, by_this_rank: bool) -> Iterator[None]:
    """Take the file away, whatever became of the group. One rank does it: the others may be in the next group."""
    try:
        yield
    finally:
        if by_this_rank:
            _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
