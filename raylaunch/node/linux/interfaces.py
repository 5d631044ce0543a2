"""The IP addresses of this machine's network interfaces (getifaddrs(3)) and of its name, and their kinds."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Sockaddr(ctypes.Structure):
    """`struct sockaddr_in` and `sockaddr_in6`, up to their addresses."""

    _fields_ = (
        ("family", ctypes.c_ushort),
        ("port", ctypes.c_ushort),
        ("v4", ctypes.c_ubyte * 4),
        ("v6", ctypes.c_ubyte * 16),
    )


class _Ifaddrs(ctypes.Structure):
    """The first four fields of `struct ifaddrs`."""


_Ifaddrs._fields_ = (
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Sockaddr)),
)


def addresses() -> dict[str, tuple[str, ...]]:
    """Return the numeric IP addresses of each interface by its name, in the kernel's order. Raises OSError."""
    found: dict[str, tuple[str, ...]] = {}
    for name, address in _getifaddrs():
        found[name] = (*found.get(name, ()), address)
    return found


def _getifaddrs() -> Iterator[tuple[str, str]]:
    head = ctypes.POINTER(_Ifaddrs)()
    if _LIBC.getifaddrs(ctypes.byref(head)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    try:
        entry = head
        while entry:
            if entry.contents.address and (text := _to_text(entry.contents.address.contents)):
                yield os.fsdecode(entry.contents.name), text
            entry = entry.contents.next
    finally:
        _LIBC.freeifaddrs(head)


def _to_text(address: _Sockaddr) -> str:
    """Return the numeric address, or `""` for one that is not of the IP family."""
    match address.family:
        case socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, bytes(address.v4))
        case socket.AF_INET6:
            return socket.inet_ntop(socket.AF_INET6, bytes(address.v6))
        case _:
            return ""


def bridges() -> frozenset[str]:
    """Return the names of the interfaces that are bridges, such as docker0 and virbr0."""
    return frozenset(path.parent.name for path in Path("/sys/class/net").glob("*/bridge"))


def host_addresses(seconds: float) -> tuple[str, ...]:
    """Return the addresses to which this host's own name leads and that it has, in the resolver's order.

    Empty if there are none, or if no name server answers within `seconds`.
    """
    found: list[tuple[str, ...]] = []
    thread = threading.Thread(target=lambda: found.append(resolve(socket.gethostname())), daemon=True)
    thread.start()
    thread.join(seconds)
    return tuple(address for address in (found[0] if found else ()) if is_local(address))


def resolve(name: str) -> tuple[str, ...]:
    """Return the numeric addresses that a name has on this machine; empty where it has none.

    A numeric address resolves to itself.
    """
    if is_numeric(name):
        return (name,)
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def is_numeric(address: str) -> bool:
    """Return whether this is an IP address and not a name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether this is a numeric address that only processes of the same machine can reach."""
    return is_numeric(address) and ipaddress.ip_address(address).is_loopback


def is_local(address: str) -> bool:
    """Return whether this is an address of one of this machine's interfaces, on which a socket can listen."""
    if is_numeric(address) and ipaddress.ip_address(address).is_unspecified:
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True
