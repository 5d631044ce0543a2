"""Signs of a cluster: which are believed, and which cluster is chosen."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from raylaunch.cluster.session import discovery
from raylaunch.cluster.session.discovery import Sign, choose, why_not_believed
from raylaunch.core.job.job import RayOptions
from raylaunch.errors import ClusterError

NOBODY = 4321
"""The id of a user that is neither root nor this one."""
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")


@pytest.fixture
def public() -> Iterator[Path]:
    """Return a folder that everyone can enter, as Ray's is; pytest's own are closed to other users."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


# The address file.


def address_file(public: Path) -> Path:
    (public / "ray").mkdir(mode=0o755)
    file = public / "ray" / "ray_current_cluster"
    file.write_text("10.0.0.1:6379\n")
    file.chmod(0o644)
    return file


def found(public: Path) -> Sign | None:
    return discovery.address_file({"TMPDIR": str(public)})


def test_the_file_is_where_ray_looks_for_it(monkeypatch, public):
    """Whatever the environment says."""
    from ray._common.utils import get_ray_address_file

    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.setenv(name, str(public / name))
        assert discovery.address_file(os.environ) is None
        file = Path(get_ray_address_file(None))
        file.parent.mkdir(parents=True)
        file.write_text("10.0.0.1:6379")
        assert discovery.address_file(os.environ) == Sign(where=f"the file {file}", address="10.0.0.1:6379")


def test_a_file_that_only_root_or_this_user_can_have_written(public):
    """/tmp may be sticky, and a folder open to everyone may lie in one that is not."""
    file = address_file(public)
    assert found(public) == Sign(where=f"the file {file}", address="10.0.0.1:6379")
    (public / "ray").chmod(0o777)
    public.chmod(0o700)
    assert why_not_believed(file) == ""


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_in_which_others_may_write(public, mode):
    """Ray 2.60 makes its folder with mode 0777."""
    file = address_file(public)
    file.parent.chmod(mode)
    sign = found(public)
    assert sign is not None
    assert sign.address == ""
    assert sign.why == f"other users may write to {file.parent}, so others may have written it"


def test_a_folder_in_which_others_may_write_without_a_file(public):
    """Ray 2.60 leaves it so: after `ray stop` it is a sign of nothing."""
    address_file(public).unlink()
    (public / "ray").chmod(0o777)
    assert found(public) is None
    (public / "ray" / "ray_current_cluster").symlink_to("gone")
    assert found(public) is None


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_file_of_a_cluster_that_is_gone(public, mode):
    """A head that was killed leaves its file: nothing listens at its port on this machine."""
    file = address_file(public)
    file.parent.chmod(mode)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        file.write_text(f"127.0.0.1:{port}")
        sign = found(public)
        assert sign is not None
        assert bool(sign.address) is (mode == 0o755)
    assert found(public) is None
    file.write_text("127.0.0.1:x")
    assert found(public) is not None


def test_what_others_have_put_in_place_of_the_file_is_not_opened_blindly(public):
    """A link to a file of this user's is not read; a pipe is not waited for."""
    file = address_file(public)
    file.parent.chmod(0o777)
    file.rename(public / "other")
    file.symlink_to(public / "other")
    sign = found(public)
    assert sign is not None
    assert sign.address == ""
    file.unlink()
    os.mkfifo(file, 0o644)
    assert found(public) is None


def test_a_file_that_others_may_write(public):
    file = address_file(public)
    file.chmod(0o646)
    assert why_not_believed(file) == f"other users may write to {file}"


@only_root
@pytest.mark.parametrize("which", ["ray", "ray/ray_current_cluster"])
def test_a_file_or_folder_of_another_user(public, which):
    """Also in a sticky folder."""
    file = address_file(public)
    public.chmod(0o1777)
    assert why_not_believed(file) == ""
    os.chown(public / which, NOBODY, NOBODY)
    assert why_not_believed(file) == f"{public / which} belongs to the user with id {NOBODY}"


@only_root
def test_links_are_followed_and_count_themselves(public):
    """A link of root's to a file of root's is believed, absolute or not; a link of another user's is not."""
    file = address_file(public)
    (public / "other").mkdir(mode=0o755)
    link = public / "other" / "link"
    for target in (str(file), "../ray/../ray/ray_current_cluster"):
        link.symlink_to(target)
        assert why_not_believed(link) == ""
        link.unlink()
    link.symlink_to(file)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    assert why_not_believed(link) == f"{link} belongs to the user with id {NOBODY}"
    link.unlink()
    file.parent.chmod(0o777)
    link.symlink_to(file)
    assert why_not_believed(link) == f"other users may write to {file.parent}"
    link.unlink()
    link.symlink_to("link")
    assert "too many symbolic links" in why_not_believed(link)


