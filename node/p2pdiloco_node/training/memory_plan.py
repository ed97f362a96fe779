"""What one node of a run needs of GPU, RAM and disk, and how it fits (scenario R5). Plain numbers: no torch.

The daemon makes the plan before any download, the trainer makes it again with what torch says is free, and
`p2pdiloco run inspect` may ask it for a machine that is not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES
from p2pdiloco.rules.delta_layout import encoded_size, is_sparse
from p2pdiloco.run_spec import ModelSpec, RunSpec
from p2pdiloco.words import count_of
from p2pdiloco_node.training.activations import activation_bytes
from p2pdiloco_node.training.machine import Machine
from p2pdiloco_node.training.shapes import shape_of
from p2pdiloco_node.training.shard_plan import data_bytes

Offload = Literal["none", "anchor", "moments"]
Switch = Literal["auto", "on", "off"]
Parallel = Literal["none", "ddp", "fsdp"]  # one rank; each has the whole model; each has a part of it

DATA_ROW = "text in tokens"
FLOAT32 = 4  # bytes
MIB, GIB = 1 << 20, 1 << 30
# Measured: a trainer that has imported torch and transformers, the daemon with its connections.
TRAINER_BYTES, DAEMON_BYTES = 600 * MIB, 200 * MIB
LAUNCHER_BYTES = 300 * MIB  # torchrun's agent, which imports torch
CUDA_HOST_BYTES = GIB  # libraries of CUDA in a trainer's memory
CUDA_BYTES = 700 * MIB  # CUDA's context and its libraries' work space on the GPU
UNMEASURED = 1.2  # of activations: the estimate holds within a fifth on a CPU, and a GPU out of memory stops
FRAGMENTS = 0.06  # of the GPU's memory lost between blocks; PyTorch's allocator keeps sizes apart
LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")  # a decoder layer's number in the names of its tensors
DELTAS_KEPT = 4 * limits.state_write_versions_max  # four contributions in each outer step
# One forward pass is fast enough from here on, and not faster from there on.
TOKENS_ENOUGH_GPU, TOKENS_MOST_GPU = 4096, 32768
TOKENS_ENOUGH_CPU, TOKENS_MOST_CPU = 512, 8192


class Wishes(NamedTuple):
    """What the person asked for; the rest is chosen."""

    micro_batch: int = 0  # sequences per forward pass; 0: as fits
    checkpointing: Switch = "auto"
    offload: Literal["auto"] | Offload = "auto"
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # of several ranks
    ranks: int = 1  # of the node
    here: int = 1  # of them on this machine
    data_disk: int = limits.shard_store_bytes_max  # bytes that the run's data may take


class Settings(Protocol):
    """Where wishes come from: the node's settings, or the trainer's first command."""

    @property
    def micro_batch(self) -> int: ...

    @property
    def checkpointing(self) -> str: ...

    @property
    def offload(self) -> str: ...

    @property
    def parallel(self) -> str: ...


class Way(NamedTuple):
    """How a node may train."""

    parallel: Parallel
    micro_batch: int
    checkpointing: bool
    offload: Offload


class Row(NamedTuple):
    """Bytes of one thing in each place; of several GPUs on each."""

    what: str
    gpu: int = 0
    ram: int = 0
    disk: int = 0


class MemoryPlan(NamedTuple):
    machine: Machine
    rows: tuple[Row, ...]
    micro_batch: int
    checkpointing: bool
    offload: Offload
    parallel: Parallel = "none"
    ranks: int = 1  # of the node, on all its machines
    here: int = 1

    @property
    def gpu(self) -> int:
        """Bytes needed on the GPU, of several on each; 0 where the trainer works on the CPU."""
        return sum(row.gpu for row in self.rows)

    @property
    def ram(self) -> int:
        return sum(row.ram for row in self.rows)

    @property
    def disk(self) -> int:
        return sum(row.disk for row in self.rows)

    @property
    def disk_of_others(self) -> int:
        """Of all files but the run's data."""
        return sum(row.disk for row in self.rows if row.what != DATA_ROW)

    @property
    def missing(self) -> dict[str, int]:
        """Place -> bytes that are not there; empty where everything fits."""
        have = {
            "on the GPU": (self.gpu, self.machine.gpu_bytes or 0),
            "of RAM": (self.ram, self.machine.ram_bytes),
            "on the disk": (self.disk, self.machine.disk_bytes),
        }
        return {place: needed - free for place, (needed, free) in have.items() if needed > free}


