"""Under which keys the store of the cluster's head has the entries of runs. This module needs no Ray."""

NAMESPACE = "raylaunch"
"""That of the entries in the store, and of the names of detached actors."""
PREFIX = "run:"
RENEW_SECONDS = 30.0
"""How often a driver writes its entry again: somebody who could not reach the driver may have removed it."""


def registry_key(mark: str) -> bytes:
    """Return the key of a run's entry. `mark`: the token of a detached run, or anything that no other run has."""
    return f"{PREFIX}{mark}".encode()