def test_no_address_in_the_file(public):
    """An empty file, no file, a file in place of the folder; and things that are not files are never opened."""
    file = address_file(public)
    file.write_text(" \n")
    assert found(public) is None
    file.unlink()
    assert found(public) is None
    os.mkfifo(file, 0o644)
    assert "not a regular file" in why_not_believed(file)
    file.unlink()
    file.parent.rmdir()
    file.parent.touch(mode=0o644)
    assert found(public) is None


# Processes.


def process(proc: Path, pid: int, name: str, *args: str, users: str = "", pids: str = "") -> None:
    """Write what /proc has about a process."""
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "comm").write_text(f"{name}\n")
    (folder / "cmdline").write_text("\0".join([f"/opt/ray/{name}", *args, ""]))
    me = os.geteuid()
    (folder / "status").write_text(f"Name:\t{name}\nUid:\t{users or f'{me} {me} {me} {me}'}\nNSpid:\t{pids or pid}\n")


def raylet(proc: Path, pid: int, address: str = "10.0.0.1:6379", **more: str) -> None:
    process(proc, pid, "raylet", f"--gcs-address={address}", f"--session-name=s-{address}", **more)


def test_raylets_of_root_and_of_this_user(tmp_path):
    """Each names the address of its cluster's head on its command line."""
    raylet(tmp_path, 12)
    raylet(tmp_path, 5, "10.0.0.2:6379", users="0 0 0 0")
    process(tmp_path, 13, "python", "--gcs-address=10.0.0.3:6379")
    (tmp_path / "self").mkdir()
    (tmp_path / "99").mkdir()  # a process that is gone in a moment
    assert discovery.running(tmp_path) == [
        Sign(where="the raylet with process id 5", address="10.0.0.2:6379", is_raylet=True),
        Sign(where="the raylet with process id 12", address="10.0.0.1:6379", is_raylet=True),
    ]


def test_raylets_of_one_cluster(tmp_path):
    """They count once, though each may know the cluster by another of its head's names."""
    raylet(tmp_path, 12)
    process(tmp_path, 13, "raylet", "--gcs-address=head:6379", "--session-name=s-10.0.0.1:6379")
    raylet(tmp_path, 14, "10.0.0.2:6379")
    assert [sign.address for sign in discovery.running(tmp_path)] == ["head:6379", "10.0.0.2:6379"]


@pytest.mark.parametrize(
    "more",
    [
        {"users": f"{NOBODY} {NOBODY} {NOBODY} {NOBODY}"},
        {"users": f"{NOBODY} 0 0 0"},  # started from a set-user-ID program
        {"users": f"0 0 {NOBODY} 0"},
        {"pids": "12 3"},  # in a container
    ],
)
def test_raylets_that_are_not_believed(tmp_path, more):
    raylet(tmp_path, 12, **more)
    assert discovery.running(tmp_path) == []


def test_a_head_without_a_raylet(tmp_path):
    """A driver cannot use it. That of `ray.init()` has port 0, and its raylet follows."""
    raylet(tmp_path, 12)
    process(tmp_path, 11, "gcs_server", "--gcs_server_port=6379", "--session-name=s-10.0.0.1:6379")
    process(tmp_path, 21, "gcs_server", "--gcs_server_port=0", "--session-name=new")
    assert [sign.where for sign in discovery.running(tmp_path)] == ["the raylet with process id 12"]
    process(tmp_path, 31, "gcs_server", "--gcs_server_port=6380", "--session-name=old")
    *_, sign = discovery.running(tmp_path)
    assert sign.where == "the gcs_server with process id 31"
    assert sign.why == "no raylet of its cluster runs on this machine"


def test_the_processes_of_this_machine():
    """Whatever runs here can be read."""
    for sign in discovery.running():
        assert sign.address or sign.why


# All signs.


