"""Checks of the cluster and its nodes: each looks at one thing, and names the nodes where it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from raylaunch.cli.doctor.diagnosis import Diagnosis, Surroundings, error, ok, warning
from raylaunch.cli.doctor.node_report import NodeReport
from raylaunch.core.text import count, host_list

_GIB = 2**30
_LEAST_SHARED_MEMORY = _GIB
"""A DataLoader with several workers needs it; containers have 64 MiB unless they are told otherwise."""
_LEAST_TEMPORARY = _GIB
_LEAST_FILES = 4096
"""A rank has some files and connections to every other one; systems often allow 1,024 only."""
_LEAST_LOCKED = _GIB
"""InfiniBand locks the memory that it sends."""
_MOST_SKEW = 1.0
_MOST_NAME_SECONDS = 1.0
_MOST_NAMED = 5
_EQUAL = {
    "raylaunch": "install the same raylaunch on all nodes",
    "python": "use the same Python on all nodes; Ray refuses others",
    "ray": "install the same Ray on all nodes",
    "torch": "install the same torch on all nodes",
    "nccl": "install the same torch on all nodes: ranks with different NCCL may hang or crash when they first meet",
    "cuda": "install the same build of torch on all nodes",
}
"""What must be equal on all nodes, and what to do if it is not."""


def reachable(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether there is a cluster, and all its nodes answer."""
    if facts.cluster_problem:
        yield error("cluster", facts.cluster_problem, facts.cluster_fix or "see `ray status` on the head node")
        return
    hosts = len(facts.seen.answers) + len(facts.seen.silent)
    nodes = count(hosts + facts.seen.further, "node")
    if facts.seen.further:
        nodes += f" on {count(hosts, 'host')}"
    where = (
        f"the Ray cluster at {facts.seen.cluster} has {nodes}"
        if facts.seen.cluster
        else "there is none: this machine alone"
    )
    yield ok("cluster", where)
    for address, why in facts.seen.silent.items():
        fix = "log in there and see whether raylaunch can be imported, and whether the machine is overloaded"
        yield error("nodes", f"{address} gives no answer: {why}", fix)


