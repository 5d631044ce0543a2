"""Kills by the OOM killer are found in the kernel's counters and log, and no other kill is taken for one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited
from raylaunch.node.supervisor.process_failure import OomKills, cgroup_counter
from tests.node.harness import MessagePipe, Node, send_signal

FIRST_PIDS = "pid:[4026531836]"
HEADER = "3,1200,99,-;oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/job,task_memcg=/job,task=python,pid={pid},uid=0\n"
OF_A_CGROUP = (
    "3,1201,99,-;Memory cgroup out of memory: Killed process {pid} (python) total-vm:74652kB, anon-rss:64896kB, "
    "file-rss:6144kB, shmem-rss:1024kB, UID:0 pgtables:184kB oom_score_adj:0\n"
)
OF_ALL = "3,1202,99,-;Out of memory: Killed process {pid} (python) total-vm:9kB, anon-rss:2048kB, file-rss:0kB\n"


class Kernel:
    """Files as the kernel has them in /proc, the cgroup and its log."""

    def __init__(self, folder: Path, *, pids: str = FIRST_PIDS) -> None:
        self.proc = folder / "proc"
        self.group = folder / "group"
        self.log = folder / "kmsg"
        (self.proc / "self" / "ns").mkdir(parents=True)
        (self.proc / "self" / "ns" / "pid").symlink_to(pids)
        (self.proc / "self" / "cgroup").write_text("0::/job\n")
        (self.proc / "self" / "mountinfo").write_text(f"41 31 0:38 / {folder} rw - cgroup2 cgroup2 rw\n")
        (folder / "job").symlink_to(self.group)
        self.group.mkdir()
        self.log.write_text("")
        self.set_counters(machine=5, container=2)

    def set_counters(self, *, machine: int | None = None, container: int | None = None) -> None:
        if machine is not None:
            (self.proc / "vmstat").write_text(f"nr_free_pages 7\noom_kill {machine}\nunevictable_pgs 0\n")
        if container is not None:
            (self.group / "memory.events").write_text(f"max 70\noom 9\noom_kill {container}\noom_group_kill 0\n")

    def write_log(self, *records: str) -> None:
        with self.log.open("a") as file:
            file.writelines(records)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


@pytest.fixture
def kills(kernel: Kernel) -> Iterator[OomKills]:
    kills = OomKills(kernel.proc, kernel.log)
    yield kills
    kills.close()


def test_a_kill_that_the_log_names_is_out_of_memory(kernel: Kernel, kills: OomKills) -> None:
    """The evidence has its resident memory, and whose limit was reached."""
    kernel.set_counters(machine=6, container=3)
    kernel.write_log(HEADER.format(pid=77), OF_A_CGROUP.format(pid=77))
    assert kills.evidence(77) == "out of memory: the kernel killed it at its container's limit, 70 MiB resident"


def test_a_kill_for_lack_of_memory_of_the_machine(kernel: Kernel, kills: OomKills) -> None:
    """It is told apart from a kill at the limit of a container."""
    kernel.set_counters(machine=6)
    kernel.write_log(OF_ALL.format(pid=77))
    assert kills.evidence(77) == "out of memory: the kernel killed it when the machine had none left, 2 MiB resident"


def test_an_older_kernel_does_not_log_the_limit(kernel: Kernel, kills: OomKills) -> None:
    """It has the reason in another record."""
    kernel.set_counters(machine=6)
    kernel.write_log(OF_ALL.format(pid=77).replace("Out of memory: ", ""))
    assert kills.evidence(77) == "out of memory: the kernel killed it, 2 MiB resident"


def test_several_kills_are_found_in_one_log(kernel: Kernel, kills: OomKills) -> None:
    """A record is kept for a later question, and a question can be repeated."""
    kernel.set_counters(machine=7, container=4)
    kernel.write_log(OF_A_CGROUP.format(pid=77), OF_A_CGROUP.format(pid=78))
    found = [kills.evidence(pid) for pid in (78, 77, 78)]
    assert len(set(found)) == 1
    assert found[0].startswith("out of memory")


def test_a_kill_by_a_person_is_not_out_of_memory(kernel: Kernel, kills: OomKills) -> None:
    """If the counters did not change there is no evidence, whatever the log says."""
    kernel.write_log(OF_A_CGROUP.format(pid=77))
    assert kills.evidence(77) == ""
    assert kills.evidence(None) == ""


def test_a_kill_of_another_process_is_weaker_evidence(kernel: Kernel, kills: OomKills) -> None:
    """The counter rose, but the log names another process: the text only says that there were kills."""
    kernel.set_counters(machine=7, container=4)
    kernel.write_log(OF_A_CGROUP.format(pid=7), OF_A_CGROUP.format(pid=8))
    assert kills.evidence(77) == "the kernel killed 2 processes of this container for lack of memory meanwhile"
    assert kills.evidence(None) == kills.evidence(77)


def test_a_kill_in_another_container_is_no_evidence(kernel: Kernel, kills: OomKills) -> None:
    """The machine's counter rose, but not that of this container."""
    kernel.set_counters(machine=6)
    kernel.write_log(OF_A_CGROUP.format(pid=7))
    assert kills.evidence(77) == ""


