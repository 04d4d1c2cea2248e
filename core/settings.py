"""Settings: one frozen object, built once in the process entry and passed down.

Importing this module reads nothing. `Settings.load()` reads the environment (``TIDEGATE_…``, nested with ``__``).
Every secret is a `SecretStr`, and may be given by reference: ``file:/run/secrets/pepper`` reads that file.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


def _resolve_reference(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if text.startswith("file:"):
        return SecretStr(Path(text.removeprefix("file:")).read_text(encoding="utf-8").strip())
    return value


Secret = Annotated[SecretStr, AfterValidator(_resolve_reference)]


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Secrets(_Group):
    """Keys of the installation, 32 bytes each in hex. `tidegate up` makes them once, in a file of mode 600.

    Previous ones are still believed, newest first, until they are taken off these lists (ADR 0016).
    """

    pepper: Secret  # keys the hash of API keys and operator tokens
    signing: Secret  # signs receipts and cookies
    sealing: Secret  # seals upstream credentials at rest
    previous_peppers: tuple[Secret, ...] = ()
    previous_signing: tuple[Secret, ...] = ()


class Database(_Group):
    """Two roles of one database: the owner migrates, the application may only do its work."""

    url: Secret  # postgresql://tidegate_app:…@…/tidegate
    owner_url: Secret | None = None
    pool_size: int = 5


class Valkey(_Group):
    """`url` is ``unix:///path/to/socket`` or ``redis://[:password@]host:port``; the broker is a database of its own."""

    url: Secret
    broker_url: Secret


class SpoolPolicy(StrEnum):
    """Which work is refused when usage cannot be moved to the books and the spool grows towards its bound."""

    BY_TIER = "by_tier"  # batch from one share of the bound on, standard from another, priority at the bound
    ALL = "all"  # every tier at the bound, none before


class LatePolicy(StrEnum):
    """What happens when the disk takes longer than an answer waits for it."""

    ANSWER = "answer"  # the answer goes, and that is counted
    REFUSE = "refuse"  # it goes too (the work is done), and new work is refused for a second


class Gateway(_Group):
    """The data plane. Limits are per process unless a name says otherwise."""

    host: str = "127.0.0.1"
    port: int = 8080
    metrics_token: Secret | None = None  # what /metrics, and the parts of /ready, ask for; none: nobody reads them
    replica_id: str = ""  # names this replica's spool folder and leases; empty: made from host name and port
    body_max_bytes: int = 10_000_000
    cors_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    spool_wait_ms: int = 20  # how long an answer waits for the disk
    spool_late: LatePolicy = LatePolicy.ANSWER
    spool_max_bytes: int = Field(1_000_000_000, ge=1)  # unposted usage kept on disk; from there on new work is refused
    spool_policy: SpoolPolicy = SpoolPolicy.BY_TIER
    spool_batch_percent: int = Field(70, ge=0, le=100)  # by tier: of that bound, where work of tier batch is refused
    spool_standard_percent: int = Field(90, ge=0, le=100)  # and where of tier standard
    upstream_connections_max: int = 4096  # per endpoint
    request_timeout_s: int = 600
    max_wait_s: int = 600  # the most a deployment may let callers wait for a place or a wake
    heartbeat_s: float = Field(5.0, gt=0)  # a stream's caller that is held for a wake hears a comment so often
    # how long a request of a tier waits for a place, from its first try on, unless the caller names a time
    priority_wait_s: float = 2.0
    standard_wait_s: float = 10.0
    batch_wait_s: float = 120.0
    cache_trust_s: int = 60  # how long keys and prices are trusted with Postgres and Valkey both away, also from disk
    policy_trust_s: int = 900  # how old what a gateway kept on disk may be when it starts without one of them; 0: never
    global_inflight_max: int = 4096  # over all replicas
    blocks: bool = True  # admit callers that come fast from leased blocks, as far as their limits are (ADR 0032)

    @model_validator(mode="after")
    def _lower_tiers_first(self) -> Self:
        if self.spool_batch_percent > self.spool_standard_percent:
            raise ValueError("spool_batch_percent is more than spool_standard_percent: lower tiers are refused first")
        return self

    @property
    def spool_marks(self) -> tuple[int, int, int]:
        """Bytes of unposted usage from which work is refused: of tier batch, standard, priority."""
        most = self.spool_max_bytes
        if self.spool_policy is SpoolPolicy.ALL:
            return most, most, most
        return most * self.spool_batch_percent // 100, most * self.spool_standard_percent // 100, most


