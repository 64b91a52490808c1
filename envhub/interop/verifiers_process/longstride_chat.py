"""A harness of verifiers: a chat loop with the task's tools, in the player's own process."""

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyright: ignore[reportMissingImports]

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Requests the model until its reply calls no tool; starts no program and offers no shell."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play one segment of the conversation."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        limit = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": limit} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, links = await connect_mcp({"mcpServers": servers}, stack)
            # The policy may answer at any time; the end of the episode is the deadline.
            client = httpx.AsyncClient(timeout=None, trust_env=False)
            http = await stack.enter_async_context(client)
            while True:
                body = {"model": ctx.model, "messages": messages}
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    json=body | ({"tools": tools} if tools else {}),
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if answer.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    name = call["function"]["name"]
                    arguments = json.loads(call["function"]["arguments"])
                    content = await call_mcp(links, dispatch, name, arguments)
                    answered = {"role": "tool", "tool_call_id": call["id"], "content": content}
                    messages.append(answered | {"name": name})
