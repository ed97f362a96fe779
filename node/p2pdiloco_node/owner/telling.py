"""Messages from the owner's tool to peers, sealed with a key of the moment: anybody may carry them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable

import aiohttp

from p2pdiloco import limits
from p2pdiloco.ids import PeerId, RunId
from p2pdiloco.wire.envelope import receiver_of, seal
from p2pdiloco.wire.messages import Message
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco_node.owner.seen_run import Host
from p2pdiloco_node.transport.http_session import read_refusal


class Teller:
    """One per command: its envelopes are counted."""

    def __init__(self, session: aiohttp.ClientSession, run: RunId) -> None:
        self._session = session
        self._run = run
        self._signer = Ed25519Signer(secrets.token_bytes(32))
        self._n = 0

    async def tell(self, hosts: Iterable[Host], message: Message, epoch: int) -> set[PeerId]:
        """Who took it in."""
        asked = list(hosts)
        took = await asyncio.gather(*(self._tell(host, message, epoch) for host in asked))
        return {host.peer for host, took_it in zip(asked, took, strict=True) if took_it}

    async def _tell(self, host: Host, message: Message, epoch: int) -> bool:
        self._n += 1
        sealed = seal(
            message, self._signer, run=self._run, epoch=epoch, boot=1, n=self._n,
            to=receiver_of(message, host.peer),
        )  # fmt: skip
        for url in host.urls:
            try:
                async with (
                    asyncio.timeout(limits.request_timeout_s),
                    self._session.post(
                        f"{url}/v1/messages", data=sealed, allow_redirects=False
                    ) as answer,
                ):  # fmt: skip
                    if answer.status == 202:
                        return True
                    said = await read_refusal(answer)
                    if said.get("reason") == "REPLAYED":
                        return True  # an earlier address of the same peer took it
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                continue
        return False
