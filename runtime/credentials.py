"""Who may call: a bearer token, required wherever a listener can be reached from another machine."""

import hmac
import ipaddress
import os
from pathlib import Path

TOKEN_VARIABLE = "TANDEM_TOKEN"
TOKEN_FILE_VARIABLE = "TANDEM_TOKEN_FILE"


def read_token() -> str | None:
    """The fleet's token from TANDEM_TOKEN, or from the file that TANDEM_TOKEN_FILE names; None if neither is set.

    Raises:
        ValueError: The file cannot be read, or the token is shorter than 16 characters.
    """
    token, path = os.environ.get(TOKEN_VARIABLE), os.environ.get(TOKEN_FILE_VARIABLE)
    if token is None and path is not None:
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ValueError(f"{TOKEN_FILE_VARIABLE} = {path}: {error.strerror}") from error
    if token is not None and len(token) < 16:
        raise ValueError(f"{TOKEN_VARIABLE} has {len(token)} characters: must have at least 16")
    return token


def is_loopback(host: str) -> bool:
    """Whether a listener on this host can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_token_off_loopback(host: str, token: str | None) -> None:
    """Refuses a listener that other machines can reach without a token.

    Raises:
        ValueError: The host is not loopback and there is no token.
    """
    if token is None and not is_loopback(host):
        raise ValueError(
            f"host = {host}: is reachable from other machines, so a token is required; "
            f"set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}, the same on every machine"
        )


def is_authorized(metadata: dict[str, str | bytes], token: str) -> bool:
    """Whether a call's metadata carries the token; compared in constant time."""
    value = metadata.get("authorization", "")
    given = value if isinstance(value, str) else value.decode("ascii", "replace")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())
