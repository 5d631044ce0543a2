"""The command line: torchrun's flags in both spellings, `PET_*` defaults, job files, and errors."""

from __future__ import annotations

import argparse
import shlex
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed.run import get_args_parser

from raylaunch.cli import main
from raylaunch.cli.args import parser, usage
from raylaunch.cli.args.flags import BY_NAME, FLAGS, TABLE, Group, matching_flags
from raylaunch.cli.config import load
from raylaunch.core.job.job import Entrypoint, Job, RayOptions
from raylaunch.errors import ConfigError, ExitCode


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Make a folder with a script and a job file, and an environment without settings."""
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "PYTHON_EXEC", *(flag.env_variable for flag in FLAGS)):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "x.py").touch()
    (tmp_path / "job.yaml").write_text("entrypoint: {script: x.py, args: [--lr, 1]}\nmax_restarts: 2\nshow: '1'\n")
    return tmp_path


def line(arguments, **variables):
    return parser.parse(shlex.split(arguments) if isinstance(arguments, str) else arguments, variables)


def job(arguments, **variables) -> Job:
    return load.load(line(arguments, **variables), variables)


def refusal(arguments, **variables) -> str:
    with pytest.raises(ConfigError) as caught:
        job(arguments, **variables)
    assert caught.value.exit_code is ExitCode.USAGE
    return str(caught.value)


SCRIPT = Job(entrypoint=Entrypoint(script="x.py"), show="raw")


# torchrun's own parser as the measure.


def torchruns_flags() -> list[argparse.Action]:
    return [action for action in get_args_parser()._actions if action.option_strings]  # noqa: SLF001


def test_every_flag_of_torchrun_is_in_the_table():
    """Each is there in both spellings, with its short form, with or without a value, and with its `PET_*` variable."""
    for action in torchruns_flags():
        for spelled in action.option_strings:
            if spelled.startswith("--"):
                (flag,) = matching_flags(spelled[2:])
                assert flag.name == action.dest.replace("_", "-")
                assert bool(flag.metavar) == (action.nargs != 0)
                assert flag.pet == (type(action).__name__ in ("env", "check_env"))
            else:
                assert parser.BY_SHORT[spelled[1:]].name == action.dest
    assert flag.env_variable.startswith("PET_")


def test_beginnings_that_torchrun_takes_stand_for_the_same_flag():
    """No flag of raylaunch makes a prefix of torchrun's ambiguous, and dashes and underscores are the same."""
    newer = {
        flag.name for group, flags in TABLE.items() if group not in (Group.OURS, Group.KEYS) for flag in flags
    }  # than this torch
    names = {action.dest.replace("_", "-") for action in torchruns_flags()} | newer
    seen = 0
    for name in names:
        for size in range(1, len(name)):
            beginning = name[:size]
            if [other for other in names if other.startswith(beginning)] == [name]:
                assert [flag.name for flag in matching_flags(beginning)] == [name]
                assert matching_flags(beginning.replace("-", "_")) == matching_flags(beginning)
                seen += 1
    assert seen > 100


def test_flags_of_keys_are_written_whole():
    """So a new key changes no command line that is in use, and `--gpus 2` is not `--gpus-per-worker 2`."""
    keys = set(TABLE[Group.KEYS])
    for flag in keys:
        for size in range(1, len(flag.name)):
            assert keys.isdisjoint(matching_flags(flag.name[:size])) or flag.name[:size] in BY_NAME
    assert [flag.name for flag in matching_flags("pl")] == ["plan"]
    assert "did you mean `--nproc-per-node`?" in refusal("--gpus 2 x.py")
    assert "did you mean `--hang-timeout`?" in refusal("--hang 9 x.py")


def test_every_key_of_a_job_file_is_a_flag():
    """Of this name, in both spellings, with its default; but for those that have keys of their own."""
    keys = {*Job.__dataclass_fields__} - {"entrypoint", "nodes", "ray"}
    for key in keys | {f"ray.{name}" for name in RayOptions.__dataclass_fields__}:
        (flag,) = matching_flags(key)
        assert flag.option == f"--{key.replace('_', '-')}"
        assert flag.setting == key
        assert flag.help


