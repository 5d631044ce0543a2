"""The scripts that `raylaunch slurm` writes, as people read them, and what it refuses."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from raylaunch.cli import main
from raylaunch.errors import ExitCode

ROOT = Path(__file__).parents[3]
ELASTIC = ("--elastic", "1:8", "--notice", "60", "conf/job.yaml", "nproc_per_node=gpu", "--", "-p", "spot")
CASES = {
    "slurm": ("conf/job.yaml",),
    "slurm_range": ("conf/job.yaml", "nnodes=1:4", "gpus_per_worker=1", "--", "-p", "gpu", "--comment=two words"),
    "slurm_elastic": ELASTIC,
}


@pytest.fixture(autouse=True)
def python(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.executable", "/env/bin/python")


@pytest.mark.parametrize("name", CASES)
def test_scripts(golden, capsys, name):
    """A person can read them, and shellcheck finds nothing."""
    assert main.main(["slurm", *CASES[name]]) == ExitCode.OK
    script = capsys.readouterr().out
    golden(name, script.removesuffix("\n"))
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, "-"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_documentation_shows_the_script(capsys):
    """As it is printed."""
    main.main(["slurm", "conf/job.yaml", "--", "-p", "gpu", "--time", "4:00:00"])
    assert f"```bash\n{capsys.readouterr().out}```" in (ROOT / "docs/schedulers.md").read_text()


def test_sbatch_reads_names_and_flags_as_they_are(capsys):
    """It takes a space for the end of a word, and a backslash for an escape in any quotes."""
    main.main(["slurm", "conf/job.yaml", "name=my job", "--", r'--comment=a \d "quote"'])
    directives = capsys.readouterr().out.split("\n\n")[0].splitlines()[1:]
    assert directives[0] == '#SBATCH "--job-name=my job"'
    assert directives[-1] == r'#SBATCH "--comment=a \\d \"quote\""'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "`slurm` needs a job file"),
        (("train.py",), "`slurm` needs a job file"),
        (("conf/job.yaml", "ray.address=none"), "`ray.address` is `none`, but a Slurm job starts"),
        (("--elastic", "1;8", "conf/job.yaml"), "`1;8` is neither N nor MIN:MAX"),
        (("--notice", "soon", "conf/job.yaml"), "`--notice` must be a number, but is `soon`"),
        (("conf/job.yaml", "--wrong"), "`--wrong` is not a flag of `slurm`"),
        (("--submit", "conf/job.yaml"), "there is no `sbatch` on this machine"),
    ],
)
def test_what_is_refused(monkeypatch, capsys, words, said):
    """Nothing is printed as a script then."""
    monkeypatch.setenv("PATH", "/nothing")
    assert main.main(["slurm", *words]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_a_script_is_submitted(monkeypatch, tmp_path, capfd):
    """By `sbatch`, which gets what would be printed, and whose exit code is the command's."""
    fake = tmp_path / "sbatch"
    fake.write_text("#!/bin/sh\nhead -2\nexit 7\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main.main(["slurm", "--submit", "conf/job.yaml"]) == 7
    assert capfd.readouterr().out == "#!/bin/bash\n#SBATCH --job-name=charlm\n"


@pytest.mark.parametrize(
    ("task", "done"),
    [
        ({}, ["scontrol requeue 7", "sbatch SCRIPT"]),
        (
            {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"},
            ["scontrol requeue 5_2", "sbatch --array=2 SCRIPT"],
        ),
    ],
)
def test_a_job_that_has_saved_goes_back_into_the_queue(capsys, tmp_path, task, done):
    """Of an array that is one task. Where Slurm refuses, a job like it is submitted."""
    assert main.main(["slurm", "conf/job.yaml"]) == ExitCode.OK
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    for name, code in (("srun", 75), ("scontrol", 1), ("sbatch", 0)):
        program = tmp_path / name
        say = "" if name == "srun" else f'echo {name} "$@"'
        program.write_text(f"#!/bin/sh\n{say}\nexit {code}\n")
        program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", **task}
    ran = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (75, "")
    assert ran.stdout.replace(str(script), "SCRIPT").splitlines() == done
