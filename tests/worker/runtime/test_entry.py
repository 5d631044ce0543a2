"""A script in a worker finds what `python -u train.py` gives it, and ends in the same way.

The table DIFFERENCES has every difference with its reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raylaunch.worker.runtime import boot
from tests.node.harness import MARK, MessagePipe, Node, basic_env, run_python, running

pytestmark = pytest.mark.timeout(300)

ROOT = str(Path(boot.__file__).parents[3])
ANYTHING = object()
PlainEnd = tuple[Path, subprocess.CompletedProcess[str]]

RANKS = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *(
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
    ),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
}
OURS = {
    "RAYLAUNCH_PAGE",
    "RAYLAUNCH_ATTEMPT",
    "RAYLAUNCH_FAST_DIR",
    "RAYLAUNCH_RUN_DIR",
    "RAYLAUNCH_STATE",
    "RAYLAUNCH_SURVIVORS",
    *("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"),  # of a hang: see docs/gpu.md
}


def without_ranks(env: dict[str, str]) -> dict[str, str]:
    assert env.keys() >= RANKS | OURS
    return {name: value for name, value in env.items() if name not in RANKS | OURS}


def without_zip(files: dict[str, str]) -> dict[str, str]:
    """Whether the zip file that runs is open depends on when torch was imported."""
    return {fd: name for fd, name in files.items() if name != "app"}


def without_reports(files: dict[str, str]) -> dict[str, str]:
    files = without_zip(files)
    extra = {fd: name.partition(" ")[0] for fd, name in files.items() if "raylaunch-" in name}
    assert sorted(extra.values()) == ["memfd:raylaunch-report", "memfd:raylaunch-stacks"]
    return {
        fd: {"stdout.log": "plain.out", "stderr.log": "plain.err"}.get(name, name)
        for fd, name in files.items()
        if fd not in extra
    }


def without_pybind11(names: list[str]) -> list[str]:
    """Torch 2.6 keeps the data of its pybind11 there, from when it was imported."""
    return [name for name in names if not name.startswith("__pybind11_internals_")]


def with_root_last(path: list[str]) -> list[str]:
    return [entry for entry in path if entry != ROOT] if path[-1] == ROOT else path


def elastic(facts: list[bool]) -> list[bool]:
    assert facts[1]
    return [facts[0], False]


DIFFERENCES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "env": ("the ranks, as torchrun sets them, and what `raylaunch.worker` needs", without_ranks),
    "files": ("the memory files of its report and its stack dumps, closed on exec", without_reports),
    "faulthandler": ("a crash writes its Python stack to stderr.log", lambda on: not on),
    "sys.path": ("our own package comes last, where it is not installed", with_root_last),
    "torch.distributed": ("torch knows that it was launched", elastic),
    "builtins": ("torch may have been imported", without_pybind11),
    "frozen objects": ("garbage collections leave alone what workers share", lambda _: ANYTHING),
    "kernel threads": ("libraries that end their threads before a fork start them again on use", lambda _: ANYTHING),
    "stdout": ("the file below notes the order of writes", lambda stream: stream | {"raw": "FileIO"}),
    "stderr": ("the file below notes the order of writes", lambda stream: stream | {"raw": "FileIO"}),
    "command line": ("a title in `ps`", lambda _: ANYTHING),
    "exit handlers": ("preloaded modules may register some", lambda _: ANYTHING),
}
"""By field of the dump: why it differs in a worker, and how it is made comparable."""


class Kinds:
    """The same dump as a script, a module, a folder and a zip file."""

    def __init__(self, folder: Path) -> None:
        source = Path(__file__).parents[1] / "dump.py"
        shutil.copy(source, folder / "train.py")
        (folder / "package").mkdir()
        (folder / "package" / "__init__.py").touch()
        shutil.copy(source, folder / "package" / "train.py")
        (folder / "folder").mkdir()
        shutil.copy(source, folder / "folder" / "__main__.py")
        with zipfile.ZipFile(folder / "app", "w") as archive:
            archive.write(source, "__main__.py")
        self.folder = folder
        self.targets = {
            "script": ("script", str(folder / "train.py")),
            "relative": ("script", "./train.py"),
            "module": ("module", "package.train"),
            "folder": ("script", "folder"),
            "zip": ("script", str(folder / "app")),
        }
        self._plain: dict[str, Any] = {}

    def args(self, kind: str) -> tuple[str, ...]:
        """Return the arguments of the dump: torch and what changes with it are looked at for one kind only."""
        return ("--lr", "1e-3", "", *(() if kind == "script" else ("without-torch",)))

    def run_python(self, kind: str, env: dict[str, str]) -> Any:
        if kind not in self._plain:
            how, target = self.targets[kind]
            command = ["-m", target] if how == "module" else [target]
            done = run_python(*command, *self.args(kind), env=env, cwd=self.folder)
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            found["files"] = without_zip(found["files"])
            found["builtins"] = without_pybind11(found["builtins"])
            self._plain[kind] = found
        return self._plain[kind]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return Kinds(tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize("kind", ["script", "relative", "module", "folder", "zip"])
def test_a_worker_finds_what_plain_python_gives(torch_either: Node, kinds: Kinds, kind: str) -> None:
    """Every field of the dump is the same as under `python -u`, except those in the table."""
    how, target = kinds.targets[kind]
    torch_either.set(cwd=str(kinds.folder))
    outcome = torch_either.run(target, *kinds.args(kind), kind=how)
    assert outcome.exit_code == 0, outcome.stderr()
    worker = json.loads(outcome.stdout())
    reference = dict(kinds.run_python(kind, torch_either.supervisor.spec.env))
    reference["env"] = reference["env"] | {name: worker["env"][name] for name in (MARK, "SAY")}
    differences = {}
    for field, expected in reference.items():
        if field in DIFFERENCES:
            mended = DIFFERENCES[field][1](worker[field])
            if mended is not ANYTHING and mended != expected:
                differences[field] = (mended, expected)
        elif worker[field] != expected:
            differences[field] = (worker[field], expected)
    assert differences == {}


def test_random_numbers_differ_between_workers(torch_node: Node) -> None:
    """The global generators of Python, NumPy and torch differ by worker and by attempt, as in unrelated processes."""
    script = torch_node.script("""
        import random, sys
        import numpy, torch
        print(random.random(), numpy.random.random(), torch.initial_seed(), torch.rand(()).item())
    """)
    found = []
    for _ in range(2):
        outcome = torch_node.run(script, nproc=2)
        assert set(outcome.exit_codes.values()) == {0}, outcome.stderr()
        found += [outcome.stdout(rank).split() for rank in range(2)]
    assert [len(set(values)) for values in zip(*found, strict=True)] == [4, 4, 4, 4]


def test_ids_of_ray_differ_between_workers(mark: str, tmp_path: Path, pipe: MessagePipe) -> None:
    """Also those that each draws next: two that put an object under the same id at the same time would not both live."""
    (tmp_path / "draws.py").write_text("import ray\nray.ObjectRef.from_random()\n")
    with running(more_env={"PYTHONPATH": str(tmp_path)}, preload=("draws",)) as node:
        node.use_for_test(tmp_path, mark, pipe)
        script = node.script("import ray\nfor _ in range(50): print(ray.ObjectRef.from_random().hex())")
        outcome = node.run(script, nproc=3)
    assert set(outcome.exit_codes.values()) == {0}, outcome.stderr()
    assert len({line for rank in range(3) for line in outcome.stdout(rank).splitlines()}) == 150


def test_path_of_a_linked_script(either: Node) -> None:
    """A script behind a symbolic link imports from the folder of the real file."""
    (either.folder / "real").mkdir()
    (either.folder / "real" / "neighbour.py").write_text("NAME = 'real'")
    (either.folder / "real" / "script.py").write_text(
        "import neighbour, sys; print(neighbour.NAME, __file__, sys.path[0])"
    )
    (either.folder / "link.py").symlink_to("real/script.py")
    outcome = either.run("link.py")
    expected = run_python("link.py", env=either.supervisor.spec.env, cwd=either.folder)
    assert (outcome.exit_code, outcome.stdout()) == (0, expected.stdout)


ENDS = {
    "falls_off_the_end": "print('done')",
    "no_newline": "import sys; sys.stdout.write('half'); sys.stderr.write('line')",
    "exit_none": "import sys; sys.exit()",
    "exit_0": "import sys; sys.exit(0)",
    "exit_3": "import sys; sys.exit(3)",
    "exit_text": "import sys; sys.exit('no data')",
    "exit_256": "import sys; sys.exit(256)",
    "exit_257": "import sys; sys.exit(257)",
    "exit_minus_1": "import sys; sys.exit(-1)",
    "exit_true": "import sys; sys.exit(True)",
    "exit_false": "import sys; sys.exit(False)",
    "exit_float": "import sys; sys.exit(0.0)",
    "exit_above_long": "import sys; sys.exit(2**70)",
    "exit_below_long": "import sys; sys.exit(-2**63 - 256)",
    "exit_longest": "import sys; sys.exit(2**63 - 1)",
    "exit_above_int": "import sys; sys.exit(2**40 + 5)",
    "exit_own_int": "import sys\nclass Code(int):\n    def __and__(self, _): return 0\nsys.exit(Code(3))",
    "exit_empty_text": "import sys; sys.exit('')",
    "exit_bytes": "import sys; sys.exit(b'no data')",
    "exit_own_class": "class Stop(SystemExit): pass\nraise Stop(6)",
    "exit_two_arguments": "raise SystemExit(1, 2)",
    "exit_no_stderr": "import sys; sys.stderr = None; sys.exit('no data')",
    "exit_in_thread": "import sys, threading\nt = threading.Thread(target=sys.exit, args=(3,))\nt.start(); t.join()",
    "exit_at_exit": "import atexit, sys\natexit.register(sys.exit, 3)",
    "exit_in_finally": "import sys\ntry:\n    1 / 0\nfinally:\n    sys.exit(4)",
    "exit_tuple": "import sys; sys.exit((1, 2))",
    "exit_at_once": "import os; os._exit(7)",
    "exit_builtin": "exit(4)",
    "raises": "def train():\n    raise ValueError('loss is NaN')\ntrain()",
    "raises_chained": "def f():\n    {}['x']\ntry:\n    f()\nexcept KeyError as e:\n    raise ValueError('outer') from e",
    "raises_in_context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise RuntimeError('second')",
    "raises_group": "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])",
    "raises_with_notes": "e = ValueError('x'); e.add_note('a note'); raise e",
    "raises_generator_exit": "raise GeneratorExit('odd')",
    "raises_without_text": "class E(Exception):\n    def __str__(self): raise ValueError\nraise E()",
    "raises_without_report": (
        "import pickle\ndef fails(*args): raise RuntimeError\npickle.dump = pickle.dumps = fails\nraise ValueError(1)"
    ),
    "recursion": "def f(): f()\nf()",
    "syntax": "x = 1\nif x\n    print(x)",
    "indentation": "if 1:\n    x = 1\n  y = 2",
    "latin_1": b"# coding: latin-1\nprint(ascii('\xe9'))",
    "import_error": "import torhc",
    "interrupt": "import atexit\natexit.register(print, 'at exit')\nraise KeyboardInterrupt",
    "interrupt_by_signal": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
    "terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nprint('not reached')",
    "aborted_by_user_signal": "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\nprint('not reached')",
    "broken_pipe": "import os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')",
    "at_exit": "import atexit\natexit.register(print, 'last')\natexit.register(print, 'first')\nprint('main')",
    "at_exit_raises": "import atexit\natexit.register(lambda: 1 / 0)",
    "at_exit_after_error": "import atexit\natexit.register(print, 'last')\n1 / 0",
    "thread_is_waited_for": (
        "import threading, time\ndef f():\n    time.sleep(0.1)\n    print('thread')\n"
        "threading.Thread(target=f).start()\nprint('main')"
    ),
    "daemon_is_not_waited_for": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "thread_raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start(); t.join()",
    "own_hook": "import sys\nsys.excepthook = lambda t, e, tb: print('hook', t.__name__, e, tb.tb_frame.f_code.co_name)\n1 / 0",
    "hook_exits": "import sys\nsys.excepthook = lambda *_: sys.exit(9)\n1 / 0",
    "warning": "import warnings\nwarnings.warn('old')\nwarnings.warn('seen', DeprecationWarning)\nprint('on')",
    "unraisable": "class A:\n    def __del__(self): 1 / 0\na = A()\ndel a",
    "del_at_the_end": "class A:\n    def __del__(self): print('del')\na = A()",
    "encoding_of_output": "print('gr\\u00fc\\u00df \\u4f60')",
    "lone_surrogate": "print('\\udcff')",
    "annotations": "x: int = 1\nprint(__annotations__)",
    "future_does_not_leak": "def f(x: int): ...\nprint(f.__annotations__)",
    "source_can_be_read": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))",
    "main_can_be_imported": "import __main__\nX = 5\nprint(__main__.X, __main__.__file__)",
    "main_guard": "if __name__ == '__main__':\n    print('main')",
    "dataclass": "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass A:\n    x: int\nprint(A(1))",
    "pickle_by_reference": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A, A.__module__)",
    "exit_in_function": "import sys\ndef f():\n    try:\n        sys.exit(5)\n    finally:\n        print('finally')\nf()",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    print('ran')\nasyncio.run(f())",
    "subprocess_sees": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'ls /proc/self/fd | wc -l; pwd; echo $LC_CTYPE'])",
    "frames": "import sys, traceback\nprint(len(traceback.extract_stack()) > 0, sys._getframe().f_code.co_name)",
}
CHANGED_BY_IMPORTS = (
    *("falls_off_the_end", "raises", "interrupt", "interrupt_by_signal", "at_exit_raises", "at_exit_after_error"),
    *("thread_is_waited_for", "thread_raises", "own_hook", "warning", "unraisable", "del_at_the_end"),
)
CHANGED_BY_START = (
    *CHANGED_BY_IMPORTS,
    *("no_newline", "exit_3", "exit_text", "exit_no_stderr", "exit_at_once", "exit_builtin", "terminated", "syntax"),
    *("aborted_by_user_signal", "broken_pipe", "latin_1", "encoding_of_output", "lone_surrogate", "subprocess_sees"),
    *("source_can_be_read", "main_can_be_imported", "pickle_by_reference", "frames"),
)
"""Those whose end has a part that is set up before the script begins: streams, signals, files, `__main__`.

