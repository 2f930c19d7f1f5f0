"""A process of vLLM's environment that has imported vLLM and forks for each engine that it is asked
for: importing takes half a minute, an engine of a tiny model a few seconds.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch
import transformers
import vllm
import vllm.model_executor.models.registry as registry
import vllm.model_executor.models.transformers
import vllm.v1.engine.core
import vllm.v1.engine.llm_engine
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker
from safetensors.torch import load_file
from torch.utils._pytree import tree_map

from megatron_policy.inference.vllm.engine import make_prompt
from megatron_policy.inference.vllm.reload import ModelReload
from tests.vllm.computed import Digests, digest_model
from tests.vllm.engine_process import Engine, answer


def _as_array(tensor: torch.Tensor) -> Any:
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


class FamilyEngine(Engine):
    """What the tests of families ask besides."""

    @property
    def _worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker

    def describe(self) -> str:
        """The name of the model's class in vLLM."""
        return type(self._worker.model_runner.get_model()).__name__

    def versions(self) -> dict[str, str]:
        """What computes here."""
        names = {"torch": torch.__version__, "transformers": transformers.__version__}
        names |= {"vllm": vllm.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
        return {name: text.partition("+")[0] for name, text in names.items()}

    def digests(self) -> Digests:
        """See `digest_model`."""
        return digest_model(self._worker.model_runner.get_model())

    def render(self, prompts: list[Any]) -> list[tuple[list[int], dict[str, Any]]]:
        """What vLLM's processor makes of prompts: the tokens of each, and arrays of its pictures,
        or lists of them.
        """
        plain = [make_prompt(prompt) for prompt in prompts]
        rendered = self.llm.llm_engine.renderer.render_cmpl(plain, skip_mm_cache=True)
        found = []
        for each in rendered:
            media = each["mm_kwargs"].get_data() if each["type"] == "multimodal" else {}
            arrays = {key: tree_map(_as_array, value) for key, value in media.items()}
            found.append((each["prompt_token_ids"], arrays))
        return found

    def load_each(self, path: str) -> list[str]:
        """Reload a checkpoint in one file, one tensor at a time; the names that vLLM has loaded
        into no parameter.
        """
        model = self._worker.model_runner.get_model()
        load, unread = model.load_weights, []
        reload = ModelReload(model, self._worker.vllm_config, keeps_tensors=True)
        reload.begin()
        for name, tensor in load_file(f"{path}/model.safetensors").items():

            def recorded(weights: Any, name: str = name) -> Any:
                into = load(weights)
                unread.extend([name] if into is not None and not into else [])
                return into

            model.load_weights = recorded
            try:
                reload.load([(name, tensor)])
            finally:
                del model.load_weights
        reload.finish()
        return unread


def become_engine(caller: Connection) -> None:
    """Make the engine that the caller describes, and serve it until it closes the line."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    path, options = caller.recv()
    try:
        engine = FamilyEngine(path, options)
    except Exception as error:
        traceback.print_exc()
        caller.send((False, f"{type(error).__name__}: {error}"))
        return
    caller.send((True, None))
    answer(engine, caller)


def serve_forks(listener: Listener) -> None:
    """Fork for every caller, until standard input is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what it forks
    socket = listener._listener._socket
    # Not in a thread, which a fork would not have.
    while 0 not in select.select([socket.fileno(), 0], [], [])[0]:
        caller = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener._listener._unlink = None  # the socket's file is the parent's
            try:
                become_engine(caller)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        caller.close()


if __name__ == "__main__":
    # vLLM looks at a model's class in a process of its own, so that no GPU is initialised: half a
    # minute for each, to see what is imported here.
    registry._run_in_subprocess = lambda look: look()
    with Listener(sys.argv[1], "AF_UNIX") as ready:
        print("ready", flush=True)
        serve_forks(ready)
