"""What a run's RunSpec names and this node fetches from others: version 0 and the data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from p2pdiloco import limits
from p2pdiloco.errors import PeerError, TransportError
from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.run_spec import BlobRef, RunSpec, chunk_sizes
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.telemetry import Telemetry
from p2pdiloco_node.transport.client import Client

DONORS_TRIED_MAX = 16
NODES_FIRST = 2  # asked before the witness, whose line is everybody's
RETRY_S = 1.0  # between tries to get a piece of version 0


class RunBlobs:
    """Implements shards.Source. `peers()`: whom this node knows."""

    def __init__(
        self,
        spec: RunSpec,
        client: Client,
        blobs: DiskBlobStore,
        telemetry: Telemetry,
        peers: Callable[[], Sequence[PeerId]],
        rng: Random,
    ) -> None:
        self._spec = spec
        self._client = client
        self._blobs = blobs
        self._telemetry = telemetry
        self._peers = peers
        self._rng = rng
        self.bytes_fetched = 0  # in this life: no part of what training costs

    @property
    def witness(self) -> PeerId:
        return PeerId(self._spec.committee.genesis.witness)

    def donors(self) -> list[PeerId]:
        """Peers that may have something, the witness first."""
        return sorted(self._peers(), key=lambda p: p != self.witness)[:DONORS_TRIED_MAX]

    @property
    def deltas_on_the_way(self) -> bool:
        """Whether this node sends or fetches a delta just now."""
        return self._client.deltas_on_the_way

    async def fetch_shard(self, ref: BlobRef) -> None:
        """From nodes or the witness, each time in another order, so that every line carries its share.

        Raises: TransportError, PeerError: nobody gave it; OperatorError: the disk; RUN: the run's owner.
        """
        donors = [p for p in self._peers() if p != self.witness]
        self._rng.shuffle(donors)
        donors.insert(NODES_FIRST, self.witness)
        await self._fetch(Digest(ref.digest), ref.size, donors[:DONORS_TRIED_MAX], Purpose.SHARD)

    async def fetch_genesis(self) -> None:
        """Version 0, tried until it is here. Raises: OperatorError: the disk; RUN: the run's owner."""
        genesis = self._spec.genesis
        wanted = [Digest(c) for c in dict.fromkeys((*genesis.params, *genesis.momentum))]
        size_max = max(chunk_sizes(self._spec.model.params))  # what its model makes, and not a byte more
        slots = asyncio.Semaphore(limits.fetches_per_node_max)
        here = 0
        self._telemetry.fetching("pieces of version 0", here, len(wanted))

        async def one(digest: Digest) -> None:
            nonlocal here
            said = False
            while not self._blobs.has(digest):
                try:
                    async with slots:
                        await self._fetch(digest, size_max, self.donors(), Purpose.SNAPSHOT)
                except (TransportError, PeerError) as error:
                    if not said:
                        self._telemetry.say("fetch", f"Waiting for version 0: {error}")
                    said = True
                    await asyncio.sleep(RETRY_S)
            here += 1
            self._telemetry.fetching("pieces of version 0", here, len(wanted))

        async with asyncio.TaskGroup() as group:
            for digest in wanted:
                group.create_task(one(digest))

    async def _fetch(self, digest: Digest, size_max: int, donors: Sequence[PeerId], purpose: Purpose) -> None:
        tell = self._telemetry.fetch_failed
        await self._client.fetch(digest, size_max, donors, purpose, of_spec=True, tell=tell)
        self.bytes_fetched += self._blobs.size(digest) or 0