def test_arguments_mean_what_they_mean_to_torchrun():
    """torchrun's parser and raylaunch's find the same script, arguments and values."""
    for arguments in (
        "--nnodes=1:2 --nproc_per_node 3 -r3 -t 0:1,1:2 -m x.py --nnodes 7 -- -m",
        "--rdzv-id=abc --standalone --max-restarts 3 --role=a=b x.py",
        "--redirect=3 --no-py x.py -h --help",
        "-r=1 --tee=2 x.py x.py",
        "-mr 1 x.py",
        "--master_port 1 --max-restarts -1 x.py",
    ):
        theirs, ours = get_args_parser().parse_args(shlex.split(arguments)), line(arguments)
        assert ours.script.text == theirs.training_script
        assert list(ours.args) == theirs.training_script_args
        for given in ours.given:
            assert str(getattr(theirs, given.flag.name.replace("-", "_"))) == (given.text or "True")


# What belongs to whom.


@pytest.mark.parametrize(
    "args",
    [
        ["--r", "3"],
        ["--nnodes", "2"],
        ["--", "-h"],
        ["-"],
        ["${local_rank}", "${x}", "???", "null", ""],
        ["a b", "=", "é"],
    ],
)
def test_what_follows_the_script_is_untouched(args):
    """Arguments of the script are unchanged, whatever they look like."""
    assert job(["--nproc-per-node", "2", "x.py", *args]).entrypoint.args == args


def test_a_script_after_two_dashes():
    """After `--` comes the script, as with argparse."""
    assert line("--nnodes 2 -- --odd.py -- a").script.text == "--odd.py"
    assert line("-- x.py -- a").args == ("--", "a")


def test_one_dash_is_a_script():
    """`-`, which means stdin to Python, is a script and not a flag."""
    assert line("-").script.text == "-"


def test_a_job_file_with_flags_and_overrides_in_any_order():
    """Flags may come before and after the file, later ones override earlier ones, and `--` replaces the arguments."""
    found = job(
        "--max-restarts 3 job.yaml nnodes=2 --nproc_per_node 4 nproc_per_node=5 nnodes=3 --nnodes 1:2 -- -h nnodes=9"
    )
    assert (found.max_restarts, found.nnodes, found.nproc_per_node) == (3, "1:2", 5)
    assert found.entrypoint == Entrypoint(script="x.py", args=["-h", "nnodes=9"])
    assert job("job.yaml").entrypoint.args == ["--lr", "1"]
    assert job("job.yaml --").entrypoint.args == []
    assert job("job.yaml --pass-local-rank").entrypoint.pass_local_rank


def test_a_job_file_keeps_its_own_defaults():
    """torchrun's ways to show output and to store logs are the default only for scripts."""
    found = job("job.yaml --log-dir logs")
    assert (found.show, found.log_dir, found.log_layout) == ("1", "logs", "raylaunch")


@pytest.mark.parametrize("ending", ["yaml", "yml"])
def test_both_endings_of_job_files(folder, ending):
    """Job files end in `.yaml` or `.yml`."""
    (folder / f"other.{ending}").write_text("entrypoint: {script: x.py}\n")
    assert job(f"other.{ending}").entrypoint.script == "x.py"


def test_the_self_check():
    """`check` is a job of raylaunch's, with the size that flags or a job file give."""
    check = Entrypoint(module="raylaunch.worker.selfcheck")
    assert job("check") == Job(entrypoint=check, name="check")
    found = job("--nnodes 2 check job.yaml nproc_per_node=3 --show all -- --quick")
    assert (found.nnodes, found.nproc_per_node, found.show, found.max_restarts) == (2, 3, "all", 0)
    assert found.entrypoint == Entrypoint(module=check.module, args=["--quick"])


def test_a_module_or_a_program_may_be_called_check(folder):
    """Modules and programs may be called `check` or `ps`; a script must be written `./check`."""
    for name in ("check", "ps", "status"):
        assert job(f"-m {name}").entrypoint == Entrypoint(module=name)
        assert job(f"--no-python {name}").entrypoint == Entrypoint(command=name)
        (folder / name).touch()
        assert job(f"./{name}").entrypoint.script == f"./{name}"
    assert line("check").script is None


