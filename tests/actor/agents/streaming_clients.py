"""The clients of OpenAI and Anthropic, which read streams of the agents' endpoint in a process."""

import asyncio
import json
import logging

from tests.venvs import CLIENTS, python_with

logger = logging.getLogger(__name__)
# Prints the seconds to the first event with content, those to the end, and the number of events.
PROGRAM = """
import json, sys, time
import anthropic, openai
url, key, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
gpt, claude = openai.OpenAI(base_url=url + "/v1", api_key=key), anthropic.Anthropic(
    base_url=url, api_key=key)
messages = [{"role": "user", "content": "go"}]
how = {"model": "policy", "stream": True}
def timed(ask):
    started, first, number = time.monotonic(), 0.0, 0
    for event in ask():
        number += 1
        has_content = "delta" in getattr(event, "type", "") or getattr(event, "choices", None)
        first = first or has_content and time.monotonic() - started
    return first, time.monotonic() - started, number
requests = {
    "chat": lambda: gpt.chat.completions.create(messages=messages, **how),
    "responses": lambda: gpt.responses.create(input="go", **how),
    "messages": lambda: claude.messages.create(messages=messages, max_tokens=limit, **how),
}
for ask in requests.values():  # The first request opens a connection.
    timed(ask)
print(json.dumps({name: timed(ask) for name, ask in requests.items()}), flush=True)
with gpt.chat.completions.create(messages=messages, **how) as stream:
    next(iter(stream))
"""


async def timings(
    url: str, key: str, *, max_tokens: int = 400
) -> dict[str, tuple[float, float, int]]:
    """Return API -> seconds to the first content, seconds to the end, and number of events.

    Each API is asked twice, and one more stream is left after its first event.
    """
    python = await asyncio.to_thread(python_with, *CLIENTS)
    program = await asyncio.create_subprocess_exec(
        *(python, "-c", PROGRAM, url, key, f"{max_tokens}"), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await program.communicate()
    assert program.returncode == 0
    timed = json.loads(output)
    for name, (first_s, whole_s, number) in timed.items():
        text = "%s: first content %.3f s, end %.3f s, events %d"
        logger.info(text, name, first_s, whole_s, number)
    return timed
