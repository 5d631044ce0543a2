"""The schema of a job: the meaning of its values, and its validation."""

from __future__ import annotations

from typing import Any

import pytest

from raylaunch.core.job.job import Entrypoint, Job, NodeRule, node_range, shown_ranks
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.job.validation import Problem, problems, warnings


def problems_of(entrypoint: Entrypoint | None = None, **settings: Any) -> list[Problem]:
    return problems(Job(entrypoint=entrypoint or Entrypoint(script="train.py"), **settings))


def only_problem(entrypoint: Entrypoint | None = None, **settings: Any) -> Problem:
    (problem,) = problems_of(entrypoint, **settings)
    return problem


# Meaning of values.


@pytest.mark.parametrize(("text", "pair"), [(2, (2, 2)), ("2", (2, 2)), ("1:4", (1, 4)), ("1 : 4", (1, 4))])
def test_node_range(text, pair):
    """N or MIN:MAX, as for torchrun."""
    assert node_range(text) == pair
    job = Job(nnodes=text)
    assert (job.min_nodes, job.max_nodes) == pair


@pytest.mark.parametrize("text", ["", "two", "1:", ":4", "1:2:3", "-1", "1.5"])
def test_malformed_node_range(text):
    """The error shows the value."""
    with pytest.raises(ValueError, match=f"`{text}` is neither N nor MIN:MAX"):
        node_range(text)


@pytest.mark.parametrize(
    ("show", "ranks"), [("all", None), ("raw", None), ("none", set()), ("0", {0}), ("0, 3,12", {0, 3, 12})]
)
def test_shown_ranks(show, ranks):
    """None means all ranks."""
    assert shown_ranks(show) == ranks


@pytest.mark.parametrize("show", ["", "some", "0,", "-1", "1-3"])
def test_malformed_shown_ranks(show):
    with pytest.raises(ValueError, match="is not `all`, `raw`, `none` or a list of ranks"):
        shown_ranks(show)


@pytest.mark.parametrize(
    ("entrypoint", "kind", "text"),
    [
        (Entrypoint(script="train.py", args=["--lr", 0.1]), "script", "train.py --lr 0.1"),
        (
            Entrypoint(script="my train.py", args=["--lr 3e-4", "${local_rank}"]),
            "script",
            "'my train.py' '--lr 3e-4' '${local_rank}'",
        ),
        (Entrypoint(module="pkg.train"), "module", "pkg.train"),
        (Entrypoint(function="pkg:main"), "function", "pkg:main"),
        (Entrypoint(function="pkg:main.<locals>.<lambda>"), "function", "pkg:main.<locals>.<lambda>"),
        (Entrypoint(command="bash"), "command", "bash"),
        (
            Entrypoint(script="a.py", args=["--key=a b", "--token", "x", "y z"]),
            "script",
            "a.py --key=*** --token *** 'y z'",
        ),
        (Entrypoint(module="a", args=["at https://ada:hunter2@host b"]), "module", "a at https://ada:***@host b"),
        (Entrypoint(), "", ""),
    ],
)
def test_entrypoint_kinds(entrypoint, kind, text):
    """An entry point has one of four kinds. What people see is its command line, as a shell needs it."""
    assert (entrypoint.kind, Redactor().headline(Job(entrypoint=entrypoint, name="a"))) == (kind, f"a: {text}")


@pytest.mark.parametrize(
    ("entrypoint", "title"),
    [
        (Entrypoint(script=".."), "job"),
        (Entrypoint(script="a/../"), "job"),
        (Entrypoint(command="a\x1b[1m\n"), "a__1m_"),
        (Entrypoint(module="x" * 300), "x" * 50),
        (Entrypoint(script="src/train.py"), "train"),
        (Entrypoint(script="C:\\src\\train.py"), "train"),
        (Entrypoint(module="pkg.train"), "pkg.train"),
        (Entrypoint(function="pkg.train:main"), "main"),
        (Entrypoint(function="pkg:main.<locals>.<lambda>"), "main.locals.lambda"),
        (Entrypoint(script="a;b|c&$(d)*.py"), "a_b_c___d__"),
        (Entrypoint(command="/usr/bin/env/"), "env"),
        (Entrypoint(), "job"),
    ],
)
def test_default_title(entrypoint, title):
    """Without a name, the title is the last part of the entry point, which can name a folder."""
    assert Job(entrypoint=entrypoint).title == title
    assert Job(entrypoint=entrypoint, name="night").title == "night"


