"""Job files and overrides become the right job, or an error that says what to change."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.cli.args import parser
from raylaunch.cli.config import job_file
from raylaunch.cli.config import load as config
from raylaunch.cli.config.job_file import dump
from raylaunch.core.job.job import Entrypoint, Job, NodeRule, RayOptions
from raylaunch.core.text import printable
from raylaunch.errors import ConfigError, ExitCode
from tests.cli.any_input import arguments, contents
from tests.profiles import examples

Golden = Callable[[str, str], None]

FILE = "conf/job.yaml"
RUN = "entrypoint:\n  script: train.py\n"
FUNCTION = "entrypoint:\n  function: train:main\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with scripts; paths in messages are relative to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.setenv("HOME", "/home/ana")
    monkeypatch.setenv("OUR_TOKEN", "hunter2-of-ana")
    (tmp_path / "conf").mkdir()
    for script in ("train.py", "a.py", "b.py"):
        (tmp_path / script).touch()
    return tmp_path


def load(*arguments: str) -> Job:
    """Return the job of a command line, in an environment without settings."""
    return config.load(parser.parse(arguments, {}), {"OUR_TOKEN": "hunter2-of-ana"})


def job(text: str, *overrides: str) -> Job:
    """Return the job of a file with this text."""
    Path(FILE).write_text(text, encoding="utf-8")
    return load(FILE, *overrides)


def refusal(text: str, *overrides: str) -> str:
    """Return the error for a file with this text."""
    with pytest.raises(ConfigError) as caught:
        job(text, *overrides)
    return caught.value.message


WRONG: dict[str, tuple[str, ...]] = {
    # names
    "unknown_top": (RUN + "nnode: 2\n",),
    "unknown_nested": ("entrypoint:\n  scrip: train.py\n",),
    "unknown_in_other_section": ("script: train.py\nray:\n  nnodes: 2\n",),
    "unknown_dashes": (RUN + "max-restarts: 3\nNproc-Per-Node: 2\n",),
    "unknown_like_nothing": (RUN + "zebra: 2\n",),
    "unknown_section": (RUN + "ryy:\n  address: auto\nnodes:\n  min: 1\n",),
    "unknown_dotted": ("entrypoint.script: train.py\n",),
    "unknown_in_rule": (RUN + "nodes:\n  10.0.0.7: {nproc-per-nod: 7}\n  10.0.0.8:\n    zebra: 1\n",),
    # types
    "type_whole_number": (RUN + "max_restarts: two\n",),
    "type_fraction": (RUN + "max_restarts: 1.5\n",),
    "type_boolean": (RUN + "max_restarts: true\ncpus_per_worker: false\n",),
    "type_scalar_for_section": (RUN + "ray: here\n",),
    "type_list_for_section": (RUN + "env: [A, B]\nray:\n  - auto\n",),
    "type_section_for_scalar": (RUN + "max_restarts:\n  workers: 2\n",),
    "type_list_for_scalar": (RUN + "placement: [spread, pack]\nlog_dir:\n  - runs\n",),
    "type_scalar_for_list": (RUN + "preload: torch\n",),
    "type_section_for_list": ("entrypoint:\n  script: train.py\n  args: {steps: 50}\n",),
    "type_text_for_list": (
        "entrypoint:\n  script: train.py\n  args: --epochs 2\nsignals_to_forward: SIGUSR1,SIGUSR2\n",
    ),
    "type_in_list": ("entrypoint:\n  script: train.py\n  args:\n    - --steps: 50\n    -\n    - ok\n",),
    "type_null": (RUN + "max_restarts:\nlog_dir: ~\nenv:\n  A:\n",),
    "type_in_rule": (
        RUN + "nodes:\n  10.0.0.7: {nproc_per_node: seven, env: {A: [1]}}\n  10.0.0.8: 7\n  10.0.0.9: [7]\n",
    ),
    # values
    "missing_values": ("entrypoint:\n  script: ???\nnnodes: ???\nray: ???\nenv:\n  TOKEN: ???\n",),
    "range_reversed": (RUN + 'nnodes: "4:2"\n',),
    "two_entrypoints": ("entrypoint:\n  script: train.py\n\n  args: []\n  module: train\n",),
    "two_entrypoints_on_one_line": ("entrypoint: {script: train.py, module: train}\n",),
    "two_entrypoints_file_and_override": (RUN, "entrypoint.module=train"),
    "nothing_to_run": ("nnodes: 2\n",),
    "nothing_in_entrypoint": ("nnodes: 2\nentrypoint:\n  args: [1]\n",),
    "several_values": (RUN + "nnodes: 0\nplacement: sprad\nstart_timeout: -1\nshow: first\n",),
    "rules": (
        RUN
        + "nodes:\n  10.0.0.7:\n    nproc_per_node: -1\n    env: {A=B: 1}\n  10.0.0.0/99: {}\n  label:zone: {}\n"
        + "env: {'C=D': 1}\n",
    ),
    # references
    "reference_unknown": (RUN + "name: ${foo}\n",),
    "reference_near_miss": (RUN + "name: run-${nnode}\nlog_dir: ${HOME}/runs\n",),
    "reference_environment": (RUN + "name: ${oc.env:NOT_SET}\n",),
    "reference_resolver": (RUN + "name: ${env:HOME}\n",),
    "reference_open": (RUN + "name: ${nnodes\n",),
    "reference_loop": (RUN + "name: ${run_id}\nrun_id: ${name}\n",),
    "reference_type": (RUN + "max_restarts: ${placement}\ncpus_per_worker: ${name}\n",),
    "reference_missing": (RUN + "name: ???\nrun_id: ${name}\n",),
    # files
    "empty": ("",),
    "only_comments": ("# nnodes: 2\n",),
    "top_list": ("- nnodes: 2\n",),
    "top_text": ("import torch\n",),
    # YAML
    "yaml_colon": ("name: a: b\n",),
    "yaml_tab": ("entrypoint:\n\tscript: train.py\n",),
    "yaml_no_colon": ("name: a\nnnodes\nrun_id: b\n",),
    "yaml_open_quote": (RUN + "name: 'it\nnnodes: 2\n",),
    "yaml_open_bracket": (RUN + "preload: [torch\n\n\n",),
    "yaml_brace_in_brackets": (RUN + "preload: [torch, ${name}]\n",),
    "yaml_block_text": (RUN + "name: |a|\n",),
    "yaml_indentation": ("entrypoint:\n    script: train.py\n  args: []\n",),
    "yaml_alias": (RUN + "show: *all\n",),
    "yaml_second_document": (RUN + "---\nnnodes: 2\n",),
    "yaml_escape": ('log_dir: "C:\\data"\n',),
    "yaml_reserved": (RUN + "show: @all\n",),
    "yaml_control_character": (RUN + "name: a\x1bb\n",),
    "yaml_duplicate_key": (RUN + "nnodes: 1\nenv: {A: 1, A: 2}\nnnodes: 2\n",),
    "yaml_key": (RUN + "? [a, b]\n: 1\n",),
    "yaml_tag": (RUN + "nnodes: !node 3\n",),
    "yaml_tag_that_does_not_fit": (RUN + "nnodes: !!int two\n",),
    "yaml_inside_itself": (RUN + "preload: &again [*again]\n",),
    # limits
    "limit_depth": (RUN + "env: " + "[" * 400,),
    "limit_number": (RUN + "max_restarts: 0x" + "f" * 64_000 + "\n",),
    "limit_digits": (RUN + f"nnodes: '{'9' * 5_000}'\nnproc_per_node: '{'9' * 5_000}'\nshow: '{'9' * 5_000}'\n",),
    "limit_findings": (RUN + "".join(f"zebra{n}: 1\n" for n in range(40)),),
    "reference_in_reference": (RUN + "name: ${${" + "${" * 300 + "\n",),
    "number_ranges": (
        RUN + "shutdown_timeout: .inf\nkeep_warm: 1e9\nplacement_timeout: 1e400\njoin_timeout: 1e18\nspares: 1000000\n"
        "max_restarts: 99999999999999999999\nnnodes: 1:200000\nnproc_per_node: 0x7fffffffffffffff\n"
        "cpus_per_worker: .nan\nlast_call: .nan\nnode_timeout: .nan\nhang_timeout: .inf\nnprocs: 2000000\n",
    ),
    # characters
    "character_zero": (RUN + 'log_dir: "a\\0b"\nrole: "\\0"\n',),
    "character_zero_in_args": ('entrypoint: {script: train.py, args: [a, "b\\0"]}\n',),
    "character_of_the_terminal": (RUN + 'name: "a\\nb"\nrun_id: "\\e[1m"\n"x\\e[1m": 1\n',),
    "character_half": (RUN + 'name: "\\ud83d"\n',),
    "name_out_of_the_folder": (RUN + "name: ..\nrun_id: a/../../b\n",),
    "name_too_long": (RUN + f"name: {'é' * 150}\n",),
    "yaml_wrong_tag": (RUN + "show: !!timestamp foo\nkeep_warm: !!int ''\npreload: !!binary aa\n",),
    # overrides
    "override_near_miss": (RUN, "nproc_per_nod=4"),
    "override_nested": (RUN, "entrypont.args=[1]", "ray.adress=auto"),
    "override_dashes": (RUN, "max-restarts=4"),
    "override_no_value": (RUN, "nnodes"),
    "override_no_value_typo": (RUN, "nnode"),
    "override_no_key": (RUN, "=4"),
    "override_empty_part": (RUN, "entrypoint..args=[]"),
    "override_broken_value": (RUN, "entrypoint.args=[1,", "show=@all"),
    "override_type": (RUN, "max_restarts=two"),
    "override_null": (RUN, "max_restarts="),
    "override_below_scalar": (RUN + "nnodes: 2\n", "nnodes.min=1"),
    "override_quoted": (RUN, "name=a b/c", "env={A: [1]}"),
    "override_rule": (RUN, "nodes.10.0.0.7.nproc_per_node=seven", "nodes={10.0.0.8: {nproc: 1}}"),
    # elasticity
    "elastic_values": (
        RUN + "nnodes: 1:3\nnproc_per_node: 2\nmultiple_of: 8\nspares: -1\nnode_timeout: 0.2\nhang_timeout: Of\n",
    ),
    "elastic_times": (RUN + "multiple_of: 0\nexclude_after: -1\nhang_timeout: false\n", "hang_timeout=0"),
    # secrets
    "secret_line": (RUN + "env: {A: [1], API_KEY: hunter22, B: [2]}\n",),
    "secret_reference": (RUN + "name: a/${env.API_KEY}\nenv:\n  API_KEY: hunter22\n  DB_PASSWORD: hunter33${\n",),
    "secret_alias": (RUN + "env:\n  API_KEY: *hunter22\n",),
    "secret_of_many_lines": (RUN + "env:\n  SSH_KEY: |\n    hunter22\n\n\thunter33\n  A: [1]\n",),
    "secret_not_indented": (RUN + "env:\n  SSH_KEY: |\n    hunter22\nhunter33\n\nnnodes: 0\n",),
    "secret_not_quoted": (RUN + "env:\n  DB_PASSWORD: @hunter22\n  A: [1]\n",),
    "secret_below_its_name": (RUN + "env:\n  SSH_KEY:\n    hunter22: hunter33\n  A: [1]\n",),
    "secret_of_the_submitter": (RUN + "max_restarts: ${oc.env:OUR_TOKEN}\nenv: {API_KEY: '${oc.env:OUR_TOKEN}'}\n",),
    "secret_override": (
        RUN,
        *("env.API_KEY=hunter22", "entrypoint..api_key=hunter33", "env.DB_PASSWORD=*hunter44", "nnode=1"),
        *("entrypoint.kwargs.api_key=hunter55", "--set", "env={KEY: hunter66}"),
    ),
    # what other programs would take
    "entrypoint_script": ("entrypoint: train.py\n",),
    "entrypoint_function": ("entrypoint: 'train:main'\n",),
    "entrypoint_command": ("entrypoint: python train.py --epochs 1 --api-key=hunter22\n",),
    "entrypoint_blank": ("entrypoint: ' '\n",),
    "command_text": ('entrypoint:\n  command: "python -u train.py --epochs 1"\n',),
    "command_text_of_python": ('entrypoint:\n  command: "python train.py --epochs 1"\n',),
    "time_units": (RUN + "shutdown_timeout: 30s\nnode_timeout: 1.5 min\nkeep_warm: 2h\nlast_call: 5 apples\n",),
    "time_unit_on_the_command_line": (RUN, "shutdown_timeout=30s"),
    # together
    "several_at_once": (
        "entrypoint:\n  scrip: train.py\n" + "\n" * 6 + "ray: here\nnnodes: 4:2\nname: night/run\n",
        "max_restarts=two",
        "show=first",
        "bakend=nccl",
    ),
    "three_in_one_file": ("nnode: 2\nentrypoint:\n  script: trian.py\n  args: --epochs 2\n",),
    "syntax_and_override": ("name: a: b\n", "nnode=2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes(name: str, golden: Golden) -> None:
    """Each mistake is marked where it is, with what was expected and a hint; secrets are hidden.

    No message contains the text of OmegaConf or PyYAML.
    """
    text, *overrides = WRONG[name]
    found = refusal(text, *overrides)
    for word in ("hunter", "full_key", "object_type", "Error", "<stream end>", "while parsing", "not YAML"):
        assert word not in found
    golden(f"config/{name}", found)


def refused_file(path: str) -> str:
    """Return the error for the path of a job file."""
    with pytest.raises(ConfigError) as caught:
        load(path)
    return caught.value.message


def test_missing_files(golden: Golden) -> None:
    """The error for a missing file names a similar one."""
    Path("conf/job.yaml").touch()
    Path("conf/jab.py").touch()
    golden("config/file_missing", refused_file("conf/jb.yml"))
    golden("config/file_like_nothing", refused_file("conf/zzzzzzzzz.yml"))
    golden("config/file_no_folder", refused_file("cnf/job.yaml"))


def test_unreadable_file(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable file is reported."""
    # root may read everything, so a file mode would not do.
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
        message = refused_file(FILE)
    golden("config/file_denied", message)


