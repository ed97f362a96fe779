"""From `--data` to a DataSpec and its blobs: plan, read, hold out, train a tokenizer, tokenise, pack.

Each step looks at the work folder (work.py) for what is there already, does the rest on several processes,
and leaves a file that says that it is done. The same input, tokenizer and seed give the same shards, whatever
the number of processes and however often it was killed.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, USAGE
from p2pdiloco.run_spec import DataSpec
from p2pdiloco.words import count_of
from p2pdiloco_node.corpus import packing, reading, tokenising
from p2pdiloco_node.corpus.documents import Index
from p2pdiloco_node.corpus.held_out import Split, choose_held_out
from p2pdiloco_node.corpus.planning import (
    check_disk,
    check_enough,
    check_same,
    check_size,
    make_plan,
    source_names,
)
from p2pdiloco_node.corpus.processes import Processes
from p2pdiloco_node.corpus.readers import END, Broken, describe
from p2pdiloco_node.corpus.segments import Counted
from p2pdiloco_node.corpus.sources import HUB
from p2pdiloco_node.corpus.token_input import shard_tokens
from p2pdiloco_node.corpus.tokenizer import BPE, BYTES, BYTES_PER_TOKEN, Tokenizer, parse_choice
from p2pdiloco_node.corpus.work import Plan, Taken, Tokenised, Work
from p2pdiloco_node.progress import BYTES as IN_BYTES
from p2pdiloco_node.progress import Quiet, Told, amount
from p2pdiloco_node.storage.files import make_folder
from p2pdiloco_node.storage.run_folder import BLOBS, FETCHED, MAKING

INLINE_BYTES = 8 << 20  # a smaller corpus is made before processes have started
OWNER_MENDS = (USAGE, FILES)  # exit codes of what lies in the command or the files


class Request(NamedTuple):
    """What is to be made. `data`: None is this interpreter's standard library."""

    data: Sequence[str] | None
    text_key: str = "text"
    tokenizer: str = BYTES
    eval_per_source: bool = False
    seed: int = 0
    jobs: int = 0  # processes; 0: one a core
    seq_len: int = 1  # tokens of a sequence: what is made holds one on each side at least


class Planned(NamedTuple):
    """What will be read. `tokenizer`: its file, where it was given."""

    plan: Plan
    tokenizer: bytes | None


def plan_data(request: Request) -> Planned:
    """Looks at every file, and reads none. Blocking.

    Raises: OperatorError: the corpus cannot be used as asked, as far as can be told by that.
    """
    if not 0 <= request.jobs <= limits.making_jobs_max:
        raise OperatorError(f"--jobs is 0 to {limits.making_jobs_max}.", exit_code=USAGE)
    planned = Planned(*make_plan(request, parse_choice(request.tokenizer)))
    check_enough(planned.plan, request.seq_len)
    return planned


def check_work(planned: Planned, out: Path, beside_bytes: int = 0) -> None:
    """Whether `make_data` may begin: before anything else takes time. `beside_bytes`: as there.

    Raises: OperatorError: `out` holds the beginning of another run, or the disk is too small.
    """
    old = Work(out / MAKING).plan()
    if old is None:
        check_disk(planned.plan, out, Quiet(), beside_bytes)
    else:
        check_same(old, planned.plan, out)


def make_data(
    request: Request,
    out: Path,
    told: Told,
    stop: threading.Event | None = None,
    *,
    planned: Planned | None = None,
    beside_bytes: int = 0,
) -> DataSpec:
    """Shards, evaluation sets and tokenizer as blobs in `out`/blobs. Blocking; for a thread.

    `planned`: where it was looked at already. `beside_bytes`: of disk that the rest of the run takes then.
    The work folder stays, so that the same call gives the same answer at once; `forget_work` removes it.

    Raises:
        OperatorError: the corpus cannot be used as asked: nothing is left then. The disk, the network, a
            process that was killed: what is done is kept.
        Stopped: `stop` was set; what is done is kept.
    """
    stop = stop or threading.Event()
    plan, tokenizer = planned or plan_data(request)
    jobs = request.jobs or min(len(os.sched_getaffinity(0)), limits.making_jobs_max)
    work = Work(out / MAKING)
    if work.plan() is None:
        check_disk(plan, out, told, beside_bytes)
    for forget in (reading.forget, tokenising.forget, packing.forget):
        forget()
    new = [path for path in (out, out / BLOBS) if not path.exists()]
    with Taken(work):
        make_folder(work.files, out / BLOBS)
        old = work.plan()
        if old is not None:
            check_same(old, plan, out)
        else:
            if tokenizer:
                work.write(work.tokenizer, [tokenizer])
            work.keep(plan)
        inline = jobs == 1 or plan.text_bytes < INLINE_BYTES
        try:
            with Processes(0 if inline else jobs, stop) as processes:
                return _Making(work, plan, out / BLOBS, processes, told).make(request.seq_len)
        except OperatorError as error:
            if error.exit_code in OWNER_MENDS:
                _remove(work, new)
            raise