# Validation.


def test_preloaded_modules():
    """`auto` means what a DDP script needs."""
    assert Job(preload=["a", "b"]).preloaded == ("a", "b")
    assert Job(preload=[]).preloaded == ()
    assert Job(preload="auto").preloaded == Job().preloaded == ("torch", "torch.distributed", "torch.utils.data")


def test_defaults_are_valid():
    """A job needs only an entry point."""
    assert problems_of() == []


def test_all_problems_are_reported_together():
    assert [problem.key for problem in problems_of(Entrypoint(), nnodes=0, show="x", max_restarts=-1, name="..")] == [
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
def test_problems_of_the_entrypoint(entrypoint, key, message):
    """Exactly one of the four kinds, well formed; keyword arguments only for functions."""
    problem = only_problem(entrypoint)
    assert (problem.key, problem.message) == (key, message)


def test_second_entrypoint_refers_to_the_first():
    """`also` is the key of the other one, so that both can be shown."""
    assert only_problem(Entrypoint(script="a.py", module="b")).also == "entrypoint.script"


def test_functions_take_keyword_arguments():
    assert problems_of(Entrypoint(function="a:b", kwargs={"x": 1})) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nnodes": "many"}, "`many` is neither N nor MIN:MAX"),
        ({"nnodes": "0:2"}, "at least one node is needed"),
        ({"nnodes": "4:2"}, "the minimum (4) is larger than the maximum (2)"),
        ({"nproc_per_node": 0}, "`0` is neither a number of workers nor one of auto, cpu, gpu, xpu"),
        ({"nproc_per_node": "gpus"}, "`gpus` is neither a number of workers nor one of auto, cpu, gpu, xpu"),
        ({"nprocs": 0}, "0 is less than 1"),
        ({"gpus_per_worker": "half"}, "`half` is neither a number of GPUs nor auto"),
        ({"gpus_per_worker": 1.5}, "`1.5` is neither a number of GPUs nor auto"),
        ({"gpus_per_worker": -0.5}, "`-0.5` is neither a number of GPUs nor auto"),
        ({"preemption_notices": "on"}, "`on` is not one of off, aws, gcp, azure"),
        ({"placement": "packed"}, "`packed` is not one of auto, spread, pack"),
        ({"start_method": "fork"}, "`fork` is not one of forkserver, spawn"),
        ({"show": "rank 0"}, "`rank 0` is not `all`, `raw`, `none` or a list of ranks like `0,3`"),
        ({"placement_timeout": 0}, "0 seconds is no time: more than 0 is expected"),
        ({"join_timeout": -1}, "-1 seconds is no time: more than 0 is expected"),
        ({"start_timeout": float("nan")}, "nan is not a number"),
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
        ({"cpus_per_worker": float("inf")}, "inf is too large: the limit is 1,000,000"),
        ({"shutdown_timeout": float("nan")}, "nan is not a number"),
        ({"max_restarts": -1}, "-1 is less than 0"),
        ({"last_call": -0.5}, "-0.5 is less than 0"),
        ({"shutdown_timeout": -1}, "-1 is less than 0"),
        ({"cpus_per_worker": -1}, "-1 is less than 0"),
        ({"nprocs": 10**400}, "this number is too large: the limit is 1,000,000"),
        ({"nproc_per_node": 10**5000}, "`this number` is neither a number of workers nor one of auto, cpu, gpu, xpu"),
        ({"nnodes": 10**5000}, "this number is too large: the limit is 100,000"),
        ({"nproc_per_node": 11, "nnodes": 100_000}, "100000 nodes with 11 workers each are too many"),
        ({"name": "x" * 201}, "a name cannot have more than 200 bytes"),
        ({"name": "x\n"}, "the character U+000A cannot be part of a name"),
        ({"log_dir": "a\0b"}, "a zero byte is not allowed here"),
        ({"spares": -1}, "-1 is less than 0"),
        ({"keep_warm": -1}, "-1 is less than 0"),
        ({"keep_warm": float("inf")}, "inf seconds is more than a year"),
        ({"exclude_after": -1}, "-1 is less than 0"),
        ({"multiple_of": 0}, "0 is less than 1"),
        ({"node_timeout": 0.5}, "0.5 seconds is less than 1"),
        ({"node_timeout": float("inf")}, "inf seconds is more than a day"),
        ({"node_timeout": float("nan")}, "nan is not a number"),
        ({"hang_timeout": 0}, "0 seconds is no time: more than 0 is expected"),
        ({"hang_timeout": float("nan")}, "nan is not a number"),
        ({"hang_timeout": "never"}, "`never` is neither a number of seconds nor one of auto, off"),
        ({"hang_timeout": "30"}, "`30` is neither a number of seconds nor one of auto, off"),
        ({"name": "a/b"}, "`a/b` cannot name a folder"),
        ({"name": " "}, "` ` cannot name a folder"),
        ({"run_id": ".."}, "`..` cannot name a folder"),
        ({"deadline": "soon"}, "`soon` is neither a time, a duration nor auto"),
        ({"deadline": "2026-01-31 9:00"}, "`2026-01-31 9:00` is neither a time, a duration nor auto"),
        ({"deadline": ""}, "`` is neither a time, a duration nor auto"),
        ({"grace": -1}, "-1 is less than 0"),
        ({"preload": "torch"}, "`torch` is neither a list of modules nor auto"),
    ],
)
def test_problems_of_settings(settings, message):
    """Each problem has the key of the setting, and shows its value."""
    problem = only_problem(**settings)
    assert (problem.key, problem.message) == (next(iter(settings)), message)


