"""Reads pickles of DCP and of our own, which have few classes, without running what another pickle could say.

Pickles of the script's own objects are not read in this way: what is in them only the script knows.
"""

from __future__ import annotations

import pickle
from enum import EnumMeta
from typing import IO, Any

import torch

_DCP = "torch.distributed.checkpoint."
_KNOWN = {
    f"{_DCP}filesystem": {"_StorageInfo"},
    f"{_DCP}metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    f"{_DCP}storage": {"WriteResult"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "raylaunch.core.machine.commits": {"Commit", "HeldCommit"},
    "raylaunch.worker.state.checkpoints.dcp_parts": {"RankRecord"},
    "raylaunch.worker.state.snapshots.snapshot": {"CommitItem"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}
"""By module: names. Those of torch are of all its versions."""


class _KnownUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _KNOWN.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration, as Python 3.11 pickles it."""
    if not isinstance(kind, EnumMeta):
        raise pickle.UnpicklingError(f"{kind} is no enumeration")
    return kind[name]


def load(file: IO[bytes]) -> Any:
    """Return the object in a file. Raises pickle.UnpicklingError where it has others, and what pickle raises."""
    return _KnownUnpickler(file).load()
