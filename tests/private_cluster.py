"""A Ray cluster for tests and benches: with ports, a folder and a token of its own, and nothing left afterwards.

`ray stop` ends every Ray on the machine, so it is never used: processes are found by the mark in their environment.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.warm_python import ForkedProcess, WarmPython

MARK = "RAYLAUNCH_TEST_MARK"
BIN = Path(sys.executable).parent
_HEAD_ID = "f" * 51 + "00000"
"""The id that Ray's node provider for tests gives the head."""
_HEAD_TYPE = "ray.head.default"
_FIRST_PORT, _PORT_BLOCKS, _PORT_BLOCK = 20000, 512, 24
LEAN = ("--no-monitor", "--include-log-monitor=false")
"""Options for `ray start` that save a second each: no autoscaler, and no monitor of Ray's own logs."""
NO_PRESTART = {"RAY_prestart_worker_first_driver": "0"}
"""For a raylet: start no worker for each of its CPUs when its first driver comes."""
RAY_START = Path(__file__).with_name("lean_ray.py")
WARM = (
    *("ray.scripts.scripts", "ray._private.runtime_env.setup_hook", "ray._private.metrics_agent"),
    *("raylaunch.cli.main", "raylaunch.cli.api", "raylaunch.cli.config.load", "raylaunch.cli.html_report.page"),
    *("raylaunch.cluster.run", "raylaunch.cluster.session.ray_session", "raylaunch.cluster.agent.ray_actor"),
    "warm_fork_servers",
)
"""What Ray's own processes, drivers and agents import."""
WORKERS, COLD_WORKERS = "workers.sock", "-"
"""The socket for `lean_ray.py` in the folder of a cluster; and what it gets where workers are not forked."""
WARM_TORCH = "RAYLAUNCH_TEST_WARM_TORCH"
"""See warm_fork_servers.py."""
_PATIENT = {"RAY_agent_register_timeout_ms": "150000"}
"""A raylet ends if its agents are not up by then; else after 30 s."""