What runs and ends a script is the same in forked workers and in those with an interpreter of their own.
"""


@pytest.fixture(scope="module")
def plain_ends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, str]], PlainEnd]:
    """Return a function that returns a script of `ENDS`, and how it ends under `python -u`; each is run once."""
    folder = tmp_path_factory.mktemp("ends")
    found: dict[str, PlainEnd] = {}

    def run(name: str, env: dict[str, str]) -> PlainEnd:
        if name not in found:
            text, path = ENDS[name], folder / name / "train.py"
            path.parent.mkdir()
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            found[name] = path, run_python(str(path), env=env, cwd=path.parent)
        return found[name]

    return run


@pytest.mark.parametrize(
    ("either", "name"),
    [*(("forkserver", name) for name in ENDS), *(("spawn", name) for name in CHANGED_BY_START)],
    indirect=["either"],
)
def test_a_worker_ends_as_plain_python_does(
    either: Node, plain_ends: Callable[[str, dict[str, str]], PlainEnd], name: str
) -> None:
    """Exit code, stdout and stderr are the same; the traceback has no frame of raylaunch."""
    ends_as_plain(either, plain_ends, name)


@pytest.mark.parametrize("name", CHANGED_BY_IMPORTS)
def test_a_worker_with_torch_imported_ends_as_plain_python_does(
    torch_node: Node, plain_ends: Callable[[str, dict[str, str]], PlainEnd], name: str
) -> None:
    """Also if it ends by what torch has a part in: exit handlers, hooks, threads and signals."""
    ends_as_plain(torch_node, plain_ends, name)


def ends_as_plain(node: Node, plain_ends: Callable[[str, dict[str, str]], PlainEnd], name: str) -> None:
    path, expected = plain_ends(name, node.supervisor.spec.env)
    node.set(cwd=str(path.parent))
    outcome = node.run(str(path))
    assert outcome.exit_code == expected.returncode
    assert outcome.stdout() == expected.stdout
    assert without_random_parts(outcome.stderr()) == without_random_parts(expected.stderr)


def without_random_parts(text: str) -> str:
    """Remove addresses, and how deep the stack was."""
    return re.sub(r"0x[0-9a-f]+|repeated \d+ more", "#", text)


@pytest.mark.parametrize("source", [b"# coding: klingon\n", b"print('\xe9')", b"print(1)\0"])
def test_a_file_that_is_no_text_is_a_syntax_error(node: Node, source: bytes) -> None:
    """The type of the error and the exit code are the same as Python's; its message depends on how the file is read.

    Python 3.10 runs a file up to its first null byte, and does not compile a text with one.
    """
    path = node.folder / "train.py"
    path.write_bytes(source)
    outcome = node.run(str(path))
    assert outcome.exit_code == 1
    assert outcome.failure.error is not None
    is_value_error = b"\0" in source and sys.version_info < (3, 11)
    assert outcome.failure.error.type == ("ValueError" if is_value_error else "SyntaxError")


def test_an_excepthook_that_fails_hides_no_error(node: Node) -> None:
    """Its own error and that of the script are printed."""
    outcome = node.run(node.script("import sys\nsys.excepthook = lambda *_: {}[0]\n1 / 0"))
    assert outcome.exit_code == 1
    assert "Error in sys.excepthook:" in outcome.stderr()
    assert "KeyError: 0" in outcome.stderr()
    assert "ZeroDivisionError" in outcome.stderr()
    assert outcome.failure.error is not None
    assert outcome.failure.error.type == "ZeroDivisionError"


def test_an_excepthook_that_exits_comes_after_the_report(node: Node) -> None:
    """The error is reported even if the script's hook aborts at once, as some do to free their peers."""
    outcome = node.run(node.script("import os, sys\nsys.excepthook = lambda *_: os._exit(5)\n1 / 0"))
    assert outcome.exit_code == 5
    assert outcome.failure.error is not None
    assert outcome.failure.error.type == "ZeroDivisionError"


