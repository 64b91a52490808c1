#!/bin/bash
mkdir -p /logs/verifier
python3 -I - <<'END'
import json
from pathlib import Path

expected = {"name": "store", "port": 8080, "paths": ["/a", "/b"], "limits": {"users": 25, "rate": 1.5}}
try:
    found = json.loads(Path("/app/settings.json").read_text())
except (OSError, ValueError) as error:
    print(error)
    found = None
is_object = isinstance(found, dict)
share = sum(is_object and found.get(key) == value for key, value in expected.items()) / len(expected)
share *= found is None or len(found) <= len(expected)
Path("/logs/verifier/reward.txt").write_text(str(share))
END
