"""The address that a server of this process binds.

In: the host of an option such as ``--listen``. Out: the host to bind.
"""

import contextlib
import socket
from ipaddress import ip_address


def bound_host(host: str) -> str:
    """The host to bind: for 0.0.0.0 and :: it is ::, which takes IPv4 and IPv6, unless the kernel has no IPv6.

    A socket that binds :: must not be of IPv6 only.
    """
    with contextlib.suppress(ValueError):  # it is a name
        if ip_address(host).is_unspecified:
            return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - somebody wants every interface
    return host
