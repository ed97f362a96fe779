"""From a kept run to a folder: which version, by which way, checked, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import digest_of
from p2pdiloco_node.export import command
from p2pdiloco_node.export.command import Options, export
from p2pdiloco_node.export.kept import spec_in
from p2pdiloco_node.export.sources import from_folder
from p2pdiloco_node.verify import verify_run

Make = Callable[..., Any]


def quiet(*_: object) -> None:
    """Nobody watches."""


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that writes every value out takes seconds; test_with_transformers.py has it."""
    monkeypatch.setattr(command, "full_config", lambda *_: None)


def exported(run: Any, out: Path, **options: Any) -> dict[str, Any]:
    export(Options(out, run=run.folder, **options), quiet)
    return load_file(out / "model.safetensors")


def flat(tensors: dict[str, Any], run: Any) -> Any:
    return np.concatenate([tensors[t.name].reshape(-1) for t in run.model.tensors])


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("asked", ["newest", "0", "2", "5"])
def test_the_version_that_was_asked_for(kept_run: Make, tmp_path: Path, asked: str) -> None:
    run = kept_run().steps(3)
    run.snapshot()
    run.membership()
    run.steps(2)
    wanted = 5 if asked == "newest" else int(asked)
    tensors = exported(run, tmp_path / "out", version=asked)
    assert flat(tensors, run).tobytes() == run.params[wanted].tobytes()
    facts = json.loads((tmp_path / "out" / "p2pdiloco.json").read_bytes())
    assert facts["version"] == wanted
    assert facts["run"]["id"] == run.run.hex()
    assert facts["tokens"] == wanted * 3000
    assert {c["peer"]: c["tokens"] for c in facts["contributors"]} == (
        {} if wanted == 0 else {c.peer.hex(): c.tokens * wanted for c in (run.delta(0), run.delta(1))}
    )
    for file in facts["weights"]["files"]:
        data = (tmp_path / "out" / file["name"]).read_bytes()
        assert (len(data), digest_of(data).hex()) == (file["size"], file["sha256"])


def test_a_snapshot_of_the_version_is_passed_on_without_its_deltas(kept_run: Make, tmp_path: Path) -> None:
    """And a Membership entry behind the step changes no array."""
    run = kept_run().steps(2)
    run.membership()
    run.snapshot()
    for digest in list(run.blobs.digests("delta")):
        run.blobs.delete(digest)
    assert flat(exported(run, tmp_path / "out"), run).tobytes() == run.params[2].tobytes()


def test_a_state_file_stands_in_for_deltas_that_are_gone(kept_run: Make, tmp_path: Path) -> None:
    run = kept_run().steps(3)
    run.keeper.save(run.version)
    for digest in list(run.blobs.digests("delta")):
        run.blobs.delete(digest)
    run.step()
    assert flat(exported(run, tmp_path / "out"), run).tobytes() == run.params[4].tobytes()
    with pytest.raises(OperatorError, match=r"2 cannot be made from what is kept.*are let go\. [34] is here"):
        exported(run, tmp_path / "older", version="2")


def test_of_a_node_that_is_behind_is_said_which_version_it_has(kept_run: Make, tmp_path: Path) -> None:
    """It was "older versions are let go. The newest is" the very version that could not be made."""
    run = kept_run().steps(2)
    run.keeper.save(run.version)
    state, kept = run.folder / "witness" / "state", tmp_path / "kept"
    shutil.copytree(state, kept)
    run.steps(3)
    shutil.rmtree(state)
    shutil.copytree(kept, state)
    for digest in list(run.blobs.digests("delta")):
        run.blobs.delete(digest)
    behind = (
        "log here is at version 5, and the model at version 2, because its node is still behind.*--version 2,"
    )
    with pytest.raises(OperatorError, match=behind):
        exported(run, tmp_path / "out")
    assert flat(exported(run, tmp_path / "out", version="2"), run).tobytes() == run.params[2].tobytes()


def test_a_state_file_that_lies_is_not_believed(kept_run: Make, tmp_path: Path) -> None:
    run = kept_run().steps(1)
    run.keeper.save(run.version)
    for path in (run.folder / "witness" / "state").glob("*/params"):
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
    assert flat(exported(run, tmp_path / "out"), run).tobytes() == run.params[1].tobytes()


