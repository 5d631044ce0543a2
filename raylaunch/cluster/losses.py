"""Why an agent is gone, in one line: Ray's own words go on for many."""

from __future__ import annotations

from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError, RayActorError

_OF_THE_CONSTRUCTOR = "creation task"
_NODE_DIED = "its node has died"
"""What Ray's messages have in them."""


def hopeless(error: BaseException | None) -> bool:
    """Whether its `__init__` raised: another at the same place would end the same way."""
    return isinstance(error, RayActorError) and _OF_THE_CONSTRUCTOR in str(error)


def in_words(error: BaseException) -> str:
    """One line."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, OutOfMemoryError):
        return "Ray ended its agent, since the memory of its host ran out"
    if isinstance(error, NodeDiedError) or (isinstance(error, ActorDiedError) and _NODE_DIED in text):
        return "its host was taken away" if getattr(error, "preempted", False) else "its host died"
    if isinstance(error, ActorUnavailableError):
        return "the connection to its agent broke off"
    if isinstance(error, RayActorError) and lines and not hopeless(error):
        return "its agent died"
    return lines[-1] if lines else type(error).__name__
