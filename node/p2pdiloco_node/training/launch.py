"""Starts the ranks of one trainer under torchrun's elastic agent, and says why they ended.

`python -m p2pdiloco_node.training.launch LAUNCH NICE DEVICES` (ranks.py): one worker for each device, all or
none. The agent restarts nothing: that is the supervisor's, with its brake.

Where all ranks are on this machine the agent's store listens on loopback alone. torchrun's own rendezvous
listens everywhere, asks nobody who he is, and unpickles what it is told: it is not used. Several machines
meet in a store that unpickles nothing (the "static" rendezvous) but asks nobody either: they need a network
of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from p2pdiloco_node.training.ranks import LOOPBACK, WORKER, Launch
from p2pdiloco_node.training.trainer_process import die_with_parent

RUN = "p2pdiloco"
# What torch says on a rank that waited for another in vain.
WAITING = ("gloo", "Gloo", "NCCL", "Connection closed", "Connection reset")
TIMED_OUT = "Timed out"
HOST = "127.0.0.1"


class Loopback(RendezvousHandler):  # type: ignore[misc]  # torch has no types here
    """A rendezvous of one machine: nobody to wait for, and a store that no other machine reaches."""

    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run = parameters.run_id

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.socket()
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = TCPStore(HOST, port, 1, is_master=True, master_listen_fd=listener.detach())
        return RendezvousInfo(PrefixStore(self._run, store), 0, 1, RendezvousStoreInfo(HOST, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(self._run)

    def shutdown(self) -> bool:
        return True


def main() -> None:
    """Until all ranks ended. Exit status: 0, or that of the rank that failed first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's: it ends this process in order
    die_with_parent()
    launch = msgspec.json.decode(sys.argv[1], type=Launch)
    alone = launch.nnodes == 1
    if alone:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
        rendezvous_handler_registry.register("loopback", Loopback)
    shutil.rmtree(launch.folder, ignore_errors=True)  # of a life that was ended by force
    Path(launch.folder).mkdir(parents=True)
    config = LaunchConfig(
        logs_specs=DefaultLogsSpecs(log_dir=launch.folder),
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        nproc_per_node=len(launch.devices),
        run_id=RUN,
        rdzv_backend="loopback" if alone else "static",
        rdzv_endpoint=launch.rdzv,
        rdzv_configs={"rank": launch.node_rank},
        max_restarts=0,
        shutdown_timeout=round(launch.stop_s),
        signals_to_handle="SIGTERM",
    )
    command, *arguments = WORKER
    try:
        elastic_launch(config, command)(*arguments, *sys.argv[2:], str(launch.collective_s))
    except SignalException:
        raise SystemExit(128 + signal.SIGTERM) from None
    except ChildFailedError as failed:
        rank, cause = first_cause(failed.failures)
        ranks = launch.nnodes * len(launch.devices)
        print(f"rank {rank} of {ranks} (from 0) {in_words(cause)}", file=sys.stderr, flush=True)
        raise SystemExit(max(1, cause.exitcode)) from None


def first_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """(rank, failure) of the one that did not fail because another one had.

    Who waited too long comes first: the one that it waited for is stuck, and only says how it was killed.
    """

    def later(failure: ProcessFailure) -> tuple[bool, bool, bool, int]:
        said = _message(failure)
        waited = any(word in said for word in WAITING)
        return TIMED_OUT not in said, waited, failure.exitcode >= 0, failure.timestamp

    return min(failures.items(), key=lambda item: later(item[1]))


def in_words(failure: ProcessFailure) -> str:
    """How a rank ended, for people."""
    if failure.exitcode < 0:
        return f"was ended by {failure.signal_name()}"
    said = _message(failure)
    if TIMED_OUT in said:
        return f"waited too long for another rank, which is stuck: {said}"
    return f"ended with status {failure.exitcode}" + (f": {said}" if said else "")


def _message(failure: ProcessFailure) -> str:
    """What a worker recorded of its end, if it did; torch keeps its own hints in the same place."""
    found = failure.message
    return str(found.get("message", "")) if isinstance(found, dict) else ""


if __name__ == "__main__":
    main()
