"""The session of a run with Ray: a connection to a running cluster, or to a Ray started for the run."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig

from raylaunch.cluster import ray_internals
from raylaunch.cluster.agent.link import LinkServer
from raylaunch.cluster.fleet import agent_reuse
from raylaunch.cluster.fleet.ray_fleet import RayFleet
from raylaunch.cluster.fleet_api import Fleet
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.ray_api import gcs_monitor, gcs_probe, job_entrypoint, metrics_exporter
from raylaunch.cluster.ray_api.placement_groups import GivenBundles, GivenGroup
from raylaunch.cluster.session import discovery
from raylaunch.cluster.session.session_base import Session
from raylaunch.core.job.job import Job, RayOptions
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.newtypes import HostId
from raylaunch.core.placement.plan import NodeFacts, Plan
from raylaunch.errors import ClusterError
from raylaunch.node.protocol.node_spec import AgentSpec

Made = TypeVar("Made")


class SharedConnection(Generic[Made]):
    """A connection that is made for the first run that needs it, and closed after the last of those that share it."""

    def __init__(self, end: Callable[[Made], None]) -> None:
        """`end` closes the connection."""
        self._end = end
        self._lock = threading.RLock()
        self._options: Any = None
        #: How many runs go on right now.
        self._runs = 0
        #: The connection that is open; None: none is.
        self.made: Made | None = None

    @contextlib.contextmanager
    def used(self, options: Any, make: Callable[[], Made]) -> Iterator[Made]:
        """Use the connection for a run. `make` opens one, unless one is open that was made for equal options.

        What it makes while one is open is a view of that one.
        """
        with self._lock:
            if self.made is None:
                self.made, self._options = make(), options
            made = self.made if options == self._options else make()
            self._runs += 1
        try:
            yield made
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    ending, self.made = self.made, None
                    self._end(ending)


_SHUTDOWN_SECONDS = 8.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""The least that Ray accepts; only a few messages go through the object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession(Session):
    """A connection to Ray. `local`: this process started Ray, which ends with it."""

    job_id: str
    """Ray's id for this process, as long as it is connected."""
    ours: bool = True
    """False: the program connected before the run, and disconnects itself."""
    given: GivenGroup | None = None
    """The placement group of the program in which the run takes place."""

    def nodes(self, job: Job) -> tuple[NodeFacts, ...]:
        """Return the nodes of the cluster."""
        del job
        found = nodes(local=self.local)
        return found if self.given is None else self.given.facts(found)

    @property
    def own_address(self) -> str:
        """Return the address of this machine in Ray; a local Ray needs the loopback address only."""
        return local_machine.LOOPBACK if self.local else str(ray.util.get_node_ip_address())

    def may_grow(self) -> bool:
        """Ask the head of the cluster."""
        return self.given is None and ray_internals.may_add_nodes()

    def links(self) -> LinkServer | None:
        """Return a link server; None if this machine cannot listen at its address in Ray."""
        try:
            return LinkServer(self.own_address)
        except OSError:
            return None

    def why_not_warm(self, plan: Plan) -> str:
        """Return a reason for which an agent could not serve a run of another process."""
        if self.local:
            return "the Ray that this run starts ends with it"
        if any(bundle.gpus for bundle in plan.bundles):
            return "GPUs are a worker's only while it runs in what Ray reserved for it"
        if ray.get_runtime_context().runtime_env:
            return "Ray makes the agents' environment anew for each run, as with `ray.working_dir`"
        return ""

    def fleet(self, plan: Plan, spec: AgentSpec, say: Callable[[str], None]) -> Fleet:
        """Return agents that are Ray actors."""
        return RayFleet(plan, spec, say, reservations=None if self.given is None else GivenBundles(self.given))


@contextlib.contextmanager
def connected(job: Job, address: str, given: GivenGroup | None = None) -> Iterator[RaySession]:
    """Connect to a cluster, or start a Ray if the address is `local_machine.LOCAL`.

    Disconnect after the run. A connection that the program made itself is used and left open. Raises ClusterError
    within seconds.
    """
    options = (address, job.ray, local_machine.cpus(job) if address == local_machine.LOCAL else 0)
    with _connection.used(options, lambda: _connect(job, address)) as session:
        yield replace(session, given=given)


def end_idle_agents(options: RayOptions, address: str) -> int:
    """End the agents that `keep_warm` keeps for this user's commands on this machine. Return their number."""
    with connected(Job(ray=options), address):
        return agent_reuse.end_idle()


def _connect(job: Job, address: str) -> RaySession:
    if ray.is_initialized():
        return _existing(job.ray)
    try:
        secrets = Redactor.of(job, os.environ)
        shown = ray_internals.command_line_in_job_list(job_entrypoint.text(secrets))
        config = JobConfig(metadata=job_entrypoint.metadata(job, secrets))
        with metrics_exporter.disabled(), shown, ray_internals.no_tip_about_accelerators():
            return _start_local(job, config) if address == local_machine.LOCAL else _join(address, job.ray, config)
    except ClusterError:
        ray.shutdown()
        raise