# What flags mean.


def test_a_script_alone():
    """Output is shown as by torchrun; all other settings have their defaults."""
    assert job("x.py") == SCRIPT


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ("--nnodes 2", {"nnodes": 2}),
        ("--nnodes=1:4", {"nnodes": "1:4"}),
        ("--nproc-per-node gpu", {"nproc_per_node": "gpu"}),
        ("--nproc_per_node=xpu", {"nproc_per_node": "xpu"}),
        ("--nproc 8", {"nproc_per_node": 8}),
        ("--max-restarts 3", {"max_restarts": 3}),
        ("--start-method fork", {"start_method": "forkserver"}),
        ("--start-method spawn", {"start_method": "spawn"}),
        ("--shutdown-timeout 5", {"shutdown_timeout": 5.0}),
        ("--signals-to-handle SIGTERM,SIGUSR1", {"signals_to_handle": ["SIGTERM", "SIGUSR1"]}),
        ("--signals-to-forward 'SIGUSR1, SIGUSR2'", {"signals_to_forward": ["SIGUSR1", "SIGUSR2"]}),
        ("-r 3 -t0:1,10:2", {"redirects": 3, "tee": "0:1,10:2"}),
        ("--local-ranks-filter 0", {"local_ranks_filter": "0"}),
        ("--local-ranks-filter ''", {}),
        ("--duplicate-stdout-filters a,,b,c", {"duplicate_stdout_filters": ["a,b", "c"]}),
        ("--duplicate-stderr-filters=", {}),
        ("--logs-specs default", {"logs_specs": "default"}),
        ("--event-log-handler null", {}),
        ("--event-log-handler console", {"event_log_handler": "console"}),
        ("--progress line", {"progress": "line"}),
        ("--debug 3 --pty", {"debug": 3, "pty": True}),
        ("--rdzv-id none", {}),
        ("--rdzv-id 007", {"run_id": "007"}),
        ("--role '${x}'", {"role": "${x}"}),
        ("--role null", {"role": "null"}),
        ("--master-addr 10.0.0.1 --master-port 29500", {"master_addr": "10.0.0.1", "master_port": 29500}),
        ("--master-addr ''", {}),
        ("--virtual-local-rank", {"virtual_local_rank": True}),
        ("--numa-binding core-complex", {"numa_binding": "core-complex"}),
        ("--log-dir /logs", {"log_dir": "/logs", "log_layout": "torchrun"}),
        ("--log-dir ''", {}),
        ("--set log_layout=raylaunch --log-dir /logs", {"log_dir": "/logs"}),
        ("--show 0,3", {"show": "0,3"}),
        (
            "--placement pack --name a --spares 2 --nprocs 3",
            {"placement": "pack", "name": "a", "spares": 2, "nprocs": 3},
        ),
        ("--env A=1 --env B.c=x=y --env E=", {"env": {"A": "1", "B.c": "x=y", "E": ""}}),
        ("--preload numpy,torch --report=false", {"preload": ["numpy", "torch"], "report": False}),
        ("--preload auto --backend none", {"backend": "none"}),
        ("--preload=", {"preload": []}),
        ("--hang-timeout 9 --join_timeout .inf", {"hang_timeout": 9, "join_timeout": float("inf")}),
        ("--cpus-per-worker 2 --gpus-per-worker 0.5", {"cpus_per_worker": 2.0, "gpus_per_worker": 0.5}),
        ("--durable '${x}' --run-id 7", {"durable": "${x}", "run_id": "7"}),
        (
            "--ray.address h:1 --ray.working_dir s3://b/c.zip",
            {"ray": RayOptions(address="h:1", working_dir="s3://b/c.zip")},
        ),
        ("--set placement=pack --set env.A=true", {"placement": "pack", "env": {"A": "true"}}),
        ("--rdzv-backend c10d --rdzv-endpoint h:1 --node-rank 1 --local-addr h --monitor-interval 1 --use-env", {}),
        ("--rdzv-conf ''", {}),
        ("--rdzv-conf timeout=9", {"placement_timeout": 9.0, "join_timeout": 9.0}),
        ("--rdzv-conf last_call_timeout=1,foo=2", {"last_call": 1.0}),
        (
            "--rdzv-conf=\"'join_timeout=5,last_call_timeout=1,timeout=6'\"",
            {"placement_timeout": 5.0, "join_timeout": 5.0, "last_call": 1.0},
        ),
    ],
)
def test_flags_are_settings(arguments, settings):
    """Each flag sets its key; values that mean `not given` to torchrun set nothing."""
    found = job(f"{arguments} x.py")
    wanted = {name: getattr(SCRIPT, name) for name in Job.__dataclass_fields__} | settings
    if "signals_to_handle" not in settings:
        assert found.signals_to_handle == ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"]
    assert found == Job(**wanted)


