"""Everything of Ray that is not its public API, and what differs between its versions. No other module uses any of it.

Ray promises nothing about these names, so each is looked for where it is, and never by Ray's version. Each function
says what it is for, which shapes there are (in Ray 2.44, 2.47, 2.50, 2.52, 2.54 and 2.60), and what happens without it.
`check` tries all of them once, when this process has connected: what is needed and missing ends the run before it has
started anything. Without the others the run does less, and says so.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import ray
from ray import exceptions
from ray.util.placement_group import placement_group

from raylaunch.core.environ import snapshot
from raylaunch.core.newtypes import HostId
from raylaunch.core.placement import devices
from raylaunch.core.placement.environment import natural_key
from raylaunch.errors import ClusterError

UNEXPECTED = (AttributeError, ImportError, LookupError, TypeError)
"""What is raised where Ray has another shape than expected. Ray itself raises RayError and RuntimeError."""
_UNAUTHENTICATED = 16
"""gRPC's code for it (`StatusCode.UNAUTHENTICATED`)."""
_HINT = "raylaunch works with Ray 2.44 to 2.60; `ray.address: none` needs no Ray"


class _NeverRaisedError(Exception):
    """Stands for an exception that this Ray does not have."""


AuthenticationError: type[Exception] = getattr(exceptions, "AuthenticationError", _NeverRaisedError)
"""Ray's error about tokens. Without it (before 2.52), Ray knows no tokens."""


def check() -> tuple[str, ...]:
    """Try everything once that a connected process uses later. Return what this Ray cannot do, in sentences.

    Raises ClusterError if it lacks what no run can do without.
    """
    try:
        head_session(seconds=5)
        own_session()
    except UNEXPECTED as error:
        msg = f"Ray {ray.__version__}, which is installed here, cannot be used: {error}"
        raise ClusterError(msg, hint=_HINT) from None
    except (exceptions.RayError, RuntimeError):
        pass  # the head does not answer right now; whatever is asked next says so
    return tuple(f"Ray {ray.__version__} {text}" for ask, text in _OPTIONAL if not _has(ask))