class Control(_Group):
    """The control plane listens on a unix socket; the gateway passes other paths to it."""

    socket: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    public_url: str = ""  # as browsers see it: for links in mails and the check of Origin
    session_idle_s: int = 43_200  # a session unused for so long ends
    session_absolute_s: int = 604_800  # and after so long in any case
    keys_max_days: int = Field(0, ge=0)  # how long an API key may live from its making or last change; 0: for ever


class Controller(_Group):
    """The owner of engines and wakes."""

    idle_window_s: int = 300  # a cold deployment without requests for so long goes to sleep
    drain_timeout_s: int = 30
    start_timeout_s: int = 1800  # an engine that is not ready after so long is ended and started again
    engines_max: int = Field(0, ge=0)  # engines that this host has room for, which rollouts heed; 0: no bound
    adaptive_caps: bool = True  # read the engines' figures each second, and let them say how much is sent to them
    seats_per_engine: int = 256  # the most requests sent to one engine, until its figures say less


class MailSecurity(StrEnum):
    """How the connection to the mail server is protected."""

    STARTTLS = "starttls"
    TLS = "tls"
    NONE = "none"  # only for a server on this machine or in a trusted network


class Mail(_Group):
    """An SMTP server. Without `host` mails are kept in ``<home>/mail``, where operators can look at them."""

    host: str = ""
    port: int = 587
    security: MailSecurity = MailSecurity.STARTTLS
    username: str = ""
    password: Secret = SecretStr("")
    sender: str = "Tidegate <tidegate@localhost.localdomain>"
    ca_file: Path | None = None  # a private authority that vouches for the server; the system's when not set
    timeout_s: int = 15

    @model_validator(mode="after")
    def _no_password_in_clear(self) -> Self:
        if self.username and self.security is MailSecurity.NONE:
            raise ValueError("a password is not sent over a connection that is not protected")
        return self


class Oidc(_Group):
    """Sign-in by identity providers, and their tokens at the gateway."""

    allow_loopback: bool = False  # providers on this machine, by plain http too: for trials and tests
    fetch_timeout_s: float = 5.0  # of one call to a provider
    refresh_every_s: int = 300  # how old the groups of a session in use may be
    refresh_trust_s: int = 3600  # with the provider away: how long the groups last read are trusted
    keys_refresh_s: int = 600  # how often a provider's keys are read again
    keys_trust_s: int = 86_400  # with the provider away: how long its keys are trusted
    refetch_min_s: float = 10.0  # between two fetches for key ids that are not known
    leeway_s: int = 60  # how far a provider's clock may be off


class Retention(_Group):
    """How long what is no longer needed is kept."""

    closed_tenant_days: int = 90  # people's data of a closed tenant; its books and usage stay
    # Single usage events; sums by minute and the ledger stay. 0: for ever. A day goes when its month is closed.
    usage_days: int = Field(0, ge=0, le=36_500)
    # Weights that usage events name are kept this long after them, for whoever must explain an answer. 0: as long as
    # there are such events.
    weights_days: int = Field(0, ge=0, le=36_500)


class Books(_Group):
    """Rules of the ledger."""

    adjust_alone_max: int = Field(1000, ge=0)  # units of the currency by one person for one tenant in 24 h; above: two
    close_grace_hours: int = Field(48, ge=0)  # after its end a month stays open at least so long
    paid_credit_may_expire: bool = False  # where the terms agreed with customers, and the law, allow it


