"""One streamed request to any server with OpenAI's API, timed where its client sees it.

Owns what goes over the wire and what becomes of it; when requests are sent is for load.py. A server is not trusted:
what it sends may be late, endless, cut off or no JSON, and each of these is a kind of error, never an exception.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from expertserve.errors import ExpertServeError

_LONGEST_LINE = 1 << 20
_MOST_TOKENS = 1 << 30  # of a prompt; a count beyond it is none
_CONNECT_S = 10.0
Message = dict[str, str]


class _NotUnderstoodError(Exception):
    """The server sent what is no answer; the text says what."""


@dataclass(slots=True)
class Answer:
    """What became of one request; times are of `perf_counter`.

    Attributes:
        times: when each event with text came; an event may bring several tokens.
        prompt_tokens, cached_tokens: as the server counts them, the latter those that it did not compute anew; None
            where it does not say.
        output_tokens: as the server counts them.
        counted_by_events: the server does not count them, so each event with text counts as one.
        error: its kind; None for an answer that came whole.
        detail: what was wrong, for people.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_by_events: bool = False
    ended: float = 0.0
    error: str | None = None
    detail: str = ""

    @property
    def first_token_ms(self) -> float:
        return 1000 * (self.times[0] - self.sent)

    @property
    def intervals_ms(self) -> list[float]:
        return [1000 * (after - before) for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def mean_interval_ms(self) -> float:
        """Between two tokens, however many came in one event."""
        return 1000 * (self.times[-1] - self.times[0]) / max(1, self.output_tokens - 1)

    def fail(self, kind: str, detail: object) -> None:
        self.error, self.detail = kind, " ".join(str(detail).split())[:200]


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked of which server.

    Attributes:
        url: without /v1.
        chat: messages go to chat/completions; else their text to completions.
        options: fields of the request that not every server knows.
    """

    http: httpx.AsyncClient
    url: str
    model: str
    chat: bool
    token_timeout_s: float
    options: Mapping[str, Any] = field(default_factory=dict)

    async def ask(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        """Streams the answer to `messages`; whatever the server does, there is an Answer."""
        answer = Answer(perf_counter())
        try:
            async with asyncio.timeout(self.token_timeout_s) as limit:
                await self._stream(answer, messages, max_tokens, limit)
        except TimeoutError:
            answer.fail("time-out", f"no token for {self.token_timeout_s:g} s")
        except httpx.ConnectError as error:
            answer.fail("no connection", error)
        except httpx.ConnectTimeout:
            answer.fail("no connection", f"none within {_CONNECT_S:g} s")
        except httpx.HTTPError as error:
            answer.fail("cut off", error or type(error).__name__)
        except _NotUnderstoodError as error:
            answer.fail("not understood", error)
        answer.ended = perf_counter()
        if not answer.output_tokens:
            answer.output_tokens, answer.counted_by_events = len(answer.times), True
        return answer

    async def first_model(self) -> str:
        """The first name of those that the server lists.

        Raises:
            ExpertServeError: it lists none, which says whether it is a server with OpenAI's API at all.
        """
        address = f"{self.url}/v1/models"
        try:
            async with asyncio.timeout(self.token_timeout_s):
                response = await self.http.get(address)
        except (httpx.HTTPError, TimeoutError) as error:
            raise ExpertServeError(f"{address}: {self._told(error)}; is a server there?") from None
        if response.status_code != 200:
            said = _refusal(response.status_code, response.text)
            raise ExpertServeError(f"{address}: HTTP {response.status_code}: {said[:200]}; is this OpenAI's API?")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ExpertServeError(f"{address} names no model: name MODEL, or is this not OpenAI's API?") from None

    async def dead(self) -> str | None:
        """Why there is no answer to the simplest question; None where there is one, whatever it says."""
        try:
            async with asyncio.timeout(self.token_timeout_s):
                await self.http.get(f"{self.url}/v1/models")
        except (httpx.HTTPError, TimeoutError) as error:
            return self._told(error)
        return None

    def _told(self, error: Exception) -> str:
        silent = f"no answer for {self.token_timeout_s:g} s" if isinstance(error, TimeoutError) else ""
        return silent or str(error) or type(error).__name__

    async def _stream(
        self, answer: Answer, messages: Sequence[Message], max_tokens: int, limit: asyncio.Timeout
    ) -> None:
        said: dict[str, Any] = (
            {"messages": messages} if self.chat else {"prompt": "\n".join(message["content"] for message in messages)}
        )
        body = {"model": self.model, **said, "max_tokens": max_tokens, "temperature": 0, "stream": True, **self.options}
        path = "chat/completions" if self.chat else "completions"
        finished = False
        async with self.http.stream("POST", f"{self.url}/v1/{path}", json=body) as response:
            if response.status_code != 200:
                answer.fail(f"HTTP {response.status_code}", _refusal(response.status_code, await _beginning(response)))
                return
            async for event in _events(response):
                if event is None:
                    finished = True
                    break
                if event.get("error") is not None:
                    answer.fail("error event", json.dumps(event["error"]))
                    return
                text, ends = _piece(event)
                if text:
                    answer.text += text
                    answer.times.append(perf_counter())
                    limit.reschedule(asyncio.get_running_loop().time() + self.token_timeout_s)
                finished = finished or ends
                _count(event, answer)
                if max(answer.output_tokens, len(answer.times) / 4 - 16) > max_tokens:  # a token may be several events
                    tokens = f"{answer.output_tokens} tokens" if answer.output_tokens else f"{len(answer.times)} events"
                    raise _NotUnderstoodError(f"{tokens} where {max_tokens} tokens were asked")
        if not finished:
            answer.fail("cut off", "the stream ended before the answer did")
        elif not answer.times:
            answer.fail("no token", "an answer without text")


def new_http(key: str | None) -> httpx.AsyncClient:
    """A client with as many connections as there are requests; kept ones are let go before most servers do it."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
        headers={b"accept-encoding": b"identity"} | ({b"authorization": f"Bearer {key}".encode()} if key else {}),
        trust_env=False,
    )


