"""A script of which each worker of each attempt writes and ends as `behaviour.json` says.

The file has a list for each attempt, with one behaviour for each rank.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGINT)


class NoTextError(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class OwnText(str):
    """A text that can be pickled, but not unpickled elsewhere."""

    __slots__ = ()


class OwnTextError(Exception):
    """An exception whose text is of a class of its own."""

    def __str__(self) -> str:
        return OwnText(self.args[0])


def collateral(text: str) -> None:
    raise RuntimeError(f"gloo {text} timed out")


def own_name(text: str) -> None:
    raise type(text.encode("ascii", "ignore").decode().replace("\0", "") or "E", (Exception,), {})(text)


def no_text(text: str) -> None:
    raise NoTextError(text)


def wrong_text(text: str) -> None:
    raise type("E", (Exception,), {"__str__": lambda _: 7})(text)


def own_text(text: str) -> None:
    raise OwnTextError(text)


def base(text: str) -> None:
    raise BaseException(text)  # noqa: TRY002


def group(text: str) -> None:
    raise builtins.ExceptionGroup(text, [ValueError(text), KeyError(text)])


def note(text: str) -> None:
    error = ValueError(text)
    error.add_note(text)
    raise error


def wrong_notes(text: str) -> None:
    error = ValueError(text)
    error.__notes__ = 7  # type: ignore[assignment]
    raise error


def syntax(text: str) -> None:
    raise SyntaxError(text, (text, 1, 1, text))


def chain(text: str) -> None:
    try:
        collateral(text)
    except RuntimeError as error:
        raise KeyError(text) from error


def recursion(text: str) -> None:
    recursion(text)


def frame(text: str) -> None:
    exec(compile("raise ValueError", text.replace("\0", "") or "x", "exec"))


def exit_no_text(text: str) -> None:
    sys.exit(NoTextError(text))  # type: ignore[arg-type]


def exit_code(text: str) -> None:
    sys.exit(len(text) % 300)


def exit_at_exit(_: str) -> None:
    atexit.register(os._exit, 3)


def closed_stderr(text: str) -> None:
    sys.stderr.close()
    collateral(text)


def no_stderr(text: str) -> None:
    sys.stderr = None
    collateral(text)


def strict_stderr(text: str) -> None:
    sys.stderr.reconfigure(encoding="ascii", errors="strict")
    collateral(text)


def excepthook(text: str) -> None:
    sys.excepthook = own_text
    collateral(text)


def kill(text: str) -> None:
    os.kill(os.getpid(), SIGNALS[len(text) % len(SIGNALS)])


def error_file(text: str) -> None:
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_bytes(text.encode("utf-8", "surrogatepass"))
    os._exit(1)


def json_error_file(text: str) -> None:
    found: Any = {"message": text, "more": text} if len(text) % 2 else {"message": {"message": text, "extraInfo": text}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(found))
    os._exit(1)


def nested_error_file(text: str) -> None:
    depth = 300 * (len(text) % 9)
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(f'{{"message": "x", "a": {"[" * depth}{"]" * depth}}}')
    os._exit(1)


def error_folder(_: str) -> None:
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).mkdir()
    os._exit(1)


def finish(_: str) -> None:
    pass


WAYS: dict[str, Callable[[str], None]] = {
    way.__name__: way
    for way in (
        *(
            collateral,
            own_name,
            no_text,
            wrong_text,
            own_text,
            base,
            group,
            note,
            wrong_notes,
            syntax,
            chain,
            recursion,
        ),
        *(frame, exit_no_text, exit_code, exit_at_exit, closed_stderr, no_stderr, strict_stderr, excepthook, kill),
        *(error_file, json_error_file, nested_error_file, error_folder, finish),
    )
}
"""How a worker may end: called with any text."""


def main() -> None:
    """Do what this rank does in this attempt."""
    attempts = json.loads(Path("behaviour.json").read_text(encoding="ascii"))
    attempt = min(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), len(attempts) - 1)
    own = attempts[attempt][int(os.environ["RANK"])]
    for fd, data, times in own["writes"]:
        os.write(fd, bytes.fromhex(data) * times)
    WAYS[own["way"]](own["text"] * own["times"])


if __name__ == "__main__":
    main()
