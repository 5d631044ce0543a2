"""Calls the user's code: a script, a module, an importable function, or a pickled function object.

Scripts and modules are run as the interpreter itself runs `python train.py` and `python -m train` (`Modules/main.c` and
`Lib/runpy.py` of CPython), so that they find the same sys.argv, sys.path and `__main__`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import linecache
import os
import pickle
import pkgutil
import sys
import types
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, BinaryIO

from raylaunch.worker import cpython_internals
from raylaunch.worker.heartbeats import heartbeat_writer
from raylaunch.worker.runtime.process_setup import environment_default
from raylaunch.worker.runtime.spec import WorkerSpec

NO_PROCESS_GROUP = "none"
"""The `backend` of functions that make their process group themselves, or want none."""


class CannotBeginError(Exception):
    """The user's code cannot be found or entered. A restart would fail in the same way."""


def demote_bootstrap_path() -> None:
    """Move the first entry of sys.path, with which this program found its package, to the end of sys.path.

    The folder of the user's script takes its place later.
    """
    bootstrap = sys.path.pop(0)
    if bootstrap not in sys.path:
        sys.path.append(bootstrap)


def run(spec: WorkerSpec) -> object:
    """Run the user's code. Return what a function returned, and None for a script or a module."""
    if spec.kind == "script":
        run_script(spec.target, spec.args)
        return None
    if spec.kind == "module":
        run_module(spec.target, spec.args)
        return None
    return run_function(spec)


def run_script(path: str, args: Sequence[Any]) -> None:
    """Run `python path args...`; `path` is a file, or a folder or zip file with a `__main__.py`."""
    _set_argv(path, args)
    path = os.path.join(os.getcwd(), path)
    if pkgutil.get_importer(path) is not None:
        sys.path.insert(0, path)
        _run_as_main("__main__", alter_argv=False)
        return
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        msg = f"cannot read the script `{path}`: {error.strerror}"
        raise CannotBeginError(msg) from None
    if not cpython_internals.IS_SAFE_PATH:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main = _new_main_module()
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102


def run_module(name: str, args: Sequence[Any]) -> None:
    """Run `python -m name args...`."""
    _set_argv("-m", args)
    sys.orig_argv.insert(3, name)
    if not cpython_internals.IS_SAFE_PATH:
        sys.path.insert(0, os.getcwd())
    _run_as_main(name, alter_argv=True)


def _set_argv(first: str, args: Sequence[Any]) -> None:
    sys.argv = [first, *map(str, args)]
    # not `sys.executable`, from which Python 3.13 removes any `..` that is in the path by which it was started
    sys.orig_argv = [sys.orig_argv[0], "-u", *sys.argv]


def _run_as_main(name: str, *, alter_argv: bool) -> None:
    _new_main_module()
    try:
        cpython_internals.run_as_main(name, alter_argv=alter_argv)
    except cpython_internals.NoModuleToRunError as error:
        raise CannotBeginError(str(error)) from None


