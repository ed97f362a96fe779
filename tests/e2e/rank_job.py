"""What an inner loop goes through in test_several_ranks.py, and the program that two ranks run for it.

`python rank_job.py FOLDER` with torchrun's variables: reads `cases.json`, writes one `NAME.json` a case.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 10


def live(loop: Any, folder: Path, spec: Any, sequences: int) -> dict[str, Any]:
    """A loop's whole life: ten steps, an adoption on the way, evaluation, a text, a delta, moments, a restart
    of the moments, values that are not finite. Returns: what rank 0 saw."""
    from p2pdiloco_node.training.arrays import FileValues, write_array, write_pieces
    from p2pdiloco_node.training.moments_file import write_moments

    params, model = spec.model.params, spec.model
    rng = np.random.default_rng(4)
    batches = rng.integers(0, model.vocab_size // 4, (STEPS + 4, sequences, model.seq_len + 1))
    version_0 = folder / f"{spec.name}.f32"
    loop.start_from(FileValues(version_0, params))
    losses = [loop.step(batch, 5e-3) for batch in batches[: STEPS // 2]]
    evenness = loop.expert_evenness()
    # A new state while a pass is under way, less an own delta that it does not contain.
    write_array(folder / "own.f32", (rng.standard_normal(params) * 1e-3).astype(np.float32))
    write_array(folder / "new.f32", np.fromfile(version_0, "<f4") * np.float32(1.01))
    loop.adopt(FileValues(folder / "new.f32", params, [folder / "own.f32"]), reset=False)
    losses += [loop.step(batch, 5e-3) for batch in batches[STEPS // 2 : STEPS]]
    loop.load_evaluation(FileValues(version_0, params))
    evaluated = [loop.evaluate(batches[0]), loop.evaluate(batches[1][:1])]
    with loop.under_evaluation():
        text = [loop.next_token([1, 2, 3], begin=True, vocab_size=model.vocab_size)]
        text += [loop.next_token(text[-1:], begin=False, vocab_size=model.vocab_size) for _ in range(4)]
        evaluated.append(loop.evaluate(batches[2]))  # on the same loan
    with suppress(OSError), loop.under_evaluation():
        raise OSError("an evaluation set that cannot be read")  # every rank goes on with theta
    loop.drop_evaluation()
    write_pieces(folder / "delta.f32", loop.cut_delta())
    delta = np.fromfile(folder / "delta.f32", "<f4")
    steps, moments = loop.moments()
    write_moments(folder / "moments", steps, moments)
    losses.append(loop.step(batches[STEPS], 5e-3))
    loop.load_moments(folder / "moments")
    losses.append(loop.step(batches[STEPS + 1], 5e-3))
    # Back to the anchor, as after values that are not finite.
    loop.roll_back()
    losses.append(loop.step(batches[STEPS + 2], 5e-3))
    write_pieces(folder / "last.f32", loop.cut_delta())
    return {
        "losses": losses,
        "evenness": evenness,
        "evaluated": evaluated,
        "text": text,
        "delta": delta,
        "steps": steps,
        "moments": moments,
        "last": np.fromfile(folder / "last.f32", "<f4"),
    }


def broken(loop: Any, folder: Path, spec: Any) -> list[float | None]:
    """One rank's rows give a loss that is not finite: no rank takes the step."""
    from p2pdiloco_node.training.arrays import FileValues

    params = np.fromfile(folder / f"{spec.name}.f32", "<f4")
    (folder / "nan.f32").write_bytes(np.full_like(params, np.nan).tobytes())
    loop.start_from(FileValues(folder / "nan.f32", len(params)))
    batch = np.ones((2, spec.model.seq_len + 1), np.int64)
    found = [loop.step(batch, 1e-3)]
    loop.start_from(FileValues(folder / f"{spec.name}.f32", len(params)))
    return [*found, loop.step(batch, 1e-3)]


def main(folder: Path) -> None:
    from p2pdiloco import limits
    from p2pdiloco.run_spec import RunSpec
    from p2pdiloco.wire.codec import decode
    from p2pdiloco_node.training import led_loop
    from p2pdiloco_node.training.inner_loop import InnerLoop, set_threads
    from p2pdiloco_node.training.process_group import ProcessGroup

    set_threads(1)
    limits.handed_over_values = 1000
    group = ProcessGroup("cpu", seconds=60.0)
    for case in json.loads((folder / "cases.json").read_text()):
        data = (folder / case["spec"]).read_bytes()
        spec = decode(data, RunSpec)
        # Of GPUs; a CPU does it when it is told to.
        led_loop.InnerLoop = partial(InnerLoop, bf16=case["bf16"])  # type: ignore[misc, assignment]
        begin = led_loop.Begin(
            data, 1, case["micro_batch"], case["checkpointing"], "none", False, case["sharded"]
        )
        if group.rank:
            led_loop.follow(group)
            continue
        loop = led_loop.LedLoop(begin, group)
        found = live(loop, folder, spec, case["sequences"])
        found["broken"] = np.array(broken(loop, folder, spec), np.float64)
        led_loop.tell(group, led_loop.End())
        plain = {what: np.asarray(values, np.float64).tolist() for what, values in found.items()}
        (folder / f"{case['name']}.json").write_text(json.dumps(plain))
    group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # As the trainer's process ends: gloo's threads may still hold tensors, and abort in Python's own end.
    os._exit(0)
