"""Splits a stream of bytes into lines, prefixes each line, and copies lines that match a filter to another file."""

from __future__ import annotations

import contextlib
import os
import re

from raylaunch.worker.runtime import process_setup

MAX_LINE_BYTES = 1024 * 1024
"""A longer line is passed on in parts."""

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z")
_LINE_START = re.compile(rb"(?<=\n)(?!\Z)|(?<=\r)(?!\n|\Z)")
"""The start of each line of a text except the first."""


class LineFilter:
    """Copies the lines that contain one of `needles` to a file, each with a prefix.

    Several processes may append to the same file. Where it cannot be opened or written to, no line is copied.
    """

    def __init__(self, needles: tuple[bytes, ...], prefix: bytes, path: str) -> None:
        self._needles = needles
        self._prefix = prefix
        with contextlib.suppress(OSError):  # where the disk is full, the terminal still shows the lines
            process_setup.make_private_dir(os.path.dirname(path), private_parents=1)
        try:
            self._fd = process_setup.without_waiting(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        except OSError:
            self._fd = -1

    def copy_matching(self, text: bytes) -> None:
        """Append the matching lines of `text` with one write, so that lines of other processes never split them."""
        if not self._matches(text):
            return
        lines = filter(self._matches, _LINE.findall(text))
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, b"".join(self._prefix + line.rstrip(b"\r\n") + b"\n" for line in lines))

    def _matches(self, text: bytes) -> bool:
        return any(needle in text for needle in self._needles)

    def close(self) -> None:
        """Close the output file of the filter."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LinePrefixer:
    r"""Prefixes the lines of one stream. `\r` ends a line as `\n` does, because progress bars use it so.

    A `prefix` of None passes nothing on; the filter still gets every line.
    """

    def __init__(
        self, prefix: bytes | None, line_filter: LineFilter | None = None, limit: int = MAX_LINE_BYTES
    ) -> None:
        self._prefix = prefix
        self._filter = line_filter
        self._limit = limit
        #: Bytes since the last line end, not passed on yet.
        self._pending = b""
        #: Bytes of the current line that were passed on already, with its prefix; the filter needs the whole line.
        self._passed = b""
        #: Whether the last byte was `\r`: a `\n` that follows belongs to the same line end.
        self._after_cr = False

    def add(self, data: bytes) -> bytes:
        """Take new bytes; return the lines that are complete now, with their prefixes."""
        rest_of_line_end = b""
        if self._after_cr and data[:1] == b"\n":
            rest_of_line_end, data = data[:1], data[1:]
        self._after_cr = data.endswith(b"\r")
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            text, self._pending = self._pending + data[:end], data[end:]
            output = self._prefixed(text)
        else:
            self._pending += data
            output = self.flush() if len(self._pending) > self._limit else b""
        return b"" if self._prefix is None else rest_of_line_end + output

    @property
    def has_pending(self) -> bool:
        """Whether there is an incomplete line that was not passed on."""
        return bool(self._pending)

    def flush(self) -> bytes:
        """Return the bytes of the incomplete line that were not passed on yet."""
        pending, self._pending = self._pending, b""
        if not pending or self._prefix is None:
            return b""
        output = pending if self._passed else self._prefix + pending
        self._passed = (self._passed + pending)[-self._limit :]
        return output

    def finish(self) -> bytes:
        """Return the incomplete last line. It gets a line end if lines have prefixes, so that the next starts anew."""
        if self._filter is not None and (self._passed or self._pending):
            self._filter.copy_matching(self._passed + self._pending)
        output = self.flush()
        return output + b"\n" if self._passed and self._prefix else output

    def _prefixed(self, text: bytes) -> bytes:
        """Prefix complete lines, of which the start of the first may have been passed on already."""
        passed, self._passed = self._passed, b""
        if self._filter is not None:
            self._filter.copy_matching(passed + text)
        if not self._prefix:
            return b"" if self._prefix is None else text
        return (b"" if passed else self._prefix) + _prefix_following_lines(self._prefix, text)


def _prefix_following_lines(prefix: bytes, text: bytes) -> bytes:
    """Put the prefix before each line except the first."""
    if b"\r" in text:
        return _LINE_START.sub(lambda _: prefix, text)
    return text[:-1].replace(b"\n", b"\n" + prefix) + text[-1:]
