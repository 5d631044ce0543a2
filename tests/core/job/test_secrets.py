"""Secrets are redacted in everything that is written; other values are unchanged."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core.job import secrets
from raylaunch.core.job.job import Entrypoint, Job, NodeRule
from raylaunch.core.job.redaction import Redactor, redacted_errors
from raylaunch.core.job.secrets import HIDDEN
from raylaunch.errors import ClusterError
from tests.core.adversarial import steep
from tests.profiles import examples

VALUE = "hf_abcdefgh"


def job(*args: object, env: dict[str, str] | None = None, **entry: object) -> Job:
    return Job(entrypoint=Entrypoint(script="train.py", args=list(args), **entry), env=env or {})


def shown(a_job: Job, environ: dict[str, str]) -> Job:
    return Redactor.of(a_job, environ).shown(a_job)


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "wandb_api_key", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "Secrets"),
        *("DB_PASSWD", "SMTP_PASS", "MYSQL_PWD", "HTTP_AUTH", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_PASSPHRASE"),
    ],
)
def test_names_of_secret_variables(name):
    """The names contain one of the words, in upper or lower case."""
    assert secrets.is_secret(name)


@pytest.mark.parametrize(
    "name", ["PATH", "NCCL_DEBUG", "TOK", "", "PWD", "OLDPWD", "RAY_AUTH_MODE", "COMPASS", "AUTHOR", "PASSES"]
)
def test_names_of_other_variables(name):
    """Their values are shown."""
    assert not secrets.is_secret(name)
    assert shown(job(env={name or "A": VALUE}), {}).env == {name or "A": VALUE}


@pytest.mark.parametrize(
    "name",
    [
        *("--api-key", "--token", "hf_token", "--accessToken", "db.password", "url?key"),
        *("--passwd", "--auth", "--smtp-pass", "dbPass", "--mysql_pwd", "--aws-credentials"),
    ],
)
def test_names_of_secret_arguments(name):
    """One of the parts of the name ends with one of the words."""
    assert secrets.is_secret_argument(name)


@pytest.mark.parametrize(
    "name", ["--tokenizer", "--max-tokens", "--keys", "-m", "--author", "--lowpass", "--passes", "--auth-mode", "-"]
)
def test_names_of_other_arguments(name):
    """Names that are usual in training are not redacted."""
    assert not secrets.is_secret_argument(name)


def test_secret_variables_are_redacted():
    """Those of the job and of its rules for nodes, even short values."""
    rule = NodeRule(nproc_per_node=2, env={"DB_PASSWORD": "x", "B": "1"})
    a_job = dataclasses.replace(job("--lr", "0.1", env={"API_KEY": "1", "A": "1"}), nodes={"10.0.0.7": rule})
    seen = shown(a_job, {})
    assert seen.env == {"API_KEY": HIDDEN, "A": "1"}
    assert seen.nodes == {"10.0.0.7": NodeRule(nproc_per_node=2, env={"DB_PASSWORD": HIDDEN, "B": "1"})}
    assert dataclasses.replace(seen, env=a_job.env, nodes=a_job.nodes) == a_job


def test_empty_variables_are_shown():
    assert shown(job(env={"API_KEY": ""}), {}).env == {"API_KEY": ""}


def test_secret_arguments_are_redacted():
    """`--key=value` and `--key value`; the next flag is no value."""
    args = ["--token=a", "--api-key", "b", "--key", "--lr", "0.1", "db.password=c=d", "--steps=5", "--secret="]
    seen = ["--token=***", "--api-key", "***", "--key", "--lr", "0.1", "db.password=***", "--steps=5", "--secret="]
    assert shown(job(*args), {}).entrypoint.args == seen


def test_secret_arguments_of_functions_are_redacted():
    """At any depth and of any type, except booleans and None."""
    kwargs = {"token": 5, "model": {"key": [1], "width": 8}, "use_token": True, "password": None}
    a_job = job(3, ["--token", "a"], {"x": 1}, kwargs=kwargs)
    seen = shown(a_job, {}).entrypoint
    assert seen.kwargs == {"token": HIDDEN, "model": {"key": HIDDEN, "width": 8}, "use_token": True, "password": None}
    assert seen.args == [3, ["--token", HIDDEN], {"x": 1}]


@pytest.mark.parametrize(
    "a_job",
    [
        job(f"--url=https://x/{VALUE}/y", env={"API_KEY": VALUE}),
        job(f"--url=https://x/{VALUE}/y", "--token", VALUE),
        job(f"--url=https://x/{VALUE}/y", f"--token={VALUE}"),
        job(f"--url=https://x/{VALUE}/y", kwargs={"token": VALUE}),
        dataclasses.replace(job(f"--url=https://x/{VALUE}/y"), nodes={"*": NodeRule(env={"KEY": VALUE})}),
    ],
)
def test_repeated_secrets_are_redacted(a_job):
    """A secret value is redacted in all texts of the job, where a reference may have put it."""
    assert shown(a_job, {}).entrypoint.args[0] == "--url=https://x/***/y"
    assert Redactor.of(a_job, {}).hide(f"401: {VALUE}.") == "401: ***."


def test_secrets_of_the_submitter_are_redacted():
    """`${oc.env:HF_TOKEN}` copies them into the job."""
    assert shown(job(VALUE), {"HF_TOKEN": VALUE}).entrypoint.args == [HIDDEN]
    assert shown(job(VALUE), {"HOME": VALUE}).entrypoint.args == [VALUE]


@pytest.mark.parametrize(
    ("environ", "text", "seen"),
    [
        ({"SMTP_PASS": "hunter2"}, "login ana:hunter2 failed, hunter22", "login ana:*** failed, hunter22"),
        ({"DB_PASSWD": "p@ss"}, "'p@ss' xp@ss", "'***' xp@ss"),
        ({"PIN_TOKEN": "123456"}, "pin=123456 1234567", "pin=*** 1234567"),
        ({"A_KEY": "s3cr", "B_KEY": "s3cr-t"}, "s3cr s3cr-t", "*** ***"),
    ],
)
def test_short_values_are_searched_as_words(environ, text, seen):
    """Where the name says for sure that the value is a secret."""
    assert Redactor.of(job(), environ).hide(text) == seen
    (name, value), *_ = environ.items()
    assert Redactor.of(job(f"--{name}", value), {}).hide(text.replace("s3cr-t", "s3cr")) == seen


def test_short_values_that_occur_by_chance_are_not_searched():
    """Switches, small numbers, settings whose names only look like secrets, and folders."""
    environ = {
        "TOKENIZERS_PARALLELISM": "false",
        "KEYBOARD": "pc105",
        "USE_AUTH": "true",
        "A_PASS": "on",
        "B_PASS": "abc",
        "MAX_TOKEN": "4096",
        "TOKENIZER": "bert",
        "NPM_AUTH": "none",
        "SSH_KEY_DIR": "/home/ana",
        "AUTH_TOKEN_PATH": "/home/ana/t",
    }
    assert Redactor.of(job(), environ) == Redactor()
    assert Redactor().hide("false 1") == "false 1"


def test_secret_that_contains_another():
    """The longer one is replaced first, else its rest would be left."""
    found = Redactor.of(job(env={"A_KEY": VALUE, "B_KEY": VALUE + "123"}), {})
    assert found.hide(f"{VALUE}123 {VALUE}") == "*** ***"


def test_forms_of_a_secret():
    """Single lines of a value, and values quoted by Python or JSON, as in messages of errors."""
    found = Redactor.of(job(), {"SSH_KEY": "first line\nsecond\\line", "A_KEY": 'say "no" é'})
    texts = (
        json.dumps(["first line", "second\\line", 'say "no" é']),
        repr("first line\nsecond\\line"),
        repr("é") + "second\\line",
    )
    assert [found.hide(text) for text in texts] == ['["***", "***", "***"]', "'***'", "'é'***"]


@pytest.mark.parametrize(
    ("address", "seen"),
    [
        ("postgres://ana:hunter2@db/runs", "postgres://ana:***@db/runs"),
        ("(redis://:p:w@[::1]:6379)", "(redis://:***@[::1]:6379)"),
        ("http://10.0.0.7:8265/a@b", "http://10.0.0.7:8265/a@b"),
        ("http://10.0.0.7:8265", "http://10.0.0.7:8265"),
        ("ssh://ana@db", "ssh://ana@db"),
        ("https://ghp_0123@github.com/a/b", "https://***@github.com/a/b"),
        ("git+https://ghp_0123@github.com/a@v1", "git+https://***@github.com/a@v1"),
        ("https://user:p/w@host/a", "https://user:***@host/a"),
        ("https://user:p@w@host/a?b=c@d", "https://user:***@host/a?b=c@d"),
        ("http://h:80/x,https://u:p@h", "http://h:80/x,https://u:***@h"),
        ("a://b:c@d,e://f:g@h", "a://b:***@d,e://f:***@h"),
        ("https://h/a@b", "https://h/a@b"),
        ("a://b:@c", "a://b:@c"),
    ],
)
def test_passwords_in_urls(address, seen):
    """They are redacted in any variable or setting."""
    assert Redactor().hide(address) == seen
    assert shown(job(f"--db={address}"), {}).entrypoint.args == [f"--db={seen}"]


@examples(100)
@given(st.text(min_size=8).filter(lambda value: "*" not in value))
def test_no_secret_is_left(value):
    """This holds for all characters, such as those with a meaning in regular expressions."""
    a_job = job(f"x{value}y", env={"API_KEY": value})
    assert Redactor.of(a_job, {}).hide(f"{value} {value}") == "*** ***"
    seen = shown(a_job, {})
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
def test_start_of_a_secret_in_a_line(line, left):
    """It follows its name, in a file or on the command line."""
    at = secrets.secret_at(line)
    assert line[:at] == left
    assert at is not None


@pytest.mark.parametrize(
    "line",
    ["", "nnodes: 2", "API_KEY: ???", "API_KEY: ${oc.env:KEY}", "KEY: $KEY", "- key", "a: key"],
)
def test_lines_without_a_secret(line):
    """Such as names without a value, and values that only refer to a secret."""
    assert secrets.secret_at(line) is None


def test_lines_are_cut_before_a_secret():
    """The name stays; lines without a secret are unchanged."""
    assert secrets.cut("env.API_KEY=abc") == "env.API_KEY=***"
    assert [secrets.cut(line) for line in ("nnodes=2", "env.API_KEY=")] == ["nnodes=2", "env.API_KEY="]


def test_time_is_linear():
    """Text of workers, arguments and lines of job files may be long."""
    found = Redactor.of(job(env={"A_TOKEN": "aaaaaaaaab", "SMTP_PASS": "a1b2"}), {})

    def read(text: str) -> None:
        for line in (text, f"key: {text}", f"{text}=x", f"{text}: x"):
            secrets.cut(line)
            found.hide(line)
        secrets.is_secret(text)
        secrets.shown_arguments(["--key", text, f"--{text}={text}"])

    assert steep(read) == []


def test_secrets_in_errors():
    """In the message and in the hint; the error stays the same one."""
    error = ClusterError(f"refused {VALUE}", hint=f"do not send {VALUE}")
    with pytest.raises(ClusterError) as caught, redacted_errors(Redactor.of(job(env={"HF_TOKEN": VALUE}), {})):
        raise error
    assert caught.value is error
    assert (error.message, error.hint, error.args) == ("refused ***", "do not send ***", ("refused ***",))