def plan_memory(spec: RunSpec, machine: Machine, wishes: Wishes | None = None) -> MemoryPlan:
    """The first way of `_ways` that fits and has forward passes of a good size; else the largest that fits;
    else the smallest, whose `missing` says what is lacking. `wishes` None: everything is chosen.
    """
    wishes = wishes or Wishes()
    fitting, smallest = None, None
    for way in _ways(spec, machine, wishes):
        rows = _rows(spec, machine, way, wishes)
        micro_batch = way.micro_batch
        plan = MemoryPlan(
            machine,
            rows,
            micro_batch,
            way.checkpointing,
            way.offload,
            way.parallel,
            wishes.ranks,
            wishes.here,
        )
        if smallest is None or _lacking(plan) < _lacking(smallest):
            smallest = plan
        if _lacking(plan):
            continue
        if micro_batch == wishes.micro_batch or _is_enough(spec, machine, micro_batch, wishes.ranks):
            return plan
        if fitting is None or plan.micro_batch > fitting.micro_batch:
            fitting = plan
    assert smallest is not None, "there is always a way to try"
    return fitting or smallest


def plan_trainer(spec: RunSpec, machine: Machine, settings: Settings, *, ranks: int = 1) -> MemoryPlan:
    """The plan of a trainer of so many ranks, with what torch found.

    Raises: OperatorError RESOURCES: the GPU is too small.

    RAM and disk are the daemon's to judge: by now they hold what this trainer is about to read.
    """
    plan = plan_memory(spec, machine, wishes_of(settings)._replace(ranks=ranks))
    if "on the GPU" in plan.missing:
        check(plan, spec.name)
    return plan


def wishes_of(settings: Settings) -> Wishes:
    """Settings are checked where they are read (config.py)."""
    return Wishes(
        settings.micro_batch,
        settings.checkpointing,  # type: ignore[arg-type]
        settings.offload,  # type: ignore[arg-type]
        settings.parallel,  # type: ignore[arg-type]
    )


def check(plan: MemoryPlan, run: str) -> None:
    """Raises: OperatorError RESOURCES: `run` does not fit, with the missing amounts and what may help."""
    if not plan.missing:
        return
    needed = {"on the GPU": plan.gpu, "of RAM": plan.ram, "on the disk": plan.disk}
    lacking = " and ".join(
        f"{amount(needed[place])} {place} ({amount(missing)} more than is free)"
        for place, missing in plan.missing.items()
    )
    advice = {
        "on the GPU": "use a larger GPU, or several (--gpus all), or --device cpu for a small model",
        "of RAM": "close other programs, or use a machine with more memory",
        "on the disk": f"make room in {plan.machine.folder}, or name another folder with --data-dir",
    }
    raise OperatorError(
        f"Run {run} does not fit on this machine: it needs {lacking}. To take part: "
        f"{'; '.join(advice[place] for place in plan.missing)}.",
        RESOURCES,
    )


def in_words(plan: MemoryPlan, *, free: bool = True) -> list[str]:
    """A small table for people, and what was chosen. `free`: with what this machine has."""
    on_gpu = plan.machine.gpu_bytes is not None
    gpu_name = "each GPU" if plan.ranks > 1 else "GPU"
    places = ([gpu_name] if on_gpu else []) + ["RAM", "disk"]
    width = max(len(row.what) for row in plan.rows)

    def line(what: str, gpu: int | None, ram: int | None, disk: int | None) -> str:
        cells = ([gpu] if on_gpu else []) + [ram, disk]
        return f"  {what:{width}}" + "".join(f"  {amount(cell) if cell else '':>9}" for cell in cells)

    lines = ["  " + " " * width + "".join(f"  {place:>9}" for place in places)]
    lines += [line(*row) for row in plan.rows]
    lines.append(line("in all", plan.gpu, plan.ram, plan.disk))
    machine = plan.machine
    if free:
        lines.append(line("free here", machine.gpu_bytes, machine.ram_bytes, machine.disk_bytes))
    lines.append(f"  {chosen(plan)}")
    return lines


