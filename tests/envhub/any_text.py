"""Texts that a policy can sample, and a hub over real HTTP to which they are sent."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actor.rollout.env_client import HubClient, HubSession, HubStepResult
from common.config.env import RemoteOptions
from common.config.envhub import EnvhubSection
from common.config.envs import EnvsSection
from common.errors import EnvError
from common.http.serving import QuietSocket, limited_protocol
from envhub import main

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
LONG = 250_000  # characters
DEEP = 100_000  # levels of JSON

TEXTS = {
    "empty": "",
    "spaces": " \t\n\r\x0b\x0c\x85\xa0\u3000 ",
    "many spaces": " " * LONG,
    "many lines": "\n" * LONG,
    "line separators": "go\u2028to\u2029the\x1c\x1d\x1edoor",
    "nul": "go\0to\0",
    "only nul": "\0" * 1000,
    "all controls": "".join(map(chr, [*range(32), *range(127, 160)])),
    "ansi": "\x1b[2J\x1b[1;31mred\x1b]0;title\x07\x9b31m",
    "halves of characters": "\ud83d \ude00 \ud800\ud800",
    "half": "\ud800",
    "replaced bytes": "\ufffd" * 300,
    "byte order mark": "\ufefflook around\ufeff",
    "no characters": "\uffff\ufffe\U0010ffff",
    "right to left": "\u202egnihton\u202c \u2067\u05e9\u05dc\u05d5\u05dd\u2069 \u0645\u0631\u062d",
    "zero width": "l\u200bo\u200do\u2060k\ufeff",
    "combining": "e" + "\u0301" * 50_000,
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 1000,
    "other digits": "\u0663\u0967\uff11\u00b2\u2460\u0bf0",
    "digits": "9" * 5000,
    "digits in brackets": f"click [{'9' * 5000}]",
    "zeros and one": "0" * 5000 + "1",
    "negative": "-" + "9" * 5000,
    "fraction": "0." + "9" * 5000 + "e" + "9" * 5000,
    "nan": "NaN",
    "infinity": "-Infinity",
    "json nan": '{"tool": "submit", "arguments": {"answer": NaN, "n": 1e999, "m": -Infinity}}',
    "json digits": f'{{"tool": "submit", "arguments": {{"answer": {"9" * 5000}}}}}',
    "json large number": f'{{"tool": "submit", "arguments": {{"answer": {"9" * 4000}}}}}',
    "json lists": "[" * DEEP,
    "json objects": '{"a":' * DEEP,
    "json closed lists": "[" * DEEP + "]" * DEEP,
    "json deep": f'{{"tool": "submit", "arguments": {{"answer": {"[" * 500 + "]" * 500}}}}}',
    "json keys": "{" + ",".join(f'"{i}":{i}' for i in range(50_000)) + "}",
    "json same key": "{" + ",".join('"action":1' for _ in range(50_000)) + "}",
    "json half": '{"tool": "submit", "arguments": {"answer": "\\ud800"}}',
    "json null": "null",
    "think": "<think>" * 20_000,
    "thought": "<think>\nAction: a\n</think>\n\nlook",
    "tool call": '<tool_call>\n{"name": "act", "arguments": {"action": "look"}}\n</tool_call>',
    "control tokens": "<|im_end|><|im_start|>user\nyou win<|endoftext|></s>[INST]",
    "xml": '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "&b;&b;">]><a>&b;</a>',
    "searches": "<search>" * 50_000,
    "search": f"<search>{'a ' * (LONG // 2)}</search>",
    "search operators": '<search>AND OR NOT ( " * ^ ~ \0 \ud800</search>',
    "fences": "```" * 50_000,
    "fence": "```" + " " * LONG,
    "actions": "Action:" * 50_000,
    "react": "Thought: none\nAction: Action: look",
    "long": "x" * LONG,
    "long words": "look " * (LONG // 5),
    "long Chinese": "\u5b57" * LONG,
    "long controls": "\x01" * LONG,
    "long quotes": '"' * LONG,
    "format": "%s%n{0}{}${x}`id`$(id)",
    "path": "../../../etc/passwd",
    "sql": "'; DROP TABLE items; --",
    "sql parentheses": f"```sql\nSELECT {'(' * 100_000}1{')' * 100_000}\n```",
    "sql long": f"```sql\nSELECT {'1+' * 300_000}1\n```",
    "sql comments": "```sql\n" + "/*" * 300_000 + "\n```",
    "get": f"get {'9' * 5000} log",
    "craft spaces": "craft 1 stick using" + " " * LONG + "1 log",
    "craft parts": "craft 1 stick using " + "1 log, " * 100_000,
    "goto": f"goto [http://{'a' * 100_000}]",
    "goto spaces": "goto [" + "] " * 100_000 + "x",
    "type": f"type [1] [{'a' * 100_000}] [1]",
    "stop": f"stop [{'9' * 5000}]",
    "keys": f"press [{'ctrl+' * 1000}a]",
    "points": f"mouse_drag {'[1,1] ' * 10_000}",
}
WAYS: dict[str, Callable[[str], str]] = {  # Variants of a valid action's text.
    "spaces behind": lambda action: action + " " * LONG + "x",
    "spaces before": lambda action: "\n" + " " * LONG + action + "x",
    "spaces between": lambda action: action.replace(" ", " " * (LONG // 4)) + "x",
    "spaces after each letter": lambda action: (" " * 1000).join(action) + "x",
    "many times": lambda action: f"{action}\n" * 20_000,
    "nul behind": lambda action: action + "\0",
    "mark before": lambda action: "\ufeff" + action,
    "wide letters": lambda action: "".join(
        chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in action
    ),
    "digits": lambda action: "".join("9" * 5000 if c.isdigit() else c for c in action),
    "brackets": lambda action: action + "[" * 100_000 + "]" * 100_000,
}
MAX_LIKE = 4  # actions of different first words, from which texts are made
# What an invalid action is answered with, in the words of one environment or another.
REASON = re.compile(
    r"invalid|not\b|no (change|table|tool|known|such|json|element|letter)|could|can't|cannot|wrong"
    r"|must|at most|more than|longer|refused|error|unrecognized|which number|nothing happens"
    r"|beyond|syntax|near|incomplete|failed|too |is empty|known actions|ambiguous",
    re.IGNORECASE,
)


@contextmanager
def serving(
    *names: str, remote: RemoteOptions | None = None, section: EnvhubSection | None = None
) -> Iterator[str]:
    """Yield the address of a hub as a run starts it."""
    app, sessions = main.build(
        [*names],
        section or EnvhubSection(),
        token=None,
        options=EnvsSection(),
        remote=remote or RemoteOptions(),
    )
    with socket.create_server((HOST, 0)) as listener:
        http = limited_protocol(sessions.counts, app.state.refusals)
        config = main.uvicorn.Config(
            app, loop="uvloop", http=http, ws=QuietSocket, log_config=None, access_log=False
        )
        server = main.DrainingServer(config, sessions)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://{HOST}:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


class Playing:
    """One environment, in a session that is opened again where an episode ends."""

    def __init__(self, hub: HubClient, env: str, item: str, *, is_quick: bool) -> None:
        self._hub, self._env, self._item, self._is_quick = hub, env, item, is_quick
        self._session: HubSession | None = None

    async def session(self) -> HubSession:
        """Return the session, a new one where the last has ended."""
        if self._session is None:
            self._session = await self._hub.open(
                self._env, self._item, seed=0, style="compact", is_quick=self._is_quick
            )
        return self._session

    async def legal(self) -> list[str]:
        """Return actions that are executed now."""
        return (await (await self.session()).hint()).valid_actions

    async def step(self, text: str) -> HubStepResult:
        """Return what a text leads to."""
        result = await (await self.session()).step(text)
        if result.done:
            await self.close()
        return result

    async def close(self) -> None:
        """Give the session back."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


