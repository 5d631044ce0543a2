"""The key to the states that agents keep: they have only encrypted ones, and the cluster's head has only the key.

So no secret can be read from the agents' memory alone, from the object store through which Ray passes what is large,
or from the head's storage. Anyone who may make calls of Ray can have both.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import ray

from raylaunch.cluster import ray_internals
from raylaunch.cluster.succession import named_resources

_KEY_BITS = 256
_NONCE_BYTES = 12
"""What NIST SP 800-38D recommends for GCM. They are random: a run has far fewer than 2^32 states."""
_ASK_SECONDS = 5.0


class StateKey:
    """AES-256-GCM, with one key for all drivers of a run."""

    def __init__(self, key: bytes) -> None:
        self._cipher = _aesgcm()(key)

    @classmethod
    def make(cls, token: str) -> StateKey:
        """Return a new key, which the head keeps from now on. `token`: of the run.

        Raises an exception of Ray's, and ModuleNotFoundError where `cryptography` is not installed.
        """
        key: bytes = _aesgcm().generate_key(_KEY_BITS)
        ray_internals.keep_in_head(named_resources.key_name(token), key, named_resources.KEYS, _ASK_SECONDS)
        return cls(key)

    @classmethod
    def find(cls, token: str) -> StateKey | None:
        """Return the key that the head keeps; None: it has none. Raises an exception of Ray's."""
        address = ray.get_runtime_context().gcs_address
        key = ray_internals.ask_head(address, named_resources.key_name(token), named_resources.KEYS, _ASK_SECONDS)
        return cls(key) if key else None

    def seal(self, state: bytes) -> bytes:
        """Return a state encrypted, with its nonce before it, for `open`."""
        nonce = os.urandom(_NONCE_BYTES)
        return bytes(nonce + self._cipher.encrypt(nonce, state, None))

    def open(self, sealed: bytes) -> bytes:
        """Decrypt. Raises cryptography.exceptions.InvalidTag if it is damaged, or was sealed with another key."""
        found: bytes = self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        return found


def _aesgcm() -> Any:
    """Return the class `AESGCM`. Only detached runs on a cluster need it: no other run pays for its import."""
    return import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM
