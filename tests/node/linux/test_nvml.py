"""What is asked of NVIDIA's driver, with a stub in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raylaunch.node.linux import nvml
from raylaunch.node.linux.nvml import Use
from tests.cuda_stubs import Stubs

GIB = 2**30


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of two GPUs."""
    if why := Stubs.why_not():
        pytest.skip(why)
    Stubs.build(tmp_path, gpus=2)
    monkeypatch.setattr(nvml, "_NVML", str(tmp_path / "libnvidia-ml.so.1"))


def test_gpus_are_counted_without_nvml(monkeypatch):
    """Where its library is missing, by the files of the devices."""
    monkeypatch.setattr(nvml, "_NVML", "libno-such-library.so")
    monkeypatch.setattr(os, "listdir", lambda _: ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"])
    assert nvml.gpus() == 3


def test_grave_faults_of_gpus_in_the_kernel_s_log(tmp_path):
    """Each once. Xid 13 and 31 are the program's own mistakes."""
    lines = (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:5e:00): 13, pid=7",
    )
    (tmp_path / "kmsg").write_text("".join(f"6,{at},5,-;{line}\n" for at, line in enumerate((*lines, *lines))))
    found = nvml.logged_faults(str(tmp_path / "kmsg"))
    assert found == ("Xid 79 at 0000:3b:00: the GPU has fallen off the bus",)
    assert nvml.logged_faults(str(tmp_path / "none")) == ()


def test_only_faults_since_a_time_are_evidence(tmp_path):
    """The kernel's log has microseconds."""
    line = "NVRM: Xid (PCI:0000:3b:00): {code}, pid=1"
    records = (f"6,{code},{at},-;{line.format(code=code)}\n" for code, at in ((48, 9_999_999), (79, 10_000_000)))
    (tmp_path / "kmsg").write_text("".join(records))
    found = nvml.logged_faults(str(tmp_path / "kmsg"), since=10.0)
    assert found == ("Xid 79 at 0000:3b:00: the GPU has fallen off the bus",)


@pytest.mark.usefixtures("stub")
def test_what_is_wrong_with_gpus(monkeypatch):
    """Only of those that are named. A GPU that has reached its limit of power is sound."""
    monkeypatch.setattr(nvml, "logged_faults", lambda since: (f"logged since {since:g}",))
    uuids = [f"GPU-00000000-0000-0000-0000-{index:012}" for index in range(2)]
    assert nvml.evidence(["0", "1"], 5.0) == ("logged since 5",)
    monkeypatch.setenv("RAYLAUNCH_FAULTY_GPUS", "1")
    assert nvml.evidence(["0"], 5.0)[0] == "GPU 0 had 2 memory errors that ECC could not correct"
    assert nvml.evidence(uuids[1:], 5.0) == (f"{uuids[1]} does not answer", "logged since 5")


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        (0x04, []),
        (0x48, ["is slowed down, because it is too hot"]),
        (0x20, ["is slowed down, because it is too hot"]),
        (0x88, ["is slowed down, because it gets too little power"]),
        (0x0C, ["is slowed down by its hardware"]),
    ],
)
def test_why_a_gpu_is_slowed_down(monkeypatch, reasons, told):
    monkeypatch.setattr(nvml, "_asked", lambda *_: reasons)
    assert nvml._slowdowns(None, None) == told  # noqa: SLF001


@pytest.mark.usefixtures("stub")
def test_how_much_of_gpus_is_used():
    """By index and by UUID; what is not there is left out."""
    uuid = "GPU-00000000-0000-0000-0000-000000000001"
    assert nvml.use(["0", uuid, "7", "GPU-x"]) == {"0": Use(GIB, 80 * GIB, 0), uuid: Use(2 * GIB, 80 * GIB, 10)}


def test_nothing_is_used_without_a_driver(monkeypatch):
    monkeypatch.setattr(nvml, "_NVML", "libno-such-library.so")
    assert nvml.use(["0"]) == {}