def _has(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except UNEXPECTED:
        return False
    except (exceptions.RayError, RuntimeError):
        return True  # the head does not answer right now
    return True


# The head (GCS).


def ask_head(address: str, key: bytes, namespace: bytes, seconds: float) -> bytes:
    """Return a value that the head at an address keeps, or raise an exception of Ray's after `seconds`.

    For asking a head before this process connects. `ray._raylet.GcsClient`, a class in C++, has had the same methods
    since Ray 2.44. Without it there is no run on a cluster.
    """
    client = import_module("ray._raylet").GcsClient(address=address)
    return bytes(client.internal_kv_get(key, namespace=namespace, timeout=int(seconds)) or b"")


def head_session(seconds: float) -> str:
    """Return the name of the session of the head that answers now; `""` if it refuses, since it is another one.

    Asked with this process's own client, `ray._private.worker.global_worker.gcs_client`, which knows the cluster that
    it connected to. A head that was started anew refuses it by AuthenticationError or, before Ray 2.52, by RpcError.
    Raises an exception of Ray's if no head answers in time. Without it there is no run on a cluster.
    """
    try:
        found = _own_client().internal_kv_get(b"session_name", namespace=b"session", timeout=int(seconds))
    except AuthenticationError:
        return ""
    except exceptions.RpcError as error:
        if getattr(error, "rpc_code", None) == _UNAUTHENTICATED:
            return ""
        raise
    return str((found or b"").decode())


def keep_in_head(key: bytes, value: bytes | None, namespace: bytes, seconds: float) -> None:
    """Store a value under a key in the head that this process is connected to; None: remove it.

    `internal_kv_put` and `internal_kv_del` of the client have had these parameters since Ray 2.44. Without them, a run
    is not entered in its cluster: commands on other machines do not find it. Raises an exception of Ray's.
    """
    if value is None:
        _own_client().internal_kv_del(key, False, namespace=namespace, timeout=int(seconds))
    else:
        _own_client().internal_kv_put(key, value, True, namespace=namespace, timeout=int(seconds))


def own_kept(key: bytes, namespace: bytes, seconds: float) -> bytes:
    """Return what the head of this process's cluster keeps under a key; empty: nothing. Raises as `ask_head`."""
    return bytes(_own_client().internal_kv_get(key, namespace=namespace, timeout=int(seconds)) or b"")


def kept_in_head(address: str, prefix: bytes, namespace: bytes, seconds: float) -> dict[bytes, bytes]:
    """Return what the head at an address keeps under keys with this prefix. Raises as `ask_head`.

    For commands that do not connect. `internal_kv_keys` has been there since Ray 2.44.
    """
    client = import_module("ray._raylet").GcsClient(address=address)
    keys = client.internal_kv_keys(prefix, namespace=namespace, timeout=int(seconds))
    found = {bytes(key): client.internal_kv_get(key, namespace=namespace, timeout=int(seconds)) for key in keys}
    return {key: bytes(value) for key, value in found.items() if value is not None}  # None: removed just now


def remove_from_head(address: str, key: bytes, namespace: bytes, seconds: float) -> None:
    """Remove a key at the head at an address. Raises as `ask_head`."""
    client = import_module("ray._raylet").GcsClient(address=address)
    client.internal_kv_del(key, False, namespace=namespace, timeout=int(seconds))


def own_session() -> str:
    """Return the name of the session that this process is connected to.

    Public from Ray 2.53 on; before, the object of the connected node has it (`ray._private.worker._global_node`).
    """
    public = getattr(ray.get_runtime_context(), "get_session_name", None)
    if public is not None:
        return str(public())
    return str(import_module("ray._private.worker")._global_node.session_name)  # noqa: SLF001


def is_this_node_alive(seconds: float) -> bool:
    """Return whether the head counts this machine as alive. Raises as `head_session`.

    `check_alive` of the client takes ids of nodes; in Ray 2.44, addresses of raylets. Without it, the end of the raylet
    of this machine is noticed only when the agents that were started from here die.
    """
    node = ray.NodeID.from_hex(ray.get_runtime_context().get_node_id())
    try:
        answer = _own_client().check_alive([node], timeout=seconds)
    except TypeError:
        answer = _own_client().check_alive([_raylet_address(node.hex())], timeout=seconds)
    return all(answer)


@cache
def _raylet_address(node_id: str) -> bytes:
    found = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    return f"{found['NodeManagerAddress']}:{found['NodeManagerPort']}".encode()


def _own_client() -> Any:
    return import_module("ray._private.worker").global_worker.gcs_client


# Nodes.


def draining_nodes() -> Mapping[HostId, int]:
    """Return the nodes that are being drained: deadlines in milliseconds since 1970, by node id; 0: none is given.

    The method has been in `ray._private.state` since Ray 2.44. Without it, no node counts as draining.
    """
    try:
        return _ask_draining()
    except UNEXPECTED:
        return {}


def _ask_draining() -> Mapping[HostId, int]:
    found: Mapping[HostId, int] = import_module("ray._private.state").state.get_draining_nodes()
    return found


def free_resources() -> Mapping[str, Mapping[str, float]] | None:
    """Return what is free on each node right now, by node id; None: this Ray does not say.

    The function has been in `ray._private.state` since Ray 2.44; public API has the sum over all nodes only. Without
    it, all that the nodes have counts as free.
    """
    try:
        return _ask_free()
    except UNEXPECTED:
        return None


def _ask_free() -> Mapping[str, Mapping[str, float]]:
    found: Mapping[str, Mapping[str, float]] = import_module("ray._private.state").available_resources_per_node()
    return found


def may_add_nodes() -> bool:
    """Return whether an autoscaler may add nodes to this cluster; True if this Ray does not say.

    Ray's first autoscaler writes its status to the head; so does its monitor on a cluster without one, which gives each
    node a type of its own, `node_<id>` (`format_readonly_node_type` of `ray.autoscaler._private.util`). The second one,
    of which the head has a flag, only runs where nodes can be added. Ray 2.44 to 2.60 use these names.
    """
    try:
        client = _own_client()
        if client.internal_kv_get(b"__autoscaler_v2_enabled", namespace=b"__autoscaler", timeout=5) == b"1":
            return True
        status = json.loads(client.internal_kv_get(b"__autoscaling_status", namespace=None, timeout=5) or b"{}")
        types = (status.get("autoscaler_report") or {}).get("active_nodes") or {}
        return not all(f"node_{node['NodeID']}" in types for node in ray.nodes() if node["Alive"]) if types else False
    except (*UNEXPECTED, ValueError, exceptions.RayError, RuntimeError):
        return True


def node_labels() -> dict[str, str]:
    """Return the labels of the node that this process runs on. The runtime context has them from Ray 2.47 on."""
    context = ray.get_runtime_context()
    if hasattr(context, "get_node_labels"):
        return dict(context.get_node_labels())
    own = context.get_node_id()
    return next((dict(node.get("Labels") or {}) for node in ray.nodes() if node["NodeID"] == own), {})


@cache
def has_label_selectors() -> bool:
    """Return whether a placement group can exclude hosts: `placement_group` has the parameter from Ray 2.47 on.

    Without it, what is granted on a host to avoid is given up, and requested again a second later.
    """
    return "bundle_label_selector" in inspect.signature(placement_group).parameters


# Tokens.


def token() -> str:
    """Return the token that Ray's client sends; `""`: this Ray knows no tokens (before 2.52), or needs none.

    Raises AuthenticationError if there should be one, where Ray's own client would end this process.
    """
    loader = getattr(import_module("ray._raylet"), "AuthenticationTokenLoader", None)
    return "" if loader is None else str(loader.instance().get_raw_token())


def use_token_if_there_is_one() -> None:
    """Make Ray send a token also without RAY_AUTH_MODE, as its `init(address="auto")` does in Ray 2.60.

    Without the function, `init` itself does not do so either.
    """
    with contextlib.suppress(*UNEXPECTED):
        setup = import_module("ray._private.authentication.authentication_token_setup")
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


# This process.


def print_no_deaths() -> None:
    """Keep Ray from printing to stdout that its workers died: stdout is the job's, and the driver reports deaths.

    `print_to_stdstream` of `ray._private.worker` prints all that Ray prints of others. Without it, Ray prints.
    """
    worker: Any = import_module("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


@contextlib.contextmanager
def command_line_in_job_list(text: str) -> Iterator[None]:
    """Make `ray.init` in this block record this text as the command line of this process, for its list of jobs.

    It calls `get_entrypoint_name` of `ray._private.utils`, and has no setting for it. Without that function, the list
    shows what `ps` shows, where raylaunch has overwritten secrets too.
    """
    utils: Any = import_module("ray._private.utils")
    original = getattr(utils, "get_entrypoint_name", None)
    if original is None:
        yield
        return
    utils.get_entrypoint_name = lambda: text
    try:
        yield
    finally:
        utils.get_entrypoint_name = original


def environment() -> dict[str, str]:
    """Return the environment of this actor. It names the GPUs that were reserved for it, else what its node has.

    Ray sets CUDA_VISIBLE_DEVICES and the like to "" where an actor has no accelerators; from 2.60 on it does so only
    with RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1. With RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 and the like it sets
    none, and actors of one host would use the same GPUs. What the raylet itself was given, and so the node has, is
    `original_visible_accelerator_ids` of its worker object. Without all that, the environment is as Ray has made it,
    but for "" in variables that name devices: a script for which no GPUs were requested sees all of the machine.
    """
    found = {name: value for name, value in snapshot(os.environ).items() if value or name not in devices.VARIABLES}
    try:
        variable = _manager().get_visible_accelerator_ids_env_var()
        of_node = import_module("ray._private.worker").global_worker.original_visible_accelerator_ids["GPU"]
        reserved = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    except (*UNEXPECTED, RuntimeError):  # RuntimeError: AMD's manager, where ROCR_VISIBLE_DEVICES is set
        return found
    if of_node is not None:
        return found | devices.naming(variable, [gpu for gpu in of_node if gpu in reserved] or of_node)
    return found | (devices.naming(variable, sorted(reserved, key=natural_key)) if reserved else {})


@contextlib.contextmanager
def no_tip_about_accelerators() -> Iterator[None]:
    """Keep `ray.init` in this block from printing the tip that it hides accelerators, since `environment` undoes that.

    Ray 2.50, 2.52 and 2.54 print it, and Ray 2.44, 2.47 and 2.60 do not.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Tip: In future versions of Ray.* accelerator", FutureWarning)
        yield


def accelerators() -> tuple[str, int, list[str] | None]:
    """Return the variable by which a process is told its GPUs, how many this machine has, and those it names, if any.

    For the GPUs of AMD, Intel and MetaX, which Ray can count. The managers have been in `ray._private.accelerators`
    since Ray 2.44. Without them, this machine has no such GPUs.
    """
    try:
        manager = _manager()
        variable = manager.get_visible_accelerator_ids_env_var() or ""
        count = manager.get_current_node_num_accelerators()
        return variable, count, manager.get_current_process_visible_accelerator_ids()
    except (*UNEXPECTED, RuntimeError):  # RuntimeError: AMD's manager, where ROCR_VISIBLE_DEVICES is set
        return "", 0, None


def _manager() -> Any:
    """Return what knows the machine's GPUs: NVIDIA's, unless there are others."""
    return import_module("ray._private.accelerators").get_accelerator_manager_for_resource("GPU")


def _ask_label_selectors() -> None:
    if not has_label_selectors():
        msg = "placement_group has no parameter bundle_label_selector"
        raise TypeError(msg)


_OPTIONAL: tuple[tuple[Callable[[], object], str], ...] = (
    (_ask_draining, "does not say which nodes are being drained: they are not left before they end"),
    (_ask_free, "does not say what is free on which node: all that nodes have counts as free"),
    (_ask_label_selectors, "cannot be told which nodes to avoid: nodes that join a run may take longer"),
    (lambda: is_this_node_alive(5.0), "does not say whether it counts this machine as alive"),
)
"""What a run can do without: each asked as it is asked later, and what a person is told of a Ray that lacks it."""