def chosen(plan: MemoryPlan) -> str:
    """How the trainer will work, in one sentence."""
    parts = []
    if plan.parallel == "ddp":
        parts.append(f"{plan.ranks} ranks, each with the whole model (ddp)")
    elif plan.parallel == "fsdp":
        parts.append(f"{plan.ranks} ranks, each with 1/{plan.ranks} of the model (fsdp)")
    parts.append(f"{count_of(plan.micro_batch, 'sequence')} per forward pass")
    if plan.checkpointing:
        parts.append("activations computed twice (checkpointing)")
    if plan.offload != "none":
        parts.append(
            "anchor and evaluation in host memory" + (", moments too" if plan.offload == "moments" else "")
        )
    return f"{'; '.join(parts)}."


def amount(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{max(1, round(size / MIB))} MiB"


def _ways(spec: RunSpec, machine: Machine, wishes: Wishes) -> Iterator[Way]:
    """The fastest first.

    The anchor is touched once a pass and the evaluated params a few times an evaluation: both go to the host
    before a third more computing is paid for activations; moments go last, they cross the bus in every step.
    Several ranks have the whole model each where that needs nothing of this; else they share it, which
    costs less.
    """
    offloads: tuple[Offload, ...] = ("none",)
    if machine.gpu_bytes is not None:
        offloads = ("none", "anchor", "moments") if wishes.offload == "auto" else (wishes.offload,)
    switches = {"auto": (False, True), "on": (True,), "off": (False,)}[wishes.checkpointing]
    parallels: tuple[Parallel, ...] = ("none",)
    if wishes.ranks > 1:
        parallels = ("ddp", "fsdp") if wishes.parallel == "auto" else (wishes.parallel,)
    orders: list[tuple[Parallel, bool, Offload]] = [
        (parallel, on, offload)
        for parallel in parallels
        for last in (False, True)
        for on in switches
        for offload in offloads
        if (offload == "moments") == last
    ]
    if len(parallels) > 1:
        orders = [order for n, order in enumerate(orders) if n == 0 or order[0] == "fsdp"]
    batch = _rows_of_rank(spec, wishes.ranks)
    most = TOKENS_MOST_CPU if machine.gpu_bytes is None else TOKENS_MOST_GPU
    largest = min(batch, max(1, most // spec.model.seq_len))
    # Parts of about equal size; the same size twice is tried once.
    sizes = [wishes.micro_batch] if wishes.micro_batch else []
    sizes = sizes or list(part_sizes(batch))
    for parallel, on, offload in orders:
        for size in sizes:
            if size <= largest or wishes.micro_batch:
                yield Way(parallel, min(size, batch), on, offload)


def part_sizes(batch: int) -> Iterator[int]:
    """Sizes of the largest of 1, 2, 3 ... equal parts of a batch, each once, falling: about 2 sqrt(batch)."""
    parts, size = 1, batch
    while size > 1:
        yield size
        parts = -(-batch // (size - 1))  # the fewest that are smaller
        size = -(-batch // parts)
    yield 1


def _rows_of_rank(spec: RunSpec, ranks: int) -> int:
    """Sequences of an inner step on the rank that has most."""
    return -(-spec.inner.sequences_per_step // ranks)


def _is_enough(spec: RunSpec, machine: Machine, micro_batch: int, ranks: int) -> bool:
    enough = TOKENS_ENOUGH_CPU if machine.gpu_bytes is None else TOKENS_ENOUGH_GPU
    return micro_batch == _rows_of_rank(spec, ranks) or micro_batch * spec.model.seq_len >= enough


def _lacking(plan: MemoryPlan) -> int:
    """Bytes of GPU and RAM that are not there: the disk's need is the same whichever way."""
    return sum(size for place, size in plan.missing.items() if place != "on the disk")


def _rows(spec: RunSpec, machine: Machine, way: Way, wishes: Wishes) -> tuple[Row, ...]:
    whole = FLOAT32 * spec.model.params
    on_gpu = machine.gpu_bytes is not None
    sharded = way.parallel == "fsdp"
    array = -(-whole // wishes.ranks) if sharded else whole  # of one rank
    activations = activation_bytes(spec.model, way.micro_batch, bf16=on_gpu, checkpointing=way.checkpointing)
    if on_gpu:
        activations = round(activations * UNMEASURED)

    def trainer(what: str, size: int, *, on_host: bool = False) -> Row:
        """`size`: of one rank."""
        return Row(what, gpu=size) if on_gpu and not on_host else Row(what, ram=size * wishes.here)

    # bf16 copies of the matrices, made by autocast: all are kept for the backward pass, or one layer's. FSDP
    # sends layers in bf16 and keeps none.
    kept = 1 if not way.checkpointing else shape_of(spec.model).layers
    copies = whole // 2 // kept if on_gpu and not sharded else 0
    offload = way.offload
    rows = [
        trainer("params, gradients", 2 * array),
        trainer("moments", 2 * array, on_host=offload == "moments"),
        trainer("anchor", array, on_host=offload != "none"),
        trainer("params under evaluation", array, on_host=offload != "none"),
        trainer("activations, logits", activations + copies),
    ]
    if sharded:
        rows.append(trainer("layers gathered for computing", gathered_bytes(spec.model, bf16=on_gpu)))
    if on_gpu:
        taken = sum(row.gpu for row in rows)
        rows.append(
            Row(
                "CUDA, lost between blocks",
                CUDA_BYTES + round(FRAGMENTS * taken),
                CUDA_HOST_BYTES * wishes.here,
            )
        )
    rows.append(Row("handed between trainer and daemon", ram=2 * whole, disk=4 * whole))
    rows += _daemon_rows(spec, whole)
    launcher = LAUNCHER_BYTES if wishes.ranks > 1 else 0
    rows.append(Row("programs", ram=TRAINER_BYTES * wishes.here + launcher + DAEMON_BYTES))
    free = machine.disk_bytes - sum(row.disk for row in rows)
    return (*rows, Row(DATA_ROW, disk=data_bytes(spec.data, quota=wishes.data_disk, free=free)))


def gathered_bytes(model: ModelSpec, *, bf16: bool) -> int:
    """What FSDP has whole on a rank at most, beside its part: what is in no layer and its gradient (float32),
    the layer that computes, the next one on its way, and a layer's gradient on its way out."""
    layers: dict[str, int] = {}
    outside = 0
    for tensor in model.tensors:
        if found := LAYER.search(tensor.name):
            layers[found[1]] = layers.get(found[1], 0) + tensor.size
        else:
            outside += tensor.size
    layer = max(layers.values(), default=0)
    return 2 * FLOAT32 * outside + layer * (2 * (2 if bf16 else FLOAT32) + FLOAT32)


def _daemon_rows(spec: RunSpec, array: int) -> list[Row]:
    delta = encoded_size(spec.outer.codec, spec.model.tensors)
    # A sparse codec keeps what it did not send: the raw pseudo-gradient beside the decoded delta.
    in_flight = limits.in_flight_max * array * (2 if is_sparse(spec.outer.codec) else 1)
    # State files overlap with the next ones being written; a snapshot is made before the oldest goes.
    states, snapshots = 2 * 2 * array, (limits.snapshots_kept + 1) * 2 * array + 2 * array
    return [
        Row("global state: params, momentum", ram=2 * array, disk=states),
        # Each candidate is a whole state; the mean and one decoded delta while one is made.
        Row("candidate outer steps, merging", ram=(2 * limits.prepared_steps_max + 2) * array + 2 * delta),
        Row("own deltas: in flight, error feedback", ram=in_flight + array, disk=in_flight + 2 * array),
        # Until a state file contains them; of a swarm of ordinary size.
        Row("deltas of others", disk=min(DELTAS_KEPT * delta, limits.delta_store_bytes_max)),
        Row("snapshots, version 0", disk=snapshots),
        Row("checkpoints of moments", ram=2 * array, disk=3 * 2 * array),
    ]
