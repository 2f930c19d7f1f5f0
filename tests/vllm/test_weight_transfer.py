"""vLLM's own weight transfer: an engine follows a policy that trains, and refuses what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import RefitError
from megatron_policy.inference.vllm.transfer import WeightTransfer
from megatron_policy.inference.vllm.weight_patches import WeightPatches
from megatron_policy.inference.vllm.weight_source import RefitSource, group_by_layer
from megatron_policy.refit.transports.delta_stream import DeltaStream
from tests.dist.refits import LAYOUTS, config_of
from tests.families import SAMPLES
from tests.losses import TokenNLL
from tests.ranks import RankPool
from tests.vllm.transfer_process import EngineClient

CHECKOUT = Path(__file__).resolve().parents[2]
START_S = 300.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
# Plug-ins of an installed package; the last is what only these tests register.
PLUGINS = """[vllm.general_plugins]
megatron_policy = megatron_policy.inference.vllm:register
gloo = tests.vllm.gloo_backend:register
"""

VOCAB, COUNT = 256, 12
PROMPTS = [[5, 6, 7, 8], [11, 200, 3, 99], [42, 43, 17, 0]]
TOLERANCE = 3e-5
"""For a log-probability in fp32. Weights are equal bit for bit; kernels and the order of sums are
not, which makes about 1e-6 here. A tensor that is stale makes more than 1e-2.
"""


def find_python() -> Path | None:
    named = os.environ.get("VLLM_PYTHON")
    path = Path(named) if named else CHECKOUT / ".venv-vllm" / "bin" / "python"
    return path if path.exists() else None


pytestmark = pytest.mark.skipif(
    find_python() is None, reason="needs vLLM's CPU build: VLLM_PYTHON=/its/python"
)


@pytest.fixture(scope="module")
def path(checkpoint: Any) -> Path:
    return checkpoint("qwen2", vocab=VOCAB, hidden=128, heads=4, groups=2, layers=4)


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """Ranks that may import vLLM."""
    pool = RankPool()
    yield pool
    pool.end()


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[str]:
    """The address of a running vLLM, for `EngineClient`."""
    with running(path) as address:
        yield address


@pytest.fixture(scope="module")
def unpacked(path: Path) -> Iterator[str]:
    """The same of one whose weights are not packed."""
    with running(path, WITHOUT_PACKED_WEIGHTS="1") as address:
        yield address


@contextmanager
def running(path: Path, **environment: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        plugins, address = Path(folder, "plugins-1.dist-info"), f"{folder}/engine.sock"
        plugins.mkdir()
        (plugins / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1\n")
        (plugins / "entry_points.txt").write_text(PLUGINS)
        found = os.pathsep.join([str(CHECKOUT), folder])
        command = ["-m", "tests.vllm.transfer_process", str(path), address, json.dumps({})]
        log = Path(folder, "log")
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(find_python()), *command],
                env=os.environ | ENVIRONMENT | environment | {"PYTHONPATH": found},
                cwd=CHECKOUT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            deadline = time.monotonic() + START_S
            while not Path(address).exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"vLLM has not started: {log.read_text()[-3000:]}")
                time.sleep(0.1)
            yield address
        finally:
            process.kill()
            process.wait()


def batch_of(rows: list[list[int]]) -> BatchedDataDict:
    tokens = torch.tensor(rows)
    return BatchedDataDict(
        input_ids=tokens,
        input_lengths=torch.full((len(rows),), tokens.shape[1]),
        token_mask=torch.ones_like(tokens, dtype=torch.float32),
        sample_mask=torch.ones(len(rows)),
    )


def train(policy: MegatronPolicy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(VOCAB, (2, 24), generator=generator)
    policy.train(batch_of(rows.tolist()), TokenNLL())


def difference(policy: MegatronPolicy, client: EngineClient | None) -> float:
    """How far the engine's log-probabilities of its own samples are from the policy's."""
    sampled: list[Any] = [client.call("sample", PROMPTS, COUNT) if client else None]
    dist.broadcast_object_list(sampled)
    rows = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, sampled[0], strict=True)]
    own = policy.logprobs(batch_of(rows)).cpu()
    drawn = torch.tensor([logprobs for _, logprobs in sampled[0]])
    return (drawn - own[:, -COUNT:]).abs().max().item()


MOST = ["model.embed_tokens.*", "model.layers.[0-2].*", "lm_head.*"]


def make_policy(path: Path, layout: str, frozen: list[str] | None = None) -> MegatronPolicy:
    optimizer: dict[str, Any] = {"lr": 1e-2, "min_lr": 1e-2}
    if frozen:
        optimizer["param_groups"] = [{"names": frozen, "freeze": True}]
    cfg = LAYOUTS[layout][1] | {"optimizer": optimizer}
    config = config_of(path, cfg) | {"refit_dtype": "float32"}
    return MegatronPolicy(config, init_reference_model=False)


def follow(address: str, path: Path, layout: str, staged: bool) -> list[Any]:
    """Three steps, with a refit after each: what is compared before and after, and the version."""
    policy, seen = make_policy(path, layout), []
    client = EngineClient(address) if policy.rank == 0 else None
    transfer = WeightTransfer(client, buffer_bytes=1 << 16)
    if client:
        client.call("use_backend", "megatron_policy")
        client.init_weight_transfer_engine(transfer.init_info(policy.exporter, staged=staged))
    for step in range(1, 4):
        train(policy, step)
        before = difference(policy, client)
        manifest = policy.refit(transfer)
        version = client.call("get_weight_version") if client else str(step)
        seen.append((before, difference(policy, client), version, len(manifest.tensors)))
    if client:
        client.close()
    policy.shutdown()
    return seen


@pytest.mark.parametrize(("layout", "staged"), [("tp2", True), ("pp2", False)])
def test_an_engine_computes_what_a_policy_computes_after_each_refit(
    own_ranks: RankPool, engine: str, path: Path, layout: str, staged: bool
) -> None:
    seen = own_ranks.run(2, follow, engine, path, layout, staged)[0]
    for before, after, _, _ in seen:
        assert before > 100 * TOLERANCE and after < TOLERANCE, seen
    assert [version for _, _, version, _ in seen] == ["1", "2", "3"]
    assert all(count for *_, count in seen)


class Damaged:
    """A client on whose way requests change."""

    def __init__(self, client: EngineClient, change: Callable[[str], str]) -> None:
        self._client, self._change = client, change
        self.init_weight_transfer_engine = client.init_weight_transfer_engine
        self.start_weight_update = client.start_weight_update
        self.finish_weight_update = client.finish_weight_update

    def update_weights(self, update_info: Any) -> None:
        self._client.update_weights({name: self._change(s) for name, s in update_info.items()})


def rename(request: str) -> str:
    return request.replace("model.norm.weight", "model.worn.weight")


def damage_digest(request: str) -> str:
    return re.sub(r'(norm\.weight.{1,30}\], \\")[0-9a-f]{4}', r"\g<1>0000", request)


def age(request: str) -> str:
    return request.replace('\\"step\\": 0', '\\"step\\": -1')


def vanish(request: str) -> str:
    """Nothing is said any more, as by a trainer that has died, once all tensors are there."""
    if '"complete"' in request or "log" in request:
        raise ConnectionError("the trainer is gone")
    return request


FAULTS = {
    rename: "these are not the weights of the engine's model: 1 missing",
    damage_digest: "with a wrong digest: model.layers",
    age: "weights of step -1 are older than those of step 0",
    vanish: "the trainer is gone",
}


def misuse(address: str, path: Path) -> dict[str, Any]:
    """What refused and broken updates raise on this rank, and what the engine holds after them."""
    policy, seen = make_policy(path, "tp2"), dict[str, Any]()
    client = EngineClient(address) if policy.rank == 0 else None

    def give(fault: Callable[[str], str] | None = None) -> None:
        way: Any = Damaged(client, fault) if client and fault else client
        policy.refit(WeightTransfer(way, 1 << 16))

    if client:
        client.call("use_backend", "megatron_policy")
        info = WeightTransfer(client).init_info(policy.exporter)
        client.init_weight_transfer_engine(info)
    give()
    seen["at first"] = difference(policy, client)
    for fault in FAULTS:
        with pytest.raises(RefitError) as raised:
            give(fault)
        seen[fault.__name__] = str(raised.value), difference(policy, client)
    train(policy, 1)
    give()
    seen["at last"] = difference(policy, client)
    if client:
        client.close()
    policy.shutdown()
    return seen


def test_a_refused_update_fails_all_ranks_and_leaves_the_engine_as_it_was(
    own_ranks: RankPool, engine: str, path: Path
) -> None:
    seen, other = own_ranks.run(2, misuse, engine, path)
    for fault, words in FAULTS.items():
        said, off = seen[fault.__name__]
        assert words in said and said == other[fault.__name__][0], seen
        assert off < TOLERANCE, seen
    assert seen["at first"] < TOLERANCE and seen["at last"] < TOLERANCE


def import_vllm(places: list[str]) -> Any:
    sys.path += [place for place in places if place not in sys.path]
    from tests.vllm import gloo_backend

    return gloo_backend


def follow_by_source(address: str, path: Path, layout: str, places: list[str], port: int) -> Any:
    """The same with vLLM's own trainer engine, which takes a source."""
    gloo = import_vllm(places)
    policy, seen = make_policy(path, layout), []
    client = EngineClient(address) if policy.rank == 0 else None
    if client:
        client.call("use_backend", "gloo")
    source = RefitSource(policy.exporter, held="rank 0")
    engine = gloo.GlooTrainerEngine.trainer_init(
        gloo.GlooInit("127.0.0.1", port, 2, rank=policy.rank),
        client=source.check(client) if client else None,
        source=source,
    )
    for step in range(1, 4):
        train(policy, 10 + step)
        before = difference(policy, client)
        source.send(engine, step)
        version = client.call("get_weight_version") if client else str(step)
        seen.append((before, difference(policy, client), version))
    if client:
        client.close()
    policy.shutdown()
    return seen


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_vllms_own_trainer_engine_sends_what_the_source_yields(
    own_ranks: RankPool, engine: str, path: Path, layout: str
) -> None:
    with reserved_port() as port:
        places = site_packages()
        seen = own_ranks.run(2, follow_by_source, engine, path, layout, places, port)[0]
    for before, after, _ in seen:
        assert before > 100 * TOLERANCE and after < TOLERANCE, seen
    assert [version for *_, version in seen] == ["1", "2", "3"]


