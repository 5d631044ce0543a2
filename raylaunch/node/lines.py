"""Bytes as they come, turned into lines: each with its header, and those with a text of interest copied elsewhere."""

from __future__ import annotations

import contextlib
import os
import re

from raylaunch.worker import folders

_LONGEST = 1024 * 1024
"""Bytes: a longer line is passed on in parts."""

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z")
_BEGINNING = re.compile(rb"(?<=\n)(?!\Z)|(?<=\r)(?!\n|\Z)")
"""Of each line of a text but the first."""


class Filter:
    """Copies lines with one of some texts to a file that many may append to."""

    def __init__(self, needles: tuple[bytes, ...], header: bytes, path: str) -> None:
        self._needles = needles
        self._header = header
        with contextlib.suppress(OSError):  # where the disk is full, the terminal has them at least
            folders.make(os.path.dirname(path), above=1)
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            self._fd = -1

    def take(self, text: bytes) -> None:
        """Append its lines of interest, with one write: lines of others never stand within them."""
        if not self._is_of_interest(text):
            return
        wanted = filter(self._is_of_interest, _LINE.findall(text))
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, b"".join(self._header + line.rstrip(b"\r\n") + b"\n" for line in wanted))

    def _is_of_interest(self, text: bytes) -> bool:
        return any(needle in text for needle in self._needles)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Lines:
    """One stream of bytes. A carriage return ends a line too, as progress bars use it.

    `header` is put before each line; None: nothing is passed on.
    """

    def __init__(self, header: bytes | None, copies: Filter | None = None) -> None:
        self._header = header
        self._copies = copies
        self._held = b""
        #: The part of the present line that was passed on already, with its header; the filter needs the whole.
        self._begun = b""
        #: The last byte was a carriage return, and a newline that follows belongs to it.
        self._returned = False

    def add(self, data: bytes) -> bytes:
        """The lines that have come to their end."""
        bare = b""
        if self._returned and data[:1] == b"\n":
            bare, data = data[:1], data[1:]
        self._returned = data.endswith(b"\r")
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            text, self._held = self._held + data[:end], data[end:]
            passed = self._passed(text)
        else:
            self._held += data
            passed = self.so_far() if len(self._held) > _LONGEST else b""
        return b"" if self._header is None else bare + passed

    @property
    def holds(self) -> bool:
        """Whether there is something without a line end yet."""
        return bool(self._held)

    def so_far(self) -> bytes:
        """What has no line end yet."""
        held, self._held = self._held, b""
        if not held or self._header is None:
            return b""
        text = held if self._begun else self._header + held
        self._begun = (self._begun + held)[-_LONGEST:]
        return text

    def finish(self) -> bytes:
        """What never got its line end; lines with headers get one, or the next would stand on the same line."""
        if self._copies is not None and (self._begun or self._held):
            self._copies.take(self._begun + self._held)
        text = self.so_far()
        return text + b"\n" if self._begun and self._header else text

    def _passed(self, text: bytes) -> bytes:
        """Whole lines, though the beginning of the first may be passed on already."""
        begun, self._begun = self._begun, b""
        if self._copies is not None:
            self._copies.take(begun + text)
        if not self._header:
            return b"" if self._header is None else text
        return (b"" if begun else self._header) + _with(self._header, text)


def _with(header: bytes, text: bytes) -> bytes:
    """The header before each line but the first."""
    if b"\r" in text:
        return _BEGINNING.sub(lambda _: header, text)
    return text[:-1].replace(b"\n", b"\n" + header) + text[-1:]
