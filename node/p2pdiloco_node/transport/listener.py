"""A listening socket with caps on connections, and the checks that a server needs before it opens one.

aiohttp has no cap of its own, and its keep-alive of an hour lets slow headers hold a connection that long
(traps.md). Each connection goes through a small protocol that counts it and passes everything on.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections import Counter
from types import TracebackType
from typing import NoReturn, Self

import aiohttp.http_parser
from aiohttp import web

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.exit_codes import FILES, NETWORK, RESOURCES
from p2pdiloco_node.transport.addresses import canonical

FILES_BESIDES = 256  # open files that are not connections of this server
WATCH_S = 2.0


def _logger() -> logging.Logger:
    """aiohttp logs a traceback for each request that is not HTTP: strangers would fill the disk with them."""
    logger = logging.getLogger("p2pdiloco.http")
    logger.addFilter(_own_faults)
    return logger


def _own_faults(record: logging.LogRecord) -> bool:
    fault = record.exc_info[1] if record.exc_info else None
    return not isinstance(fault, aiohttp.http_exceptions.HttpProcessingError)


class Listener:
    """Entering opens the port and serves `app`; `port` is the real one afterwards (for port 0).

    Entering raises OperatorError if the port is taken, the host is not this machine's, or the process may
    not open enough files.
    """

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        *,
        connections_max: int = limits.connections_max,
        per_address_max: int = limits.connections_per_address_max,
        idle_s: float = limits.header_timeout_s,
    ) -> None:
        self.host = host
        self.port = port
        self.connections_max = connections_max
        self.per_address_max = per_address_max
        self.refused = 0  # connections beyond a cap
        self.open: Counter[str] = Counter()  # by address
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            logger=_logger(),
            keepalive_timeout=idle_s,
            lingering_time=1.0,
            auto_decompress=False,
            max_line_size=limits.head_bytes_max,
            max_field_size=limits.head_bytes_max,
            max_headers=64,
            shutdown_timeout=1.0,
        )
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        check_c_parser()
        check_open_files(self.connections_max + FILES_BESIDES)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: Capped(self), self.host, self.port, backlog=256)
        except OSError as error:
            await self._runner.cleanup()
            raise _cannot_listen(error, self.host, self.port) from None
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    async def watch(self) -> NoReturn:
        """Runs as long as the port is served: a task for the daemon's TaskGroup, so that a node is never
        "training but deaf" (scenario E2).

        Raises: TransportError when it is served no more.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if self._server is None or not self._server.is_serving():
                raise TransportError(f"the server on port {self.port} stopped")

    def handler(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None, "entered"
        return server()


class Capped(asyncio.Protocol):
    """Counts a connection while it lives, or ends it at once."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._inner: asyncio.Protocol | None = None
        self._address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("peername")
        self._address = canonical(peer[0]) if peer else ""
        opened = self._listener.open
        if (
            opened.total() >= self._listener.connections_max
            or opened[self._address] >= self._listener.per_address_max
        ):
            self._listener.refused += 1
            transport.abort()
            return
        opened[self._address] += 1
        self._inner = self._listener.handler()
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner is None:
            return
        opened = self._listener.open
        opened[self._address] -= 1
        if not opened[self._address]:
            del opened[self._address]
        self._inner.connection_lost(exc)
        self._inner = None

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()


def check_c_parser() -> None:
    """Raises: OperatorError if aiohttp fell back to its slow parser in Python."""
    parser = aiohttp.http_parser.HttpRequestParser
    if parser is aiohttp.http_parser.HttpRequestParserPy:
        raise OperatorError(
            "aiohttp runs without its C parser, which strangers could use to slow this node down: unset "
            "AIOHTTP_NO_EXTENSIONS, or reinstall it (pip install --force-reinstall aiohttp).",
            exit_code=FILES,
        )


def check_open_files(needed: int) -> None:
    """Raise this process's own limit as far as `needed`. Raises: OperatorError if it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OperatorError(
            f"This process may open {hard} files and needs {needed} for its connections: raise the limit "
            f"(ulimit -n {needed}) and start again.",
            exit_code=RESOURCES,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _cannot_listen(error: OSError, host: str, port: int) -> OperatorError:
    match error.errno:
        case errno.EADDRINUSE:
            text = f"Port {port} on {host} is in use by another program: stop that, or choose another port "
            return OperatorError(text + "with --listen HOST:PORT.", exit_code=RESOURCES)
        case errno.EACCES | errno.EPERM:
            text = f"This user may not listen on port {port}: choose one above 1023 with --listen HOST:PORT."
            return OperatorError(text, exit_code=RESOURCES)
        case _:
            return OperatorError(
                f"Cannot listen on {host}:{port} ({error.strerror or error}): name an address of this "
                "machine with --listen HOST:PORT (0.0.0.0 for all).",
                exit_code=NETWORK,
            )