def test_file_in_another_encoding(golden: Golden) -> None:
    """A file that is not UTF-8 is reported."""
    Path(FILE).write_bytes(RUN.encode() + "name: Ren\u00e9\n".encode("latin-1"))
    golden("config/file_not_utf8", refused_file(FILE))


def test_file_in_utf16(golden: Golden) -> None:
    """The hint names the encoding, which editors on Windows call Unicode."""
    Path(FILE).write_text(RUN, encoding="utf-16")
    golden("config/file_utf16", refused_file(FILE))


def test_what_is_no_file() -> None:
    """A folder, a pipe without a writer and a device are refused at once; so is a file that is too long."""
    Path("conf/folder.yaml").mkdir()
    os.mkfifo("conf/pipe.yaml")
    Path("conf/zero.yaml").symlink_to("/dev/zero")
    Path("conf/long.yaml").write_text("# " + "x" * 300_000)
    assert refused_file("conf/folder.yaml") == "error: `conf/folder.yaml` is a folder"
    assert refused_file("conf/pipe.yaml") == "error: `conf/pipe.yaml` is not a regular file"
    assert refused_file("conf/zero.yaml") == "error: `conf/zero.yaml` is not a regular file"
    assert refused_file("conf/long.yaml") == "error: `conf/long.yaml` has more than 256 KiB, the limit of a job file"
    assert refused_file(f"conf/{'x' * 300}.yaml").endswith("x.yaml` cannot be read: file name too long")
    assert "x.py` cannot be used: file name too long" in refused_file(f"{'x' * 300}.py")


