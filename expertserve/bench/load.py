"""`expertserve bench --serve`: loads a running server as clients do, and says what they saw.

Owns when requests are sent. A closed arrival keeps a number of requests under way; a chat-like one starts
conversations at random moments (a Poisson process), each of turns with pauses between and a history that grows.
Prompts are drawn anew each time, so that no server answers from a prefix that an earlier run left.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from time import perf_counter, thread_time
from typing import Any

from expertserve import __version__
from expertserve.bench.load_client import Answer, Message, Target, new_http
from expertserve.bench.load_figures import COLUMNS, Limits, figures, remarks, void_reason
from expertserve.bench.results import Row, publish, table
from expertserve.config import Settings
from expertserve.errors import ExpertServeError, InterruptError

_OPTIONS: tuple[dict[str, Any], ...] = (
    {"stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}},
    {},
)
_WORDS = (
    "river stone music garden winter letter bridge silver market window forest doctor paper island summer engine "
    "mother yellow simple travel number corner morning danger planet copper village history flower kitchen science "
    "thunder pocket season animal question mountain library machine evening harbour family purple weather"
).split()
_FEW, _MANY = 8, 64  # words of two prompts that tell how many tokens a word is
_TOKENS_A_WORD = 1.3  # where a server does not count


@dataclass(frozen=True, slots=True)
class Prompts:
    """Messages of `words` random words."""

    draws: Random
    words: int

    def message(self) -> Message:
        return {"role": "user", "content": " ".join(self.draws.choices(_WORDS, k=self.words))}


@dataclass(frozen=True, slots=True)
class Clients:
    """Those who ask a server, in the number and length that settings say."""

    target: Target
    prompts: Prompts
    settings: Settings

    async def closed(self, concurrency: int) -> list[Answer]:
        """Answers to requests of which `concurrency` are under way until none is left to send."""
        waiting = iter(range(self.settings.requests))

        async def client() -> list[Answer]:
            return [await self._ask([self.prompts.message()]) for _ in waiting]

        answers = await asyncio.gather(*(client() for _ in range(concurrency)))
        return [answer for each in answers for answer in each]

    async def chat(self, rate: float) -> list[Answer]:
        """Answers in conversations of which `rate` a second start, whether or not earlier ones are done."""
        turns, left = self.settings.turns, self.settings.requests
        started: list[asyncio.Task[list[Answer]]] = []
        async with asyncio.TaskGroup() as conversations:
            while left > 0:
                if started:
                    await asyncio.sleep(self.prompts.draws.expovariate(rate))
                started.append(conversations.create_task(self._converse(min(turns, left))))
                left -= turns
        return [answer for each in started for answer in each.result()]

    async def _converse(self, turns: int) -> list[Answer]:
        """One that gets no answer says no more."""
        answers: list[Answer] = []
        history: list[Message] = []
        pause = self.settings.think_time
        for turn in range(turns):
            if turn and pause:
                await asyncio.sleep(self.prompts.draws.expovariate(1 / pause))
            history.append(self.prompts.message())
            answers.append(await self._ask(history))
            if answers[-1].error is not None:
                break
            history.append({"role": "assistant", "content": answers[-1].text})
        return answers

    async def _ask(self, messages: list[Message]) -> Answer:
        return await self.target.ask(messages, self.settings.decode_tokens)


async def prepare(target: Target, settings: Settings) -> Clients:
    """Finds out what the server understands and how many words make a prompt, and warms it up with a whole request.

    Raises:
        ExpertServeError: the server does not answer a request.
    """
    draws = Random()
    target = replace(target, model=settings.model or await target.first_model())
    for options in _OPTIONS:
        target = replace(target, options=options)
        few = await target.ask([Prompts(draws, _FEW).message()], 8)
        if few.error not in ("HTTP 400", "HTTP 422"):
            break
    _refuse(target, few)
    many = await target.ask([Prompts(draws, _MANY).message()], 8)
    _refuse(target, many)
    a_word, around = _TOKENS_A_WORD, 0.0
    if few.prompt_tokens and many.prompt_tokens and many.prompt_tokens > few.prompt_tokens:
        a_word = (many.prompt_tokens - few.prompt_tokens) / (_MANY - _FEW)
        around = few.prompt_tokens - _FEW * a_word
    prompts = Prompts(draws, max(1, round((settings.prompt_tokens - around) / a_word)))
    _refuse(target, await target.ask([prompts.message()], settings.decode_tokens))
    return Clients(target, prompts, settings)


def _refuse(target: Target, answer: Answer) -> None:
    if answer.error not in (None, "no token"):
        said = f"{answer.error}: {answer.detail}"
        raise ExpertServeError(f"{target.url} does not answer a first request: {said}")


async def _measure(settings: Settings, result: dict[str, Any]) -> None:
    """Fills `result`; a row that is left before its end says so."""
    limits = Limits(settings.slo_ttft, settings.slo_itl)
    chat, asked = settings.arrival == "chat", settings.decode_tokens
    async with new_http(settings.server_key) as http:
        chats = settings.endpoint == "chat"
        clients = await prepare(Target(http, result["server"], "", chats, settings.token_timeout), settings)
        result |= {"model": clients.target.model, "prompt_words": clients.prompts.words}
        for level in settings.rate if chat else settings.concurrency:
            row: dict[str, Any] = {"rate" if chat else "concurrency": level, "void": "interrupted"}
            result["rows"].append(row)
            began, cpu = perf_counter(), thread_time()
            answers = await (clients.chat(level) if chat else clients.closed(int(level)))
            seconds, busy = perf_counter() - began, thread_time() - cpu
            row |= figures(answers, seconds, limits) | {"client_cpu": round(busy / seconds, 3)}
            dead = await clients.target.dead() if row["errors"] else None
            row["void"] = void_reason(row, asked, dead)
            row["remarks"] = list(remarks(row, asked))
            print(f"{_label(row)}: {row['completed']} of {row['requests']} answers came whole", flush=True)
            if dead is not None:
                return


def load(settings: Settings) -> int:
    """Measures the server that `settings` name; prints the table and one JSON object.

    Returns:
        The exit status: 1 where a row is void.

    Raises:
        ExpertServeError: the server does not answer a first request.
        InterruptError: Ctrl-C; what was measured until then has been printed.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it says a line for each request
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each request under way
    result: dict[str, Any] = {
        "version": __version__,
        "server": settings.serve,
        "endpoint": settings.endpoint,
        "arrival": settings.arrival,
        "decode_tokens": settings.decode_tokens,
        "slo_ttft_ms": settings.slo_ttft,
        "slo_itl_ms": settings.slo_itl,
        "rows": [],
    }
    try:
        asyncio.run(_measure(settings, result))
    except KeyboardInterrupt:
        if result["rows"]:
            _show(result, settings)
        raise InterruptError("interrupted") from None
    return _show(result, settings)


def _show(result: Mapping[str, Any], settings: Settings) -> int:
    print(f"\n{table(COLUMNS, result['rows'], _label)}")
    for row in result["rows"]:
        for remark in () if row["void"] else row["remarks"]:
            print(f"{_label(row)}: {remark}")
    return 1 if publish(result, settings) else 0


def _label(row: Row) -> str:
    return f"concurrency {row['concurrency']}" if "concurrency" in row else f"{row['rate']:g} chats/s"
