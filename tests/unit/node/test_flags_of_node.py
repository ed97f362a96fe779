"""Each flag of `node` and `ranks` changes what the daemon says, keeps or starts.

The real command line and the real daemon, which knows its run from its disk and finds no tracker. How a
trainer works with a device, ranks and memory is in test_fitting.py, test_ranks.py and test_memory_plan.py.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.ids import PeerId, RunId, digest_of
from p2pdiloco.run_spec import Genesis, RunSpec, TensorSpec, run_id_of, sign_run_spec
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco_node import daemon as module
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.config import NodeConfig
from p2pdiloco_node.daemon import Daemon
from p2pdiloco_node.process.lifetime import Leaving
from p2pdiloco_node.storage.data_dir import DataDir
from p2pdiloco_node.storage.run_folder import LINK, SPEC
from p2pdiloco_node.training import further_ranks
from p2pdiloco_node.training.memory_plan import DATA_ROW
from p2pdiloco_node.training.presets import inner_spec, model_spec
from p2pdiloco_node.training.ranks import Ranks

OWNER = Ed25519Signer(bytes([5]) * 32)
TENSORS = (TensorSpec("w", (64, 32)),)
ZEROS = bytes(4 * 64 * 32)
AWAY = "http://127.0.0.1:9"  # nobody answers there


def config_of(patch: pytest.MonkeyPatch, *words: str) -> NodeConfig:
    """What the command line asks the daemon for."""
    asked: list[NodeConfig] = []
    with patch.context() as patched:
        patched.setattr(module, "run_node", lambda config: asked.append(config) or 0)
        assert run_command(["node", *words]) == 0
    return asked[0]


def a_run() -> tuple[RunId, RunSpec]:
    """Version 0 is nothing but zeros."""
    chunk = (digest_of(ZEROS),)
    spec = msgspec.structs.replace(
        tiny_run(OWNER, PeerId(b"w" * 32)).spec, model=model_spec("llama:tiny", TENSORS),
        inner=inner_spec("llama:tiny", 10**9), genesis=Genesis(chunk, chunk),
    )  # fmt: skip
    return run_id_of(encode(spec)), spec


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test stands; in it the data folder `known`, which has been in the run before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run, spec = a_run()
    folder = DataDir(tmp_path / "known").run_folder(run)
    folder.mkdir(parents=True)
    (folder / SPEC).write_bytes(sign_run_spec(spec, OWNER))
    (tmp_path / "known" / LINK).write_text(f"{AWAY}/#{run.hex()}\n")
    return tmp_path


Enter = Callable[..., Any]


@pytest.fixture
def enter(here: Path, monkeypatch: pytest.MonkeyPatch) -> Enter:
    """The daemon that these words start, as it is before its life begins."""
    assert here.exists()

    @asynccontextmanager
    async def entered(*words: str) -> AsyncIterator[Daemon]:
        config = await asyncio.to_thread(config_of, monkeypatch, "--data-dir", "known", *words)
        async with Daemon(config, Leaving()) as made:
            yield made

    return entered


async def test_join_data_dir_and_name_are_where_and_who(enter: Enter, here: Path) -> None:
    async with enter() as made:
        assert made.telemetry.tracker_url == AWAY
        assert made.participant.own_record.name.startswith("node-")
        assert (here / "known" / "identity.key").exists()
    async with enter("--join", "http://127.0.0.1:19", "--name", "attic") as made:
        assert made.telemetry.tracker_url == "http://127.0.0.1:19"
        assert made.participant.own_record.name == "attic"
    assert not (here / "p2pdiloco-node").exists(), "the default is not touched"


async def test_listen_and_advertise_are_where_others_reach_it(enter: Enter, unused_tcp_port: int) -> None:
    async with enter() as made:
        record = made.participant.own_record
        assert record.hosts == ("127.0.0.1",), "beside a tracker on loopback"
    async with enter("--listen", f"127.0.0.2:{unused_tcp_port}") as made:
        record = made.participant.own_record
        assert (record.hosts, record.port) == (("127.0.0.2",), unused_tcp_port)
    words = ("--advertise", "198.51.100.7:7500", "--advertise", "203.0.113.7:7500")
    async with enter("--listen", "127.0.0.1:0", *words) as made:
        record = made.participant.own_record
        assert (record.hosts, record.port) == (("198.51.100.7", "203.0.113.7"), 7500)


async def test_peers_are_asked_for_addresses(enter: Enter, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def fetch(_session: Any, url: str) -> tuple[bytes, ...]:
        asked.append(url)
        raise TransportError("nobody is there")

    monkeypatch.setattr(module, "fetch_peers", fetch)
    for words in ((), ("--peers", "10.0.0.1:7", "--peers", "10.0.0.2:8")):
        async with enter(*words) as made:
            await made._meet()
    assert asked == ["http://10.0.0.1:7", "http://10.0.0.2:8"]


async def test_data_disk_is_the_most_that_data_may_take(enter: Enter) -> None:
    rows = []
    for words in ((), ("--data-disk", "7KB")):
        async with enter(*words) as made:
            quota = made.participant.setting.data_bytes_max
            rows.append((quota, *(r.disk for r in made._plan.rows if r.what == DATA_ROW)))
    (usual, planned), (small, less) = rows
    assert (usual, small) == (limits.shard_store_bytes_max, 7000)
    assert less <= 7000
    assert less <= planned


async def test_keep_deltas_keeps_what_the_rules_drop(enter: Enter) -> None:
    """As of an archive: test_driver.py."""
    for words, keeps in (((), False), (("--keep-deltas",), True), (("--no-keep-deltas",), False)):
        async with enter(*words) as made:
            participant = made.participant
            for digest in made._spec.genesis.params:
                participant.blobs.put(digest, ZEROS)
            await participant.open_state()
            await participant.begin(desk=None)
            assert participant.driver is not None
            assert participant.driver._ports.keeps_delta(digest_of(b"a delta")) is keeps


async def test_threads_are_the_trainer_s(enter: Enter) -> None:
    """From the settings to the environment of its process."""
    for words, threads in (((), "1"), (("--threads", "3"), "3")):
        async with enter(*words) as made:
            for digest in made._spec.genesis.params:
                made.participant.blobs.put(digest, ZEROS)
            await made.participant.open_state()
            await made._make_desk()
            said = "import os, sys; sys.exit(int(os.environ['OMP_NUM_THREADS']))"
            made._supervisor._command = (sys.executable, "-c", said)
            assert f"status {threads}" in await made._supervisor._live()


@pytest.mark.parametrize("stay", [False, True])
async def test_stay_goes_on_serving_when_the_run_is_over(
    enter: Enter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stay: bool
) -> None:
    monkeypatch.setattr(limits, "run_over_linger_s", 0.0)
    over = asyncio.Event()
    over.set()
    async with enter(*(["--stay"] if stay else [])) as made:
        made.desk = cast("Any", SimpleNamespace(over=over, evaluating=False, leaving_words=str))
        made._talk = []
        made._keeping_data = made._training = asyncio.ensure_future(asyncio.sleep(0))
        with caplog.at_level(logging.INFO, logger="p2pdiloco.node"):
            await made._leave_when_over()
        assert (made.telemetry.state == "leaving") is not stay
    assert ("goes on serving it (--stay)" in caplog.text) is stay


async def test_tensorboard_is_where_curves_are_written(enter: Enter, here: Path) -> None:
    pytest.importorskip("tensorboard")
    for words, written in (((), False), (("--tensorboard", "curves"), True)):
        async with enter(*words):
            pass
        assert bool(list((here / "curves").glob("events*"))) is written


def test_wandb_is_asked_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("p2pdiloco_node.tracking.boards.importlib.util.find_spec", lambda _name: None)
    assert run_command(["node", "--data-dir", str(here / "known"), "--wandb", "project"]) == 3
    assert "--wandb needs a library" in capsys.readouterr().err


# p2pdiloco ranks


def test_each_flag_of_ranks_is_in_what_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    script = (
        "import os, pathlib, sys\n"
        "said = ' '.join([os.environ['OMP_NUM_THREADS'], *sys.argv[1:]])\n"
        f"pathlib.Path({str(told)!r}).write_text(said)"
    )
    real, made = Ranks.command, []

    def command(self: Ranks, folder: Path, node_rank: int = 0) -> Any:
        *_, launch = real(self, folder, node_rank)
        made.append(launch)
        return (sys.executable, "-c", script)

    monkeypatch.setattr(Ranks, "command", command)
    words = "ranks --nnodes 3 --node-rank 2 --rdzv 10.0.0.1:7 --ranks 2 --device cpu --threads 5 --nice 7"
    assert run_command(words.split()) == 0
    assert told.read_text() == "5 7 cpu,cpu"
    launch = msgspec.json.decode(made[0])
    assert (launch["nnodes"], launch["node_rank"], launch["rdzv"]) == (3, 2, "10.0.0.1:7")
    assert launch["devices"] == ["cpu", "cpu"]
    monkeypatch.setattr(further_ranks, "gpus_here", lambda: [SimpleNamespace()] * 2)
    words = "ranks --nnodes 3 --node-rank 1 --rdzv 10.0.0.1:7 --gpus all"
    assert run_command(words.split()) == 0
    assert told.read_text() == "1 5 cuda:0,cuda:1"


def test_contradictions_are_found_before_anything_is_touched(tmp_path: Path) -> None:
    config = NodeConfig(join="http://127.0.0.1:1", data_dir=str(tmp_path / "node"), ranks=2, gpus="all")
    with pytest.raises(OperatorError, match="give one of them"):
        Daemon(config, Leaving())
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda"}, "--device cuda: this machine has 0"),
        ({"device": "cuda:3"}, "--device cuda:3: this machine has 0"),
        ({"gpus": "all"}, "--gpus all: this machine has no NVIDIA GPU"),
        ({"parallel": "fsdp"}, "--parallel fsdp says how several ranks share a model"),
    ],
)
async def test_devices_and_ranks_are_checked_before_anybody_is_asked_for_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(module, "gpus", list)
    root = tmp_path / "node"
    config = NodeConfig(join="http://127.0.0.1:1", data_dir=str(root), **settings)  # nobody answers there
    with pytest.raises(OperatorError, match=words):
        await Daemon(config, Leaving()).__aenter__()
    assert not root.exists()