def test_text_that_only_looks_like_references() -> None:
    """Keys, placeholders and escaped text."""
    kwargs = {"${": {"${": None, "0${": "\\${ \\${ \\\\\\${"}}
    found = job(FUNCTION + f"  kwargs: {json.dumps(kwargs)}\n")
    assert found.entrypoint.kwargs == {"${": {"${": None, "0${": "${ ${ \\${"}}
    args = ["${local_rank}", "a"]
    assert job(RUN + f"  args: {json.dumps(args)}\n").entrypoint.args == args


def test_json() -> None:
    """JSON is YAML, but for tabs, and for characters that are written as two escapes."""
    Path("conf/job.json").write_text('{\n\t"entrypoint": {"script":"train.py"},\n\t"name": "\\ud83d\\ude00"\n}\n')
    assert load("conf/job.json", "nnodes=2") == Job(entrypoint=Entrypoint(script="train.py"), name="😀", nnodes=2)


def test_the_reference_states_the_limits() -> None:
    """Whoever runs into a limit can read it there."""
    text = " ".join((Path(__file__).parents[3] / "docs" / "reference.md").read_text(encoding="utf-8").split())
    assert f"{job_file.MAX_BYTES // 1024} KiB, and {job_file.MAX_DEPTH} sections" in text


def test_a_long_line_with_a_secret() -> None:
    """No part of a secret is shown where the line is cut."""
    for length in range(60, 200, 7):
        text = RUN + f"preload: [{'a, ' * (length // 3)}x, hunter2-of-ana, ???, {'b, ' * 100}]\n"
        assert "hunter" not in refusal(text)


