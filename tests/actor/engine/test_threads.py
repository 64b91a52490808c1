"""Laws of the threads of an engine on a CPU."""

import os
import subprocess
import sys

import pytest

from common.repository import ROOT

PROGRAM = """
import os
import torch
from actor.engine.start import use_threads_of_a_run
for chosen in (None, "2"):
    if chosen:
        os.environ["OMP_NUM_THREADS"] = chosen
    use_threads_of_a_run()
    print(torch.get_num_threads(), os.environ["VLLM_CPU_OMP_THREADS_BIND"])
"""


@pytest.mark.slow
def test_engine_has_the_threads_of_a_run() -> None:
    """Threads that wait for each other are slow beside any busy core. A user may choose more."""
    names = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", PROGRAM]
    output = subprocess.check_output(command, cwd=ROOT, env=environ, encoding="utf-8")
    assert output.split()[-4:] == ["1", "nobind", "2", "nobind"]
