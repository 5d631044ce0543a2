"""Signals to the launcher: what happens to it and to the processes below it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.contract.launchers import SCRIPTS, Launcher, Run, missing_flags, together

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

STAY = str(SCRIPTS / "stay.py")
ALWAYS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
ON_REQUEST = ("SIGUSR1",)
REQUESTED = [pytest.param(name, marks=pytest.mark.torchrun_has("--signals-to-handle")) for name in ON_REQUEST]


def sent(launcher: Launcher, name: str, *args: str) -> Run:
    """Start two workers with children, then send the signal to the launcher only. Two of them have to cross Ray."""
    local = name not in ("SIGTERM", "SIGUSR1")
    run = launcher.start("--nproc-per-node", 2, *args, local=local).wait_for("up-0", "up-1")
    os.kill(run.process.pid, signal.Signals[name])
    return run.wait()


@pytest.fixture(scope="module")
def signalled(launcher: Launcher) -> dict[str, Run]:
    """Stop a run with each signal, a few runs at a time."""
    more = ("--signals-to-handle", "SIGTERM,SIGUSR1,SIGUSR2")
    wanted: dict[str, tuple[str, ...]] = dict.fromkeys(ALWAYS, ()) | dict.fromkeys(ON_REQUEST, more)
    if not launcher.ours and "--signals-to-handle" in missing_flags():
        wanted = dict.fromkeys(ALWAYS, ())
    tasks = {name: lambda name=name, args=args: sent(launcher, name, *args, STAY) for name, args in wanted.items()}
    # torchrun's worker has ended its script, but then waits for the launcher to fetch the result until it is killed.
    as_path = ("--start-method", "fork", "--run-path", STAY, "alone")
    tasks["run as a path"] = lambda: sent(launcher, "SIGTERM", "--shutdown-timeout", "1", *as_path)
    if launcher.ours:
        tasks["deaf"] = lambda: sent(launcher, "SIGINT", "--shutdown-timeout", "1", STAY, "deaf")
    return together(tasks)


def below(run: Run) -> list[int]:
    """Return the pids of the workers and their children."""
    return [int(word) for rank in (0, 1) for word in (run.folder / f"up-{rank}").read_text().split()[:2]]


@pytest.mark.parametrize("name", [*ALWAYS, *REQUESTED, "run as a path"])
def test_no_process_is_left(signalled: dict[str, Run], name: str) -> None:
    run = signalled[name]
    assert len(below(run)) == 4
    assert run.alive(*below(run)) == []


@pytest.mark.parametrize("name", [*ALWAYS, *REQUESTED])
def test_workers_get_the_signal_that_the_launcher_got(signalled: dict[str, Run], name: str) -> None:
    run = signalled[name]
    assert [(run.folder / f"told-{rank}").read_text().split() for rank in (0, 1)] == [[name], [name]], run.said


@pytest.mark.parametrize("name", [*ALWAYS, *REQUESTED])
def test_the_exit_code_tells_of_the_signal(launcher: Launcher, signalled: dict[str, Run], name: str) -> None:
    """torchrun exits with 1 and a traceback that names the signal; raylaunch with 128 + the signal, as shells do."""
    run = signalled[name]
    assert run.code == launcher.either(128 + signal.Signals[name], 1), run.said
    assert name in run.err or f"got signal: {int(signal.Signals[name])}" in run.err
    assert ("Traceback" in run.err) is not launcher.ours, run.said


@pytest.mark.torchrun_has("--signals-to-handle")
def test_workers_are_told_which_signals_are_handled(signalled: dict[str, Run]) -> None:
    told = [(signalled[name].folder / "up-0").read_text().split()[2] for name in ("SIGTERM", "SIGUSR1")]
    assert told == ["SIGTERM,SIGINT,SIGHUP,SIGQUIT", "SIGTERM,SIGUSR1,SIGUSR2"]


@pytest.mark.raylaunch_only("looks at the workers alone, so that their children survive a SIGINT that they ignore")
def test_workers_that_do_not_listen_are_killed_with_their_children(signalled: dict[str, Run]) -> None:
    run = signalled["deaf"]
    assert run.code == 128 + signal.SIGINT, run.said
    assert len(below(run)) == 4
    assert run.alive(*below(run)) == []
