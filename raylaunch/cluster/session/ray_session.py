"""The session of a run with Ray: a connection to a running cluster, or to a Ray started for the run."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig

from raylaunch.cluster import ray_internals
from raylaunch.cluster.agent.link import LinkServer
from raylaunch.cluster.agent.serialization import version
from raylaunch.cluster.fleet import agent_reuse
from raylaunch.cluster.fleet.ray_fleet import RayFleet
from raylaunch.cluster.fleet_api import Fleet
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.ray_api import gcs_monitor
from raylaunch.cluster.ray_api.placement_groups import GivenBundles, GivenGroup
from raylaunch.cluster.ray_internals import AuthenticationError
from raylaunch.cluster.session import discovery
from raylaunch.cluster.session.session_base import Session
from raylaunch.core.job.job import Job, RayOptions
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.job.secrets import shown_arguments
from raylaunch.core.newtypes import HostId
from raylaunch.core.placement.plan import NodeFacts, Plan
from raylaunch.core.text import printable
from raylaunch.errors import ClusterError
from raylaunch.node.linux.procfs import user_name
from raylaunch.node.protocol.node_spec import AgentSpec

_PROBE_SECONDS = 5.0
"""How long the head may take to answer `probe`."""
_DEFAULT_PORT = 6379
_AUTH_HINT = "give its token in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, with RAY_AUTH_MODE=token"
_MATCH_LEVEL = "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL"
"""Ray's own variable: with `minor`, the third number of Python's version may differ."""
_ILLEGAL = "the token has characters that are not printable ASCII, such as a line break"
_SHUTDOWN_SECONDS = 8.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""The least that Ray accepts; only a few messages go through the object store."""
METRICS_VARIABLES = ("RAY_enable_metrics_collection", "RAY_enable_open_telemetry")
"""Settings of `src/ray/common/ray_config_def.h`. A process reads them once, when Ray's C++ code is first used."""


class SharedConnection:
    """A connection that is made for the first run that needs it, and closed after the last of those that share it."""

    def __init__(self, end: Callable[[RaySession], None]) -> None:
        """`end` closes the connection."""
        self._end = end
        self._lock = threading.RLock()
        self._options: Any = None
        #: How many runs go on right now.
        self._runs = 0
        #: The connection that is open; None: none is.
        self.made: RaySession | None = None

    @contextlib.contextmanager
    def used(self, options: Any, make: Callable[[], RaySession]) -> Iterator[RaySession]:
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
def without_metrics_exporter() -> Iterator[None]:
    """Keep Ray from starting the thread that exports metrics of this process, unless the person has set a variable.

    OpenTelemetry's `PeriodicExportingMetricReader` is the thread. The core worker of Ray 2.60 starts it in every
    process that is connected, whatever `enable_metrics_collection` says, if the node has a metrics agent. It has
    crashed processes (SIGSEGV), as in https://github.com/ray-project/ray/pull/60048. With `enable_open_telemetry=0`
    alone there would be two threads of OpenCensus, the library before it. A process of an actor has the thread too,
    and takes both settings from the environment of `ray start`: a runtime environment could bring them, but then Ray
    starts a new process for each agent, instead of using one that waits.

    The variables are removed afterwards: workers and other programs must not inherit them. A process in which Ray was
    used before the first such block exports as before.
    """
    if any(name in os.environ for name in METRICS_VARIABLES):
        yield
        return
    os.environ.update(dict.fromkeys(METRICS_VARIABLES, "0"))
    try:
        yield
    finally:
        for name in METRICS_VARIABLES:
            os.environ.pop(name, None)


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
        shown = ray_internals.command_line_in_job_list(job_entrypoint(secrets))
        config = JobConfig(metadata=job_metadata(job, secrets))
        with without_metrics_exporter(), shown, ray_internals.no_tip_about_accelerators():
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
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()  # Ray would retry
        return gcs_monitor.is_same_head(int(_PROBE_SECONDS))
    return False


_connection = SharedConnection(_disconnect)
_left_behind: list[RaySession] = []


def is_abandoned() -> bool:
    """Return whether a connection could not be closed. Its threads crash when the interpreter ends as usual."""
    return bool(_left_behind)