def test_standalone_selects_this_machine():
    """`--standalone` selects this machine without Ray, unless an address is given by name, before it or after it."""
    assert job("--standalone x.py").ray.address == "none"
    assert job("--set ray.address=h:1 --standalone x.py").ray.address == "h:1"
    assert job("job.yaml ray.address=h:1 --standalone").ray.address == "h:1"
    assert job("job.yaml --standalone").ray.address == "none"


@pytest.mark.parametrize(
    ("arguments", "python", "entrypoint"),
    [
        ("x.py a", "", Entrypoint(script="x.py", args=["a"])),
        ("-m pkg.x a", "", Entrypoint(module="pkg.x", args=["a"])),
        ("--no-python bash -c true", "", Entrypoint(command="bash", args=["-c", "true"])),
        ("--run-path x.py a", "", Entrypoint(script="x.py", args=["a"])),
        ("--run-path --no-python -m x.py", "", Entrypoint(script="x.py")),
        ("--pass-local-rank x.py a", "", Entrypoint(script="x.py", args=["a"], pass_local_rank=True)),
        ("x.py a", "py3", Entrypoint(command="py3", args=["-u", "x.py", "a"])),
        ("-m pkg.x a", "py3", Entrypoint(command="py3", args=["-u", "-m", "pkg.x", "a"])),
        ("--no-python bash", "py3", Entrypoint(command="bash")),
        ("--run-path x.py", "py3", Entrypoint(script="x.py")),
        (
            "--pass-local-rank x.py a",
            "py3",
            Entrypoint(command="py3", args=["-u", "x.py", "--local-rank=${local_rank}", "a"]),
        ),
    ],
)
def test_what_runs(arguments, python, entrypoint):
    """The entrypoint is a script, module or program; PYTHON_EXEC is the interpreter of the first two, as under torchrun."""
    assert job(arguments, **({"PYTHON_EXEC": python} if python else {})).entrypoint == entrypoint


def test_an_interpreter_does_not_name_the_run():
    """With PYTHON_EXEC, the run is still named after the script, unless a name is given."""
    assert job("dir/x.py a", PYTHON_EXEC="py3").title == "x"
    assert job("--set name=night x.py", PYTHON_EXEC="py3").title == "night"


# The environment.


def test_defaults_from_the_environment():
    """`PET_*` variables set defaults, also of switches."""
    found = job("x.py", PET_NNODES="1:2", PET_NPROC_PER_NODE="3", PET_MODULE="0", PET_RDZV_ID="", PET_LOG_DIR="/logs")
    assert (found.nnodes, found.nproc_per_node, found.run_id) == ("1:2", 3, None)
    assert (found.log_dir, found.log_layout) == ("/logs", "torchrun")
    assert job("x", PET_MODULE="1").entrypoint == Entrypoint(module="x")
    assert job("x", PET_NO_PYTHON="1").entrypoint == Entrypoint(command="x")
    assert job("x.py", PET_STANDALONE="1").ray.address == "none"


def test_the_command_line_beats_the_job_file_and_that_beats_the_environment():
    """Defaults, environment, job file, command line: later ones override earlier ones."""
    variables = {"PET_MAX_RESTARTS": "1", "PET_NNODES": "7", "PET_NO_PYTHON": "1"}
    assert job("job.yaml", **variables).max_restarts == 2
    assert job("job.yaml --max-restarts 3", **variables).max_restarts == 3
    assert job("job.yaml", **variables).nnodes == 7
    assert job("job.yaml", **variables).entrypoint.kind == "script"