async def check_texts(url: str, env: str, *, has_reasons: bool = True) -> None:
    """Assert that each text is an action, and that the same session is played on after it.

    Args:
        has_reasons: whether the environment says why it refuses an action.
    """
    async with HubClient(url, token=None, timeout_s=TIMEOUT_S) as hub:
        entry = (await hub.request("GET", "/v1/envs", None))[env]
        item = f"{next(iter(entry['subsets']))}-train-0"
        for is_quick in {False, bool(entry["is_quick"])}:
            playing = Playing(hub, env, item, is_quick=is_quick)
            for name, text in (await _texts(playing)).items():
                told = await _check_text(playing, f"{env}: {name}", text)
                assert not has_reasons or REASON.search(told), f"{env}: {name}: {told!r}"
            await playing.close()


async def _texts(playing: Playing) -> dict[str, str]:
    """Return the texts, and those like actions of the environment."""
    by_word = {action.split()[0]: action for action in await playing.legal() if action.split()}
    like = {
        f"{way} of {action[:40]}": make(action)
        for action in [*by_word.values()][:MAX_LIKE]
        for way, make in WAYS.items()
    }
    return TEXTS | like


async def _check_text(playing: Playing, name: str, text: str) -> str:
    """Return what an invalid action is answered with, a word for a reason of any other."""
    try:
        result = await playing.step(text)
        assert type(result.is_valid) is bool, name
        if result.is_valid or result.done:
            return "not invalid"
        legal = [action for action in await playing.legal() if "stop" not in action]
        if legal:
            assert (await playing.step(legal[0])).is_valid, f"{name}: then {legal[0]!r}"
        return result.observation
    except EnvError as error:
        raise AssertionError(f"{name}: {error}") from error
