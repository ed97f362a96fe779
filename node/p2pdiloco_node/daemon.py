"""`p2pdiloco node`: the volunteer's daemon. Constructing does nothing, entering does.

In order: the folder's lock, the key, the run (from the tracker or from disk), files and port, the tracker,
version 0, the brain; the trainer begins when the run's data is here and this node has caught up. The daemon
itself never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.exit_codes import NETWORK
from p2pdiloco.ids import PeerId, short
from p2pdiloco.protocol import events as fact
from p2pdiloco.run_spec import RunSpec, spec_bytes_of
from p2pdiloco.wire.messages import EvalReport, Goodbye, SetLoss
from p2pdiloco_node import __version__
from p2pdiloco_node.config import (
    HostPort,
    JoinLink,
    NodeConfig,
    parse_address,
    parse_join,
    parse_peers,
    parse_size,
)
from p2pdiloco_node.data.room import shards_of
from p2pdiloco_node.process.lifetime import Leaving, note_address, run_life
from p2pdiloco_node.storage.data_dir import DataDir
from p2pdiloco_node.storage.files import make_folder, replace_file
from p2pdiloco_node.storage.keys import load_or_make_key
from p2pdiloco_node.taking_part.announcer import Announcer
from p2pdiloco_node.taking_part.desk import State, TrainerDesk
from p2pdiloco_node.taking_part.fitting import fit, trainer_settings
from p2pdiloco_node.taking_part.joining import check_named, find_run, kept_name
from p2pdiloco_node.taking_part.narrator import Narrator
from p2pdiloco_node.taking_part.participant import Participant, Setting
from p2pdiloco_node.taking_part.reports import Reports
from p2pdiloco_node.telemetry import Telemetry
from p2pdiloco_node.tracking.boards import About, Tracking, Wanted
from p2pdiloco_node.tracking.figures import OfNode, about_run
from p2pdiloco_node.training.checkpoints import MomentsCheckpoints
from p2pdiloco_node.training.contributor import DiskContributor
from p2pdiloco_node.training.frames import Evaluated
from p2pdiloco_node.training.machine import gpus
from p2pdiloco_node.training.ranks import check_parallel, check_ranks, find_ranks
from p2pdiloco_node.training.supervisor import Supervisor
from p2pdiloco_node.transport.contact import Refused, fetch_peers
from p2pdiloco_node.transport.http_session import make_session

log = logging.getLogger("p2pdiloco.node")
CATCH_UP_POLL_S = 0.2
TRAINER_NICE = 5  # on a busy machine heartbeats and acks go before inner steps
REPORT_S = 1.0  # between two reports to the page in a local run; else as often as announces


def run_node(config: NodeConfig) -> int:
    """The command. Raises: OperatorError."""
    return run_life(
        lambda leaving: _live(config, leaving), level=config.log_level, orphan=not config.die_with_parent
    )


async def _live(config: NodeConfig, leaving: Leaving) -> int:
    async with Daemon(config, leaving) as daemon:
        return await daemon.run()


class Daemon:
    """One node of one run."""

    def __init__(self, config: NodeConfig, leaving: Leaving) -> None:
        """Checks what can be checked without touching anything. Raises: OperatorError (usage)."""
        self.config = config
        self._leaving = leaving
        self._join = parse_join(config.join) if config.join else None
        self._peers = parse_peers(config.peers)
        self._listen = parse_address(config.listen, "--listen") if config.listen else None
        self._advertise = [parse_address(a, "--advertise") for a in config.advertise]
        self._quota = parse_size(config.data_disk, "--data-disk")
        check_ranks(config)
        self._wanted = Wanted(config.tensorboard, config.wandb)
        self._wanted.check()
        self._root = Path(config.data_dir).expanduser()
        check_named(self._root, self._join, self._peers)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Everything but the life itself. Raises: OperatorError."""
        try:
            await self._enter()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.participant.note_crash(error)
        await self._stack.aclose()

    async def _enter(self) -> None:
        config = self.config
        # Before anything is asked for, also where the run turns out to be over.
        check_parallel(await asyncio.to_thread(find_ranks, config, gpus), config.parallel)
        self._data = self._stack.enter_context(DataDir(self._root))
        signer = load_or_make_key(self._data.key_path, self._data.files)
        self._session = await self._stack.enter_async_context(
            make_session(connections_max=8, per_host_max=0, build=__version__)
        )
        found = await find_run(self._data, self._session, self._join, self._peers, fits=self._fits)
        self._spec, self._run = found.spec, found.run
        self._folder = self._data.run_folder(found.run)
        self._name = kept_name(self._data, config.name) or f"node-{short(signer.peer_id)[:4]}"
        self.telemetry = Telemetry(
            self._name,
            signer.peer_id,
            found.run,
            found.spec.name,
            role="node",
            pid=os.getpid(),
            inner_steps=found.spec.inner.inner_steps,
        )
        self.telemetry.tracker_url = found.link.url if found.link else ""
        setting = Setting(
            run=found.run,
            spec=found.spec,
            signed_spec=found.signed,
            signer=signer,
            folder=self._folder,
            role="node",
            listen=self._address_to_listen(found.link),
            keeps_all=config.keep_deltas,
            data_bytes_max=self._quota,
        )
        self.participant = await self._stack.enter_async_context(self._participant(setting))
        note_address(self._stack, self._data.root, self.participant.listener, setting.listen.host)
        self._keep_port()
        participant = self.participant
        participant.own_record = participant.peer_record(self._name, self._advertise)
        about = About(f"{found.spec.name}-{self._name}", self._data.root, about_run(found.spec))
        tracking = await self._stack.enter_async_context(
            Tracking(self._wanted, about, say=self.telemetry.say)
        )
        self._tracked = OfNode(found.spec, participant.me, tracking.add, time.time)
        self.telemetry.on_installed = self._tracked.installed
        self.announcer = Announcer(
            self._session,
            [found.link.url] if found.link else [],
            participant.own_record,
            participant.client,
            participant.book,
            self.telemetry,
            witness=self._witness,
            local=found.spec.admission == "local",
            rng=random.Random(),  # noqa: S311 - jitter
        )
        log.info(
            "Run %s (%s), node %s (%s), port %d.",
            found.spec.name,
            found.run.hex()[:16],
            self._name,
            short(signer.peer_id),
            participant.listener.port,
        )

    async def _fits(self, spec: RunSpec, folder: Path) -> None:
        self._ranks, self._plan = await fit(self.config, spec, self._quota, self._data.root, folder)

    @property
    def _witness(self) -> PeerId:
        return PeerId(self._spec.committee.genesis.witness)

    # Address.

    def _address_to_listen(self, link: JoinLink | None) -> HostPort:
        """As asked; else loopback beside a loopback tracker, all interfaces otherwise, on the last port."""
        if self._listen is not None:
            return self._listen
        host = "0.0.0.0"  # noqa: S104 - a peer has to be reachable
        if link is not None and any(
            link.url.startswith(f"http://{h}") for h in ("127.", "localhost", "[::1]")
        ):
            host = "127.0.0.1"
        return HostPort(host, 0)

    def _participant(self, setting: Setting) -> Participant:
        """On the port of the life before where it is free: peers that know it need not look."""
        if setting.listen.port == 0 and (port := self._last_port()) and _is_free(setting.listen.host, port):
            setting = setting._replace(listen=HostPort(setting.listen.host, port))
        return Participant(setting, self.telemetry)

    def _last_port(self) -> int:
        try:
            return int((self._data.root / "port").read_text())
        except (OSError, ValueError):
            return 0

    def _keep_port(self) -> None:
        replace_file(
            self._data.files, self._data.root / "port", f"{self.participant.listener.port}\n".encode()
        )

    # Life.

    async def run(self) -> int:
        """Until the run is over or somebody asks to leave. The exit code. Raises: what ended it."""
        async with asyncio.TaskGroup() as group:
            me, brain = self.participant.me, self.participant.brain_view
            narrator = Narrator(self.telemetry, brain, me, self._witness)
            told = group.create_task(narrator.run())
            try:
                return await self._live()
            finally:
                told.cancel()

    async def _live(self) -> int:
        self.telemetry.why = "asking for the addresses of other nodes"
        await self._meet()
        participant = self.participant
        if not await self._while_staying(participant.run_blobs.fetch_genesis()):
            return 0
        await participant.open_state()
        await self._make_desk()
        own = self._contributor
        await participant.begin(
            desk=self.desk, in_flight=tuple(own.in_flight()), evaluated_version=own.evaluated_version
        )
        assert participant.node is not None, "begun"
        over = participant.node.state.finished
        async with asyncio.TaskGroup() as group:
            self._talk = [group.create_task(work) for work in (self.announcer.run(), self._report())]
            tasks = [
                group.create_task(work)
                for work in (
                    self.desk.run(),
                    self._begin_training(),
                    self._leave_when_asked(),
                    self._leave_when_over(),
                )
            ]
            self._training = group.create_task(self._train(over=over))
            self._keeping_data = group.create_task(self._keep_data(over=over))
            await participant.live()
            for task in (*tasks, *self._talk, self._training, self._keeping_data):
                task.cancel()
        return 0

    async def _meet(self) -> None:
        """First words with the tracker and the named peers; a swarm that is known from disk needs neither.

        Raises: OperatorError for what would never work, only where nothing of the run is on this disk yet.
        """
        participant = self.participant
        joining = not participant.entries
        try:
            await self.announcer.once(joining=joining)
        except TransportError as error:
            self.telemetry.tracker_failed(str(error), refuses=isinstance(error, Refused))
        for peer in self._peers:
            try:
                for sealed in await fetch_peers(self._session, f"http://{peer}"):
                    await participant.client.learn(self._witness, sealed)
            except TransportError as error:
                log.info("The peer %s gave no addresses: %s.", peer, error)
        known = [peer for peer in participant.book.records() if peer != participant.me]
        is_open = self._spec.admission == "open"
        if joining and is_open and known and not any(map(participant.client.can_dial, known)):
            raise OperatorError(
                f"Run {self._spec.name} is open, and nodes of an open run never connect to addresses of "
                "their own machine or of a private network; no other address of its peers is known. For one "
                "machine or network make the run with p2pdiloco run new --admission local; otherwise start "
                "its tracker with --public-url http://ADDRESS:PORT that is reached from everywhere.",
                NETWORK,
            )
        await self.announcer.tell_peers()

    async def _while_staying(self, work: Coroutine[object, object, None]) -> bool:
        """Do `work` before the brain is there; False if somebody asked to leave meanwhile."""
        task = asyncio.ensure_future(work)
        announcing = asyncio.ensure_future(self.announcer.run())
        leave = asyncio.ensure_future(self._leaving.wait())
        try:
            done, _ = await asyncio.wait((task, announcing, leave), return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
            return task in done
        finally:
            for one in (task, announcing, leave):
                one.cancel()
            await asyncio.gather(task, announcing, leave, return_exceptions=True)

    async def _make_desk(self) -> None:
        participant, spec = self.participant, self._spec
        files = self._data.files
        folders = {name: self._folder / name for name in ("work", "moments", "exchange")}
        for folder in folders.values():
            make_folder(files, folder)

        def write_durably(path: Path, data: bytes | memoryview, /) -> None:
            replace_file(files, path, data)

        self._contributor = await asyncio.to_thread(
            DiskContributor,
            folders["work"],
            self._run,
            spec,
            participant.setting.signer,
            participant.blobs,
            write_durably,
        )
        restored = participant.keeper.restored
        self.desk = TrainerDesk(
            spec_bytes_of(participant.setting.signed_spec),
            spec,
            participant.me,
            self._contributor,
            State(restored.version, restored.clock, restored.target_tokens, participant.keeper.params()),
            self.telemetry,
            put=self._put,
            on_evaluated=self._evaluated,
            settings=trainer_settings(self.config, self._plan),
        )
        self._reports = await self._stack.enter_async_context(
            Reports(partial(participant.client.deliver, self._witness), self.desk.reported)
        )
        checkpoints = MomentsCheckpoints(folders["moments"], write_durably)
        self._supervisor = Supervisor(
            folders["exchange"],
            checkpoints,
            begin=self.desk.begin,
            on_event=self.desk.trainer_said,
            threads=self.config.threads,
            nice=TRAINER_NICE,
            device=self._ranks.device,
            command=self._ranks.command(folders["exchange"] / "ranks"),
        )
        self.desk.attach(self._supervisor)
        self.desk.on_stepped = self._tracked.stepped
        self.shards = shards_of(
            participant, quota=self._quota, others=self._plan.disk_of_others, cursor=self._contributor.cursor
        )
        self.shards.changed = self._supervisor.shards_changed
        self.desk.follow(self.shards)

    async def _train(self, *, over: bool) -> None:
        """`over`: the run was over before this life; there is nothing to train or evaluate."""
        if not over:
            await self._supervisor.run()

    async def _keep_data(self, *, over: bool) -> None:
        if not over:
            await self.shards.run()

    def _put(self, event: fact.Event) -> None:
        if self.participant.driver is not None:
            self.participant.driver.put(event)

    async def _begin_training(self) -> None:
        """When there is something to train on and this node has what the swarm has."""
        await self.shards.ready.wait()
        self.telemetry.state = "syncing"
        while not self.participant.caught_up():
            self.telemetry.why = self.participant.catching_up()
            await asyncio.sleep(CATCH_UP_POLL_S)
        self.telemetry.why = "the trainer starts"
        self.desk.may_train()

    async def _report(self) -> None:
        """What this node says of itself, for the page."""
        local = self._spec.admission == "local"
        while True:
            traffic = self.participant.client.traffic
            version = self.participant.brain_view().version
            # The page compares the traffic of training.
            down = traffic.down - self.participant.run_blobs.bytes_fetched
            report = self.telemetry.report(version, bytes_up=traffic.up, bytes_down=max(0, down))
            await self.participant.client.send(self._witness, report)
            await asyncio.sleep(REPORT_S if local else limits.announce_interval_s)

    def _evaluated(self, found: Evaluated) -> None:
        self._tracked.evaluated(found)
        log.info(
            "version %d: held-out loss %.4f on %d tokens",
            found.version,
            found.losses[0],
            found.tokens[0],
        )
        sets = tuple(SetLoss(loss, tokens) for loss, tokens in zip(found.losses, found.tokens, strict=True))
        self._reports.say(EvalReport(found.version, found.state_root, sets, found.samples))

    # Leaving.

    async def _leave_when_asked(self) -> None:
        await self._leaving.wait()
        await self._leave(f"asked to leave ({self._leaving.why})")

    async def _leave(self, reason: str) -> None:
        self.telemetry.state, self.telemetry.why = "leaving", reason
        log.info("Leaving: %s%s.", reason, self.desk.leaving_words())
        for task in self._talk:
            task.cancel()  # nothing that is said after the goodbye may look like a return
        await self.participant.client.send(self._witness, Goodbye(reason))
        self._put(fact.GoodbyeWanted(reason))
        self._training.cancel()  # in parallel with the goodbye: the trainer ends within its own limit

    async def _leave_when_over(self) -> None:
        """The run is over: stay for those who still follow, then leave; the model stays on disk."""
        await self.desk.over.wait()
        self._keeping_data.cancel()  # what is here is served; nobody needs more
        version = self.participant.brain_view().version
        log.info("The model of version %d stays in %s.", version, self._folder)
        if self.config.stay:
            log.info("This node goes on serving it (--stay), until you end it.")
            return
        if not self.telemetry.trained and not self.participant.entries:
            log.info("It was over before this node came: there is nothing left to train.")
            await self._leave("the run is over")
            return
        self.telemetry.stays = "others fetch the last entries"
        until = asyncio.get_running_loop().time() + limits.run_over_linger_s
        log.info(
            "This node stays %.0f more seconds for others to fetch the last entries, and leaves then%s.",
            limits.run_over_linger_s,
            f"; it evaluates the last version first, for as long as that shows progress and at most "
            f"{limits.last_evaluation_s_max / 60:.0f} minutes"
            if self.desk.evaluating
            else "",
        )
        await self.desk.last_evaluation()
        await self._reports.said(limits.run_over_linger_s)
        await asyncio.sleep(until - asyncio.get_running_loop().time())
        await self._leave("the run is over")


def _is_free(host: str, port: int) -> bool:
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