def test_exit_code() -> None:
    """A mistake in the job file gives the exit code for wrong usage."""
    with pytest.raises(ConfigError) as caught:
        job("")
    assert caught.value.exit_code is ExitCode.USAGE


def test_least_job() -> None:
    """A script alone is a job; everything else has a default."""
    assert job(RUN) == Job(entrypoint=Entrypoint(script="train.py"))


def test_byte_order_mark_and_carriage_returns() -> None:
    """A file from Windows is read like any other."""
    Path(FILE).write_bytes(b"\xef\xbb\xbf" + RUN.replace("\n", "\r\n").encode())
    assert load(FILE).entrypoint.script == "train.py"


@pytest.mark.parametrize("text", ["nnodes: 1:4", 'nnodes: "1:4"', "nnodes: '1:4'"])
def test_range_is_not_a_time(text: str) -> None:
    """`1:4` is a range with and without quotes, not the sixty-four of YAML 1.1."""
    assert job(f"{RUN}{text}\n").nnodes == "1:4"
    assert job(RUN, "nnodes=1:4").nnodes == "1:4"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("max_restarts", "3", 3),
        ("max_restarts", '"3"', 3),
        ("max_restarts", "010", 10),
        ("nnodes", "2", 2),
        ("nnodes", '"2"', "2"),
        ("nproc_per_node", "auto", "auto"),
        ("nproc_per_node", "8", 8),
        ("join_timeout", "1e3", 1000.0),
        ("join_timeout", "5", 5.0),
        ("join_timeout", ".inf", math.inf),
        ("name", "null", None),
        ("name", "", None),
        ("name", "1.10", "1.10"),
        ("run_id", "007", "007"),
        ("run_id", "2026-11-21", "2026-11-21"),
        ("run_id", "1e5", "1e5"),
        ("show", "0", "0"),
        ("show", "0,3", "0,3"),
        ("preload", "", []),
        ("preload", "[a, b]", ["a", "b"]),
        ("preload", "auto", "auto"),
        ("ray", "", RayOptions()),
        ("ray", "{address: local}", RayOptions(address="local")),
        ("env", "null", {}),
        ("nodes", "null", {}),
        ("event_log_handler", "null", "null"),
        ("tee", "3", 3),
        ("tee", "0:3,10:1", "0:3,10:1"),
        ("signals_to_forward", "[SIGUSR1]", ["SIGUSR1"]),
    ],
)
def test_values(key: str, text: str, value: object) -> None:
    """Values mean the same in a file and on the command line, and text stays as it is written."""
    for read in (job(f"{RUN}{key}: {text}\n"), job(RUN, f"{key}={text}")):
        assert getattr(read, key) == value
        assert type(getattr(read, key)) is type(value)


