"""A server of the hash model as a process of its own, for tests of signals.

Usage: python -m tests.server.serve_hash STEP_SECONDS LOAD_SECONDS DRAIN_SECONDS; prints its URL.
"""

from __future__ import annotations

import sys
import time

from expertserve.server.app import create_app
from expertserve.server.process import ServerProcess
from expertserve.server.state import ServedModel, ServerSettings, ServerState
from tests.server.hash_world import World


def main(step_s: float, load_s: float, drain_s: float) -> None:
    def load() -> ServedModel:
        time.sleep(load_s)
        world = World()
        world.slow(step_s)
        return world.served()

    state = ServerState(ServerSettings(port=0, drain_timeout_s=drain_s))
    process = ServerProcess(create_app(state), state, load)
    print(process.bind(), flush=True)
    process.run()
    print("ended", flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
