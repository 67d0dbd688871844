"""A host's name in; whether it is this host only, the address to bind for it, and who may use one without a secret, out."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether every address of `host` can be reached from this host only. Raises `OSError` for a name nobody knows."""
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return all(address.startswith("127.") or address == "::1" for address in found)


def check_secret(host: str, secret: str | bytes | None) -> None:
    """Raises `ValueError` where something would listen on `host` for other hosts without a secret of 16 bytes or more."""
    if is_loopback(host) or (secret is not None and len(secret) >= 16):
        return
    raise ValueError(
        f"{host} is reachable from other hosts: give a secret of at least 16 bytes that both ends know, or use {LOOPBACK}"
    )


def listen(host: str) -> socket.socket:
    """A listening TCP socket on a free port of `host`, and of no other address."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.bind(address)
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def address_towards(host: str, port: int) -> str:
    """Which of this host's own addresses talks to `host`. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
