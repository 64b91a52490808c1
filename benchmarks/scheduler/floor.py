"""A server that only answers, to measure the cost of encrypted sockets alone.

Run as `python -m benchmarks.scheduler.floor KEYS PORT_FILE`. It is a ROUTER socket with the run's
keys. It answers every message at once with a prepared answer of the size of the scheduler's. It
reads only the type of a message, and it receives messages in batches, as the scheduler does.
"""

import sys
import time
from pathlib import Path

from common.store.run_dir import write_atomically
from common.wire.codec import encode
from common.wire.messages import EpisodeKind, Lease, LeaseGrant, PolicyKind, Progress, Welcome
from common.wire.security import load_keys
from common.wire.sockets import Router
from learner.scheduler.main import GATHER_S, POLL_S

EPOCH = "0123456789abcdef"
LEASE = Lease(
    episode_id="g0000001/0",
    group_id="g0000001",
    member=0,
    attempt=0,
    kind=EpisodeKind.TRAIN,
    policy=PolicyKind.MODEL,
    env="textcraft",
    item_id="depth2-train-123",
    seed=1_234_567_890,
    horizon=16,
    horizon_stage=0,
    opened_at_version=1,
    deadline_s=600.0,
)
ANSWERS = {
    "Hello": Welcome(run_epoch=EPOCH),
    "Heartbeat": Progress(run_epoch=EPOCH, revoked=[], is_finished=False),
    "LeaseRequest": LeaseGrant(leases=[LEASE], retry_after_s=0.1, reason=""),
}


def main(keys_folder: str, port_file: str) -> None:
    """Answer until the process is ended."""
    encoded = {name.encode(): encode(answer) for name, answer in ANSWERS.items()}
    router = Router(load_keys(Path(keys_folder)), host="127.0.0.1", port=0)
    write_atomically(Path(port_file), f"tcp://127.0.0.1:{router.port}")
    while True:
        received = router.receive_frames(timeout_s=POLL_S)
        for sender, header in received:
            # The header begins with [schema, "name", ...; the name is a short string.
            name = header[3 : 3 + (header[2] & 0x1F)]
            if name in encoded:
                router.send_frames(sender, encoded[name])
        if received:
            time.sleep(GATHER_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