def test_a_node_s_data_folder_and_a_kept_demo_are_found(kept_run: Make, tmp_path: Path) -> None:
    run = kept_run().steps(1)
    folder = tmp_path / "node" / "runs" / run.run.hex()[:16]
    folder.parent.mkdir(parents=True)
    (run.folder / "witness").rename(folder)
    (run.folder / "spec.bin").rename(folder / "spec.bin")
    (run.folder / "blobs").rename(folder / "kept")
    for blob in (folder / "kept").iterdir():
        place = folder / "blobs" / "shard" / blob.name[:2]
        place.mkdir(exist_ok=True)
        blob.rename(place / blob.name)
    export(Options(tmp_path / "out", data_dir=tmp_path / "node"), quiet)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert flat(tensors, run).tobytes() == run.params[1].tobytes()


def test_a_data_folder_with_two_runs_needs_a_word(kept_run: Make, tmp_path: Path) -> None:
    for number in (1, 2):
        run = kept_run(f"made-{number}", nonce=bytes([number] * 16))
        folder = tmp_path / "node" / "runs" / run.run.hex()[:16]
        (folder / "journal").mkdir(parents=True)
        (folder / "spec.bin").write_bytes(run.signed)
        (folder / "journal" / "log").write_bytes((run.folder / "witness/journal/log").read_bytes())
        (folder / "blobs").symlink_to(run.folder / "blobs")
    node = tmp_path / "node"
    ways: tuple[Callable[[Path], object], ...] = (
        verify_run, spec_in, lambda folder: export(Options(tmp_path / "out", data_dir=folder), quiet)
    )  # fmt: skip
    for read in ways:
        with pytest.raises(OperatorError, match="keeps 2 runs: name one"):
            read(node)
    (tmp_path / "node" / "join").write_text(f"http://127.0.0.1:1/#{run.run.hex()}\n")
    export(Options(tmp_path / "out", data_dir=tmp_path / "node"), quiet)
    assert json.loads((tmp_path / "out/p2pdiloco.json").read_bytes())["run"]["id"] == run.run.hex()
    found = spec_in(node)
    assert found is not None
    assert found[0] == run.run == verify_run(node).run