def warm_ray(env: dict[str, str], folder: Path, *modules: str) -> WarmPython:
    """Return what the processes of a cluster are forked from, for `lean_ray.py` too. `modules`: what it imports besides."""
    # Ray reads these when it is imported. Workers have no job at first, as those that Ray starts in advance; and what they
    # take for their raylet is the first process, since they are killed when their raylet ends.
    return WarmPython(*WARM, *modules, env=env | {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": "1"}, at=folder / WORKERS)


def _env(token: str, address: str, mark: str = "") -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_ADDRESS": address}
    return kept | found | ({MARK: mark} if mark else {})


def _own_ports() -> tuple[socket.socket, Iterator[int]]:
    """Return the ports of a block that no other test process draws from, and the socket whose name says so."""
    for block in range(_PORT_BLOCKS):
        number = (os.getpid() + block) % _PORT_BLOCKS
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0raylaunch-tests-ports-{number}")
        except OSError:
            name.close()
            continue
        first = _FIRST_PORT + number * _PORT_BLOCK
        return name, itertools.cycle(range(first, first + _PORT_BLOCK))
    raise RuntimeError("all blocks of ports are in use")


_PORTS_NAME, _PORTS = _own_ports()
"""The ports of this test process, until it ends: see `free_ports`."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of one head node on this machine, and nodes that were added to it."""

    address: str
    dashboard: str
    folder: Path
    token: str
    mark: str
    lean: bool = False
    warm: WarmPython | None = None
    """What processes of a lean cluster are forked from: to import Ray takes a second of CPU."""

    def env(self, **more: str) -> dict[str, str]:
        """Return an environment in which a process may connect to the cluster."""
        return _env(self.token, self.address) | more

    def add_node(
        self, *, cpus: int, gpus: int = 0, labels: str = "", env: dict[str, str] | None = None, forks: bool = True
    ) -> None:
        """Start another raylet on this machine, which Ray counts as another machine. Not two at a time: they would clash.

        `forks`: in a cluster with `warm`, its workers are forked. What Ray reads from `env` when it is imported does not
        reach those.
        """
        command = [
            *(f"--address={self.address}", "--node-ip-address=127.0.0.1"),
            *(f"--num-cpus={cpus}", f"--num-gpus={gpus}", *_labels(labels)),
            *self.agent_ports(),
            *("--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=80000000", "--disable-usage-stats"),
            *(LEAN if self.lean else ()),
        ]
        _run(self, command, self.env(**{MARK: self.mark}, **(env or {})), forks=forks)

    def agent_ports(self) -> tuple[str, ...]:
        """Return the options for the ports of the dashboard's agent."""
        http, grpc = free_ports(2)
        return f"--dashboard-agent-listen-port={http}", f"--dashboard-agent-grpc-port={grpc}"

    def stop(self) -> None:
        """Kill all processes of the cluster, and those that they started."""
        end_marked(self.mark)
        if self.warm is not None:
            self.warm.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_EMPTY = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter"),
)
"""Sections that the configuration must have, though they are empty."""


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """The configuration of Ray's autoscaler, which starts and ends nodes on this machine as it would in a cloud."""

    cpus: int
    """CPUs of each node that it starts."""
    most: int
    version: int = 2
    idle_seconds: float = 2.0

    def config(self, cluster: Cluster, cpus: int) -> Path:
        """Write it to the cluster's folder."""
        provider = {"type": "external", "module": "lean_provider.LeanProvider", "gcs_address": cluster.address}
        provider["workers"] = str(cluster.folder / WORKERS)
        worker = {"CPU": self.cpus, "object_store_memory": 80000000}
        found = {
            "cluster_name": "test",
            "max_workers": self.most,
            "provider": provider
            | {"use_node_id_as_ip": True, "disable_node_updaters": True, "disable_launch_config_check": True}
            | ({"launch_multiple": True, "head_node_id": _HEAD_ID} if self.version == 2 else {}),
            "available_node_types": {
                _HEAD_TYPE: {"resources": {"CPU": cpus}, "node_config": {}, "max_workers": 0},
                "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": self.most},
            },
            "head_node_type": _HEAD_TYPE,
            "upscaling_speed": 10.0,
            "idle_timeout_minutes": self.idle_seconds / 60,
            **{key: {} for key in ("auth", "docker", "file_mounts")},
            **{key: [] for key in _EMPTY},
            "file_mounts_sync_continuously": False,
        }
        path = cluster.folder / "autoscaler.json"
        path.write_text(json.dumps(found))
        return path

    def env(self) -> dict[str, str]:
        """For the head."""
        found = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "PYTHONPATH": str(RAY_START.parent)}
        if self.version == 1:
            return found | {"RAY_enable_autoscaler_v2": "0"}
        return found | {
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
            "RAY_NODE_TYPE_NAME": _HEAD_TYPE,  # else the autoscaler fails if it hears of the raylet before the provider
        }


@contextlib.contextmanager
def private_cluster(
    *,
    cpus: int = 4,
    gpus: int | None = None,
    dashboard: bool = False,
    labels: str = "",
    lean: bool = False,
    autoscaler: Autoscaler | None = None,
    storage: Mapping[str, str] | None = None,
    object_store: int = 80_000_000,
    imports: tuple[str, ...] = (),
) -> Iterator[Cluster]:
    """Start a cluster. `dashboard` is needed for `ray job submit`, and needs `ray[default]`.

    `gpus`: logical ones; None: those that Ray finds. `lean`, which one with an autoscaler must be: see `LEAN` and
    `NO_PRESTART`, and without the dashboard `lean_ray.py`. `storage`: the variables that say where the head keeps its
    tables; None: in its own memory. `object_store`: its bytes. `imports`: modules that forked workers find imported besides Ray.
    """
    cluster = start(
        cpus=cpus,
        gpus=gpus,
        dashboard=dashboard,
        labels=labels,
        lean=lean,
        autoscaler=autoscaler,
        storage=storage,
        object_store=object_store,
        imports=imports,
    )
    try:
        yield cluster
    finally:
        cluster.stop()


