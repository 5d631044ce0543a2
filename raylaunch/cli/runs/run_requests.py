"""The commands by which a person has a run do something: `stop`, `restart`, `resize`, `drain` and `stacks`.

Each asks the driver, and waits until it is done.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from raylaunch.cli.args import flag_values
from raylaunch.cli.run_once import say
from raylaunch.cli.runs import known_runs, run_tables
from raylaunch.cli.runs.run_reader import GOING_ON, RunReader
from raylaunch.cli.runs.run_summary import LOST, RunSummary, summary
from raylaunch.cluster.control.control_client import ControlError
from raylaunch.cluster.control.control_messages import (
    Accepted,
    ControlRequest,
    DrainNode,
    GetStacks,
    GetState,
    RefusedError,
    ResizeRun,
    RestartRun,
    RunState,
    StacksCollected,
    StopRun,
)
from raylaunch.core.history.run_status import RunStatus
from raylaunch.core.job.job import node_range
from raylaunch.core.machine.state import Phase
from raylaunch.core.text import count, duration, printable, spans
from raylaunch.errors import ClusterError, ConfigError, ExitCode, RaylaunchError
from raylaunch.node.linux.procfs import user_name

_CANNOT_SAVE = "the workers have not called `should_checkpoint`, and are not asked to save"
_LOOK_SECONDS = 0.5
_MOST_RANKS = 1000
_WAIT_SECONDS = 5.0


class NotDoneError(RaylaunchError):
    """A run does not do what was requested; why, for a person."""

    exit_code = ExitCode.JOB_FAILED


def stop(run: RunReader, arguments: Namespace) -> int:
    """Stop a run and return 0 when it has ended. Raises ConfigError if its driver cannot be asked."""
    shown = summary(run)
    if shown.is_over:
        say(f"{run.entry.title} has ended already: {_outcome(shown)}")
        if arguments.json:
            _print_json(run)
        return ExitCode.OK
    seconds = flag_values.seconds(arguments.grace)
    known_runs.await_driver(run)
    if not run.is_asked:
        why = "the registry does not have it" if run.entry.driver is None else run.problem or "it does not listen"
        end = (
            f"`kill {run.entry.driver.pid}` on {run.entry.driver.host} ends"
            if run.entry.driver is not None
            else "its owner can end"
        )
        hint = f"{end} its driver, and the workers with it"
        raise ConfigError(f"{run.entry.title} cannot be stopped from here: {why}", hint=hint)
    if _asks(arguments) and not _is_confirmed(_question(shown, run, seconds, at_once=arguments.now)):
        say("nothing was stopped")
        return ExitCode.INTERRUPTED
    try:
        _request(run, seconds, at_once=arguments.now)
        if arguments.json:
            _print_json(run)
        return ExitCode.OK
    except KeyboardInterrupt:
        say(f"{run.entry.title} is still ending; `raylaunch stop --now {run.entry.id}` does not wait for its workers")
        return ExitCode.INTERRUPTED


def _print_json(run: RunReader) -> None:
    """Print what `status --json` prints."""
    print(json.dumps(asdict(summary(run)), indent=2))


def _request(run: RunReader, seconds: float, *, at_once: bool) -> None:
    """Ask the driver to end the run, and wait until it has ended."""
    how = "they are killed" if at_once else "they get SIGTERM"
    request = StopRun(by=requester(), save_seconds=seconds, at_once=at_once)
    accepted = _asked(run, request)
    if accepted is not None and accepted.phase is Phase.SAVING:
        how = f"they save, within {seconds:g} s, and get SIGTERM then"
        if not accepted.can_save:
            how = f"they get SIGTERM; {_CANNOT_SAVE}"
    where = f" (process {run.entry.driver.pid} on {run.entry.driver.host})" if run.entry.driver is not None else ""
    say(f"the workers of {run.entry.title} are to end: {how}{where}")
    takeovers = run.takeovers
    while not run.result() and (run.is_asked or run.entry.is_detached) and not run.is_gone:
        run.wait(_WAIT_SECONDS)
        if takeovers != run.takeovers and (status := run.status()) is not None and status.phase in GOING_ON:
            takeovers = run.takeovers
            _asked(run, request)  # the driver died before anybody had kept the request
    say(f"{run.entry.title}: {_outcome(summary(run))}")


def _asked(run: RunReader, request: StopRun) -> Accepted | None:
    """Ask the driver to end the run. Return its answer; None if it has just ended, too."""
    with contextlib.suppress(ControlError, RefusedError):
        accepted: Accepted = run.client.ask(request)
        return accepted
    return None


def _asks(arguments: Namespace) -> bool:
    """Return whether a person is asked before anything is done."""
    return not arguments.yes and sys.stdin is not None and sys.stdin.isatty()


def _cost(run: RunReader, seconds: float = math.inf, *, at_once: bool = False) -> str:
    """Return what a change costs workers that cannot save, for a person; `""`: nothing, or the driver cannot tell.

    `seconds`: how long they may save. `at_once`: they are killed, and could not save either way.
    """
    with contextlib.suppress(ControlError, RefusedError):
        found: RunState = run.ask(GetState(before_change=True))
        if found.status.phase is Phase.RUNNING and (at_once or not found.can_save):
            return f"{'the workers are killed at once' if at_once else _CANNOT_SAVE}: {_lost(found.status)}"
        save = found.status.progress.slowest_save if found.status.progress is not None else None
        if found.status.phase is Phase.RUNNING and save is not None and save > seconds:
            return f"a save takes {duration(save)}, so give `--grace` more than {seconds:g}: {_lost(found.status)}"
    return ""


def _lost(status: RunStatus) -> str:
    """Return which steps are lost if the workers end now, for a person."""
    progress, lost = status.progress, "steps since their last checkpoint are lost"
    if progress is None or progress.attempt != status.attempt:
        return lost
    where = f"they are at step {progress.high}" if progress.high is not None else ""
    saved = [] if progress.saved is None else [progress.saved]
    saved += [] if progress.committed is None else [progress.committed - 1]
    if progress.high is None or not saved:
        most = f"at most {progress.marks}, which is all that this attempt has made"
        return f"{f'{where}, and ' if where else ''}{lost}, {most}"
    gone = max(0, progress.high - max(saved))
    return f"{where}, and step {max(saved)} is saved: {count(gone, 'step')} {'is' if gone == 1 else 'are'} lost"


def _question(shown: RunSummary, run: RunReader, seconds: float, *, at_once: bool) -> str:
    cost = _cost(run, seconds, at_once=at_once)
    run.close()  # the person may take long to answer
    size = f" ({count(shown.workers, 'worker')} on {count(shown.nodes, 'node')})" if shown.workers else ""
    whose = f" of {shown.user}" if shown.user not in ("", user_name()) else ""
    where = f", {shown.folder}" if shown.folder else ""
    return f"{f'{cost}; ' if cost else ''}stop {shown.name} {shown.id}{whose}{size}{where}?"


def _is_confirmed(question: str) -> bool:
    question = f"{question} [y/N] "
    print(printable(question), end="", file=sys.stderr, flush=True)
    answer = ""
    with contextlib.suppress(KeyboardInterrupt):  # it is a no
        answer = sys.stdin.readline()
    if not answer.endswith("\n"):  # Ctrl-C or Ctrl-D: what is said next begins a line
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def _outcome(shown: RunSummary) -> str:
    if shown.state == LOST:
        return f"lost; {shown.why}"
    return f"{shown.outcome}: {shown.why}"


# What leaves the run going on.


def restart(run: RunReader, arguments: Namespace) -> int:
    """Begin another attempt, and return 0 when its workers run. Raises NotDoneError, ConfigError and ClusterError."""
    seconds = 0.0 if arguments.now else flag_values.seconds(arguments.grace)
    return _change(run, RestartRun(by=requester(), save_seconds=seconds), arguments)


def resize(run: RunReader, arguments: Namespace) -> int:
    """Change the bounds of the number of nodes, and return 0 when as many as are there now take part.

    Raises NotDoneError, ConfigError and ClusterError.
    """
    try:
        low, high = node_range(arguments.operand)
    except ValueError as error:
        raise ConfigError(str(error), hint="write `raylaunch resize 2:6`, or `raylaunch resize 4`") from None
    return _change(run, ResizeRun(by=requester(), min_nodes=low, max_nodes=high), arguments)


def drain(run: RunReader, arguments: Namespace) -> int:
    """Leave the host of a node for good, and return 0 when that is done.

    Raises NotDoneError, ConfigError and ClusterError.
    """
    return _change(run, DrainNode(by=requester(), node=arguments.operand), arguments)


def stacks(run: RunReader, arguments: Namespace) -> int:
    """Print what all workers are doing now. Raises NotDoneError, ConfigError and ClusterError."""
    named = flag_values.ranks(arguments.rank) if arguments.rank else ()
    if sum(map(len, named)) > _MOST_RANKS:
        raise ConfigError(f"`--rank` names more than {_MOST_RANKS} ranks", hint="without it, ranks are shown in groups")
    ranks = tuple(rank for each in named for rank in each)
    _await_driver(run)
    found: StacksCollected = _ask(run, GetStacks(ranks=ranks))
    missing = sorted(set(ranks) - {stack.rank for stack in found.stacks})
    if arguments.json:
        groups = [
            {"ranks": group.ranks, "doing": group.doing, "waits": group.waits, "note": group.note}
            | {"frames": group.frames}
            for group in found.groups
        ]
        texts = [{"rank": stack.rank, "state": stack.state, "text": stack.text} for stack in found.stacks]
        print(json.dumps({"attempt": found.attempt, "groups": groups, "stacks": texts}, indent=2))
    else:
        print("\n".join(printable(line) for line in run_tables.stack_lines(found)))
    if missing:
        raise NotDoneError(f"{run.entry.title} has no worker of rank {spans(missing)} now")
    return ExitCode.OK


def _await_driver(run: RunReader) -> None:
    """Look for the driver of a run that goes on. Raises NotDoneError if the run has ended."""
    known_runs.await_driver(run)
    if (shown := summary(run)).is_over:
        raise NotDoneError(f"{run.entry.title} has ended: {_outcome(shown)}")


def _ask(run: RunReader, request: ControlRequest) -> Any:
    """Return what the driver answers. Raises NotDoneError and ClusterError."""
    try:
        return run.ask(request)
    except RefusedError as error:
        raise NotDoneError(f"{run.entry.title}: {error}", hint=error.hint) from None
    except ControlError as error:
        raise ClusterError(f"the driver of {run.entry.title} cannot be asked: {error}") from None


def _change(run: RunReader, request: RestartRun | ResizeRun | DrainNode, arguments: Namespace) -> int:
    """Change a run, and return 0 when that is done. Ctrl-C ends only the waiting."""
    _await_driver(run)
    is_asked = _asks(arguments) and not getattr(arguments, "now", False)
    if is_asked and (cost := _cost_of(run, request)) and not _is_confirmed(f"{cost}; go on?"):
        say("nothing was changed")
        return ExitCode.INTERRUPTED
    accepted: Accepted = _ask(run, request)
    if not _goes_on(request, accepted):
        say(f"{run.entry.title}: {_what_follows(accepted)}")
    takeovers = run.takeovers
    try:
        while not (done := _done(run, request, accepted)):
            takeovers = _ask_again(run, request, accepted, takeovers)
            time.sleep(_LOOK_SECONDS)
        say(f"{run.entry.title}: {done}")
        if arguments.json:
            _print_json(run)
    except KeyboardInterrupt:
        say(f"{run.entry.title} goes on with what was requested; `raylaunch status {run.entry.id}` shows it")
        return ExitCode.INTERRUPTED
    finally:
        run.close()
    return ExitCode.OK


def _cost_of(run: RunReader, request: RestartRun | ResizeRun | DrainNode) -> str:
    """Return what a change costs, for a person; `""`: nothing, or the driver is going to refuse it.

    More nodes change nothing until they are there.
    """
    if isinstance(request, RestartRun):
        return _cost(run, request.save_seconds)
    run.refresh()
    status = run.status()
    if status is None:
        return ""
    if isinstance(request, ResizeRun):
        costs = request.max_nodes < len(status.roster)
    else:
        costs = run.entry.cluster != "" and _has(status, request.node)
    return _cost(run) if costs else ""


def _ask_again(run: RunReader, request: ControlRequest, accepted: Accepted, takeovers: int) -> int:
    """Ask the next driver if the last one died before anybody had kept the request.

    `takeovers`: how many there were when a driver was asked last. Returns how many there are now.
    """
    status = run.status()
    if takeovers == run.takeovers or status is None or not run.is_asked:
        return takeovers
    if status.attempt == accepted.attempt and status.phase in GOING_ON:
        with contextlib.suppress(NotDoneError, ClusterError):  # it knows of it, or has died too
            _ask(run, request)
    return run.takeovers


def _done(run: RunReader, request: RestartRun | ResizeRun | DrainNode, accepted: Accepted) -> str:
    """Return what was done, for a person; "" as long as it is not. Raises NotDoneError if the run ends before."""
    run.refresh()
    status = run.status()
    if status is not None and not run.is_asked and run.entry.is_detached and not run.is_gone:
        return ""  # another driver takes over
    if status is None or status.phase is Phase.DONE or not run.is_asked:
        raise NotDoneError(f"{run.entry.title} has ended before that was done: {_outcome(summary(run))}")
    if isinstance(request, DrainNode):
        return "" if _has(status, request.node) else f"no worker runs on {request.node} any more"
    has_started = accepted.phase is Phase.STARTING and status.phase is Phase.RUNNING
    if isinstance(request, ResizeRun) and (has_started or _goes_on(request, accepted)):
        more = "; further nodes are taken in as they come" if len(status.roster) < request.max_nodes else ""
        return f"{_what_runs(status)}{more}"
    if status.phase is Phase.RUNNING and status.attempt > accepted.attempt:
        return _what_runs(status)
    return ""


def _has(status: RunStatus, node: str) -> bool:
    """Return whether the run has a node of this name or address."""
    return any(node in (each.name, each.address) for each in status.nodes)


def _goes_on(request: ControlRequest, accepted: Accepted) -> bool:
    """Return whether nothing changes at once: there are not more nodes yet."""
    return isinstance(request, ResizeRun) and accepted.phase in (Phase.RUNNING, Phase.GATHERING)


def _what_follows(accepted: Accepted) -> str:
    following = f"attempt {accepted.attempt + 1} follows"
    match accepted.phase:
        case Phase.SAVING if not accepted.can_save:
            return f"{_CANNOT_SAVE}: steps since their last checkpoint are lost, then {following}: {accepted.status}"
        case Phase.SAVING:
            return f"the workers save at one step, then {following}: {accepted.status}"
        case Phase.STOPPING:
            return f"the workers end, then {following}: {accepted.status}"
        case _:
            return accepted.status


def _what_runs(status: RunStatus) -> str:
    if status.phase is not Phase.RUNNING:
        return f"{status.phase}: waits for {status.waits_for}"
    nodes, workers = count(len(status.roster), "node"), count(status.world_size, "worker")
    return f"attempt {status.attempt} runs with {workers} on {nodes}"


def requester() -> str:
    """Return who requests something, as messages of the run name it: `ada@login-1`."""
    return f"{user_name()}@{socket.gethostname()}"