class Objects(_Group):
    """Where weights, archives and exports lie: the home, or a bucket of S3 or of what speaks like it."""

    url: str = Field(
        "", pattern=r"^(s3://[a-z0-9.-]{3,63}(/[A-Za-z0-9._/-]*)?)?$"
    )  # s3://bucket[/prefix]; empty: the home
    endpoint: str = Field("", pattern=r"^(https?://[^/?#@\s]+)?$")  # of a server that is not Amazon's
    region: str = "us-east-1"
    access_key: Secret = SecretStr("")
    secret_key: Secret = SecretStr("")


class Registry(_Group):
    """What may be brought into the model registry, and from where."""

    uploads_max: int = Field(20, ge=1)  # open at once: uploads, imports and checks together
    upload_days: int = Field(7, ge=1)  # one that is not complete by then is given up
    part_bytes: int = Field(8_388_608, ge=1024, le=8_388_608)  # of uploads: what one request carries
    version_max_bytes: int = Field(2_000_000_000_000, ge=1)
    import_folders: tuple[Path, ...] = ()  # what imports by the API may read; `tidegate model import` reads any
    hub_url: str = Field("", pattern=r"^(https?://[^/?#@\s]+)?$")  # a hub with Hugging Face's API; empty: none
    hub_token: Secret = SecretStr("")  # sent to the hub itself and nobody else
    hub_file_hosts: tuple[str, ...] = ()  # hosts that the hub may send us to for files


class Log(_Group):
    level: str = "info"
    json_lines: bool = True


class Settings(BaseSettings):
    """All of it. Frozen: a change is a new process."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEGATE_",
        env_nested_delimiter="__",
        frozen=True,
        extra="ignore",
        nested_model_default_partial_update=True,
    )

    home: Path = Path(".tidegate")
    zone: str = ""  # where this host stands: gateways prefer engines of their own zone; empty: none is far
    secrets: Secrets
    database: Database
    valkey: Valkey
    gateway: Gateway = Field(default_factory=Gateway)
    control: Control = Field(default_factory=Control)
    controller: Controller = Field(default_factory=Controller)
    mail: Mail = Field(default_factory=Mail)
    oidc: Oidc = Field(default_factory=Oidc)
    retention: Retention = Field(default_factory=Retention)
    books: Books = Field(default_factory=Books)
    objects: Objects = Field(default_factory=Objects)
    registry: Registry = Field(default_factory=Registry)
    log: Log = Field(default_factory=Log)

    @property
    def base_url(self) -> str:
        """Where people find this installation, for links; never what a request says of it."""
        if self.control.public_url:
            return self.control.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.gateway.host, self.gateway.host)  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.gateway.port}"

    @property
    def spool_dir(self) -> Path:
        """Below it one folder per gateway replica of this host."""
        return self.home / "spool"

    @property
    def policy_dir(self) -> Path:
        """What gateways know, sealed, for a start without Postgres or Valkey; one folder per replica of this host."""
        return self.home / "policy"

    @property
    def mail_dir(self) -> Path:
        """Mails that no SMTP server is set for."""
        return self.home / "mail"

    @property
    def objects_dir(self) -> Path:
        """The object store, where no bucket is set."""
        return self.home / "objects"

    @property
    def models_dir(self) -> Path:
        """Weights that engines of this host read: verified, read-only; can be fetched again."""
        return self.home / "models"

    @classmethod
    def load(cls, **values: Any) -> Self:
        """Build from the environment, `values` winning."""
        return cls(**values)


class _ObjectsAlone(BaseSettings):
    """For a process that needs no other setting, and gets none of the secrets."""

    model_config = SettingsConfigDict(env_prefix="TIDEGATE_", env_nested_delimiter="__", frozen=True, extra="ignore")

    objects: Objects = Field(default_factory=Objects)


def load_objects() -> Objects:
    """Return the object store's settings from the environment alone."""
    return _ObjectsAlone().objects
