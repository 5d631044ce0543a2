"""The addresses of this machine: of its interfaces, and of names as this machine resolves them."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Sockaddr(ctypes.Structure):
    """`struct sockaddr_in` and `sockaddr_in6` up to their addresses."""

    _fields_ = (
        ("family", ctypes.c_ushort),
        ("port", ctypes.c_ushort),
        ("v4", ctypes.c_ubyte * 4),
        ("v6", ctypes.c_ubyte * 16),
    )


class _Ifaddrs(ctypes.Structure):
    """`struct ifaddrs`, of which only the beginning is of interest."""


_Ifaddrs._fields_ = (
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Sockaddr)),
)


def interfaces() -> dict[str, tuple[str, ...]]:
    """Numeric addresses by the interface's name, in the kernel's order."""
    found: dict[str, tuple[str, ...]] = {}
    for name, address in _pairs():
        found[name] = (*found.get(name, ()), address)
    return found


def _pairs() -> Iterator[tuple[str, str]]:
    head = ctypes.POINTER(_Ifaddrs)()
    if _LIBC.getifaddrs(ctypes.byref(head)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    try:
        entry = head
        while entry:
            if entry.contents.address and (text := _text(entry.contents.address.contents)):
                yield entry.contents.name.decode(), text
            entry = entry.contents.next
    finally:
        _LIBC.freeifaddrs(head)


def _text(address: _Sockaddr) -> str:
    """`""` for what is no IP address."""
    match address.family:
        case socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, bytes(address.v4))
        case socket.AF_INET6:
            return socket.inet_ntop(socket.AF_INET6, bytes(address.v6))
        case _:
            return ""


def resolved(name: str) -> tuple[str, ...]:
    """The numeric addresses of a name on this machine; an address is its own. Empty: nobody knows it."""
    if is_numeric(name):
        return (name,)
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def is_numeric(address: str) -> bool:
    """Whether it is an address and no name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether only this machine can mean it."""
    return is_numeric(address) and ipaddress.ip_address(address).is_loopback


def is_ours(address: str) -> bool:
    """Whether it is one address of this machine's own, where a socket can listen."""
    if is_numeric(address) and ipaddress.ip_address(address).is_unspecified:
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True
