"""A system call filter against memory that no limit counts. It is written as raw BPF.

The refused calls allocate memory outside of processes and files (memfd, System V shared memory and
queues, io_uring), or reach facilities of the kernel that are shared by all namespaces.
"""

import errno
import platform
import struct

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {  # Numbers of the refused system calls by machine.
    "x86_64": {
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "perf_event_open": 298,
        "memfd_create": 319,
        "bpf": 321,
        "userfaultfd": 323,
        "io_uring_setup": 425,
        "memfd_secret": 447,
    },
    "aarch64": {
        "msgget": 186,
        "semget": 190,
        "shmget": 194,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "perf_event_open": 241,
        "memfd_create": 279,
        "bpf": 280,
        "userfaultfd": 282,
        "io_uring_setup": 425,
        "memfd_secret": 447,
    },
}
X32 = 0x40000000  # Bit of system calls of the x32 ABI.
LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
GREATER_EQUAL = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
NUMBER_AT = 0  # Offsets in `struct seccomp_data`.
MACHINE_AT = 4


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction of the filter."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def filter_program(machine: str = "") -> bytes:
    """Return the filter for a machine, such as x86_64; b"" for an unknown one."""
    machine = machine or platform.machine()
    if machine not in AUDIT:
        return b""
    numbers = sorted(REFUSED[machine].values())
    to_refusal = len(numbers) + 1  # Instructions between the first comparison and the refusal.
    lines = [
        _instruction(LOAD, MACHINE_AT),
        _instruction(EQUAL, AUDIT[machine], 0, to_refusal + 2),
        _instruction(LOAD, NUMBER_AT),
        _instruction(GREATER_EQUAL, X32, to_refusal, 0),
    ]
    for index, number in enumerate(numbers):
        lines.append(_instruction(EQUAL, number, len(numbers) - index, 0))
    lines += [_instruction(RETURN, ALLOW), _instruction(RETURN, REFUSE)]
    return b"".join(lines)
