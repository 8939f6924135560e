"""Stub of `verifiers.clients`: asks an OpenAI-compatible server for a chat completion."""

import asyncio
import json
from types import SimpleNamespace
from urllib.parse import urlsplit

from verifiers.errors import EmptyModelResponseError


class Client:
    """A client; the host wraps its two methods for responses."""

    def __init__(self, url):
        self.url = urlsplit(url)

    async def ask(self, messages, model, sampling):
        """The text of the answer."""
        response = await self._post({"model": model, "messages": messages, **sampling})
        await self.raise_from_native_response(response)
        return (await self.from_native_response(response)).message.content

    async def raise_from_native_response(self, response):
        if not response["choices"][0]["message"]["content"]:
            raise EmptyModelResponseError("no words")

    async def from_native_response(self, response):
        return SimpleNamespace(
            message=SimpleNamespace(tool_calls=None, content=response["choices"][0]["message"]["content"])
        )

    async def close(self):
        """Does nothing: every request has its own connection."""

    async def _post(self, body):
        data = json.dumps(body).encode()
        head = [f"POST {self.url.path}/chat/completions HTTP/1.1", f"Host: {self.url.netloc}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        reader, writer = await asyncio.open_connection(self.url.hostname, self.url.port)
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + data)
            answer, _, text = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        if b" 200 " not in answer.partition(b"\r\n")[0]:
            raise RuntimeError(f"the model's server says {text.decode()[:200]}")
        return json.loads(text)


def resolve_client(config):
    """The client of a `ClientConfig`."""
    return Client(config.api_base_url)