def test_without_a_cgroup_counter_the_machine_counts(kernel: Kernel) -> None:
    """As on a machine without a memory controller."""
    (kernel.group / "memory.events").unlink()
    kills = OomKills(kernel.proc, kernel.log)
    assert kills.evidence(77) == ""
    kernel.set_counters(machine=6)
    assert kills.evidence(77) == "the kernel killed 1 process of this machine for lack of memory meanwhile"
    kills.close()


def test_kills_before_a_reset_do_not_count(kernel: Kernel, kills: OomKills) -> None:
    """Process ids are used again, so a reset forgets counters and records."""
    kernel.set_counters(machine=6, container=3)
    kernel.write_log(OF_A_CGROUP.format(pid=77))
    assert kills.evidence(77)
    kernel.write_log(OF_A_CGROUP.format(pid=78))
    kills.reset()
    kernel.set_counters(machine=7, container=4)
    assert "out of memory" not in kills.evidence(77)
    assert "out of memory" not in kills.evidence(78)
    assert "1 process " in kills.evidence(78)


def test_the_log_is_not_read_in_another_pid_namespace(tmp_path: Path) -> None:
    """The log has the machine's process ids, which are those of other processes here."""
    kernel = Kernel(tmp_path, pids="pid:[4026533000]")
    kills = OomKills(kernel.proc, kernel.log)
    kernel.set_counters(machine=6, container=3)
    kernel.write_log(OF_A_CGROUP.format(pid=77))
    assert kills.evidence(77) == "the kernel killed 1 process of this container for lack of memory meanwhile"


def test_where_the_log_cannot_be_read_the_counters_remain(kernel: Kernel) -> None:
    """As where `dmesg_restrict` is set."""
    kernel.log.unlink()
    kills = OomKills(kernel.proc, kernel.log)
    kernel.set_counters(machine=6, container=3)
    assert "1 process of this container" in kills.evidence(77)


def test_a_machine_without_any_of_it_has_no_evidence(tmp_path: Path) -> None:
    """As under another kernel or in a sandbox."""
    kills = OomKills(tmp_path / "proc", tmp_path / "kmsg")
    kills.reset()
    assert kills.evidence(77) == kills.evidence(None) == ""
    kills.close()


# Which file has the counter.

V1 = """31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
33 31 0:30 {root} {top}/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 {root} {top}/memory rw,relatime shared:9 master:1 - cgroup cgroup rw,memory
41 31 0:38 / {top}/unified rw,relatime - cgroup2 cgroup2 rw
"""


