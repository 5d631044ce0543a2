"""`raylaunch.WorkerGroup`: an object of a class in each rank, whose methods the caller calls on all ranks."""

from __future__ import annotations

import socket
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, get_args

from raylaunch.cli.api import CheckedLaunch, check_call, checked_function
from raylaunch.cli.config.job_settings import JobSettings
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.run import find_cluster
from raylaunch.core.job.job import Job, node_range
from raylaunch.core.newtypes import HostId
from raylaunch.core.text import count
from raylaunch.errors import ClusterError, ConfigError, InterruptedByUserError, RunStoppedError
from raylaunch.worker_group import ray_node
from raylaunch.worker_group.calls import (
    Datasets,
    GroupCall,
    PackedArguments,
    PendingCall,
    PendingResize,
    fail,
    is_connected,
)
from raylaunch.worker_group.dispatcher import (
    CallDispatcher,
    CloseGroup,
    OnRestart,
    RestartGroup,
    RunBegun,
    RunEnded,
)
from raylaunch.worker_group.lines import LineServer
from raylaunch.worker_group.rank.messages import GroupRank
from raylaunch.worker_group.rank.serving import RankServer

if TYPE_CHECKING:
    from typing_extensions import Self

    from raylaunch.cluster.control.run_control import RunControl
    from raylaunch.cluster.ray_api.placement_groups import GivenGroup

_SETTINGS = frozenset(JobSettings.__optional_keys__ | JobSettings.__required_keys__)
Returns = Literal["value", "ref"]
_END_SECONDS = 5.0
"""How long ranks that are idle may take to end, beyond which they are killed."""