def test_hint_for_a_reversed_node_range():
    assert only_problem(nnodes="4:2").hint == "did you mean `2:4`?"


@pytest.mark.parametrize("key", ["redirects", "tee"])
@pytest.mark.parametrize("value", [4, "", "0:1,", "11", "0:1,1", "1,0:1", "0:4", "a:1"])
def test_malformed_stream_masks(key, value):
    """torchrun refuses these values too."""
    problem = only_problem(**{key: value})
    assert problem.key == key
    assert problem.message.startswith(f"`{value}` names no streams: ")


@pytest.mark.parametrize("key", ["redirects", "tee"])
@pytest.mark.parametrize("value", [0, 3, "2", "0:3", "0:1,1:2,10:0"])
def test_valid_stream_masks(key, value):
    """Local ranks over 9 are valid, though torchrun refuses them."""
    assert problems_of(**{key: value}) == []


def test_hints_for_misspelled_values():
    """The hint is the most similar valid value."""
    assert only_problem(numa_binding="sockets").hint == "did you mean `socket`?"
    assert only_problem(preload="Auto").hint == "did you mean `auto`?"
    assert only_problem(preload="torch").hint == "for example `[torch]`"
    assert only_problem(nproc_per_node="gpus").hint == "did you mean `gpu`?"
    assert only_problem(nproc_per_node="zebra").hint == "for example `8`, or `gpu` for one on each GPU"
    assert only_problem(hang_timeout="Of").hint == "did you mean `off`?"
    assert only_problem(hang_timeout="automatic").hint == "did you mean `auto`?"
    assert only_problem(hang_timeout="30").hint == "omit the quotes"
    assert only_problem(hang_timeout="never").hint == "for example `600`; `off` stands for never"


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
def test_impossible_multiples(settings, sizes, also):
    """A job whose world size can never be a multiple of `multiple_of` is refused."""
    problem = only_problem(**settings)
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
def test_possible_multiples(settings):
    """If each node decides its number of workers, any multiple may be possible."""
    assert problems_of(**settings) == []


@pytest.mark.parametrize("nnodes", ["many", "0", "4:2"])
def test_malformed_node_range_is_one_problem(nnodes):
    """It does not cause a second problem about `multiple_of`."""
    assert [problem.key for problem in problems_of(nnodes=nnodes, multiple_of=7)] == ["nnodes"]


@pytest.mark.parametrize("value", ["auto", "3h50m", "90", "1.5d", "18:30", "2026-01-31T18:30:00.5Z", "2026-01-31"])
def test_valid_deadlines(value):
    """Whether the time is to come is found out later."""
    assert problems_of(deadline=value) == []


@pytest.mark.parametrize("value", ["auto", "off", 30, 0.5])
def test_valid_hang_timeouts(value):
    """A number of seconds, `auto` or `off`."""
    assert problems_of(hang_timeout=value) == []


def test_redacted_values_are_refused():
    """The `job.yaml` of a run has `***` instead of secrets; to run it again, they must be given."""
    problem = only_problem(env={"API_KEY": "***", "A": "***"})
    assert problem == Problem(
        key="env.API_KEY",
        message="`***` stands for a secret that was not written down",
        hint="set API_KEY again, or omit it and set it in the environment",
    )
    assert only_problem(nodes={"10.0.0.7": NodeRule(env={"KEY": "***"})}).key == "nodes.10.0.0.7.env.KEY"


