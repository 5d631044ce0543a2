"""Flags, their defaults in the environment, the ways to name the entrypoint, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import yaml

from tests.contract.launchers import SCRIPTS, Launcher, Run, together
from tests.contract.shared import envs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

TRUE = ("--no-python", "true")
ECHO = str(SCRIPTS / "record.py")


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param("static", 2, id="static"),
        pytest.param("standalone", 2, id="standalone"),
        pytest.param("command", 4, id="command"),
        pytest.param("module", 4, id="module"),
        pytest.param("elastic", 5, id="elastic"),
        pytest.param("two_nodes", 8, id="two nodes"),
        pytest.param("sum_over_two_nodes", 2, id="two nodes of one"),
        pytest.param("local_rank", 2, id="local-rank"),
        pytest.param("use_env", 2, id="use-env"),
    ],
)
def test_every_rank_runs_once_and_the_exit_code_is_0(runs: dict[str, Run], name: str, ranks: int) -> None:
    run = runs[name]
    assert [one.code for one in (run, *run.peers)] == [0] * (1 + len(run.peers)), run.said
    assert sorted(envs(run)) == list(range(ranks))


def test_arguments_after_the_script_are_the_scripts(runs: dict[str, Run]) -> None:
    """`${local_rank}` is replaced for each worker, which turns `$$` into `$`; everything else is unchanged."""
    for name, script in (("static", [str(SCRIPTS / "world.py")]), ("module", ["job.py"])):
        for rank, answer in runs[name].answers().items():
            head = [os.path.basename(answer["argv"][0]) if name == "module" else answer["argv"][0]]
            expected = [*script, "--lr", "1e-3", "--nnodes", "7", "-m", str(rank), "a$b", "", "--tee"]
            assert [*head, *answer["argv"][1:]] == expected


@pytest.mark.raylaunch_only("takes a script's `--r` for an abbreviation of several flags of its own, and refuses it")
def test_arguments_that_look_like_abbreviated_flags_are_the_scripts_too(runs: dict[str, Run]) -> None:
    for answer in runs["use_env"].answers().values():
        assert answer["argv"][1:] == ["--lr", "1e-3", "--r", "3", "--no", "-t"]


def test_the_script_is_main(runs: dict[str, Run]) -> None:
    for name in ("static", "standalone", "module"):
        assert {answer["name"] for answer in runs[name].answers().values()} == {"__main__"}, name


def test_the_local_rank_comes_first_if_asked_for(runs: dict[str, Run]) -> None:
    """`torch.distributed.launch` does so without `--use-env`, raylaunch with `--pass-local-rank`."""
    for rank, answer in runs["local_rank"].answers().items():
        assert answer["argv"][1:] == [f"--local-rank={rank}", "--lr", "1e-3"]
        assert answer["env"]["LOCAL_RANK"] == str(rank)
    for answer in runs["use_env"].answers().values():
        assert not [word for word in answer["argv"] if "local" in word]


def test_the_command_line_wins_over_the_environment(runs: dict[str, Run]) -> None:
    """PET_NPROC_PER_NODE=1 is set, but the flag asks for more."""
    assert len(runs["module"].answers()) == 4


def test_workers_that_finish_early_do_not_end_the_others(runs: dict[str, Run]) -> None:
    """In these scripts rank 0 ends at once, and the others end when its process is gone."""
    for name, ranks in (("command", 4), ("two_nodes", 8)):
        assert runs[name].code == 0, runs[name].said
        assert len(envs(runs[name])) == ranks


def test_an_elastic_job_starts_with_the_nodes_that_are_there(runs: dict[str, Run]) -> None:
    """`--nnodes 1:2` with one node, and a quoted `--rdzv-conf`, as some scripts write it."""
    for env in runs["elastic"].answers().values():
        assert (env["env"]["GROUP_WORLD_SIZE"], env["env"]["WORLD_SIZE"]) == ("1", "5")


@pytest.mark.torchrun_has("--signals-to-handle")
def test_an_unknown_signal_is_warned_of(runs: dict[str, Run]) -> None:
    assert "SIGNOPE" in runs["module"].err


@pytest.fixture(scope="module")
def others(launcher: Launcher) -> dict[str, Run]:
    return together(
        {
            "function": lambda: launcher.run(launcher.name, program=SCRIPTS / "function.py"),
            "cpu": lambda: launcher.run("--nproc-per-node", "cpu", ECHO),
        }
    )


def test_a_function_gives_its_results_by_rank(others: dict[str, Run]) -> None:
    assert others["function"].code == 0, others["function"].said
    assert others["function"].answer("results") == [10, 11]


def test_a_worker_for_each_cpu(launcher: Launcher, others: dict[str, Run]) -> None:
    """The CPUs that this process may use, or those that Ray counts on the node."""
    assert others["cpu"].code == 0, others["cpu"].said
    assert len(others["cpu"].answers()) == launcher.either(8, len(os.sched_getaffinity(0)))


BAD: dict[str, tuple[tuple[str, ...], dict[str, str], str, str]] = {
    "nnodes of three parts": (("--nnodes", "2:20:30", ECHO), {}, "RuntimeError", "2:20:30"),
    "nnodes that is no number": (("--nnodes", "x", ECHO), {}, "ValueError", "`x`"),
    "nnodes upside down": (("--nnodes", "2:1", ECHO), {}, "AssertionError", "2:1"),
    "no nodes": (("--nnodes", "0", ECHO), {}, "AssertionError", "nnodes"),
    "unknown word for nproc": (("--nproc-per-node", "many", ECHO), {}, "ValueError", "many"),
    "command and module": (("--no-python", "--module", "true"), {}, "ValueError", "module"),
    "command and module from the environment": (
        ("true",),
        {"PET_NO_PYTHON": "1", "PET_MODULE": "1"},
        "ValueError",
        "module",
    ),
    "flag variable that is no number": (TRUE, {"PET_STANDALONE": "yes"}, "ValueError", "PET_STANDALONE"),
    "unknown logs specs": (("--logs_specs", "nothere", *TRUE), {}, "ValueError", "nothere"),
    "negative restarts": (("--max-restarts", "-1", *TRUE), {}, "AssertionError", "max_restarts"),
    "negative shutdown timeout": (("--shutdown-timeout", "-1", *TRUE), {}, "ValueError", "shutdown_timeout"),
    "rdzv-conf without a value": (("--rdzv-conf", "join_timeout", *TRUE), {}, "ValueError", "join_timeout"),
    "filter that is no list": (("--local-ranks-filter", "0,x", *TRUE), {}, "ValueError", "0,x"),
    "log folder that is a file": (("--log-dir", ECHO, *TRUE), {}, "NotADirectoryError", ECHO),
    "unknown flag": (("--max-restart-count", "3", *TRUE), {}, "SystemExit", "--max-restart-count"),
    "no script": ((), {}, "SystemExit", ""),
    **{
        f"{flag} {value}": ((flag, value, *TRUE), {}, "ValueError", value)
        for flag, values in {"--tee": ("4", "11", "0:1,", "0:1,1", "1,0:1"), "-r": ("11", "1,0:1")}.items()
        for value in values
    },
}
"""What is refused: arguments, environment, torchrun's exception, and a text in raylaunch's message."""

ENDPOINTS = {
    "endpoint without a port": ("--rdzv-backend", "static", "--rdzv-endpoint", "localhost", "--nnodes", "1", *TRUE),
    "empty endpoint": ("--rdzv-backend", "static", "--rdzv-endpoint", " ", "--nnodes", "1", *TRUE),
}
"""What only torchrun refuses."""

GOOD: dict[str, tuple[tuple[str, ...], dict[str, str], dict[str, Any]]] = {
    "one node": (("--nnodes", "1"), {}, {"nnodes": [1, 1]}),
    "from two to twenty": (("--nnodes", "2:20"), {}, {"nnodes": [2, 20]}),
    "nproc auto": (("--nproc-per-node", "auto"), {}, {}),
    "nproc number": (("--nproc_per_node", "4"), {}, {"nproc_per_node": 4}),
    "default shutdown timeout": ((), {}, {"shutdown_timeout": 30}),
    "shutdown timeout from the environment": ((), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, {"shutdown_timeout": 7}),
    "shutdown timeout from both": (
        ("--shutdown-timeout", "0"),
        {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"},
        {"shutdown_timeout": 0},
    ),
    "nothing redirected": (("--redirects", "0"), {}, {"redirects": "<Std.NONE: 0>"}),
    "stdout": (("--redirects", "1"), {}, {"redirects": "<Std.OUT: 1>"}),
    "stderr": (("--tee", "2"), {}, {"tee": "<Std.ERR: 2>"}),
    "both": (("-t", "3"), {}, {"tee": "<Std.ALL: 3>"}),
    "one rank": (("-r", "0:1"), {}, {"redirects": "{0: <Std.OUT: 1>}"}),
    "three ranks": (
        ("--tee", "0:0,1:3,2:2"),
        {},
        {"tee": "{0: <Std.NONE: 0>, 1: <Std.ALL: 3>, 2: <Std.ERR: 2>}"},
    ),
}
"""What is accepted: arguments, environment, and what torchrun makes of it."""

SEEN_NOWHERE_ELSE = ("from two to twenty", "nproc auto", "stderr", "both", "one rank", "three ranks")
"""Accepted command lines that no run of raylaunch tests; the others are run."""


@pytest.fixture(scope="module")
def refused(launcher: Launcher) -> dict[str, dict[str, Any]]:
    """Return the error of each command line: torchrun's exception, or raylaunch's run."""
    questions = {name: (argv, env) for name, (argv, env, *_) in BAD.items()}
    if not launcher.ours:
        return ask(launcher, questions | {name: (argv, {}) for name, argv in ENDPOINTS.items()}, only_parse=False)
    tasks: dict[str, Callable[[], Run]] = {
        name: lambda argv=argv, env=env: launcher.run(*argv, env=env, bare=True)
        for name, (argv, env) in questions.items()
    }
    return {name: {"run": run} for name, run in together(tasks).items()}


def ask(torchrun: Launcher, questions: dict[str, Any], *, only_parse: bool) -> dict[str, dict[str, Any]]:
    """Ask torchrun about many command lines in one process."""
    asked = [{"argv": argv, "env": env, "only_parse": only_parse} for argv, env in questions.values()]
    run = torchrun.run(program=SCRIPTS / "ask_torchrun.py", stdin=json.dumps(asked))
    assert run.code == 0, run.said
    return dict(zip(questions, json.loads(run.out), strict=True))


def with_needs(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters, those about the flag `--shutdown-timeout` with its mark."""
    marks = {"shutdown": pytest.mark.torchrun_has("--shutdown-timeout")}
    return [pytest.param(name, marks=[mark for word, mark in marks.items() if word in name]) for name in names]


