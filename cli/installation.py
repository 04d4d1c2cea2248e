"""Settings of an all-in-one installation: made from its home, or from the environment for a process on its own."""

import os
from pathlib import Path

from cli.embedded import postgres as pg
from cli.home import Home, HomeError, HomeSecrets, HomeState, existing_home, load_secrets, load_state
from core.settings import Settings

DATABASE = "tidegate"
REPLICA = "gateway-1"


def postgres_files(home: Home, secrets: HomeSecrets) -> pg.PostgresFiles:
    return pg.PostgresFiles(
        root=home.path / "postgres",
        owner_password=secrets.database_owner_password,
        app_password=secrets.database_app_password,
        socket_folder=home.run / "pg",
        log_file=home.logs / "postgres.log",
    )


def settings(home: Home, secrets: HomeSecrets, state: HomeState) -> Settings:
    """Return the settings of every process of the home. What the environment says of other things still holds."""
    files = postgres_files(home, secrets)
    keys: dict[str, str | tuple[str, ...]] = {
        "pepper": secrets.pepper,
        "signing": secrets.signing,
        "sealing": secrets.sealing,
        "previous_peppers": secrets.previous_peppers,
        "previous_signing": secrets.previous_signing,
    }
    given = {name for name in keys if f"TIDEGATE_SECRETS__{name.upper()}" in os.environ}
    return Settings.load(
        home=home.path,
        secrets={name: text for name, text in keys.items() if name not in given},
        database={
            "url": pg.url(files, state.database_port, "app", DATABASE),
            "owner_url": pg.url(files, state.database_port, "owner", DATABASE),
        },
        valkey={
            "url": f"unix://{home.valkey_socket}",
            "broker_url": f"unix://{home.valkey_socket}?db=1",
        },
        gateway={
            "host": state.host,
            "port": state.port,
            "replica_id": REPLICA,
            **_metrics_token(secrets),
        },
        control={"socket": home.control_socket},
    )


def _metrics_token(secrets: HomeSecrets) -> dict[str, str]:
    """The home's token, unless the environment names another; homes of an older version have none until a start."""
    own = secrets.metrics_token and "TIDEGATE_GATEWAY__METRICS_TOKEN" not in os.environ
    return {"metrics_token": secrets.metrics_token} if own else {}


def find_settings(home_path: Path) -> Settings:
    """Return the settings for one process or command on its own: the environment's, else those of the running home.

    Raises:
        HomeError: neither names a database.
    """
    if "TIDEGATE_DATABASE__URL" in os.environ:
        return Settings.load(home=home_path)
    home = existing_home(home_path)
    state = load_state(home)
    if not state.database_port:
        raise HomeError(
            f"The home {home.path} was never started. Run `tidegate up`, or name a database in TIDEGATE_DATABASE__URL."
        )
    return settings(home, load_secrets(home, refuse), state)


def refuse() -> HomeSecrets:
    raise HomeError("This home has no secrets.json; `tidegate up` makes it.")
