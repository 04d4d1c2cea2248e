"""How many engines a local deployment is to have: between its bounds, by who waits and by what fits in fewer.

One more when somebody has waited for a while although every engine serves; fewer when for the whole idle window nobody
waited and all that ran would have fitted in fewer with a fifth to spare. How much one engine takes is what each had
when somebody waited. Pure. (Whether the last engine of a cold deployment sleeps is lifecycle's.)
"""

import msgspec

from knative.lifecycle import Policy


class Bounds(msgspec.Struct, frozen=True):
    """What is desired; a deployment that may have an engine counts as one of at least one."""

    least: int
    most: int


class Load(msgspec.Struct, frozen=True):
    """What is seen now. `inflight` is None when nobody knows."""

    serving: int  # engines that are ready
    inflight: int | None = 0
    waiting: int = 0  # in admission's queue


class Scale(msgspec.Struct, frozen=True):
    """How many, and what must be remembered between two looks."""

    count: int = 0
    each: int = 0  # requests that ran on each engine when somebody waited; 0: not known
    short_us: int = 0  # since when somebody waits although all serve; 0: nobody does
    roomy_us: int = 0  # since when fewer would do; 0: they would not


def rescale(before: Scale, load: Load, bounds: Bounds, policy: Policy, now_us: int) -> Scale:
    """Return how many engines there are to be after this look. With nobody knowing the load, as many as before."""
    floor = min(max(bounds.least, 1), bounds.most)
    count = min(max(before.count, floor), bounds.most)
    same = Scale(count, before.each)
    if load.inflight is None or count != before.count:
        return same
    if load.waiting > 0:
        return _more(before, load, bounds, policy, now_us)
    enough = max(_fitting(load.inflight, before.each, count), floor)
    if enough >= count:
        return same
    since_us = before.roomy_us or now_us
    if now_us - since_us < policy.idle_window_us:
        return Scale(count, before.each, roomy_us=since_us)
    return Scale(enough, before.each)


def _more(before: Scale, load: Load, bounds: Bounds, policy: Policy, now_us: int) -> Scale:
    """Somebody waits."""
    if load.serving < before.count or before.count == bounds.most:
        return Scale(before.count, before.each)
    since_us = before.short_us or now_us
    if now_us - since_us < policy.scale_up_us:
        return Scale(before.count, before.each, short_us=since_us)
    return Scale(before.count + 1, max(1, (load.inflight or 0) // before.count))


def _fitting(inflight: int, each: int, count: int) -> int:
    """Return how many engines hold so many requests with a fifth to spare; `count` when that is not known."""
    if not inflight:
        return 0
    return min(count, -(-inflight * 5 // (each * 4))) if each else count
