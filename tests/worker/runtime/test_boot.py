"""Errors that a restart would meet again, functions and their results, commands, and error files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import traceback
import tracemalloc
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from raylaunch.core.failures.failure import Failure, WorkerError, why_hopeless
from raylaunch.core.machine.events_and_actions import WorkersExited
from raylaunch.worker.runtime import boot
from raylaunch.worker.runtime.process_setup import encodable
from tests.node.harness import Node
from tests.worker import any_worker

PACKAGE = Path(boot.__file__).parents[2]

pytestmark = pytest.mark.timeout(300)


def is_hopeless(failure: Failure) -> bool:
    return bool(why_hopeless(failure, [], 0.0))


def error(failure: Failure) -> WorkerError:
    assert failure.error is not None
    return failure.error


def test_a_missing_script(either: Node) -> None:
    """Its path is in the report and on stderr."""
    outcome = either.run("/no/such/train.py")
    assert outcome.exit_code == 1
    assert error(outcome.failure).message == "cannot read the script `/no/such/train.py`: No such file or directory"
    assert is_hopeless(outcome.failure)
    assert "/no/such/train.py" in outcome.stderr()


@pytest.mark.parametrize("kind", ["script", "module"])
def test_nothing_to_run(either: Node, kind: str) -> None:
    """A folder without `__main__.py`, and a module that does not exist."""
    (either.folder / "empty").mkdir()
    outcome = either.run("empty" if kind == "script" else "no_such_module", kind=kind)
    assert outcome.exit_code == 1
    assert is_hopeless(outcome.failure)
    wanted = "can't find '__main__' module" if kind == "script" else "No module named no_such_module"
    assert wanted in error(outcome.failure).message


@pytest.mark.parametrize(
    ("text", "kind"),
    [("x = \n", "SyntaxError"), ("  x = 1\n y\n", "IndentationError"), ("import torhc", "ModuleNotFoundError")],
)
def test_a_script_that_cannot_be_compiled_or_imports_a_missing_module(either: Node, text: str, kind: str) -> None:
    """It is not restarted."""
    path = either.folder / "train.py"
    path.write_text(text)
    outcome = either.run(str(path))
    assert (outcome.exit_code, error(outcome.failure).type) == (1, kind)
    assert is_hopeless(outcome.failure)
    assert error(outcome.failure).place.startswith(str(path))


def test_a_plain_exception_may_be_restarted(node: Node) -> None:
    """It is reported with its file and line."""
    outcome = node.run(node.script("raise ValueError('loss is NaN')"))
    assert not is_hopeless(outcome.failure)
    assert outcome.failure.what == "raised ValueError: loss is NaN"
    assert error(outcome.failure).place.startswith(f"{node.folder}/train.py:")


def test_torch_uses_the_threads_of_the_environment(either: Node) -> None:
    """It reads the variable when it is imported. A worker alone has no such variable, as under torchrun."""
    script = either.script("""
        import os
        print(os.environ.get("OMP_NUM_THREADS"))
        if os.environ["RANK"] == "1":  # each import of torch takes 2 s of CPU
            import torch
            print(torch.get_num_threads())
    """)
    outcome = either.run(script, nproc=2)
    assert [outcome.stdout(rank) for rank in (0, 1)] == ["1\n", "1\n1\n"]
    assert either.run(script).stdout() == "None\n"


CLOSES = """
import os
os.closerange(3, os.sysconf("SC_OPEN_MAX"))
files = [open(f"checkpoint-{number}", "w+b") for number in range(8)]
"""


def test_an_exception_of_a_script_that_closed_all_descriptors(either: Node) -> None:
    """The cause is reported, and the script's files, which have the numbers of ours, stay as they are."""
    outcome = either.run(either.script(CLOSES + "raise ValueError('loss is NaN')"))
    assert outcome.failure.what == "raised ValueError: loss is NaN"
    assert [file.read_bytes() for file in sorted(either.folder.glob("checkpoint-*"))] == [b""] * 8


