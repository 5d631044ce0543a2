"""Whether a script may need torch's compiler, so that the fork server should import it ahead.

Every optimizer and `DistributedDataParallel()` import the compiler, which takes as long as torch itself. Scripts that
only communicate or only compute start sooner without it. The answer is a guess from the script's text, on the safe
side. Where it is wrong, the workers import the compiler themselves.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

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


def may_need_compiler(script: str) -> bool:
    """Return False if nothing in the script at this path, relative to the working directory, needs the compiler."""
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
