"""The certified log of one host, checked entry by entry while it comes, and read on from where it was.

The host is a stranger: an entry that does not verify ends the reading, whatever else would come. A log is cut
where the owner recovers the run, so going on from a byte is not enough: each reading begins with the newest
entry that is known. If that does not stand there any more, the log is read again from its beginning.
"""

from __future__ import annotations

import asyncio

import aiohttp

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.exit_codes import NETWORK, RUN
from p2pdiloco.ids import RunId
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import RulesState, after_entry, genesis_state
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.envelope import verify_entry
from p2pdiloco.wire.log import Entry
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.progress import BYTES, Watch
from p2pdiloco_node.storage import journal
from p2pdiloco_node.transport.bodies import Pace, read_parts
from p2pdiloco_node.transport.http_session import retry_after_s

TRIES = 4  # of a log that does not come


class _OtherLog(Exception):
    """What the host serves does not go on from what was read of it."""


class LogReader:
    """`log` and the rules states are those of the entries read so far."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        run: RunId,
        spec: RunSpec,
        url: str,
        watch: Watch,
        *,
        advice: str,
    ) -> None:
        """`advice`: how another host is named, where this one is no use."""
        self._session = session
        self._run, self._spec = run, spec
        self._url = url
        self._watch = watch
        self._advice = advice
        self._begin()

    def _begin(self) -> None:
        self.log = RunLog(self._run, self._spec)
        self.rules: RulesState = genesis_state(self._spec)  # after the newest entry
        self._kept = {0: self.rules}  # by index; the others are made from these
        self._newest = b""  # the frame of the newest entry
        self._newest_at = 0  # its first byte in the host's file
        self._read_to_end = False
        self.damaged = False  # behind its newest entry; nobody knows how it goes on

    def rules_at(self, index: int) -> RulesState:
        """After the entry at `index`."""
        if index == self.log.index:
            return self.rules
        start = index - index % limits.rules_kept_entries
        rules = self._kept[start]
        for place in range(start + 1, index + 1):
            rules = after_entry(rules, self.log.content(place), self._spec)
        return rules

    async def catch_up(self, *, to: int | None = None) -> None:
        """Read what is new, up to the entry at `to` where one is given.

        Raises: OperatorError: it does not come, does not verify, or is damaged.
        """
        await self.read(to)
        if self.damaged:
            raise self._bad(f"what follows entry {self.log.index} is damaged")

    async def read(self, to: int | None = None) -> None:
        """As `catch_up`, and where the host's file is damaged, what stands before that."""
        why = ""
        for number in range(TRIES):
            if number:
                await asyncio.sleep(limits.log_retry_s)
            try:
                return await self._read_on(to)
            except _OtherLog:
                self._begin()
                why = "it changed while it was read"
            except TransportError as error:
                why = str(error)
                await asyncio.sleep(error.retry_after_s or 0)
            except (aiohttp.ClientError, TimeoutError, OSError, PeerError, ValueError) as error:
                why = str(error) or type(error).__name__
        raise OperatorError(
            f"{self._url}/v1/log did not come ({why}): it may be overloaded, or run an older build; try "
            f"again later, or name another node of the run with {self._advice}.",
            NETWORK,
        )

    async def _read_on(self, to: int | None) -> None:
        """Raises: _OtherLog, OperatorError, TransportError, PeerError, what aiohttp raises."""
        headers = {"Range": f"bytes={self._newest_at}-"} if self._newest else {}
        url = f"{self._url}/v1/log"
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            if answer.status in (429, 503):
                if self._read_to_end:
                    return  # asked too soon: the next time
                raise TransportError(f"answered {answer.status}", retry_after_s(answer))
            if self._newest and answer.status in (200, 416):
                raise _OtherLog
            if answer.status != (206 if self._newest else 200):
                raise TransportError(f"answered {answer.status}")
            length = answer.content_length
            encoded = answer.headers.get("Content-Encoding", "identity").lower() != "identity"
            if length is None or encoded:
                raise TransportError("an answer without a length, or encoded")
            if not 0 < length <= limits.log_fetched_bytes_max:
                raise TransportError(f"an answer of {length} bytes, at most {limits.log_fetched_bytes_max}")
            await self._take(answer.content, length, to)

    async def _take(self, content: aiohttp.StreamReader, length: int, to: int | None) -> None:
        """Check what comes; never more than a frame of it is in memory."""
        waiting, known = bytearray(), self._newest or journal.TAG
        compared, came, first = False, 0, self._newest_at
        async for part in read_parts(content, length, Pace().for_size(length), part_bytes=1):
            waiting += part
            came += len(part)
            if not compared:
                if len(waiting) < len(known) and came < length:
                    continue
                if not waiting.startswith(known):
                    if self._newest:
                        raise _OtherLog
                    raise OperatorError(f"{self._url}/v1/log is not a p2pdiloco log.", RUN)
                compared = True
                del waiting[: len(known)]
                first += len(known)
            try:
                used, frame = await asyncio.to_thread(self._add, waiting, to)
            except PeerError as error:
                raise self._bad(f"entry {self.log.index + 1}: {error}") from None
            if frame:
                self._newest, self._newest_at = frame, first + used - len(frame)
            first += used
            del waiting[:used]
            self._watch("Reading the log", came, length, BYTES)
            if self.damaged or (to is not None and self.log.index >= to):
                return
        self._read_to_end = True  # but for an entry that is being written

    def _add(self, data: bytearray, to: int | None) -> tuple[int, bytes]:
        """Check and append the whole frames in `data`: (how many bytes they are, the last one).

        Raises: PeerError.
        """
        used, frame = 0, b""
        while to is None or self.log.index < to:
            try:
                found = journal.next_frame(data, used)
            except PeerError:
                self.damaged = True
                break
            if found is None:
                break
            payload = found[journal.FRAME_HEAD_BYTES :]
            entry = decode(payload, Entry, bytes_max=limits.log_frame_bytes_max)
            verify_entry(entry, self._run, verify_ed25519)
            content = self.log.append(entry).content
            try:
                self.rules = after_entry(self.rules, content, self._spec)
            except AssertionError as error:  # a majority certified what cannot be
                raise PeerError("BAD_CHAIN", str(error)) from None
            if self.log.index % limits.rules_kept_entries == 0:
                self._kept[self.log.index] = self.rules
            used, frame = used + len(found), found
        return used, frame

    def _bad(self, why: str) -> OperatorError:
        return OperatorError(
            f"The log of {self._url} does not verify: {why}. Nothing of it is used; name another node of the "
            f"run with {self._advice}.",
            RUN,
        )