class Failing:
    """A client whose next part of an update is lost on its way, when it is told so."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self.lost = client, False
        self.init_weight_transfer_engine = client.init_weight_transfer_engine
        self.start_weight_update = client.start_weight_update
        self.finish_weight_update = client.finish_weight_update

    def update_weights(self, update_info: Any) -> None:
        lost, self.lost = self.lost, False
        if lost:
            raise ConnectionError("the line is cut")
        self._client.update_weights(update_info)


def follow_by_patches(address: str, path: Path, layout: str, places: list[str], port: int) -> Any:
    """What each refit says, sends, and makes of the engine; in the third one a part is lost."""
    gloo = import_vllm(places)
    policy, seen = make_policy(path, layout, MOST), []
    client = EngineClient(address) if policy.rank == 0 else None
    if client:
        client.call("use_backend", "sparse_gloo")
    failing = Failing(client) if client else None
    engine = gloo.SparseGlooTrainerEngine.trainer_init(
        gloo.GlooInit("127.0.0.1", port, 2, rank=policy.rank), client=failing
    )
    to = DeltaStream(WeightPatches(engine))
    for step in range(1, 6):
        if step != 4:
            train(policy, 20 + step)
        before = difference(policy, client)
        if failing:
            failing.lost = step == 3
        if step == 3:
            with pytest.raises(RefitError, match="take the weights: the line is cut"):
                policy.refit(to)
            continue
        sent = policy.refit(to)
        version = client.call("get_weight_version") if client else ""
        seen.append((sent.changed_bytes, before, difference(policy, client), version))
    if client:
        client.close()
    policy.shutdown()
    return seen


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_vllms_sparse_engine_sends_what_has_changed_and_all_after_a_failure(
    own_ranks: RankPool, unpacked: str, path: Path, layout: str
) -> None:
    with reserved_port() as port:
        places = site_packages()
        seen = own_ranks.run(2, follow_by_patches, unpacked, path, layout, places, port)[0]
    whole, changed, again, later = seen
    assert all(before > 100 * TOLERANCE and after < TOLERANCE for _, before, after, _ in seen)
    assert whole[0] == again[0] == 0 and changed[0] > 0 and later[0] > 0, seen
    assert [version for *_, version in seen] == ["1", "2", "3", "4"]


def own(path: Path, layout: str, places: list[str], names: list[list[str]]) -> Any:
    """What vLLM's own trainer code makes of a source whose ranks hold parts of the model: which
    ranks serve which names. Raises what it objects to.
    """
    import_vllm(places)
    from vllm.distributed.weight_transfer.base import layerwise_groups
    from vllm.distributed.weight_transfer.sharded_rdt_trainer import (
        ShardedRDTTrainerWeightTransferEngine,
    )

    assert [group_by_layer(each) for each in names] == [layerwise_groups(each) for each in names]
    policy = make_policy(path, layout)
    source: Any = RefitSource(policy.exporter, held="stage")
    # Without its `trainer_init`, which begins with a GPU's server.
    engine: Any = object.__new__(ShardedRDTTrainerWeightTransferEngine)
    engine.source, engine._meta = source, list(source.metadata())
    declared = [meta.name for meta in engine._meta]
    engine._groups = layerwise_groups(declared)
    assert [name for group in engine._groups for name in group] == declared
    engine._resolve_ownership(dist.get_world_size(), policy.rank)
    batches = source.iter_groups()
    for index in engine._owned_idx:
        found, tensors = next(batches)
        assert found == engine._groups[index]
        engine._validate_held_yields(index, found, tensors)
    policy.shutdown()
    return engine._owner_sets


@pytest.mark.parametrize(
    ("family", "layout", "owners"),
    [
        ("qwen3_moe", "ep2 pp2", [[0, 1], [2, 3]]),
        ("qwen2", "pp2", [[0], [1]]),
        ("llama", "tp2", [[0, 1]]),
    ],
)
def test_vllms_own_code_knows_from_the_source_who_serves_what(
    own_ranks: RankPool, checkpoint: Any, family: str, layout: str, owners: list[list[int]]
) -> None:
    names = [names_of(checkpoint(each)) for each in SAMPLES] if family == "llama" else []
    args = checkpoint(family, layers=4), layout, site_packages(), names
    assert own_ranks.run(LAYOUTS[layout][0], own, *args) == [owners] * LAYOUTS[layout][0]


def names_of(path: Path) -> list[str]:
    with HfReader(path) as reader:
        return list(reader.shapes)


def site_packages() -> list[str]:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([str(find_python()), "-c", code], capture_output=True, check=True)
    return [found.stdout.decode().strip()]
