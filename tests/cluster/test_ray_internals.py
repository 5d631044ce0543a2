"""What is private of Ray's, in shapes that other versions have, without a cluster."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import pytest
import ray
from ray._private import accelerators, state, utils, worker
from ray.exceptions import RpcError

from raylaunch.cluster import ray_internals
from raylaunch.core.placement import devices
from raylaunch.errors import ClusterError, ExitCode

NODE = "1f" * 28
SESSION = "session_1"


class Client:
    """The client of a head, as Ray 2.60 has it."""

    def internal_kv_get(self, key: bytes, *, namespace: bytes, timeout: int) -> bytes:
        assert (key, namespace) == (b"session_name", b"session")
        assert timeout > 0
        return SESSION.encode()

    def check_alive(self, nodes: list[ray.NodeID], timeout: float) -> list[bool]:
        assert timeout > 0
        return [node.hex() == NODE for node in nodes]


class OldClient(Client):
    """As Ray 2.44 has it."""

    def check_alive(self, nodes: list[bytes], timeout: float) -> list[bool]:
        assert timeout > 0
        return [node + b"" == b"10.0.0.1:7" for node in nodes]  # C++ takes bytes only


@pytest.fixture
def connected(monkeypatch):
    """A process that is connected to a head that answers; the fixture is the runtime context."""
    context = SimpleNamespace(get_session_name=lambda: SESSION, get_node_id=lambda: NODE)
    found = {"NodeID": NODE, "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 7, "Labels": {"zone": "a"}}
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "nodes", lambda: [found])
    monkeypatch.setattr(worker, "global_worker", SimpleNamespace(gcs_client=Client()))
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(session_name=SESSION))
    monkeypatch.setattr(state, "state", SimpleNamespace(get_draining_nodes=lambda: {NODE: 5}))
    monkeypatch.setattr(state, "available_resources_per_node", lambda: {NODE: {"CPU": 1.0}})
    return context


@pytest.mark.parametrize("client", [Client, OldClient], ids=["ids of nodes", "addresses"])
def test_a_ray_that_has_everything(connected, monkeypatch, client):
    """Nothing is said, and everything is answered."""
    monkeypatch.setattr(worker.global_worker, "gcs_client", client())
    assert ray_internals.check() == ()
    assert ray_internals.is_this_node_alive(1.0)
    assert ray_internals.draining_nodes() == {NODE: 5}
    assert ray_internals.free_resources() == {NODE: {"CPU": 1.0}}


def test_a_ray_before_the_public_names(connected):
    """The session and the labels of a node were not public in Ray 2.44."""
    del connected.get_session_name
    assert ray_internals.own_session() == SESSION
    assert ray_internals.node_labels() == {"zone": "a"}


def test_what_a_head_keeps(monkeypatch):
    """A value is kept, found by the beginning of its key, and removed: by the driver, or by a command."""
    kept: dict[bytes, bytes] = {}

    class Store:
        """As all versions have it; every argument is needed."""

        def __init__(self, address: str = "") -> None:
            self.address = address

        def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, *, namespace: bytes, timeout: int) -> None:
            assert (overwrite, namespace, timeout) == (True, b"n", 2)
            kept[key] = value

        def internal_kv_del(self, key: bytes, by_prefix: bool, *, namespace: bytes, timeout: int) -> None:
            assert (by_prefix, namespace, timeout) == (False, b"n", 2)
            del kept[key]

        def internal_kv_keys(self, prefix: bytes, *, namespace: bytes, timeout: int) -> list[bytes]:
            assert (self.address, namespace, timeout) == ("h:1", b"n", 2)
            return [*(key for key in kept if key.startswith(prefix)), b"a: just removed"]

        def internal_kv_get(self, key: bytes, *, namespace: bytes, timeout: int) -> bytes | None:
            assert (self.address in ("h:1", ""), namespace, timeout) == (True, b"n", 2)
            return kept.get(key)

    monkeypatch.setattr(worker, "global_worker", SimpleNamespace(gcs_client=Store()))
    monkeypatch.setattr("ray._raylet.GcsClient", Store)
    for key in (b"a:1", b"a:2", b"b:1"):
        ray_internals.keep_in_head(key, b"x", b"n", 2.5)
    assert ray_internals.kept_in_head("h:1", b"a:", b"n", 2.5) == {b"a:1": b"x", b"a:2": b"x"}
    assert [ray_internals.own_kept(key, b"n", 2.5) for key in (b"a:1", b"c:1")] == [b"x", b""]
    ray_internals.keep_in_head(b"a:1", None, b"n", 2.5)
    ray_internals.remove_from_head("h:1", b"a:2", b"n", 2.5)
    assert list(kept) == [b"b:1"]


@pytest.mark.parametrize("method", [None, lambda: b"", lambda *_, **__: 5], ids=["missing", "arguments", "answer"])
def test_a_head_that_cannot_be_asked_is_an_error_when_connecting(connected, monkeypatch, method):
    """Later it would read as a head that does not answer, and end the run."""
    monkeypatch.setattr(worker.global_worker, "gcs_client", SimpleNamespace(internal_kv_get=method))
    with pytest.raises(
        ClusterError, match=rf"Ray {ray.__version__}, which is installed here, cannot be used: "
    ) as found:
        ray_internals.check()
    assert found.value.exit_code == ExitCode.UNAVAILABLE


def test_what_is_missing_is_said_and_left_out(connected, monkeypatch):
    """The run goes on with less."""
    monkeypatch.setattr(state, "state", SimpleNamespace())
    monkeypatch.delattr(state, "available_resources_per_node")
    monkeypatch.delattr(Client, "check_alive")
    said = ray_internals.check()
    assert [text.removeprefix(f"Ray {ray.__version__} ").partition(":")[0] for text in said] == [
        "does not say which nodes are being drained",
        "does not say what is free on which node",
        "does not say whether it counts this machine as alive",
    ]
    assert ray_internals.draining_nodes() == {}
    assert ray_internals.free_resources() is None


def test_a_head_that_does_not_answer_is_no_missing_feature(connected, monkeypatch):
    """It is asked again later."""

    def silent(*_, **__):
        raise RpcError("Deadline Exceeded")

    monkeypatch.setattr(Client, "internal_kv_get", silent)
    monkeypatch.setattr(Client, "check_alive", silent)
    assert ray_internals.check() == ()


def test_a_head_that_was_started_anew(connected, monkeypatch):
    """Before Ray 2.52, it refuses those who name the old cluster with an error of gRPC."""

    def refuses(*_, **__):
        raise RpcError("WrongClusterID", rpc_code=16)

    monkeypatch.setattr(Client, "internal_kv_get", refuses)
    assert ray_internals.head_session(1.0) == ""


def test_the_command_line_in_the_list_of_jobs():
    """Ray's own code calls a function by this name, which is put back."""
    before = utils.get_entrypoint_name
    with ray_internals.command_line_in_job_list("train.py"):
        assert utils.get_entrypoint_name() == "train.py"
    assert utils.get_entrypoint_name is before


