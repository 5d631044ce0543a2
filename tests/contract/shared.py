"""Runs that many tests share, since starting a launcher takes seconds."""

from __future__ import annotations

from pathlib import Path

from tests.contract.launchers import SCRIPTS, Launcher, Run, together
from tests.private_cluster import free_ports

SCRIPT_ARGS = ("--lr", "1e-3", "--nnodes", "7", "-m", "${local_rank}", "a$$b", "", "--tee")
"""Arguments that only the script may interpret, whatever they look like."""


def shared_runs(launcher: Launcher) -> dict[str, Run]:
    """Start all runs, a few at a time, and return them by name."""
    kinds = (static, standalone, command, module, local_rank, use_env, elastic, two_nodes, sum_over_two_nodes)
    found = together({kind.__name__: lambda kind=kind: kind(launcher) for kind in kinds})
    return {name: run.wait() for name, run in found.items()}


def static(launcher: Launcher) -> Run:
    """Run two workers with most of the flags, in both spellings and with one abbreviated."""
    (port,) = free_ports(1)
    return launcher.run(
        *("--nnodes", 1, "--nproc_per_node", 2, "--rdzv-id", "contract", "--max_restarts=2", "--role", "trainer"),
        *("--master-addr", "127.0.0.1", "--master_port", port, "--node-rank", 0),
        *("--redirect=3", "--tee=3", "--log_dir", "logs", "--logs_specs=default"),
        *("--duplicate-stdout-filters", "apple,pear,, green"),
        *(SCRIPTS / "world.py", *SCRIPT_ARGS),
        env={
            "FROM_PARENT": "inherited",
            "GIVEN_PORT": str(port),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCHELASTIC_HEALTH_CHECK_PORT": "18080",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name} ${local_rank} rank${rank}]: ",
        },
    )


def standalone(launcher: Launcher) -> Run:
    """Run with a given store address, and the script as a path, for which torchrun forks or spawns its workers."""
    return launcher.run(
        *("--standalone", "--nproc-per-node", 2, "--rdzv_id", "ignored", "--start-method", "fork"),
        *("--run-path", SCRIPTS / "world.py", "tcp"),
        torch=True,
    )


def command(launcher: Launcher) -> Run:
    """Run a shell script with all flags in the environment."""
    return launcher.run(
        SCRIPTS / "early.sh",
        env={
            "PET_NNODES": "1",
            "PET_NPROC_PER_NODE": "4",
            "PET_RDZV_ID": "from-pet",
            "PET_MASTER_PORT": str(free_ports(1)[0]),
            "PET_MAX_RESTARTS": "2",
            "PET_MONITOR_INTERVAL": "0.2",
            "PET_START_METHOD": "spawn",
            "PET_REDIRECTS": "3",
            "PET_NO_PYTHON": "1",
            "PET_MODULE": "0",
            "TORCHELASTIC_TIMER_FILE": "/tmp/given-timer",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7",
        },
        local=True,
    )


def module(launcher: Launcher) -> Run:
    """Run a module with other redirections for each worker, of which only some are shown."""
    folder = launcher.new_folder()
    launcher.script("record.py", folder, to="job.py")
    return launcher.run(
        *("--nproc-per-node=4", "--tee", "0:3,1:1", "-r", "2:3,3:2", "--local-ranks-filter", "0,2,3"),
        *("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1,SIGNOPE", "--shutdown-timeout", 0, "-m", "job", *SCRIPT_ARGS),
        env={
            "OMP_NUM_THREADS": "3",
            "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7",
            "PET_NPROC_PER_NODE": "1",
        },
        folder=folder,
        local=True,
    )


def local_rank(launcher: Launcher) -> Run:
    return launcher.run("--nproc-per-node", 2, SCRIPTS / "record.py", "--lr", "1e-3", legacy="local-rank", local=True)


def use_env(launcher: Launcher) -> Run:
    more = launcher.either(("--r", "3", "--no", "-t"), ())
    return launcher.run(
        "--nproc-per-node", 2, "--use-env", SCRIPTS / "record.py", "--lr", "1e-3", *more, legacy="use-env", local=True
    )


def elastic(launcher: Launcher) -> Run:
    """Run an elastic job of up to two nodes, of which only one exists."""
    return launcher.run(
        *("--nnodes", "1:2", "--nproc-per-node", 5, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *(
            "--rdzv-id",
            "grows",
            "--virtual-local-rank",
            "--rdzv-conf",
            "'join_timeout=120,last_call_timeout=1,timeout=100'",
        ),
        *(SCRIPTS / "record.py",),
    )


def two_nodes(launcher: Launcher) -> Run:
    return on_nodes(launcher, "1:2", 4, "--no-python", str(SCRIPTS / "early.sh"))


def sum_over_two_nodes(launcher: Launcher) -> Run:
    return on_nodes(launcher, "2", 1, str(SCRIPTS / "world.py"), "env", "rpc", torch=True)


def on_nodes(launcher: Launcher, nnodes: str, nproc: int, *command: str, torch: bool = False) -> Run:
    """Run on two nodes. raylaunch is started once, torchrun once per node; the second is a peer of the first."""
    flags = (
        *("--nnodes", nnodes, "--nproc-per-node", nproc, "--rdzv-id", "nodes", "--rdzv-backend", "c10d"),
        *("--rdzv-conf", "last_call_timeout=60"),
    )
    if launcher.ours:
        return launcher.run(*flags, *command, torch=torch)
    (port,) = free_ports(1)
    folder = launcher.new_folder()
    where = ("--rdzv-endpoint", f"localhost:{port}", "--local-addr", "127.0.0.1")
    first = launcher.start(*flags, *where, *command, folder=folder, torch=torch)
    second = launcher.start(*flags, *where, *command, folder=folder, torch=torch, name="second")
    first.peers = [second.wait()]
    return first.wait()


def environments(run: Run) -> dict[int, dict[str, str]]:
    """Return each worker's environment from the file, named by its rank, into which `env -0` wrote it."""
    found = {}
    for path in sorted(run.folder.glob("[0-9]*")):
        if path.suffix == "":
            pairs = (pair.partition("=") for pair in path.read_text().split("\0") if pair)
            found[int(path.name)] = {name: value for name, _, value in pairs}
    return found


def envs(run: Run) -> dict[int, dict[str, str]]:
    """Return each worker's environment, by rank, from whichever file its script wrote."""
    found = {rank: answer["env"] for rank, answer in run.answers().items()} or environments(run)
    assert found, run.said
    return found


def log_folders(run: Run) -> dict[int, Path]:
    """Return the folder of each worker's log files; both launchers put the error file into it."""
    return {rank: (run.folder / env["TORCHELASTIC_ERROR_FILE"]).parent for rank, env in envs(run).items()}
