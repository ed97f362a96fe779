"""`p2pdiloco run new` from the tables of a run file and the flags over it."""

from __future__ import annotations

import shlex
from pathlib import Path

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco_node.progress import shown
from p2pdiloco_node.run.checks import Declared
from p2pdiloco_node.run.file import Parts
from p2pdiloco_node.run.new import Order, create_run, when_over
from p2pdiloco_node.run.stopping import run_making

TOKENS, EVAL_EVERY, SEED = 20_000_000, 8, 1  # where nobody says otherwise


def print_made(parts: Parts, out: Path, jobs: int, owner_key: Path | None, declared: Declared) -> int:
    """Make the run and say how to serve it. Raises: OperatorError."""
    run, model, data = parts["run"], parts["model"], parts["data"]
    lacking = [
        (table, key) for table, key in (("run", "name"), ("model", "model")) if key not in parts[table]
    ]
    if lacking:
        flags = " and ".join(f"--{key}" for _, key in lacking)
        written = " and ".join(f"{key} under [{table}]" for table, key in lacking)
        raise OperatorError(
            f"run new needs {flags}: give {'them' if lacking[1:] else 'it'}, or write {written} in the "
            "file of --config.", USAGE,
        )  # fmt: skip
    others = ("trust_tokens", "bootstrap_tokens", "evaluators_max")
    with shown() as told:
        made = run_making(
            create_run(
                Order(
                    run["name"], model["model"], data.get("data"), run.get("tokens", TOKENS),
                    text_key=data.get("text_key", "text"), tokenizer=data.get("tokenizer"),
                    eval_per_source=data.get("eval_per_source", False), jobs=jobs,
                    window_shards=data.get("window_shards"), seq_len=model.get("seq_len"),
                    seed=model.get("seed", SEED), admission=run.get("admission", "open"),
                    target_version=run.get("outer_steps", 0), eval_every=run.get("eval_every", EVAL_EVERY),
                    inner=parts["inner"], outer=parts["outer"], committee=parts["committee"],
                    samples=parts["samples"], run={key: run[key] for key in others if key in run},
                ),
                out, owner_key=owner_key, declared=declared, told=told,
            )
        )  # fmt: skip
    print(when_over(run.get("tokens", TOKENS), run.get("outer_steps", 0)))
    print(
        f"Run {made.hex()}\nis ready in {out}. Serve it with: "
        f"p2pdiloco tracker --run {shlex.quote(str(out))} --listen HOST:PORT"
    )
    return 0
