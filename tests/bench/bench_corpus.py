"""Data preparation at size: Parquet and JSON lines made from a vocabulary of words, prepared, and measured.

    python tests/bench/bench_corpus.py FOLDER [--mb 2000] [--tokenizer bpe:8192] [--jobs 0] [--kill-at 0.5]

Prints how far it is, MB of text a second, CPU seconds, the peak of memory (unique pages of all processes
together, and of the largest one) and of disk. With --kill-at the making is killed (SIGKILL) when so much of
its buckets is tokenised, and goes on; --compare names an earlier result whose digests it must give. The input
stays in FOLDER and is used again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

MAKE = """
import sys
from pathlib import Path
import msgspec
from p2pdiloco_node.corpus.making import Request, make_data
from p2pdiloco_node.progress import Lines

if __name__ == "__main__":
    out, tokenizer, jobs, *data = sys.argv[1:]
    request = Request(data, tokenizer=tokenizer, seed=1, jobs=int(jobs), eval_per_source=True)
    made = make_data(request, Path(out), Lines())
    (Path(out) / "data.json").write_bytes(msgspec.json.encode(made))
"""
DOCUMENTS = 2000  # made at a time, and in a row group
COPIES = 50  # one document in so many is there twice


def write_input(folder: Path, mb: int) -> None:
    """Half Parquet, half JSON lines, a tenth of these compressed; files of 200 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = _texts()
    per_file = 200 * 10**6
    for number in range(max(1, mb * 10**6 // 2 // per_file)):
        size, schema = 0, pa.schema([("id", pa.int64()), ("text", pa.string())])
        with pq.ParquetWriter(folder / f"{number:03}.parquet", schema, compression="zstd") as writer:
            while size < min(per_file, mb * 10**6 // 2):
                rows = next(texts)
                writer.write_table(pa.table({"id": list(range(len(rows))), "text": rows}, schema=schema))
                size += sum(map(len, rows))
    for number in range(max(1, mb * 10**6 // 2 // per_file)):
        size = 0
        packed = number % 10 == 9
        path = folder / f"{number:03}.jsonl{'.gz' if packed else ''}"
        with gzip.open(path, "wb", compresslevel=1) if packed else path.open("wb") as file:
            while size < min(per_file, mb * 10**6 // 2):
                rows = next(texts)
                file.writelines(
                    json.dumps({"id": i, "text": row}).encode() + b"\n" for i, row in enumerate(rows)
                )
                size += sum(map(len, rows))


def _texts() -> Iterator[list[str]]:
    """Words by Zipf's law, about as long as English ones; documents of log-normal length, 2 KB mostly."""
    rng = np.random.default_rng(1)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    weights = 1 / np.arange(3, 29)
    lengths = np.minimum(rng.poisson(4.5, 60_000) + 1, 14)
    words = ["".join(rng.choice(letters, n, p=weights / weights.sum())) for n in lengths.tolist()]
    table = np.array(words, object)
    shares = 1 / np.arange(10, 60_010)
    shares = np.cumsum(shares / shares.sum())
    before: list[str] = []
    while True:
        counts = np.clip(rng.lognormal(5.8, 1.0, DOCUMENTS), 5, 40_000).astype(int)
        picked = table[np.searchsorted(shares, rng.random(int(counts.sum())))]
        parts = np.split(picked, np.cumsum(counts)[:-1])
        rows = [" ".join(part.tolist()).replace(" q", ".\n\nQ") for part in parts]
        rows[: len(before)] = before
        before = rows[-DOCUMENTS // COPIES :]
        yield rows


def run(script: Path, out: Path, args: argparse.Namespace, data: list[str], kill: bool) -> float:
    command = [sys.executable, str(script), str(out), args.tokenizer, str(args.jobs), *data]
    began, said = time.monotonic(), ""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    popen = subprocess.Popen(command)
    peak = largest = disk = 0
    while popen.poll() is None:
        time.sleep(0.2)
        together, one = memory_of(popen.pid)
        peak, largest = max(peak, together), max(largest, one)
        disk = max(disk, sum(p.stat().st_size for p in out.rglob("*") if p.is_file()) if out.exists() else 0)
        plan = out / "making" / "split.bin"
        if kill and plan.exists():
            there = len(list((out / "making/tokens").glob("*.held")))
            total = buckets_of(out)
            if there >= args.kill_at * total:
                os.kill(popen.pid, signal.SIGKILL)
                said = f", killed with {there} of {total} buckets tokenised"
                break
    popen.wait()
    took = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    memory = f"peak {peak / 2**20:.0f} MiB of memory, {largest / 2**20:.0f} MiB of one process"
    print(f"  {took:.0f} s ({cpu:.0f} s of CPU), {memory}, {disk / 2**20:.0f} MiB of disk{said}", flush=True)
    if popen.returncode not in {0, -signal.SIGKILL}:
        raise SystemExit(popen.returncode)
    return took


def memory_of(pid: int) -> tuple[int, int]:
    """Unique bytes of a process and its children, together and of the largest."""
    try:
        root = psutil.Process(pid)
        sizes = [p.memory_full_info().uss for p in (root, *root.children(recursive=True))]
    except psutil.Error:
        return 0, 0
    return sum(sizes), max(sizes)


def buckets_of(out: Path) -> int:
    from p2pdiloco_node.corpus.work import Work

    plan = Work(out / "making").plan()
    assert plan is not None
    return plan.buckets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the input, the results, and nothing else")
    parser.add_argument("--mb", type=int, default=2000, help="MB of text in the input")
    parser.add_argument("--tokenizer", default="bpe:8192")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--kill-at", type=float, default=0.0, help="share of the buckets; 0: not killed")
    parser.add_argument("--name", default="out", help="of the folder of the result")
    parser.add_argument("--compare", help="name of an earlier result that must be the same")
    args = parser.parse_args()
    source = args.folder / f"in-{args.mb}"
    if not (source / "whole").exists():
        began = time.monotonic()
        write_input(source, args.mb)
        (source / "whole").touch()
        print(f"input made in {time.monotonic() - began:.0f} s")
    size = sum(p.stat().st_size for p in source.iterdir())
    script = args.folder / "make.py"
    script.write_text(MAKE)
    out = args.folder / args.name
    if out.exists():
        raise SystemExit(f"{out} is there; remove it or give another --name")
    data = [f"{source}/*.parquet", f"{source}/*.jsonl*"]
    print(f"{args.mb} MB of text in {size / 1e6:.0f} MB of files, {args.tokenizer}:", flush=True)
    took = 0.0
    if args.kill_at:
        took += run(script, out, args, data, kill=True)
    took += run(script, out, args, data, kill=False)
    print(f"{args.mb / took:.1f} MB of text a second, all in all")
    if args.compare:
        same = (out / "data.json").read_bytes() == (args.folder / args.compare / "data.json").read_bytes()
        print("the same digests" if same else "OTHER DIGESTS than " + args.compare)
        return int(not same)
    return 0


if __name__ == "__main__":
    sys.exit(main())
