"""The head of an HTTP/1 request, checked, and the head of an answer, built. Pure.

httptools in strict mode already refuses bad framing; what it lets through and we do not is refused here (each row of
the parser-safety list of the data-plane study).
"""

from api import networks
from api.inference import errors
from core.errors import ErrorKind, PlatformError
from core.heads import without_length

HEAD_MAX = 32 * 1024
HEADERS_MAX = 100
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
IDEMPOTENCY_KEY = b"idempotency-key"
_SINGLE = frozenset(
    {
        *(b"host", b"authorization", b"content-length", b"transfer-encoding", b"expect", b"content-type", b"origin"),
        IDEMPOTENCY_KEY,
    }
)
FALLBACK = b"x-tidegate-fallback"  # allow: another model may answer when this one has no capacity
RETRIES = (b"x-retry-attempt", b"x-stainless-retry-count")  # which try this is; the second is the official SDKs'
_NOTED = _SINGLE | {
    *(b"content-encoding", b"x-tidegate-max-wait", FALLBACK, b"openai-project", b"x-forwarded-for", b"connection"),
    *RETRIES,
}


class Head:
    """A request's head: `headers` as they came; `noted` those that matter to us, by names in lower case."""

    __slots__ = ("expects", "headers", "length", "method", "noted", "path", "query", "target", "upgrade", "version")

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.noted: dict[bytes, bytes] = {}
        self.method = b""
        self.path = b""
        self.query = b""
        self.version = ""
        self.expects = False  # to be told that it may send the body
        self.upgrade = False
        self.length = 0  # of the body; -1: chunked


def check(head: Head, *, body_max: int) -> None:
    """Fill in what follows from the raw parts.

    Raises:
        PlatformError: the request is refused; the connection must close afterwards.
    """
    method, version = head.method, head.version
    if method == b"CONNECT":
        raise errors.method_not_allowed("GET, POST and the like, not CONNECT")
    if version not in {"1.1", "1.0"}:
        raise PlatformError("HTTP_VERSION_NOT_SUPPORTED", ErrorKind.INVALID, "Speak HTTP/1.1.")
    if head.upgrade:
        raise errors.invalid("Protocol upgrades are not supported.")
    if not head.target.startswith(b"/"):
        raise errors.invalid("The request target must be a path.")
    if len(head.headers) > HEADERS_MAX:
        raise errors.headers_too_large()
    head.path, _, head.query = head.target.partition(b"?")
    _note(head)
    noted = head.noted
    if b"host" not in noted and version == "1.1":
        raise errors.invalid("The Host header is missing.")
    head.length = _body_length(noted, version)
    if head.length > body_max:
        raise errors.body_too_large(body_max)
    expect = noted.get(b"expect")
    if expect is not None:
        if expect.lower() != b"100-continue":
            raise PlatformError("EXPECTATION_FAILED", ErrorKind.INVALID, "Only 'Expect: 100-continue' is understood.")
        head.expects = True


def shape(data: bytes) -> tuple[bytes, bytes, int]:
    """Return what is the same in all requests of a client, its key, and where the body begins.

    The shape is the head without the lines of Content-Length and Authorization. It says all of a request that is whole
    in `data` and has a key that we know; three nothings when it is not whole, no POST or has no such line.
    """
    head, begin = without_length(data)
    before, line, rest = head.partition(b"\r\nAuthorization: Bearer ")
    if not line or not head.startswith(b"POST /"):
        return b"", b"", 0
    key, _, after = rest.partition(b"\r\n")
    return before + b"\r\n" + after, key, begin


def _note(head: Head) -> None:
    noted = head.noted
    for written, value in head.headers:
        name = written.lower()
        if name in _NOTED:
            if name in noted and name in _SINGLE:
                raise errors.invalid(f"The header {name.decode()} stands there twice.")
            noted[name] = value


def _body_length(noted: dict[bytes, bytes], version: str) -> int:
    encoding = noted.get(b"transfer-encoding")
    if encoding is None:
        return int(noted.get(b"content-length", b"0"))  # the parser has checked that these are digits
    if version == "1.0":
        raise errors.invalid("HTTP/1.0 has no Transfer-Encoding.")
    if encoding.lower() != b"chunked":
        raise PlatformError("NOT_IMPLEMENTED", ErrorKind.INVALID, "The only Transfer-Encoding is chunked.")
    return -1


def bearer(head: Head) -> bytes:
    """The key in the Authorization header, or nothing."""
    return bearer_of(head.noted.get(b"authorization", b""))


def bearer_of(authorization: bytes) -> bytes:
    """The key in the value of an Authorization header, or nothing."""
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def client_address(head: Head, peer: str, trusted_proxies: tuple[str, ...]) -> str:
    """The caller's address: the peer, or behind proxies we trust, whom the first one of them says it got it from.

    `X-Forwarded-For` is read from its end, where the nearest proxy wrote; what stands before an address that we do not
    trust may be the caller's own invention.
    """
    if not trusted_proxies or not networks.contain(trusted_proxies, peer):
        return peer
    address = peer
    for entry in reversed(head.noted.get(b"x-forwarded-for", b"").split(b",")):
        named = entry.strip().decode("latin-1")
        if not named:
            break
        address = named
        if not networks.contain(trusted_proxies, address):
            break
    return address


def cors_lines(head: Head, origins: tuple[str, ...]) -> bytes:
    """Header lines for a browser of an allowed origin."""
    origin = head.noted.get(b"origin", b"")
    if not origin or ("*" not in origins and origin.decode("latin-1") not in origins):
        return b""
    return b"Access-Control-Allow-Origin: %b\r\nVary: Origin\r\nAccess-Control-Expose-Headers: *\r\n" % origin


def status_line(status: int) -> bytes:
    """The first line of an answer."""
    line = _STATUS_LINES.get(status)
    return line if line is not None else b"HTTP/1.1 %d Status\r\n" % status


def plain_head(status: int, length: int, date_line: bytes, extra: bytes, *, keep_alive: bool) -> bytes:
    """The head of a JSON answer with a known length. `date_line` and `extra` are whole header lines."""
    return b"%bContent-Type: application/json\r\nContent-Length: %d\r\n%b%b%b\r\n" % (
        _STATUS_LINES.get(status) or status_line(status),
        length,
        date_line,
        extra,
        b"" if keep_alive else b"Connection: close\r\n",
    )


def stream_head(extra: bytes, *, chunked: bool, keep_alive: bool) -> bytes:
    """The head of an event stream; an HTTP/1.0 client gets bytes until the connection ends."""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n%b%b%b\r\n"
        % (
            b"Transfer-Encoding: chunked\r\nX-Accel-Buffering: no\r\n" if chunked else b"",
            extra,
            b"" if keep_alive else b"Connection: close\r\n",
        )
    )


_STATUS_LINES = {status: f"HTTP/1.1 {status} {phrase}\r\n".encode("ascii") for status, phrase in errors.REASONS.items()}
