"""The schema of a job: what its values mean, and what can be wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from raylaunch.core.job import DEFAULT_PRELOAD, Entrypoint, Job, NodeRule, node_range, shown_ranks
from raylaunch.core.problems import Problem, problems, warnings


def found(entrypoint: Entrypoint | None = None, **settings: Any) -> list[Problem]:
    return problems(Job(entrypoint=entrypoint or Entrypoint(script="train.py"), **settings))


def only(entrypoint: Entrypoint | None = None, **settings: Any) -> Problem:
    (problem,) = found(entrypoint, **settings)
    return problem


# Values.


@pytest.mark.parametrize(("text", "pair"), [(2, (2, 2)), ("2", (2, 2)), ("1:4", (1, 4)), ("1 : 4", (1, 4))])
def test_a_range_of_nodes(text, pair):
    """N or MIN:MAX, as torchrun has it."""
    assert node_range(text) == pair
    job = Job(nnodes=text)
    assert (job.min_nodes, job.max_nodes) == pair


@pytest.mark.parametrize("text", ["", "two", "1:", ":4", "1:2:3", "-1", "1.5"])
def test_no_range_of_nodes(text):
    """Anything else is an error that shows what was written."""
    with pytest.raises(ValueError, match=f"`{text}` is neither N nor MIN:MAX"):
        node_range(text)


@pytest.mark.parametrize(
    ("show", "ranks"), [("all", None), ("raw", None), ("none", set()), ("0", {0}), ("0, 3,12", {0, 3, 12})]
)
def test_shown_ranks(show, ranks):
    """None stands for all."""
    assert shown_ranks(show) == ranks


@pytest.mark.parametrize("show", ["", "some", "0,", "-1", "1-3"])
def test_no_shown_ranks(show):
    """Anything else is an error."""
    with pytest.raises(ValueError, match="is not `all`, `raw`, `none` or a list of ranks"):
        shown_ranks(show)


@pytest.mark.parametrize(
    ("entrypoint", "kind", "text"),
    [
        (Entrypoint(script="train.py", args=["--lr", 0.1]), "script", "train.py --lr 0.1"),
        (Entrypoint(module="pkg.train"), "module", "pkg.train"),
        (Entrypoint(function="pkg:main"), "function", "pkg:main"),
        (Entrypoint(command="bash"), "command", "bash"),
        (Entrypoint(), "", ""),
    ],
)
def test_what_is_run(entrypoint, kind, text):
    """One of four kinds, in words as on a command line."""
    assert (entrypoint.kind, str(entrypoint)) == (kind, text)


@pytest.mark.parametrize(
    ("entrypoint", "title"),
    [
        (Entrypoint(script="src/train.py"), "train"),
        (Entrypoint(script="C:\\src\\train.py"), "train"),
        (Entrypoint(module="pkg.train"), "pkg.train"),
        (Entrypoint(function="pkg.train:main"), "main"),
        (Entrypoint(command="/usr/bin/env/"), "env"),
        (Entrypoint(), "job"),
    ],
)
def test_a_job_without_a_name_is_called_after_what_it_runs(entrypoint, title):
    """The last part of it, so that it can name a folder."""
    assert Job(entrypoint=entrypoint).title == title
    assert Job(entrypoint=entrypoint, name="night").title == "night"


# Problems.


def test_what_is_preloaded():
    """What was asked for, no more; left to us, what any training needs."""
    assert Job(preload=["a", "b"]).preloaded == ("a", "b")
    assert Job(preload=[]).preloaded == ()
    assert Job(preload="auto").preloaded == Job().preloaded == DEFAULT_PRELOAD


def test_nothing_is_wrong_with_the_defaults():
    """A script is all that a job needs."""
    assert found() == []


def test_all_problems_are_found_at_once():
    """As compilers do it."""
    assert [problem.key for problem in found(Entrypoint(), nnodes=0, show="x", max_restarts=-1, name="..")] == [
        "entrypoint",
        "nnodes",
        "show",
        "max_restarts",
        "name",
    ]


@pytest.mark.parametrize(
    ("entrypoint", "key", "message"),
    [
        (Entrypoint(), "entrypoint", "nothing to run: give a script, module, function or command"),
        (
            Entrypoint(script="a.py", command="b"),
            "entrypoint.command",
            "both `script` and `command` are given, but one of script, module, function or command is expected",
        ),
        (Entrypoint(script=" "), "entrypoint.script", "`script` is empty"),
        (Entrypoint(function="main"), "entrypoint.function", "`main` is not of the form `package.module:function`"),
        (Entrypoint(function="a:b:c"), "entrypoint.function", "`a:b:c` is not of the form `package.module:function`"),
        (Entrypoint(function="a:"), "entrypoint.function", "`a:` is not of the form `package.module:function`"),
        (Entrypoint(script="a.py", kwargs={"x": 1}), "entrypoint.kwargs", "a script takes no keyword arguments"),
    ],
)
def test_problems_of_the_entry_point(entrypoint, key, message):
    """Exactly one of the four, well formed; keyword arguments for functions only."""
    problem = only(entrypoint)
    assert (problem.key, problem.message) == (key, message)


def test_a_second_entry_point_points_at_the_first():
    """So that both places can be shown."""
    assert only(Entrypoint(script="a.py", module="b")).also == "entrypoint.script"


def test_functions_take_keyword_arguments():
    """They are the ones that do."""
    assert found(Entrypoint(function="a:b", kwargs={"x": 1})) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nnodes": "many"}, "`many` is neither N nor MIN:MAX"),
        ({"nnodes": "0:2"}, "at least one node is needed"),
        ({"nnodes": "4:2"}, "the minimum (4) is larger than the maximum (2)"),
        ({"nproc_per_node": 0}, "`0` is neither a number of workers nor one of auto, cpu, gpu"),
        ({"nproc_per_node": "gpus"}, "`gpus` is neither a number of workers nor one of auto, cpu, gpu"),
        ({"nprocs": 0}, "at least one worker is needed"),
        ({"gpus_per_worker": "half"}, "`half` is neither a number of GPUs nor auto"),
        ({"placement": "packed"}, "`packed` is not one of auto, spread, pack"),
        ({"start_method": "fork"}, "`fork` is not one of forkserver, spawn"),
        ({"show": "rank 0"}, "`rank 0` is not `all`, `raw`, `none` or a list of ranks like `0,3`"),
        ({"placement_timeout": 0}, "0 seconds is no time: more than 0 is expected"),
        ({"join_timeout": -1}, "-1 seconds is no time: more than 0 is expected"),
        ({"start_timeout": float("nan")}, "nan seconds is no time: more than 0 is expected"),
        ({"log_layout": "torch"}, "`torch` is not one of raylaunch, torchrun"),
        ({"event_log_handler": "file"}, "`file` is not one of null, console"),
        ({"numa_binding": "cpu"}, "`cpu` is not one of node, socket, exclusive, core-complex"),
        ({"role": ""}, "`role` is empty"),
        ({"logs_specs": "mine"}, "`mine` is not `default`, the only one here: raylaunch decides itself where files go"),
        ({"log_dir": ""}, "`log_dir` is empty"),
        ({"master_addr": ""}, "`master_addr` is empty"),
        ({"master_port": -1}, "-1 is not a port: 0 (a free one) to 65535 is expected"),
        ({"master_port": 65536}, "65536 is not a port: 0 (a free one) to 65535 is expected"),
        ({"local_ranks_filter": "0-3"}, "`0-3` is not a list of local ranks like `0,1`"),
        ({"cpus_per_worker": float("inf")}, "inf is more than any node has"),
        ({"shutdown_timeout": float("nan")}, "nan is not a number"),
        ({"max_restarts": -1}, "-1 is less than 0"),
        ({"last_call": -0.5}, "-0.5 is less than 0"),
        ({"shutdown_timeout": -1}, "-1 is less than 0"),
        ({"cpus_per_worker": -1}, "-1 is less than 0"),
        ({"spares": -1}, "-1 is less than 0"),
        ({"keep_warm": -1}, "-1 is less than 0"),
        ({"keep_warm": float("inf")}, "inf seconds never end"),
        ({"exclude_after": -1}, "-1 is less than 0"),
        ({"multiple_of": 0}, "0 is less than 1"),
        ({"node_timeout": 0.5}, "0.5 seconds is out of range: 1 to 86400 is expected"),
        ({"node_timeout": float("inf")}, "inf seconds is out of range: 1 to 86400 is expected"),
        ({"node_timeout": float("nan")}, "nan seconds is out of range: 1 to 86400 is expected"),
        ({"hang_timeout": 0}, "0 seconds is no time: more than 0 is expected"),
        ({"hang_timeout": float("nan")}, "nan seconds is no time: more than 0 is expected"),
        ({"hang_timeout": "never"}, "`never` is neither a number of seconds nor one of auto, off"),
        ({"hang_timeout": "30"}, "`30` is neither a number of seconds nor one of auto, off"),
        ({"name": "a/b"}, "`a/b` cannot name a folder"),
        ({"name": " "}, "` ` cannot name a folder"),
        ({"run_id": ".."}, "`..` cannot name a folder"),
        ({"preload": "torch"}, "`torch` is neither a list of modules nor auto"),
    ],
)
def test_problems_of_settings(settings, message):
    """Each names its key and shows the value."""
    problem = only(**settings)
    assert (problem.key, problem.message) == (next(iter(settings)), message)


def test_a_range_the_wrong_way_round_is_turned():
    """The hint is what was meant."""
    assert only(nnodes="4:2").hint == "did you mean `2:4`?"


@pytest.mark.parametrize("key", ["redirects", "tee"])
@pytest.mark.parametrize("value", [4, "", "0:1,", "11", "0:1,1", "1,0:1", "0:4", "a:1"])
def test_words_that_name_no_streams(key, value):
    """What torchrun refuses, too."""
    problem = only(**{key: value})
    assert problem.key == key
    assert problem.message.startswith(f"`{value}` names no streams: ")


@pytest.mark.parametrize("key", ["redirects", "tee"])
@pytest.mark.parametrize("value", [0, 3, "2", "0:3", "0:1,1:2,10:0"])
def test_words_that_name_streams(key, value):
    """Of local ranks over 9 as well, which torchrun refuses."""
    assert found(**{key: value}) == []


def test_near_misses_of_words():
    """The hint is the word that was probably meant."""
    assert only(numa_binding="sockets").hint == "did you mean `socket`?"
    assert only(preload="Auto").hint == "did you mean `auto`?"
    assert only(preload="torch").hint == "for example `[torch]`"
    assert only(nproc_per_node="gpus").hint == "did you mean `gpu`?"
    assert only(nproc_per_node="zebra").hint == "for example `8`, or `gpu` for one on each GPU"
    assert only(hang_timeout="Of").hint == "did you mean `off`?"
    assert only(hang_timeout="automatic").hint == "did you mean `auto`?"
    assert only(hang_timeout="30").hint == "leave the quotes away"
    assert only(hang_timeout="never").hint == "for example `600`; `off` stands for never"


@pytest.mark.parametrize(
    ("settings", "sizes", "also"),
    [
        ({"multiple_of": 3}, "1 x 1 workers", "nnodes"),
        ({"multiple_of": 8, "nnodes": "1:3", "nproc_per_node": 2}, "1 to 3 nodes with 2 workers each", "nnodes"),
        ({"multiple_of": 7, "nnodes": "2:6"}, "2 to 6 nodes with 1 worker each", "nnodes"),
        ({"multiple_of": 4, "nnodes": "5:7"}, "5 to 7 nodes with 1 worker each", "nnodes"),
        ({"multiple_of": 4, "nprocs": 6, "nnodes": "1:4"}, "`nprocs` is 6", "nprocs"),
    ],
)
def test_multiples_that_no_world_can_have(settings, sizes, also):
    """Said before anything waits for such a world."""
    problem = only(**settings)
    assert problem.message == f"no world size is a multiple of {settings['multiple_of']}: {sizes}"
    assert (problem.key, problem.also) == ("multiple_of", also)


@pytest.mark.parametrize(
    "settings",
    [
        {"multiple_of": 8, "nnodes": "1:4", "nproc_per_node": 2},
        {"multiple_of": 6, "nnodes": "2:3", "nproc_per_node": "4"},
        {"multiple_of": 3, "nprocs": 6},
        {"multiple_of": 7, "nproc_per_node": "gpu"},
        {"multiple_of": 7, "nodes": {"10.0.0.7": NodeRule(nproc_per_node=7)}},
    ],
)
def test_multiples_that_some_world_has_or_may_have(settings):
    """Where each node says itself how many workers it has, only the cluster can tell."""
    assert found(**settings) == []


@pytest.mark.parametrize("nnodes", ["many", "0", "4:2"])
def test_a_wrong_range_of_nodes_is_one_mistake(nnodes):
    """No second one is made of it."""
    assert [problem.key for problem in found(nnodes=nnodes, multiple_of=7)] == ["nnodes"]


@pytest.mark.parametrize("value", ["auto", "off", 30, 0.5])
def test_times_for_a_hang(value):
    """A number of seconds, or one of two words."""
    assert found(hang_timeout=value) == []


def test_what_was_hidden_is_no_value():
    """The `job.yaml` of a run has no secrets in it; to use it again, they must be given."""
    problem = only(env={"API_KEY": "***", "A": "***"})
    assert problem == Problem(
        key="env.API_KEY",
        message="`***` stands for a secret that was not written down",
        hint="set API_KEY anew, or leave it to the environment",
    )
    assert only(nodes={"10.0.0.7": NodeRule(env={"KEY": "***"})}).key == "nodes.10.0.0.7.env.KEY"


def test_a_function_gets_no_local_rank_argument():
    """It takes Python arguments."""
    problem = only(Entrypoint(function="a:b", pass_local_rank=True))
    assert problem.key == "entrypoint.pass_local_rank"
    assert found(Entrypoint(command="a", pass_local_rank=True)) == []


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("SIGKILL", "no program can handle SIGKILL", "leave it away"),
        ("SIGSTOP", "no program can handle SIGSTOP", "leave it away"),
        ("usr1", "`usr1` is not a signal", "did you mean `SIGUSR1`?"),
        ("SIGUSR3", "`SIGUSR3` is not a signal", "did you mean `SIGUSR2`?"),
        ("zebra", "`zebra` is not a signal", ""),
    ],
)
def test_signals_that_cannot_be_forwarded(name, message, hint):
    """The item of the list is named."""
    problem = only(signals_to_forward=["SIGUSR1", name])
    assert (problem.key, problem.message, problem.hint) == ("signals_to_forward.1", message, hint)


def test_a_signal_ends_the_run_or_is_forwarded():
    """Not both; the two places are named."""
    problem = only(signals_to_forward=["SIGUSR1", "SIGINT"])
    assert (problem.key, problem.also) == ("signals_to_forward.1", "signals_to_handle.1")


def test_signals_to_handle_that_no_system_has_are_no_problem():
    """There is a warning of them, as under torchrun; what no program can handle is a mistake."""
    job = Job(entrypoint=Entrypoint(script="a.py"), signals_to_handle=["SIGTERM", "SIGODD"])
    assert problems(job) == []
    assert warnings(job) == ["`SIGODD` is no signal that this system knows; it is left out of signals_to_handle"]
    assert warnings(Job()) == []
    assert only(signals_to_handle=["SIGKILL"]).key == "signals_to_handle.0"


@pytest.mark.parametrize(
    ("which", "rule", "key"),
    [
        ("", NodeRule(), "nodes."),
        ("label:zone", NodeRule(), "nodes.label:zone"),
        ("10.0.0.0/99", NodeRule(), "nodes.10.0.0.0/99"),
        ("10.0.0.7", NodeRule(nproc_per_node=-1), "nodes.10.0.0.7.nproc_per_node"),
        ("10.0.0.7", NodeRule(env={"A=B": "1"}), "nodes.10.0.0.7.env.A=B"),
    ],
)
def test_problems_of_rules_for_nodes(which, rule, key):
    """Of their keys, and of what they say."""
    assert only(nodes={which: rule}).key == key


def test_rules_for_nodes_that_are_fine():
    """An address, a pattern, a subnet, a label."""
    rule = NodeRule(nproc_per_node=7, env={"A": "1"})
    assert found(nodes={"10.0.0.7": rule, "10.0.0.*": rule, "10.1.0.0/16": rule, "label:zone=a": rule}) == []


def test_values_that_no_variable_can_have():
    """The operating system ends them at a zero byte."""
    assert only(env={"A": "1\0"}).message == "an environment variable cannot hold a zero byte"


@pytest.mark.parametrize("settings", [{"last_call": 0}, {"shutdown_timeout": 0}, {"nproc_per_node": "4"}])
def test_borders_that_are_fine(settings):
    """No last call, no grace, a number in quotes."""
    assert found(**settings) == []


@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
def test_names_that_no_variable_can_have(name):
    """The operating system would refuse them, on every node."""
    assert only(env={name: "1", "GOOD": "1"}) == Problem(
        key=f"env.{name}", message=f"`{name}` cannot name an environment variable"
    )
