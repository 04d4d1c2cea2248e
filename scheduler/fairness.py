"""How evenly tenants that wait are served, pure: the error of weighted fairness as operators see it.

Of tenants that wait all the time each is due the same cost over its weight (VTC, OSDI '24: a tenant's virtual time runs
by just that). So the virtual times of those that waited at every look of a minute must have run equally far.
"""

from collections.abc import Mapping, Sequence

LOOKS, LOOK_EVERY_S = 7, 10.0  # a minute
TENANTS_MAX = 256  # looked at in one tier: those whose turn is nearest


def error(looks: Sequence[Mapping[bytes, float]]) -> float | None:
    """Return how far the tenant that was served most unevenly is from the mean of all: 0 is fair, 0.05 is 5 %.

    None when fewer than two waited all the time, or nobody was served: then nothing is known of it.

    Args:
        looks: virtual time by tenant of those that waited, oldest first; as many as `LOOKS`, else nothing is known yet.
    """
    if len(looks) < LOOKS:
        return None
    first, last = looks[0], looks[-1]
    always = set(first).intersection(*looks)
    ran = [last[tenant] - first[tenant] for tenant in always]
    mean = sum(ran) / len(ran) if len(ran) > 1 else 0.0
    if mean <= 0:
        return None
    return max(abs(one - mean) for one in ran) / mean
