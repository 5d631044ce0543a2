"""What the fork server does before it serves: import the modules that the job preloads, and prepare to fork."""

from __future__ import annotations

import ast
import atexit
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from raylaunch.core.job.job import StartMethod
from raylaunch.node.linux import dns, processes
from raylaunch.node.preload.fork_safety import asks_nvml, why_fork_is_unsafe
from raylaunch.node.protocol import node_status
from raylaunch.node.protocol.forkserver_messages import Initialize
from raylaunch.worker import torch_internals
from raylaunch.worker.runtime import staleness, tcpstore_patch

_HARMLESS = sys.stdlib_module_names | {"torch", "numpy", "raylaunch"}
"""Top-level modules that do not import the compiler by being imported."""
_USES = frozenset({
    *("optim", "DistributedDataParallel", "fully_shard", "FullyShardedDataParallel"),
    *("compile", "compiler", "export", "func", "vmap", "_dynamo"),
    *("import_module", "__import__", "exec", "runpy", "*"),
})  # fmt: skip
"""Names of torch that import the compiler when they are used, and ways to import what the text does not name.

Tried one by one with torch 2.13. What imports the compiler is to make an optimizer or a DDP model, `torch.compile` and
`torch.func`. What does not is to use layers, autograd, `torch.save`, data loaders, gradient clipping and collectives,
and to import checkpoints, DTensor, FSDP, TorchScript and profilers.
"""
_MOST_BYTES = 1_000_000
_STATE_MODULES = ("raylaunch.worker.state.elastic_state", "raylaunch.worker.survivors.elastic_function")
"""What a worker would import for `State` and `elastic`, which takes 30 ms, with all that they import."""


def import_ahead(begin: Initialize) -> node_status.Ready:
    """Import what the job preloads and, if the script may use them, the modules of `State` and `elastic`.

    Returns how workers can be started from this process.
    """
    if begin.start_method == StartMethod.FORKSERVER and _may_use_state(begin.script):
        for module in _STATE_MODULES:
            importlib.import_module(module)
    ready = _import_preloads(begin)
    staleness.note_preloaded()
    return ready


def _may_use_state(script: str) -> bool:
    """Return whether a script names this package; True if it cannot be read, or workers run something else."""
    try:
        return not script or b"raylaunch" in Path(script).read_bytes()
    except OSError:
        return True


def _import_preloads(begin: Initialize) -> node_status.Ready:
    """Import the modules, and return how workers can be started from this process.

    A module that cannot be imported is a warning in `Ready.why`. Where a fork would be unsafe after the imports,
    `Ready.start_method` is `spawn`, whatever the job wants.
    """
    atexit.register(torch_internals.release_default_arguments)  # before all others, so that workers run it last
    with processes.without_full_collections(), asks_nvml():
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
    return node_status.Ready(start_method=method, why=tuple(why), torch=torch, pid=os.getpid())


def _import(module: str) -> str:
    """Import a module; return a warning if that fails, else `""`."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return f"cannot preload `{module}`: {type(error).__name__}: {error}"
    return ""


def may_need_compiler(script: str) -> bool:
    """Return False if nothing in the script at this path, relative to the working directory, needs torch's compiler.

    Every optimizer and `DistributedDataParallel()` import the compiler, which takes as long as torch itself. Scripts
    that only communicate or only compute start sooner without it. The answer is a guess from the script's text, on the
    safe side. Where it is wrong, the workers import the compiler themselves.
    """
    path = Path(script)
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return True
        source = path.read_bytes()
        return any(_is_use(name) for node in ast.walk(ast.parse(source)) for name in _names(node))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # what is wrong, workers say
        return True


def _is_use(name: str) -> bool:
    return not _USES.isdisjoint(name.split("."))


def _names(node: ast.AST) -> Iterator[str]:
    """Yield what a node names. A module that is not known to be harmless counts as one that imports anything."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Import(names=aliases):
            for alias in aliases:
                yield alias.name if alias.name.partition(".")[0] in _HARMLESS else "*"
        case ast.ImportFrom(module=module, names=aliases, level=level):
            yield module if module and not level and module.partition(".")[0] in _HARMLESS else "*"
            yield from (alias.name for alias in aliases)
        case _:
            pass