def forget_work(out: Path) -> None:
    """Remove the work folder: the run is signed. What cannot be removed stays."""
    shutil.rmtree(out / MAKING, ignore_errors=True)


def _remove(work: Work, new: Sequence[Path]) -> None:
    with suppress(OSError):
        for path in work.root.iterdir():
            if path.name == FETCHED:  # not of the making, and may have taken hours
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        work.root.rmdir()
    for folder in new:
        shutil.rmtree(folder, ignore_errors=True)


class _Making:
    """One making, step after step."""

    def __init__(self, work: Work, plan: Plan, blobs: Path, processes: Processes, told: Told) -> None:
        self._work, self._plan, self._blobs = work, plan, blobs
        self._processes, self._told = processes, told
        self._root = str(work.root)

    def make(self, seq_len: int) -> DataSpec:
        """Raises: as `make_data`."""
        data = self._data()
        check_size(data, seq_len)
        return data

    def _data(self) -> DataSpec:
        work = self._work
        data = work.data()
        if data is not None and all((self._blobs / blob.digest.hex()).is_file() for blob in data.blobs):
            return data
        split = work.split() or self._hold_out()
        tokenised = work.tokenised() or self._tokenise(split)
        return self._pack(split, tokenised)

    def _read(self) -> None:
        """Everything into segments."""
        plan, work = self._plan, self._work
        portions = plan.portions()
        sizes = [plan.portion_bytes(portion) for portion in portions]
        open_ended = {n for n, portion in enumerate(portions) if any(part.stop == END for part in portion)}
        # How much a dataset of a hub has, nobody knows.
        total = 0 if any(entry.kind == HUB for entry in plan.inputs) else sum(sizes)
        done = 0
        counted = [Counted()] * len(portions)
        finished: set[int] = set()

        def look() -> None:
            # Of a portion that is long on its way one sees its segments.
            so_far = done
            for number in open_ended - finished:
                so_far += limits.portion_bytes * len(list(work.segments.glob(f"{number:06}-*.seg")))
            # There may be more in compressed files than they looked like; how much, is unknown then.
            self._told.progress("Reading", so_far, total if so_far <= total else 0, IN_BYTES)

        look()
        tasks = [(self._root, number) for number in range(len(portions))]
        for number, found in self._processes.each(reading.read_portion, tasks, look):
            counted[number] = found
            finished.add(number)
            done += sizes[number] if total else found.size
            look()
        whole = Counted()
        for found in counted:
            whole = whole.plus(found)
        self._say_read(whole)

    def _say_read(self, counted: Counted) -> None:
        """Raises: OperatorError: too much is broken, or there is too much of it."""
        documents = counted.documents + counted.empty + counted.broken
        of_all = f"{counted.broken:,} of {count_of(documents, 'document is', 'documents are')} broken"
        text = f"Read {count_of(counted.documents, 'document')}, {amount(counted.size)} of text"
        text += f"; empty: {counted.empty:,}" if counted.empty else ""
        if counted.first_broken is not None:
            fault = counted.first_broken
            first = describe(self._plan.inputs[fault.number], Broken(fault.at, fault.why))
            most = max(limits.broken_documents_spared, int(documents * limits.broken_documents_share_max))
            if not counted.documents:
                raise OperatorError(
                    f"there is no text: {of_all} ({first}), {counted.empty:,} empty. Mend them, or choose "
                    "other files with --data."
                )
            if counted.broken > most:
                raise OperatorError(
                    f"{of_all} ({first}), more than {most:,}: are these files what their names say? "
                    "Mend them, or leave them out with --data."
                )
            text += f"; broken and passed over: {counted.broken:,} ({first})"
        if counted.size > limits.corpus_bytes_max:
            raise OperatorError(
                f"the corpus has more than {limits.corpus_bytes_max >> 30} GiB of text; name fewer "
                "files with --data."
            )
        self._told.say(text + ".")

    def _hold_out(self) -> Split:
        self._read()
        command = self._plan.command
        evaluation = limits.evaluation_tokens_max * (1 if command.tokenizer == BYTES else BYTES_PER_TOKEN)
        names = source_names(command.data) if command.eval_per_source else {}
        if len(names) == 1:
            # It would be the same blob under another name, and be measured twice.
            names = {}
            self._told.say("There is one --data, so its evaluation set is that of the whole corpus.")
        split = choose_held_out(self._indices(), sources=names, evaluation_bytes=evaluation)
        self._work.keep(split)
        held = count_of(len(split.held), "document or end of one is", "documents or ends of one are")
        copies = count_of(split.copies, "exact copy", "exact copies")
        copies = f"without {copies}" if split.copies else "no copies among them"
        self._told.say(
            f"{count_of(split.documents, 'document')}, {amount(split.size)} of text, {copies}; {held} "
            "held out for evaluation."
        )
        return split

    def _indices(self) -> Iterator[Index]:
        segments = tokenising.segments_of(self._root)
        buckets = self._plan.buckets
        for bucket in range(buckets):
            self._processes.check()
            self._told.progress("Looking for copies", bucket, buckets, "buckets")
            yield tokenising.records_of(segments, bucket)

    def _tokenise(self, split: Split) -> Tokenised:
        work, command = self._work, self._plan.command
        is_trained_here = command.tokenizer.startswith(BPE + ":")
        if is_trained_here and not work.tokenizer.exists():
            sample = min(split.size, limits.tokenizer_sample_bytes_max)
            doing = f"Training the tokenizer on {amount(sample)} of text"
            self._told.progress(doing, 0.0)
            size = int(command.tokenizer.partition(":")[2])
            for _ in self._processes.each(tokenising.train, [(self._root, size)]):
                pass
            self._told.progress(doing, 1.0)
        tokenizer = self._tokenizer()
        if command.tokenizer != BYTES:
            self._told.say(f"The tokenizer has {tokenizer.vocabulary.size:,} tokens.")
        if command.tokenizer != BYTES and not is_trained_here:
            for share in self._processes.each(tokenising.lost_share, [(self._root,)]):
                self._check_lost(share)
        counts = [0] * self._plan.buckets
        done, total = 0, sum(split.buckets)
        todo = []
        for bucket in range(len(counts)):
            path = work.tokens_of(bucket)
            if path.exists():
                counts[bucket] = path.stat().st_size // tokenizer.vocabulary.token_bytes
                done += split.buckets[bucket]
            else:
                todo.append((self._root, bucket))
        left = {bucket for _, bucket in todo}
        token = tokenizer.vocabulary.token_bytes / (1 if command.tokenizer == BYTES else BYTES_PER_TOKEN)

        def look() -> None:
            begun = sum(min(split.buckets[b], int(work.begun_bytes(b) / token)) for b in left)
            self._told.progress("Tokenising", done + begun, total, IN_BYTES)

        look()
        for bucket, tokens in self._processes.each(tokenising.tokenise_bucket, todo, look):
            counts[bucket] = tokens
            left.discard(bucket)
            done += split.buckets[bucket]
            look()
        tokenised = Tokenised(tokenizer.vocabulary, tuple(counts))
        work.keep(tokenised)
        return tokenised

    def _check_lost(self, share: float) -> None:
        """Raises: OperatorError: the tokenizer drops too much of the text."""
        lost = f"{100 * share:.2g} % of the letters of the text"
        if share > limits.tokenizer_lost_share_max:
            raise OperatorError(
                f"the tokenizer knows no tokens for {lost}, which no model would ever see: use one that was "
                "made for such text, or has tokens for all bytes, with --tokenizer."
            )
        if share > limits.tokenizer_lost_share_said:
            self._told.say(f"The tokenizer knows no tokens for {lost}: the model will never see them.")

    def _pack(self, split: Split, tokenised: Tokenised) -> DataSpec:
        work, blobs = self._work, self._blobs
        # Everything in them is tokens now.
        shutil.rmtree(work.segments, ignore_errors=True)
        if not tokenised.tokens:
            raise OperatorError(
                "the corpus is too small: nothing is left to train on; name more with --data."
            )
        width = tokenised.vocabulary.token_bytes
        size = shard_tokens(tokenised.tokens, width)
        shards = -(-tokenised.tokens // size)
        refs = work.shards(blobs)
        missing = [number for number in range(shards) if number not in refs]
        self._told.progress("Writing shards", len(refs), shards, "shards")
        tasks = [(self._root, str(blobs), number) for number in missing]
        gone = 0
        for number, ref in self._processes.each(packing.pack_shard, tasks):
            work.shard_is_made(number, ref)
            refs[number] = ref
            missing.remove(number)
            # A large corpus needs the room.
            behind = packing.buckets_behind(tokenised.counts, missing[:1], size)
            for bucket in range(gone, behind):
                work.tokens_of(bucket).unlink(missing_ok=True)
            gone = behind
            self._told.progress("Writing shards", len(refs), shards, "shards")
        tokenizer = self._tokenizer()
        sets = packing.evaluation_sets(work, blobs, split, self._plan.buckets, tokenizer)
        spec = packing.tokenizer_spec(work, blobs, self._plan.command.tokenizer, tokenizer)
        data = DataSpec(spec, width, tuple(refs[number] for number in range(shards)), sets)
        work.keep(data)
        held = sum(s.shard.tokens for s in sets)
        kept = f"{held:,} held out" + (f" in {len(sets)} evaluation sets" if len(sets) > 1 else "")
        self._told.say(f"{tokenised.tokens:,} tokens in {count_of(shards, 'shard')}, {kept}.")
        return data

    def _tokenizer(self) -> Tokenizer:
        command = self._plan.command
        return tokenising.open_tokenizer(self._work, command.tokenizer, command.end_token)