@pytest.mark.parametrize("name", with_needs(BAD))
def test_what_makes_no_sense_is_refused(launcher: Launcher, refused: dict[str, dict[str, Any]], name: str) -> None:
    """torchrun raises (exit code 1) or exits with 2; raylaunch prints what is wrong, exits with 2 and leaves no files."""
    _, _, error, word = BAD[name]
    if not launcher.ours:
        assert refused[name]["error"] == error
        return
    run = refused[name]["run"]
    assert run.code == 2, run.said
    assert word.replace("_", "-") in run.err.replace("_", "-"), run.said
    assert "Traceback" not in run.err, run.said
    assert run.out == "", run.said
    assert [path.name for path in run.folder.iterdir() if path.stem != "terminal"] == []


@pytest.fixture(scope="module")
def understood(launchers: Mapping[str, Launcher]) -> dict[str, dict[str, Any]]:
    """Return what torchrun makes of correct command lines."""
    return ask(
        launchers["torchrun"], {name: ((*argv, ECHO), env) for name, (argv, env, _) in GOOD.items()}, only_parse=True
    )


@pytest.mark.parametrize("name", with_needs(GOOD))
def test_torchrun_takes_what_makes_sense(understood: dict[str, dict[str, Any]], name: str) -> None:
    found = understood[name]
    assert found["error"] is None, found
    assert GOOD[name][2].items() <= found.items()


