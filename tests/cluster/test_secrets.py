"""A run that gets secrets in every possible way and whose workers print them: where they can be read afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.private_cluster import MARK, end_marked, marked

CANARY = "cAnArY"
"""A text that is in each secret, and nowhere else."""
OF_THE_WORKERS = ("stdout.log", "stderr.log", "error.json")
"""The files in which the workers' own output is."""
TELLS_ALL = f"""
import os, sys, time
from pathlib import Path
Path("up-" + os.environ["RANK"]).touch()
while not Path("go").exists(): time.sleep(0.02)
known = [value for value in (*os.environ.values(), *sys.argv) if "{CANARY}" in value]
known.sort(key=lambda value: "\\n" not in value)
print(*known, flush=True)
print(repr(known), file=sys.stderr, flush=True)
raise KeyError(*known) if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else RuntimeError("\\n".join(known))
"""


def canary(name: str) -> str:
    return f"{name}-{CANARY}-{name}"


@dataclass
class Story:
    """What could be seen of the run."""

    folder: Path
    code: int = -1
    out: str = ""
    err: str = ""
    pids: list[int] = field(default_factory=list)
    command_lines: dict[int, str] = field(default_factory=dict)
    listening: set[str] = field(default_factory=set)

    def files(self) -> Iterator[Path]:
        """Return the files that the run wrote, without those of this test."""
        given = {"train.py", "job.yaml", "go", "up-0", "up-1"}
        return (path for path in self.folder.rglob("*") if path.parent != self.folder or path.name not in given)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("secrets")
    mark = secrets.token_hex(8)
    (folder / "tmp").mkdir(0o700)
    (folder / "train.py").write_text(TELLS_ALL)
    job = {
        "entrypoint": {
            "script": "train.py",
            "args": [
                *(f"--api-key={canary('word')}", "--password", canary("two-words")),
                *("--url=${oc.env:HF_TOKEN}", "--db=${oc.env:DATABASE_URL}", "--once-more=${env.API_KEY}"),
            ],
        },
        "env": {"API_KEY": canary("job"), "COPY": "<${env.API_KEY}>"},
        "nodes": {"127.0.0.*": {"env": {"DB_PASSWORD": canary("node")}}},
        "nproc_per_node": 2,
        "max_restarts": 1,
        "preload": [],
        "show": "none",
        "event_log_handler": "console",
        "ray": {"address": "none"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        MARK: mark,
        "TMPDIR": str(folder / "tmp"),
        "TORCHELASTIC_ERROR_FILE": str(folder / "error-of-the-run.json"),
        "HF_TOKEN": canary("submitter"),
        "RAY_AUTH_TOKEN": canary("ray"),
        "PET_SECRET": canary("pet"),
        "SSH_PRIVATE_KEY": f"{canary('line-1')}\n{canary('line-2')}\n",
        "QUOTED_SECRET": canary("\"'\\é"),
        "DATABASE_URL": f"postgres://ana:{canary('address')}@db/runs",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "raylaunch", "job.yaml"],
        cwd=folder,
        env=env,
        umask=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    found = Story(folder)
    try:
        wait_until(lambda: process.poll() is not None or len(list(folder.glob("up-*"))) == 2, 100, "workers")
        found.pids = marked(mark)
        found.command_lines = {pid: _read(Path(f"/proc/{pid}/cmdline")) for pid in found.pids}
        found.listening = {address for pid in found.pids for address in _listening(pid)}
        (folder / "go").touch()
        found.out, found.err = process.communicate(timeout=200)
        found.code = process.returncode
        yield found
        assert marked(mark) == []
    finally:
        end_marked(mark)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _listening(pid: int) -> Iterator[str]:
    """Return the TCP ports at which a process listens, as the kernel writes them, and the names of its Unix sockets."""
    sockets = set()
    with contextlib.suppress(OSError):
        sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in _read(Path(f"/proc/{pid}/net/{table}")).splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                yield local.rpartition(":")[0]
    for line in _read(Path(f"/proc/{pid}/net/unix")).splitlines()[1:]:
        *_, inode, name = [*line.split(), ""][:8]
        if name and f"socket:[{inode}]" in sockets:
            yield name


def test_no_file_and_no_line_of_ours_has_a_secret(story):
    """There is `***` instead. Only the workers' own output files have what they printed."""
    assert story.code == 1, story.err
    assert CANARY not in story.out + story.err
    assert "KeyError: '***'" in story.err or "KeyError: ('***'" in story.err
    assert "raised RuntimeError: ***" in story.err
    assert "--api-key=*** --password *** --url=*** --db=postgres://ana:***@db/runs --once-more=***" in story.err
    files = [path for path in story.files() if path.is_file()]
    assert {path.name for path in files if CANARY in _read(path)} == {*OF_THE_WORKERS}
    assert {"job.yaml", "plan.json", "events.jsonl", "result.json"} < {path.name for path in files}
    assert [path for path in story.files() if CANARY in str(path)] == []
    copy = json.loads((story.folder / "error-of-the-run.json").read_text())
    assert copy["message"]["message"].startswith("RuntimeError: ***")


def test_what_anybody_may_see_of_the_processes(story):
    """Command lines have no secrets, and ports are bound to the node's address.

    Two sockets have names that all can reach, which the kernel chose: by them workers ask for the memory of `State`, and
    say that they can stay. Both refuse other users.
    """
    assert len(story.pids) >= 5
    assert [line for line in story.command_lines.values() if CANARY in line] == []
    named = {address for address in story.listening if re.fullmatch("@[0-9a-f]{5}", address)}
    assert len(named) == 2
    assert story.listening - named == {"0100007F"}


def test_only_the_user_may_read(story):
    """Whatever the umask allows. The folders above the run folder have the umask's modes."""
    (run_dir,) = [path.parent for path in story.files() if path.name == "result.json"]
    private = [run_dir, *run_dir.rglob("*")]
    assert [path for path in private if stat.S_IMODE(path.stat().st_mode) != (0o700 if path.is_dir() else 0o600)] == []
    assert list((story.folder / "tmp").iterdir()) == []


@pytest.mark.ray
def test_ray_keeps_no_secret(cluster, launcher):
    """Neither the command line nor the environment of the submitter is in the memory of a process of Ray's own."""
    script = launcher.script("import os, time\nprint(os.environ['HF_TOKEN'][::-1], flush=True)\ntime.sleep(280)\n")
    typed = f"env.DB_PASSWD={canary('typed')}"
    job = {"entrypoint": {"script": script}, "nnodes": 1, "nproc_per_node": 1}
    run = launcher.start(typed, env={"HF_TOKEN": canary("submitter")}, **job)
    assert run.process.stdout is not None
    assert canary("submitter")[::-1] in run.process.stdout.readline(), run.wait().err
    daemons = [pid for pid in marked(cluster.mark) if "/ray/" in _read(Path(f"/proc/{pid}/cmdline"))]
    assert any("gcs_server" in _read(Path(f"/proc/{pid}/cmdline")) for pid in daemons)
    assert [_read(Path(f"/proc/{pid}/cmdline")) for pid in daemons if _has_in_memory(pid, CANARY.encode())] == []
    run.process.terminate()
    assert run.wait().code == 143, run.err


LOOK = """
import json, ray
from raylaunch.cluster import ray_internals
ray.init(log_to_driver=False, logging_level="ERROR")
named = ray.util.list_named_actors(all_namespaces=True)
names = [one["name"] for one in named if one["name"].startswith("raylaunch-agent")]
agents = [ray.get_actor(name, "raylaunch") for name in names]
ledgers = [found.ledger for found in ray.get([agent.look.remote() for agent in agents])]
kept = ray_internals.kept_in_head(ray.get_runtime_context().gcs_address, b"", b"raylaunch", 5.0)
runs = {key.decode(): value.decode("latin-1") for key, value in kept.items()}
print(json.dumps({"ledgers": [len(ledger) for ledger in ledgers], "runs": runs, "names": names}))
"""


@pytest.mark.ray
def test_what_is_kept_of_a_detached_run_has_no_secret(cluster, launcher):
    """The registry in the head, the run folder, command lines, and Ray's own processes.

    As in every run, the processes of a node have them, in order to start workers. Agents also have them in the ledger.
    """
    launcher.script(
        "import os, time\nprint(os.environ['HF_TOKEN'][::-1], os.environ['DB_PASSWD'][::-1], flush=True)\n"
        "while not os.path.exists('end'): time.sleep(0.05)\n"
    )
    (launcher.folder / "look.py").write_text(LOOK)
    job = {"entrypoint": {"script": "train.py"}, "nnodes": 2, "nproc_per_node": 1, "placement": "pack", "preload": []}
    (launcher.folder / "job.yaml").write_text(json.dumps(job))
    secret = {"HF_TOKEN": canary("submitter")}
    command = ("raylaunch", "-d", "job.yaml", f"env.DB_PASSWD={canary('typed')}")
    started = launcher.python(*command, env=secret)
    assert started.returncode == 0, started.stderr
    (folder,) = launcher.folder.glob("runs/train/2*")
    log = folder / "attempt-1" / "rank-0" / "stdout.log"
    wait_until(lambda: _read(log).endswith("\n"), 100, "the worker")
    assert _read(log).split() == [canary("submitter")[::-1], canary("typed")[::-1]]  # they did get there
    looked = launcher.python("look.py")
    assert looked.returncode == 0, looked.stderr
    kept = json.loads(looked.stdout.splitlines()[-1])
    assert len(kept["ledgers"]) == 2
    assert all(size > 1000 for size in kept["ledgers"])
    (token,) = {name.split("-")[2] for name in kept["names"]}
    assert any(name.endswith(token) for name in kept["runs"])  # other tests may have left entries of killed drivers
    assert CANARY not in looked.stdout
    of_ray = marked(cluster.mark)
    daemons = [pid for pid in of_ray if "/ray/" in _read(Path(f"/proc/{pid}/cmdline"))]
    assert any("gcs_server" in _read(Path(f"/proc/{pid}/cmdline")) for pid in daemons)
    assert [_read(Path(f"/proc/{pid}/cmdline")) for pid in daemons if _has_in_memory(pid, CANARY.encode())] == []
    for what in ("cmdline", "environ"):  # those of Ray's own processes, and of the actors, as the kernel shows them
        shown = [_read(Path(f"/proc/{pid}/cmdline")) for pid in of_ray if CANARY in _read(Path(f"/proc/{pid}/{what}"))]
        assert [line for line in shown if not line.startswith("raylaunch: ")] == []
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"driver.log", "events.jsonl", "job.yaml"} <= {path.name for path in files}
    assert [path for path in files if CANARY in _read(path)] == []
    (launcher.folder / "end").touch()
    assert launcher.python("raylaunch", "attach", str(folder)).returncode == 0
    wait_until(lambda: token not in launcher.python("look.py").stdout, 100, "the entry to be gone")


def _has_in_memory(pid: int, data: bytes) -> bool:
    """Return whether the writable memory of a process has these bytes."""
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except PermissionError:
        pytest.skip("this user may not read the memory of other processes")
    for line in _read(Path(f"/proc/{pid}/maps")).splitlines():
        addresses, access, *_ = line.split()
        low, high = (int(address, 16) for address in addresses.split("-"))
        with contextlib.suppress(OSError, OverflowError):  # it cannot be read, such as a driver's
            if access.startswith("rw") and data in os.pread(memory, high - low, low):
                return True
    os.close(memory)
    return False
