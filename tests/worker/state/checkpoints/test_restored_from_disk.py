"""`State.restore` from a folder on disk: what is damaged is passed over, and what a stranger has put there is refused."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from raylaunch.core.machine.commits import Commit  # noqa: E402
from raylaunch.worker import State  # noqa: E402
from raylaunch.worker.state.checkpoints import known_pickles  # noqa: E402
from raylaunch.worker.state.checkpoints.checkpoint_writer import write_checkpoint  # noqa: E402
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder  # noqa: E402
from raylaunch.worker.state.snapshots.snapshot import OBJECT, Snapshot  # noqa: E402
from tests.worker.state.checkpoints.test_checkpoint_writer import sealed_again  # noqa: E402
from tests.worker.state.checkpoints.test_resharded import buffer_with  # noqa: E402

FILES = [".metadata", "__0_0.distcp", "SHA256SUMS"]


@pytest.fixture
def folder(tmp_path):
    """A folder with the checkpoints after 7 and 8 steps."""
    found = DurableFolder(str(tmp_path / "checkpoints"), 600.0, 3)
    for steps in (7, 8):
        items = {f"{OBJECT}model": {"weight": torch.full((4, 4), float(steps))}, "values": {"steps": steps}}
        buffer = sealed_again(buffer_with(Snapshot(items, [f"{OBJECT}model"]), 0, 1), steps)
        assert buffer.header.held().commit == Commit(1, steps)
        write_checkpoint(found, [buffer], 100.0)
    return found


def restored(folder: DurableFolder) -> tuple[int, float]:
    """Return how many steps `State` restores, and what is in the model then."""
    model = torch.nn.Linear(4, 4, bias=False)
    state = State(model=model, durable=folder.path, random_state=False)
    done = state.restore()
    assert state.get("steps", 0) == done
    return done, float(model.weight.detach().mean())


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_with_one_byte_changed_is_named_and_passed_over(folder, file, capfd):
    path = Path(folder.path, "step-8", file)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    assert restored(folder) == (7, 7.0)
    told = capfd.readouterr().err
    assert f"step-8 is damaged: {'' if file == FILES[2] else file}" in told
    assert "these are incomplete or damaged: step-8; `State` restores step-7" in told


def test_nothing_is_restored_where_all_are_damaged(folder, capfd):
    for steps in (7, 8):
        Path(folder.path, f"step-{steps}", "__0_0.distcp").unlink()
    assert restored(folder)[0] == 0
    assert "these are incomplete or damaged: step-8, step-7; `State` begins anew" in capfd.readouterr().err


def test_checksums_are_those_of_sha256sum_and_checkpoints_without_any_are_restored(folder):
    path = Path(folder.path, "step-8")
    listed = dict(line.split("  ")[::-1] for line in (path / "SHA256SUMS").read_text().splitlines())
    assert listed == {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in FILES[:2]}
    (path / "SHA256SUMS").unlink()
    assert restored(folder) == (8, 8.0)


def make_other(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_metadata_that_is_no_file_is_no_checkpoint(folder, kind):
    """Nothing waits for the other end of a fifo."""
    make_other(Path(folder.path, "step-8", ".metadata"), kind)
    assert restored(folder) == (7, 7.0)


def test_a_checkpoint_that_somebody_has_moved_and_linked_is_restored(folder, tmp_path):
    shutil.move(os.path.join(folder.path, "step-8"), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", os.path.join(folder.path, "step-8"))
    assert restored(folder) == (8, 8.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("what", ["the folder", "a checkpoint", "a file"])
def test_what_a_stranger_has_put_there_is_refused(folder, what):
    """It would be code of the stranger that runs."""
    stranger = {"the folder": "", "a checkpoint": "step-8", "a file": "step-8/.metadata"}[what]
    path = Path(folder.path, stranger)
    path.parent.chmod(0o1777)
    os.chown(path, 12345, 12345)
    with pytest.raises(PermissionError, match=f"{path} belongs to another user"):
        restored(folder)


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_metadata_is_not_just_unpickled(folder, tmp_path):
    path = Path(folder.path, "step-8", ".metadata")
    path.write_bytes(pickle.dumps(Runs(str(tmp_path / "made"))))
    Path(folder.path, "step-8", "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match=r"step-8 cannot be read \(UnpicklingError: posix.mkdir does not belong there"):
        restored(folder)
    assert not (tmp_path / "made").exists()


class NoEnumeration:
    """Python 3.11 pickles a member of an enumeration as what `getattr` returns, which is more than that."""

    def __reduce__(self):
        return getattr, (Path, "unlink")


def test_only_members_of_enumerations_are_looked_up(tmp_path):
    (tmp_path / "x").write_bytes(pickle.dumps(NoEnumeration()))
    with open(tmp_path / "x", "rb") as file, pytest.raises(pickle.UnpicklingError):
        known_pickles.load(file)
