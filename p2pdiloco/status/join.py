"""The line that a newcomer pastes, with an address that works, or the reason why there is none."""

from __future__ import annotations

import ipaddress

from p2pdiloco.ids import RunId
from p2pdiloco.status.read_model import JoinHint

LOOPBACK = "bound to loopback, only nodes on this machine can join"


def join_hint(run: RunId, url: str, *, local: bool, folder: str) -> JoinHint:
    """`url`: scheme, host and port at which the tracker says it is reachable, without a path; `folder`: the
    run's, as a shell takes it.

    A loopback host is never *the* address: it comes with the sentence that says so (scenario C2). One that
    is unspecified is none at all.
    """
    host = url.split("://", 1)[-1].rsplit("/", 1)[0]
    host = host[1:].split("]", 1)[0] if host.startswith("[") else host.rsplit(":", 1)[0]
    line = f"p2pdiloco node --join {url.rstrip('/')}/#{run.hex()}"
    if not _this_machine_only(host):
        return JoinHint(line=line, note="Paste this on any machine with Python 3.11 and p2pdiloco[node].")
    again = f"p2pdiloco tracker --run {folder} --listen 0.0.0.0:{_port(url)}"
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return JoinHint(
            line=None,
            note="This tracker does not know an address that works from elsewhere. Its host can name one: "
            f"{again} --public-url http://HOST:{_port(url)}",
        )
    if local:
        return JoinHint(line=line, note=f"{LOOPBACK[0].upper()}{LOOPBACK[1:]}. For others: {again}")
    return JoinHint(
        line=line,
        note=f"{LOOPBACK[0].upper()}{LOOPBACK[1:]}. This run is open, and its nodes connect to public "
        f"addresses only; its host can name one: {again} --public-url http://HOST:{_port(url)}",
    )


def export_line(join: JoinHint) -> str | None:
    """The line that makes a folder of the newest version, wherever the line to join works."""
    return None if join.line is None else f"{join.line.replace('node', 'export', 1)} out/"


def _port(url: str) -> str:
    port = url.rstrip("/").rsplit(":", 1)[-1]
    return port if port.isdecimal() else "7474"


def _this_machine_only(host: str) -> bool:
    if host.lower().rstrip(".") in ("localhost", "") or host.lower().endswith(".localhost"):
        return True
    try:
        ip = ipaddress.ip_address(host.split("%", 1)[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    return ip.is_loopback or ip.is_unspecified
