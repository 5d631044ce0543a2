"""`raylaunch.rank_env`: torchrun's environment for each rank of a placement group that the caller owns."""

from __future__ import annotations

import functools
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylaunch.core.placement.environment import natural_key
from raylaunch.errors import ClusterError

if TYPE_CHECKING:
    from typing_extensions import Self

_NO_RESOURCES = {"num_cpus": 0, "num_gpus": 0}
_READY_SECONDS = 300.0


class PortHolder:
    """An actor on the node of rank 0, which holds MASTER_PORT for rank 0.

    The socket is bound and does not listen. So the kernel gives its port to nobody who asks for any free one, and rank
    0 can listen there all the same: both have SO_REUSEADDR (socket(7)), which torch's TCPStore sets.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in _own_address() else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((_own_address(), 0))

    def address(self) -> tuple[str, int]:
        """Return MASTER_ADDR and MASTER_PORT."""
        return _own_address(), self._socket.getsockname()[1]


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())


class RankEnv:
    """The environments of all ranks, by rank. It holds MASTER_PORT until it is closed or collected.

    with raylaunch.rank_env(group, nproc_per_bundle=1) as ranks:
        for rank, (bundle, env) in enumerate(zip(ranks.bundles, ranks)):
            ...
    """

    def __init__(self, bundles: Sequence[int], environments: Sequence[Mapping[str, str]], holder: Any) -> None:
        #: By rank: the index of its bundle in the placement group.
        self.bundles = tuple(bundles)
        self._environments = tuple(environments)
        self._holder = holder

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self._environments)

    def __getitem__(self, rank: int) -> dict[str, str]:
        """Return the variables of a rank, for `os.environ.update` or `runtime_env={"env_vars": ...}`."""
        return dict(self._environments[rank])

    def __iter__(self) -> Iterator[dict[str, str]]:
        """Yield the variables of each rank."""
        return map(dict, self._environments)

    def __repr__(self) -> str:
        first = self._environments[0]
        return f"<raylaunch.RankEnv of {len(self)} ranks, {first['MASTER_ADDR']}:{first['MASTER_PORT']}>"

    def close(self) -> None:
        """Give MASTER_PORT back. Ranks that have their process group do not notice."""
        self._holder = None  # Ray ends an actor to which nothing refers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rank_env(
    placement_group: PlacementGroup,
    nproc_per_bundle: int = 1,
    *,
    bundles: Sequence[int] | None = None,
    timeout: float = _READY_SECONDS,
) -> RankEnv:
    """Return the environment of each rank that the caller starts in the bundles of a placement group.

    Each has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
    with which `torch.distributed.init_process_group()` needs no arguments. Bundles on one Ray node are one group, and
    follow each other: nodes are in the order of their addresses, and the bundles of a node by their index. This order
    is the same in each call. MASTER_PORT is bound on the node of rank 0, so no other process gets it before rank 0
    listens there. An environment is for one set of processes: call this again for those that take their place.

    Call it where Ray is connected: in a driver, an actor or a task. It starts no process in the ranks, and takes no
    resources of the group.

    :param nproc_per_bundle: ranks of each bundle.
    :param bundles: the indices of the bundles to use; None: all.
    :param timeout: seconds to wait until Ray has reserved the group.
    :raises TypeError: it is no placement group.
    :raises ValueError: there is no such bundle, one comes twice, or `nproc_per_bundle` is below 1.
    :raises ClusterError: the group was not reserved in time, or was removed.
    """
    if nproc_per_bundle < 1:
        msg = f"`nproc_per_bundle` is 1 or more, not {nproc_per_bundle}"
        raise ValueError(msg)
    places = bundle_places(placement_group, bundles, timeout)
    strategy = PlacementGroupSchedulingStrategy(placement_group, places[0][0])
    holder = _holder_class().options(**_NO_RESOURCES, scheduling_strategy=strategy).remote()
    try:
        address, port = ray.get(holder.address.remote(), timeout=timeout)
    except RayError as error:
        msg = f"no port can be held on the node of rank 0, in bundle {places[0][0]} of the placement group: {error}"
        raise ClusterError(msg) from error
    ranked = [place for place in places for _ in range(nproc_per_bundle)]
    master = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return RankEnv(
        [bundle for bundle, _ in ranked], [env | master for env in ranks_on([node for _, node in ranked])], holder
    )


def bundle_places(
    placement_group: PlacementGroup, bundles: Sequence[int] | None, timeout: float
) -> list[tuple[int, str]]:
    """Return (index, id of the Ray node) of each bundle, in the order of the ranks. Raises as `rank_env` does."""
    if not isinstance(placement_group, PlacementGroup):
        msg = f"`placement_group` is one of Ray, not an object of type {type(placement_group).__qualname__}"
        raise TypeError(msg)
    count = placement_group.bundle_count
    wanted = range(count) if bundles is None else bundles
    if not wanted or len({*wanted}) < len(wanted) or not {*wanted} <= {*range(count)}:
        msg = f"`bundles` has each index once, from 0 to {count - 1}, and at least one, not {[*wanted]}"
        raise ValueError(msg)
    if not placement_group.wait(timeout):
        msg = f"Ray has not reserved the placement group within {timeout:g} s; `ray status` shows what is free"
        raise ClusterError(msg)
    nodes: Mapping[int, str] = placement_group_table(placement_group)["bundles_to_node_id"]
    if lost := [index for index in wanted if not nodes.get(index)]:
        msg = f"bundles {lost} of the placement group are on no node: it was removed, or Ray is moving them"
        raise ClusterError(msg)
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    return sorted(
        ((index, nodes[index]) for index in wanted),
        key=lambda place: (natural_key(addresses.get(place[1], "")), place[1], place[0]),
    )


def ranks_on(nodes: Sequence[str]) -> list[dict[str, str]]:
    """Return the ranks' variables, given the node of each rank. Ranks on one node must follow each other."""
    sizes = Counter(nodes)
    groups = {node: number for number, node in enumerate(sizes)}
    local: Counter[str] = Counter()
    found = []
    for rank, node in enumerate(nodes):
        found.append(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(local[node]),
                "WORLD_SIZE": str(len(nodes)),
                "LOCAL_WORLD_SIZE": str(sizes[node]),
                "GROUP_RANK": str(groups[node]),
                "GROUP_WORLD_SIZE": str(len(sizes)),
            }
        )
        local[node] += 1
    return found


@functools.cache
def _holder_class() -> Any:
    return ray.remote(max_restarts=0, max_task_retries=0, enable_task_events=False)(PortHolder)