def test_a_ray_without_tokens(monkeypatch):
    """Before Ray 2.52 there were none."""
    monkeypatch.setattr(ray_internals, "import_module", lambda _: SimpleNamespace())
    assert ray_internals.token() == ""
    ray_internals.use_token_if_there_is_one()


@pytest.fixture
def actor(connected, monkeypatch):
    """An actor on a node with four GPUs; `reserved` are its own, and `of_node` what its raylet was restricted to."""
    found = SimpleNamespace(reserved=[], of_node=None)
    connected.get_accelerator_ids = lambda: {"GPU": found.reserved}
    for name in (*devices.VARIABLES, "OTHER"):
        monkeypatch.delenv(name, raising=False)

    def restrict(of_node):
        monkeypatch.setattr(worker.global_worker, "original_visible_accelerator_ids", {"GPU": of_node}, raising=False)

    restrict(None)
    found.restrict = restrict
    return found


def named() -> dict[str, str]:
    """The variables that name devices."""
    return {name: value for name, value in ray_internals.environment().items() if name in devices.VARIABLES}


@pytest.mark.parametrize("missing", [False, True])
def test_accelerators_that_an_older_ray_hides(actor, monkeypatch, missing):
    """Where they were not requested, it sets the variables to ""; what names devices stays."""
    if missing:
        monkeypatch.setattr(ray_internals, "import_module", lambda _: SimpleNamespace())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "1")
    monkeypatch.setenv("OTHER", "")
    assert named() == {"HABANA_VISIBLE_MODULES": "1"}
    assert ray_internals.environment()["OTHER"] == ""


