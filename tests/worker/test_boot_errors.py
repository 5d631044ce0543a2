"""What cannot begin says so in words, and says that no restart can mend it. Functions, commands and their results."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from raylaunch.core.failure import Failure, WorkerError, why_hopeless
from tests.node.harness import Node

pytestmark = pytest.mark.timeout(300)


def is_hopeless(failure: Failure) -> bool:
    return bool(why_hopeless(failure, [], 0.0))


def error(failure: Failure) -> WorkerError:
    assert failure.error is not None
    return failure.error


def test_a_missing_script(either: Node) -> None:
    """It is named in the report and on stderr."""
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
def test_errors_of_the_text_itself(either: Node, text: str, kind: str) -> None:
    """A script that cannot be compiled, or imports what is not there, is not tried again."""
    path = either.folder / "train.py"
    path.write_text(text)
    outcome = either.run(str(path))
    assert (outcome.exit_code, error(outcome.failure).type) == (1, kind)
    assert is_hopeless(outcome.failure)
    assert error(outcome.failure).place.startswith(str(path))


def test_an_error_of_the_run_may_be_mended(node: Node) -> None:
    """A plain exception is not hopeless, and is reported with its place."""
    outcome = node.run(node.script("raise ValueError('loss is NaN')"))
    assert not is_hopeless(outcome.failure)
    assert outcome.failure.what == "raised ValueError: loss is NaN"
    assert error(outcome.failure).place.startswith(f"{node.folder}/train.py:")


def test_a_log_folder_that_cannot_be_made(either: Node) -> None:
    """The node says which folder, though the worker has no log to say it in."""
    (either.folder / "file").touch()
    either.set(run_dir=str(either.folder / "file" / "run"))
    outcome = either.run(either.script("print(1)"))
    assert outcome.exit_code == 1
    assert error(outcome.failure).type == "NotADirectoryError"
    assert str(either.folder / "file") in error(outcome.failure).message
    assert is_hopeless(outcome.failure)


def test_a_working_folder_that_is_missing(either: Node) -> None:
    """It is named in the report."""
    either.set(cwd="/no/such/folder")
    outcome = either.run(either.script("print(1)"))
    assert error(outcome.failure).type == "FileNotFoundError"
    assert "/no/such/folder" in error(outcome.failure).message
    assert is_hopeless(outcome.failure)


def test_an_environment_that_cannot_be(node: Node) -> None:
    """A value that no environment can hold is reported, not left to a traceback of ours."""
    node.set(env=node.supervisor.settings.env | {"BROKEN": "a\0b"})
    outcome = node.run(node.script("print(1)"))
    assert error(outcome.failure).type == "ValueError"
    assert is_hopeless(outcome.failure)


# Commands.


def test_a_missing_command(either: Node) -> None:
    """Exit code 127, as in a shell, and words."""
    outcome = either.run("no-such-program", kind="command")
    assert outcome.exit_code == 127
    assert error(outcome.failure).message == "cannot run `no-such-program`: No such file or directory"
    assert "no-such-program" in outcome.stderr()
    assert is_hopeless(outcome.failure)


def test_a_command_gets_its_ranks_and_gives_its_exit_code(either: Node) -> None:
    """`--no-python`: any program, with the environment of a worker and its own arguments."""
    outcome = either.run(
        "sh", "-c", 'echo "$RANK of $WORLD_SIZE: $0"; exit $((RANK + 3))', "arg", kind="command", nproc=2
    )
    assert outcome.exit_codes == {0: 3, 1: 4}
    assert [outcome.stdout(rank) for rank in (0, 1)] == ["0 of 2: arg\n", "1 of 2: arg\n"]
    assert outcome.failure.error is None


def test_a_command_that_is_killed(either: Node) -> None:
    """Its signal is known."""
    assert either.run("sh", "-c", "kill -SEGV $$$$", kind="command").failure.signal == "SIGSEGV"


# Functions that a module holds.

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
def work(either: Node) -> Node:
    (either.folder / "work.py").write_text(WORK)
    return either


def test_a_function_gets_its_arguments_and_a_group(work: Node) -> None:
    """The process group is there before the call: all ranks in it, gloo where there are no GPUs."""
    outcome = work.run("work:add", 1, kind="function", kwargs={"y": 2}, nproc=2, port=work.open_store())
    assert set(outcome.exit_codes.values()) == {0}, outcome.stderr()
    assert [outcome.stdout(rank) for rank in (0, 1)] == ["3 2 1.0 gloo\n"] * 2


@pytest.mark.parametrize(
    ("name", "printed"), [("is_left", "True\nFalse\n"), ("destroys", ""), ("Class.method", "method\n")]
)
def test_the_group_is_left_after_the_function(node: Node, name: str, printed: str) -> None:
    """It is destroyed after the call, unless the function did that itself."""
    (node.folder / "work.py").write_text(WORK)
    outcome = node.run(f"work:{name}", kind="function", port=node.open_store())
    assert (outcome.exit_code, outcome.stdout(), outcome.stderr()) == (0, printed, "")


def test_an_exception_of_a_function(work: Node) -> None:
    """Its traceback has the user's frames only."""
    outcome = work.run("work:raises", kind="function", port=work.open_store())
    assert outcome.exit_code == 1
    lines = error(outcome.failure).traceback.splitlines()
    assert lines[1] == f'  File "{work.folder}/work.py", line {WORK.splitlines().index("def raises():") + 2}, in raises'
    assert outcome.stderr().replace("[rank0]: ", "") == error(outcome.failure).traceback


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ("no_such_module:f", "ModuleNotFoundError", "No module named 'no_such_module'"),
        ("work:no_such_function", "CannotBeginError", "`work` has no `no_such_function`"),
        ("work:Class.nothing", "CannotBeginError", "`work` has no `Class.nothing`"),
        ("work:NUMBER", "CannotBeginError", "`work:NUMBER` is not a function"),
    ],
)
def test_a_function_that_is_not_there(node: Node, target: str, kind: str, words: str) -> None:
    """Said before any group is joined."""
    (node.folder / "work.py").write_text(WORK)
    outcome = node.run(target, kind="function")
    assert (outcome.exit_code, error(outcome.failure).type, error(outcome.failure).message) == (1, kind, words)
    assert is_hopeless(outcome.failure)