def test_a_result_of_a_function_that_closed_all_descriptors(either: Node) -> None:
    """It arrives."""

    def train() -> int:
        exec(CLOSES)
        return 42

    payload = cloudpickle.dumps((train, (), {}))
    outcome = either.run("train", kind="pickle", payload=payload, backend="none")
    assert (outcome.exit_code, pickle.loads(outcome.values[0])) == (0, 42)
    assert [file.read_bytes() for file in sorted(either.folder.glob("checkpoint-*"))] == [b""] * 8


def test_an_exception_of_a_forked_child_is_not_the_workers(either: Node) -> None:
    """A child that goes on in the script prints its traceback, as under plain Python."""
    text = "import os\npid = os.fork()\nif pid == 0:\n    raise KeyError('of the child')\nos.waitpid(pid, 0)\n"
    outcome = either.run(either.script(text + "raise ValueError('of the worker')"))
    assert outcome.failure.what == "raised ValueError: of the worker"
    assert "of the child" in outcome.stderr()
    assert either.run(either.script(text)).exit_code == 0


def test_an_exit_with_a_text(either: Node) -> None:
    """The text is the reason; the interpreter prints it once."""
    outcome = either.run(either.script("import sys\nsys.exit('no data')"))
    assert outcome.failure.what == "raised SystemExit: no data"
    assert (outcome.exit_code, outcome.stderr()) == (1, "no data\n")


def test_a_log_folder_that_cannot_be_made(either: Node) -> None:
    """The report has its path, though the worker has no log file to write it to."""
    (either.folder / "file").touch()
    either.set(run_dir=str(either.folder / "file" / "run"))
    outcome = either.run(either.script("print(1)"))
    assert outcome.exit_code == 1
    assert error(outcome.failure).type == "NotADirectoryError"
    assert str(either.folder / "file") in error(outcome.failure).message
    assert is_hopeless(outcome.failure)


def test_a_working_folder_that_is_missing(either: Node) -> None:
    """The report has its path."""
    either.set(cwd="/no/such/folder")
    outcome = either.run(either.script("print(1)"))
    assert error(outcome.failure).type == "FileNotFoundError"
    assert "/no/such/folder" in error(outcome.failure).message
    assert is_hopeless(outcome.failure)


def test_an_environment_with_an_impossible_value(node: Node) -> None:
    """A null byte in a value is reported, without a traceback of raylaunch."""
    node.set(env=node.supervisor.spec.env | {"BROKEN": "a\0b"})
    outcome = node.run(node.script("print(1)"))
    assert error(outcome.failure).type == "ValueError"
    assert is_hopeless(outcome.failure)


TEXT = "caf\udce9 \x1b[2J\r\n" + "gloo " * 2000 + "...."
ENDS = {
    "kill": "was killed by",
    "exit_code": "exited with code",
    "exit_no_text": "exited with code 1",
    "exit_at_exit": "exited with code 3",
    "own_name": "raised caf \x1b[2J",
    "no_text": "raised NoTextError: (its text cannot be made)",
    "wrong_text": "raised E: (its text cannot be made)",
    "recursion": "raised RecursionError: maximum recursion depth exceeded",
    "error_file": "exited with code 1",
    "error_folder": "exited with code 1",
    "json_error_file": "raised error: caf\udce9",
    "nested_error_file": "raised error: x" if sys.version_info >= (3, 13) else "exited with code 1",
    "chain": "raised KeyError: ",
}
"""How failures begin that are not the exception of `collateral` or one like it.

The nested file has 2400 levels. `json` reads about 1000 of them in Python 3.10 and 3.11, fewer than 2400 in 3.12, and
thousands in 3.13.
"""


