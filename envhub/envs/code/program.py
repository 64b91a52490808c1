"""Runs the program of an answer, and answers the calls of its tests. It needs Python 3.8.

`harness.py` starts it as text, with the descriptor of a socket as its argument. The program may
change anything here. The harness believes nothing but plain values in JSON. It uses the same
functions to encode and decode them.
"""

import collections
import contextlib
import json
import struct
import sys

MAX_BYTES = 1 << 26
SEQUENCES = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
MAPS = {
    "dict": dict,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
}


def encode(value, refer):
    """Return a value of exact plain types for JSON; `refer` returns {...} for any other."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -(2**53) < value < 2**53 else {"int": hex(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    for name, exact in SEQUENCES.items():
        if kind is exact:
            return {name: [encode(each, refer) for each in value]}
    for name, exact in MAPS.items():
        if kind is exact:
            return {name: [[encode(k, refer), encode(v, refer)] for k, v in value.items()]}
    return refer(value)


def decode(value, resolve):
    """Return the value that `encode` has changed; `resolve` returns that of a reference."""
    if value is None or type(value) in (bool, str, float, int):
        return value
    if type(value) is not dict:
        raise ValueError("no value")
    if "remote" in value or "callback" in value:
        return resolve(value)
    ((name, content),) = value.items()
    if name == "int":
        return int(content, 16)
    if name == "complex":
        return complex(*map(float, content))
    if name in ("bytes", "bytearray"):
        return (bytes if name == "bytes" else bytearray).fromhex(content)
    if name == "range":
        start, stop, step = map(int, content)
        return range(start, stop, step)
    if name in SEQUENCES:
        return SEQUENCES[name]([decode(each, resolve) for each in content])
    pairs = {decode(k, resolve): decode(v, resolve) for k, v in content}
    return pairs if name == "defaultdict" else MAPS[name](pairs)


def send(connection, message):
    """Send a message in types of JSON."""
    body = json.dumps(message).encode()
    connection.sendall(struct.pack(">Q", len(body)) + body)


def receive(connection):
    """Return the next message. Raises: EOFError: the other side has closed."""
    (length,) = struct.unpack(">Q", _receive(connection, 8))
    if length > MAX_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(_receive(connection, length))


def _receive(connection, length):
    parts = []
    while length > 0:
        part = connection.recv(min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class Program:
    """The namespace of an answer, and the objects that its test refers to."""

    def __init__(self, connection):
        self.connection = connection
        self.names = {"__name__": "__main__"}
        self.objects = []

    def encode(self, value):
        def refer(value):
            if isinstance(value, Callback):
                return {"callback": value.number}
            if hasattr(value, "tolist"):
                return self.encode(value.tolist())  # A number or an array of numpy.
            self.objects.append(value)
            return {"remote": len(self.objects) - 1, "iterates": hasattr(value, "__next__")}

        return encode(value, refer)

    def decode(self, value):
        def resolve(reference):
            if "callback" in reference:
                return Callback(self, reference["callback"])
            return self.objects[reference["remote"]]

        return decode(value, resolve)

    def start(self, message):
        exec(compile(message["source"], "program.py", "exec"), self.names)
        with contextlib.suppress(Exception):  # The test has its setup; this one is for imports.
            exec(compile(message["setup"], "setup.py", "exec"), self.names)
        return {"names": {k: self.named(k, v) for k, v in self.names.items() if k[:2] != "__"}}

    def named(self, name, value):
        if isinstance(value, type(json)):
            return {"module": value.__name__, "whole": True}
        module = getattr(value, "__module__", None)
        is_imported = isinstance(module, str) and module not in ("__main__", "builtins")
        if is_imported and getattr(sys.modules.get(str(module)), name, None) is value:
            return {"module": module}
        return {"value": self.encode(value)}

    def answer(self, message):
        op = message["op"]
        if op == "start":
            return self.start(message)
        target = self.objects[message["number"]]
        if op == "call":
            arguments = [self.decode(each) for each in message["arguments"]]
            keywords = {k: self.decode(v) for k, v in message["keywords"].items()}
            value = self.encode(target(*arguments, **keywords))
            changed = [self.encode(a) if type(a) in (list, dict, set) else None for a in arguments]
            return {"value": value, "arguments": changed}
        if op == "get":
            return {"value": self.encode(getattr(target, message["name"]))}
        if op == "set":
            setattr(target, message["name"], self.decode(message["value"]))
            return {}
        for value in target:
            return {"value": self.encode(value)}
        return {"ends": True}

    def serve(self):
        while True:
            message = receive(self.connection)
            try:
                reply = self.answer(message)
            except BaseException as error:  # noqa: BLE001 - An answer may raise anything.
                reply = {"error": type(error).__name__, "text": str(error)[:1000]}
            send(self.connection, reply)


class Callback:
    """A function of the test."""

    def __init__(self, program, number):
        self.program = program
        self.number = number

    def __call__(self, *arguments):
        program = self.program
        sent = [program.encode(each) for each in arguments]
        send(program.connection, {"callback": self.number, "arguments": sent})
        reply = receive(program.connection)
        if "error" in reply:
            raise RuntimeError(reply["error"] + ": " + reply["text"])
        return program.decode(reply["value"])


if __name__ == "__main__":
    import socket

    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.argv = ["program.py"]
    Program(connection).serve()