async def _beginning(response: httpx.Response) -> str:
    """Of a body that may have no end."""
    async for part in response.aiter_raw(4096):
        return part.decode(errors="replace")
    return ""


def _refusal(status: int, body: str) -> str:
    """What a refusal says, as an error object of OpenAI's API or as it is, and how to give the key that it may want."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        said = body
    return f"--server-key or EXPERTSERVE_SERVER_KEY gives the API key: {said}" if status in (401, 403) else said


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """JSON objects of a stream of server-sent events; None is its `[DONE]`."""
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise _NotUnderstoodError(f"content-type {kind!r} in place of a stream")
    async for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            yield None
            continue
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise _NotUnderstoodError(f"an event that is no JSON object: {data[:80].decode(errors='replace')}")
        yield event


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for part in response.aiter_raw():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
        if len(rest) > _LONGEST_LINE:
            raise _NotUnderstoodError(f"a line of more than {_LONGEST_LINE} bytes")
    if rest:
        yield rest


def _piece(event: Mapping[str, Any]) -> tuple[str, bool]:
    """The text an event brings, reasoning included, and whether it ends the answer."""
    choices = event.get("choices")
    if not choices:
        return "", False
    choice = choices[0] if isinstance(choices, list) else None
    if not isinstance(choice, dict):
        raise _NotUnderstoodError(f"choices that are none: {str(choices)[:80]}")
    delta = choice.get("delta") or {"content": choice.get("text")}
    if not isinstance(delta, dict):
        raise _NotUnderstoodError(f"a delta that is no object: {str(delta)[:80]}")
    parts = [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
    return "".join(part for part in parts if isinstance(part, str)), choice.get("finish_reason") is not None


def _count(event: Mapping[str, Any], answer: Answer) -> None:
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return
    details = usage.get("prompt_tokens_details")
    answer.prompt_tokens = _number(usage, "prompt_tokens") or answer.prompt_tokens
    answer.output_tokens = _number(usage, "completion_tokens") or answer.output_tokens
    if isinstance(details, dict):
        answer.cached_tokens = _number(details, "cached_tokens")


def _number(counts: Mapping[str, Any], name: str) -> int | None:
    value = counts.get(name)
    return value if isinstance(value, int) and 0 <= value < _MOST_TOKENS else None
