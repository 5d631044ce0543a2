"""One run from end to end: `run_job` connects to a cluster, prepares, executes and reports. `plan_job` only plans."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from raylaunch.capabilities.hangs.driver import HangWatch
from raylaunch.capabilities.notices.agent import PreemptionNotices
from raylaunch.capabilities.notices.driver import NoticeDrains
from raylaunch.capabilities.peers.agent import PeerProbe
from raylaunch.capabilities.peers.driver import PeerCheck
from raylaunch.capabilities.state.agent import StateCopies
from raylaunch.capabilities.state.driver import HeldState
from raylaunch.capabilities.terminal.agent import WorkerTerminal
from raylaunch.capabilities.terminal.driver import Keyboard, TerminalKeys
from raylaunch.cluster.agent.link import LinkServer
from raylaunch.cluster.capability import AgentPart, AgentPort, Capability
from raylaunch.cluster.control import cluster_registry, run_control
from raylaunch.cluster.control.run_control import RunControl
from raylaunch.cluster.driver import results, signals
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.observer import GuardedObserver, RunObserver
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.driver.run_registry import DriverProcess, RegisteredRun
from raylaunch.cluster.driver.signals import Signals
from raylaunch.cluster.fleet_api import Fleet
from raylaunch.cluster.local import local_machine, scheduler
from raylaunch.cluster.session import discovery
from raylaunch.cluster.session.session_base import Session
from raylaunch.core.job.job import Job, RayOptions
from raylaunch.core.job.redaction import Redactor, redacted_errors
from raylaunch.core.newtypes import HostId
from raylaunch.core.placement.environment import assign, submitted
from raylaunch.core.placement.plan import NodeFacts, Plan, make_plan, settled
from raylaunch.core.record.result import RunResult
from raylaunch.core.record.run_layout import LAYOUTS, future_losses
from raylaunch.core.text import count
from raylaunch.errors import ClusterError, ConfigError, ExitCode, InterruptedByUserError
from raylaunch.node.linux import procfs
from raylaunch.node.linux.working_folder import current
from raylaunch.node.protocol.node_spec import AgentSpec
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder

if TYPE_CHECKING:
    from raylaunch.cluster.driver.ledger import Ledger, RunFacts
    from raylaunch.cluster.driver.succession import Succession
    from raylaunch.cluster.ray_api.placement_groups import GivenGroup

WANTED = "ray>=2.44"
"""The versions of Ray that can be used, as in the project's metadata: these are missing if raylaunch was copied."""

NO_CLUSTER = "ray.address: none (no cluster is running; this machine does it alone, without Ray)"
_CLUSTER_HINT = "run it on a node of the cluster, or set RAY_ADDRESS to the cluster's `host:port`"

