"""The `tidegate` command."""

import argparse
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from pydantic import ValidationError

from cli import engine_command, model_options, parts, screen
from cli.home import HomeError
from core.errors import PlatformError

ROOT = Path(__file__).resolve().parent.parent
USAGE_ERROR = 2
INTERRUPTED = 130


def version() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
    except HomeError as error:
        return _complain(str(error))
    except PlatformError as error:
        return _complain(error.message)
    except ValidationError as error:
        return _complain(_missing_settings(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _complain(message: str) -> int:
    print(f"tidegate: {message}", file=sys.stderr)
    return 1


def _missing_settings(error: ValidationError) -> str:
    """Say which settings are missing or wrong, without their values."""
    lines = [
        f"  TIDEGATE_{'__'.join(str(part) for part in item['loc']).upper()}: {item['msg']}"
        for item in error.errors(include_input=False, include_url=False)
    ]
    missing = any(item["type"] == "missing" for item in error.errors(include_input=False, include_url=False))
    return f"The settings are not {'complete' if missing else 'valid'}:\n" + "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidegate", description="Multi-tenant LLM inference with exact token billing."
    )
    parser.add_argument("--version", action="version", version=f"tidegate {version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    home = _home_option()

    up = commands.add_parser(
        "up",
        parents=[home],
        help="run the whole platform on this machine",
        description="Start Postgres, Valkey and every process of the platform on this machine, behind one port, with a "
        "small model ready to be woken. Ctrl-C stops all of it; the home keeps all data.",
    )
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    up.add_argument(
        "--port", type=_port, default=8080, help="port to listen on; 0 takes a free one (default: %(default)s)"
    )
    up.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="when ready, write addresses, credentials and pids there as JSON (mode 600); removed at the end",
    )
    up.set_defaults(command=_up)

    for part in parts.PARTS:
        command = commands.add_parser(
            part.name,
            parents=[home],
            help=part.summary,
            description=f"Run one process of the platform: {part.summary}. "
            "Settings come from the environment (TIDEGATE_DATABASE__URL, …), else from the home of `tidegate up`.",
        )
        command.set_defaults(command=_part, part=part)

    migrate = commands.add_parser("migrate", parents=[home], help="bring the database schema to this version")
    migrate.set_defaults(command=_migrate)
    _add_ledger(commands, home)
    _add_prices(commands, home)
    _add_audit(commands, home)
    _add_spool(commands, home)
    _add_secrets(commands, home)
    _add_operators(commands, home)
    _add_backup(commands, home)
    model_options.add(commands, home)
    engine_command.add(commands)
    roles = commands.add_parser("roles", help="print what each role may do")
    roles.set_defaults(command=_roles)
    shown = commands.add_parser("version", help="print the version")
    shown.set_defaults(command=_version)
    return parser


def _add_ledger(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser) -> None:
    ledger = commands.add_parser("ledger", help="look after the books")
    actions = ledger.add_subparsers(title="actions", required=True, metavar="action")
    verify = actions.add_parser(
        "verify",
        parents=[home],
        help="add up every account again",
        description="Add up every account again from its entries, and rate every request again. Works while the "
        "platform runs and when it is stopped. Ends with 1 and names the first row that is wrong.",
    )
    verify.set_defaults(command=_ledger_verify)
    export = actions.add_parser(
        "export",
        parents=[home],
        help="write the whole ledger for hledger or beancount",
        description="Write the whole ledger as text that a foreign program adds up: `hledger -f FILE check --strict`, "
        "`bean-check FILE`. The same books give the same bytes.",
    )
    export.add_argument("--format", required=True, choices=["hledger", "beancount"], help="in whose language")
    export.add_argument("--until", type=_day, metavar="DATE", help="only what was booked before this day (UTC)")
    export.add_argument("--output", type=Path, metavar="FILE", help="where to (default: standard output)")
    export.set_defaults(command=_ledger_export)
    _add_ledger_close(actions, home)


def _add_ledger_close(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser
) -> None:
    balance = actions.add_parser("trial-balance", parents=[home], help="print debits and credits by kind of account")
    balance.add_argument("--month", type=_month, metavar="MONTH", help="up to the end of this month, e.g. 2026-10")
    balance.set_defaults(command=_ledger("trial_balance", "month"))
    compare = actions.add_parser(
        "reconcile",
        parents=[home],
        help="compare events, rollups, ledger and the credit figures in Valkey",
        description="Compare what events, rollups and the ledger say was billed, to the pico, and the credit figures "
        "in Valkey with the ledger. Ends with 1 and names every tenant that differs.",
    )
    compare.set_defaults(command=_ledger("compare"))
    seal = actions.add_parser("seal", parents=[home], help="seal what no seal covers yet, and print the head")
    seal.set_defaults(command=_ledger("seal"))
    close = actions.add_parser("close", parents=[home], help="close a month for good")
    close.add_argument("month", type=_month, metavar="MONTH", help="a month that is over (UTC), e.g. 2026-10")
    close.add_argument(
        "--override", metavar="REASON", help="close it although usage of it may be on a disk, and write down why"
    )
    close.set_defaults(command=_ledger("close", "month", "override"))
    drop = actions.add_parser(
        "drop-days",
        parents=[home],
        help="drop single usage events that are not kept any longer",
        description="Drop the usage events of days older than the policy keeps (TIDEGATE_RETENTION__USAGE_DAYS), whose "
        "month is closed and sealed, once the whole of the books is verified. Sums by minute, the ledger and what "
        "verifies them stay. The worker does the same once a day.",
    )
    drop.add_argument("--keep-days", type=_days, metavar="DAYS", help="keep this many instead of the policy's")
    drop.set_defaults(command=_ledger("drop_days", "keep_days"))
    write_off = actions.add_parser(
        "write-off",
        parents=[home],
        help="give back what is held for a gateway that never returns",
        description="Give back the money held for requests of a gateway whose spool is lost for good. Usage of theirs "
        "that turns up later is billed all the same.",
    )
    write_off.add_argument("replica", help="its id, as in `tidegate spool list`")
    write_off.set_defaults(command=_ledger("write_off", "replica"))


def _month(text: str) -> date:
    from cli.ledger import month_of

    try:
        return month_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a month like 2026-10") from None


def _days(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) <= 36500:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of days (1 to 36,500)")


def _ledger(action: str, *names: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        from cli import ledger

        done: int = getattr(ledger, action)(options.home, *(getattr(options, name) for name in names))
        return done

    return run


def _add_prices(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser) -> None:
    prices = commands.add_parser("prices", help="look at what prices do")
    actions = prices.add_subparsers(title="actions", required=True, metavar="action")
    impact = actions.add_parser(
        "impact",
        parents=[home],
        help="show what a draft would have done to recorded usage",
        description="Rate the usage of past days at the prices of a draft or published version, and show what each "
        "tenant paid and would have paid. Progress goes to standard error.",
    )
    impact.add_argument("version", help="the draft, pver_…")
    impact.add_argument("--start", type=_day, required=True, metavar="DATE", help="the first day (UTC)")
    impact.add_argument("--end", type=_day, required=True, metavar="DATE", help="the last day (UTC), included")
    impact.add_argument("--format", choices=["table", "csv", "json"], default="table", help="default: table")
    impact.add_argument("--output", type=Path, metavar="FILE", help="where to (default: standard output)")
    impact.set_defaults(command=_prices_impact)


def _prices_impact(options: argparse.Namespace) -> int:
    from cli.prices import impact

    days = (options.start, options.end)
    return impact(options.home, options.version, days, kind=options.format, output=options.output)


def _add_audit(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser) -> None:
    trail = commands.add_parser("audit", help="look after the audit trail")
    actions = trail.add_subparsers(title="actions", required=True, metavar="action")
    verify = actions.add_parser(
        "verify",
        parents=[home],
        help="prove that no record was altered, removed or slipped in",
        description="Compute the hash chain of the audit trail again. Works while the platform runs and when it is "
        "stopped. Ends with 1 and names the first record that is wrong.",
    )
    verify.add_argument(
        "--anchor",
        action="append",
        default=[],
        metavar="SEQ:HASH",
        help="a record that the chain must have, from the worker's log line audit.head_anchored; may be repeated",
    )
    verify.set_defaults(command=_audit_verify)


def _add_spool(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser) -> None:
    spool = commands.add_parser("spool", help="look after usage that is on disk and not in the books yet")
    actions = spool.add_subparsers(title="actions", required=True, metavar="action")
    listed = actions.add_parser("list", parents=[home], help="list the spools of this host")
    listed.set_defaults(command=_spool_list)
    adopt = actions.add_parser(
        "adopt",
        parents=[home],
        help="take over the spool of a gateway that does not come back",
        description="Copy the spool of a gateway of another host among this host's, where the poster posts it. Usage "
        "that is posted already is not posted again.",
    )
    adopt.add_argument("folder", type=Path, help="the spool's folder, e.g. on a volume mounted from the lost host")
    adopt.add_argument(
        "--posted-too",
        action="store_true",
        help="also offer what was posted there: the books of now are restored and may not have it",
    )
    adopt.set_defaults(command=_spool_adopt)


def _add_secrets(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser
) -> None:
    secrets = commands.add_parser("secrets", help="turn the secrets of this installation")
    actions = secrets.add_subparsers(title="actions", required=True, metavar="action")
    for name, summary in (
        ("status", "say what each pepper still carries"),
        ("rotate-pepper", "make a new pepper; API keys go on working and are stored under it as they are used"),
        ("rotate-signing", "make a new signing key; what the old one signed is believed"),
        ("drop-previous", "forget the previous peppers and signing keys"),
    ):
        action = actions.add_parser(name, parents=[home], help=summary)
        action.set_defaults(command=_secrets, action=name)
        if name == "drop-previous":
            action.add_argument("--force", action="store_true", help="even if keys or tokens stop working")


def _add_operators(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser
) -> None:
    operators = commands.add_parser("operators", help="look after those who run the platform")
    actions = operators.add_subparsers(title="actions", required=True, metavar="action")
    confirm = actions.add_parser(
        "confirm",
        parents=[home],
        help="say that an operator is a person of their own",
        description="Confirm that the operator who signs in with this address is a person of their own: from then on "
        "they decide on money above the limit that others ask for. Operators confirm others too, over the API; the "
        "second of an installation is confirmed here.",
    )
    confirm.add_argument("email", help="the address they sign in with")
    confirm.set_defaults(command=_confirm_operator)


def _add_backup(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser) -> None:
    backup = commands.add_parser(
        "backup",
        parents=[home],
        help="back up an installation to one file",
        description="Write the database at one instant, usage that is not posted yet and objects to one file. Works "
        "while the platform runs and when it is stopped.",
    )
    backup.add_argument("target", type=Path, metavar="FILE|DIR", help="the file to make, or the folder to make it in")
    backup.add_argument(
        "--with-secrets",
        action="store_true",
        help="also copy the installation's secrets, to a file of their own beside it (mode 600)",
    )
    backup.set_defaults(command=_backup)
    restore = commands.add_parser(
        "restore",
        parents=[home],
        help="make a new home of a backup",
        description="Check every file of the backup, load it into a new home, compare every figure with the backup, "
        "and verify books and audit trail.",
    )
    restore.add_argument("file", type=Path, help="the backup")
    restore.add_argument(
        "--secrets", type=Path, metavar="FILE", help="the installation's secrets (default: FILE.secrets.json beside it)"
    )
    restore.set_defaults(command=_restore)


def _home_option() -> argparse.ArgumentParser:
    option = argparse.ArgumentParser(add_help=False)
    option.add_argument(
        "--home",
        type=Path,
        default=Path(os.environ.get("TIDEGATE_HOME") or ".tidegate"),
        help="folder with all state of this installation (default: TIDEGATE_HOME, else ./.tidegate)",
    )
    return option


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a day like 2026-11-30") from None


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")


def _up(options: argparse.Namespace) -> int:
    from cli.up import PortTakenError, UpOptions, up

    try:
        return up(UpOptions(options.home, options.host, options.port, options.ready_file), version())
    except PortTakenError as error:
        return _complain(str(error))


def _part(options: argparse.Namespace) -> int:
    from cli.installation import find_settings

    part: parts.Part = options.part
    settings = find_settings(options.home)
    parts.runner(part)(settings, lambda: screen.say(f"tidegate {part.name} is ready"))
    return 0


def _migrate(options: argparse.Namespace) -> int:
    from cli.installation import find_settings
    from core import db

    url = find_settings(options.home).database.owner_url
    if url is None:
        return _complain("Migrations run as the owner of the database: set TIDEGATE_DATABASE__OWNER_URL.")
    db.migrate(url.get_secret_value())
    screen.say("The database schema is up to date.")
    return 0


def _roles(_options: argparse.Namespace) -> int:
    from cli.role_page import page

    print(page(), end="")
    return 0


def _ledger_verify(options: argparse.Namespace) -> int:
    from cli.books import verify

    return verify(options.home)


def _ledger_export(options: argparse.Namespace) -> int:
    from billing.books_text import BooksFormat
    from cli.books import export

    return export(options.home, BooksFormat(options.format), options.until, options.output)


def _confirm_operator(options: argparse.Namespace) -> int:
    from cli import operators

    return operators.confirm(options.home, options.email)


def _audit_verify(options: argparse.Namespace) -> int:
    from cli.trail import verify

    return verify(options.home, options.anchor)


def _spool_list(options: argparse.Namespace) -> int:
    from datetime import UTC, datetime

    from billing.orphans import contents, list_spools

    found = list_spools(options.home / "spool")
    for spool in found:
        inside = contents(options.home / "spool" / spool.name)
        oldest = ""
        if inside.oldest_us is not None:
            at = datetime.fromtimestamp(inside.oldest_us // 1_000_000, UTC)
            oldest = f", the oldest of {at:%Y-%m-%d %H:%M:%S} UTC"
        state = "written now" if spool.live else "not written"
        screen.say(
            f"{spool.name}  replica {spool.replica}  host {spool.host or 'unknown'}  {state}  "
            f"{inside.events} events of {inside.tenants} tenants not posted{oldest} "
            f"({spool.unposted_bytes} bytes)"
        )
    if not found:
        screen.say("No spools.")
    return 0


def _spool_adopt(options: argparse.Namespace) -> int:
    from billing.orphans import adopt

    adopted = adopt(options.home / "spool", options.folder, posted_too=options.posted_too)
    screen.say(
        f"Adopted as {adopted.name}: {adopted.unposted_bytes} bytes to post. The poster of this host posts them."
    )
    return 0


def _secrets(options: argparse.Namespace) -> int:
    from cli import rotation

    if options.action == "drop-previous":
        return rotation.drop_previous(options.home, force=options.force)
    actions = {
        "status": rotation.status,
        "rotate-pepper": rotation.rotate_pepper,
        "rotate-signing": rotation.rotate_signing,
    }
    return actions[options.action](options.home)


def _backup(options: argparse.Namespace) -> int:
    from cli.backup.take import backup
    from core.clock import SystemClock

    return backup(options.home, options.target, version(), SystemClock().now(), with_secrets=options.with_secrets)


def _restore(options: argparse.Namespace) -> int:
    from cli.backup.restore import restore

    return restore(options.file, options.home, options.secrets)


def _version(_options: argparse.Namespace) -> int:
    screen.say(f"tidegate {version()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
