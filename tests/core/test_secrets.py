"""What looks secret is nowhere in what is written down; all else is as it was."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core import secrets
from raylaunch.core.job import Entrypoint, Job, NodeRule
from raylaunch.core.redaction import Secrets, shown
from raylaunch.core.secrets import HIDDEN

VALUE = "hf_abcdefgh"


def job(*args: object, env: dict[str, str] | None = None, **entry: object) -> Job:
    return Job(entrypoint=Entrypoint(script="train.py", args=list(args), **entry), env=env or {})


@pytest.mark.parametrize("name", ["HF_TOKEN", "wandb_api_key", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "Secrets"])
def test_names_of_secret_variables(name):
    """The word may stand anywhere, in capitals or not."""
    assert secrets.is_secret(name)


@pytest.mark.parametrize("name", ["PATH", "NCCL_DEBUG", "TOK", ""])
def test_names_of_other_variables(name):
    """They stay readable."""
    assert not secrets.is_secret(name)
    assert shown(job(env={name or "A": VALUE}), {}).env == {name or "A": VALUE}


@pytest.mark.parametrize("name", ["--api-key", "--token", "hf_token", "--accessToken", "db.password", "url?key"])
def test_names_of_secret_arguments(name):
    """One of their words ends so."""
    assert secrets.is_secret_argument(name)


@pytest.mark.parametrize("name", ["--tokenizer", "--max-tokens", "--keys", "-m"])
def test_names_of_other_arguments(name):
    """Training has words of its own, and `job.yaml` is there to tell of them."""
    assert not secrets.is_secret_argument(name)


def test_variables_are_hidden_by_name_however_short():
    """The job's, and those of rules for nodes; nothing else is touched."""
    rule = NodeRule(nproc_per_node=2, env={"DB_PASSWORD": "x", "B": "1"})
    of = dataclasses.replace(job("--lr", "0.1", env={"API_KEY": "1", "A": "1"}), nodes={"10.0.0.7": rule})
    seen = shown(of, {})
    assert seen.env == {"API_KEY": HIDDEN, "A": "1"}
    assert seen.nodes == {"10.0.0.7": NodeRule(nproc_per_node=2, env={"DB_PASSWORD": HIDDEN, "B": "1"})}
    assert dataclasses.replace(seen, env=of.env, nodes=of.nodes) == of


def test_variables_without_a_value_are_shown():
    """There is nothing to hide."""
    assert shown(job(env={"API_KEY": ""}), {}).env == {"API_KEY": ""}


def test_arguments_are_hidden_by_name():
    """In one word, in two, and not past the next flag."""
    args = ["--token=a", "--api-key", "b", "--key", "--lr", "0.1", "db.password=c=d", "--steps=5", "--secret="]
    seen = ["--token=***", "--api-key", "***", "--key", "--lr", "0.1", "db.password=***", "--steps=5", "--secret="]
    assert shown(job(*args), {}).entrypoint.args == seen


def test_arguments_of_functions_are_hidden_by_name():
    """Whatever their type, wherever they are; yes and no are no secrets."""
    kwargs = {"token": 5, "model": {"key": [1], "width": 8}, "use_token": True, "password": None}
    of = job(3, ["--token", "a"], {"x": 1}, kwargs=kwargs)
    seen = shown(of, {}).entrypoint
    assert seen.kwargs == {"token": HIDDEN, "model": {"key": HIDDEN, "width": 8}, "use_token": True, "password": None}
    assert seen.args == [3, ["--token", HIDDEN], {"x": 1}]


@pytest.mark.parametrize(
    "of",
    [
        job(f"--url=https://x/{VALUE}/y", env={"API_KEY": VALUE}),
        job(f"--url=https://x/{VALUE}/y", "--token", VALUE),
        job(f"--url=https://x/{VALUE}/y", f"--token={VALUE}"),
        job(f"--url=https://x/{VALUE}/y", kwargs={"token": VALUE}),
        dataclasses.replace(job(f"--url=https://x/{VALUE}/y"), nodes={"*": NodeRule(env={"KEY": VALUE})}),
    ],
)
def test_values_are_hidden_wherever_they_are_repeated(of):
    """A reference put them there; all texts of the job are searched."""
    assert shown(of, {}).entrypoint.args[0] == "--url=https://x/***/y"
    assert Secrets.of(of, {}).hide(f"401: {VALUE}.") == "401: ***."


