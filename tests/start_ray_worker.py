"""What Ray starts for every worker of the tests: asks `tests/fork_server.py` for a fork, or starts
the worker as Ray does. It imports little, because it runs for each of them.
"""

import array
import json
import os
import socket
import sys

ADDRESS = "TESTS_FORK_SERVER"


def forked(argv: list[str]) -> bool:
    """Whether the server has forked that worker."""
    asked = {"argv": argv, "environment": dict(os.environ), "folder": os.getcwd()}
    descriptors = array.array("i", [0, 1, 2])
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(os.environ[ADDRESS])
            data = json.dumps(asked).encode()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
            sent = server.sendmsg([data], rights)
            server.sendall(data[sent:])
            server.shutdown(socket.SHUT_WR)
            return server.recv(1) == b"f"
    except (KeyError, OSError):
        return False


if __name__ == "__main__" and not forked(sys.argv[1:]):
    from importlib.util import find_spec

    ray = find_spec("ray").submodule_search_locations[0]
    own = os.path.join(ray, "_private", "workers", "setup_worker.py")
    os.execv(sys.executable, [sys.executable, own, *sys.argv[1:]])
