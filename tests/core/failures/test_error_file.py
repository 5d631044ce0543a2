"""Error files of workers: both formats are parsed, malformed files are described, and no content is lost."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest

from raylaunch.core.failures import error_file
from raylaunch.core.failures.error_file import MalformedError
from raylaunch.core.failures.failure import WorkerError
from tests.core.adversarial import steep

NESTED = {
    "message": {
        "message": "ValueError: loss: NaN",
        "extraInfo": {"py_callstack": "Traceback: ...", "timestamp": "1767225600"},
    }
}


def recorded(**facts) -> WorkerError:
    """Return an error that was read from a file."""
    known = {"type": "error", "message": "", "traceback": "", "from_file": True}
    return WorkerError(**(known | facts))


def test_nested_format_of_record_is_parsed():
    """The format of torchelastic's `@record`: type, message, traceback and time."""
    assert error_file.parse(json.dumps(NESTED)) == recorded(
        type="ValueError", message="loss: NaN", traceback="Traceback: ...", timestamp=1767225600
    )


@pytest.mark.parametrize("timestamp", [10, "10", 10.9])
def test_flat_format_is_parsed(timestamp):
    """A message and a time, as a number or a string. The text is kept as it was."""
    text = json.dumps({"message": "the optimizer gave up", "timestamp": timestamp})
    assert error_file.parse(text) == recorded(message="the optimizer gave up", timestamp=10, written=text)


@pytest.mark.parametrize("timestamp", [None, "soon", [], float("inf")])
def test_malformed_timestamp_is_zero(timestamp):
    error = error_file.parse(json.dumps({"message": "gave up", "timestamp": timestamp}))
    assert (error.message, error.timestamp) == ("gave up", 0)


def test_additional_fields_are_kept():
    """Subclasses of torchelastic's error handler may write more fields."""
    data = {"message": {"message": "gave up", "extraInfo": {"shard": 3}}, "errorTraits": {"retry": "no"}}
    error = error_file.parse(json.dumps(data))
    assert (error.type, error.message, error.traceback) == ("error", "gave up", "")
    assert json.loads(error_file.compose(error)) == data


def test_message_without_type_is_written_again():
    """Nothing but the fields of the error is needed to write the same file."""
    data = {"message": {"message": "gave up", "extraInfo": {"py_callstack": "", "timestamp": "10"}}}
    error = error_file.parse(json.dumps(data))
    assert error.written == ""
    assert json.loads(error_file.compose(error)) == data


def test_malformed_extra_info_is_ignored():
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
def test_malformed_files_are_described(text, why):
    """A report can show the text."""
    with pytest.raises(MalformedError) as caught:
        error_file.parse(text)
    assert str(caught.value).startswith(why)


def test_redacted_text_that_is_no_json_is_replaced():
    """Redaction may have replaced a number, for example."""
    error = replace(error_file.parse(json.dumps({"message": "m", "timestamp": 5})), written='{"message": ***}')
    assert json.loads(error_file.compose(error))["message"]["message"] == "m"


def test_errors_are_written_in_the_nested_format():
    error = WorkerError(type="ValueError", message="loss: NaN", traceback="Traceback: ...", timestamp=1767225600)
    assert json.loads(error_file.compose(error)) == NESTED


def test_exit_code_is_added_to_the_nested_format():
    """The flat format has no field for it, and is unchanged."""
    nested = error_file.parse(json.dumps(NESTED))
    assert json.loads(error_file.compose(nested, exit_code=-11)) == {"message": NESTED["message"] | {"errorCode": -11}}
    flat = {"message": "gave up", "timestamp": 10}
    assert json.loads(error_file.compose(error_file.parse(json.dumps(flat)), exit_code=3)) == flat


def test_a_long_file_is_capped():
    """Neither the driver's memory nor the terminal gets all of it."""
    for message in ("ValueError: " + "x " * 50_000, "Error" * 20_000 + ": x"):
        found = error_file.parse(json.dumps({"message": message, "more": 1}))
        assert len(found.type) + len(found.message) + len(found.written) < 5000
    nested = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "line\n" * 50_000}}}
    assert len(error_file.parse(json.dumps(nested)).traceback) < 20_000


@pytest.mark.parametrize("depth", [10, 400, 900, 990, 5_000, 100_000])
def test_a_nested_file(depth):
    """Whether JSON of this depth can be read or not, an error or a `MalformedError` is the answer."""
    text = '{"message": "ValueError: x", "more": ' + "[" * depth + "]" * depth + "}"
    with contextlib.suppress(error_file.MalformedError):
        assert error_file.compose(error_file.parse(text))


def test_a_written_file_without_a_message_is_not_used():
    error = WorkerError(type="A", message="b", traceback="", written='{"other": 1}')
    assert json.loads(error_file.compose(error, exit_code=3))["message"]["message"] == "A: b"


def test_time_is_linear():
    assert steep(lambda text: error_file.parse(json.dumps({"message": text, "timestamp": text}))) == []