def test_rules_for_nodes() -> None:
    """What is different on some nodes, with their addresses as keys; overrides are merged in."""
    text = "nodes:\n  10.0.0.7: {nproc_per_node: 7, env: {NCCL_SOCKET_IFNAME: eth1, B: true}}\n  label:zone=a:\n"
    found = job(
        RUN + text,
        "nodes.10.0.0.7.env.B=2",
        "nodes.10.0.0.7.env.C.D=3",
        "nodes.10.1.0.0/16={nproc_per_node: 1}",
        "nodes.10.0.0.*.nproc_per_node=2",
    ).nodes
    assert found == {
        "10.0.0.7": NodeRule(nproc_per_node=7, env={"NCCL_SOCKET_IFNAME": "eth1", "B": "2", "C.D": "3"}),
        "label:zone=a": NodeRule(),
        "10.1.0.0/16": NodeRule(nproc_per_node=1),
        "10.0.0.*": NodeRule(nproc_per_node=2),
    }
    assert list(found) == ["10.0.0.7", "label:zone=a", "10.1.0.0/16", "10.0.0.*"]


def test_rules_for_nodes_are_dumped_and_loaded() -> None:
    """Rules for nodes are the same after a dump and a load."""
    nodes = {"10.0.0.7": NodeRule(nproc_per_node=7, env={"A": "${x}", "B": "1"}), "label:a=[b.c]": NodeRule()}
    wanted = Job(entrypoint=Entrypoint(script="a.py"), nodes=nodes)
    assert job(dump(wanted)) == wanted