def test_variables_that_torchrun_reads_besides():
    """The flag overrides its `PET_*` variable, which overrides the older variable. An empty template is none."""
    old = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}${rank}: "}
    assert job("x.py", **old).shutdown_timeout == 7
    assert job("x.py", **old).log_line_prefix_template == "${role_name}${rank}: "
    assert job("--log-line-prefix-template '' x.py", **old).log_line_prefix_template == "${role_name}${rank}: "
    assert job("--log_line_prefix_template '${hostname}:' x.py", **old).log_line_prefix_template == "${hostname}:"
    assert job("x.py", PET_LOG_LINE_PREFIX_TEMPLATE="p", **old).log_line_prefix_template == "p"
    assert job("x.py", PET_SHUTDOWN_TIMEOUT="8", **old).shutdown_timeout == 8
    assert job("--shutdown-timeout 9 x.py", PET_SHUTDOWN_TIMEOUT="8", **old).shutdown_timeout == 9


# What is said about flags that mean nothing here.


def test_flags_without_effect_are_one_line(golden):
    """One line says what raylaunch does instead; flags from the environment are not mentioned."""
    arguments = (
        "--rdzv-backend c10d --rdzv_endpoint h:1 --node-rank 0 --local-addr h --monitor-interval 1 "
        "--rdzv-conf read_timeout=1,join_timeout=5,odd=1 --use-env --node-rank 1 x.py"
    )
    golden("flags_without_effect", load.ineffective_flags(line(arguments)))
    assert load.ineffective_flags(line("--nnodes 2 x.py", PET_RDZV_ENDPOINT="h:1", PET_NODE_RANK="1")) == ""


def test_they_are_named_before_the_run(capsys):
    """Unknown signals are only warned of, as by torchrun."""
    given = ["--plan", "--standalone", "--node-rank", "0", "--signals-to-handle", "SIGTERM,SIGODD", "x.py", "nnodes=2"]
    assert main.main(given) == ExitCode.OK
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "raylaunch: without effect: --node-rank (raylaunch assigns the node ranks)"
    assert second.startswith("raylaunch: `nnodes=...` is an argument of the script")
    assert third.startswith("raylaunch: `SIGODD` is no signal")


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (
            "x.py placement=pack --lr 1 ray.address=auto placement=spread",
            (
                "`placement=...`, `ray.address=...` are arguments of the script; a setting of the job is given before "
                "it: `--set placement=...`"
            ),
        ),
        (
            "x.py nnodes=2",
            "`nnodes=...` is an argument of the script; a setting of the job is given before it: `--set nnodes=...`",
        ),
        ("x.py place=pack --placement=pack placement Placement=pack =pack optimizer.name=sgd", ""),
        ("--set placement=pack x.py", ""),
        ("job.yaml placement=pack -- nnodes=2", ""),
    ],
)
def test_settings_after_the_script_are_arguments_of_it(arguments, note):
    """As with torchrun. A person who meant a setting of the job is told."""
    assert load.settings_for_script(line(arguments)) == note


# What is wrong.

