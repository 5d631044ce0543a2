"""Being connected to a cluster: somebody else's, or a Ray started in this process for the one job."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import services
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from raylaunch.cluster import actor, head, here, inventory
from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.connection import Connection
from raylaunch.cluster.fleet import Fleet
from raylaunch.cluster.lifeline import Lifelines
from raylaunch.cluster.ray_fleet import RayFleet
from raylaunch.cluster.session import Session
from raylaunch.cluster.warm import Pool
from raylaunch.core.job import Job, RayOptions
from raylaunch.core.layout import NodeFacts
from raylaunch.core.plan import Plan
from raylaunch.errors import ClusterError

_PROBE_SECONDS = 5.0
_GOODBYE_SECONDS = 8.0
_DEFAULT_PORT = 6379
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's least; nothing of ours goes through it but a few messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession(Session):
    """A connection. `local`: this process started Ray, and takes it along when it ends."""

    job_id: str
    """Ray's, for the process while it is connected."""
    ours: bool = True
    """False: the program has connected itself, and will disconnect itself."""

    def nodes(self, job: Job) -> tuple[NodeFacts, ...]:
        """As Ray knows them."""
        del job
        return inventory.nodes(local=self.local)

    def lifelines(self) -> Lifelines | None:
        """None where this machine cannot listen at the address that Ray knows it by: agents can do without."""
        try:
            return Lifelines(here.LOOPBACK if self.local else ray.util.get_node_ip_address())
        except OSError:
            return None

    def fleet(self, plan: Plan, told: AgentSettings, say: Callable[[str], None]) -> Fleet:
        """Agents are Ray actors."""
        if not told.keep_warm:
            AGENTS.close()
        return RayFleet(plan, told, say, AGENTS if told.keep_warm else None)


@contextlib.contextmanager
def connected(job: Job, address: str) -> Iterator[RaySession]:
    """Connect there, or start a Ray (`here.LOCAL`), and disconnect in the end, or as soon as no agent rests any more.

    A connection that was there before is used, and stays. Raises ClusterError within seconds.
    """
    asked = (address, job.ray, here.cpus(job) if address == here.LOCAL else 0)
    if not (_connection.serves(asked) and _is_alive(_connection.made)):
        AGENTS.close()
    try:
        with _connection.used(asked, lambda: _connect(job, address)) as session:
            yield session
    finally:
        AGENTS.close_if_empty()


def _connect(job: Job, address: str) -> RaySession:
    if ray.is_initialized():
        return _theirs(job.ray)
    try:
        return _start_local(job) if address == here.LOCAL else _join(address, job.ray)
    except ClusterError:
        ray.shutdown()
        raise


def _disconnect(session: RaySession) -> None:
    if not session.ours or not _is_connected(session):
        return
    if session.local or _is_alive(session):
        ray.shutdown()
        return
    # A head that does not answer is asked for seconds where its machine is there, else for minutes: nobody waits for
    # that, since all that matters there ends with this process.
    thread = threading.Thread(target=ray.shutdown, daemon=True, name="raylaunch-goodbye")
    thread.start()
    thread.join(_GOODBYE_SECONDS)
    if thread.is_alive():
        atexit.unregister(ray_worker.shutdown)
        _left_behind.append(session)


def _end_agents(agents: Sequence[Any]) -> None:
    """Where the connection by which they were started is gone, they are too."""
    if agents and _is_connected(_connection.made):
        actor.close(agents)
        actor.kill(agents)


def _is_connected(session: RaySession | None) -> bool:
    """Whether the process's connection is still the one that the session is about."""
    return session is not None and ray.is_initialized() and ray.get_runtime_context().get_job_id() == session.job_id


def _is_alive(session: RaySession | None) -> bool:
    """Whether the head answers as well."""
    if not _is_connected(session):
        return False
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    with contextlib.suppress(Exception):
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()  # Ray would try on
        return head.is_the_same(int(_PROBE_SECONDS))
    return False


