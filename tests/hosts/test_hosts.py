"""The hosts themselves: the faults that tests inflict do happen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.hosts.host import SLEPT, why_not
from tests.hosts.hosts import Hosts, inside

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

KNOCK = """
import socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 22), timeout=1)
except ConnectionRefusedError:
    print(time.monotonic() - began)
"""
HEAR = """
import socket
ear = socket.socket(type=socket.SOCK_DGRAM)
ear.bind(("", 2222))
print(flush=True)
print(ear.recv(100).decode())
"""
CALL = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 2222))"


def reaches(hosts, host, other):
    """Return whether packets get from one host to the other and back: then a closed port refuses."""
    return seconds_to(hosts, host, other) is not None


def seconds_to(hosts, host, other):
    """Return the round-trip time in seconds; None: packets are dropped."""
    command = [sys.executable, "-ISc", KNOCK, other.address]
    knock = hosts.popen(host, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    said, _ = knock.communicate(timeout=200)
    return float(said) if said else None


def test_a_cut_host_is_reached_by_nobody_until_it_is_healed(hosts):
    head, one, other = hosts.hosts
    assert reaches(hosts, one, other)
    hosts.cut(one)
    assert not reaches(hosts, one, other)
    assert not reaches(hosts, head, one)
    assert reaches(hosts, head, other)
    assert reaches(hosts, one, one)
    hosts.heal(one)
    wait_until(lambda: reaches(hosts, head, one), 100, "the host to be reached again")


def test_what_a_host_sends_to_another_is_lost_and_nothing_else(hosts):
    head, one, other = hosts.hosts
    hosts.cut(one, to=other)
    assert heard(hosts, other, (one, head)) == head.name
    assert heard(hosts, one, (other,)) == other.name
    assert heard(hosts, head, (one,)) == one.name
    hosts.heal(one)
    assert heard(hosts, other, (one, head)) == one.name


def heard(hosts, ear, callers):
    """Have hosts call another one in turn; return the first that is heard there."""
    hearing = hosts.popen(ear, [sys.executable, "-ISc", HEAR], stdout=subprocess.PIPE)
    assert hearing.stdout is not None
    hearing.stdout.readline()
    for caller in callers:
        hosts.run_in(caller, [sys.executable, "-ISc", CALL, ear.address, caller.name])
    said, _ = hearing.communicate(timeout=200)
    return said.strip()


def test_a_slow_host_is_reached_late_and_by_way_of_a_bad_link_not_at_all(hosts):
    head, one, other = hosts.hosts
    hosts.slow(one, 300)
    assert seconds_to(hosts, head, one) >= 0.6
    assert seconds_to(hosts, one, head) >= 0.6
    assert seconds_to(hosts, head, other) is not None
    hosts.slow(one, 0, loss=1.0)
    assert not reaches(hosts, head, one)
    hosts.quick(one)
    wait_until(lambda: reaches(hosts, head, one), 100, "the host to be reached again")


def test_a_host_has_processes_a_name_and_shared_memory_of_its_own(hosts):
    """And clocks as after a sleep, which only CLOCK_BOOTTIME counts."""
    _, one, other = hosts.hosts
    clocks = "from time import *; print(round(clock_gettime(CLOCK_BOOTTIME) - monotonic()))"
    assert int(hosts.run_in(one, [sys.executable, "-c", clocks])) >= SLEPT
    assert hosts.run_in(one, ["hostname"]) == f"{one.name}\n"
    hosts.run_in(one, ["touch", "/dev/shm/ours"])
    assert "ours" in hosts.shared_memory(one)
    assert "ours" not in hosts.shared_memory(other)
    assert not Path("/dev/shm/ours").exists()
    hosts.run_in(one, ["rm", "/dev/shm/ours"])
    sleep = inside(hosts.popen(one, ["sleep", "100"]))
    assert sleep in [process.pid for process in hosts.processes(one)]
    assert sleep not in [process.pid for process in hosts.processes(other)]
    os.kill(sleep, 9)


def test_a_paused_host_stands_still_with_all_its_processes(hosts):
    _, one, _ = hosts.hosts
    hosts.pause(one)
    wait_until(lambda: {state(process.pid) for process in hosts.processes(one)} == {"T"}, 100, "all to stand still")
    hosts.resume(one)
    wait_until(lambda: "T" not in {state(process.pid) for process in hosts.processes(one)}, 100, "it to go on")
    assert hosts.run_in(one, ["echo", "well"]) == "well\n"


def test_hosts_end_with_whoever_made_them(tmp_path):
    """Even if the process is killed; then the next one that makes hosts removes the folder."""
    if reason := why_not():
        pytest.skip(reason)
    text = """
        import sys, time
        from tests.hosts.hosts import Hosts
        hosts = Hosts(0)
        host = hosts._make_host()
        hosts.popen(host, ["sleep", "1000"])
        hosts.slow(host, 1)
        print(hosts.folder, host.init, hosts._switch.pid, host.bad_link.pid, flush=True)
        time.sleep(1000)
    """
    script = tmp_path / "owner.py"
    script.write_text("\n".join(line[8:] for line in text.splitlines()))
    repository = str(Path(__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": repository}, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    folder, *pids = owner.stdout.readline().split()
    owner.kill()
    owner.communicate()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 100, "the host to end")
    Hosts(0).close()
    wait_until(lambda: not Path(folder).exists(), 100, "the folder to be gone")  # others may remove it at the same time


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""
