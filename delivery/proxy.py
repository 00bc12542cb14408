"""The proxy through which a URL is reached, from the environment: HTTPS_PROXY, HTTP_PROXY and NO_PROXY.

In: a URL, the environment. Out: the proxy's URL, if there is one.
On failure: :class:`ProxyError`, in a sentence that names the variable and repeats no password.
"""

import contextlib
import re
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_FINAL_DOT = re.compile(r"\.(?=(:[0-9]*)?$)")
"""The dot at the end of a whole name, before its port: ``prometheus.monitoring.svc.cluster.local.:9090``."""


class ProxyError(ValueError):
    """The proxy that is named can't be used. A retry does not help."""


def proxy_of(url: str) -> str | None:
    """The proxy of a URL, which may hold a user and a password; None: the URL is reached directly.

    As curl and programs in Go do: this machine's own addresses are reached directly, and so is what NO_PROXY has, which
    are names (with all names below them), addresses, and networks such as 10.0.0.0/8, separated by commas. ``*`` among
    them is everything. Raises ProxyError.
    """
    parts, proxies = urlsplit(url), getproxies()
    host, proxy = (parts.hostname or "").removesuffix("."), proxies.get(parts.scheme)
    if not proxy or host == "localhost" or proxy_bypass(_FINAL_DOT.sub("", parts.netloc.rpartition("@")[2])):
        return None
    excepted = [item.strip().lower() for item in proxies.get("no", "").split(",")]
    if any(item == "*" or (item.startswith("*.") and host.endswith(item[1:])) for item in excepted):
        return None
    with contextlib.suppress(ValueError):  # the host is a name
        address = ip_address(host)
        if address.is_loopback:
            return None
        for item in excepted:
            with contextlib.suppress(ValueError):  # another name
                if address in ip_network(item, strict=False):
                    return None
    return usable(proxy, f"{parts.scheme.upper()}_PROXY")


def usable(proxy: str, named_by: str) -> str:
    """A proxy's URL, with its scheme. Raises ProxyError for one that is no URL, and for SOCKS, which is not spoken."""
    whole = proxy if "://" in proxy else f"http://{proxy}"
    try:
        parts = urlsplit(whole)
    except ValueError as error:
        raise ProxyError(f"{named_by} is no URL of a proxy: {error}") from None
    if parts.scheme.startswith("socks"):
        raise ProxyError(
            f"{named_by} names a {parts.scheme} proxy, and only HTTP is spoken with a proxy: name one of it"
        )
    if not parts.hostname:
        raise ProxyError(f"{named_by} is no URL of a proxy: it names no host")
    return whole
