"""Two replicas of the embedded model on a local Ray, as a process of its own, for the test of configs/ray_serve.py.

Usage: python -m tests.server.ray_cluster OPTIONS-OF-SERVE; prints its URL when it answers. A line with a replica's id
on standard input kills that replica's actor; the end of the input ends the cluster.
Python's path must have configs/.
"""

from __future__ import annotations

import socket
import sys

import ray
import ray_serve
from ray import serve


def main(options: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(ray_serve.build({"model": "demo", "options": options, "ongoing": 16}))
    print(f"http://127.0.0.1:{port}", flush=True)
    for line in sys.stdin:
        (name,) = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if line.strip() in actor["name"]]
        ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]))
        print("killed", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
