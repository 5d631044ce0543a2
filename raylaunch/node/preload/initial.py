"""What the fork server does before it serves: import the modules that the job preloads, and prepare to fork."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys

from raylaunch.core.job.job import StartMethod
from raylaunch.node.linux import dns, processes
from raylaunch.node.preload.compiler_use import may_need_compiler
from raylaunch.node.preload.fork_safety import why_fork_is_unsafe
from raylaunch.node.protocol import messages
from raylaunch.node.protocol.forkserver_messages import Initialize
from raylaunch.worker import torch_internals
from raylaunch.worker.runtime import tcpstore_patch


def import_preloads(begin: Initialize) -> messages.Ready:
    """Import the modules, and return how workers can be started from this process.

    A module that cannot be imported is a warning in `Ready.why`. Where a fork would be unsafe after the imports,
    `Ready.start_method` is `spawn`, whatever the job wants.
    """
    atexit.register(torch_internals.release_default_arguments)  # before all others, so that workers run it last
    with processes.without_full_collections():
        wants_more = begin.preload_auto and "torch" in begin.preload
        is_needed = wants_more and (not begin.script or may_need_compiler(begin.script))
        more = (torch_internals.COMPILER,) if is_needed else ()
        why = [warning for module in (*begin.preload, *more) if (warning := _import(module))]
    wants_torch = any(module.partition(".")[0] == "torch" for module in begin.preload)
    torch = "torch" in sys.modules or (not wants_torch and importlib.util.find_spec("torch") is not None)
    tcpstore_patch.apply()
    method = begin.start_method
    if method == StartMethod.FORKSERVER and (unsafe := why_fork_is_unsafe()):
        method = StartMethod.SPAWN
        why.append(f"workers start in fresh interpreters: after the preload, {unsafe}")
    if method == StartMethod.FORKSERVER:
        dns.disable_reverse_lookups()
    processes.prepare_to_fork()
    return messages.Ready(start_method=method, why=tuple(why), torch=torch, pid=os.getpid())


def _import(module: str) -> str:
    """Import a module; return a warning if that fails, else `""`."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return f"cannot preload `{module}`: {type(error).__name__}: {error}"
    return ""
