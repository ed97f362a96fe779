"""`p2pdiloco ranks`: this machine's part of a trainer whose node is on another machine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.training.machine import gpus as gpus_here
from p2pdiloco_node.training.ranks import RESOURCES, USAGE, find_ranks

log = logging.getLogger("p2pdiloco.ranks")


class Lent(NamedTuple):
    """`ranks.Settings` of a machine that has no node."""

    device: str
    gpus: str
    ranks: int
    nnodes: int
    rdzv: str


def run_ranks(
    *, gpus: str, ranks: int, device: str, nnodes: int, node_rank: int, rdzv: str, nice: int
) -> int:
    """Until the trainer ends in order; after a crash its ranks here are started again, as the node does there.

    Raises: OperatorError: the settings are wrong, or there are no such GPUs.
    """
    form = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
    logging.basicConfig(level="INFO", stream=sys.stderr, format=form)
    if not 1 <= node_rank < nnodes:
        raise OperatorError(
            f"--node-rank {node_rank} of {nnodes} machines: the node's own is 0, the others are 1 to "
            f"{nnodes - 1}.", USAGE,
        )  # fmt: skip
    found = find_ranks(Lent(device, gpus, ranks, nnodes, rdzv), gpus_here)
    command = [*found.launcher(node_rank), str(nice), found.device]
    log.info("%d rank(s) of %d, to meet the others at %s.", found.here, found.all, rdzv)
    while True:
        # Each life with a start of its own: of the one before nothing is left.
        status = subprocess.run(command, env=os.environ, stdin=subprocess.DEVNULL, check=False).returncode
        if status == 0:
            log.info("The trainer has ended.")
            return 0
        if status == RESOURCES:
            return RESOURCES
        log.warning("The ranks ended with status %d; they wait for the others again.", status)
        time.sleep(limits.ranks_again_s)