CAPABILITIES = (
    Capability(name="peers", driver=PeerCheck, agent=PeerProbe),
    Capability(name="hangs", driver=HangWatch),
    Capability(name="notices", driver=NoticeDrains, agent=PreemptionNotices),
    Capability(name="state", driver=HeldState, agent=StateCopies),
)
"""What all runs can do besides what the kernel does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The result of a run. `values`: what functions returned or raised, pickled with cloudpickle, by rank.

    After a success there is one for each rank, empty if the rank returned nothing; after a failure, at most the root
    cause's exception.
    """

    result: RunResult
    values: dict[int, bytearray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedRun:
    """A run of which nothing has started yet, but whose folder exists and whose links listen."""

    job: Job
    folder: RunFolder
    fleet: Fleet
    driver: Driver
    links: LinkServer | None
    run_id: str
    began: str
    """The time of day, in ISO 8601."""
    warn: Callable[[str], None]
    """Takes a line for a person."""


def plan_job(job: Job) -> Plan:
    """Return the plan of a job. Connects to a cluster if there is one, and starts nothing. Raises ClusterError."""
    with redacted_errors(Redactor.of(job, os.environ)):
        found = find_cluster(job.ray)
        if found in (local_machine.LOCAL, local_machine.NONE):
            alone = found == local_machine.NONE and job.ray.address == "auto"
            return plan_of(job, (local_machine.facts(job),), local=True, alone=alone)
        with _connected(job) as session:
            return plan_in(session, job)


def run_job(
    job: Job,
    job_text: str,
    observer: RunObserver,
    *,
    payload: bytes = b"",
    on_control: Callable[[RunControl], None] = lambda _: None,
    keyboard: Keyboard | None = None,
    succession: Succession | None = None,
    conclude: Callable[[RunResult], None] = lambda _: None,
    capabilities: Sequence[Capability] = CAPABILITIES,
    given: GivenGroup | None = None,
) -> RunOutcome:
    """Run a job and return its outcome, whatever happened to its workers. Several threads may each run a job.

    `job_text`: the job as it is written to the run folder. `payload`: (function, args, kwargs), pickled with
    cloudpickle, to run instead of the job's entry point. `on_control`: gets what answers this process about the run.
    `keyboard`: the terminal that one rank gets. `succession`: which driver of a detached run on a cluster it is.
    `conclude` is called when the journal is complete, before `result.json` is written: who waits for that has all.
    `capabilities`: without the terminal's. `given`: the program's placement group, in which the run takes place.

    Raises ConfigError if the run folder cannot be made or there is no working folder, ClusterError if the cluster
    cannot be reached, cannot hold the job at all or cannot go on with it, and InterruptedByUserError if a signal
    arrived before the first agent was requested.
    """
    submitter_env = submitted(os.environ)  # before Ray adds to it
    if succession is None or succession.predecessor is None:
        job = scheduler.with_end(job, os.environ, observer.on_message)
    secrets = Redactor.of(job, os.environ)
    _working_folder()
    capabilities = (*capabilities, *_terminal(keyboard))
    with redacted_errors(secrets), signals.handled(job) as handler, _connected(job, given) as session:
        seen = GuardedObserver(observer)
        if succession is not None and succession.predecessor is not None:
            run = _resume(succession, succession.predecessor.ledger, seen, session, capabilities)
        else:
            run = _prepare(job, job_text, seen, session, submitter_env, payload, keyboard, succession, capabilities)
        handler.go_to(run.driver.signalled)
        control = _control(run, session)
        on_control(control)
        with (
            run_control.served(control, session, run.warn),
            cluster_registry.entered(_entry(run, session, secrets, control, succession), os.environ, run.warn) as entry,
        ):
            values, error = _execute(run, handler, control, is_function=bool(payload))
            result = _report(run, session, secrets, error, conclude)
            entry.exit_code = result.exit_code
            control.ended(result)
        if error is not None:
            raise error
        return RunOutcome(result=result, values=values)


def _control(run: _PreparedRun, session: Session) -> RunControl:
    hosts, why_no_room = partial(_hosts, session, run.job), partial(_why_no_room, session, run.job)
    return RunControl(run.driver, run.folder, run.job.log_layout, run.fleet, hosts, why_no_room)


def _hosts(session: Session, job: Job) -> frozenset[HostId] | None:
    """Return the hosts of the cluster; None: that is not known, or it may get others."""
    try:
        return None if session.may_grow() else frozenset(node.node_id for node in session.nodes(job))
    except Exception:  # noqa: BLE001
        return None  # the head does not answer


def _why_no_room(session: Session, job: Job, nodes: int) -> str:
    """Return why the cluster could never hold this number of nodes; "": it could, or an autoscaler may add some.

    Raises an exception of Ray's if the head does not answer.
    """
    try:
        plan = plan_in(session, replace(job, nnodes=nodes))
    except ClusterError as error:
        return error.message
    if plan.possible or session.may_grow():
        return ""
    return "; ".join(plan.obstacles) or f"the cluster has no room for {plan.asked}, not even if all of it was free"


def _entry(
    run: _PreparedRun, session: Session, secrets: Redactor, control: RunControl, succession: Succession | None
) -> RegisteredRun:
    path = run.folder.path
    return RegisteredRun(
        id=secrets.hide(path.name if path is not None else run.run_id),
        name=secrets.hide(run.job.title),
        folder=run.folder.where,
        driver=DriverProcess.this(),
        began=run.began,
        cluster=secrets.hide(session.address),
        control=control.address,
        user=procfs.user_name(),
        token=succession.token if succession is not None else "",
    )


def find_cluster(options: RayOptions) -> str:
    """Return the address of the cluster to connect to, or `local_machine.LOCAL`, or `local_machine.NONE`.

    Ray is not imported to find out that there is no cluster. Raises ClusterError within seconds if the cluster that
    `ray.address` or RAY_ADDRESS names cannot be reached.
    """
    if discovery.is_alone(options, os.environ):
        return local_machine.NONE
    return str(_ray_session().find(options))


def end_idle_agents(options: RayOptions) -> int:
    """End the agents that `keep_warm` keeps for this user on this machine. Return their number. Raises ClusterError."""
    address = find_cluster(options)
    is_cluster = address not in (local_machine.LOCAL, local_machine.NONE)
    return int(_ray_session().end_idle_agents(options, address)) if is_cluster else 0


@contextlib.contextmanager
def _connected(job: Job, given: GivenGroup | None = None) -> Iterator[Session]:
    """Open a session for the time of a run. Raises ClusterError within seconds."""
    address = find_cluster(job.ray)
    if address == local_machine.NONE:
        from raylaunch.cluster.session.local_session import LocalSession  # noqa: PLC0415

        yield LocalSession()
        return
    with _ray_session().connected(job, address, given) as session:
        yield session


def _ray_session() -> ModuleType:
    """Import the module that needs Ray. It uses private parts of Ray, which other versions may not have."""
    try:
        from raylaunch.cluster.session import ray_session  # noqa: PLC0415
    except (ImportError, AttributeError) as error:
        found = importlib.util.find_spec("ray") and importlib.metadata.version("ray")
        missing = f"Ray is not installed for {sys.executable}"
        msg = f"Ray {found}, which is installed here, cannot be used: {error}" if found else missing
        raise ClusterError(msg, hint=f"install `{WANTED}` on all nodes; `ray.address: none` needs no Ray") from None
    return ray_session


def _prepare(
    job: Job,
    job_text: str,
    observer: RunObserver,
    session: Session,
    submitter_env: dict[str, str],
    payload: bytes,
    keyboard: Keyboard | None,
    succession: Succession | None,
    capabilities: Sequence[Capability],
) -> _PreparedRun:
    """Plan the run, make its folder and tell the observer. Raises ClusterError if this machine cannot hold the job."""
    plan = plan_in(session, job)
    _refuse_hopeless(plan, session)
    refuse_durable(job, session)
    began, began_at = datetime.now(timezone.utc), time.monotonic()
    run_id = job.run_id or began.astimezone().strftime("%Y-%m-%dT%H-%M-%S")
    folder = RunFolder.create(job, run_id, observer.on_message, succession.epoch if succession is not None else 0)
    folder.open(settled(job, plan), job_text, plan, began.isoformat(), began_at)
    observer.on_plan(job, plan, folder.where)
    if NO_CLUSTER in plan.assumed and not plan.fallback:
        observer.on_message("no Ray cluster is running: this machine does it alone, without Ray")
    losses = future_losses(folder.where, _working_folder(), job.entrypoint.args, unpacked=session.brings_files)
    for warning in (*session.notes, *plan.warnings, *losses):
        observer.on_message(warning)
    links = session.links()
    if session.in_process:
        job = replace(job, node_timeout=math.inf)  # agents in this process cannot be lost without it
    if job.keep_warm and (why := session.why_not_warm(plan)):
        observer.on_message(f"keep_warm has no effect: {why}")
        job = replace(job, keep_warm=0.0)
    if keyboard is not None and keyboard.spec.rank >= plan.workers:
        msg = f"there is no rank {keyboard.spec.rank}: the job has {count(plan.workers, 'worker')}"
        raise ConfigError(msg)
    spec = _agent_spec(job, plan, session, folder.where, submitter_env, links, payload, capabilities)
    if succession is not None:
        facts = succession.facts(job, settled(job, plan), plan, run_id, began.isoformat(), spec)
        return _detached(succession, facts, folder, observer, began_at, links, capabilities)
    fleet = session.fleet(plan, spec, observer.on_message)
    driver = Driver(settled(job, plan), run_id, fleet, folder, observer, began_at, links, capabilities=capabilities)
    return _PreparedRun(
        job=job,
        folder=folder,
        fleet=fleet,
        driver=driver,
        links=links,
        run_id=run_id,
        began=began.isoformat(),
        warn=observer.on_message,
    )


def _terminal(keyboard: Keyboard | None) -> Sequence[Capability]:
    if keyboard is None:
        return ()
    keys, terminal = partial(TerminalKeys, keyboard), partial(WorkerTerminal, keyboard.spec)
    return (Capability(name="terminal", driver=keys, agent=terminal),)


def _agent_parts(capabilities: Sequence[Capability]) -> dict[str, Callable[[AgentPort], AgentPart]]:
    return {each.name: each.agent for each in capabilities if each.agent is not None}


def _resume(
    succession: Succession,
    ledger: Ledger,
    observer: RunObserver,
    session: Session,
    capabilities: Sequence[Capability],
) -> _PreparedRun:
    """Go on with a run after another driver."""
    facts = ledger.facts
    path = Path(ledger.folder.path) if ledger.folder.path else None
    layout, secrets = LAYOUTS[facts.job.log_layout], Redactor.of(facts.job, os.environ)
    folder = RunFolder(path, layout, secrets, observer.on_message, succession.epoch)
    folder.resume(ledger.folder, facts.job)
    observer.on_takeover(facts.job, folder.where)
    observer.on_message(succession.describe())
    links = session.links()
    address, parts = links.address if links else None, _agent_parts(capabilities)
    facts = replace(facts, spec=replace(facts.spec, link_address=address, parts=parts))
    return _detached(succession, facts, folder, observer, ledger.began_at(), links, capabilities)


def _detached(
    succession: Succession,
    facts: RunFacts,
    folder: RunFolder,
    observer: RunObserver,
    began_at: float,
    links: LinkServer | None,
    capabilities: Sequence[Capability],
) -> _PreparedRun:
    """Return a run whose driver may be followed by another. `began_at`: the time.monotonic() of its beginning."""
    fleet = succession.fleet(facts.plan, facts.spec, observer.on_message, folder.fence.leave)
    return _PreparedRun(
        job=facts.asked,
        folder=folder,
        fleet=fleet,
        driver=succession.driver(facts, fleet, folder, observer, began_at, links, capabilities),
        links=links,
        run_id=facts.run_id,
        began=facts.began,
        warn=observer.on_message,
    )


def _execute(
    run: _PreparedRun, handler: Signals, control: RunControl, *, is_function: bool
) -> tuple[dict[int, bytearray], ClusterError | InterruptedByUserError | None]:
    """Drive the run to its end and end its agents. Return the values by rank, and what made the run hopeless if it is.

    Hopeless is for example a node without torch, or a `master_port` in use: to wait would not mend it. Or a signal has
    given up the last checkpoint.
    """
    with contextlib.closing(run.links) if run.links else contextlib.nullcontext(), contextlib.closing(run.fleet):
        try:
            try:
                run.driver.run()
                interrupted = _end_parts(run, handler)
            finally:
                handler.run_is_over()
            control.over()
            values = _values(run, handler) if is_function else {}
            run.fleet.make_idle()
        except ClusterError as error:
            return {}, error
    return values, interrupted


def _end_parts(run: _PreparedRun, handler: Signals) -> InterruptedByUserError | None:
    """Let capabilities do what needs the agents. Return the error of a signal that has interrupted them."""
    handler.interrupt_main_thread()
    try:
        for part in run.driver.parts.values():
            part.ended()
    except InterruptedByUserError as error:
        return error
    return None


def _values(run: _PreparedRun, handler: Signals) -> dict[int, bytearray]:
    """Return what functions returned; or what the root cause of a failure raised, if it can be fetched.

    A signal interrupts that, which may take minutes. The process goes on: it may be a notebook.
    """
    handler.interrupt_main_thread()
    values = _fetched(run)
    handler.run_is_over()
    return values


def _fetched(run: _PreparedRun) -> dict[int, bytearray]:
    result, machine = run.folder.recorded.result.result(), run.driver.machine
    if result.ok:
        parts = assign(machine.attempt, machine.world.members)
        nodes = {rank: part.node for part in parts for rank in part.ranks}
        return results.fetch(run.fleet, nodes, run.driver.nodes.last_heard)
    with contextlib.suppress(ClusterError):
        if result.cause is not None:
            nodes = {result.cause.rank: result.cause.node}
            return results.fetch(run.fleet, nodes, run.driver.nodes.last_heard)
    return {}


def _report(
    run: _PreparedRun,
    session: Session,
    secrets: Redactor,
    error: ClusterError | InterruptedByUserError | None,
    conclude: Callable[[RunResult], None],
) -> RunResult:
    """Derive the result from the journal and write it to the run folder."""
    result = run.folder.recorded.result.result(run_dir=run.folder.where, began=run.began)
    if error is not None:
        result = replace(result, exit_code=error.exit_code, why=error.message)
    elif result.exit_code == ExitCode.UNAVAILABLE:
        result = replace(result, why=f"{result.why}\n{_shortage(run.job, session, result)}")
    result = secrets.shown(result)
    run.folder.close(result, conclude if error is None else None)
    return result


def _shortage(job: Job, session: Session, result: RunResult) -> str:
    text = plan_in(session, job).shortage
    if any(attempt.lost for attempt in result.attempts):
        text += "\nRay may take a minute to notice that a node is gone: it may be counted here"
    return text


# What is planned, and what agents are told.


def plan_in(session: Session, job: Job) -> Plan:
    """Return the plan of a job for the nodes that a session has now. Raises ClusterError."""
    alone = session.in_process and job.ray.address == "auto"
    plan = plan_of(job, session.nodes(job), local=session.local, alone=alone)
    return replace(plan, cluster="" if session.local else session.address)


def plan_of(job: Job, nodes: tuple[NodeFacts, ...], *, local: bool, alone: bool) -> Plan:
    """Return the plan. `alone`: this machine stands in for a cluster that was not found.

    Raises ClusterError if the job cannot be planned, or needs a cluster.
    """
    try:
        plan = make_plan(job, nodes, local=local)
    except ValueError as error:
        hint = "`nproc_per_node: auto` starts a worker for each CPU where no node has a GPU"
        raise ClusterError(str(error), hint=hint) from None
    if not alone:
        return plan
    plan = replace(plan, assumed=(NO_CLUSTER, *plan.assumed))
    if plan.max_nodes == 1:
        return plan
    if why := _needs_cluster(job, plan):
        msg = f"no Ray cluster was found, and the job is for a cluster: {plan.max_nodes} nodes {why}"
        raise ClusterError(msg, hint=f"{_CLUSTER_HINT}\n{discovery.NO_CLUSTER_HINT}")
    return replace(plan, fallback=f"no Ray cluster was found: all {plan.max_nodes} nodes run on this machine")


def _needs_cluster(job: Job, plan: Plan) -> str:
    """Return why several nodes must not share this machine unless the person says so; `""`: they may."""
    if job.placement == "spread":
        return "with `placement: spread`"
    return "with GPUs" if any(bundle.gpus for bundle in plan.bundles) else ""


def _refuse_hopeless(plan: Plan, session: Session) -> None:
    """Raise ClusterError for a plan that nothing could make possible."""
    if session.local and not plan.feasible:
        msg = "this machine cannot hold the job"
        raise ClusterError(msg, hint=plan.shortage)
    if plan.lacks_gpus and not session.may_grow():
        msg = "the job needs GPUs, no node of the cluster has any, and there is no autoscaler that could add one"
        raise ClusterError(msg, hint=f"{plan.shortage}\nwith `gpus_per_worker: 0` it runs on CPUs")


def _working_folder() -> str:
    """Return the folder in which workers run. Raises ConfigError if it was removed."""
    try:
        return current()
    except OSError as error:
        msg = f"the working folder cannot be used: {error.strerror}"
        raise ConfigError(msg, hint="it may have been removed or moved: `cd` to a folder that exists") from None


def refuse_durable(job: Job, session: Session) -> None:
    """Raise ConfigError for a folder `durable` that cannot be used, as far as this machine can tell."""
    folder = DurableFolder.of(job.durable, {})
    if folder is None or session.brings_files:
        return
    try:
        if session.local:
            folder.check_writable()
        else:
            folder.check()
    except OSError as error:
        msg = f"checkpoints cannot be written to {folder.path}: {error.strerror}"
        raise ConfigError(msg, hint="`durable` names a folder that all nodes see, or may make") from None


def _agent_spec(
    job: Job,
    plan: Plan,
    session: Session,
    run_dir: str,
    submitter_env: dict[str, str],
    links: LinkServer | None,
    payload: bytes,
    capabilities: Sequence[Capability],
) -> AgentSpec:
    """Return what all agents are told; the fleet adds the rest for each."""
    return AgentSpec(
        job=replace(settled(job, plan), name=Redactor.of(job, os.environ).hide(job.title)),
        run_dir=run_dir,
        payload=payload,
        copy_secret=os.urandom(32).hex(),
        state_secret="" if session.in_process else os.urandom(16).hex(),  # else agents end with this process
        address=local_machine.LOOPBACK if session.local else None,
        submitter_env=submitter_env,
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
        cwd=None if session.brings_files else _working_folder(),
        ray_address=session.address,
        link_address=links.address if links else None,
        parts=_agent_parts(capabilities),
        epoch=time.time_ns(),  # no run whose agents this one may use has a higher one
    )