def test_all_ways_to_end(node: Node) -> None:
    """Each is reported as what it is, and nothing of raylaunch is in the traceback."""
    shutil.copy(any_worker.__file__, node.folder)
    ways = sorted(any_worker.WAYS.keys() - {"finish"})
    behaviour = [[{"writes": [], "way": way, "text": TEXT, "times": 1} for way in ways]]
    (node.folder / "behaviour.json").write_text(json.dumps(behaviour))
    outcome = node.run("any_worker.py", nproc=len(ways))
    for rank, failure in outcome.failures.items():
        assert failure.what.startswith(ENDS.get(ways[rank], "raised ")), (ways[rank], failure.what)
        assert len(failure.what) < 600
        assert len(failure.error.text if failure.error else "") < 5000
        assert str(PACKAGE) not in outcome.stderr(rank), ways[rank]


def test_text_that_the_locale_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for its bytes in UTF-8, as paths and variables have them where the locale is UTF-8."""
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("ascii", "surrogateescape"))
    monkeypatch.setattr(os, "fsdecode", lambda data: data.decode("ascii", "surrogateescape"))
    assert encodable("cafe \udce9") == "cafe \udce9"
    assert encodable("café \udce9") == "caf\udcc3\udca9 \udce9"
    assert encodable("\ud800") == "\ud800"


# Commands.


def test_a_missing_command(either: Node) -> None:
    """The exit code is 127, as in a shell, and the error is on stderr."""
    outcome = either.run("no-such-program", kind="command")
    assert outcome.exit_code == 127
    assert error(outcome.failure).message == "cannot run `no-such-program`: No such file or directory"
    assert "no-such-program" in outcome.stderr()
    assert is_hopeless(outcome.failure)


def test_a_command_that_is_there_and_is_not_found(node: Node) -> None:
    """The error says what was not found: no shell looks in the working folder, and a script may name a program."""
    (node.folder / "run.sh").write_text("#!/nonexistent/bash\n")
    (node.folder / "run.sh").chmod(0o700)
    missing = {
        "run.sh": "No such file or directory on the PATH; write `./run.sh`",
        "./run.sh": "No such file or directory: the program that its first line names",
    }
    for target, why in missing.items():
        assert error(node.run(target, kind="command").failure).message == f"cannot run `{target}`: {why}"


def test_a_command_gets_its_ranks_and_gives_its_exit_code(either: Node) -> None:
    """`--no-python` runs any program with a worker's environment and its own arguments."""
    outcome = either.run(
        "sh", "-c", 'echo "$RANK of $WORLD_SIZE: $0"; exit $((RANK + 3))', "arg", kind="command", nproc=2
    )
    assert outcome.exit_codes == {0: 3, 1: 4}
    assert [outcome.stdout(rank) for rank in (0, 1)] == ["0 of 2: arg\n", "1 of 2: arg\n"]
    assert outcome.failure.error is None


def test_a_command_that_is_killed(either: Node) -> None:
    """The report has the signal."""
    assert either.run("sh", "-c", "kill -SEGV $$$$", kind="command").failure.signal == "SIGSEGV"


# Importable functions.

WORK = """
import os
import torch
import torch.distributed as dist

NUMBER = 5

class Class:
    @staticmethod
    def method():
        print("method")

def add(x, *, y):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    print(x + y, dist.get_world_size(), total.item(), dist.get_backend())

def destroys():
    dist.destroy_process_group()

def raises():
    raise ValueError("in the function")

def is_left():
    import atexit
    atexit.register(lambda: print(dist.is_initialized()))
    print(dist.is_initialized())
"""


@pytest.fixture
def work(torch_node: Node) -> Node:
    (torch_node.folder / "work.py").write_text(WORK)
    return torch_node


def test_a_function_gets_its_arguments_and_a_process_group(work: Node) -> None:
    """The group has all ranks, and the backend that the driver has chosen."""
    outcome = work.run("work:add", 1, kind="function", kwargs={"y": 2}, nproc=2, port=work.open_store())
    assert set(outcome.exit_codes.values()) == {0}, outcome.stderr()
    assert [outcome.stdout(rank) for rank in (0, 1)] == ["3 2 1.0 gloo\n"] * 2