@pytest.mark.parametrize("told", ["", "2,3", None])
def test_a_raylet_that_has_some_gpus_of_its_machine(actor, monkeypatch, told):
    """An actor for which none are reserved sees the raylet's, and not all of the machine."""
    if told is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    actor.restrict(["2", "3"])
    assert named() == {"CUDA_VISIBLE_DEVICES": "2,3"}
    actor.restrict([])
    assert named() == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("told", [None, "4,5,10"])
def test_a_ray_that_tells_its_actors_no_gpus(actor, monkeypatch, told):
    """With RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1; agents of one host would use the same ones."""
    if told is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
        actor.restrict(told.split(","))
    actor.reserved = ["10", "4"]
    assert named() == {"CUDA_VISIBLE_DEVICES": "4,10"}


def test_a_variable_of_rocm_on_another_machine(actor, monkeypatch):
    """Ray's code for AMD's GPUs raises RuntimeError there, and ROCm's own installers have people set it."""
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    actor.reserved = ["1"]
    assert named() == {"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "0"}
    monkeypatch.setattr(ray_internals, "_manager", lambda: accelerators.AMDGPUAcceleratorManager)
    assert named() == {"ROCR_VISIBLE_DEVICES": "0"}
    assert ray_internals.accelerators() == ("", 0, None)


def test_intels_gpus_before_ray_2_60(actor, monkeypatch):
    """Their variable names the driver too."""
    manager = SimpleNamespace(get_visible_accelerator_ids_env_var=lambda: "ONEAPI_DEVICE_SELECTOR")
    monkeypatch.setattr(ray_internals, "_manager", lambda: manager)
    actor.reserved = ["1", "0"]
    assert named() == {"ONEAPI_DEVICE_SELECTOR": "level_zero:0,1"}


def test_each_variable_that_ray_sets_is_known():
    """None of a submitter is passed to other machines."""
    found = {one.get_visible_accelerator_ids_env_var() for one in accelerators.get_all_accelerator_managers()}
    assert found - {None} <= {*devices.VARIABLES}


def test_the_tip_about_accelerators_is_not_printed():
    """Ray 2.52 prints it whenever a process connects. Other warnings are printed."""
    tip = "Tip: In future versions of Ray, Ray will no longer override accelerator visible devices env var if ..."
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with ray_internals.no_tip_about_accelerators():
            warnings.warn(tip, FutureWarning, stacklevel=1)
            warnings.warn("another", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in told] == ["another"]


class Scaled(Client):
    """The client of a head to which an autoscaler, or the monitor of a cluster without one, has written."""

    def __init__(self, types: dict[str, int] | None = None, *, second: bool = False, text: bytes = b"") -> None:
        self.status = json.dumps({"autoscaler_report": {"active_nodes": types}}).encode() if types else text
        self.second = second

    def internal_kv_get(self, key: bytes, *, namespace: bytes | None, timeout: int) -> bytes | None:
        assert timeout > 0
        if key == b"__autoscaler_v2_enabled":
            assert namespace == b"__autoscaler"
            return b"1" if self.second else None
        assert (key, namespace) == (b"__autoscaling_status", None)
        return self.status or None


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (Scaled({f"node_{NODE}": 1}), False),
        (Scaled({"ray.head.default": 1}), True),
        (Scaled(), False),
        (Scaled(second=True), True),
        (Scaled(text=b"{"), True),
        (SimpleNamespace(internal_kv_get=lambda: None), True),
    ],
    ids=["monitor alone", "first", "no monitor", "second", "another answer", "other arguments"],
)
def test_whether_a_cluster_may_grow(connected, monkeypatch, client, expected):
    """The monitor of a cluster that cannot grow gives each node a type of its own. What is not known may be."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": NODE, "Alive": True}, {"NodeID": "gone", "Alive": False}])
    monkeypatch.setattr(worker, "global_worker", SimpleNamespace(gcs_client=client))
    assert ray_internals.may_add_nodes() is expected
