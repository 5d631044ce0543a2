"""`raylaunch.spawn`: a program written for `torch.multiprocessing.spawn`, on a cluster."""

from __future__ import annotations

import json
import secrets
import textwrap

import pytest

from tests.private_cluster import MARK, free_ports, marked

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def program(launcher, text: str, *, env: dict[str, str] | None = None) -> list:
    """Run a program; return the lines of JSON that it prints."""
    path = launcher.folder / "program.py"
    path.write_text("import json, os, sys\nimport raylaunch\n" + textwrap.dedent(text))
    done = launcher.python(str(path), env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))]


TUTORIAL = """
def run(spawn):
    def work(i, port, n):
        # As the tutorial has it: the address and the port are the program's own.
        import os
        import torch, torch.distributed as dist
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
        dist.init_process_group("gloo", rank=i, world_size=n)
        total = torch.tensor([i + 1.0])
        dist.all_reduce(total)
        print([i, total.item()], flush=True)
        dist.destroy_process_group()
    return spawn(work, (os.environ["OWN_PORT"], 3), nprocs=3, preload=["torch"])
assert run(raylaunch.spawn) is None
"""


def test_the_tutorial_program(launcher):
    """`fn(i, *args)` in several processes, which make their process group themselves, at an address they choose."""
    env = {"OWN_PORT": str(free_ports(1)[0])} | launcher.torch_env(["torch"])
    assert sorted(program(launcher, TUTORIAL, env=env)) == [
        [0, 6.0],
        [1, 6.0],
        [2, 6.0],
    ]


FAILURES = """
import signal, time, traceback
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

def fails(i, how):
    if i != 1:
        time.sleep(280)
    if how == "raise":
        raise KeyError("no such shard")
    if how == "exit":
        sys.exit(7)
    if how == "interrupt":
        raise KeyboardInterrupt
    os.kill(os.getpid(), signal.SIGSEGV)

def told(how):
    try:
        raylaunch.spawn(fails, (how,), nprocs=2, preload=[], shutdown_timeout=0.5)
    except (ProcessRaisedException, ProcessExitedException) as error:
        more = [error.exit_code, error.signal_name] if isinstance(error, ProcessExitedException) else []
        return [type(error).__name__, str(error), error.error_index, repr(error.__cause__), error.error_pid > 0, *more]

print(json.dumps([told(how) for how in ("raise", "exit", "kill")]))
"""


def test_exceptions_are_those_of_torch(launcher):
    """The same classes, texts and attributes. The cause is the exception itself, which torch does not have."""
    ((raised, left, killed),) = program(launcher, FAILURES)
    kind, text, index, cause, has_pid = raised
    assert (kind, index, cause, has_pid) == ("ProcessRaisedException", 1, "KeyError('no such shard')", True)
    assert text.startswith(
        "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
    )
    assert text.rstrip().endswith("KeyError: 'no such shard'")
    assert left == ["ProcessExitedException", "process 1 terminated with exit code 7", 1, "None", True, 7, None]
    text = "process 1 terminated with signal SIGSEGV"
    assert killed == ["ProcessExitedException", text, 1, "None", True, -11, "SIGSEGV"]


NOT_JOINED = """
import time
def work(i, folder):
    open(f"{folder}/up-{i}", "w").close()
    while not os.path.exists(folder + "/go"):
        time.sleep(0.01)
context = raylaunch.spawn(work, (os.getcwd(),), nprocs=2, join=False, preload=[])
while not (os.path.exists("up-0") and os.path.exists("up-1")):
    time.sleep(0.01)
early = context.join(timeout=0.1)
open("go", "w").close()
print(json.dumps([early, context.join(), context.join()]))
"""


def test_not_joined_at_once(launcher):
    """`join=False` returns while they run; `join` returns whether all have ended, however often it is called."""
    assert program(launcher, NOT_JOINED) == [[False, True, True]]


def test_processes_end_with_a_program_that_does_not_join_them(launcher, until):
    text = """
    import time
    def work(i, folder):
        open(f"{folder}/up-{i}", "w").close()
        time.sleep(600)
    raylaunch.spawn(work, (os.getcwd(),), nprocs=2, join=False, preload=[], env={MARK: mark})
    while not (os.path.exists("up-0") and os.path.exists("up-1")):
        time.sleep(0.01)
    """
    mark = secrets.token_hex(8)
    program(launcher, textwrap.dedent(text).replace("{MARK: mark}", str({MARK: mark})))
    until(lambda: marked(mark) == [], 100, "the processes to be gone")