def test_values_of_the_submitter_are_hidden():
    """By `${oc.env:HF_TOKEN}` they come into the job."""
    assert shown(job(VALUE), {"HF_TOKEN": VALUE}).entrypoint.args == [HIDDEN]
    assert shown(job(VALUE), {"HOME": VALUE}).entrypoint.args == [VALUE]


def test_short_values_and_paths_are_not_searched_for():
    """`1`, `false` and folders are in other texts by right."""
    environ = {"TOKENIZERS_PARALLELISM": "false", "SSH_KEY_DIR": "/home/ana", "AUTH_TOKEN_PATH": "/home/ana/t"}
    assert Secrets.of(job(), environ) == Secrets()
    assert Secrets().hide("false 1") == "false 1"


def test_a_value_within_another():
    """The longer one goes first, or its rest would be left."""
    found = Secrets.of(job(env={"A_KEY": VALUE, "B_KEY": VALUE + "123"}), {})
    assert found.hide(f"{VALUE}123 {VALUE}") == "*** ***"


def test_forms_of_a_value():
    """A line of it, and how Python and JSON put it in quotes: an error's message may have it so."""
    found = Secrets.of(job(), {"SSH_KEY": "first line\nsecond\\line", "A_KEY": 'say "no" é'})
    said = (
        json.dumps(["first line", "second\\line", 'say "no" é']),
        repr("first line\nsecond\\line"),
        repr("é") + "second\\line",
    )
    assert [found.hide(text) for text in said] == ['["***", "***", "***"]', "'***'", "'é'***"]


@pytest.mark.parametrize(
    ("address", "seen"),
    [
        ("postgres://ana:hunter2@db/runs", "postgres://ana:***@db/runs"),
        ("(redis://:p:w@[::1]:6379)", "(redis://:***@[::1]:6379)"),
        ("http://10.0.0.7:8265/a@b", "http://10.0.0.7:8265/a@b"),
        ("ssh://ana@db", "ssh://ana@db"),
    ],
)
def test_passwords_in_addresses(address, seen):
    """Whatever the name of the variable or the setting that has the address."""
    assert Secrets().hide(address) == seen
    assert shown(job(f"--db={address}"), {}).entrypoint.args == [f"--db={seen}"]


@given(st.text(min_size=8).filter(lambda value: "*" not in value))
def test_no_value_is_left(value):
    """Whatever characters it has, those that mean something in a pattern too."""
    of = job(f"x{value}y", env={"API_KEY": value})
    assert Secrets.of(of, {}).hide(f"{value} {value}") == "*** ***"
    seen = shown(of, {})
    assert (seen.entrypoint.args, seen.env) == (["x***y"], {"API_KEY": HIDDEN})


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("  API_KEY: abc", "  API_KEY: "),
        ("  'API_KEY' : abc", "  'API_KEY' : "),
        ("env: {A: 1, hf_token: abc, B: 2}", "env: {A: 1, hf_token: "),
        ("env.API_KEY=abc def", "env.API_KEY="),
        ("env={DB_PASSWORD: abc}", "env={DB_PASSWORD: "),
        ("KEY: 'a", "KEY: "),
    ],
)
def test_where_a_secret_begins(line, left):
    """Behind its name, in a file and on the command line."""
    at = secrets.secret_at(line)
    assert line[:at] == left
    assert at is not None


@pytest.mark.parametrize(
    "line",
    ["", "nnodes: 2", "API_KEY: ???", "API_KEY: ${oc.env:KEY}", "KEY: $KEY", "- key", "a: key"],
)
def test_lines_without_a_secret(line):
    """Among them names without a value, and values that only refer to one."""
    assert secrets.secret_at(line) is None


def test_lines_are_cut_where_a_secret_begins():
    """The name stays, and so do lines without a secret or with nothing behind its name."""
    assert secrets.cut("env.API_KEY=abc") == "env.API_KEY=***"
    assert [secrets.cut(line) for line in ("nnodes=2", "env.API_KEY=")] == ["nnodes=2", "env.API_KEY="]
