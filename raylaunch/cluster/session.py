"""Being connected to a cluster: somebody else's, or a Ray started in this process for the one job."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import services
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from raylaunch.core.job import Job, RayOptions
from raylaunch.errors import ClusterError

_PROBE_SECONDS = 5.0
_DEFAULT_PORT = 6379
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's least; nothing of ours goes through it but a few messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A connection. `local`: this process started Ray, and takes it along when it ends."""

    address: str
    local: bool
    brings_files: bool
    """Ray copies the working folder to the nodes (`ray job submit --working-dir`, or `ray.working_dir`)."""


@contextlib.contextmanager
def connected(job: Job) -> Iterator[Session]:
    """Connect as the job says, and disconnect in the end. Raises ClusterError within seconds."""
    _quiet()
    address = find(job.ray)
    try:
        yield _start_local(job) if address is None else _join(address, job.ray)
    finally:
        ray.shutdown()


def _quiet() -> None:
    """Ray prints what it thinks of its workers' deaths to stdout, which is the job's; we say it in our own words."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda *_, **__: None


def find(options: RayOptions) -> str | None:
    """The address to connect to; None: start a local Ray.

    A Ray that another process started for itself alone (`ray.init()`) is no cluster: it would end under our feet.
    """
    if options.address == "local":
        return None
    if options.address != "auto":
        _probe(options.address)
        return options.address
    named = os.environ.get("RAY_ADDRESS", "")
    if named not in ("", "auto", "local"):
        _probe(named)
        return named
    if named == "local":
        return None
    running = _running_here()
    if running is None:
        return None
    # As `ray.init(address="auto")` does; an address that was named gets no token unless RAY_AUTH_MODE says so.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        metadata = _probe(running)
    except ClusterError:
        return None  # left behind by a cluster that is gone, or not ours to use
    return None if metadata.get("ray_init_cluster") else running


def _running_here() -> str | None:
    """What `ray start` left word of on this machine, as `ray.init(address="auto")` finds it."""
    with contextlib.suppress(Exception):
        return str(found) if (found := services.find_bootstrap_address(None)) else None
    return None


def _probe(address: str) -> dict[str, Any]:
    """Ask the head node who it is. Ray itself tries for 20 to 120 seconds to find out that it cannot."""
    if address.startswith("ray://"):
        msg = f"`{address}` is an address for Ray Client, which raylaunch does not use"
        raise ClusterError(msg, hint="run on a node of the cluster, or with `ray job submit`")
    host, _, port = address.rpartition(":") if ":" in address else (address, ":", str(_DEFAULT_PORT))
    if not host or not port.isdecimal():
        msg = f"`{address}` is not a Ray address: `host:port`, `auto` or `local` is expected"
        raise ClusterError(msg)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        msg = f"no Ray cluster at {address}: {error.strerror or error}"
        raise ClusterError(msg, hint="`ray status` on the head node tells whether it is up") from None
    return _ask_head(address)


def _ask_head(address: str) -> dict[str, Any]:
    """The head's own description; in a thread, since Ray's client waits for half a minute for who is not Ray."""
    answer: list[dict[str, Any] | Exception] = []

    def ask() -> None:
        try:
            from ray._raylet import GcsClient  # type: ignore[attr-defined]  # noqa: PLC0415

            with _silenced():
                found = GcsClient(address=address).internal_kv_get(
                    b"CLUSTER_METADATA", namespace=b"cluster", timeout=int(_PROBE_SECONDS)
                )
            answer.append(json.loads(found or b"{}"))
        except Exception as error:  # noqa: BLE001
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True, name="raylaunch-probe")
    thread.start()
    thread.join(_PROBE_SECONDS)
    if not answer:
        msg = f"what listens at {address} does not answer as a Ray head node does"
        raise ClusterError(msg, hint="check the port: Ray's own is 6379 unless it was started with another")
    if isinstance(answer[0], ray.exceptions.AuthenticationError):
        msg = f"the Ray cluster at {address} refused our token"
        hint = "give its token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, with RAY_AUTH_MODE=token"
        raise ClusterError(msg, hint=hint)
    if isinstance(answer[0], Exception):
        msg = f"the Ray cluster at {address} cannot be used: {answer[0]}"
        raise ClusterError(msg)
    return answer[0]


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep Ray's C++ code from writing its own warnings to our stderr; what matters is in the exception."""
    before = os.environ.get("RAY_BACKEND_LOG_LEVEL")
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_BACKEND_LOG_LEVEL"]
        else:
            os.environ["RAY_BACKEND_LOG_LEVEL"] = before


def _join(address: str, options: RayOptions) -> Session:
    runtime_env = {"working_dir": options.working_dir} if options.working_dir else None
    try:
        context = ray.init(address=address, runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        msg = f"cannot use the Ray cluster at {address}: {error}"
        raise ClusterError(msg) from error
    given = ray.get_runtime_context().runtime_env
    return Session(
        address=str(context.address_info["gcs_address"]), local=False, brings_files=bool(given.get("working_dir"))
    )


def _start_local(job: Job) -> Session:
    """A Ray with as many logical CPUs as the job wants: it is there for this job alone."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        context = ray.init(
            address="local",
            num_cpus=local_cpus(job),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=_OBJECT_STORE_BYTES,
        )
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        msg = f"cannot start Ray on this machine: {error}"
        raise ClusterError(msg, hint="Ray needs room in /tmp and in /dev/shm") from error
    return Session(address=str(context.address_info["gcs_address"]), local=True, brings_files=False)


def local_cpus(job: Job) -> int:
    """The logical CPUs that a local Ray is given: this machine's, or more where the job wants more."""
    each = [int(job.nproc_per_node) if str(job.nproc_per_node).isdecimal() else 1]
    each += [rule.nproc_per_node for rule in job.nodes.values() if rule.nproc_per_node is not None]
    workers = (job.max_nodes + job.spares) * max(each) if job.nprocs is None else job.nprocs
    return max(os.cpu_count() or 1, math.ceil(workers * job.cpus_per_worker))
