"""Pure: which network an address is in. An IPv4 address written as IPv6 (``::ffff:10.0.0.1``) is that IPv4 address."""

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

ADDRESS_MAX = 64  # characters; nothing longer is an address
MAPPED_BITS = 96  # of ::ffff:0:0/96


def parse(text: str) -> IPv4Address | IPv6Address | None:
    """Return the address, None when it is none."""
    if len(text) > ADDRESS_MAX:
        return None
    try:
        found = ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return found if mapped is None else mapped


@lru_cache(maxsize=4096)
def contain(networks: tuple[str, ...], address: str) -> bool:
    """Say whether the address is in one of the networks (``10.0.0.0/8``, or one address); what is none is in none."""
    found = parse(address)
    return found is not None and any(found in _network(network) for network in networks)


@lru_cache(maxsize=1024)
def _network(text: str) -> IPv4Network | IPv6Network:
    found = ip_network(text, strict=False)
    if isinstance(found, IPv6Network) and found.prefixlen >= MAPPED_BITS:
        mapped = found.network_address.ipv4_mapped
        if mapped is not None:
            return IPv4Network((mapped, found.prefixlen - MAPPED_BITS))
    return found
