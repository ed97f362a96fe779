from __future__ import annotations

import pytest

from p2pdiloco.ids import RunId, digest_of
from p2pdiloco.status import join_hint

RUN = RunId(digest_of(b"run"))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8470", "http://localhost:8470/", "http://0.0.0.0:8470", "http://[::1]:8470",
        "http://[::]:8470", "http://127.8.9.1", "http://[::ffff:127.0.0.1]:8470", "http://LOCALHOST.:80",
    ],
)  # fmt: skip
def test_loopback_is_never_the_address_unless_the_run_is_local(url: str) -> None:
    public = join_hint(RUN, url, local=False)
    assert public.line is None
    assert "--public-url" in public.note
    local = join_hint(RUN, url, local=True)
    assert local.line is not None
    assert "this machine" in local.note or "tracker's machine only" in local.note


@pytest.mark.parametrize(
    "url", ["https://t.example", "http://203.0.113.7:8470/", "http://[2001:db8::7]:8470"]
)
def test_an_address_that_works_elsewhere_is_ready_to_paste(url: str) -> None:
    line = join_hint(RUN, url, local=False).line
    assert line == f"p2pdiloco node --join {url.rstrip('/')}/#{RUN.hex()}"
