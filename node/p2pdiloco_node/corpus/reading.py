"""One portion of the input becomes segments. A task of a process of its own."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from p2pdiloco import limits
from p2pdiloco_node.corpus.documents import seed_key
from p2pdiloco_node.corpus.readers import Format, Part, read_part
from p2pdiloco_node.corpus.segments import Builder, Counted, Fault, Segment
from p2pdiloco_node.corpus.sources import TOKENS
from p2pdiloco_node.corpus.work import Plan, Work

DOCUMENTS_MAX = 1_000_000  # of one segment in memory: a hundred bytes each besides their text


def read_portion(root: str, number: int) -> tuple[int, Counted]:
    """The portion's number, and what was counted in the whole of it. What is there is not made again.

    Raises: OperatorError: the input cannot be read as what it is; the disk.
    """
    work, plan = Work(Path(root)), plan_of(root)
    form = _format(plan)
    portion = portions_of(root)[number]
    total = Counted()
    made, part, after = 0, 0, None
    for path in sorted(work.segments.glob(f"{number:06}-*.seg")):
        head = Segment(path).head
        total, made, part, after = total.plus(head.counted), made + 1, head.part, head.after
        if head.done:
            return number, total
    builder = Builder(seed_key(plan.command.seed), plan.buckets)
    counted = Counted()

    def write(*, done: bool) -> None:
        nonlocal made, total, counted
        builder.write(work.segment(number, made), counted, part, after, done=done, write=work.write)
        total, counted, made = total.plus(counted), Counted(), made + 1

    while part < len(portion):
        this = portion[part]
        entry = plan.inputs[this.number]
        for batch in read_part(entry, this, form, after):
            builder.add(batch.texts, source=entry.source, tokens=entry.kind == TOKENS)
            first = Fault(this.number, *batch.broken[0]) if batch.broken else None
            size = sum(map(len, batch.texts))
            counted = counted.plus(Counted(len(batch.texts), size, batch.empty, len(batch.broken), first))
            after = batch.after
            if builder.size >= limits.portion_bytes or len(builder) >= DOCUMENTS_MAX:
                write(done=False)
        part, after = part + 1, None
    write(done=True)
    return number, total


@lru_cache(maxsize=1)
def plan_of(root: str) -> Plan:
    """The plan, kept by the process: a hundred thousand files are some megabytes."""
    plan = Work(Path(root)).plan()
    assert plan is not None
    return plan


@lru_cache(maxsize=1)
def portions_of(root: str) -> list[tuple[Part, ...]]:
    """The plan's portions, kept by the process."""
    return plan_of(root).portions()


def forget() -> None:
    """What is kept belongs to another making."""
    plan_of.cache_clear()
    portions_of.cache_clear()


def _format(plan: Plan) -> Format:
    words = plan.vocabulary
    if words is None:
        return Format(plan.command.text_key)
    return Format(plan.command.text_key, words.token_bytes, words.size, words.end_token)
