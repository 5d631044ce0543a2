"""Who touches CUDA, and how many GPUs are found, on a machine whose driver libraries are stubs.

A torch without CUDA never touches it, so `make compat ONLY=cuda` runs this with another one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.cuda_stubs import Stubs
from tests.private_cluster import Cluster, private_cluster

pytestmark = [
    pytest.mark.skipif(Stubs.why_not() != "", reason=Stubs.why_not()),
    pytest.mark.ray,
    pytest.mark.own_cluster,
    pytest.mark.timeout(300),
]
TORCH = Path(str(importlib.util.find_spec("torch").origin))
CUDA = runpy.run_path(str(TORCH.with_name("version.py")))["cuda"]
"""`torch.version.cuda`, without the import, which takes 2 s of CPU."""
GPUS = 3
SECONDS = 250
ALONE = ("--standalone", "--nproc-per-node", "gpu", "--set", "preload=[]")
"""A worker for each GPU of this machine. No script that is run so uses torch."""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory) -> Iterator[Stubs]:
    """For all processes that tests start from now on."""
    found = Stubs.build(tmp_path_factory.mktemp("stubs"), gpus=GPUS)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.env().items():
            patch.setenv(name, value)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield found


@pytest.fixture(scope="module")
def cluster(stubs) -> Iterator[Cluster]:
    """A cluster that finds its GPUs by itself."""
    with private_cluster(cpus=4, gpus=None, lean=True) as found:
        yield found


def raylaunch(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raylaunch", *words]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        command, cwd=folder, env=env or plain, capture_output=True, text=True, timeout=SECONDS, check=False
    )


LOOK = """
import json, os, sys
print(json.dumps([os.environ["LOCAL_RANK"], os.environ.get("CUDA_VISIBLE_DEVICES")]))
if "torch" in sys.argv:
    import torch
    print(torch.cuda.device_count(), torch.cuda.is_available())
"""


def looked(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def test_gpus_that_the_environment_names_are_counted_without_a_cluster(stubs, tmp_path, monkeypatch):
    """`gpu` is one worker for each. Without the variable it is all that NVML names: see the test of `status`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    (tmp_path / "look.py").write_text(LOOK)
    words = (*ALONE, "--virtual-local-rank", "--show", "raw", "look.py")
    assert looked(raylaunch(tmp_path, *words)) == [["0", "0"], ["0", "1"]]


def test_gpus_are_counted_by_ray(cluster, tmp_path):
    (tmp_path / "look.py").write_text(LOOK)
    words = ("--nproc-per-node", "gpu", "--set", "preload=[]", "--virtual-local-rank", "--show", "raw", "look.py")
    assert looked(raylaunch(tmp_path, *words, env=cluster.env())) == [["0", str(index)] for index in range(GPUS)]


WORKS = """
import os, time
from raylaunch.worker import heartbeat
while not os.path.exists("end"):
    heartbeat()
    time.sleep(0.1)
"""


def test_status_and_the_report_tell_how_much_of_the_gpus_is_used(stubs, tmp_path):
    """As NVML says it, for each rank: while the run goes on, and afterwards."""
    (tmp_path / "works.py").write_text(WORKS)
    command = [sys.executable, "-m", "raylaunch", *ALONE, "--name", "works", "works.py"]
    journal = tmp_path / "runs" / "works" / "latest" / "events.jsonl"

    def is_measured() -> bool:
        return (journal.exists() and '"busy"' in journal.read_text()) or process.poll() is not None

    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        wait_until(is_measured, 100, "what NVML says")
        shown = raylaunch(tmp_path, "status", str(journal.parent)).stdout
        (tmp_path / "end").touch()
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    rows = [line.split() for line in shown.partition("RANK  GPU")[2].splitlines()[1 : 1 + GPUS]]
    assert [(row[:2], row[-2:]) for row in rows] == [
        ([str(rank), str(rank)], [str(10 * rank), "%"]) for rank in range(GPUS)
    ], shown
    told = raylaunch(tmp_path, "report", "--json", str(journal.parent))
    found = [(use["rank"], use["gpu"], use["used"] >> 30, use["busy"]) for use in json.loads(told.stdout)["gpus"]]
    assert found == [(rank, str(rank), (1, 2, 3)[rank], 10 * rank) for rank in range(GPUS)], told.stderr


@pytest.mark.skipif(CUDA is None, reason="this torch has no CUDA")
def test_torch_counts_the_gpus_of_a_rank(stubs, tmp_path):
    """By NVML, without CUDA; then it asks CUDA, which the ranks may do."""
    (tmp_path / "look.py").write_text(LOOK)
    words = ("--standalone", "--nproc-per-node", "gpu", "--virtual-local-rank", "--show", "raw", "look.py", "torch")
    done = raylaunch(tmp_path, *words)
    assert [line for line in done.stdout.splitlines() if not line.startswith("[")] == ["1 False"] * GPUS, done.stderr


TRAIN = """
    import ctypes, os, sys
    import asks
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from raylaunch.worker import State, elastic

    @elastic(backend="gloo")
    def train():
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        state = State(model=model, optimizer=optimizer, every=1)
        done = state.restore()
        for step in range(done, 12):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            state.commit(step)
            if step == 5 and done == 0 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), 9)
        state.finish()

    train()
    if "cuda" in sys.argv and os.environ["RANK"] == "0":
        torch.cuda.is_available()
        ctypes.CDLL("libcuda.so.1").cuInit(0)
"""


