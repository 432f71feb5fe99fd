"""Several servers of one model behind Ray Serve; a conversation stays with the server that has its experts and prefix.

    pip install 'expertserve[ray]'
    PYTHONPATH=configs serve run ray_serve:build model=/models/model.gguf replicas=2 options="--expert-cache 50%"

Each replica is a process of `expertserve serve` beside a Ray actor that passes requests on to it: what a replica runs
is then the program that is tested, with its own memory plan, environment and signals, and an abort of a native library
ends that process and not the actor that has to report it. The process ends with the actor, and the actor with the
process, so that Ray starts both anew.

The ingress gives every request a key: the header `x-session-id`, the field `prompt_cache_key`, or how the conversation
begins. The router ranks the replicas by a hash of key and replica (rendezvous hashing): nothing is shared between
ingresses, and a replica that comes or goes moves only its own conversations. A full replica's requests go to the next.
A request whose answer has not begun is asked again elsewhere when its replica is lost; a stream that has begun ends
with an error event of code `replica_lost`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from expertserve.server.envelope import error_event, named_event
from expertserve.server.errors import UnavailableError, error_object, error_response

TRIES = 4  # replicas that a request is given to before it is refused
PREFIX = 256  # characters or tokens of a plain prompt that say where it belongs
# Runs a command until it ends or standard input is closed, which happens when the actor is gone, however it went.
WHILE_STDIN_IS_OPEN = 'exec 3<&0; "$0" "$@" </dev/null 3<&- & child=$!; (cat <&3 >/dev/null; kill $child) & wait $child'
# Headers that belong to one connection or are written anew by whoever answers.
NOT_PASSED = {*("connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding", "upgrade")}

Head = tuple[int, list[tuple[str, str]]]  # status and headers of an answer


class ReplicaLostError(Exception):
    """The server behind a replica is gone."""


class Arguments(BaseModel):
    """What `serve run` and a Serve config file may give.

    Attributes:
        model: as for `expertserve serve`.
        options: further options of `expertserve serve`, in one line.
        ongoing: requests that a replica has at a time; more go to the next replica or wait.
        gpus: of each replica.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    options: str = ""
    replicas: int = 2
    ongoing: int = 8
    gpus: float = 0


def affinity(headers: dict[str, str], body: bytes) -> str:
    """What requests of one conversation have in common; empty where nothing says which conversation it is."""
    if session := headers.get("x-session-id"):
        return session
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    if key := fields.get("prompt_cache_key"):
        return str(key)
    said = next((fields[name] for name in ("messages", "input", "prompt") if fields.get(name)), None)
    if isinstance(said, list) and isinstance(said[0], dict):
        first = next((at for at, item in enumerate(said) if item.get("role") == "user"), len(said))
        said = said[: first + 1]
    elif isinstance(said, str | list):
        said = said[:PREFIX]
    return "" if said is None else json.dumps([fields.get("system"), fields.get("instructions"), said])


class AffinityRouter(RequestRouter):
    """The replicas in the order of a hash of replica and key; without a key in an order of chance."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        key = "" if pending_request is None else pending_request.kwargs.get("key")
        key = key or uuid.uuid4().hex
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before all are asked again

        def weight(replica: RunningReplica) -> bytes:
            return hashlib.sha256(f"{replica.replica_id.unique_id} {key}".encode()).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=weight)]


@serve.deployment
class Replica:
    """One process of `expertserve serve`."""

    def __init__(self, model: str, options: list[str]) -> None:
        self._id = serve.get_replica_context().replica_id.unique_id
        command = [sys.executable, "-m", "expertserve", "serve", model, "--host", "127.0.0.1", "--port", "0", *options]
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray's is 1
        self._process = subprocess.Popen(
            ["sh", "-c", WHILE_STDIN_IS_OPEN, *command],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._said: deque[str] = deque(maxlen=20)
        self._url = ""
        threading.Thread(target=self._follow, daemon=True).start()
        self._wait_until_ready()
        self._http = httpx.AsyncClient(base_url=self._url, timeout=None, limits=httpx.Limits(max_connections=None))

    def _follow(self) -> None:
        """Passes on what the server logs; ends the actor when the server has ended."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            self._said.append(line)
            if not self._url and (found := re.search(r"http://[0-9.:]+", line)):
                self._url = found[0]
        self._process.wait()
        if hasattr(self, "_http"):
            os._exit(1)

    def _wait_until_ready(self) -> None:
        while self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self._url and httpx.get(f"{self._url}/ready").status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError("the server did not start: " + "".join(self._said))

    async def check_health(self) -> None:
        (await self._http.get("/health", timeout=10)).raise_for_status()

    async def answer(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes, *, key: str
    ) -> AsyncIterator[Head | bytes]:
        """Status and headers, then the body as it comes; `key` is for the router."""
        try:
            async with self._http.stream(method, target, headers=headers, content=body) as response:
                passed = [(name, value) for name, value in response.headers.items() if name not in NOT_PASSED]
                yield response.status_code, [*passed, ("x-replica", self._id)]
                async for piece in response.aiter_raw():
                    yield piece
        except httpx.TransportError as error:
            raise ReplicaLostError(str(error)) from None


@serve.deployment(max_ongoing_requests=1000)
class Ingress:
    """Gives requests to replicas, again where one is lost before its answer began."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        headers = [(name, value) for name, value in request.headers.items() if name not in NOT_PASSED]
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        key = affinity(dict(headers), body)
        for _ in range(TRIES):
            pieces = self._replicas.answer.remote(request.method, target, headers, body, key=key)
            with contextlib.suppress(RayActorError, ReplicaLostError):
                return await self._answer(request.url.path, pieces)
        return error_response(
            UnavailableError("the replicas that were asked are gone: try again", code="replica_lost", retry_after_s=5)
        )

    async def _answer(self, path: str, pieces: Any) -> Response:
        status, headers = await anext(pieces)
        if dict(headers).get("content-type", "").startswith("text/event-stream"):
            first = await anext(pieces, b"")
            response: Response = StreamingResponse(self._events(path, first, pieces), status)
        else:
            response = Response(b"".join([piece async for piece in pieces]), status)
        response.headers.update(dict(headers))
        return response

    async def _events(self, path: str, first: bytes, pieces: Any) -> AsyncIterator[bytes]:
        """The stream, whole events at a time, so that an error event can follow at any moment."""
        pending = first
        try:
            while True:
                whole, mark, pending = pending.rpartition(b"\n\n")
                if mark:
                    yield whole + mark
                pending += await anext(pieces)
        except StopAsyncIteration:
            yield pending
        except (RayActorError, ReplicaLostError):
            yield _lost(path)


def _lost(path: str) -> bytes:
    """The event that ends a stream, in the form of its API."""
    error = UnavailableError("the replica that was answering is gone: ask again", code="replica_lost")
    if path.endswith("/messages"):
        return named_event({"type": "error", "error": error_object(error)})
    if path.endswith("/responses"):
        return named_event({"type": "error", **error_object(error)})
    return error_event(error)


def build(given: dict[str, Any]) -> serve.Application:
    """The application for `serve run`, from the values of Arguments."""
    arguments = Arguments.model_validate(given)
    replicas = Replica.options(
        num_replicas=arguments.replicas,
        max_ongoing_requests=arguments.ongoing,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": 0, "num_gpus": arguments.gpus},
        request_router_config=RequestRouterConfig(request_router_class=AffinityRouter),
    )
    return Ingress.bind(replicas.bind(arguments.model, shlex.split(arguments.options)))
