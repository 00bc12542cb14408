"""The common parts of this process's HTTP servers: the host to bind, and the encodings that a client accepts.

In: the host of an option such as ``--listen``; what a client says that it accepts. Out: the host to bind; what to send.
"""

import contextlib
import socket
from collections.abc import Iterator
from ipaddress import ip_address


def bound_host(host: str) -> str:
    """The host to bind: for 0.0.0.0 and :: it is ::, which takes IPv4 and IPv6, unless the kernel has no IPv6.

    A socket that binds :: must not be of IPv6 only.
    """
    with contextlib.suppress(ValueError):  # it is a name
        if ip_address(host).is_unspecified:
            return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - somebody wants every interface
    return host


def gzip_accepted(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header accepts gzip."""
    qualities = {coding: quality for coding, _, quality in accepted_ranges(accept_encoding)}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def accepted_ranges(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """The ranges of an Accept header, each with its parameters and its quality, 0 to 1; 0 if that is malformed.

    Source: RFC 9110, 12.4.2.
    """
    for part in header.lower().split(","):
        name, *parameters = (text.strip() for text in part.split(";"))
        by_name = dict(text.partition("=")[::2] for text in parameters)
        try:
            quality = float(by_name.get("q", "1"))
        except ValueError:
            quality = 0.0
        yield name, by_name, quality if 0.0 <= quality <= 1.0 else 0.0