def test_the_traceback_of_a_module_has_no_frame_of_raylaunch(either: Node) -> None:
    """With `-m`, the traceback begins in the user's file, in the log and in the report."""
    (either.folder / "job.py").write_text("def f():\n    raise ValueError('x')\nf()\n")
    outcome = either.run("job", kind="module")
    assert outcome.exit_code == 1
    assert outcome.failure.error is not None
    for text in (outcome.stderr(), outcome.failure.error.traceback):
        assert text.splitlines()[1] == f'  File "{either.folder}/job.py", line 3, in <module>'
        assert "raylaunch/" not in text.replace(str(either.folder), "")


def test_variables_that_a_preload_sets_are_in_the_worker(mark: str, tmp_path: Path) -> None:
    """It is as if the script had imported the module."""
    (tmp_path / "sets_env.py").write_text("import os; os.environ['SET_BY_IMPORT'] = '1'; os.environ['HOME'] = '/no'")
    env = basic_env(mark) | {"PYTHONPATH": str(tmp_path)}
    pipe = MessagePipe(tmp_path / "pipe")
    with running(env=env, preload=("sets_env",)) as node:
        node.folder = tmp_path
        node.set(run_dir=str(tmp_path / "run"), cwd=str(tmp_path))
        outcome = node.run(node.script("import os\nprint(os.environ['SET_BY_IMPORT'], os.environ['HOME'])"))
    pipe.close()
    assert outcome.stdout() == f"1 {os.environ['HOME']}\n"