@pytest.mark.parametrize(
    ("name", "printed"), [("is_left", "True\nFalse\n"), ("destroys", ""), ("Class.method", "method\n")]
)
def test_the_process_group_is_destroyed_after_the_function(work: Node, name: str, printed: str) -> None:
    """The function may destroy it itself."""
    outcome = work.run(f"work:{name}", kind="function", port=work.open_store())
    assert (outcome.exit_code, outcome.stdout(), outcome.stderr()) == (0, printed, "")


def test_an_exception_of_a_function(work: Node) -> None:
    """Its traceback has only frames of the user's code."""
    outcome = work.run("work:raises", kind="function", port=work.open_store())
    assert outcome.exit_code == 1
    lines = error(outcome.failure).traceback.splitlines()
    assert lines[1] == f'  File "{work.folder}/work.py", line {WORK.splitlines().index("def raises():") + 2}, in raises'
    assert outcome.stderr().replace("[rank0]: ", "") == error(outcome.failure).traceback


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("no_such_module:f", "ModuleNotFoundError", "No module named 'no_such_module'"),
        ("work:no_such_function", "CannotBeginError", "`work` has no `no_such_function`"),
        ("work:Class.nothing", "CannotBeginError", "`work` has no `Class.nothing`"),
        ("work:NUMBER", "CannotBeginError", "`work:NUMBER` is not a function"),
    ],
)
def test_a_function_that_is_not_there(work: Node, target: str, kind: str, message: str) -> None:
    """The error comes before a process group is made."""
    outcome = work.run(target, kind="function")
    assert (outcome.exit_code, error(outcome.failure).type, error(outcome.failure).message) == (1, kind, message)
    assert is_hopeless(outcome.failure)


def test_an_unknown_backend(work: Node) -> None:
    """The error comes before a process group is made."""
    outcome = work.run("work:raises", kind="function", backend="carrier-pigeon")
    assert error(outcome.failure).message == "this torch has no `carrier-pigeon` backend"
    assert is_hopeless(outcome.failure)
    work.set(backend="gloo")


# Pickled function objects.


def call(node: Node, function: Any, *args: Any, nproc: int = 1, **kwargs: Any) -> Any:
    payload = cloudpickle.dumps((function, args, kwargs))
    return node.run("a function", kind="pickle", payload=payload, nproc=nproc, port=node.open_store())


def test_results_come_back_by_rank(torch_node: Node) -> None:
    """A local function with a closure can be run, with its arguments and a process group."""
    factor = 10

    def function(x: int, y: int = 0) -> tuple[int, int, float]:
        total = torch.ones(1)
        dist.all_reduce(total)
        return factor * int(os.environ["RANK"]) + x, y, total.item()

    cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["x"]))
    outcome = call(torch_node, function, 1, y=2, nproc=2)
    assert set(outcome.exit_codes.values()) == {0}, outcome.stderr()
    expected = {rank: (10 * rank + 1, 2, 2.0) for rank in range(2)}
    assert {rank: pickle.loads(value) for rank, value in outcome.values.items()} == expected


SLOW_TO_CONNECT = """
import json, os, time
from torch.distributed import distributed_c10d

class SlowGroup(distributed_c10d.ProcessGroupGloo):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        time.sleep(1.0 if os.environ["RANK"] == "1" else 0.0)
        connected.append(time.monotonic())

connected = []
distributed_c10d.ProcessGroupGloo = SlowGroup

def function():
    print(json.dumps([connected[0], time.monotonic(), "TORCH_DIST_INIT_BARRIER" in os.environ]))
"""