class WorkerGroup:
    """A run with an object of a class in each rank, whose methods the caller calls on all ranks.

        with raylaunch.WorkerGroup(Policy, config, nnodes=2, nproc_per_node=4, max_restarts=3) as group:
            losses = group.call("update", raylaunch.scatter(batches))

    Each rank has torchrun's environment, and its process group is initialized before `Class(*args, **kwargs)`, unless
    `backend="none"`. If a rank fails, the run restarts as any other run does, up to `max_restarts` times, and the
    interrupted call raises `RankRestartedError`, or is made again on all ranks (`retry=True`). If the objects have an
    attribute `state`, a `raylaunch.worker.State`, it is restored before they are called. If the class has the attribute
    `elastic = True`, ranks that did not fail keep their objects.

    Calls are carried out one after the other, in the order in which they were made. Any thread may make them.
    """

    def __init__(
        self,
        kind: type,
        /,
        *args: Any,
        placement_group: Any = None,
        bundles: Sequence[int] | None = None,
        datasets: Mapping[str, Any] | None = None,
        on_restart: OnRestart | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Start the ranks, and wait until each has its object.

        :param settings: keys of a job file, as `launch` takes them. Other keyword arguments go to the class.
        :param kwargs: more keyword arguments of the class, which may be named like settings.
        :param placement_group: the caller's; it is never removed. Its bundles are the nodes of the run, in the order of
            `rank_env`.
        :param bundles: the indices of the bundles to use; None: all.
        :param datasets: datasets of Ray Data by name. `raylaunch.worker.dataset_shard(name)` returns a rank's part.
        :param on_restart: is called with a `GroupRestart` when the group is whole again after a restart, in a thread of
            this process, before any waiting call is carried out. It may make calls itself.
        :raises TypeError: the arguments do not fit the class, or cannot be pickled. Otherwise raises as `launch` does.
        """
        own = {name: value for name, value in settings.items() if name not in _SETTINGS} | dict(kwargs or {})
        check_call("WorkerGroup", kind, args, own)
        job = {name: value for name, value in settings.items() if name in _SETTINGS}
        if job.get("detach"):
            raise ConfigError("a `WorkerGroup` ends with its caller, and cannot be detached")
        given = _given(placement_group, bundles, job)
        if given is not None:
            job = {"nnodes": len(given.places), "placement": "pack"} | job
        self._dispatcher = CallDispatcher(PackedArguments(args, own), Datasets(datasets or {}), on_restart)
        self._server = LineServer(_own_address(job), self._dispatcher.inbox)
        self._lock = threading.Lock()
        address = self._server.address
        call: tuple[Any, ...] = (RankServer(address.host, address.port, address.secret, kind), (), {})
        try:
            run = checked_function(call, kind, args, own, job)
        except BaseException:
            self._server.close()
            self._dispatcher.inbox.put(RunEnded(error=None))
            raise
        self._placement_seconds = run.job.placement_timeout
        self._bundle_count = len(given.places) if given is not None else None
        title = f"raylaunch-{run.job.title}"
        driven = (run, given, self._dispatcher, self._server)
        threading.Thread(target=_drive, args=driven, daemon=True, name=title).start()
        self._finalizer = weakref.finalize(self, self._dispatcher.inbox.put, CloseGroup(now=True))
        self._wait_for_start()

    def _wait_for_start(self) -> None:
        try:
            self._dispatcher.started.wait()
        except BaseException:
            self.close(now=True)
            raise
        if self._dispatcher.error is not None:
            self._dispatcher.ended.wait()
            raise self._dispatcher.error

    def __repr__(self) -> str:
        state = "ended" if self._dispatcher.ended.is_set() else f"attempt {self._dispatcher.world.attempt}"
        return f"<raylaunch.WorkerGroup of {len(self.ranks)} ranks: {state}>"

    def __len__(self) -> int:
        """Return the number of ranks."""
        return self._dispatcher.world.size

    @property
    def ranks(self) -> tuple[GroupRank, ...]:
        """Where each rank runs: `rank`, `host`, `node`, `pid`, `gpus`."""
        return self._dispatcher.world.places

    def call(
        self,
        method: str,
        /,
        *args: Any,
        retry: bool = False,
        returns: Returns = "value",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method on all ranks, and return the results by rank.

        An argument may be or contain `raylaunch.scatter([...])`, of which each rank gets its own part. An ObjectRef in
        it stands for its object, which Ray brings to each node once.

        :param retry: if ranks fail in the call, make it again on all ranks. A rank may then have carried it out twice.
        :param returns: "ref": leave each result on the node of its rank, and return ObjectRefs. This process owns them,
            as it owns the results of actors.
        :param timeout: seconds to wait; None: without a limit. After a timeout, the call goes on.
        :raises CallFailedError: the method raised an exception in a rank. `__cause__` is that exception.
        :raises RankRestartedError: ranks failed in the call, or since the last one. All ranks can be called again.
        :raises JobFailedError: ranks failed, and no restart is left: the group has ended.
        :raises TimeoutError: the time is over.
        """
        return self.submit(method, *args, retry=retry, returns=returns, **kwargs).result(timeout)

    def call_one(
        self,
        rank: int,
        method: str,
        /,
        *args: Any,
        retry: bool = False,
        returns: Returns = "value",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method on one rank, and return its result. Otherwise as `call`."""
        return self.submit_one(rank, method, *args, retry=retry, returns=returns, **kwargs).result(timeout)

    def submit(
        self, method: str, /, *args: Any, retry: bool = False, returns: Returns = "value", **kwargs: Any
    ) -> GroupCall:
        """Begin a call on all ranks, and return its future at once.

        `await` and `concurrent.futures.wait` wait for it. Do not change arrays in the arguments before it is done.
        """
        return self._submitted(None, method, PackedArguments(args, kwargs), retry, returns)

    def submit_one(
        self, rank: int, method: str, /, *args: Any, retry: bool = False, returns: Returns = "value", **kwargs: Any
    ) -> GroupCall:
        """Begin a call on one rank, and return its future at once."""
        return self._submitted(rank, method, PackedArguments(args, kwargs), retry, returns)

    def _submitted(
        self, rank: int | None, method: str, arguments: PackedArguments, retry: bool, returns: Returns
    ) -> GroupCall:
        if returns not in get_args(Returns):
            msg = f'`returns` is "value" or "ref", not {returns!r}'
            raise ValueError(msg)
        in_ray = returns == "ref"
        if in_ray and not is_connected():
            raise ClusterError('`returns="ref"` needs Ray, and this process is not connected', hint="call `ray.init`")
        call = PendingCall(
            future=GroupCall(), method=method, arguments=arguments, rank=rank, retry=retry, returns_ref=in_ray
        )
        self._dispatcher.submit(call)
        self._fail_if_ended(call.future)
        return call.future

    def restart(self) -> None:
        """Start all ranks again, with new objects, and wait until they run. `State` goes on from its last commit.

        A call in progress raises `RankRestartedError`. This spends none of `max_restarts`.
        """
        self._dispatcher.refuse_in_callback("restart")
        self._wait_for(RestartGroup(done=Future()))

    def resize(self, nnodes: int | str) -> None:
        """Change the number of nodes to N, or to MIN to MAX (`"2:4"`), and wait. `State` goes on from its last commit.

        It is carried out after earlier calls and before later ones. Each node has `nproc_per_node` ranks, as before.
        Ranks stay as in a restart, and `on_restart` is called. If the cluster has not provided MIN nodes within
        `placement_timeout` seconds, the group goes on with the nodes that it had.

        :raises ValueError: `nnodes` is no number of nodes.
        :raises ClusterError: the cluster, or the group's part of the placement group, is too small, or did not provide
            the nodes in time; or the run refuses, for example since `nprocs` fixes the number of ranks.
        """
        self._dispatcher.refuse_in_callback("resize")
        low, high = node_range(nnodes)
        if not 1 <= low <= high:
            msg = f"`{nnodes}` is no range of nodes: the least is 1, and MIN is at most MAX"
            raise ValueError(msg)
        if self._bundle_count is not None and high > self._bundle_count:
            msg = f"the group cannot have {high} nodes: it has {count(self._bundle_count, 'bundle')}, each for a node"
            raise ClusterError(msg)
        seconds = self._placement_seconds
        self._wait_for(PendingResize(done=Future(), min_nodes=low, max_nodes=high, seconds=seconds))

    def _wait_for(self, request: RestartGroup | PendingResize) -> None:
        self._dispatcher.inbox.put(request)
        self._fail_if_ended(request.done)
        request.done.result()

    def _fail_if_ended(self, future: Future[Any]) -> None:
        if self._dispatcher.ended.is_set():
            fail(future, self._dispatcher.error or RunStoppedError("the group is closed"))

    def close(self, *, now: bool = False) -> None:
        """End the ranks, and wait until nothing of the run is left. Waiting calls are given up.

        Busy ranks are killed. Idle ranks end as a script does at its end, unless `now` is set.
        """
        self._finalizer.detach()
        self._dispatcher.inbox.put(CloseGroup(now=now))
        if not self._dispatcher.ended.wait(_END_SECONDS):
            self._dispatcher.inbox.put(CloseGroup(now=True))
            self._dispatcher.ended.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _given(placement_group: Any, bundles: Sequence[int] | None, settings: Mapping[str, Any]) -> GivenGroup | None:
    """Return the caller's placement group, when it is reserved; None: there is none. Raises as `rank_env` does."""
    if placement_group is None:
        if bundles is not None:
            raise TypeError("`bundles` are indices of the bundles of a `placement_group`, which is missing")
        return None
    # Not imported at the top: they need Ray, which takes a second to load.
    from raylaunch.cluster.ray_api.placement_groups import GivenGroup  # noqa: PLC0415
    from raylaunch.worker_group.rank_env import bundle_places  # noqa: PLC0415

    seconds = float(settings.get("placement_timeout", Job().placement_timeout))
    places = bundle_places(placement_group, bundles, seconds)
    return GivenGroup(placement_group, tuple((index, HostId(node)) for index, node in places))


def _drive(run: CheckedLaunch, given: GivenGroup | None, dispatcher: CallDispatcher, server: LineServer) -> None:
    def begun(control: RunControl) -> None:
        bounds = (0, 0) if run.job.nprocs is not None else (run.job.min_nodes, run.job.max_nodes)
        dispatcher.inbox.put(RunBegun(control=control, bounds=bounds))

    error: BaseException | None = None
    try:
        run.value(run.run(begun, given, (ray_node.CAPABILITY,)))
    except InterruptedByUserError as stopped:  # it would end an event loop, and nobody pressed Ctrl-C
        error = RunStoppedError(stopped.message, exit_code=stopped.exit_code)
    except BaseException as failed:  # noqa: BLE001
        error = failed
    server.close()
    dispatcher.inbox.put(RunEnded(error=error))


def _own_address(settings: Mapping[str, Any]) -> str:
    """Return the address of this machine at which the ranks reach it."""
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    from raylaunch.cli.config import load  # noqa: PLC0415

    job: Job = load.job_of({**settings, "entrypoint": {"function": "module:name"}})
    cluster = find_cluster(job.ray)
    if cluster in (local_machine.LOCAL, local_machine.NONE):
        return local_machine.LOOPBACK
    host, _, port = cluster.removeprefix("ray://").rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:  # it sends nothing
        sock.connect((host.strip("[]"), int(port)))
        return str(sock.getsockname()[0])
