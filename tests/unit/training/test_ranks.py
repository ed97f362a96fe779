"""From settings to the ranks of one trainer, and what the launcher says of their end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.config import NodeConfig
from p2pdiloco_node.storage.scratch import temporary_folder
from p2pdiloco_node.training import further_ranks
from p2pdiloco_node.training.machine import Gpu
from p2pdiloco_node.training.ranks import WORKER, Launch, Ranks, check_batch, find_ranks


def found(count: int = 0, /, **settings: Any) -> Ranks:
    """On a machine with so many GPUs."""
    there = [Gpu(n, "a GPU", 1, 1) for n in range(count)]
    return find_ranks(NodeConfig(**settings), lambda: there)


def test_one_rank_is_the_worker_itself() -> None:
    assert found().command(Path("x")) == WORKER
    assert found(2, device="cuda:1").device == "cuda:1"
    assert found(4, gpus="2") == Ranks(("cuda:2",))
    assert found(4, gpus="2").command(Path("x")) == WORKER


def test_gpus_by_number_or_all_and_processes_on_the_cpu() -> None:
    assert found(3, gpus="all").devices == ("cuda:0", "cuda:1", "cuda:2")
    assert found(4, gpus="3,0").device == "cuda:3,cuda:0"
    two = found(ranks=2, device="auto")
    assert (two.devices, two.here, two.all) == (("cpu", "cpu"), 2, 2)
    *_, launch = two.command(Path("/a/folder"))
    assert msgspec.json.decode(launch, type=Launch) == Launch(("cpu", "cpu"), "/a/folder")


def test_several_machines_meet_where_the_first_says() -> None:
    ranks = found(2, gpus="all", nnodes=3, rdzv="10.0.0.1:29500")
    assert (ranks.here, ranks.all) == (2, 6)
    *_, launch = ranks.command(Path("f"), node_rank=2)
    told = msgspec.json.decode(launch, type=Launch)
    assert (told.nnodes, told.node_rank, told.rdzv) == (3, 2, "10.0.0.1:29500")
    # One device a machine is several ranks, too.
    assert found(nnodes=2, rdzv="h:1").all == 2


@pytest.mark.parametrize(
    ("gpus", "settings", "said", "code"),
    [
        (2, {"gpus": "all", "ranks": 2}, "give one of them", 2),
        (2, {"gpus": "0,1", "device": "cpu"}, "leave --device out", 2),
        (2, {"ranks": 2, "device": "cuda"}, "for several GPUs give --gpus all", 2),
        (2, {"gpus": "0,x"}, "numbers such as 0,1,3", 2),
        (2, {"gpus": "1,1"}, "numbers such as 0,1,3", 2),
        (2, {"gpus": "0,2"}, "has 2 NVIDIA GPU", 6),
        (0, {"gpus": "all"}, "no NVIDIA GPU", 6),
        (0, {"nnodes": 2}, "go together", 2),
        (0, {"rdzv": "h:1"}, "go together", 2),
        (0, {"nnodes": 2, "rdzv": "h"}, "not HOST:PORT", 2),
    ],
)
def test_contradictions_are_refused(gpus: int, settings: dict[str, Any], said: str, code: int) -> None:
    with pytest.raises(OperatorError, match=said) as refused:
        found(gpus, **settings)
    assert refused.value.exit_code == code


def test_a_rank_without_a_sequence_is_refused() -> None:
    check_batch(found(ranks=4), 4)
    with pytest.raises(OperatorError, match="4 ranks share the 3 sequences") as refused:
        check_batch(found(ranks=4), 3)
    assert refused.value.exit_code == 6


@pytest.mark.parametrize(
    ("flags", "said", "code"),
    [
        ("--node-rank 0", "the node's own is 0", 2),
        ("--node-rank 2", "the node's own is 0", 2),
        ("--nnodes 1", "--nnodes is 2 or more", 2),
        ("--nnodes 65", "--nnodes: nnodes = 65 is not possible", 3),
        ("--ranks 0", "--ranks: ranks = 0 is not possible", 3),
        ("--threads 0", "--threads: threads = 0 is not possible", 3),
        ("--device gpu", "give auto, cpu, cuda or cuda:N", 3),
        ("--nice 20", "--nice is 0 to 19", 2),
        ("--nice -1", "--nice is 0 to 19", 2),
        ("--rdzv h", "not HOST:PORT", 2),
    ],
)
def test_lent_ranks_are_checked_as_the_node_s_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, said: str, code: int
) -> None:
    monkeypatch.setenv("P2PDILOCO_THREADS", "0")  # a node's setting, and none of this command
    given = {"--nnodes": "2", "--node-rank": "1", "--rdzv": "127.0.0.1:1"}
    given |= dict([flags.split()])
    assert run_command(["ranks", *(word for pair in given.items() for word in pair)]) == code
    assert said in capsys.readouterr().err


def test_lent_ranks_start_again_until_the_trainer_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted = tmp_path / "lives"
    script = (
        f"import sys; f = open({str(counted)!r}, 'a+'); f.seek(0); n = len(f.read()); "
        "f.write('x'); f.close(); sys.exit(n < 2)"
    )
    monkeypatch.setattr(Ranks, "command", lambda self, folder, node_rank: (sys.executable, "-c", script))
    waited: list[float] = []
    monkeypatch.setattr(further_ranks.time, "sleep", waited.append)
    lent = NodeConfig(device="cpu", nnodes=2, rdzv="127.0.0.1:1")
    assert further_ranks.run_ranks(lent, node_rank=1, nice=0, scratch=temporary_folder) == 0
    assert counted.read_text() == "xxx"
    assert len(waited) == 2


def failure(rank: int, code: int, said: str | None, folder: Path, at: int = 0) -> Any:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = folder / f"{rank}.json"
    if said is not None:
        extra = {"py_callstack": "", "timestamp": str(at)}
        file.write_text(json.dumps({"message": {"message": said, "extraInfo": extra}}))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(file))


@pytest.mark.parametrize(
    ("ends", "rank", "words"),
    [
        # Another rank notices within the same tenth of a second.
        ([(1, "RuntimeError: gloo: Connection closed by peer"), (-9, None)], 1, "was ended by SIGKILL"),
        (
            [(1, "RuntimeError: Connection closed by peer"), (1, "ValueError: bad")],
            1,
            "status 1: ValueError: bad",
        ),
        ([(1, "RuntimeError: Timed out waiting 8000ms"), (-9, None)], 0, "waited too long for another rank"),
        ([(0, None), (3, None)], 1, "ended with status 3"),
    ],
)
def test_the_rank_that_is_to_blame_is_named(
    ends: list[tuple[int, str | None]], rank: int, words: str, tmp_path: Path
) -> None:
    from p2pdiloco_node.training.launch import first_cause, in_words

    failures = {n: failure(n, code, said, tmp_path) for n, (code, said) in enumerate(ends) if code}
    named, cause = first_cause(failures)
    assert named == rank
    assert words in in_words(cause)
