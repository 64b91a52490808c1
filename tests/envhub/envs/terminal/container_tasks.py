"""Tasks of different make in the published forms of Harbor and Terminal-Bench, for tests.

Their images are built of Debian alone, and no build needs a network.
"""

from pathlib import Path

BASE = "localhost/debian:12"
HARBOR = "\n".join(
    (
        'schema_version = "1.0"',
        "[metadata]\nauthor_name = 'tests'",
        "[verifier]\ntimeout_sec = 120.0",
        "[agent]\ntimeout_sec = 120.0",
        "[environment]\nbuild_timeout_sec = 600.0\ncpus = 1\nmemory_mb = 256\nstorage_mb = 512\n",
    )
)
BENCH = """instruction: |-
  Do what the tests ask for.
author_name: tests
author_email: tests
difficulty: easy
category: tests
tags: []
parser_name: pytest
max_agent_timeout_sec: 120.0
max_test_timeout_sec: 120.0
run_tests_in_same_shell: false
"""
BENCH_COMPOSE = """services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""
REWARD = "if {}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
# A server without Python and netcat: files that two containers share, and the network's own ports.
SERVER = "#!/usr/bin/perl\n" + (
    "use IO::Socket::INET; my $s = IO::Socket::INET->new(LocalPort => 8000, Listen => 9,"
    " ReuseAddr => 1) or die; while (my $c = $s->accept) { while (<$c>)"
    " { last if /^\\r?\\n/ }"
    ' print $c "HTTP/1.0 200 OK\\r\\n\\r\\nseven\\n"; close $c }\n'
)
FETCH = (
    "exec 3<>/dev/tcp/{}/8000; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; tail -n 1 <&3"  # Bash only.
)


def harbor(
    dockerfile: str, solution: str, test: str, settings: str = "", **files: str | bytes
) -> dict[str, str | bytes]:
    """Return the files of a task of Harbor, by their paths; `__` stands for a slash."""
    return {
        "task.toml": HARBOR + settings,
        "instruction.md": "Do what the tests ask for.\n",
        "environment/Dockerfile": f"FROM {BASE}\n{dockerfile}\n",
        "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
        "tests/test.sh": f"#!/bin/bash\n{test}",
        **{name.replace("__", "/"): content for name, content in files.items()},
    }


def bench(dockerfile: str, solution: str, tests: str, **files: str) -> dict[str, str | bytes]:
    """Return the files of a task of Terminal-Bench, by their paths."""
    return {
        "task.yaml": BENCH,
        "Dockerfile": f"FROM {BASE}\n{dockerfile}\n",
        "docker-compose.yaml": BENCH_COMPOSE,
        "solution.sh": f"#!/bin/bash\n{solution}\n",
        "run-tests.sh": f"#!/bin/bash\n{tests}\n",
        **{name.replace("__", "/"): content for name, content in files.items()},
    }


TASKS: dict[str, dict[str, str | bytes]] = {
    "no-python": harbor(
        "WORKDIR /app\nRUN ! command -v python3 && echo 3 4 > numbers",
        "read a b < numbers; echo $((a + b)) > sum",
        REWARD.format('[ "$(cat /app/sum)" = 7 ]'),
    ),
    "user": harbor(
        "RUN useradd --create-home bob && mkdir /data && echo secret > /data/closed\n"
        "RUN chmod 700 /data\nUSER bob\nWORKDIR /home/bob",
        "id -un > who; cat /data/closed > copy 2>/dev/null || true",
        REWARD.format('[ "$(cat ~/who)" = bob ] && [ ! -s ~/copy ] && [ -O ~/who ]'),
    ),
    "users-of-settings": harbor(
        "RUN useradd --create-home bob && mkdir /work && chown bob /work\nWORKDIR /work",
        "id -un > who",
        REWARD.format('[ "$(id -un) $(cat who)" = "root bob" ]'),
        settings="",
    )
    | {
        "task.toml": HARBOR.replace("[agent]", '[agent]\nuser = "bob"').replace(
            "[verifier]", '[verifier]\nuser = "root"'
        )
    },
    "installed-tests": harbor(
        # The package comes with the tests, as a verifier that brings its own programs.
        "WORKDIR /app\nRUN mkdir /pool && cd /pool && mkdir -p tool/DEBIAN tool/usr/bin"
        " && printf 'Package: checker\\nVersion: 1\\nArchitecture: all\\nMaintainer: t\\n"
        "Description: t\\n' > tool/DEBIAN/control"
        " && printf '#!/bin/sh\\n[ \"$(cat /app/x)\" = right ]\\n' > tool/usr/bin/checker"
        " && chmod 755 tool/usr/bin/checker && dpkg-deb --build tool checker.deb && rm -r tool",
        "echo right > x",
        "dpkg --install /pool/checker.deb >/dev/null || exit 9\n" + REWARD.format("checker"),
    ),
    "read-only-parts": harbor(
        "WORKDIR /app\nRUN echo fixed > rule",
        "cat /frozen/given > out; echo x > /frozen/given || echo refused >> out\necho m > /t/x",
        REWARD.format('[ "$(cat out)" = "$(printf "kept\\nrefused")" ] && [ "$(cat /t/x)" = m ]'),
        environment__frozen__given="kept\n",
        **{
            "environment__docker-compose.yaml": "services:\n  main:\n    volumes:\n"
            "      - ./frozen:/frozen:ro\n    tmpfs: /t\n"
        },
    ),
    "binary-answer": harbor(
        "WORKDIR /app\nRUN printf 'A' > letter",
        r"printf '\000\001\377\r\n' > answer.bin; head -c 100000 /dev/zero >> answer.bin",
        REWARD.format(
            "cmp -n 5 answer.bin /tests/expected.bin && [ $(wc -c < answer.bin) = 100005 ]"
        ),
        tests__expected__bin=b"",
    ),
    "windows-line-ends": {},
    "exit-codes": harbor(
        "WORKDIR /app\nRUN printf '#!/bin/sh\\nexit 1\\n' > run && chmod 755 run",
        "printf '#!/bin/sh\\n[ $# -eq 2 ] && exit 42\\nexit 3\\n' > run",
        "./run a b; [ $? -eq 42 ] || exit 1\n./run; [ $? -eq 3 ]\n",
    ),
    "deep-folder": harbor(
        "WORKDIR /srv/a\nWORKDIR b/c/d\nCOPY seed seed",
        "mkdir -p e/f && cp seed e/f/seed && pwd > e/where",
        REWARD.format('[ "$(cat e/where)" = /srv/a/b/c/d ] && cmp seed e/f/seed'),
        environment__seed="seed\n",
    ),
    "variables": harbor(
        'WORKDIR /app\nENV GREETING="good  day" EMPTY="" PATH="/opt/tools:$PATH"\n'
        "RUN mkdir /opt/tools && printf '#!/bin/sh\\necho \"$GREETING:$EMPTY:$LEVEL\"\\n'"
        " > /opt/tools/greet && chmod 755 /opt/tools/greet",
        'greet > out; echo "$KEY" >> out',
        REWARD.format('[ "$(cat out)" = "$(printf "good  day::3\\nvalue")" ] && [ $ONLY = t ]'),
        settings='[environment.env]\nLEVEL = "3"\n[solution.env]\nKEY = "value"\n'
        '[verifier.env]\nONLY = "t"\n',
    ),
    "entry-point": harbor(
        'WORKDIR /app\nRUN printf \'#!/bin/sh\\necho "began $1" > /app/log\\nexec "$@"\\n\''
        ' > /start && chmod 755 /start\nENTRYPOINT ["/start"]',
        "cat log > copy",
        REWARD.format('[ "$(cat copy)" = "began sh" ]'),
    ),
    "stages": {},
    "service": harbor(
        "WORKDIR /app",
        FETCH.format("api") + " > answer; cat /shared/ready >> answer",
        REWARD.format('[ "$(cat answer)" = "$(printf "seven\\nyes")" ]'),
        environment__api__Dockerfile=f"FROM {BASE}\nCOPY serve /serve\nRUN chmod 755 /serve\n"
        'CMD ["/serve"]\n',
        environment__api__serve=SERVER,
        **{
            "environment__docker-compose.yaml": "services:\n"
            "  main:\n    depends_on: {api: {condition: service_healthy}}\n"
            "    volumes: ['common:/shared']\n"
            "  api:\n    build: {context: ./api}\n    volumes: ['common:/shared']\n"
            "    depends_on: {seed: {condition: service_completed_successfully}}\n"
            "    healthcheck: {test: 'test -e /shared/ready', interval: 1s, retries: 30}\n"
            f"  seed:\n    image: {BASE}\n    command: sh -c 'echo yes > /shared/ready'\n"
            "    volumes: ['common:/shared']\n"
            "volumes: {common: }\n"
        },
    ),
    "health-check": harbor(
        "WORKDIR /app\nRUN printf '#!/bin/sh\\n(sleep 2; echo up > /run/state) &\\nexec \"$@\"\\n'"
        ' > /start && chmod 755 /start\nENTRYPOINT ["/start"]\n'
        "HEALTHCHECK --interval=1s --retries=60 CMD test -e /run/state",
        "cp /run/state .",
        REWARD.format('[ "$(cat state)" = up ]'),
    ),
    "server-of-the-agent": harbor(
        "WORKDIR /app\nCOPY serve /app/serve\nRUN chmod 755 serve",
        "nohup ./serve >/dev/null 2>&1 &",
        "sleep 1\n" + REWARD.format('[ "$(' + FETCH.format("127.0.0.1") + ')" = seven ]'),
        environment__serve=SERVER,
    ),
    "separate-verifier": harbor(
        "WORKDIR /app\nRUN mkdir /out",
        "mkdir -p /out/parts && echo 3 > /out/parts/a && echo 4 > /out/b && echo 5 > lost"
        " && ln -s /tests/answer /out/link && cp b lost 2>/dev/null; echo own > /logs/artifacts/c",
        REWARD.format(
            '[ "$(cat /out/parts/a /out/b /logs/artifacts/c)" = "$(cat answer)" ]'
            ' && [ ! -e /app/lost ] && [ ! -e /out/link ] && [ "$PLACE" = verifier ]'
        ),
        tests__Dockerfile=f"FROM {BASE}\nENV PLACE=verifier\nCOPY . /tests\nWORKDIR /tests\n",
        tests__answer="3\n4\nown\n",
    ),
    "separate-copy": harbor(
        "WORKDIR /app\nRUN echo 1 > a && chmod 644 a",
        "echo 2 > b; echo 9 > a",
        REWARD.format('[ "$(cat a b /tests/c)" = "$(printf "1\\n2\\n3")" ]'),
        tests__c="3\n",
    ),
    "bench": bench(
        "WORKDIR /app\nRUN echo 2 > a",
        "cp a b",
        'cmp /app/a /app/b && [ "$(cat $TEST_DIR/given)" = given ]',
        tests__given="given\n",
    ),
    "bench-services": bench(
        "WORKDIR /app",
        FETCH.format("server") + " > answer",
        '[ "$(cat /app/answer)" = seven ]',
        server__serve=SERVER,
        server__Dockerfile=f"FROM {BASE}\nCOPY serve /serve\n",
    )
    | {
        "docker-compose.yaml": BENCH_COMPOSE + "    depends_on:\n      - server\n"
        "  server:\n    build:\n      context: ./server\n"
        "    container_name: ${T_BENCH_TASK_DOCKER_NAME_PREFIX}__server\n"
        "    command: perl /serve\n    ports:\n      - '8000:8000'\n"
        "    healthcheck: {test: ['CMD-SHELL', 'grep -q :1F40 /proc/net/tcp'], interval: 1s}\n"
    },
}
for name, artifacts in (("separate-verifier", '["/out"]'), ("separate-copy", '["/app/b"]')):
    TASKS[name]["task.toml"] = f"artifacts = {artifacts}\n" + HARBOR.replace(
        "[verifier]", '[verifier]\nenvironment_mode = "separate"'
    )
TASKS["binary-answer"]["tests/expected.bin"] = b"\x00\x01\xff\r\n"
TASKS["binary-answer"].pop("tests/expected/bin", None)
TASKS["windows-line-ends"] = {
    name: content.replace("\n", "\r\n") if isinstance(content, str) else content
    for name, content in harbor(
        "WORKDIR /app\nRUN echo text > a.txt",
        "if true; then\n  cp a.txt b.txt\nfi",
        "if cmp a.txt b.txt; then r=1\nelse r=0\nfi\necho $r > /logs/verifier/reward.txt\n",
    ).items()
}
TASKS["stages"] = harbor(
    "COPY --from=maker /made/tool /usr/local/bin/tool\nWORKDIR /app\nRUN test ! -e /made",
    "tool > out",
    REWARD.format('[ "$(cat out)" = made ]'),
) | {
    "environment/Dockerfile": f"FROM {BASE} AS maker\nARG WORD=made\n"
    'RUN mkdir /made && echo "#!/bin/sh\\necho $WORD" > /made/tool && chmod 755 /made/tool\n'
    f"FROM {BASE}\nCOPY --from=maker /made/tool /usr/local/bin/tool\nWORKDIR /app\n"
    "RUN test ! -e /made\n"
}


def write_task(folder: Path, name: str) -> Path:
    """Write a task below a folder of tasks, and return the folder of the task."""
    for file, content in TASKS[name].items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name
