"""Pickles values with their large buffers apart (pickle protocol 5), so that arrays and tensors are not copied.

Tensors on the CPU are buffers, too, though torch itself pickles them into the stream.
"""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import cloudpickle

from raylaunch.worker_group.rank.frames import Buffer

_LARGE = 4096
"""Bytes from which on a tensor is a buffer of its own."""
_Load = Callable[[Any], object]
_load: ContextVar[_Load] = ContextVar("load")


def packed(value: object, identify: Callable[[object], Any] = lambda _: None) -> list[Buffer]:
    """Return the pickle of a value, and its buffers. `identify`: names an object that is sent otherwise, or is None.

    Raises what pickle does.
    """
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        _Packer(file, buffers, identify).dump(value)
        return [file.getvalue(), *(buffer.raw() for buffer in buffers)]


def ref_types() -> tuple[type, ...]:
    """Return the type of references to objects of Ray's; where nobody has imported Ray, there are none."""
    kind = getattr(sys.modules.get("ray"), "ObjectRef", None)
    return () if kind is None else (kind,)


def refuse_ref(obj: object) -> None:
    """Raise TypeError for an ObjectRef: an `identify` for values in which none can be sent."""
    if isinstance(obj, ref_types()):
        raise TypeError("an ObjectRef inside of a part of `scatter` or of an object of Ray's: fetch it, by `ray.get`")


def unpacked(parts: Sequence[Buffer], load: _Load | None = None) -> Any:
    """Return the value. `load`: returns the object of a name that `identify` gave."""
    token = _load.set(load) if load is not None else None
    try:
        return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301
    finally:
        if token is not None:
            _load.reset(token)


def split(parts: Sequence[Buffer], lengths: Sequence[int]) -> list[Sequence[Buffer]]:
    """Return as many parts of each value as `lengths` says."""
    found, first = [], 0
    for length in lengths:
        found.append(parts[first : first + length])
        first += length
    return found


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], identify: Callable[[object], Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._identify = identify
        self._tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        self._iterator = getattr(sys.modules.get("ray.data"), "DataIterator", ())

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled. It is called for all but the plainest, before all else."""
        if (name := self._identify(obj)) is not None:
            return _named, (name,)
        if self._tensor is not None and type(obj) is self._tensor and _is_plain(obj):
            flat = obj.detach().reshape(-1).view(sys.modules["torch"].uint8)
            return _tensor, (pickle.PickleBuffer(flat.numpy()), obj.dtype, tuple(obj.shape))
        if self._iterator and isinstance(obj, self._iterator):
            context = sys.modules["ray"].get_runtime_context()
            return _data_iterator, (context.gcs_address, context.namespace, cloudpickle.dumps(obj))
        return super().reducer_override(obj)


def _data_iterator(address: str, namespace: str, pickled: bytes) -> Any:
    """Return an iterator of Ray Data, which reads in a process that is connected to Ray."""
    import ray  # noqa: PLC0415

    if not ray.is_initialized():
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    return pickle.loads(pickled)  # noqa: S301


def _named(name: Any) -> object:
    return _load.get()(name)


def _is_plain(tensor: Any) -> bool:
    """Return whether all of a tensor are the bytes at one place of this machine's memory."""
    return bool(
        tensor.device.type == "cpu"
        and str(tensor.layout) == "torch.strided"
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and tensor.numel() * tensor.element_size() >= _LARGE
    )


def _tensor(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch  # noqa: PLC0415

    with memoryview(buffer) as view, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about memory that is read-only, as Ray's store is
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        return (flat.clone() if view.readonly else flat).view(dtype).reshape(shape)
