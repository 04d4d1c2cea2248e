"""Pure: recorded traffic made into requests that can be replayed. What was not recorded is guessed, openly."""

from collections.abc import Iterable, Iterator
from uuid import UUID

import msgspec

from tenants.what_if import Traffic

MINUTE_US = 60_000_000
SECOND_US = 1_000_000


class Sum(msgspec.Struct, frozen=True, gc=False):
    """Requests of one key for one model in one span of time."""

    at_us: int
    span_us: int
    project_id: UUID
    key_id: UUID
    model: str
    requests: int
    input_tokens: int
    output_tokens: int
    nano: int = 0


class Means(msgspec.Struct, frozen=True):
    """What a served request of a model used on average."""

    input_tokens: int
    output_tokens: int
    nano: int
    run_us: int


def means_of(served: Iterable[Traffic]) -> dict[str, Means]:
    """Return the means by model."""
    sums: dict[str, list[int]] = {}
    for item in served:
        known = sums.setdefault(item.model, [0, 0, 0, 0, 0])
        run_us = (item.until_us - item.at_us) * item.requests
        for place, value in enumerate((item.requests, item.input_tokens, item.output_tokens, item.nano, run_us)):
            known[place] += value
    return {model: Means(i // n, o // n, nano // n, run // n) for model, (n, i, o, nano, run) in sums.items()}


def spread(minute: Sum) -> Iterator[Traffic]:
    """Spread the requests of a sum evenly over its seconds; nobody knows how long they ran."""
    seconds = min(minute.requests, max(1, minute.span_us // SECOND_US))
    step = minute.span_us // seconds
    for place in range(seconds):

        def part(whole: int, place: int = place) -> int:
            return whole * (place + 1) // seconds - whole * place // seconds

        at_us = minute.at_us + place * step
        yield Traffic(
            at_us,
            at_us,
            minute.project_id,
            minute.key_id,
            minute.model,
            part(minute.requests),
            part(minute.input_tokens),
            part(minute.output_tokens),
            part(minute.nano),
        )


def refused(found: Sum, means: dict[str, Means]) -> Iterator[Traffic]:
    """Return refused requests as they would have run: like the mean of those served, else as estimated at the door.

    Within a second they come last: what was served in it found room before they did not.
    """
    mean = means.get(found.model)
    for item in spread(found):
        at_us = item.at_us + SECOND_US - 1
        if mean is None:
            yield msgspec.structs.replace(item, refused=True, at_us=at_us, until_us=at_us)
        else:
            yield msgspec.structs.replace(
                item,
                refused=True,
                at_us=at_us,
                until_us=at_us + mean.run_us,
                input_tokens=mean.input_tokens * item.requests,
                output_tokens=mean.output_tokens * item.requests,
                nano=mean.nano * item.requests,
            )