@pytest.mark.parametrize(
    "name",
    ["KUBERAY_GEN_RAY_START_CMD", "FQ_RAY_IP", "RAY_DASHBOARD_ADDRESS", "RAY_API_SERVER_ADDRESS"],
)
def test_variables_that_are_signs(tmp_path, name):
    """KubeRay's, and those for the jobs API."""
    environ = {"TMPDIR": str(tmp_path), name: "x"}
    (sign,) = discovery.signs(environ, tmp_path)
    assert sign.where == f"the variable {name}"
    assert not discovery.is_alone(RayOptions(), environ, tmp_path)
    assert discovery.is_alone(RayOptions(), environ | {name: ""}, tmp_path)


@pytest.mark.parametrize(
    ("address", "variable", "alone"),
    [
        ("auto", None, True),
        ("auto", "", True),
        ("auto", "auto", True),
        ("auto", "local", False),
        ("auto", "10.0.0.1:6379", False),
        ("none", "10.0.0.1:6379", True),
        ("local", None, False),
        ("10.0.0.1:6379", None, False),
    ],
)
def test_the_address_of_a_cluster(tmp_path, address, variable, alone):
    """`ray.address` first, then RAY_ADDRESS."""
    environ = {"TMPDIR": str(tmp_path)} | ({} if variable is None else {"RAY_ADDRESS": variable})
    assert discovery.is_alone(RayOptions(address=address), environ, tmp_path) is alone


def test_a_raylet_is_a_sign(tmp_path):
    raylet(tmp_path, 12)
    assert not discovery.is_alone(RayOptions(), {"TMPDIR": str(tmp_path)}, tmp_path)


def test_a_ray_that_another_thread_still_imports_is_not_used(tmp_path, monkeypatch):
    """As one that was to list the cluster's runs, and took too long."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert discovery.is_alone(RayOptions(), {"TMPDIR": str(tmp_path)}, tmp_path)


# Which cluster.

UP = {"10.0.0.1:6379": {}, "10.0.0.2:6379": {}, "127.0.0.1:5000": {"ray_init_cluster": True}}


def probe(address: str) -> dict[str, object]:
    if address not in UP:
        raise ClusterError(f"no Ray cluster at {address}: Connection refused", hint="look there")
    return UP[address]


def at(address: str, where: str = "a raylet") -> Sign:
    return Sign(where=where, address=address, is_raylet=where == "a raylet")


def a_file(address: str) -> Sign:
    return at(address, "a file")


ONE, TWO, OWN, GONE = "10.0.0.1:6379", "10.0.0.2:6379", "127.0.0.1:5000", "10.0.0.9:6379"
UNBELIEVED = Sign(where="the file F", why="others may have written it")


@pytest.mark.parametrize(
    ("signs", "address"),
    [
        ([], ""),
        ([at(ONE)], ONE),
        ([at(ONE), at(ONE)], ONE),
        ([at(ONE), at(OWN)], ONE),
        ([at(OWN)], ""),
        ([at(ONE), at(GONE)], ONE),
        ([a_file(ONE)], ONE),
        ([at(ONE), a_file(TWO)], ONE),
        ([at(ONE), at(TWO), a_file(TWO)], TWO),
        ([at(ONE), UNBELIEVED], ONE),
        ([at(OWN), a_file(TWO)], TWO),
        ([at(OWN), a_file(OWN)], ""),
    ],
)
def test_the_cluster_that_is_chosen(signs, address):
    """That of a raylet on this machine; the file decides between several. A Ray of `ray.init()` does not count."""
    assert choose(signs, probe) == address


@pytest.mark.parametrize(
    ("signs", "words"),
    [
        ([at(GONE)], f"no Ray cluster at {GONE}: Connection refused (its address is from a raylet)"),
        ([at(OWN), at(GONE)], f"no Ray cluster at {GONE}"),
        ([a_file(GONE)], "(its address is from a file)"),
        ([at(ONE), at(TWO)], f"several Ray clusters run on this machine, at {ONE} and {TWO}"),
        ([at(ONE), at(TWO), a_file(GONE)], "several Ray clusters"),
        ([UNBELIEVED], "a sign of a Ray cluster that cannot be used: the file F: others may have written it"),
        ([at(OWN), UNBELIEVED], "the file F"),
    ],
)
def test_signs_of_a_cluster_that_cannot_be_used(signs, words):
    """The error says where the sign is, why it cannot be used, and what to do."""
    with pytest.raises(ClusterError) as error:
        choose(signs, probe)
    assert words in error.value.message
    assert "RAY_ADDRESS" in error.value.hint or "`ray.address: none`" in error.value.hint