def test_settings_from_python() -> None:
    """Sections are dicts or dataclasses, text is literal, and errors name the setting."""
    function = {"entrypoint": {"function": "a:b"}}
    rule = NodeRule(nproc_per_node=7, env={"A": "${node_address}"})
    found = config.job_of(function | {"nodes": {"10.0.0.7": rule, "b": {"env": {"B": "1"}}}, "name": "${x}"})
    assert found.nodes == {"10.0.0.7": rule, "b": NodeRule(env={"B": "1"})}
    assert found.name == "${x}"
    assert config.job_of(function | {"ray": RayOptions(address="local")}).ray.address == "local"
    for wrong, said in (
        ({"nodes": {"10.0.0.7": {"nproc": 7}}}, "`nproc` is not a setting of a node"),
        ({"nodes": {"10.0.0.7": {"nproc_per_node": "x"}}}, "`nodes.10.0.0.7.nproc_per_node`: a whole number"),
        ({"nodes": {"10.0.0.7": 3}}, "`nodes.10.0.0.7`: a section is expected"),
        ({"ray": {"adress": "local"}}, "did you mean `ray.address`?"),
        ({"env": {"A_TOKEN": ["hunter2"]}}, "`env.A_TOKEN`: text is expected, but a list is given"),
        ({"env": {"A_TOKEN": None}}, "`env.A_TOKEN`: text is expected, but no value is given"),
        ({"nnodes": {"a": 1}}, "`nnodes`: a whole number or text is expected, but a section is given"),
        ({"entrypoint": {"function": "a:b", "kwargs": {"a_key": print}}}, "a plain value is expected, but `***` is of"),
        ({"env": {"A": b"x"}}, "`env.A`: a plain value is expected, but `b'x'` is of type bytes"),
        ({"nnodes": "2:1", "max_restart": 3}, "`max_restart` is not a setting; `nnodes`: the minimum (2)"),
        ({"nnodes": "2:1"}, "`nnodes`: the minimum (2)"),
    ):
        with pytest.raises(ConfigError) as caught:
            config.job_of(function | wrong)
        assert said in str(caught.value)


def test_placeholders_are_no_references() -> None:
    """Placeholders such as `${local_rank}` are kept; other names in `${}` are settings."""
    text = (
        "entrypoint: {script: a.py, args: ['--out=${local_rank}/${nnodes}', '\\${local_rank}']}\n"
        "log_line_prefix_template: '${role_name}-${rank}/${local_rank}@${hostname}/${role}'\n"
        "env: {A: '${node_address}', B: '${interface:10.0.0.0/8}', C: '${role}'}\n"
        "nodes: {a: {env: {D: '${node_address}:${nnodes}'}}}\n"
    )
    found = job(text)
    assert found.entrypoint.args == ["--out=${local_rank}/1", "${local_rank}"]
    assert found.log_line_prefix_template == "${role_name}-${rank}/${local_rank}@${hostname}/default"
    assert found.env == {"A": "${node_address}", "B": "${interface:10.0.0.0/8}", "C": "default"}
    assert found.nodes["a"].env == {"D": "${node_address}:1"}


def test_environment_is_text() -> None:
    """Variables get the text of the file: `true`, `no` and `0x10` stay as they are."""
    text = "env:\n  A: 1\n  B: true\n  C: no\n  D: 0x10\n  E: 1.50\n  F: ''\n  G: 1:30\n  1: yes\n"
    found = job(RUN + text, "env.H=True", "env.I=2", "env.J=''").env
    in_file = {"A": "1", "B": "true", "C": "no", "D": "0x10", "E": "1.50", "F": "", "G": "1:30", "1": "yes"}
    assert found == in_file | {"H": "True", "I": "2", "J": ""}


def test_arguments_of_a_script_are_text() -> None:
    """A script gets its arguments as text, as written."""
    args = "  args: [--lr, 3e-4, --bf16, true, 007, 1.10, no, -1]\n"
    expected = ["--lr", "3e-4", "--bf16", "true", "007", "1.10", "no", "-1"]
    assert job(RUN + args).entrypoint.args == expected
    assert job(RUN, "entrypoint.args=[--steps,50]").entrypoint.args == ["--steps", "50"]


def test_arguments_of_a_function_are_values() -> None:
    """A function gets numbers, booleans, lists and sections, and the keys in them, as YAML 1.2 reads them."""
    args = "  args: [3e-4, true, 007, 'x', no, null, 1:30]\n"
    kwargs = "  kwargs: {lr: 1e3, weights: {0: 0.5, 1: [2, '${max_restarts}']}, 5: a}\n"
    entrypoint = job(FUNCTION + args + kwargs + "max_restarts: 3\n").entrypoint
    assert entrypoint.args == [3e-4, True, "007", "x", "no", None, "1:30"]
    assert entrypoint.kwargs == {"lr": 1e3, "weights": {0: 0.5, 1: [2, 3]}, "5": "a"}


