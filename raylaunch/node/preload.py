"""What the fork server does before it serves: it imports what all workers need, and gets ready to fork."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from raylaunch.node import messages, nameless, processes
from raylaunch.node.clean import what_forbids_forking
from raylaunch.worker import agent_store


def warm_up(begin: messages.Begin) -> messages.Ready:
    """Import what was asked for, and find out whether this process may fork."""
    with processes.only_young_collected():
        why = [word for module in begin.preload if (word := _import(module))]
    wanted = any(module.partition(".")[0] == "torch" for module in begin.preload)
    torch = "torch" in sys.modules or (not wanted and importlib.util.find_spec("torch") is not None)
    agent_store.mend_private_groups()
    method = begin.start_method
    if method == "forkserver" and (unclean := what_forbids_forking()):
        method = "spawn"
        why.append(f"workers start in fresh interpreters: after the preload, {unclean}")
    if method == "forkserver":
        nameless.ask_for_no_names()
    processes.get_ready_to_fork()
    return messages.Ready(start_method=method, why=tuple(why), torch=torch, pid=os.getpid())


def _import(module: str) -> str:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return f"cannot preload `{module}`: {type(error).__name__}: {error}"
    return ""