def test_no_function_begins_before_all_ranks_have_connected(torch_node: Node) -> None:
    """Otherwise a rank that makes no collective ends while others connect to it, and they fail."""
    (torch_node.folder / "slow_to_connect.py").write_text(SLOW_TO_CONNECT)
    outcome = torch_node.run("slow_to_connect:function", kind="function", nproc=2, port=torch_node.open_store())
    assert set(outcome.exit_codes.values()) == {0}, outcome.stderr()
    results = [json.loads(outcome.stdout(rank)) for rank in range(2)]
    connected, began, left_over = zip(*results, strict=True)
    assert min(began) >= max(connected)
    assert not any(left_over)


def test_a_big_result_comes_back(torch_node: Node) -> None:
    """It has ten megabytes. The agent, whose lease runs on meanwhile, learns of the end without reading them."""
    payload = cloudpickle.dumps((eval, ("b'x' * 10_000_000",), {}))
    torch_node.launch("a function", kind="pickle", payload=payload, port=torch_node.open_store())
    tracemalloc.start()
    try:
        torch_node.wait(WorkersExited)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert pickle.loads(torch_node.result(0)) == b"x" * 10_000_000


def test_a_result_that_cannot_be_pickled(torch_node: Node) -> None:
    """It is reported as an error of the function."""
    outcome = call(torch_node, eval, "[b'x' * 1_000_000, __import__('threading').Lock()]")
    assert outcome.exit_code == 1
    assert error(outcome.failure).type == "TypeError"
    assert error(outcome.failure).message.startswith("the function's result, a list, cannot be pickled")
    assert "raylaunch/" not in outcome.stderr()


def test_an_exception_comes_back_as_an_object(torch_node: Node) -> None:
    """It has its type and its arguments."""
    outcome = call(torch_node, exec, "raise KeyError('x', 5)")
    found = pickle.loads(outcome.values[0])
    assert (type(found), found.args) == (KeyError, ("x", 5))
    assert error(outcome.failure).type == "KeyError"


def test_an_exception_that_cannot_be_pickled_is_still_a_report(torch_node: Node) -> None:
    """Its type is reported, though the object is lost."""
    outcome = call(torch_node, exec, "import threading\nraise ValueError(b'x' * 1_000_000, threading.Lock())")
    assert outcome.values == {}
    assert error(outcome.failure).type == "ValueError"


# Error files.


def test_the_error_file_has_the_format_of_record(node: Node) -> None:
    """Tools that read torchrun's error files can read it."""
    outcome = node.run(node.script("raise ValueError('loss is NaN')"))
    data = json.loads((outcome.folders[0] / "error.json").read_text())
    assert data["message"]["message"] == "ValueError: loss is NaN"
    assert data["message"]["extraInfo"]["py_callstack"] == error(outcome.failure).traceback
    assert int(data["message"]["extraInfo"]["timestamp"]) > 0


def test_the_error_file_of_record_is_not_overwritten(torch_node: Node) -> None:
    """The script uses `@record` of torchelastic."""
    script = torch_node.script("""
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("told by record")

        main()
    """)
    outcome = torch_node.run(script)
    data = json.loads((outcome.folders[0] / "error.json").read_text())
    assert "told by record" in data["message"]["message"]
    assert set(data["message"]["extraInfo"]) == {"py_callstack", "timestamp"}
    assert error(outcome.failure).type == "ValueError"


def record(text: str) -> str:
    return f"import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({text!r})\nos._exit(3)\n"


def test_an_error_file_is_read_where_there_is_no_report(node: Node) -> None:
    """A process may have written one and then exited in its own way."""
    message = {"message": {"message": "ValueError: deep", "extraInfo": {"py_callstack": "T", "timestamp": "1"}}}
    outcome = node.run(node.script(record(json.dumps(message))))
    assert error(outcome.failure) == WorkerError(
        type="ValueError", message="deep", traceback="T", timestamp=1, from_file=True
    )
    assert node.run(node.script(record('{"message": "plain text"}'))).failure.what == "raised error: plain text"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", '{"message": {"message": 5}}', '{"message": null}', '{"other": 1}']
)
def test_a_malformed_error_file_is_reported(node: Node, text: str) -> None:
    """The exit code is still the worker's."""
    outcome = node.run(node.script(record(text)))
    assert outcome.exit_code == 3
    assert outcome.failure.spoilt
    assert outcome.failure.error is None