def test_multiprocessing_works_in_a_script(torch_either: Node) -> None:
    """A spawn pool finds the script's functions; forked children and DataLoader workers run."""
    script = torch_either.script("""
        import multiprocessing

        def double(x):
            return 2 * x

        class Numbers:
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return index

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2, 3]))
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(pool.map(double, [1, 2, 3]))
            from torch.utils.data import DataLoader
            print([batch.tolist() for batch in DataLoader(Numbers(), batch_size=4, num_workers=2)])
    """)
    outcome = torch_either.run(script)
    assert outcome.exit_code == 0, outcome.stderr()
    assert outcome.stdout().splitlines() == ["[2, 4, 6]", "[2, 4, 6]", "[[0, 1, 2, 3], [4, 5, 6, 7]]"]


def test_a_command_gets_the_signals_of_a_shell(either: Node) -> None:
    """SIGPIPE, which only Python ignores, is not ignored in another program, as under `subprocess`.

    Signals 32 and 33 are glibc's. Who has started this process by its posix_spawn may have left them ignored.
    """
    question = ["grep", "SigIgn", "/proc/self/status"]
    outcome = either.run(*question, kind="command")
    assert outcome.exit_code == 0
    plain = subprocess.run(question, capture_output=True, text=True, check=True).stdout
    told, wanted = (int(text.split()[1], 16) & ~(3 << 31) for text in (outcome.stdout(), plain))
    assert told == wanted


