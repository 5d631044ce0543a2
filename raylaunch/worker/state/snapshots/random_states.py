"""The states of a process's random number generators, in Python, NumPy, torch and the current device of torch."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from array import array
from typing import Any

from raylaunch.worker import cpython_internals
from raylaunch.worker.state.device_copies import device_modules

_NUMBER = "I"
"""In an `array`: what the state of the Mersenne Twister is made of, 32 bits."""
_TWISTER, _TWISTER_BYTES = "MT19937", 2500
"""NumPy's Mersenne Twister, and the size of its memory: 624 numbers, and which of them is the next."""

_State = tuple[Any, ...]

_known: dict[str, tuple[Any, _State]] = {}
"""By library: the memory of its generator, and its state then. Asking for the state takes long; few steps change it."""


def collect() -> dict[str, Any]:
    """Return the states of the generators that this process has, by library: as bytes, which are pickled fast."""
    found: dict[str, Any] = {"python": _python_state()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found["numpy"] = _numpy_state(numpy)
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = _bytes(torch.get_rng_state())
        for kind, module in device_modules(torch).items():
            if module.is_initialized():
                found[kind] = _bytes(module.get_rng_state())
    return found


def _python_state() -> _State:
    key = cpython_internals.random_memory()
    if (known := _known.get("python")) is not None and known[0] == key:
        return known[1]
    version, numbers, gauss = random.getstate()
    return _remember("python", key, (version, array(_NUMBER, numbers).tobytes(), gauss))


def _numpy_state(numpy: Any) -> _State:
    generator: Any = getattr(numpy, "get_bit_generator", lambda: None)()  # NumPy 1.24 and later
    is_twister = type(generator).__name__ == _TWISTER
    key = ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES) if is_twister else None
    if (known := _known.get("numpy")) is not None and known[0] == key:
        return known[1]
    if key is None:
        return _remember("numpy", None, (numpy.get_state(legacy=False),))  # a dict
    name, numbers, position, waits, gauss = numpy.get_state()
    # A second number of the normal distribution may wait to be drawn, which is not in this memory.
    return _remember("numpy", None if waits else key, (name, numbers.tobytes(), position, waits, gauss))


def _remember(library: str, key: Any, state: _State) -> _State:
    """Note the state of a generator. `key`: what changes whenever the state does; None: that is not known."""
    _known.pop(library, None)
    if key is not None:
        _known[library] = key, state
    return state


def restore(states: dict[str, Any]) -> None:
    """Set the generators to states that `collect` returned. A library that is not imported is left alone."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(array(_NUMBER, numbers)), gauss))
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy is not None and "numpy" in states:
        name, *more = states["numpy"]
        numpy.set_state((name, array(_NUMBER, more[0]), *more[1:]) if more else name)
    if torch is not None and "torch" in states:
        torch.set_rng_state(_tensor(torch, states["torch"]))
        for kind, module in device_modules(torch).items():
            if kind in states and module.is_available():
                module.set_rng_state(_tensor(torch, states[kind]))


def seed_from(states: dict[str, Any], rank: int) -> None:
    """Seed the generators for a rank that has no states yet: each from what `collect` returned on another rank.

    The same states and the same rank give the same seeds. A library that is not imported is left alone.
    """
    random.seed(_seed(states["python"], rank))
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy is not None and "numpy" in states:
        numpy.seed(_seed(states["numpy"], rank) % 2**32)
    if torch is not None and "torch" in states:
        torch.default_generator.manual_seed(_seed(states["torch"], rank))
        for kind, module in device_modules(torch).items():
            if kind in states and module.is_available():
                module.manual_seed(_seed(states[kind], rank))


def _seed(state: Any, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(b"%d " % rank + repr(state).encode()).digest()[:7], "big")


def _bytes(tensor: Any) -> bytes:
    """Return what is in a tensor of bytes on the CPU."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _tensor(torch: Any, state: bytes) -> Any:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