@pytest.mark.parametrize(
    ("root", "group", "place"),
    [
        ("/", "/job/7", "job/7"),
        ("/docker/abc", "/docker/abc", "."),
        ("/docker/abc", "/docker/abc/worker", "worker"),
        ("/docker/abc", "/elsewhere", "."),
    ],
)
def test_the_counter_of_cgroup_v1(tmp_path: Path, root: str, group: str, place: str) -> None:
    """It is in the memory hierarchy, which a container may see only in part. The cgroup v2 mount has none."""
    process = tmp_path / "self"
    process.mkdir()
    (process / "mountinfo").write_text(V1.format(root=root, top=tmp_path))
    (process / "cgroup").write_text(f"9:name=systemd:/\n4:memory:{group}\n3:cpu,cpuacct:/x\n0::/\n")
    folder = tmp_path / "memory" / place
    folder.mkdir(parents=True)
    assert cgroup_counter(process) is None
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    found = cgroup_counter(process)
    assert found is not None
    assert found.samefile(folder / "memory.oom_control")


def test_a_process_that_is_gone_has_no_counter(tmp_path: Path) -> None:
    """Its files in /proc are gone."""
    assert cgroup_counter(tmp_path / "self") is None


# With the kernel itself.

GREEDY = """
    import sys
    from pathlib import Path
    if len(sys.argv) > 1:
        (Path(sys.argv[1]) / "cgroup.procs").write_text("0")
    hoard = []
    while len(hoard) < 400:
        hoard.append(bytearray(1 << 20))
"""


@pytest.fixture
def cgroup(mark: str) -> Iterator[Path]:
    """A cgroup of 48 MiB."""
    folder, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not folder.is_dir():
        folder, limit = Path("/sys/fs/cgroup"), "memory.max"
    folder /= f"raylaunch-test-{mark}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(48 << 20))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no cgroup with a limit of memory can be made here: {error}")
    yield folder
    folder.rmdir()


def log_can_be_read() -> bool:
    kills = OomKills()
    readable = kills.reads_log
    kills.close()
    return readable


def test_a_worker_at_the_limit_is_out_of_memory(own_node: Node, cgroup: Path) -> None:
    """The failure of a worker that the kernel has killed says so."""
    if not log_can_be_read():
        pytest.skip("the kernel's log cannot be read here, or names other processes")
    outcome = own_node.run(own_node.script(GREEDY), str(cgroup))
    assert outcome.failure.what.startswith(
        "was killed by SIGKILL (out of memory: the kernel killed it at its container's limit, "
    )


def test_a_worker_that_a_person_kills_is_not(node: Node, pipe: MessagePipe, cgroup: Path) -> None:
    """Not even if it had little memory left."""
    script = node.script("""
        import os, sys, time
        from pathlib import Path
        (Path(sys.argv[1]) / "cgroup.procs").write_text("0")
        hoard = bytearray(8 << 20)
        say(os.getpid())
        time.sleep(3600)
    """)
    node.launch(script, str(cgroup))
    send_signal(int(pipe.read_lines()[0]))
    (failure,) = node.wait(WorkersExited).failures
    assert failure.what == "was killed by SIGKILL"


def test_a_real_cgroup_counts_a_kill(cgroup: Path, tmp_path: Path) -> None:
    """A process in a cgroup finds that another one in it was killed, without the log."""
    watcher = tmp_path / "watcher.py"
    greedy = tmp_path / "greedy.py"
    greedy.write_text(textwrap.dedent(GREEDY))
    watcher.write_text(
        textwrap.dedent(f"""
        import subprocess, sys
        from pathlib import Path
        from raylaunch.node.supervisor.process_failure import OomKills
        Path({str(cgroup / "cgroup.procs")!r}).write_text("0")
        kills = OomKills(log=Path("/nonexistent"))
        print(subprocess.run([sys.executable, {str(greedy)!r}], check=False).returncode)
        print(kills.evidence(None))
    """)
    )
    done = subprocess.run(
        [sys.executable, str(watcher)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        cwd=os.getcwd(),
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert done.stdout == "-9\nthe kernel killed 1 process of this container for lack of memory meanwhile\n", (
        done.stderr
    )