def test_safe_path_is_honoured(mark: str, tmp_path: Path) -> None:
    """With PYTHONSAFEPATH the script's folder is not on sys.path, and Python's own folders are."""
    env = basic_env(mark) | {"PYTHONSAFEPATH": "1"}
    (tmp_path / "train.py").write_text("import sys; print(sys.path)")
    expected = run_python("train.py", env=env, cwd=tmp_path).stdout
    for method in ("forkserver", "spawn"):
        with running(method, env=env, preload=(), cwd=str(tmp_path), run_dir=str(tmp_path / method)) as node:
            found = node.run("train.py").stdout()
        assert str(with_root_last(json.loads(found.replace("'", '"')))) + "\n" == expected, method


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_python_is_the_same(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Workers run with the launcher's interpreter, under the same name, of which Python 3.13 removes any `..`."""
    python = Path(sys.executable)
    monkeypatch.setattr(sys, "executable", f"{python.parent}/../{python.parent.name}/{python.name}")
    (tmp_path / "train.py").write_text("import sys; print(sys.executable, sys.orig_argv)")
    env = basic_env(mark)
    with running(method, env=env, preload=(), cwd=str(tmp_path), run_dir=str(tmp_path / "run")) as node:
        found = node.run("train.py").stdout()
    assert found == run_python("train.py", env=env, cwd=tmp_path).stdout
