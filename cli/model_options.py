"""What `tidegate model …` takes: the words and options, without the work behind them."""

import argparse
from collections.abc import Callable

from cli import registry_options


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser) -> None:
    """Add the command `model` with its actions."""
    model = commands.add_parser("model", help="bring versions in, let them take each other's place, look at starts")
    actions = model.add_subparsers(title="actions", required=True, metavar="action")
    registry_options.add(actions, home)
    update = actions.add_parser(
        "update",
        parents=[home],
        help="let a version take the place of the one that serves",
        description="Begin a rollout and follow it until it ends: the new version is warmed beside the old one, maybe "
        "tried by copies of requests and by a part of the conversations, then the model's names lead to it, and the "
        "old one ends what runs on it and stops. The controller moves it; Ctrl-C only ends the watching.",
    )
    update.add_argument("name", help="the model's own name")
    update.add_argument("--to", required=True, metavar="VERSION", help="its number, or its id (mver_…)")
    update.add_argument("--steps", type=_percents, default=[], metavar="PERCENTS", help="e.g. 1,10,50: a canary first")
    update.add_argument("--step-seconds", type=int, default=600, metavar="S", help="least time of a step (%(default)s)")
    update.add_argument("--step-requests", type=int, default=100, metavar="N", help="and least requests (%(default)s)")
    update.add_argument("--shadow", type=float, metavar="PERCENT", help="compare copies of so many requests first")
    update.add_argument("--room", choices=["auto", "beside", "instead"], default="auto", help="(default: auto)")
    update.add_argument("--keep-seconds", type=int, default=0, metavar="S", help="keep the old version ready so long")
    update.add_argument("--detach", action="store_true", help="do not follow it")
    update.set_defaults(command=_run("update"))
    for name, summary in (
        ("cancel", "end a rollout before its names have switched"),
        ("rollback", "let the names lead to the old version again"),
        ("follow", "show the moves of a rollout until it ends"),
    ):
        action = actions.add_parser(name, parents=[home], help=summary)
        action.add_argument("rollout", help="its id, rol_…")
        action.set_defaults(command=_run(name))
    listed = actions.add_parser("rollouts", parents=[home], help="list rollouts, newest first")
    listed.set_defaults(command=_run("rollouts"))
    wakes = actions.add_parser(
        "wakes",
        parents=[home],
        help="show the starts of a deployment's engines, by phase",
        description="Show the last starts of a deployment's engines: why, what became of it, and how long each phase "
        "took, from the wish to the first token.",
    )
    wakes.add_argument("deployment", help="its name")
    wakes.add_argument("--format", choices=["table", "json"], default="table", help="default: table")
    wakes.set_defaults(command=_wakes)


def _percents(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no percentages like 1,10,50") from None
    return found


def _wakes(options: argparse.Namespace) -> int:
    from cli.wakes import show

    return show(options.home, options.deployment, kind=options.format)


def _run(action: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        from cli import rollouts

        return rollouts.run(action, options)

    return run
