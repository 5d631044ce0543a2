"""The settings for the output of workers: which streams of which ranks the terminal shows. Files have all of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import Template

from raylaunch.core.job.job import Job, is_number, shown_ranks

STREAMS = ("stdout", "stderr")

_BITS = {"stdout": 1, "stderr": 2}
_VALUE = re.compile(r"[0-3]")
_PAIR = re.compile(r"([0-9]{1,18}):([0-3])")
_DEFAULT_TEMPLATE = "[${role_name}${local_rank}]:"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputMask:
    """A set of streams for all local ranks, or for some: the value of `tee` or `redirects`.

    Streams are bits as in torchrun: 1 stdout, 2 stderr.
    """

    everywhere: int = 0
    by_local_rank: tuple[tuple[int, int], ...] = ()

    def names(self, stream: str, local_rank: int) -> bool:
        """Whether the mask has this stream of this local rank."""
        return bool(dict(self.by_local_rank).get(local_rank, self.everywhere) & _BITS[stream])

    def names_any(self, stream: str) -> bool:
        """Whether the mask has this stream of any local rank."""
        return any(bits & _BITS[stream] for bits in (self.everywhere, *dict(self.by_local_rank).values()))


def mask(text: int | str) -> OutputMask:
    """Parse `3` or `0:3,12:1`; local ranks that are not named have no streams. Raise ValueError if malformed."""
    words = str(text).strip()
    if _VALUE.fullmatch(words):
        return OutputMask(everywhere=int(words))
    pairs = [_PAIR.fullmatch(part.strip()) for part in words.split(",")]
    if not all(pairs):
        msg = (
            f"`{text}` names no streams: 0 (none), 1 (stdout), 2 (stderr) or 3 (both) is expected, "
            "or one of these by local rank, as in `0:3,1:2`"
        )
        raise ValueError(msg)
    return OutputMask(by_local_rank=tuple((int(pair[1]), int(pair[2])) for pair in pairs if pair))


def local_ranks(text: str) -> frozenset[int] | None:
    """Parse `local_ranks_filter`; None means all local ranks. Raise ValueError if it is malformed."""
    if not text.strip():
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(map(is_number, parts)):
        msg = f"`{text}` is not a list of local ranks like `0,1`"
        raise ValueError(msg)
    return frozenset(int(part) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputView:
    """The output that is shown, and the output that is copied to the filtered logs."""

    ranks: frozenset[int] | None
    """None means all."""
    local_ranks: frozenset[int] | None
    raw: bool
    tee: OutputMask
    redirects: OutputMask
    role: str
    template: str
    filters: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(stream, texts): a line goes to the filtered log if it contains one of the texts."""

    def header(self, stream: str, rank: int, local_rank: int, world_size: int, hostname: str) -> str | None:
        """Return the prefix of each line on the terminal, which may be ""; None if the stream is not shown.

        `hostname`: of the node that the rank is on.
        """
        if not self._passes(local_rank) or (self.ranks is not None and rank not in self.ranks):
            return None
        if self.tee.names(stream, local_rank):
            return self.tee_header(rank, local_rank, hostname)
        if self.redirects.names(stream, local_rank):
            return None
        return "" if self.raw or self.shows_one(world_size) else f"[{rank}] "

    def tee_header(self, rank: int, local_rank: int, hostname: str) -> str:
        """Return the prefix of `tee` as torchrun makes it. The line follows without a space."""
        template = Template(self.template or _DEFAULT_TEMPLATE)
        return template.safe_substitute(role_name=self.role, rank=rank, local_rank=local_rank, hostname=hostname)

    def shows_one(self, world_size: int) -> bool:
        """Whether at most one rank is shown."""
        return world_size == 1 or (self.ranks is not None and len(self.ranks) == 1)

    def needles(self, stream: str, local_rank: int) -> tuple[str, ...]:
        """Return the texts to look for in this stream of this local rank.

        Like torchrun, filter only the streams that `tee` names. If it names none, torchrun's filtered log is empty;
        raylaunch then filters all streams. `show` makes no difference.
        """
        teed = self.tee.names(stream, local_rank) or not self.tee.names_any(stream)
        return dict(self.filters).get(stream, ()) if teed and self._passes(local_rank) else ()

    def _passes(self, local_rank: int) -> bool:
        return self.local_ranks is None or local_rank in self.local_ranks


def view(job: Job) -> OutputView:
    """Return the view that a job asks for. Raise ValueError if a setting is malformed."""
    return OutputView(
        ranks=shown_ranks(job.show),
        local_ranks=local_ranks(job.local_ranks_filter),
        raw=job.show == "raw",
        tee=mask(job.tee),
        redirects=mask(job.redirects),
        role=job.role,
        template=job.log_line_prefix_template or "",
        filters=(
            ("stdout", tuple(job.duplicate_stdout_filters)),
            ("stderr", tuple(job.duplicate_stderr_filters)),
        ),
    )