def _disconnect(session: RaySession) -> None:
    if not session.ours or not _is_connected(session):
        return
    if session.local or _is_alive(session):
        ray.shutdown()
        return
    # Ray waits for a head that does not answer, for minutes if its machine is gone. There is no need to wait with it:
    # all that matters in the cluster ends with this process.
    thread = threading.Thread(target=ray.shutdown, daemon=True, name="raylaunch-shutdown")
    thread.start()
    thread.join(_SHUTDOWN_SECONDS)
    if thread.is_alive():
        atexit.unregister(ray.shutdown)
        _left_behind.append(session)


def _is_connected(session: RaySession | None) -> bool:
    """Return whether this process's connection to Ray is still the session's."""
    return session is not None and ray.is_initialized() and ray.get_runtime_context().get_job_id() == session.job_id


def _is_alive(session: RaySession | None) -> bool:
    """Return whether the session's connection is open and the head answers."""
    if not _is_connected(session):
        return False
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    with contextlib.suppress(Exception):
        socket.create_connection((host.strip("[]"), int(port)), timeout=gcs_probe.SECONDS).close()  # Ray would retry
        return gcs_monitor.is_same_head(int(gcs_probe.SECONDS))
    return False


_connection: SharedConnection[RaySession] = SharedConnection(_disconnect)
_left_behind: list[RaySession] = []


def is_abandoned() -> bool:
    """Return whether a connection could not be closed. Its threads crash when the interpreter ends as usual."""
    return bool(_left_behind)


def _quiet() -> None:
    """Keep Ray from printing to stdout that its workers died: stdout is the job's, and the driver reports deaths."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray_internals.print_no_deaths()


@metrics_exporter.disabled()
def find(options: RayOptions) -> str:
    """Return the address to connect to, `local_machine.LOCAL` or `local_machine.NONE`. Raises ClusterError.

    A Ray that another process started for itself with `ray.init()` does not count: it ends with that process.
    """
    if not ray.is_initialized():  # else the program has set what it wants to hear of Ray
        _quiet()
    if options.address not in ("auto", local_machine.LOCAL):
        gcs_probe.probe(options.address)
        return options.address
    named = local_machine.LOCAL if options.address == local_machine.LOCAL else os.environ.get("RAY_ADDRESS", "")
    if named not in ("", "auto"):
        if named != local_machine.LOCAL:
            gcs_probe.probe(named)
        return named
    if ray.is_initialized() and (_connection.made is None or not _connection.made.ours):
        return str(ray.get_runtime_context().gcs_address)  # the program's own connection
    found = discovery.choose(discovery.signs(os.environ), gcs_probe.probe_as_auto)
    return found or (local_machine.LOCAL if ray.is_initialized() else local_machine.NONE)


def _existing(options: RayOptions) -> RaySession:
    """Return a session for the connection that the program made before the run."""
    address = ray.get_runtime_context().gcs_address
    if options.address not in ("auto", address):
        msg = f"this process is connected to another Ray cluster, at {address}"
        raise ClusterError(msg, hint="omit `ray.address` to use it, or call `ray.shutdown()` before")
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
        notes=ray_internals.check(),
    )


def _join(address: str, options: RayOptions, config: JobConfig) -> RaySession:
    runtime_env = {"working_dir": options.working_dir} if options.working_dir else None
    try:
        context = ray.init(
            address=address, job_config=config, runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR"
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        msg = f"cannot use the Ray cluster at {address}: {error}"
        raise ClusterError(msg) from error
    return _session(str(context.address_info["gcs_address"]), local=False)


def _start_local(job: Job, config: JobConfig) -> RaySession:
    """Start a Ray for this job alone, with as many logical CPUs as the job wants."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        context = ray.init(
            address="local",
            job_config=config,
            num_cpus=local_machine.cpus(job),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=_OBJECT_STORE_BYTES,
        )
    except Exception as error:  # Ray has nothing narrower for a start that takes too long
        msg = f"cannot start Ray on this machine: {error}"
        raise ClusterError(
            msg, hint="Ray needs room in /tmp and in /dev/shm, and starts late on a busy machine"
        ) from error
    return _session(str(context.address_info["gcs_address"]), local=True)


def nodes(*, local: bool) -> tuple[NodeFacts, ...]:
    """Return the nodes that are alive and not being drained. `local`: this process started Ray for the run."""
    free = ray_internals.free_resources()
    draining = ray_internals.draining_nodes()
    return tuple(
        _facts(node, node["Resources"] if free is None else free.get(node["NodeID"], {}), local=local)
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
    )


def _facts(node: dict[str, Any], free: Mapping[str, float], *, local: bool) -> NodeFacts:
    total: dict[str, float] = node["Resources"]
    return NodeFacts(
        node_id=HostId(node["NodeID"]),
        address=local_machine.LOOPBACK if local else str(node["NodeManagerAddress"]),
        cpus=total.get("CPU", 0.0),
        gpus=total.get("GPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
        labels=dict(node["Labels"]),
    )
