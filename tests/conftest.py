"""For all tests: the signals that a person's shell leaves to a process, and golden texts.

Golden texts are what a person sees, kept in files; `--update-golden` rewrites them on purpose.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: No full garbage collection until all tests are collected: imports leave little garbage, and it would take a fifth of
#: the time of some parts.
THRESHOLDS = gc.get_threshold()
gc.set_threshold(*THRESHOLDS[:2], 1_000_000_000)
sys.dont_write_bytecode = False  # pytest compiles tests and Hypothesis itself: 2 s for each run that cannot keep it

from tests import profiles  # noqa: E402
from tests.warm_python import WarmPython  # noqa: E402

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
GOLDEN = Path(__file__).parent / "cli" / "golden"

profiles.register()
#: By default each process that imports NumPy starts threads that wait by spinning, 50 ms of CPU.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
#: So that no run of a test is listed among the runs of the person. It is set here for all processes that tests start.
STATE_HOME = tempfile.TemporaryDirectory(prefix="raylaunch-tests-state-")
os.environ["XDG_STATE_HOME"] = STATE_HOME.name


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-golden`."""
    parser.addoption("--update-golden", action="store_true", help="write the golden texts instead of comparing")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """From now on full garbage collections look at nothing that was imported, as in what is forked from a warm Python."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # else threads wait for each other by spinning, where other parts need the CPUs


@pytest.fixture(scope="session", autouse=True)
def plain_signals() -> Iterator[None]:
    """Nothing ignored, nothing blocked, for us and so for what we start: a shell's background job ignores SIGINT.

    Python's own handlers become the default when a child is started, so only what is ignored needs to change.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ignored = [number for number, handler in before.items() if handler is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(scope="session")
def warm_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """A process that has imported torchrun, and what training scripts use of torch: 4 s of CPU for each of them."""
    modules = ("torch.distributed.run", "torch.nn.parallel", "torch.utils.data", "torch._dynamo")
    modules += ("torch.distributed.fsdp", "torch.distributed.checkpoint")
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = WarmPython(*modules, env=env, at=tmp_path_factory.mktemp("warm") / "torch.sock")
    yield found
    found.close()


@pytest.fixture(scope="session")
def open_device(request: pytest.FixtureRequest) -> str:
    """The begin of a script: it has the device of `tests/open_device`, which is compiled here, once for each torch."""
    pytest.importorskip("torch")
    from tests import open_device

    if reason := open_device.why_not():
        pytest.skip(reason)
    library = open_device.build(request.config.cache.mkdir(open_device.NAME))
    root = Path(__file__).parents[1]
    return (
        f"import sys; sys.path.insert(0, {str(root)!r}); from tests import open_device; "
        f"open_device.install({str(library)!r})\n"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("config/typo", text)` compares a text with tests/cli/golden/config/typo.txt."""
    update = bool(request.config.getoption("--update-golden"))

    def check(name: str, text: str) -> None:
        file = GOLDEN / f"{name}.txt"
        if update:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n", encoding="utf-8")
        assert file.exists(), f"{file} is missing; run pytest --update-golden"
        assert text + "\n" == file.read_text(encoding="utf-8")

    return check
