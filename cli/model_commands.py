"""`tidegate model …`: the arguments. What they do is imported when it is asked for."""

import argparse


def add_model(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", home: argparse.ArgumentParser) -> None:
    model = commands.add_parser("model", help="look at models and their engines")
    actions = model.add_subparsers(title="actions", required=True, metavar="action")
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


def _wakes(options: argparse.Namespace) -> int:
    from cli.wakes import show

    return show(options.home, options.deployment, kind=options.format)