def test_function_from_the_command_line_decides_about_arguments() -> None:
    """Whether arguments are text depends on the job as a whole, not on the file alone."""
    text = "entrypoint:\n  args: [1]\n"
    assert job(text, "entrypoint.function=a:b").entrypoint.args == [1]
    assert job(text, "entrypoint.module=a").entrypoint.args == ["1"]


@pytest.mark.parametrize(
    ("text", "override", "key", "value"),
    [
        (RUN + "nnodes: ???\n", "nnodes=2", "nnodes", 2),
        (RUN + "max_restarts: two\n", "max_restarts=2", "max_restarts", 2),
        (RUN + "ray: here\n", "ray.address=local", "ray", RayOptions(address="local")),
        (RUN + "name: ${oc.env:NOT_SET}\n", "name=a", "name", "a"),
        ("", "entrypoint.script=a.py", "entrypoint", Entrypoint(script="a.py")),
        (RUN + "nnodes: 4:2\n", "nnodes=4:8", "nnodes", "4:8"),
    ],
)
def test_an_override_replaces_a_wrong_value(text: str, override: str, key: str, value: object) -> None:
    """A wrong value that is overridden is not reported."""
    assert getattr(job(text, override), key) == value


def test_overrides_merge() -> None:
    """Sections are merged, lists and scalars replaced, and the last override wins."""
    text = "entrypoint:\n  script: a.py\n  args: [a, b, c]\nenv: {A: 1, B: 2}\n"
    found = job(text, "env={B: 3, C: 4}", "env.D=5", "name=p", "name=q")
    assert found.env == {"A": "1", "B": "3", "C": "4", "D": "5"}
    assert found.entrypoint.args == ["a", "b", "c"]
    assert found.name == "q"
    assert job(text, "entrypoint.args=[z]").entrypoint.args == ["z"]
    assert job(text, "entrypoint.script=null", "entrypoint.module=m").entrypoint.kind == "module"
    assert job(text, "env.EQUATION=a=b").env["EQUATION"] == "a=b"


def test_references() -> None:
    """`${...}` refers to settings, defaults and the environment, and is text after a backslash."""
    text = (
        "name: v${nnodes}-${placement}\nnnodes: 2\nmax_restarts: ${oc.decode:'3'}\nrun_id: ${.nnodes}\n"
        "show: ${oc.env:NOT_SET,all}\n"
        "env:\n  A: ${oc.env:HOME}/x\n  B: ${.A}/y\n  C: '\\${HOME}'\n  D: ${name}\n"
        "log_dir: ${ray.address}\npreload: ${oc.create:[a, b]}\njoin_timeout: ${nnodes}\n"
    )
    found = job(RUN + text)
    assert (found.name, found.run_id, found.max_restarts, found.show) == ("v2-auto", "2", 3, "all")
    assert found.env == {"A": "/home/ana/x", "B": "/home/ana/x/y", "C": "${HOME}", "D": "v2-auto"}
    assert (found.log_dir, found.preload, found.join_timeout) == ("auto", ["a", "b"], 2.0)


def test_anchors() -> None:
    """Anchors and merge keys work, and keys beside `<<` override it."""
    text = "env: &base {A: 1, B: 2}\nray: {address: &where local}\n"
    assert job(RUN + text + "log_dir: *where\n").log_dir == "local"
    kwargs = "  kwargs:\n    a: &a {x: 1, y: 2}\n    b: {<<: *a, y: 3}\n"
    assert job(FUNCTION + kwargs).entrypoint.kwargs["b"] == {"x": 1, "y": 3}


def test_dump_is_readable(golden: Golden) -> None:
    """The effective job lists all settings, and quotes what other readers misread."""
    golden("config/dump", dump(job(RUN + "nnodes: 1:4\nenv: {A: true, B: no, C: '\\${x}', D: 日本}\n")).rstrip())


