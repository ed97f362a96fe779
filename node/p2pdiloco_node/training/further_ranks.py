"""`p2pdiloco ranks`: this machine's part of a trainer whose node is on another machine."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES, USAGE
from p2pdiloco.words import count_of
from p2pdiloco_node.config import NodeConfig
from p2pdiloco_node.training.machine import gpus as gpus_here
from p2pdiloco_node.training.ranks import find_ranks
from p2pdiloco_node.training.supervisor import trainer_environment

log = logging.getLogger("p2pdiloco.ranks")

Scratch = Callable[[str], AbstractContextManager[Path]]


def run_ranks(settings: NodeConfig, *, node_rank: int, nice: int, scratch: Scratch) -> int:
    """Until the trainer ends in order; after a crash its ranks here start again, as the node's do.

    `settings`: those of the node that say how it trains; nothing else of them is looked at.
    `scratch(word)`: an empty folder for as long as it is used.

    Raises: OperatorError: the settings are wrong, or there are no such GPUs.
    """
    form = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
    logging.basicConfig(level="INFO", stream=sys.stderr, format=form)
    nnodes = settings.nnodes
    if nnodes < 2:
        raise OperatorError("--nnodes is 2 or more: the node's own machine and this one.", USAGE)
    if not 1 <= node_rank < nnodes:
        raise OperatorError(
            f"--node-rank {node_rank} of {count_of(nnodes, 'machine')}: the node's own is 0, the others are "
            f"1 to {nnodes - 1}.", USAGE,
        )  # fmt: skip
    if not 0 <= nice <= limits.nice_max:
        raise OperatorError(f"--nice is 0 to {limits.nice_max}.", USAGE)
    found = find_ranks(settings, gpus_here)
    env = trainer_environment(settings.threads)
    log.info("%d rank(s) of %d, to meet the others at %s.", found.here, found.all, settings.rdzv)
    with scratch("ranks") as folder:
        command = [*found.command(folder / "said", node_rank), str(nice), found.device]
        # Each life with a start of its own: of the one before nothing is left.
        while status := subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=False).returncode:
            if status == RESOURCES:
                return RESOURCES
            log.warning("The ranks ended with status %d; they wait for the others again.", status)
            time.sleep(limits.ranks_again_s)
    log.info("The trainer has ended.")
    return 0
