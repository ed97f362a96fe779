"""How much memory rank 0 needs beside its part of the model while it gathers deltas and moments from others.

`python tests/bench/bench_gather.py [fsdp|ddp [RANKS]]`: a Llama of 50 million params on CPU ranks (Linux),
half a minute. Figures: docs/several-gpus.md.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from p2pdiloco.run_spec import ModelSpec
from p2pdiloco_node.training.arrays import write_pieces
from p2pdiloco_node.training.presets import config_bytes, inner_spec

MIB = 1 << 20
LLAMA = {
    "vocab_size": 8192, "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 9,
    "num_attention_heads": 10, "num_key_value_heads": 10, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip


class Terms(msgspec.Struct):
    model: ModelSpec
    inner: Any = inner_spec("llama:tiny", 10**6)


class Peak:
    """The largest resident memory from here to `end`, above what there is now. Linux."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is no room for what comes
        Path("/proc/self/clear_refs").write_text("5")  # forgets the largest so far
        self.before, self._began = psutil.Process().memory_info().rss, time.monotonic()

    def end(self) -> str:
        status = Path("/proc/self/status").read_text()
        high = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        return f"{(high - self.before) / MIB:6.0f} MiB, {time.monotonic() - self._began:.1f} s"


def measure(parallel: str, folder: Path) -> None:
    """One rank's part; rank 0 prints."""
    from p2pdiloco_node.training.inner_loop import InnerLoop
    from p2pdiloco_node.training.models import frozen_config, make_config, outline, tensor_layout
    from p2pdiloco_node.training.process_group import ProcessGroup

    group = ProcessGroup("cpu", seconds=120.0)
    config = make_config("llama", LLAMA)
    layout = tensor_layout(outline("llama", config))
    frozen = config_bytes(frozen_config(config))
    spec = Terms(ModelSpec("llama", "bench", frozen, LLAMA["vocab_size"], 64, layout))
    params = spec.model.params
    idle = psutil.Process().memory_info().rss
    loop = InnerLoop(spec, micro_batch=1, group=group, sharded=parallel == "fsdp")
    loop.start_from(np.full(params, 0.01, np.float32))
    loop.step(np.ones((group.size, 65), np.int64), 1e-4)
    delta = Peak()
    held = delta.before - idle
    write_pieces(folder / f"delta-{group.rank}", loop.cut_delta())
    of_delta = delta.end()
    moments = Peak()
    _, both = loop.moments()
    of_moments = moments.end()
    if group.rank == 0:
        copy = f"{4 * params / MIB:.0f} MiB a copy"
        print(f"{parallel}, {group.size} ranks, {params / 1e6:.1f} million params ({copy})")
        print(f"  a rank holds after a step      {held / MIB:6.0f} MiB")
        print(f"  rank 0 beside, for the delta   {of_delta}")
        print(f"  rank 0 beside, for the moments {of_moments}, {both.nbytes / MIB:.0f} of it are the moments")
    group.close()


def main() -> None:
    parallel = sys.argv[1] if len(sys.argv) > 1 else "fsdp"
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, parallel, str(ranks), folder]
        started = [subprocess.Popen(command, env=told | {"RANK": str(rank)}) for rank in range(ranks)]
        sys.exit(max(process.wait() for process in started))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        measure(sys.argv[1], Path(sys.argv[3]))
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may still hold tensors, and abort in Python's own end
    else:
        main()
