"""Laws of the suite of the trajectory plane, measured for half a second."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.transport import GROUP_SIZE, NUM_TOKENS, encoded, measure, send
from common.errors import LongstrideError
from common.wire.codec import decode, encode
from common.wire.messages import Ack
from common.wire.security import create_keys
from common.wire.sockets import Router
from learner.ingest.intake import refusal
from learner.journal.journal import read_journal


def test_encoded_trajectories_are_whole_accepted_groups() -> None:
    made = [decode(frames) for frames in encoded(5, 2 * GROUP_SIZE)]
    assert len({each.episode_id for each in made}) == 2 * GROUP_SIZE
    assert [each.group_id for each in made] == ["g0000005"] * GROUP_SIZE + ["g0000006"] * GROUP_SIZE
    assert {each.token_ids.size for each in made} == {NUM_TOKENS}
    whys = [refusal(each, learner_version=0, max_group_size=GROUP_SIZE) for each in made]
    assert set(whys) == {""}


def test_refused_trajectory_is_not_counted(tmp_path: Path) -> None:
    keys = create_keys(tmp_path / "keys")
    router = Router(keys, host="127.0.0.1", port=0)
    asked = {"address": f"tcp://127.0.0.1:{router.port}", "num": GROUP_SIZE}
    (tmp_path / "ask.json").write_text(json.dumps(asked), encoding="utf-8")
    (tmp_path / "go").touch()
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send, tmp_path, 0)
        while not (frames := router.receive_frames(timeout_s=1.0)):
            assert not sending.done()
        refused = Ack(episode_id="g0000001/0", is_accepted=False, reason="too long")
        router.send_frames(frames[0][0], encode(refused))
        with pytest.raises(LongstrideError, match="too long"):
            sending.result(timeout=60)
    router.close()


@pytest.mark.long
@pytest.mark.slow
def test_acknowledged_trajectories_are_counted_and_journaled(tmp_path: Path) -> None:
    flow = measure("intake", tmp_path, measured_s=0.5)
    assert flow.per_s > 0
    assert flow.cpu_s > 0
    (folder,) = tmp_path.iterdir()
    journalled = [trajectory.episode_id for _, trajectory in read_journal(folder / "journal")]
    assert len(journalled) == len(set(journalled)) >= flow.per_s * 0.5