@pytest.fixture(scope="module")
def taken(launcher: Launcher) -> dict[str, Run]:
    """Return runs for which there is no cluster."""
    nobody = {"RAY_ADDRESS": "127.0.0.1:1"}
    tasks = {
        name: lambda argv=argv, env=env: launcher.run(*argv, ECHO, env=env | nobody, bare=True)
        for name, (argv, env, _) in GOOD.items()
        if name in SEEN_NOWHERE_ELSE
    }
    return together(tasks)


@pytest.mark.raylaunch_only("asked in one process, above")
@pytest.mark.parametrize("name", SEEN_NOWHERE_ELSE)
def test_what_makes_sense_is_taken(taken: dict[str, Run], name: str) -> None:
    """raylaunch looks for its cluster next, and fails with another exit code than for a wrong command line."""
    assert taken[name].code == 3, taken[name].said


@pytest.mark.raylaunch_only("two digits do not match its pattern")
def test_local_ranks_beyond_nine_can_be_named(launcher: Launcher) -> None:
    run = launcher.run("--tee", "9:1,10:3", ECHO, env={"RAY_ADDRESS": "127.0.0.1:1"}, bare=True)
    assert run.code == 3, run.said


@pytest.mark.raylaunch_only("asked in the table of what is taken")
def test_the_shutdown_timeout_is_30_unless_said_otherwise(runs: dict[str, Run]) -> None:
    """It is not given; given as TORCH_ELASTIC_SHUTDOWN_TIMEOUT; given by the flag, which overrides that and may be 0."""
    found = [yaml.safe_load(runs[name].files("job.yaml")[0].read_text()) for name in ("static", "command", "module")]
    assert [job["shutdown_timeout"] for job in found] == [30, 7, 0]


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_endpoint_that_leads_nowhere(launcher: Launcher, refused: dict[str, dict[str, Any]], name: str) -> None:
    """torchrun's static rendezvous needs a host and a port; raylaunch has no rendezvous, and says so."""
    if launcher.ours:
        run = launcher.run(*ENDPOINTS[name], env={"RAY_ADDRESS": "127.0.0.1:1"}, bare=True)
        assert run.code == 3, run.said
        assert "--rdzv-endpoint" in run.err, run.said
    else:
        assert refused[name]["error"] == "ValueError"
        assert "master-port" in refused[name]["text"]
