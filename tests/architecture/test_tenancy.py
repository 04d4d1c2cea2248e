"""No query of a tenant's rows forgets the tenant."""

from pathlib import Path

from tests.architecture import tenancy
from tests.architecture.rules import ROOT

FILES = (
    *sorted(path.relative_to(ROOT) for path in (ROOT / "tenants").glob("*queries.py")),
    Path("billing/queries.py"),
)


def test_what_a_tenant_owns_is_asked_for_by_tenant() -> None:
    owned = tenancy.owned_tables()
    assert {"ApiKeyRow", "ProjectRow"} <= owned.keys()
    violations = [v for path in FILES for v in tenancy.queries_ask_by_tenant(path, (ROOT / path).read_text(), owned)]
    assert violations == []


def test_every_exception_still_exists() -> None:
    for name in tenancy.ACROSS_TENANTS:
        path, _, function = name.partition(":")
        assert f"def {function}(" in (ROOT / path).read_text(), f"{name} is gone; take it off the list"


def test_the_rule_bites() -> None:
    text = "async def key(session, key_id):\n    return select(ApiKeyRow)\n"
    assert tenancy.queries_ask_by_tenant(Path("tenants/queries.py"), text, {"ApiKeyRow": "api_key"}) != []
    kept = "async def key(session, tenant_id, key_id):\n    return select(ApiKeyRow)\n"
    assert tenancy.queries_ask_by_tenant(Path("tenants/queries.py"), kept, {"ApiKeyRow": "api_key"}) == []