def _quiet() -> None:
    """Keep Ray from printing to stdout that its workers died: stdout is the job's, and the driver reports deaths."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray_internals.print_no_deaths()


@without_metrics_exporter()
def find(options: RayOptions) -> str:
    """Return the address to connect to, `local_machine.LOCAL` or `local_machine.NONE`. Raises ClusterError.

    A Ray that another process started for itself with `ray.init()` does not count: it ends with that process.
    """
    if not ray.is_initialized():  # else the program has set what it wants to hear of Ray
        _quiet()
    if options.address not in ("auto", local_machine.LOCAL):
        probe(options.address)
        return options.address
    named = local_machine.LOCAL if options.address == local_machine.LOCAL else os.environ.get("RAY_ADDRESS", "")
    if named not in ("", "auto"):
        if named != local_machine.LOCAL:
            probe(named)
        return named
    if ray.is_initialized() and (_connection.made is None or not _connection.made.ours):
        return str(ray.get_runtime_context().gcs_address)  # the program's own connection
    found = discovery.choose(discovery.signs(os.environ), _probe_as_auto)
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


def probe(address: str) -> dict[str, Any]:
    """Ask the head of a cluster (its GCS) for its metadata, or raise ClusterError within seconds.

    Ray itself would try for minutes to reach a head that is not there, and end this process if there is no token.
    """
    if address.startswith("ray://"):
        msg = f"`{address}` is an address for Ray Client, which raylaunch does not use"
        raise ClusterError(msg, hint="run on a node of the cluster, or with `ray job submit`")
    if address.startswith(("http://", "https://")):
        msg = f"`{address}` is the address of Ray's jobs API, and raylaunch needs the cluster's own address"
        submit = f"to submit a job from here: `ray job submit --address {address} --working-dir . -- raylaunch ...`"
        raise ClusterError(msg, hint=f"{submit}\non a node of the cluster: set RAY_ADDRESS to `HOST:{_DEFAULT_PORT}`")
    host, _, port = address.rpartition(":") if ":" in address else (address, ":", str(_DEFAULT_PORT))
    if not host or not port.isdecimal():
        msg = f"`{address}` is not a Ray address: `host:port`, `auto` or `local` is expected"
        raise ClusterError(msg)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        msg = f"no Ray cluster at {address}: {error.strerror or error}"
        hint = "`ray status` on the head node tells whether it is up"
        if ":" not in address:
            hint = f"without a port, {port} is taken: is it `{address}:PORT` with another one?\n{hint}"
        raise ClusterError(msg, hint=hint) from None
    with _token_errors(address):
        _check_token()
    head = _ask_head(address)
    _check_versions(address, head)
    return head


def _probe_as_auto(address: str) -> dict[str, Any]:
    """Like `probe`, with a token as `ray.init(address="auto")` uses it: if there is one, also without RAY_AUTH_MODE."""
    with _token_errors(address):
        ray_internals.use_token_if_there_is_one()
    return probe(address)


@contextlib.contextmanager
def _token_errors(address: str) -> Iterator[None]:
    """Turn Ray's error that there is no token, or none that can be sent, into a ClusterError."""
    try:
        yield
    except (AuthenticationError, UnicodeError) as error:
        text = str(getattr(error, "message", error))
        why = text.partition(". ")[0] if isinstance(error, AuthenticationError) else _ILLEGAL
        msg = f"no token can be sent to the Ray cluster at {address}: {why}"
        raise ClusterError(msg, hint=_AUTH_HINT) from None


def _check_token() -> None:
    """Raise AuthenticationError or UnicodeError for a token with which Ray's client would end this process."""
    token = ray_internals.token()
    if not (token.isascii() and token.isprintable()):
        raise AuthenticationError(_ILLEGAL)


def _check_versions(address: str, head: Mapping[str, Any]) -> None:
    """Raise ClusterError if the cluster has another Ray or Python than this process, which Ray itself would refuse.

    `head`: its metadata, by which each node that joined was compared too (`check_version_info` in Ray).
    """
    theirs = head.get("ray_version"), head.get("python_version")
    mine = ray.__version__, ".".join(map(str, sys.version_info[:3]))
    if None in theirs or head.get("ray_init_cluster"):
        return
    digits = 2 if os.environ.get(_MATCH_LEVEL) == "minor" else 3
    if theirs[0] != mine[0] or str(theirs[1]).split(".")[:digits] != mine[1].split(".")[:digits]:
        has = f"the Ray cluster at {address} has Ray {theirs[0]} and Python {theirs[1]}"
        msg = f"{has}, and this process has Ray {mine[0]} and Python {mine[1]}"
        raise ClusterError(msg, hint="both must be equal: run raylaunch in the environment that started Ray there")


def _ask_head(address: str) -> dict[str, Any]:
    """Return the head's metadata. Asked in a thread, since Ray's client waits half a minute for what is not Ray."""
    answer: list[dict[str, Any] | Exception] = []

    def ask() -> None:
        try:
            with _silenced():
                found = ray_internals.ask_head(address, b"CLUSTER_METADATA", b"cluster", _PROBE_SECONDS)
            answer.append(json.loads(found or b"{}"))
        except Exception as error:  # noqa: BLE001
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True, name="raylaunch-probe")
    thread.start()
    thread.join(_PROBE_SECONDS)
    if not answer:
        msg = f"the server at {address} does not answer as a Ray head node does"
        raise ClusterError(msg, hint="check the port: Ray's own is 6379 unless it was started with another")
    if isinstance(answer[0], AuthenticationError):
        msg = f"the Ray cluster at {address} refused our token"
        raise ClusterError(msg, hint=_AUTH_HINT)
    if isinstance(answer[0], Exception):
        msg = f"the Ray cluster at {address} cannot be used: {answer[0]}"
        raise ClusterError(msg)
    return answer[0]


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep Ray's C++ code from writing warnings to stderr; what matters is in the exception."""
    before = os.environ.get("RAY_BACKEND_LOG_LEVEL")
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_BACKEND_LOG_LEVEL"]
        else:
            os.environ["RAY_BACKEND_LOG_LEVEL"] = before


def job_entrypoint(secrets: Redactor) -> str:
    """Return the command line of this process for Ray's list of jobs, without secrets, as UTF-8 can encode it.

    Ray keeps it in the head, for everybody who may look at the dashboard, also after the job.
    """
    return printable(subprocess.list2cmdline(map(secrets.hide, shown_arguments(sys.orig_argv))))


def job_metadata(job: Job, secrets: Redactor) -> dict[str, str]:
    """Return facts of a run, for the metadata of its job. Its folder and its nodes are not known yet."""
    found = {
        "raylaunch_version": version(),
        "run_name": job.title,
        "run_id": job.run_id or "",
        "nnodes": str(job.nnodes),
        "nproc_per_node": str(job.nproc_per_node),
        "user": user_name(),
        "driver": f"process {os.getpid()} on {socket.gethostname()}",
    }
    return {name: printable(secrets.hide(fact)) for name, fact in found.items() if fact}
