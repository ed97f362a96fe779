"""Train one language model together, over the ordinary internet, with nobody waiting for anybody.

The tour. Read it with `p2pdiloco/protocol/events.py`, `protocol/actions.py`, `protocol/node.py`,
`diloco/outer_step.py` and `node/p2pdiloco_node/driver.py`; together with the README that is the system.

*What it does.* Every **node** takes **inner steps** (AdamW) on its own machine. After a **pass** of them it
sends what it learned, the **pseudo-gradient** `anchor - params`, as a compressed, signed **delta**, and
trains on at once. A small **committee** of **voters** collects the deltas. Its **aggregator** weighs each by
its tokens and its **staleness** and applies an **outer step** (Nesterov) to the global state; the other
voters recompute the same step and sign it. A majority of signatures, a **certificate**, makes it **version**
v + 1. Each node **adopts** the new version at its next step boundary and keeps the work it has not yet sent.

*What is agreed.* The global state is a replicated log. Entry i names the entry before it, the deltas that
went in, every scalar that was used and the digest of the state that comes out, so anybody can replay a run
and find the same bits. Who may certify the next entry follows from the entries before it; who leads follows
from the term. A tracker introduces peers to each other and shows the public page; it decides nothing.

*What this package is.* Rules, messages and maths, without socket, disk, clock, thread or hidden
randomness: time and chance are arguments.

| package | from -> to | uses |
|---|---|---|
| `wire` | bytes -> messages -> bytes; signatures over bytes as they came | msgpack, msgspec, cryptography |
| `rules` | numbers -> numbers: staleness, weights, rho, caps, closing, admission | plain numbers |
| `protocol` | events -> actions: membership, election, log, aggregation; `node` composes | `rules`, `wire` |
| `diloco` | arrays -> arrays: codecs, error feedback, merge, outer step, state roots | numpy |
| `sim` | one seed -> the life of a whole swarm in one thread, checked from outside | all of these |

*How it is run.* `p2pdiloco_node` (folder `node/`) owns the sockets, files and processes. One task, the
driver, is the only caller of `protocol.node.Node.handle(event, now)` and performs the actions that it
returns, in order: written before said. torch lives in the trainer process alone.

*Where to look first.*

- What may travel: `wire.messages`; what is signed: `wire.signing`; what is in the log: `wire.log`.
- What a run fixes for everybody: `run_spec`. Every bound on the outside world: `limits`.
- Whose fault a failure is decides what happens next: `errors`.
"""

from p2pdiloco.errors import OperatorError, P2PDiLoCoError, PeerError, TransportError
from p2pdiloco.ids import Digest, PeerId, RunId
from p2pdiloco.run_spec import RunSpec, open_run_spec

__version__ = "0.1.0"

__all__ = [
    "Digest",
    "OperatorError",
    "P2PDiLoCoError",
    "PeerError",
    "PeerId",
    "RunId",
    "RunSpec",
    "TransportError",
    "__version__",
    "open_run_spec",
]
