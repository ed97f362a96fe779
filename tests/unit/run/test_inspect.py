"""All that a RunSpec says is printed, for people and for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from p2pdiloco.ids import PeerId, RunId
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import genesis_state
from p2pdiloco.run_spec import Parent, RunSpec, SampleSpec, TokenizerSpec, sign_run_spec
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.export.kept import spec_in
from p2pdiloco_node.run.checks import Declared
from p2pdiloco_node.run.inspect import Now, as_plain, in_lines, sections

OWNER = Ed25519Signer(bytes([5]) * 32)
TINY = tiny_run(OWNER, PeerId(b"w" * 32))
SPEC: RunSpec = msgspec.structs.replace(
    TINY.spec, name="poems", samples=SampleSpec(("Once upon",), 32, (tuple(b"Once upon"),)),
    origin="version 7 of verse",
    parent=Parent(b"p" * 32, 7, TINY.spec.genesis.params_root), target_version=900,
)  # fmt: skip
RUN = TINY.run


def printed(spec: RunSpec = SPEC, declared: Declared | None = None) -> str:
    return "\n".join(in_lines(sections(RUN, spec, declared or Declared(), link="http://x:1/#" + RUN.hex())))


def leaves(value: object) -> set[str]:
    if isinstance(value, dict):
        return {leaf for item in value.values() for leaf in leaves(item)}
    if isinstance(value, list):
        return {leaf for item in value for leaf in leaves(item)}
    return {str(value)}


def test_people_read_every_figure_with_its_unit() -> None:
    text = printed()
    for words in (
        "Run poems", RUN.hex(), OWNER.public_key.hex(), "llama (simulated)", "160 in 2 tensors", "8 tokens",
        "1,024 tokens, 1,024 bytes of text", "4 inner steps (H), or 4 s", "1 sequence, 8 tokens",
        "0.001, down to 0.1 of it at the target", "beta 0.9 and 0.95, weight decay 0.1", "clipped to norm 1",
        "fp16: a delta is 368 bytes", "0.5 alone, 0.65 with eight nodes", "exponential decay",
        "after 16 rounds", "at most 3; begins with the witness alone", "every 1 s; 3 to 6 s",
        "after 3 s of standing; lost after 12 s", "or 900 outer steps", "every 1,000 versions, by 3 nodes",
        "32 tokens after each prompt", "'Once upon'", "local: everybody", "at 20 Mbit/s",
        "1.1 kB, a delta to each of at most 3 seats: less than 0.1 s at 20 Mbit/s",
        "Mbit/s, less than 1% of a pass",
        f"run {(b'p' * 32).hex()} at version 7", "its params, unchanged",
        f"p2pdiloco node --join http://x:1/#{RUN.hex()}",
    ):  # fmt: skip
        assert words in text, f"not printed: {words}\n{text}"
    assert "NOT with its params" in printed(
        msgspec.structs.replace(SPEC, parent=Parent(b"p" * 32, 7, b"r" * 32))
    )


def test_figures_of_small_runs_are_not_rounded_up() -> None:
    """A delta of 26 KB went as "1 MiB to 3 voters" to a witness that sat alone, of one shard 16 were read."""
    data = msgspec.structs.replace(
        SPEC.data, window_shards=16, tokenizer=TokenizerSpec("json", 1024, 0), shards=SPEC.data.shards[:1]
    )
    alone = msgspec.structs.replace(SPEC.committee, size_max=1)
    model = msgspec.structs.replace(SPEC.model, preset="")
    text = printed(msgspec.structs.replace(SPEC, data=data, committee=alone, model=model))
    for words in (
        "368 bytes, a delta to the witness alone", "a node reads 1 shard at once", "2 tensors, 640 bytes",
        "tokenizer.json, 1,024 tokens; 0 ends a document", "1.3 kB of params and momentum",
    ):  # fmt: skip
        assert words in text, f"not printed: {words}\n{text}"
    assert "()" not in text
    assert " 0.0 s" not in text


def test_programs_read_every_field() -> None:
    plain = json.loads(json.dumps(as_plain(RUN, SPEC, Declared(memory_gb=4))))
    spec = plain["spec"]
    assert set(spec) == set(RunSpec.__struct_fields__)
    assert (spec["name"], spec["inner"]["lr"], spec["outer"]["codec"]) == ("poems", 1e-3, "fp16")
    assert spec["owner_key"] == OWNER.public_key.hex()
    assert spec["model"]["tensors"][0] == {"name": "matrix", "shape": [16, 9]}
    assert (plain["params"], plain["tokens_per_pass"], plain["traffic"]["delta_bytes"]) == (160, 32, 368)
    assert plain["memory"]["missing_bytes"] == 0
    assert "False" not in leaves(spec["parent"])


def test_how_far_the_run_is() -> None:
    state = msgspec.structs.replace(
        genesis_state(SPEC), version=3, clock=96, target_tokens=960, paused=True, revoked=(b"x" * 32,)
    )
    now = Now(RunLog(RunId(RUN), SPEC), state, {PeerId(b"x" * 32): "lazy"})
    text = "\n".join(in_lines(sections(RUN, SPEC, Declared(), now=now)))
    for words in ("paused by the owner", "3, entry 0, epoch 0", "96 of 960 (10.0%)", "lazy (78787878)"):
        assert words in text
    assert as_plain(RUN, SPEC, Declared(), now=now)["now"]["revoked"] == [(b"x" * 32).hex()]


def test_memory_is_planned_where_it_is_declared() -> None:
    assert "Memory of a node with 4 GiB" in printed(declared=Declared(memory_gb=4))
    assert "Memory" not in printed()
    assert "free here" not in printed(declared=Declared(memory_gb=4)), "that is of no machine"


def test_what_goes_on_stands_below_what_it_belongs_to() -> None:
    """Further evaluation sets and prompts begin where the first one does."""
    sets = tuple(msgspec.structs.replace(SPEC.data.evaluations[0], name=name) for name in ("all", "poems"))
    lines = printed(msgspec.structs.replace(SPEC, data=msgspec.structs.replace(SPEC.data, evaluations=sets)))
    at = {name: next(x.index(f"{name}: 1,024") for x in lines.splitlines() if f"{name}: 1,024" in x)
          for name in ("all", "poems")}  # fmt: skip
    assert at["all"] == at["poems"]


def test_a_spec_is_found_in_a_file_a_run_s_folder_and_a_node_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = sign_run_spec(SPEC, OWNER)
    for place in ("spec.bin", "run/spec.bin", "runs/ab/spec.bin"):
        folder = tmp_path / place.replace("/", "-")
        (folder / place).parent.mkdir(parents=True)
        (folder / place).write_bytes(data)
        found = spec_in(folder)
        assert found is not None
        assert found[1] == SPEC
        assert run_command(["run", "inspect", str(folder / place), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["spec"]["name"] == "poems"
    assert spec_in(tmp_path / "nothing") is None
    damaged = tmp_path / "damaged.bin"
    damaged.write_bytes(data[:-1] + b"\0")
    assert run_command(["run", "inspect", str(damaged)]) == 3
    assert "BAD_SIGNATURE" in capsys.readouterr().err
    assert run_command(["run", "inspect", str(tmp_path / "spec.bin" / "spec.bin"), "--up-mbit", "0.001"]) == 0
    assert "a pass takes 4 s" in capsys.readouterr().out


def test_who_reads_of_a_run_is_told_of_such_a_node_and_not_to_make_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said of a run that goes on that it cannot work, and to choose a smaller model."""
    (tmp_path / "spec.bin").write_bytes(sign_run_spec(SPEC, OWNER))
    arguments = ["run", "inspect", str(tmp_path), "--up-mbit", "0.001", "--memory-gb", "0.00001"]
    assert run_command(arguments) == 0
    said = capsys.readouterr().out
    assert "\nSuch a node cannot keep up: a pass takes 4 s, and " in said
    assert "\nSuch a node cannot take part: " in said
    assert "are declared.\n" in said
    assert not re.search(r"cannot work|choose|raise|--pass-s", said)
    assert run_command(["run", "inspect", str(tmp_path), "--up-mbit", "0.005"]) == 0
    said = capsys.readouterr().out
    assert "will always be late.\n" in said
    assert "--pass-s" not in said