def drained(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether nodes are about to go away."""
    if facts.seen.draining:
        fix = "they take no new work; wait for others, or ask for fewer nodes"
        yield warning("draining", f"being drained: {host_list(facts.seen.draining)}", fix)


def token(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether the cluster lets anybody in."""
    if facts.seen.cluster and facts.seen.has_token:
        yield ok("token", "the cluster is asked with a token")
    elif facts.seen.cluster:
        fix = "start the cluster with RAY_AUTH_MODE=token (from Ray 2.52 on), or let no others into its network"
        yield warning("token", "whoever reaches the cluster may run programs on it: it needs no token", fix)


def versions(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether all nodes have the same versions, and torch."""
    if not facts.seen.answers:
        return
    lacking = [address for address, report in facts.seen.answers.items() if not report.versions.get("torch")]
    if lacking:
        fix = "install torch in the environment that started Ray"
        yield error("torch", f"not installed: {host_list(lacking)}", fix)
    wrong = False
    for key, fix in _EQUAL.items():
        groups = _groups(facts.seen.answers, lambda report, key=key: report.versions.get(key) or "none")  # type: ignore[misc]
        if len(groups) > 1 and not (key == "torch" and lacking and len(groups) == 2):  # noqa: PLR2004
            wrong = True
            yield error(key, f"different versions: {_grouped(groups)}", fix)
    drivers = _groups(facts.seen.answers, lambda report: report.versions.get("nvidia_driver") or "none")
    if len(drivers) > 1:
        fix = "all is well if CUDA works on each; `raylaunch check` tries it"
        yield warning("driver", f"different NVIDIA drivers: {_grouped(drivers)}", fix)
    if not wrong and not lacking:
        first = next(iter(facts.seen.answers.values())).versions
        yield ok("versions", ", ".join(f"{key} {first[key]}" for key in _EQUAL if first.get(key)))


def shared_memory(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether data loaders have room."""
    small = {
        address: f"{report.shared_memory / _GIB:.2g} GiB"
        for address, report in facts.seen.answers.items()
        if report.shared_memory is not None and report.shared_memory < _LEAST_SHARED_MEMORY
    }
    if small:
        fix = "start containers with `--shm-size=8g`; in Kubernetes mount an `emptyDir` with `medium: Memory` there"
        yield warning("shared memory", f"small (/dev/shm): {_with(small)}", fix)


def temporary_space(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether there is room for temporary files."""
    small = {
        address: f"{report.temporary / _GIB:.2g} GiB"
        for address, report in facts.seen.answers.items()
        if report.temporary is not None and report.temporary < _LEAST_TEMPORARY
    }
    if small:
        fix = "free some, or set TMPDIR to a larger file system before `ray start`"
        yield warning("temporary files", f"little is free: {_with(small)}", fix)


def limits(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether processes may open enough files, lock memory where InfiniBand needs it, and write no huge core files."""
    few = {
        address: str(report.open_files)
        for address, report in facts.seen.answers.items()
        if report.open_files is not None and report.open_files < _LEAST_FILES
    }
    if few:
        yield warning("open files", f"few allowed: {_with(few)}", "`ulimit -n 65536` before `ray start`")
    little = {
        address: f"{report.locked_memory // 1024} KiB"
        for address, report in facts.seen.answers.items()
        if report.has_infiniband and report.locked_memory is not None and report.locked_memory < _LEAST_LOCKED
    }
    if little:
        fix = "`ulimit -l unlimited` before `ray start`; containers need `--ulimit memlock=-1`"
        yield warning("locked memory", f"too little for InfiniBand: {_with(little)}", fix)
    answers = facts.seen.answers.items()
    if large := [address for address, report in answers if report.has_core_files and report.nvidia_gpus]:
        text = f"as large as the memory of a worker that crashes, buffers of `State` included: {host_list(large)}"
        yield warning("core files", text, "`ulimit -c 0` before `ray start`; containers need `--ulimit core=0`")


def clocks(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether the clocks agree: times in logs and certificates depend on it, but no decision of raylaunch."""
    wrong = {
        address: f"{ahead:+.1f} s"
        for address, (ahead, bound) in facts.seen.clocks.items()
        if abs(ahead) - bound > _MOST_SKEW
    }
    if wrong:
        yield warning("clocks", f"not as here: {_with(wrong)}", "let chrony or systemd-timesyncd run there")


def names(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether the names of addresses are found in time: torch looks them up as processes connect."""
    slow = {
        address: f"{report.name_seconds:.1f} s"
        for address, report in facts.seen.answers.items()
        if report.name_seconds > _MOST_NAME_SECONDS
    }
    if slow:
        fix = "mend its name server (/etc/resolv.conf), or name the addresses of all nodes in /etc/hosts"
        yield warning("DNS", f"slow to find the name of its own address: {_with(slow)}", fix)


def network(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether the nodes reach this machine, where the driver would be."""
    cut = {address: report.door_problem for address, report in facts.seen.answers.items() if report.door_problem}
    if cut:
        fix = "let the nodes connect to all ports of each other: nodes that cannot reach the driver take no part"
        yield error("network", f"this machine cannot be reached from {_with(cut)}", fix)
    elif len(facts.seen.answers) > 1:
        yield ok("network", "all nodes reach this machine; `raylaunch check` tries all pairs of ranks")


def gpus(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether the nodes' GPUs are free and healthy, and as many as Ray has counted: one may have been lost since."""
    busy = {
        address: count(report.gpu_processes, "program")
        for address, report in facts.seen.answers.items()
        if report.gpu_processes
    }
    if busy:
        fix = "`nvidia-smi` there names them; end those that are left over from earlier runs"
        yield warning("GPUs", f"in use: {_with(busy)}", fix)
    lost = {
        address: f"{report.nvidia_gpus} of {facts.seen.gpus[address]:g}"
        for address, report in facts.seen.answers.items()
        if 0 < report.nvidia_gpus < facts.seen.gpus.get(address, 0)
    }
    if lost:
        fix = "see `nvidia-smi` and `dmesg | grep Xid` there; `ray stop` and `ray start` count them anew"
        yield error("GPUs", f"fewer than Ray counts: {_with(lost)}", fix)
    answers = facts.seen.answers.items()
    fix = "drain these nodes, and reset the GPUs (`nvidia-smi --gpu-reset`) or restart the machines"
    faults = {address: "; ".join(report.gpu_health.faults) for address, report in answers if report.gpu_health.faults}
    if faults:
        yield error("GPUs", f"faulty: {_with(faults)}", fix)
    logged = {address: "; ".join(report.logged_gpu_faults) for address, report in answers if report.logged_gpu_faults}
    if logged:
        yield warning("GPUs", f"in the kernel's log since it was started: {_with(logged)}", f"unless it is done: {fix}")
    held = {
        address: "; ".join(report.gpu_health.slowdowns) for address, report in answers if report.gpu_health.slowdowns
    }
    if held:
        fix = "look after cooling and power there: all ranks wait for the slowest GPU; `nvidia-smi -q -d PERFORMANCE`"
        yield warning("GPUs", f"slowed down: {_with(held)}", fix)
    if slow := [address for address, report in answers if report.gpu_health.is_not_persistent]:
        fix = "`nvidia-smi -pm 1` there, or let nvidia-persistenced run: else each attempt waits 1 to 3 s for a GPU"
        yield warning("GPUs", f"persistence mode is off: {host_list(slow)}", fix)


CHECKS: tuple[Callable[[Surroundings], Iterator[Diagnosis]], ...] = (
    reachable,
    drained,
    token,
    versions,
    network,
    shared_memory,
    temporary_space,
    limits,
    clocks,
    names,
    gpus,
)


def _groups(reports: Mapping[str, NodeReport], key: Callable[[NodeReport], str]) -> dict[str, list[str]]:
    """Return the addresses by what they have, the most frequent first."""
    found: dict[str, list[str]] = {}
    for address, report in reports.items():
        found.setdefault(key(report), []).append(address)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _grouped(groups: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} on {host_list(addresses)}" for value, addresses in groups.items())


def _with(values: Mapping[str, str]) -> str:
    """Return addresses, each with its value."""
    texts = [f"{address} ({value})" for address, value in values.items()]
    more = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
