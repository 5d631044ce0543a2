"""The fork server forks workers only where that is safe, and says why where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from raylaunch.node.preload import fork_safety
from raylaunch.node.protocol.node_status import Ready
from tests.node.harness import MessagePipe, Node, basic_env

pytestmark = pytest.mark.timeout(300)


def start(
    folder: Path, mark: str, pipe: MessagePipe, preload: dict[str, str], start_method: str = "forkserver"
) -> tuple[Node, Ready]:
    for name, text in preload.items():
        if text:
            (folder / f"{name}.py").write_text(text)
    env = basic_env(mark) | {"PYTHONPATH": str(folder)}
    node = Node(start_method, env=env, preload=tuple(preload))
    node.use_for_test(folder, mark, pipe)
    return node, node.start()


def test_threads_after_the_preload_make_workers_spawn(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """After a module that starts a thread, workers start in fresh interpreters."""
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()"
    node, ready = start(tmp_path, mark, pipe, {"starts_a_thread": text})
    try:
        assert ready.start_method == "spawn"
        assert any("threads are running" in why for why in ready.why)
        outcome = node.run(node.script("import sys\nprint('starts_a_thread' in sys.modules)"))
        assert outcome.stdout() == "False\n"
    finally:
        node.supervisor.close()


def test_a_fork_server_that_is_killed_while_it_imports_gets_another_try(
    tmp_path: Path, mark: str, pipe: MessagePipe
) -> None:
    """The next one has the preload, too: what killed it may have been something else."""
    text = "import os\nif not os.path.exists(%r):\n    open(%r, 'w')\n    os.kill(os.getpid(), 9)"
    begun = str(tmp_path / "begun")
    node, ready = start(tmp_path, mark, pipe, {"dies_once": text % (begun, begun)})
    try:
        assert ready.why == ()
        outcome = node.run(node.script("import sys\nprint('dies_once' in sys.modules)"))
        assert outcome.stdout() == "True\n"
    finally:
        node.supervisor.close()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "No module named 'no_such_module'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise ValueError('no licence')", "ValueError: no licence"),
        ("import os; os._exit(3)", "the fork server died of it"),
    ],
    ids=["missing", "exits", "raises", "kills"],
)
def test_a_preload_that_fails_is_reported_and_the_node_is_ready(
    tmp_path: Path, mark: str, pipe: MessagePipe, text: str, word: str
) -> None:
    """For each kind of failure the user gets a warning, and workers start without the module."""
    node, ready = start(tmp_path, mark, pipe, {"no_such_module": text})
    try:
        assert ready.start_method == "forkserver"
        assert ready.torch
        assert len(ready.why) == 1
        assert "no_such_module" in ready.why[0]
        assert word in ready.why[0]
        assert node.run(node.script("print(1)")).exit_code == 0
    finally:
        node.supervisor.close()


def test_libraries_that_end_their_threads_before_a_fork_are_safe(torch_node: Node) -> None:
    """NumPy's OpenBLAS starts threads at import where OMP_NUM_THREADS is unset, and ends them before a fork."""
    assert "OMP_NUM_THREADS" not in torch_node.supervisor.spec.env
    script = torch_node.script("""
        import os, sys
        print("numpy" in sys.modules, os.getppid())  # torch imports it
        import numpy, torch
        print(numpy.ones((300, 300)).dot(numpy.ones((300, 300))).sum() + (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item())
    """)
    assert torch_node.run(script).stdout() == f"True {torch_node.supervisor.client.pid}\n54000000.0\n"


def test_threads_of_torch_make_workers_spawn(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """A preload that computes starts OpenMP threads, which a fork would lose."""
    text = "import torch\ntorch.set_num_threads(2)\n(torch.ones(600, 600) @ torch.ones(600, 600)).sum()\ntorch.ones(10**6).sum()"
    node, ready = start(tmp_path, mark, pipe, {"computes": text})
    try:
        assert ready.start_method == "spawn"
        assert node.run(node.script("print(1)")).exit_code == 0
    finally:
        node.supervisor.close()


def test_the_fork_server_leaves_cuda_alone(torch_node: Node) -> None:
    """A forked worker has torch imported and CUDA not initialized, and `_is_in_bad_fork` of torch is False."""
    outcome = torch_node.run(
        torch_node.script("""
        import sys
        print("torch" in sys.modules)
        import torch
        print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork())
    """)
    )
    assert outcome.stdout() == "True\nFalse False\n"


@pytest.mark.parametrize(
    ("path", "why"),
    [("/dev/nvidiactl", ""), ("/dev/nvidia-uvm", "/dev/nvidia-uvm is open"), ("/dev/kfd", "/dev/kfd is open")],
)
def test_which_open_files_make_a_fork_unsafe(monkeypatch: pytest.MonkeyPatch, path: str, why: str) -> None:
    """NVML, by which torch counts GPUs, does not; nor does a zygote refuse a package that asks it."""
    monkeypatch.setattr(fork_safety, "_count_other_threads", lambda: 0)
    before = fork_safety.ProcessSnapshot.take()
    files = {**before.files, "99": path}
    monkeypatch.setattr(fork_safety, "_open_files", lambda: files)
    assert fork_safety.why_fork_is_unsafe() == why
    monkeypatch.setattr(fork_safety.processes, "children", list)
    assert before.side_effect() == (f"opens {path}" if why else "")


def test_imports_ask_nvml_whether_there_are_gpus(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """Many packages call `torch.cuda.is_available()` when they are imported, which else initializes CUDA."""
    text = "import os\nfound = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')"
    node, ready = start(tmp_path, mark, pipe, {"asks": text})
    try:
        assert ready.start_method == "forkserver"
        script = node.script("import asks, os\nprint(asks.found, os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK'))")
        assert node.run(script).stdout() == "1 None\n"
    finally:
        node.supervisor.close()


def test_without_a_preload_nothing_is_imported(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """The fork server has no torch then. The store imports it when the first client connects."""
    node, ready = start(tmp_path, mark, pipe, {})
    try:
        assert ready.torch
        assert node.run(node.script("import sys\nprint('torch' in sys.modules)")).stdout() == "False\n"
        group = "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\nprint(d.get_world_size())"
        outcome = node.run(node.script(group), port=node.open_store())
        assert outcome.stdout() == "1\n", outcome.stderr()
    finally:
        node.supervisor.close()
