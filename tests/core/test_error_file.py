"""Error files of workers: both forms are understood, what is not one is described, and nothing is lost on the way."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from raylaunch.core import error_file
from raylaunch.core.error_file import MalformedError
from raylaunch.core.failure import WorkerError

NESTED = {
    "message": {
        "message": "ValueError: loss: NaN",
        "extraInfo": {"py_callstack": "Traceback: ...", "timestamp": "1767225600"},
    }
}


def recorded(**facts) -> WorkerError:
    known = {"type": "error", "message": "", "traceback": "", "from_file": True}
    return WorkerError(**(known | facts))


def test_the_form_of_record_is_understood():
    """Type, text, traceback and time; nothing more needs to be kept."""
    assert error_file.parse(json.dumps(NESTED)) == recorded(
        type="ValueError", message="loss: NaN", traceback="Traceback: ...", timestamp=1767225600
    )


@pytest.mark.parametrize("timestamp", [10, "10", 10.9])
def test_the_flat_form_is_understood(timestamp):
    """A text and a time, as a number or as a text. It is kept as it was."""
    text = json.dumps({"message": "the optimizer gave up", "timestamp": timestamp})
    assert error_file.parse(text) == recorded(message="the optimizer gave up", timestamp=10, written=text)


@pytest.mark.parametrize("timestamp", [None, "soon", [], float("inf")])
def test_a_time_that_is_none_is_none(timestamp):
    """It harms nobody."""
    error = error_file.parse(json.dumps({"message": "gave up", "timestamp": timestamp}))
    assert (error.message, error.timestamp) == ("gave up", 0)


def test_what_a_handler_of_the_users_adds_is_kept():
    """Handlers may be subclassed, and write more."""
    data = {"message": {"message": "gave up", "extraInfo": {"shard": 3}}, "errorTraits": {"retry": "no"}}
    error = error_file.parse(json.dumps(data))
    assert (error.type, error.message, error.traceback) == ("error", "gave up", "")
    assert json.loads(error_file.compose(error)) == data


def test_a_text_without_a_type_needs_nothing_kept():
    """It is written again as it was."""
    data = {"message": {"message": "gave up", "extraInfo": {"py_callstack": "", "timestamp": "10"}}}
    error = error_file.parse(json.dumps(data))
    assert error.written == ""
    assert json.loads(error_file.compose(error)) == data


def test_extra_information_of_another_form_is_no_obstacle():
    """The message counts."""
    assert error_file.parse('{"message": {"message": "OSError: no", "extraInfo": 5}}').message == "no"
    assert error_file.parse('{"message": {"message": "OSError: no", "extraInfo": {"py_callstack": 5}}}').traceback == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("{", "it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "it is not JSON: maximum recursion depth exceeded"),
        ("[]", "it is not a JSON object"),
        ("{}", "it has no `message`"),
        ('{"message": null}', "it has no `message`"),
        ('{"message": {"message": 5}}', "it has no `message`"),
    ],
)
def test_what_is_no_error_file_is_described(text, why):
    """In words that a report can show."""
    with pytest.raises(MalformedError) as caught:
        error_file.parse(text)
    assert str(caught.value).startswith(why)


def test_what_is_no_json_any_more_is_composed_anew():
    """Something secret in it, a number perhaps, was taken out."""
    error = replace(error_file.parse(json.dumps({"message": "m", "timestamp": 5})), written='{"message": ***}')
    assert json.loads(error_file.compose(error))["message"]["message"] == "m"


def test_an_error_is_composed_in_the_form_of_record():
    """Whoever reads those files can read ours."""
    error = WorkerError(type="ValueError", message="loss: NaN", traceback="Traceback: ...", timestamp=1767225600)
    assert json.loads(error_file.compose(error)) == NESTED


def test_the_exit_code_goes_where_a_launcher_tells_it():
    """Into the form of `@record`; the flat form has no place for it and stays as it is."""
    nested = error_file.parse(json.dumps(NESTED))
    assert json.loads(error_file.compose(nested, exit_code=-11)) == {"message": NESTED["message"] | {"errorCode": -11}}
    flat = {"message": "gave up", "timestamp": 10}
    assert json.loads(error_file.compose(error_file.parse(json.dumps(flat)), exit_code=3)) == flat
