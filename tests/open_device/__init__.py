"""A device of torch that is not CUDA's, in C++, as extensions of torch add one: `torch.open_device`.

Its memory cannot be read by the host, its streams go on by themselves, and its random numbers are its own: see
`device.cpp`. `build` compiles it, `install` adds it to the torch of a process.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import torch

NAME, DEVICES = "open_device", 2
_SOURCE = Path(__file__).parent / "device.cpp"
_TORCH = Path(torch.__file__).parent


def why_not() -> str:
    """Return why it cannot be built here; "" if it can."""
    if shutil.which("c++") is None:
        return "there is no C++ compiler"
    if not (_TORCH / "include" / "ATen" / "ATen.h").exists():
        return "torch has no headers"
    return "" if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13) else "it is written for torch 2.13"


def build(folder: Path) -> Path:
    """Compile it into a folder, unless it is there. Return the library."""
    version = hashlib.sha256(f"{torch.__version__} {_TORCH}".encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    library = folder / f"{version}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            for other in folder.glob("*.so"):
                other.unlink()
            flags = ["-std=c++20", "-shared", "-fPIC", "-O0", "-Wall", "-DAT_PER_OPERATOR_HEADERS"]
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            libraries = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
            unfinished = library.with_suffix(".tmp")
            command = ["c++", *flags, abi, f"-I{_TORCH / 'include'}", "-o", str(unfinished), str(_SOURCE), *libraries]
            subprocess.run(command, check=True, timeout=1000)
            unfinished.rename(library)
    return library


def install(library: str) -> None:
    """Give this process the device, as importing an extension of torch does."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(library)
    operators, accelerator = torch.ops.open_device, torch.accelerator
    module = ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=operators.is_used,
        device_count=lambda: DEVICES,
        current_device=accelerator.current_device_index,
        device=lambda device: accelerator.device_index(getattr(device, "index", device)),
        set_device=accelerator.set_device_index,
        synchronize=accelerator.synchronize,
        current_stream=accelerator.current_stream,
        Stream=torch.Stream,
        Event=torch.Event,
        stream=lambda stream: stream,
        get_rng_state=operators.rng_state,
        set_rng_state=operators.set_rng_state,
        manual_seed=operators.manual_seed,
        manual_seed_all=operators.manual_seed,
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module(NAME, module)  # noqa: SLF001
    torch.utils.generate_methods_for_privateuse1_backend()