def harmed(run: Any, place: int) -> None:
    """One bit of the log, at a share of it in percent."""
    path = run.folder / "witness" / "journal" / "log"
    data = bytearray(path.read_bytes())
    data[len(data) * place // 100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("place", [30, 60, 90])
def test_a_log_with_a_damaged_entry_has_no_newest_version(kept_run: Make, tmp_path: Path, place: int) -> None:
    run = kept_run().steps(4)
    harmed(run, place)
    before = (4 * place) // 100
    for asked in ("newest", "4"):
        with pytest.raises(OperatorError, match=f"is damaged behind version {before}") as caught:
            exported(run, tmp_path / "out", version=asked)
        assert caught.value.exit_code == 5
    tensors = exported(run, tmp_path / "out", version=str(before))
    assert flat(tensors, run).tobytes() == run.params[before].tobytes()


def test_an_entry_that_is_just_being_written_is_not_missed(kept_run: Make, tmp_path: Path) -> None:
    run = kept_run().steps(2)
    path = run.folder / "witness" / "journal" / "log"
    path.write_bytes(path.read_bytes()[:-1])
    assert flat(exported(run, tmp_path / "out"), run).tobytes() == run.params[1].tobytes()


def test_of_a_damaged_copy_another_one_is_read(kept_run: Make, tmp_path: Path) -> None:
    run = kept_run().steps(1)
    for path in (run.folder / "witness" / "blobs" / "delta").glob("??/*"):
        (run.folder / "blobs" / path.name).write_bytes(path.read_bytes())
        path.write_bytes(b"damaged")
    with pytest.raises(OperatorError, match="is declared and"):
        verify_run(run.folder)  # the figures of these entries are played; the deltas were read
    assert flat(exported(run, tmp_path / "out"), run).tobytes() == run.params[1].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype(kept_run: Make, tmp_path: Path, dtype: str) -> None:
    run = kept_run().steps(1)
    export(Options(tmp_path / "out", run=run.folder, dtype=dtype), quiet)
    config = json.loads((tmp_path / "out/config.json").read_bytes())
    assert config["dtype"] == config["torch_dtype"] == dtype
    weights = json.loads((tmp_path / "out/p2pdiloco.json").read_bytes())["weights"]
    assert weights["dtype"] == dtype
    width = {"float32": 4, "bfloat16": 2}[dtype]
    assert 0 < weights["files"][0]["size"] - width * run.model.params < 1024


def test_held_out_text_comes_on_request(kept_run: Make, tmp_path: Path) -> None:
    words = np.arange(300, dtype="<u2")
    run = kept_run(held_out=words.tobytes(), token_bytes=2)
    export(Options(tmp_path / "out", run=run.folder, held_out=True), quiet)
    with (tmp_path / "out/held-out.npy").open("rb") as file:
        found = np.lib.format.read_array(file)
    assert (found.dtype, found.tolist()) == (words.dtype, words.tolist())
    export(Options(tmp_path / "without", run=run.folder), quiet)
    assert not (tmp_path / "without/held-out.npy").exists()


def test_the_same_version_is_the_same_folder(kept_run: Make, tmp_path: Path) -> None:
    run = kept_run().steps(2)
    for name in ("one", "two"):
        exported(run, tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_an_empty_folder_is_filled_and_a_full_one_is_refused(kept_run: Make, tmp_path: Path) -> None:
    run = kept_run()
    out = tmp_path / "out"
    out.mkdir()
    exported(run, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(OperatorError, match="holds other things"):
        exported(run, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(OperatorError, match="not a folder"):
        exported(run, tmp_path / "file")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("name", ["out", "another"])
def test_what_a_killed_call_left_goes_with_the_next_one(kept_run: Make, tmp_path: Path, name: str) -> None:
    run = kept_run()
    script = f"""
import os, signal
from pathlib import Path
from p2pdiloco_node.export import command
command._publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
command.full_config = lambda *_: None
options = command.Options(Path({str(tmp_path / "out")!r}), run=Path({str(run.folder)!r}))
command.export(options, lambda *_: None)
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert len(left_behind(tmp_path)) == 1
    others = tmp_path / ".mine.export"
    others.mkdir()
    (others / "notes").write_text("mine")
    empty = tmp_path / ".mine-too.export"
    empty.mkdir()
    exported(run, tmp_path / name)
    assert left_behind(tmp_path) == sorted([others.name, empty.name])


def test_of_two_calls_at_once_the_second_is_told(kept_run: Make, tmp_path: Path) -> None:
    run, out = kept_run(), tmp_path / "out"
    said: list[str] = []

    def second(*_: object) -> None:
        with pytest.raises(OperatorError, match="Another p2pdiloco export makes") as caught:
            exported(run, out)
        said.append(str(caught.value))

    export(Options(out, run=run.folder), second)
    assert said
    assert load_file(out / "model.safetensors")
    assert left_behind(tmp_path) == []


def damage_chunk(run: Any) -> None:
    run.snapshot()
    for digest in run.keeper.snapshots[-1].params:
        run.blobs.path(digest).write_bytes(b"short")
    for digest in run.spec.genesis.params:
        (run.folder / "blobs" / digest.hex()).write_bytes(b"short")


def damage_delta(run: Any) -> None:
    for digest in run.blobs.digests("delta"):
        path = run.blobs.path(digest)
        path.write_bytes(path.read_bytes()[:-1])


def damage_log(run: Any) -> None:
    path = run.folder / "witness/journal/log"
    path.write_bytes(b"something else\n" + path.read_bytes())


def another_certificate(run: Any) -> None:
    other = run.log.entry(1)
    ack = other.certificate.acks[0]
    bad = msgspec.structs.replace(ack, signature=bytes(64))
    entry = msgspec.structs.replace(
        other, certificate=msgspec.structs.replace(other.certificate, acks=(bad,))
    )
    path = run.folder / "witness/journal/log"
    path.unlink()
    run.journal.load_entries()
    run.journal.append_entries([entry])


def no_spec(run: Any) -> None:
    (run.folder / "spec.bin").write_bytes(run.signed[:-1] + bytes([run.signed[-1] ^ 1]))


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (damage_chunk, "A part of version 2 as it is kept there is of no use"),
        (damage_delta, "cannot be made from what is kept"),
        (damage_log, "is not a p2pdiloco log"),
        (another_certificate, "does not verify: entry 1: BAD_CERTIFICATE"),
        (no_spec, "spec.bin is damaged"),
    ],
)
def test_a_damaged_folder_is_said_and_nothing_is_written(
    kept_run: Make, tmp_path: Path, harm: Callable[[Any], None], sentence: str
) -> None:
    run = kept_run().steps(2)
    harm(run)
    with pytest.raises(OperatorError, match=sentence):
        exported(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert left_behind(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(
    kept_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from p2pdiloco_node.storage.files import Files

    run = kept_run().steps(1)

    def full(_self: Files, _fd: int, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Files, "write", full)
    with pytest.raises(OperatorError, match="is full") as caught:
        exported(run, tmp_path / "out")
    assert caught.value.exit_code == 6
    assert not (tmp_path / "out").exists()
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    "config", [b"[]", b"{", b'{"auto_map": {"AutoModel": "x.py"}}', b'{"_name_or_path": "somebody/model"}']
)
def test_a_config_that_names_code_or_places_goes_nowhere(
    kept_run: Make, tmp_path: Path, config: bytes
) -> None:
    model = msgspec.structs.replace(kept_run("other").model, config=config)
    run = kept_run(model=model)
    with pytest.raises(OperatorError, match="the model's config"):
        exported(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [("7", "the newest there is 1"), ("latest", "newest or a number"), ("-1", "newest or a number")],
)
def test_versions_that_there_are_not(kept_run: Make, tmp_path: Path, asked: str, sentence: str) -> None:
    run = kept_run().steps(1)
    with pytest.raises(OperatorError, match=sentence):
        exported(run, tmp_path / "out", version=asked)


def test_one_place_is_named(kept_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OperatorError, match="--join and --run name different places"):
        export(Options(tmp_path / "out", join="http://127.0.0.1:1", run=tmp_path), quiet)
    with pytest.raises(OperatorError, match="No run is named"):
        export(Options(tmp_path / "out"), quiet)
    with pytest.raises(OperatorError, match="no kept run in"):
        export(Options(tmp_path / "out", run=tmp_path), quiet)


def test_what_a_tracker_said_of_the_run_is_on_the_card(kept_run: Make, tmp_path: Path) -> None:
    """Loss and names from its history, with the version that was evaluated."""
    import asyncio

    from p2pdiloco.status.read_model import Credit, EvalPoint, PeerName
    from p2pdiloco_node.storage.tracker_db import TrackerDb

    run = kept_run().steps(3)
    hostile = "<img src=x>|`a`\n# b"

    async def history() -> None:
        async with TrackerDb(run.folder / "history.sqlite", run.run) as db:
            by = PeerName(name="x", fingerprint="0" * 8)
            points = [EvalPoint(version=v, when_unix=1.0, loss=5.0 - v, tokens=64, by=by) for v in (0, 2, 4)]
            credit = Credit(
                version=1, when_unix=1.0, peer=run.delta(1).peer.hex(), name=hostile, tokens=1, steps=1,
                staleness=0.0, weight=1.0, loss=None,
            )  # fmt: skip
            await db.save(evaluations=points, contributions=[credit])

    asyncio.run(history())
    found = from_folder(run.folder, "newest", quiet, held_out=False)
    assert found.heard.evaluation is not None
    assert (found.heard.evaluation.version, found.heard.evaluation.loss) == (2, 3.0)
    exported(run, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "3.0000 nats per token at version 2" in card
    assert "perplexity | 20.09" in card
    assert "<img" not in card
    row = next(line for line in card.splitlines() if "img" in line)
    assert row.count("|") - row.count("\\|") == 5, "a name makes no cells"
    assert "&lt;img src\\=x&gt;\\|\\`a\\` \\# b" in row


def test_the_card_says_what_is_so(kept_run: Make) -> None:
    """A local run was trained by "machines of many people", to a target that had been extended."""
    from p2pdiloco.wire.log import OwnerEntry, OwnerWord
    from p2pdiloco_node.export.card import model_card
    from p2pdiloco_node.export.facts import Evaluation, Heard, facts_of

    run = kept_run(admission="local", target_tokens=1000, target_version=8).steps(2)
    source = msgspec.structs.replace(run.spec.data.evaluations[0], name="austen")
    data = msgspec.structs.replace(run.spec.data, evaluations=(*run.spec.data.evaluations, source))
    found = from_folder(run.folder, "newest", quiet, held_out=False)
    tally = found.origin.tally.copy()
    tally.add(OwnerEntry(OwnerWord("extend", 1, 5000, b"", bytes(64)), bytes(32)))
    origin = dataclasses.replace(
        found.origin, tally=tally.copy(), spec=msgspec.structs.replace(run.spec, data=data)
    )
    facts = facts_of(origin, Heard(Evaluation(2, 3.0, 64, (3.0, 2.5))), "float32", ())
    card = model_card(facts)
    assert "of one machine or private network" in card
    assert "internet" not in card
    assert "| the run's end | version 8, or 5,000 tokens if that comes first |" in card
    tally.add(OwnerEntry(OwnerWord("finish", 2, 0, b"", bytes(64)), bytes(32)))
    ended = facts_of(dataclasses.replace(origin, tally=tally.copy()), Heard(), "float32", ())
    planned = "planned were version 8, or 5,000 tokens if that comes first"
    assert f"| the run's end | ended by its owner at 6,000 tokens; {planned} |" in model_card(ended)
    assert "| held-out loss, austen | 2.5000 nats per token" in card
    open_run = dataclasses.replace(origin, spec=msgspec.structs.replace(origin.spec, admission="open"))
    assert "over the ordinary internet" in model_card(facts_of(open_run, Heard(), "float32", ()))