WRONG = {
    "unknown": "--nnods 2 x.py",
    "unknown_like_nothing": "--zebra x.py",
    "unknown_letter": "-x x.py",
    "unknown_after_job_file": "job.yaml --max-restart 3 --plann",
    "ambiguous": "--rdzv 2 x.py",
    "no_value": "--nnodes --nproc-per-node 2 x.py",
    "no_value_short": "-r",
    "value_for_a_switch": "--standalone=1 x.py",
    "nnodes_reversed": "--nnodes 2:1 x.py",
    "nnodes_text": "--nnodes x x.py",
    "nnodes_three": "--nnodes=2:20:30 x.py",
    "nproc_text": "--nproc-per-node lots x.py",
    "nproc_near_miss": "--nproc-per-node=gpus x.py",
    "nproc_zero": "--nproc_per_node 0 x.py",
    "streams": "--tee 4 -r 0:1, x.py",
    "filter": "--local-ranks-filter 0,a x.py",
    "restarts_negative": "--max-restarts -1 x.py",
    "restarts_text": "--max-restarts many x.py",
    "no_python_module": "--no-python -m x.py",
    "start_method": "--start-method foo x.py",
    "shutdown_negative": "--shutdown-timeout -1 x.py",
    "shutdown_text": "--shutdown-timeout=nan x.py",
    "rdzv_conf": "--rdzv-conf foo x.py",
    "rdzv_conf_no_key": "--rdzv-conf =5,join_timeot x.py",
    "rdzv_conf_text": "--rdzv-conf join_timeout=long,timeout=0 x.py",
    "port": "--master-port 70000 x.py",
    "numbers_without_effect": "--node-rank first --monitor-interval often x.py",
    "numa": "--numa-binding nod x.py",
    "event_log_handler": "--event-log-handler consol x.py",
    "progress": "--progress lines x.py",
    "role_empty": "--role '' x.py",
    "signals": "--signals-to-forward SIGTERM,usr1,SIGODD --signals-to-handle SIGTERM,SIGKILL x.py",
    "set": "--set placement=pakc --set nnode=2 --set max_restarts x.py",
    "key_value": "--placement pakc --report maybe --node-timeout 5s --multiple-of 0 x.py",
    "key_env": "--env API_KEY --env =1 x.py",
    "key_near_miss": "--durabel /x x.py",
    "script_missing_and_more": "--nnodes 2:1 --max-restarts many xx.py",
    "several": "--nnodes 2:1 --tee 4 --max-restarts -1 x.py --lr 1",
    "with_job_file": "job.yaml --nnodes 2:1 max_restarts=two",
    "module_with_job_file": "job.yaml -m --run-path",
    "unknown_of_the_script": "job.yaml --lr 1",
    "script_after_job_file": "job.yaml train.py",
    "module_with_check": "check -m --pass-local-rank",
    "check_with_script": "check x.py",
    "flag_before_status": "--nnodes 2 status",
    "json_without_version": "--json x.py",
    "nothing_to_run": "--nnodes x.py",
    "script_missing": "train/../y.py",
    "script_missing_near_miss": "xx.py",
    "script_missing_folder": "nowhere/x.py --lr 1",
    "script_is_a_folder": "pkg",
    "script_of_a_job_file": "job.yaml entrypoint.script=xx.py",
    "script_is_a_setting": "--nnodes 2 durable=/shared/run1 x.py",
    "script_quoted": "'my script.py'",
    "script_with_arguments": "'x.py --lr 1'",
    "command_with_arguments": "--no-python 'ls -l'",
    "word_run": "run x.py --lr 1",
    "word_launch": "accelerate launch x.py",
    "word_list": "list",
    "word_kill": "kill x",
    "word_python": "python -u x.py",
    "word_python_module": "python3 -m train --api-key=hunter2",
    "word_like_check": "chek",
    "foreign_letter": "-n 4 x.py",
    "foreign_letters": "-np4 x.py",
    "foreign_workers": "--num_processes 4 x.py",
    "foreign_nodes": "--num-machines=2 x.py",
    "foreign_retries": "--max-retries 3 x.py",
    "foreign_verbose": "-v x.py",
    "foreign_env": "-e A=1 x.py",
    "foreign_plan": "--dry-run x.py",
    "foreign_file": "--config job.yaml",
}


@pytest.mark.parametrize("word", ["run", "list", "python", "launch"])
def test_a_script_with_the_name_of_a_foreign_command_runs(folder, word):
    """A file of this name is a script like any other."""
    (folder / word).touch()
    assert job(f"{word} --epochs 1").entrypoint.script == word


@pytest.mark.parametrize("name", WRONG)
def test_mistakes(name, golden, capsys, monkeypatch, folder):
    """Each mistake is marked, with what was expected; nothing is started, and the exit code is 2."""
    monkeypatch.setattr("raylaunch.cli.run_once.run", Mock(side_effect=AssertionError("it was started")))
    (folder / "pkg").mkdir()
    (folder / "pkg" / "run.py").touch()
    (folder / "train").mkdir()
    assert main.main(shlex.split(WRONG[name])) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    golden(f"command_line/{name}", err.rstrip("\n"))


