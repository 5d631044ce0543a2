"""The folders of the control groups that a process is in, of both versions (cgroups(7))."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from raylaunch.node.linux import processes


def folders(process: Path, controller: str, *, above: bool = False) -> Iterator[Path]:
    """Yield the folders of the groups of a process, given as `/proc/PID`; with `above`, each one's parents too.

    Groups of cgroup v1 with this controller come before groups of cgroup v2, which may lack the controller. Yields
    none where the files of /proc cannot be read.
    """
    try:
        groups = [line.split(":", 2) for line in processes.lines_of(process / "cgroup")]
        mounts = [line.split(" ") for line in processes.lines_of(process / "mountinfo")]
    except OSError:
        return
    for version in ("cgroup", "cgroup2"):
        for _, controllers, group in groups:
            if (controller in controllers.split(",")) if version == "cgroup" else not controllers:
                for root, mount_point in _mounts(mounts, version, controller):
                    own = _path_in_mount(root, mount_point, group)
                    yield own
                    if above:
                        yield from (parent for parent in own.parents if parent.is_relative_to(mount_point))


def _mounts(lines: list[list[str]], version: str, controller: str) -> Iterator[tuple[str, str]]:
    """Yield root and mount point of each mount of a cgroup version that has the controller."""
    for line in lines:
        kind, _, options = line[line.index("-") + 1 :][:3]
        if kind == version and (version == "cgroup2" or controller in options.split(",")):
            yield line[3], line[4]


def _path_in_mount(root: str, mount_point: str, group: str) -> Path:
    """Return the folder of a group in a mount that shows the hierarchy from `root` on.

    A group that is outside of `root` is taken for `root` itself.
    """
    try:
        return Path(mount_point) / PurePosixPath(group).relative_to(root)
    except ValueError:
        return Path(mount_point)
