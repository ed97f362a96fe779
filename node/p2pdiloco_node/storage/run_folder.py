"""What lies where in a run's folder, in a witness's or node's own folder of a run, and in a data folder."""

from __future__ import annotations

from pathlib import Path

# A run's folder: what `run new` makes, and what its tracker adds.
SPEC = "spec.bin"  # in a node's folder of the run as well
BLOBS = "blobs"
WITNESS_KEY = "witness.key"
MAKING = "making"  # while data are made
FETCHED = "fetched"  # in MAKING: what a fork has of its parent
WITNESS = "witness"  # the witness's own folder
HISTORY = "history.sqlite"
CHECKPOINTS = "checkpoints"
# The own folder of whoever takes part.
JOURNAL, LOG = "journal", "log"
SNAPSHOTS = "snapshots"
STATE = "state"
ADDRESS = "address.json"  # where its daemon answers; in a data folder for a node
# Folders around them.
RUN = "run"  # what `demo --keep` keeps
RUNS = "runs"  # in a data folder
LINK = "join"  # which run a data folder is pinned to


def others_in(folder: Path) -> list[str]:
    """Names in a folder that no `run new` made there: a new run needs one without. Raises: OSError."""
    known = {BLOBS, WITNESS_KEY, MAKING}
    return sorted(p.name for p in folder.iterdir() if p.name not in known)
