from __future__ import annotations

import pytest

from p2pdiloco.ids import RunId, digest_of
from p2pdiloco.status import LOOPBACK, join_hint
from p2pdiloco.status.read_model import JoinHint

RUN = RunId(digest_of(b"run"))


def hint(url: str, *, local: bool = False) -> JoinHint:
    return join_hint(RUN, url, local=local, folder="tiny-run")


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8470", "http://localhost:8470/", "http://[::1]:8470", "http://127.8.9.1:8470",
        "http://[::ffff:127.0.0.1]:8470", "http://LOCALHOST.:8470",
    ],
)  # fmt: skip
def test_loopback_is_never_the_address_without_saying_so(url: str, local: bool) -> None:  # C2
    shown = hint(url, local=local)
    assert shown.line == f"p2pdiloco node --join {url.rstrip('/')}/#{RUN.hex()}"
    assert LOOPBACK in shown.note.replace("Bound", "bound")
    assert "p2pdiloco tracker --run tiny-run --listen 0.0.0.0:8470" in shown.note
    assert ("--public-url http://HOST:8470" in shown.note) is not local  # nodes of open runs need it


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("url", ["http://0.0.0.0:8470", "http://[::]:8470", "http://:8470"])
def test_an_unspecified_host_is_no_address(url: str, local: bool) -> None:
    shown = hint(url, local=local)
    assert shown.line is None
    assert shown.note.endswith(
        "p2pdiloco tracker --run tiny-run --listen 0.0.0.0:8470 --public-url http://HOST:8470"
    )


@pytest.mark.parametrize(
    "url", ["https://t.example", "http://203.0.113.7:8470/", "http://[2001:db8::7]:8470"]
)
def test_an_address_that_works_elsewhere_is_ready_to_paste(url: str) -> None:
    shown = hint(url)
    assert shown.line == f"p2pdiloco node --join {url.rstrip('/')}/#{RUN.hex()}"
    assert "loopback" not in shown.note
