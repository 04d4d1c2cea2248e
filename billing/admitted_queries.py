"""Events by when they were admitted, in the few days of their ids that can have them."""


def admitted_events(where: str = "true") -> str:
    """Return the relation of the events admitted from `:since` up to `:until`, which is not included.

    An id is at most a day older than its admission, and younger only of what an operator billed out of quarantine:
    decisions name those, however much later they were made.

    Args:
        where: which tenants, a condition on `tenant_id`.
    """
    return f"""(
        SELECT * FROM usage_event
        WHERE {where} AND day BETWEEN CAST(:since AS date) - 1 AND CAST(:until AS date)
          AND admitted_at >= :since AND admitted_at < :until
        UNION ALL
        SELECT b.* FROM usage_decision d JOIN usage_event b USING (tenant_id)
        WHERE {where} AND (uuid_extract_timestamp(d.event_id) AT TIME ZONE 'UTC')::date > CAST(:until AS date)
          AND b.id = d.event_id AND b.day = (uuid_extract_timestamp(d.event_id) AT TIME ZONE 'UTC')::date
          AND b.admitted_at >= :since AND b.admitted_at < :until
    )"""  # noqa: S608 - built of constants