@pytest.fixture
def train(tmp_path) -> Path:
    """A script, and a package that asks at import whether there are GPUs, as many do."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    site = tmp_path / "site" / "asks"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("import torch\nFOUND = torch.cuda.is_available()\n")
    return tmp_path


def job(folder: Path, **settings: object) -> str:
    settings = {
        "name": "stubs",
        "nnodes": 2,
        "placement": "pack",
        "nproc_per_node": 2,
        "gpus_per_worker": 0,
        "max_restarts": 1,
        "durable": str(folder / "checkpoints"),
        "durable_every": 0,
        "env": {"PYTHONPATH": str(folder / "site")},
        "preload": ["torch", "torch._dynamo", "torch.nn.parallel", "asks"],
        "report": False,
        **settings,
    }
    (folder / "job.json").write_text(json.dumps(settings))
    return "job.json"


@pytest.mark.skipif(CUDA is None, reason="this torch has no CUDA")
def test_only_ranks_touch_cuda(cluster, stubs, train):
    """No agent, fork server, zygote, store, or process that writes checkpoints; over a restart with survivors."""
    stubs.log.unlink(missing_ok=True)
    entry = {"script": "train.py", "args": ["cuda"]}
    written = job(train, entrypoint=entry, ray={"address": cluster.address})
    done = raylaunch(train, written, env=cluster.env())
    assert done.returncode == 0, done.stderr
    assert "fresh interpreters" not in done.stderr, done.stderr
    assert os.listdir(train / "checkpoints"), "nothing was written"
    users = stubs.users()
    assert any("rank 0 of 4" in title for title in users), users
    assert [title for title in users if "raylaunch: train.py rank" not in title] == []


def test_functions_without_gpus_leave_them_alone(stubs, tmp_path):
    """Though their machine has some: a context would take memory of each."""
    stubs.log.unlink(missing_ok=True)
    program = """
        import raylaunch
        def which():
            import torch, torch.distributed as dist
            dist.all_reduce(torch.ones(1))
            return dist.get_backend()
        if __name__ == "__main__":
            print(raylaunch.launch(which, nproc_per_node=4, show="none", preload=["torch"], ray={"address": "none"}))
    """
    (tmp_path / "main.py").write_text(textwrap.dedent(program))
    command = [sys.executable, "main.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stdout == f"{['gloo'] * 4}\n", done.stderr
    assert stubs.users() == []


@pytest.mark.parametrize("faulty", [False, True])
def test_the_doctor_asks_nvml(stubs, tmp_path, faulty):
    """Of faults that NVML knows, and of none if there are none."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAYLAUNCH_FAULTY_GPUS": "1"} if faulty else {}
    done = raylaunch(tmp_path, "doctor", "--json", env=env)
    found = [each["text"] for each in json.loads(done.stdout)["findings"] if each["check"] == "GPUs"]
    told = "GPU 0 has memory to replace, which needs a reset; GPU 1 had 2 memory errors that ECC could not correct; GPU 2 does not answer"
    hot = "slowed down: 127.0.0.1 (GPU 0 is slowed down, because it is too hot)"
    slow = "persistence mode is off: 127.0.0.1"
    assert found == ([f"faulty: 127.0.0.1 ({told})", hot, slow] if faulty else []), done.stderr


def test_what_nvml_says_of_a_rank_s_gpu_is_evidence(stubs, tmp_path):
    """Of the rank that failed, and not of the others' GPUs."""
    program = "import os\nif os.environ['RANK'] == '1': raise RuntimeError('CUDA error: uncorrectable ECC error')\n"
    (tmp_path / "fail.py").write_text(program + "import time; time.sleep(100)")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    words = (*ALONE, "--max-restarts", "0", "fail.py")
    done = raylaunch(tmp_path, *words, env=env | {"RAYLAUNCH_FAULTY_GPUS": "1"})
    assert done.returncode == 1
    told = "uncorrectable ECC error (GPU 1 had 2 memory errors that ECC could not correct)"
    assert told in done.stderr, done.stderr
    assert "GPU 0" not in done.stderr
    assert "GPU 2" not in done.stderr


def test_what_nvml_says_of_a_hung_rank_s_gpu_is_in_its_report(stubs, tmp_path):
    """Of the rank for which the others wait."""
    program = """
        import os, time
        from raylaunch.worker import heartbeat
        heartbeat()
        heartbeat()
        if os.environ["RANK"] == "1":
            time.sleep(1000)
        while True:
            heartbeat()
            time.sleep(0.1)
    """
    (tmp_path / "hang.py").write_text(textwrap.dedent(program))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    words = (*ALONE, "--max-restarts", "0", "--hang-timeout", "4", "hang.py")
    done = raylaunch(tmp_path, *words, env=env | {"RAYLAUNCH_FAULTY_GPUS": "1"})
    assert done.returncode == 1, done.stderr
    assert "in <module>; GPU 1 had 2 memory errors that ECC could not correct" in done.stderr, done.stderr
    assert "GPU 0" not in done.stderr