# PyYAML writes U+0085 as a line break, and reads it as a space.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x85"), max_size=12).filter(
    lambda text: text != "???"
) | st.sampled_from(
    [
        "${a}",
        "\\${a}",
        "a\\\\${b",
        "no",
        "1:4",
        "1e3",
        "~",
        "null",
        "<<",
        "=",
        "---",
        "'",
        '"',
        "010",
        ".inf",
        "a\nb\n",
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(texts | st.integers(), inside, max_size=3),
    max_leaves=6,
)


@examples(40)
@given(
    env=st.dictionaries(
        texts.filter(lambda name: name and "=" not in name and "\0" not in name),
        texts.filter(lambda value: "\0" not in value),
        max_size=3,
    ),
    args=st.lists(texts.filter(lambda text: "\0" not in text), max_size=3),
    log_dir=texts.filter(lambda text: text.strip() and "\0" not in text),
    timeout=st.floats(min_value=1e-3, max_value=31_536_000) | st.just(math.inf),
)
def test_dump_and_load(env: dict[str, str], args: list[str], log_dir: str, timeout: float) -> None:
    """What is dumped is loaded as the same job, whatever the text in it."""
    entrypoint = Entrypoint(script="a.py", args=list(args))
    wanted = Job(entrypoint=entrypoint, env=env, log_dir=log_dir, join_timeout=timeout, nnodes="1:4")
    assert job(dump(wanted)) == wanted


@examples(40)
@given(args=st.lists(values, max_size=3), kwargs=st.dictionaries(texts, values, max_size=3))
def test_dump_and_load_function(args: list[Any], kwargs: dict[str, Any]) -> None:
    """Arguments of a function keep their types."""
    wanted = Job(entrypoint=Entrypoint(function="a:b", args=args, kwargs=kwargs))
    assert job(dump(wanted)) == wanted


def outcome(*given: str) -> Job | None:
    """Return the job of a command line, or None after a ConfigError that can be shown."""
    try:
        found = load(*given)
    except ConfigError as error:
        text = error.message
        assert text.strip()
        assert printable(text, several_lines=True) == text
        assert len(text) < 50_000
        return None
    return found


@examples(25)
@given(data=contents, is_json=st.booleans())
def test_any_file_is_a_job_or_a_mistake(data: bytes, is_json: bool) -> None:
    """No content of a job file leads to another exception, to a text that changes the terminal, or to a long wait."""
    name = "conf/any.json" if is_json else "conf/any.yaml"
    Path(name).write_bytes(data)
    found = outcome(name)
    if found is not None:
        assert job(dump(found)) == found


@examples(40)
@given(given=arguments)
def test_any_command_line_is_a_job_or_a_mistake(given: list[str]) -> None:
    """No command line leads to another exception, to a text that changes the terminal, or to a long wait."""
    Path(FILE).write_text(RUN)
    for line in (given, [FILE, *given]):
        found = outcome(*line)
        assert found is None or dump(found)


OTHERS = {
    "file_utf16",
    "dump",
    "file_missing",
    "file_like_nothing",
    "file_no_folder",
    "file_denied",
    "file_not_utf8",
}


def test_every_golden_text_is_in_use() -> None:
    """Each golden text belongs to a test."""
    here = {file.stem for file in (Path(__file__).parents[1] / "golden" / "config").glob("*.txt")}
    assert here == set(WRONG) | OTHERS


@pytest.mark.parametrize("in_command_folder", [False, True])
def test_a_script_beside_its_job_file(folder, in_command_folder):
    """It is found, and said to be run, unless the working folder has one of this name, as torchrun would run it."""
    (folder / "conf" / "own.py").touch()
    if in_command_folder:
        (folder / "own.py").touch()
    Path(FILE).write_text("entrypoint: {script: own.py}", encoding="utf-8")
    said: list[str] = []
    found = config.load(parser.parse([FILE], {}), {}, said.append)
    if in_command_folder:
        assert (found.entrypoint.script, said) == ("own.py", [])
    else:
        assert found.entrypoint.script == "conf/own.py"
        assert said == ["`own.py` is not in this folder: `conf/own.py`, beside the job file, is run"]


@pytest.mark.parametrize("more", ["entrypoint.script=own.py", "ray.working_dir=."])
def test_a_script_of_the_command_line_or_of_a_working_dir_is_not_looked_for_there(folder, more):
    """The first is relative to the working folder as any path that is typed, the second to the folder that is copied."""
    (folder / "conf" / "own.py").touch()
    Path(FILE).write_text("entrypoint: {script: own.py}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"`own\.py` does not exist"):
        load(FILE, more)
