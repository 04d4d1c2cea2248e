"""Know which people answer for an operator, and which of them asked for an adjustment of money and decided on it."""

from alembic import op

revision = "0028_who_asks"
down_revision = "0027_spool_reports"
branch_labels = None
depends_on = None

OPERATORS = (
    # Who invited an operator answers for it until somebody else confirms that it is a person of its own. Without
    # `confirmed_by` it was confirmed on the host.
    """
    ALTER TABLE operator
        ADD vouched_by uuid REFERENCES person (id),
        ADD confirmed_by uuid REFERENCES person (id),
        ADD confirmed_at timestamptz,
        ADD CONSTRAINT operator_two_vouch CHECK (confirmed_by <> vouched_by),
        ADD CONSTRAINT operator_no_self_vouch CHECK (vouched_by <> person_id AND confirmed_by <> person_id),
        ADD CONSTRAINT operator_confirmed CHECK (confirmed_by IS NULL OR confirmed_at IS NOT NULL)
    """,
    # Without it nobody answers for what the token does.
    "ALTER TABLE operator_token ADD issued_by uuid REFERENCES person (id)",
    # Who came by an invite is vouched for by who invited; who was set up on the host, by neither invite nor identity
    # provider, is confirmed.
    """
    UPDATE operator o SET vouched_by = i.invited_by
    FROM person p JOIN invite i ON i.email = p.email AND i.operator_role IS NOT NULL AND i.accepted_at IS NOT NULL
    WHERE p.id = o.person_id AND i.invited_by IN (SELECT id FROM person) AND i.invited_by <> p.id
    """,
    """
    UPDATE operator o SET confirmed_at = o.created_at FROM person p
    WHERE p.id = o.person_id AND o.origin = '' AND NOT EXISTS (
        SELECT FROM invite i WHERE i.email = p.email AND i.operator_role IS NOT NULL AND i.accepted_at IS NOT NULL)
    """,
    """
    UPDATE operator_token t SET issued_by = o.person_id FROM operator o
    WHERE o.id = t.operator_id AND o.confirmed_at IS NOT NULL AND NOT EXISTS (
        SELECT FROM audit_record a WHERE a.action = 'operator_token.issue' AND a.target_id = o.id)
    """,
)

MONEY = (
    # `…_people`: who acted, then who vouched for them, up to one who is confirmed; without any, nobody answers. Rows of
    # before have none.
    """
    ALTER TABLE credit_adjustment
        ADD requested_people uuid[],
        ADD answered_by uuid,
        ADD decided_person uuid,
        ADD CONSTRAINT credit_adjustment_two_persons CHECK (decided_person <> ALL (requested_people)),
        ADD CONSTRAINT credit_adjustment_person_decided CHECK (
            requested_people IS NULL OR NOT needs_approval OR state <> 'posted' OR decided_person IS NOT NULL)
    """,
    "GRANT UPDATE (decided_person) ON credit_adjustment TO tidegate_app",
    """
    ALTER TABLE rerating
        ADD requested_people uuid[],
        ADD answered_by uuid,
        ADD executed_answer uuid,
        ADD executed_person uuid,
        ADD CONSTRAINT rerating_two_persons CHECK (NOT needs_approval OR executed_person <> ALL (requested_people)),
        ADD CONSTRAINT rerating_person_executed CHECK (
            requested_people IS NULL OR NOT needs_approval OR executed_by IS NULL OR executed_person IS NOT NULL)
    """,
    "GRANT UPDATE (executed_answer, executed_person) ON rerating TO tidegate_app",
)


def upgrade() -> None:
    for statement in (*OPERATORS, *MONEY):
        op.execute(statement)