def test_an_unknown_backend(node: Node) -> None:
    """It is named; nobody waits for a group that cannot be."""
    (node.folder / "work.py").write_text(WORK)
    outcome = node.run("work:raises", kind="function", backend="carrier-pigeon")
    assert error(outcome.failure).message == "this torch has no `carrier-pigeon` backend"
    assert is_hopeless(outcome.failure)
    node.set(backend=None)


# Function objects.


def call(node: Node, function: Any, *args: Any, nproc: int = 1, **kwargs: Any) -> Any:
    payload = cloudpickle.dumps((function, args, kwargs))
    return node.run("a function", kind="pickle", payload=payload, nproc=nproc, port=node.open_store())


def test_results_come_back_by_rank(either: Node) -> None:
    """A function that no module holds, with its closure; what it returns is known for each rank."""
    factor = 10

    def function(x: int, y: int = 0) -> tuple[int, int]:
        return factor * int(os.environ["RANK"]) + x, y

    cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["x"]))
    outcome = call(either, function, 1, y=2, nproc=2)
    assert set(outcome.exit_codes.values()) == {0}, outcome.stderr()
    assert {rank: pickle.loads(value) for rank, value in outcome.values.items()} == {0: (1, 2), 1: (11, 2)}


def test_a_big_result_comes_back(node: Node) -> None:
    """Ten megabytes are no obstacle."""
    outcome = call(node, eval, "b'x' * 10_000_000")
    assert pickle.loads(outcome.values[0]) == b"x" * 10_000_000


def test_a_result_that_cannot_be_pickled(node: Node) -> None:
    """A mistake of the function's, said in words and reported as its failure."""
    outcome = call(node, eval, "__import__('threading').Lock()")
    assert outcome.exit_code == 1
    assert error(outcome.failure).type == "TypeError"
    assert error(outcome.failure).message.startswith("the function's result, a lock, cannot be pickled")
    assert "raylaunch/" not in outcome.stderr()


def test_an_exception_comes_back_as_an_object(node: Node) -> None:
    """With its arguments, for the caller to raise."""
    outcome = call(node, exec, "raise KeyError('x', 5)")
    found = pickle.loads(outcome.values[0])
    assert (type(found), found.args) == (KeyError, ("x", 5))
    assert error(outcome.failure).type == "KeyError"


def test_an_exception_that_cannot_be_pickled_is_still_a_report(node: Node) -> None:
    """The object is lost, its words are not."""
    outcome = call(node, exec, "import threading\nraise ValueError(threading.Lock())")
    assert outcome.values == {}
    assert error(outcome.failure).type == "ValueError"


# Error files.


def test_error_file_in_the_form_of_record(node: Node) -> None:
    """Tools that read torchrun's error files can read ours."""
    outcome = node.run(node.script("raise ValueError('loss is NaN')"))
    data = json.loads((outcome.folders[0] / "error.json").read_text())
    assert data["message"]["message"] == "ValueError: loss is NaN"
    assert data["message"]["extraInfo"]["py_callstack"] == error(outcome.failure).traceback
    assert int(data["message"]["extraInfo"]["timestamp"]) > 0


def test_the_error_file_of_record_is_not_overwritten(node: Node) -> None:
    """What `@record` wrote stays as it is."""
    script = node.script("""
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("told by record")

        main()
    """)
    outcome = node.run(script)
    data = json.loads((outcome.folders[0] / "error.json").read_text())
    assert "told by record" in data["message"]["message"]
    assert set(data["message"]["extraInfo"]) == {"py_callstack", "timestamp"}
    assert error(outcome.failure).type == "ValueError"


def record(text: str) -> str:
    return f"import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({text!r})\nos._exit(3)\n"


def test_an_error_file_alone_is_believed(node: Node) -> None:
    """A process that dies without our report may have left its words in torchrun's way."""
    message = {"message": {"message": "ValueError: deep", "extraInfo": {"py_callstack": "T", "timestamp": "1"}}}
    outcome = node.run(node.script(record(json.dumps(message))))
    assert error(outcome.failure) == WorkerError(
        type="ValueError", message="deep", traceback="T", timestamp=1, from_file=True
    )
    assert node.run(node.script(record('{"message": "plain text"}'))).failure.what == "raised error: plain text"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", '{"message": {"message": 5}}', '{"message": null}', '{"other": 1}']
)
def test_a_malformed_error_file_harms_nobody(node: Node, text: str) -> None:
    """It is reported as such; the exit code is still the worker's."""
    outcome = node.run(node.script(record(text)))
    assert outcome.exit_code == 3
    assert outcome.failure.spoilt
    assert outcome.failure.error is None


def test_logs_are_appended_to(node: Node) -> None:
    """What is in the folder already is not lost."""
    script = node.script("print('new')")
    folder = Path(node.folder / "run" / f"attempt-{node.attempt + 1}" / "rank-0")
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("old\n")
    assert node.run(script).stdout() == "old\nnew\n"
