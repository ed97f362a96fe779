"""The line that a newcomer pastes, with an address that works, or the reason why there is none."""

from __future__ import annotations

import ipaddress

from p2pdiloco.ids import RunId
from p2pdiloco.status.read_model import JoinHint


def join_hint(run: RunId, url: str, *, local: bool) -> JoinHint:
    """`url`: scheme, host and port at which the tracker says it is reachable, without a path.

    A loopback or unspecified host is never *the* address (scenario C2), unless the run is local.
    """
    host = url.split("://", 1)[-1].rsplit("/", 1)[0]
    host = host[1:].split("]", 1)[0] if host.startswith("[") else host.rsplit(":", 1)[0]
    line = f"p2pdiloco node --join {url.rstrip('/')}/#{run.hex()}"
    if not _this_machine_only(host):
        return JoinHint(line=line, note="Paste this on any machine with Python 3.11 and p2pdiloco[node].")
    if local:
        return JoinHint(line=line, note="This run is local: the address works on the tracker's machine only.")
    return JoinHint(
        line=None,
        note="This tracker does not know an address that works from elsewhere. Its host can name one: "
        "p2pdiloco tracker --public-url https://HOST:PORT",
    )


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