_connection: Connection[RaySession] = Connection(_disconnect)
_left_behind: list[RaySession] = []

AGENTS = Pool(_end_agents, _connection.end)
"""Agents that rest between runs of this process."""


def is_left_behind() -> bool:
    """Whether a connection could not be ended. Its threads do not bear the end of the interpreter."""
    return bool(_left_behind)


def kept_at() -> str:
    """The address of the cluster that this process is connected to, for a run or for agents that rest; `""`: none."""
    return _connection.made.address if _connection.made is not None else ""


def is_kept() -> bool:
    """Whether that cluster, if there is one, answers, and no other in its place: Ray ends processes that meet one."""
    made = _connection.made
    if made is None or made.local:
        return True
    try:
        _probe(made.address)
        return _session_name(made.address) == str(ray_worker._global_node.session_name)  # noqa: SLF001
    except Exception:  # noqa: BLE001
        return False


def _session_name(address: str) -> str:
    """By which Ray tells clusters apart."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # noqa: PLC0415

    with _silenced():
        client = GcsClient(address=address)
        found = client.internal_kv_get(b"session_name", namespace=b"session", timeout=int(_PROBE_SECONDS))
    return bytes(found or b"").decode()


def _quiet() -> None:
    """Ray prints what it thinks of its workers' deaths to stdout, which is the job's; we say it in our own words."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda *_, **__: None


def find(options: RayOptions) -> str:
    """The address to connect to, `here.LOCAL` or `here.NONE`.

    A Ray that another process started for itself alone (`ray.init()`) is no cluster: it would end under our feet.
    """
    _quiet()
    if options.address not in ("auto", here.LOCAL):
        _probe(options.address)
        return options.address
    named = here.LOCAL if options.address == here.LOCAL else os.environ.get("RAY_ADDRESS", "")
    if named not in ("", "auto"):
        if named != here.LOCAL:
            _probe(named)
        return named
    return _running() or (here.LOCAL if ray.is_initialized() else here.NONE)


def _running() -> str | None:
    """A cluster that this machine is part of."""
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


def _theirs(options: RayOptions) -> RaySession:
    """The connection that the program has made before."""
    address = ray.get_runtime_context().gcs_address
    if options.address not in ("auto", address):
        msg = f"this process is connected to another Ray cluster, at {address}"
        raise ClusterError(msg, hint="leave `ray.address` away to use it, or call `ray.shutdown()` before")
    if options.working_dir:
        msg = "`ray.working_dir` needs a connection of its own, and this process is connected to Ray already"
        raise ClusterError(msg, hint="give `ray.init()` the `working_dir`, or call `ray.shutdown()` before")
    return _session(address, local=False, ours=False)


def _session(address: str, *, local: bool, ours: bool = True) -> RaySession:
    context = ray.get_runtime_context()
    return RaySession(
        address=address,
        local=local,
        brings_files=bool(context.runtime_env.get("working_dir")),
        job_id=context.get_job_id(),
        ours=ours,
    )


def _join(address: str, options: RayOptions) -> RaySession:
    runtime_env = {"working_dir": options.working_dir} if options.working_dir else None
    try:
        context = ray.init(address=address, runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        msg = f"cannot use the Ray cluster at {address}: {error}"
        raise ClusterError(msg) from error
    return _session(str(context.address_info["gcs_address"]), local=False)


def _start_local(job: Job) -> RaySession:
    """A Ray with as many logical CPUs as the job wants: it is there for this job alone."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        context = ray.init(
            address="local",
            num_cpus=here.cpus(job),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=_OBJECT_STORE_BYTES,
        )
    except Exception as error:  # Ray has nothing narrower for a start that takes too long
        msg = f"cannot start Ray on this machine: {error}"
        raise ClusterError(msg, hint="Ray needs room in /tmp and in /dev/shm") from error
    return _session(str(context.address_info["gcs_address"]), local=True)
