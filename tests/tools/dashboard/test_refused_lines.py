"""Laws of the refused messages and connections that `status` lists."""

import json
from pathlib import Path

from common.store.run_dir import RunDir
from tools.dashboard.terminal import refused_lines


def test_status_lists_refusals_per_peer_briefly(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    assert refused_lines(run_dir) == []
    peer = {"invalid": 3, "forbidden": 2, "dropped": 1, "unsent": 0, "last_reason": "x" * 10_000}
    connections = {"open": 1, "accepted": 9, "refused": {"too many": 7}, "refused_by_address": {}}
    told = {
        "scheduler": {"peers": {"actor-3\n": peer}, "connections": connections},
        "learner": {"weights/actor-3/invalid": 4},
        "hubs": {"envhub/127.0.0.1/token": 2},
    }
    run_dir.status.write_text(json.dumps({"refused": told}), encoding="utf-8")
    lines = refused_lines(run_dir)
    assert len(lines) == 4
    assert "envhub/127.0.0.1/token" in lines[3]
    assert all(len(line) < 400 and "\n" not in line for line in lines)
    assert "3 invalid, 2 forbidden, 1 unread" in lines[0]
