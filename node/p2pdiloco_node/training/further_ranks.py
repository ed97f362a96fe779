"""`p2pdiloco ranks`: this machine's part of a trainer whose node is on another machine."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES, USAGE
from p2pdiloco_node.training.machine import gpus as gpus_here
from p2pdiloco_node.training.ranks import find_ranks
from p2pdiloco_node.training.supervisor import trainer_environment

log = logging.getLogger("p2pdiloco.ranks")


class Lent(NamedTuple):
    """`ranks.Settings` of a machine that has no node."""

    device: str
    gpus: str
    ranks: int
    nnodes: int
    rdzv: str


def run_ranks(
    *, gpus: str, ranks: int, device: str, nnodes: int, node_rank: int, rdzv: str, nice: int, threads: int
) -> int:
    """Until the trainer ends in order; after a crash its ranks here start again, as the node's do.

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
    env = trainer_environment(threads)
    folder = Path(tempfile.mkdtemp(prefix="p2pdiloco-ranks-"))
    command = [*found.command(folder / "said", node_rank), str(nice), found.device]
    log.info("%d rank(s) of %d, to meet the others at %s.", found.here, found.all, rdzv)
    try:
        # Each life with a start of its own: of the one before nothing is left.
        while status := subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=False).returncode:
            if status == RESOURCES:
                return RESOURCES
            log.warning("The ranks ended with status %d; they wait for the others again.", status)
            time.sleep(limits.ranks_again_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    log.info("The trainer has ended.")
    return 0
