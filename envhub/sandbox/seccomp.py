"""A system call filter against memory that no limit counts. It is written as raw BPF.

The refused calls allocate memory outside of processes and files (memfd, System V shared memory and
queues, io_uring), or reach facilities of the kernel that are shared by all namespaces. Other calls
are refused only if they name the sandbox's first process, which has the commands' user: its limits,
its priority and its processors stay as they are.
"""

import errno
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
FIRST = 1  # Process id of the sandbox's first process. It has one thread.
PRIO_USER = 2
IOPRIO_WHO_USER = 3
# Arguments that are refused by system call, as (index, value). A user means all its processes.
NAMES_FIRST = {
    "kill": [(0, FIRST)],
    "tkill": [(0, FIRST)],
    "tgkill": [(0, FIRST)],
    "rt_sigqueueinfo": [(0, FIRST)],
    "rt_tgsigqueueinfo": [(0, FIRST)],
    "pidfd_open": [(0, FIRST)],
    "ptrace": [(1, FIRST)],
    "process_vm_readv": [(0, FIRST)],
    "process_vm_writev": [(0, FIRST)],
    "migrate_pages": [(0, FIRST)],
    "move_pages": [(0, FIRST)],
    "prlimit64": [(0, FIRST)],
    "sched_setparam": [(0, FIRST)],
    "sched_setscheduler": [(0, FIRST)],
    "sched_setattr": [(0, FIRST)],
    "sched_setaffinity": [(0, FIRST)],
    "setpriority": [(1, FIRST), (0, PRIO_USER)],
    "ioprio_set": [(1, FIRST), (0, IOPRIO_WHO_USER)],
}
# Index of the argument that names a process or a group of processes; 0 is the calling one.
NAMES_PROCESS = {
    "prlimit64": 0,
    "sched_setparam": 0,
    "sched_setscheduler": 0,
    "sched_setattr": 0,
    "sched_setaffinity": 0,
    "setpriority": 1,
    "ioprio_set": 1,
}
NUMBERS = {  # Numbers of these system calls by machine.
    "x86_64": {
        "kill": 62,
        "ptrace": 101,
        "rt_sigqueueinfo": 129,
        "setpriority": 141,
        "sched_setparam": 142,
        "sched_setscheduler": 144,
        "tkill": 200,
        "sched_setaffinity": 203,
        "tgkill": 234,
        "ioprio_set": 251,
        "migrate_pages": 256,
        "move_pages": 279,
        "rt_tgsigqueueinfo": 297,
        "prlimit64": 302,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "sched_setattr": 314,
        "pidfd_open": 434,
    },
    "aarch64": {
        "ioprio_set": 30,
        "ptrace": 117,
        "sched_setparam": 118,
        "sched_setscheduler": 119,
        "sched_setaffinity": 122,
        "kill": 129,
        "tkill": 130,
        "tgkill": 131,
        "rt_sigqueueinfo": 138,
        "setpriority": 140,
        "migrate_pages": 238,
        "move_pages": 239,
        "rt_tgsigqueueinfo": 240,
        "prlimit64": 261,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "sched_setattr": 274,
        "pidfd_open": 434,
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
ARGUMENTS_AT = 16
ARGUMENT_BYTES = 8  # The kernel reads these arguments as 32 bits, which come first.


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction of the filter."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse_if(code: int, value: int) -> list[bytes]:
    """Return the instructions that refuse the call if the loaded value compares as true."""
    return [_instruction(code, value, 0, 1), _instruction(RETURN, REFUSE)]


def filter_program(machine: str) -> bytes:
    """Return the filter of a sandbox for a machine, such as x86_64; b"" for an unknown one."""
    if machine not in AUDIT:
        return b""
    lines = [*_first_lines(machine), *_refuse_if(GREATER_EQUAL, X32)]
    for number in REFUSED[machine].values():
        lines += _refuse_if(EQUAL, number)
    for name, arguments in NAMES_FIRST.items():
        checks: list[bytes] = []
        for index, value in arguments:
            checks += [_load_argument(index), *_refuse_if(EQUAL, value)]
        lines += _rule(NUMBERS[machine][name], checks)
    return b"".join([*lines, _instruction(RETURN, ALLOW)])


def own_process_program(machine: str) -> bytes:
    """Return a further filter: limits and priorities change only for the calling process.

    b"" for an unknown machine. Calls that name the process by its id instead of 0 are refused, too.
    """
    if machine not in AUDIT:
        return b""
    lines = _first_lines(machine)
    for name, index in NAMES_PROCESS.items():
        checks = [_load_argument(index), _instruction(EQUAL, 0, 1, 0), _instruction(RETURN, REFUSE)]
        lines += _rule(NUMBERS[machine][name], checks)
    return b"".join([*lines, _instruction(RETURN, ALLOW)])


def _first_lines(machine: str) -> list[bytes]:
    """Return the instructions that refuse other machines' calls and load the call's number."""
    return [
        _instruction(LOAD, MACHINE_AT),
        _instruction(EQUAL, AUDIT[machine], 1, 0),
        _instruction(RETURN, REFUSE),
        _instruction(LOAD, NUMBER_AT),
    ]


def _load_argument(index: int) -> bytes:
    """Return the instruction that loads an argument of the call."""
    return _instruction(LOAD, ARGUMENTS_AT + ARGUMENT_BYTES * index)


def _rule(number: int, checks: list[bytes]) -> list[bytes]:
    """Return the instructions that apply the checks to one system call."""
    checks = [*checks, _instruction(RETURN, ALLOW)]
    return [_instruction(EQUAL, number, 0, len(checks)), *checks]
