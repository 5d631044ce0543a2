"""The four ways into the user's code, each as the interpreter itself would go."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import os
import pickle
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from string import Template
from typing import Any

from raylaunch.worker.spec import WorkerSpec

NO_GROUP = "none"
"""The backend of functions that make their process group themselves, or want none."""


class CannotBeginError(Exception):
    """The user's code was not even entered. No restart can mend that."""


def forget_start() -> None:
    """Take away the first entry of sys.path, which only served to find this package; the script's own comes there."""
    start = sys.path.pop(0)
    if start not in sys.path:
        sys.path.append(start)


def arguments(args: Sequence[Any], local_rank: int, *, pass_local_rank: bool) -> tuple[Any, ...]:
    """A worker's own: `${local_rank}` replaced as torchrun does (so `$$` is `$`), `--local-rank=N` before them."""
    mine = [Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg for arg in args]
    return (f"--local-rank={local_rank}", *mine) if pass_local_rank else tuple(mine)


def call(spec: WorkerSpec) -> object:
    """Run it. Only functions return something."""
    if spec.kind == "script":
        run_script(spec.target, spec.args)
        return None
    if spec.kind == "module":
        run_module(spec.target, spec.args)
        return None
    return run_function(spec)


def run_script(path: str, args: Sequence[Any]) -> None:
    """`python path args...`, for a file, or a folder or zip file that has a `__main__.py`."""
    _begin_argv(path, args)
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
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main = fresh_main()
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102


def run_module(name: str, args: Sequence[Any]) -> None:
    """`python -m name args...`."""
    _begin_argv("-m", args)
    sys.orig_argv.insert(3, name)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    _run_as_main(name, alter_argv=True)


def _begin_argv(first: str, args: Sequence[Any]) -> None:
    sys.argv = [first, *map(str, args)]
    sys.orig_argv = [sys.executable, "-u", *sys.argv]


def _run_as_main(name: str, *, alter_argv: bool) -> None:
    # What the interpreter itself calls for `-m`; the public `run_module` puts another `__main__` back afterwards,
    # which breaks pickling and what runs at exit.
    fresh_main()
    try:
        runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # noqa: SLF001
    except SystemExit as stop:
        if isinstance(stop.__context__, runpy._Error):  # type: ignore[attr-defined]  # noqa: SLF001
            raise CannotBeginError(str(stop.__context__)) from None  # there is no such module, or no `__main__`
        raise


def fresh_main() -> types.ModuleType:
    """A `__main__` as empty as the interpreter makes it."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    vars(main)["__annotations__"] = {}
    main.__spec__ = None
    sys.modules["__main__"] = main
    return main


def run_function(spec: WorkerSpec) -> object:
    """Join the process group, call the function, leave the group.

    The group is not left after an exception, since that would wait for peers who may be gone.
    """
    sys.argv = [spec.target]
    sys.path.insert(0, os.getcwd())
    fresh_main()
    function, args, kwargs = _unpickled(spec) if spec.kind == "pickle" else _imported(spec)
    if spec.backend == NO_GROUP:
        return function(*args, **kwargs)
    join_group(spec)
    value = function(*args, **kwargs)
    leave_group()
    return value


def call_with_rank(function: Callable[..., object], args: Sequence[Any]) -> None:
    """`torch.multiprocessing.spawn`'s way: the index comes first, Ctrl-C is no failure, and nothing is returned."""
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


def join_group(spec: WorkerSpec) -> None:
    """`init_process_group`: the backend that was named, else nccl where there are GPUs, else gloo."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    backend = spec.backend
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(spec.local_rank % torch.cuda.device_count())
    if not dist.is_backend_available(backend.split(":")[-1]):
        msg = f"this torch has no `{backend}` backend"
        raise CannotBeginError(msg)
    dist.init_process_group(backend)


def leave_group() -> None:
    """`destroy_process_group`, unless the function did it."""
    import torch.distributed as dist  # noqa: PLC0415

    if dist.is_initialized():
        dist.destroy_process_group()


def pickled(value: object) -> bytes:
    """Pickled for the driver: a value that cannot be pickled is a mistake of the caller's, said in words."""
    import cloudpickle  # noqa: PLC0415

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # noqa: BLE001
        if isinstance(value, BaseException):
            return b""
        msg = f"the function's result, a {type(value).__name__}, cannot be pickled: {error}"
        raise TypeError(msg) from None