def test_every_golden_text_is_in_use():
    """Each golden text belongs to a test."""
    here = {file.stem for file in (Path(__file__).parents[1] / "golden" / "command_line").glob("*.txt")}
    others = {"environment_switch", "environment_value", "environment_and_flag", "script_denied", "script_archive"}
    assert here == set(WRONG) | others


def test_mistakes_in_the_environment(golden):
    """Mistakes in variables come before those on the command line."""
    golden("command_line/environment_switch", refusal("x.py", PET_STANDALONE="yes", PET_MODULE=""))
    golden(
        "command_line/environment_value", refusal("--tee=4 x.py", PET_NNODES="2:1", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="-1")
    )
    golden("command_line/environment_and_flag", refusal("-m x", PET_NO_PYTHON="1"))
    assert "environment" not in refusal("--no-python -m x", PET_NO_PYTHON="1", PET_MODULE="1")


def test_a_script_that_may_not_be_read(golden, monkeypatch):
    """The error says so. (Root may read every file, so the test replaces os.access.)"""
    monkeypatch.setattr("os.access", lambda *_: False)
    golden("command_line/script_denied", refusal("x.py"))


def test_a_script_may_be_a_folder_or_an_archive_with_a_main(folder, golden):
    """As for Python, a folder or an archive with a `__main__.py` is a script."""
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").touch()
    assert job("app").entrypoint.script == "app"
    for name, inside in (("good.zip", "__main__.py"), ("bad.zip", "run.py")):
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr(inside, "")
    assert job("good.zip").entrypoint.script == "good.zip"
    golden("command_line/script_archive", refusal("bad.zip"))


def test_scripts_on_other_machines_are_not_checked(folder):
    """Absolute paths on a cluster, modules, programs and downloaded working folders are not checked."""
    assert job("/nowhere/x.py", RAY_ADDRESS="h:1").entrypoint.script == "/nowhere/x.py"
    assert "does not exist" in refusal("--standalone /nowhere/x.py")
    assert job("-m nowhere").entrypoint.module == "nowhere"
    assert job("--no-python nowhere").entrypoint.command == "nowhere"
    assert job("--set ray.working_dir=s3://bucket/code.zip y.py").entrypoint.script == "y.py"
    (folder / "code").mkdir()
    (folder / "code" / "y.py").touch()
    assert job("--set ray.working_dir=code y.py").entrypoint.script == "y.py"
    assert "does not exist" in refusal("--set ray.working_dir=code x.py")


def test_a_named_local_ray_is_this_machine():
    """With RAY_ADDRESS=local the script is checked on this machine."""
    assert "does not exist" in refusal("/nowhere/x.py", RAY_ADDRESS="local")
    assert job("--set ray.address=h:1 /nowhere/x.py", RAY_ADDRESS="local").entrypoint.kind == "script"


# Help.


def test_help_is_asked_for_anywhere_before_the_script(capsys):
    """`--help` works whatever else is wrong; after the script it belongs to the script."""
    for arguments in (["-h"], ["--help", "--zebra"], ["job.yaml", "--help"], ["--nnodes", "x", "-h"], ["check", "-h"]):
        assert main.main(arguments) == ExitCode.OK
        assert capsys.readouterr().out == usage.full()
    assert line("x.py --help").typed("help") is None


def test_help_names_every_flag_on_a_line_of_its_own():
    """No line of the help is wider than 120 columns."""
    lines = usage.full().splitlines()
    for flag in FLAGS:
        assert len([text for text in lines if f"{flag.option} " in f"{text[:34]} " and text.startswith("  ")]) >= 1
    assert max(map(len, lines)) <= 120


def test_flags_of_raylaunch_have_no_environment_variable():
    """Only flags of torchrun have `PET_*` variables."""
    assert not any(flag.pet for flag in (*TABLE[Group.OURS], *TABLE[Group.KEYS]))