def _new_main_module() -> types.ModuleType:
    """Put a `__main__` into sys.modules that is as empty as a fresh interpreter's, and return it."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    vars(main)["__annotations__"] = {}
    main.__spec__ = None
    sys.modules["__main__"] = main
    return main


def run_function(spec: WorkerSpec) -> object:
    """Join the process group, call the function, leave the group, and return what the function returned.

    The group is not left after an exception: that would wait for peers that may be gone.
    """
    sys.argv = [spec.target]
    sys.path.insert(0, os.getcwd())
    _new_main_module()
    function, args, kwargs = _unpickled(spec) if spec.kind == "pickle" else _imported(spec)
    if spec.backend == NO_PROCESS_GROUP:
        return function(*args, **kwargs)
    _init_process_group(spec)
    value = function(*args, **kwargs)
    _destroy_process_group()
    return value


def call_with_rank(function: Callable[..., object], args: Sequence[Any]) -> None:
    """Call `function(RANK, *args)` as `torch.multiprocessing.spawn` does (`torch/multiprocessing/spawn.py`, `_wrap`).

    KeyboardInterrupt is no failure, and nothing is returned.
    """
    with contextlib.suppress(KeyboardInterrupt):
        function(int(os.environ["RANK"]), *args)


def _unpickled(spec: WorkerSpec) -> tuple[Callable[..., object], Sequence[Any], dict[str, Any]]:
    return pickle.loads(spec.payload)  # type: ignore[no-any-return]  # noqa: S301


def _imported(spec: WorkerSpec) -> tuple[Callable[..., object], Sequence[Any], dict[str, Any]]:
    module_name, _, name = spec.target.partition(":")
    value: Any = importlib.import_module(module_name)
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            msg = f"`{module_name}` has no `{name}`"
            raise CannotBeginError(msg) from None
    if not callable(value):
        msg = f"`{spec.target}` is not a function"
        raise CannotBeginError(msg)
    return value, spec.args, spec.kwargs


def _init_process_group(spec: WorkerSpec) -> None:
    """Call `init_process_group` with the backend of the specification, else the device's own: nccl for CUDA.

    It ends with a barrier. Otherwise a rank whose function runs no collective could leave the group while others still
    connect to it, and gloo would fail there (`TORCH_DIST_INIT_BARRIER`, torch/distributed/distributed_c10d.py). Workers
    that have stayed make their group without it, so beside them there is none.
    """
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    device = None
    if spec.gpus or spec.backend != "gloo":  # else its context would take memory of a GPU
        with contextlib.suppress(RuntimeError):  # from torch 2.6 where there is none
            device = torch.accelerator.current_accelerator()
    backend = spec.backend or ("nccl" if device is None else dist.get_default_backend_for_device(device))
    if not dist.is_backend_available(backend.split(":")[-1]):
        why = "" if spec.backend else ", which workers with GPUs get unless `backend` names another"
        msg = f"this torch has no `{backend}` backend{why}"
        raise CannotBeginError(msg)
    if device is not None:
        sees_own = os.environ["LOCAL_RANK"] == "0"  # with `virtual_local_rank`, or since it is the first
        torch.get_device_module(device).set_device(0 if sees_own else spec.gpus.start)
    is_beside_survivors = os.environ.get(heartbeat_writer.WITH_SURVIVORS_VARIABLE) == "1"
    with environment_default("TORCH_DIST_INIT_BARRIER", "0" if is_beside_survivors else "1"):
        dist.init_process_group(backend)


def _destroy_process_group() -> None:
    """Call `destroy_process_group`, unless the function did."""
    import torch.distributed as dist  # noqa: PLC0415

    if dist.is_initialized():
        dist.destroy_process_group()


def dump(value: object, file: BinaryIO) -> None:
    """Pickle a function's result or exception into a file. Raises TypeError if it cannot be pickled."""
    import cloudpickle  # noqa: PLC0415

    try:
        cloudpickle.dump(value, file)
    except Exception as error:  # noqa: BLE001
        msg = f"the function's result, a {type(value).__name__}, cannot be pickled: {error}"
        raise TypeError(msg) from None


def restored_code(make: Callable[..., CodeType], parts: tuple[Any, ...], filename: str, source: str) -> CodeType:
    """Return the code that `make(*parts)` makes, as code of this file, and let tracebacks show the source.

    It is of functions that were pickled by value. The process of the caller has the source: in a file that may not
    exist where workers run, or in a cell of a notebook. cloudpickle sends no source and, from 3.1.3 on, calls every
    file `<dynamic-code>`.
    """
    if source and filename not in linecache.cache:
        lines = source.splitlines(keepends=True)
        linecache.cache[filename] = (len(source), None, lines, filename)  # None: is not looked for in a file
    return make(*parts).replace(co_filename=filename)
