"""What `tidegate model …` takes where it looks after the registry."""

import argparse
from collections.abc import Callable
from datetime import date
from pathlib import Path


def add(actions: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser) -> None:
    """Add the registry's actions to the command `model`."""
    listed = actions.add_parser("list", parents=[home], help="list versions")
    listed.add_argument("--model", help="only of the model of this own name")
    listed.set_defaults(command=_command("show_list"))
    show = actions.add_parser("show", parents=[home], help="show what is known of a version")
    show.add_argument("--manifest", action="store_true", help="print its signed manifest instead")
    show.set_defaults(command=_command("show"))
    verify = actions.add_parser(
        "verify",
        parents=[home],
        help="read a version's files again and compare them with their hashes",
        description="Check the manifest's signature, read every file again and compare it with its hash. Ends with 1 "
        "and says what is wrong. Damaged versions are not deployed any more.",
    )
    verify.set_defaults(command=_command("verify"))
    _add_bringing(actions, home)
    collect = actions.add_parser(
        "gc",
        parents=[home],
        help="show, or delete, weights that nobody needs",
        description="Show which versions a deployment, a name, running work or usage within the retention "
        "(TIDEGATE_RETENTION__WEIGHTS_DAYS) needs, and delete the weights of the others. Their rows stay.",
    )
    collect.add_argument("--apply", action="store_true", help="delete them; without it nothing is changed")
    collect.set_defaults(command=_command("collect"))
    deprecate = actions.add_parser("deprecate", parents=[home], help="announce the end of a version")
    when = deprecate.add_mutually_exclusive_group(required=True)
    when.add_argument("--at", type=_day, metavar="DATE", help="from this day (UTC) on; it is served all the same")
    when.add_argument("--withdraw", action="store_true", help="take the announcement back")
    deprecate.add_argument("--note", default="", help="what to use instead, or why")
    deprecate.set_defaults(command=_command("deprecate"))
    for one in (show, verify, deprecate):
        one.add_argument("version", help="name@number:sha256, name@number, or its id mver_…")


def _add_bringing(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser
) -> None:
    bring = actions.add_parser(
        "import",
        parents=[home],
        help="bring weights in from a folder, S3 or a hub",
        description="Read the source, verify it and store it as a new version. The same weights again are the version "
        "that is there. S3 and the hub are those of the settings (TIDEGATE_OBJECTS__…, TIDEGATE_REGISTRY__HUB_URL).",
    )
    bring.add_argument("model", help="the model's own name; made when there is none")
    bring.add_argument("source", help="a folder, s3://bucket/prefix, or hub:owner/name")
    bring.add_argument("--revision", default="", help="of the hub: branch, tag or commit (default: main)")
    bring.add_argument("--include", action="append", default=[], metavar="PATTERN", help="only these files; repeatable")
    bring.set_defaults(command=_command("bring"))
    upload = actions.add_parser(
        "upload",
        parents=[home],
        help="send weights to an installation, this one or another",
        description="Send a file or folder in parts that resume. The token is TIDEGATE_TOKEN, else that of the home.",
    )
    upload.add_argument("model", help="the model's own name; made when there is none")
    upload.add_argument("path", type=Path, help="a file or a folder")
    upload.add_argument("--url", default="", help="of the installation (default: that of the home)")
    upload.set_defaults(command=_upload)
    for one in (bring, upload):
        one.add_argument("--number", type=int, default=0, help="the version's number (default: the next)")
        one.add_argument("--licence", default="", help="(default: what the files say)")
        one.add_argument("--context-max", type=int, default=0, metavar="TOKENS", help="(default: what the files say)")
        one.add_argument("--make-current", action="store_true", help="let the model's own name lead to it")
        one.add_argument("--note", default="", help="kept with where it came from")


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        from cli import models

        done: int = getattr(models, name)(options)
        return done

    return run


def _upload(options: argparse.Namespace) -> int:
    from cli.model_upload import upload

    return upload(options)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a day like 2026-11-30") from None
