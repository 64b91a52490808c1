"""Stand-in for NVIDIA's bindings: with this folder in PYTHONPATH, a machine has the GPUs of $GPUS.

$GPUS is a JSON list of [uuid, name, MiB, slices], where slices is a list of [uuid, name, MiB]. MiB
is null if the driver does not report it. Without $GPUS the driver blocks.
"""

import json
import os
import threading
from types import SimpleNamespace


class NVMLError(Exception):
    """An error of the driver."""


def nvmlInit():
    if "GPUS" not in os.environ:
        threading.Event().wait()


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(json.loads(os.environ["GPUS"]))


def nvmlDeviceGetHandleByIndex(index):
    return json.loads(os.environ["GPUS"])[index]


def nvmlDeviceGetUUID(gpu):
    return gpu[0]


def nvmlDeviceGetName(gpu):
    return gpu[1]


def nvmlDeviceGetMemoryInfo(gpu):
    if gpu[2] is None:
        raise NVMLError("not supported")
    return SimpleNamespace(total=gpu[2] << 20)


def nvmlDeviceGetMaxMigDeviceCount(gpu):
    if not gpu[3]:
        raise NVMLError("not supported")
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(gpu, index):
    if index >= len(gpu[3]):
        raise NVMLError("not found")
    return gpu[3][index]