def start(
    *,
    cpus: int = 4,
    gpus: int | None = None,
    dashboard: bool = False,
    labels: str = "",
    lean: bool = False,
    autoscaler: Autoscaler | None = None,
    storage: Mapping[str, str] | None = None,
    object_store: int = 80_000_000,
    imports: tuple[str, ...] = (),
) -> Cluster:
    """Start a cluster, which the caller must stop."""
    # Ray's socket paths must stay below 108 characters: a short folder, whatever TMPDIR says.
    folder = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))
    port, http = free_ports(2)
    mark, token, address = secrets.token_hex(8), secrets.token_hex(32), f"127.0.0.1:{port}"
    cluster = Cluster(
        address=address,
        dashboard=f"http://127.0.0.1:{http}",
        folder=folder,
        token=token,
        mark=mark,
        lean=lean,
        warm=warm_ray(_env(token, address, mark), folder, *imports) if lean and not dashboard else None,
    )
    command = [
        *("--head", f"--port={port}", "--node-ip-address=127.0.0.1"),
        *(f"--num-cpus={cpus}", f"--temp-dir={folder}", f"--include-dashboard={str(dashboard).lower()}"),
        *(*_labels(labels), f"--dashboard-port={http}", *([] if gpus is None else [f"--num-gpus={gpus}"])),
        *cluster.agent_ports(),
        *(
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--object-store-memory={object_store}",
            "--disable-usage-stats",
        ),
        *(LEAN[1:] if autoscaler is not None else LEAN if lean else ()),
    ]
    env = cluster.env(**{MARK: mark})
    del env["RAY_ADDRESS"]
    if autoscaler is not None:
        command.append(f"--autoscaling-config={autoscaler.config(cluster, cpus)}")
        env |= autoscaler.env()
    if storage:
        env |= storage
    _run(cluster, command, env, is_forked=autoscaler is None)
    return cluster


def _labels(text: str) -> tuple[str, ...]:
    """Return the option for labels, if there are any: Ray before 2.47 does not take none for an answer."""
    return (f"--labels={text}",) if text else ()


def _run(
    cluster: Cluster, options: list[str], env: dict[str, str], *, forks: bool = True, is_forked: bool = True
) -> None:
    """`is_forked`: unless it needs what Ray reads from `env` when it is imported."""
    workers = "" if cluster.warm is None else str(cluster.folder / WORKERS) if forks else COLD_WORKERS
    env = env | _PATIENT | (NO_PRESTART if cluster.lean else {})
    command, out = [str(RAY_START), workers, "start", *options], cluster.folder / "start.log"
    process: subprocess.Popen[bytes] | ForkedProcess
    with open(os.devnull) as nothing, out.open("w") as log:
        if cluster.warm is None or not (forks and is_forked):
            process = subprocess.Popen([sys.executable, *command], env=env, stdout=log, stderr=log)
        else:
            files = (nothing, log, log)
            process = cluster.warm.start(command[0], command[1:], env=env, cwd=Path("/"), files=files)
    try:
        code = process.wait(200)
    except subprocess.TimeoutExpired:
        code = -1
    if code:
        said = out.read_text()
        cluster.stop()
        msg = f"`ray start` failed: {code}\n{said}"
        raise RuntimeError(msg)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody else takes until they are used.

    They are below 32768, where the range begins from which Linux takes the ports of outgoing connections and of sockets
    that are bound to port 0. Inside that range, whoever connects to a port at which nobody listens yet may be connected
    to itself. Test processes that run at the same time draw from different blocks.
    """
    ports: list[int] = []
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def marked(mark: str, known: Collection[int] = ()) -> list[int]:
    """Return the processes whose environment has the mark; zombies have no environment.

    `known`: those that cannot have it. To look at each of hundreds takes milliseconds of CPU.
    """
    found = []
    needle = f"{MARK}={mark}".encode()
    for pid in running() - {os.getpid(), *known}:
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def running() -> set[int]:
    """Return the process ids of all processes."""
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def end_marked(mark: str, seconds: float = 10.0) -> None:
    """Kill the processes with the mark, and wait until they are gone."""
    deadline = time.monotonic() + seconds
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
