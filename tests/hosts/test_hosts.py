"""The harness itself: what it says it does to hosts is what happens to them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.hosts.host import why_not
from tests.hosts.hosts import Hosts, inside

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=1)"


def reaches(hosts, host, other):
    """Whether a packet gets from one to the other and back: a closed port refuses."""
    knock = hosts.popen(host, [sys.executable, "-c", KNOCK, other.address], stderr=subprocess.PIPE)
    _, said = knock.communicate(timeout=100)
    return "refused" in said


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


def test_a_host_has_processes_a_name_and_shared_memory_of_its_own(hosts):
    _, one, other = hosts.hosts
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
    """Also where it is killed; the folder is removed by the next to make some."""
    if reason := why_not():
        pytest.skip(reason)
    text = """
        import sys, time
        from tests.hosts.hosts import Hosts
        hosts = Hosts(0)
        host = hosts._make_host()
        hosts.popen(host, ["sleep", "1000"])
        print(hosts.folder, host.init, hosts._switch.pid, flush=True)
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
    assert Path(folder).exists()
    Hosts(0).close()
    assert not Path(folder).exists()


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""