def test_pass_local_rank_is_not_for_functions():
    """A function takes Python arguments."""
    problem = only_problem(Entrypoint(function="a:b", pass_local_rank=True))
    assert problem.key == "entrypoint.pass_local_rank"
    assert problems_of(Entrypoint(command="a", pass_local_rank=True)) == []


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("SIGKILL", "no program can handle SIGKILL", "omit it"),
        ("SIGSTOP", "no program can handle SIGSTOP", "omit it"),
        ("usr1", "`usr1` is not a signal", "did you mean `SIGUSR1`?"),
        ("SIGUSR3", "`SIGUSR3` is not a signal", "did you mean `SIGUSR2`?"),
        ("zebra", "`zebra` is not a signal", ""),
    ],
)
def test_problems_of_signals_to_forward(name, message, hint):
    """The key has the index of the signal in the list."""
    problem = only_problem(signals_to_forward=["SIGUSR1", name])
    assert (problem.key, problem.message, problem.hint) == ("signals_to_forward.1", message, hint)


def test_signal_cannot_be_both_handled_and_forwarded():
    """The problem refers to both places."""
    problem = only_problem(signals_to_forward=["SIGUSR1", "SIGINT"])
    assert (problem.key, problem.also) == ("signals_to_forward.1", "signals_to_handle.1")


def test_unknown_signals_to_handle_cause_a_warning():
    """As for torchrun. Signals that no program can handle are a problem."""
    job = Job(entrypoint=Entrypoint(script="a.py"), signals_to_handle=["SIGTERM", "SIGODD"])
    assert problems(job) == []
    assert warnings(job) == ["`SIGODD` is no signal that this system knows; it is left out of signals_to_handle"]
    assert warnings(Job()) == []
    assert only_problem(signals_to_handle=["SIGKILL"]).key == "signals_to_handle.0"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"show": "9", "nproc_per_node": 2}, "rank 9, which no worker can have: the highest rank is 1"),
        (
            {"show": "0,4,5", "nproc_per_node": "2", "nnodes": "1:2"},
            "rank 4-5, which no worker can have: the highest rank is 3",
        ),
        ({"show": "8", "nprocs": 8, "nproc_per_node": 9}, "rank 8, which no worker can have: the highest rank is 7"),
        (
            {"show": "8", "nodes": {"10.0.0.7": NodeRule(nproc_per_node=8)}},
            "rank 8, which no worker can have: the highest rank is 7",
        ),
        ({"show": "7", "nodes": {"10.0.0.7": NodeRule(nproc_per_node=8), "10.0.0.8": NodeRule()}}, None),
        ({"show": "9", "nproc_per_node": "gpu"}, None),
        ({"show": "all"}, None),
        ({"show": "none"}, None),
    ],
)
def test_ranks_that_no_worker_can_have_cause_a_warning(settings, said):
    """Nothing of them is shown. How many GPUs or CPUs there are is not known here."""
    assert warnings(Job(**settings)) == ([f"`show` names {said}"] if said else [])


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
def test_problems_of_node_rules(which, rule, key):
    """Problems of the keys and of the values."""
    assert only_problem(nodes={which: rule}).key == key


def test_valid_node_rules():
    """An address, a pattern, a subnet, a label."""
    rule = NodeRule(nproc_per_node=7, env={"A": "1"})
    assert problems_of(nodes={"10.0.0.7": rule, "10.0.0.*": rule, "10.1.0.0/16": rule, "label:zone=a": rule}) == []


def test_malformed_values_of_variables():
    """The operating system ends values at a zero byte."""
    assert only_problem(env={"A": "1\0"}).message == "an environment variable cannot hold a zero byte"
    assert only_problem(preload=("torch", "a\0b")).key == "preload.1"


@pytest.mark.parametrize("settings", [{"last_call": 0}, {"shutdown_timeout": 0}, {"nproc_per_node": "4"}])
def test_valid_edge_values(settings):
    """No last call, no grace, a number in quotes."""
    assert problems_of(**settings) == []


@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
def test_malformed_names_of_variables(name):
    assert only_problem(env={name: "1", "GOOD": "1"}) == Problem(
        key=f"env.{name}", message=f"`{name}` cannot name an environment variable"
    )