def test_logs_are_appended_to(node: Node) -> None:
    """Lines that are in the file already stay."""
    script = node.script("print('new')")
    folder = Path(node.folder / "run" / f"attempt-{node.attempt + 1}" / "rank-0")
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("old\n")
    assert node.run(script).stdout() == "old\nnew\n"


INTERRUPTED = """
import os, signal, sys
from raylaunch.worker.runtime import boot, files_wait
from raylaunch.worker.runtime.server_file import ServerFile
from raylaunch.worker.runtime.spec import WorkerSpec

files_wait.wait = lambda: signal.raise_signal(signal.SIGINT)
spec = WorkerSpec(rank=0, local_rank=0, kind="script", target="", env={}, cwd=".", stdout="./out.log", stderr="./err.log")
files = (ServerFile.inherited(os.memfd_create(name), os.getpid()) for name in ("report", "stacks"))
sys.exit(boot.set_up_and_run(spec, boot.WorkerFiles(*files), os.getppid(), boot.run))
"""


class Interrupt:
    """What interrupts the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (signal.SIGINT,)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_an_interrupt_before_the_script_begins(how: str, tmp_path: Path) -> None:
    """It ends the worker without a traceback, which would be of our own files."""
    (tmp_path / "spec").write_bytes(pickle.dumps(Interrupt()))
    with (tmp_path / "spec").open("rb") as spec, (tmp_path / "err.log").open("a+") as stderr:
        program = {"fork": ["-c", INTERRUPTED], "spawn": [boot.__file__, *map(str, [spec.fileno()] * 3), "title"]}
        command = [sys.executable, *program[how]]
        ended = subprocess.run(command, cwd=tmp_path, pass_fds=[spec.fileno()], stderr=stderr, check=False)
        stderr.seek(0)
        assert (ended.returncode, stderr.read()) == (-signal.SIGINT, "")


# Paths of the package.

PROGRAMS = ["worker/runtime/boot.py", *(f"node/forkserver/{name}.py" for name in ("subreaper", "store", "file_timer"))]


HAS_SAFE_PATH = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no -P")


@pytest.mark.parametrize("flags", [(), pytest.param(("-P",), marks=HAS_SAFE_PATH)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_imports_the_package_that_it_belongs_to(program: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Started by path, it puts the folder that has `raylaunch` first on sys.path, and not its own folder."""
    copy = tmp_path / "raylaunch" / program
    copy.parent.mkdir(parents=True)
    shutil.copy(PACKAGE / program, copy)
    (tmp_path / "raylaunch" / "__init__.py").write_text("import json, sys\nprint(json.dumps(sys.path))\nsys.exit(3)\n")
    ended = subprocess.run([sys.executable, *flags, copy], stdout=subprocess.PIPE, text=True, check=False)
    path = json.loads(ended.stdout)
    assert (ended.returncode, path[0]) == (3, str(tmp_path))
    assert str(copy.parent) not in path


@pytest.mark.parametrize("module", sorted(PACKAGE.joinpath("worker").rglob("*.py")), ids=lambda path: path.stem)
def test_frames_of_the_worker_package_are_removed_from_a_traceback(module: Path) -> None:
    """Frames of each of its modules are removed, if only such frames are above them."""
    call: Any = {}
    exec(compile("def call(function): function()", str(module), "exec"), call)

    def users() -> None:
        raise ValueError("loss is NaN")

    with pytest.raises(ValueError, match="loss is NaN") as caught:
        call["call"](users)
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without this test's own frame
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["call", "users"]
    shown = boot.without_own_frames(error)
    assert [frame.name for frame in traceback.extract_tb(shown.__traceback__)] == ["users"]
