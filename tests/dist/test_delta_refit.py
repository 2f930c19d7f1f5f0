"""Engines that follow a chain of deltas have, bit for bit, what an export of that moment has; what
is damaged, lost, late or of another run is refused, and the next refit works.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_policy.converters.formats import hf_writing
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.formats.digests import UNSEALED, seal
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit import delivery as delivery_module
from megatron_policy.refit.deltas import folder as folder_module
from megatron_policy.refit.deltas.chain import MANIFEST, Chain, Version, read_chain
from megatron_policy.refit.deltas.folder import open_folder
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports import deltas as deltas_module
from megatron_policy.refit.transports.deltas import DeltaDirectory
from tests.dist.cases import UNUSED, open_policy, policy_config
from tests.dist.refits import LAYOUTS
from tests.dist.resuming import logged, replaced
from tests.dist.test_detached_refit import PEFT, SIZES, bits_of, step_on
from tests.dist.test_export import tensors_of
from tests.ranks import RankFailure, RankPool
from tests.refit_engine import Bits, SmallEngine, bits, zeros
from tests.small_disk import free, small_disk

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "tp2": ("qwen2", "tp2", {}, {}),
    "tp2 pp2, tied": ("qwen2", "tp2 pp2", {"tied": True}, {}),
    "tp2 cp2": ("qwen2", "tp2 cp2", {}, {}),
    "pp2 vpp2": ("llama", "pp2 vpp2", {"layers": 4}, {}),
    "ep2": ("qwen3_moe", "ep2", {}, {}),
    "ep2 tp2": ("qwen3_moe", "ep2 tp2", {}, {}),
    "stacked experts": ("gpt_oss", "ep2", {}, {}),
    "fsdp2": ("qwen2", "fsdp2", {}, {}),
    "fsdp2 tp2 x 2": ("qwen2", "fsdp2 tp2 x 2", {}, {}),
    "merged adapters": ("qwen2", "tp2", {}, {"megatron_cfg": PEFT}),
    "trained in bf16": ("qwen2", "tp2", {}, {"precision": "bfloat16"}),
    "checkpoint in bf16": ("qwen2", "tp2", {"dtype": "bfloat16"}, {}),
}
"""A family, a layout, and what its checkpoint and its policy have besides."""
DAILY = ("tp2", "ep2", "fsdp2")
BUCKET = 16 * 1024


class Follower:
    """An engine of zeros that follows a chain."""

    def __init__(self, forms: dict[str, Any], root: Path | str, **options: Any) -> None:
        self.engine, self.root = SmallEngine(zeros(forms)), root
        self.receiver = Receiver(self.engine.load, expected=forms, **options)

    def receive(self) -> Bits:
        self.receiver.receive_deltas(self.root)
        return bits(self.engine.weights)


def disturb(policy: MegatronPolicy, number: int, share: float) -> None:
    """Change that share of the elements of every parameter, alike on ranks that hold copies."""
    adapters = policy._engine.adapters
    held = [*policy._engine.held, *(adapters.held if adapters else ())]
    for index, (_, parameter) in enumerate(held):
        generator = torch.Generator().manual_seed(1000 * number + index)
        chosen = torch.rand(parameter.shape, generator=generator) < share
        with torch.no_grad():
            parameter.masked_fill_(chosen, 1 / (number + 2))


def follow(config: dict[str, Any], root: Path | str, deltas: int) -> dict[str, Any]:
    """A chain, of which one engine takes every version, one every fifth, and one the last."""
    with open_policy(config, init_reference_model=False) as policy:
        forms = policy.exporter.plan().info()
        engines = {every: Follower(forms, root) for every in (1, 5, deltas)}
        wrong, changed = [], set()
        for number in range(deltas + 1):
            if number % 8 == 3:
                step_on(policy, number)
            elif number % 8 != 5:  # else nothing changes
                disturb(policy, number, (0.3, 0.01, 0.9)[number % 3])
            policy.refit(DeltaDirectory(root, whole_every=7))
            now = bits_of(policy)
            changed.add(hash(str(now)))
            for every, engine in engines.items() if policy.rank == 0 else ():
                if number % every == 0 and engine.receive() != now:
                    wrong.append((number, every))
        loads = [len(each.engine.loads) for each in engines.values()]
        kept, plan = policy.exporter.published[root].copy.nbytes, policy.exporter.plan()
        return {
            "wrong": wrong,
            "moments": len(changed),
            "loads": loads,
            "kept": kept,
            "planned": plan.kept_bytes,
        }


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.daily] * (c in DAILY)) for c in CASES]
)
def test_a_chain_of_deltas_equals_whole_exports_in_every_layout(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, case: str
) -> None:
    family, layout, sizes, top = CASES[case]
    world, section = LAYOUTS[layout]
    path = checkpoint(family, **SIZES | {"vocab": 251} | sizes)
    config = policy_config(path, section | top.get("megatron_cfg", {}), refit_bucket_bytes=BUCKET)
    config |= {key: value for key, value in top.items() if key != "megatron_cfg"}
    first, *others = ranks.run(world, follow, config, tmp_path / "chain", 20)
    assert not first["wrong"]
    empty = sum(number % 8 == 5 for number in range(21))
    assert first["moments"] == 21 - empty
    assert first["loads"][0] == 21
    # A little less where a rank has fewer rows of an odd vocabulary than others.
    most = max(each["kept"] for each in (first, *others))
    assert 0.95 * first["planned"] < most <= first["planned"]


def publish(
    path: Path, section: dict[str, Any], root: Path | str, numbers: list[int]
) -> list[Bits]:
    """A chain of the weights that these numbers make; what was published of each."""
    with open_policy(policy_config(path, section), **UNUSED) as policy:
        seen = []
        for number in numbers:
            disturb(policy, number, 0.02)
            why = policy.refit(DeltaDirectory(root)).why_whole
            assert why.startswith("nothing is kept of a refit there: this is") == (not seen), why
            seen.append(bits_of(policy))
        with pytest.raises(ConfigError, match="while the weights stay"):
            policy.begin_refit(DeltaDirectory(root))
        return seen


@pytest.fixture
def start(ranks: RankPool, checkpoint: Any, tmp_path: Path) -> Callable[..., Any]:
    """`start(numbers, section)`: publish in `tmp_path / "chain"`; then what was published, and an
    engine that has it all.
    """

    def started(numbers: list[int], section: dict[str, Any] | None = None) -> Any:
        path, root = checkpoint("qwen2", **SIZES), tmp_path / "chain"
        (seen,) = ranks.run(1, publish, path, section or {}, root, numbers)
        forms = {name: (tuple(t.shape), t.dtype) for name, t in tensors_of(path).items()}
        follower = Follower(forms, root)
        assert follower.receive() == seen[-1]
        return seen, follower

    return started


def chain_in(root: Path | str) -> Chain:
    chain = read_chain(open_folder(root))
    assert chain is not None
    return chain


def edit(how: Callable[[bytes], bytes], path: Path) -> None:
    path.write_bytes(how(path.read_bytes()))


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_other(number: int, path: Path) -> None:
    """As a release with another format writes it."""
    fields = json.loads(path.read_bytes()) | {"digest": UNSEALED, "format": number}
    path.write_bytes(seal(json.dumps(fields).encode()))


def swap_versions(path: Path) -> None:
    """The manifests of this version and of the one before change places."""
    other = path.parent.with_name("00000001.delta") / path.name
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


OF_2 = "*/00000002.delta/version.json"


DAMAGE: dict[str, tuple[int | str, Callable[[Path], object]]] = {
    "is not what the trainer has written": (2, partial(edit, lambda b: b[:-1] + b"?")),
    "what the trainer has written": (2, partial(edit, lambda b: b[:-9])),
    "is gone": (2, Path.unlink),
    "gone or cannot be read: .* a directory": (2, make_unreadable),
    r"gone or cannot be read: .*\.safetensors\. Bring it back": (
        "*/00000000/model.safetensors",
        Path.unlink,
    ),
    r"2\.delta/version.json is not what the trainer": (OF_2, partial(edit, lambda b: b[:-1])),
    r"version.json is not what the trainer": (OF_2, swap_versions),
    r"1\.delta/version.json is not what": (OF_2.replace("2", "1"), partial(edit, bytes.upper)),
    r"gone or cannot be read: .*version.json": (OF_2, Path.unlink),
    "is of format 3, .* use the same version": (MANIFEST, partial(make_other, 3)),
    "is of format 1, .* next refit to it begins a new chain": (MANIFEST, partial(make_other, 1)),
    "contradicts its digest": (MANIFEST, partial(edit, lambda b: b.replace(b"0", b"1", 1))),
    "cannot be read": (MANIFEST, partial(edit, lambda b: b[:40])),
    "has no chain.json": (MANIFEST, Path.unlink),
}


def test_what_is_damaged_or_lost_is_refused_until_it_is_whole_again(
    start: Any, tmp_path: Path
) -> None:
    seen, follower = start([0, 1, 2])
    root, forms = follower.root, {name: of[:2] for name, of in seen[0].items()}
    for number, (said, (what, damage)) in enumerate(DAMAGE.items()):
        copy = shutil.copytree(root, tmp_path / str(number))
        late, name = Follower(forms, copy), what
        if isinstance(what, int):
            name = chain_in(copy).name_file(what, 0)
        damage(next(copy.glob(str(name))))
        with pytest.raises(RefitError, match=said):
            late.receive()
        assert not late.engine.loads and not late.receiver.mixed
        shutil.rmtree(copy)
        shutil.copytree(root, copy)
        assert late.receive() == seen[2]


def test_a_later_version_costs_its_own_files_alone(start: Any) -> None:
    seen, follower = start([0, 1, 2, 3])
    read, chain = list[str](), chain_in(follower.root)

    def note(call: Callable[..., bytes]) -> Callable[..., bytes]:
        def act(folder: Any, name: str) -> bytes:
            read.append(name)
            return call(folder, name)

        return act

    follower.receiver._engine.version = (chain.name, 2)
    with replaced(folder_module.Directory, "read", note):
        assert follower.receive() == seen[3]
    assert read == [MANIFEST, chain.name_manifest(3), chain.name_file(3, 0)]
    longer = Chain(chain.name, chain.whole, Version(10**7, 9), chain.digest)
    assert len(longer.encode()) == len(chain.encode()) + 7


def publish_past_damage(path: Path, root: Path) -> None:
    """Refits while a file is damaged, up to the next whole version, and after another is lost."""
    forms = {name: (tuple(t.shape), t.dtype) for name, t in tensors_of(path).items()}
    with open_policy(policy_config(path, {}), **UNUSED) as policy:
        to, late = DeltaDirectory(root, whole_every=3), Follower(forms, root)
        for number in range(5):
            disturb(policy, number, 0.02)
            policy.refit(to)
            chain = chain_in(root)
            if number == 0:
                late.receive()
            elif number == 1:
                edit(lambda b: b[:-1] + b"?", root / chain.name_file(1, 0))
                with pytest.raises(RefitError, match="engines take the next whole version"):
                    late.receive()
            elif number == 3:
                assert late.receive() == bits_of(policy) and chain.whole[-1].number == 3
                (root / chain.name_file(2, 0)).unlink()
                lost = chain.name
        assert late.receive() == bits_of(policy) and chain.name != lost


def test_a_whole_version_leads_past_a_damaged_file_and_a_lost_one_begins_a_new_chain(
    ranks: RankPool, checkpoint: Any, tmp_path: Path
) -> None:
    ranks.run(1, publish_past_damage, checkpoint("qwen2", **SIZES), tmp_path / "chain")


def publish_on_a_full_disk(path: Path, section: dict[str, Any], root: Path) -> None:
    """Refits that find no room, on all ranks and on one, for what has changed and for a whole
    version; when there is room again the chain goes on.
    """

    def fill(but: int = 0) -> None:
        if policy.rank == 0:
            ballast.write_bytes(bytes(free(str(root.parent)) - but))

    def check(name: str, number: int, *, whole: int = 0) -> None:
        """The directory has that chain alone, and engines have its newest weights."""
        if policy.rank > 0:
            return
        chain = chain_in(root)
        assert (chain.name, chain.newest.number, chain.whole[-1].number) == (name, number, whole)
        found = open_folder(root).list_files()
        assert chain.is_complete(found, 2) and found.keys() == {"", *set.union(*chain.folders)}
        assert found[""] == [MANIFEST] and len(chain.whole) == 1 + (whole > 0)
        for follower in (late, Follower(forms, root)):
            assert follower.receive() == now

    def fail_on_rank_1(write: Callable[..., Any]) -> Callable[..., Any]:
        def act(file: Path, content: bytes) -> None:
            if policy.rank == 1:
                raise OSError(errno.ENOSPC, "No space left on device", str(file))
            write(file, content)

        return act

    forms = {name: (tuple(t.shape), t.dtype) for name, t in tensors_of(path).items()}
    to, late, ballast = DeltaDirectory(root, whole_every=2), Follower(forms, root), root / "../fill"
    room = r"No space left on device; it takes [\d,]+ bytes, and .* has [\d,]+ left: make room"
    shorter = r", or choose another path\. Engines keep .* remove chain\.json .* whole_every keeps"
    with open_policy(policy_config(path, section), **UNUSED) as policy:
        policy.refit(to)
        now, name = bits_of(policy), chain_in(root).name
        check(name, 0)
        fill()
        disturb(policy, 1, 0.1)
        with pytest.raises(RefitError, match=room + shorter):
            policy.refit(to)
        check(name, 0)
        ballast.unlink(missing_ok=True)
        disturb(policy, 2, 0.1)
        with (
            replaced(folder_module, "write_file", fail_on_rank_1),
            pytest.raises(RefitError, match=f"rank 1: .*{room}"),
        ):
            policy.refit(to)
        check(name, 0)
        disturb(policy, 3, 0.1)
        policy.refit(to)
        now = bits_of(policy)
        check(name, 1)
        fill(but=48 * 1024)  # enough for two deltas
        for number in (2, 3):
            disturb(policy, 2 + number, 0.01)
            with logged(deltas_module) as said:
                assert policy.refit(to).changed_bytes > 0
            now = bits_of(policy)
            check(name, number)
            due = (
                rf"version {number} is published in .* needs [\d,]+ bytes, .*{shorter}.* next refit"
            )
            assert len(said) == (policy.rank == 0) and all(re.search(due, line) for line in said)
        ballast.unlink(missing_ok=True)
        disturb(policy, 6, 0.01)
        policy.refit(to)
        now = bits_of(policy)
        check(name, 4, whole=4)


def test_a_full_disk_costs_the_refits_that_it_has_no_room_for(
    ranks: RankPool, checkpoint: Any, tmp_path: Path
) -> None:
    path, section = checkpoint("qwen2", **SIZES), LAYOUTS["tp2"][1]
    with small_disk(tmp_path / "disk") as disk:
        ranks.run(2, publish_on_a_full_disk, path, section, Path(disk, "chain"))


def publish_in_turn(path: Path, root: Path) -> None:
    """Copies are kept of the two places published in last, and the policy says what it does."""
    with open_policy(policy_config(path, {}), **UNUSED) as policy:
        for number, place in enumerate("ababcbac"):
            disturb(policy, number, 0.02)
            with logged(delivery_module) as said:
                sent = policy.refit(DeltaDirectory(root / place))
            assert bool(sent.changed_bytes) == (not sent.why_whole) == (number in (2, 3, 5))
            assert said == [
                f"the refit of step 0 has sent all weights: {why}"
                for why in [sent.why_whole]
                if why
            ]
            kept = [each.name for each in policy.exporter.published]
            assert kept == list(dict.fromkeys("ababcbac"[number::-1]))[1::-1], number
        assert "2 other places were published in since" in sent.why_whole
        (root / "c" / MANIFEST).unlink()
        assert "gone" in policy.refit(DeltaDirectory(root / "c")).why_whole


def test_copies_of_places_that_others_have_replaced_are_freed(
    ranks: RankPool, checkpoint: Any, tmp_path: Path
) -> None:
    ranks.run(1, publish_in_turn, checkpoint("qwen2", **SIZES), tmp_path)


def add_one(weight: Tensor) -> None:
    weight.view(-1)[0] += 1


def flip_signs(weight: Tensor) -> None:
    """Of two words whose halves end in elements of opposite signs."""
    words = weight.view(-1, 8 // weight.itemsize)
    ends = words[:, [words.shape[1] // 2 - 1, -1]] < 0
    words[(ends.sum(1) == 1).nonzero().flatten()[:2]] *= -1


@pytest.mark.parametrize("change", [add_one, flip_signs])
def test_an_engine_with_other_weights_takes_whole_ones(
    start: Any, change: Callable[[Tensor], None]
) -> None:
    seen, follower = start([0, 1, 2])
    state = follower.receiver._engine
    name = next(iter(state.kept))
    with torch.no_grad():
        change(state.kept[name])
    state.version = (state.version[0], 1)  # the same chain, as if one delta had not come
    with pytest.raises(RefitError, match=r"have another digest.*All weights are taken next"):
        follower.receive()
    assert bits(follower.engine.weights) == seen[2] and state.version is None
    assert follower.receive() == seen[2] and len(follower.engine.loads) == 2


def test_a_refusal_says_what_to_do(start: Any, tmp_path: Path) -> None:
    (tmp_path / "chain").mkdir()
    (tmp_path / "chain" / ".nfs0001").touch()  # as NFS leaves it
    seen, follower = start([0])
    root, forms = follower.root, {name: of[:2] for name, of in seen[0].items()}
    whole = root / chain_in(root).name_whole(0)
    wider = {name: (shape, torch.float64) for name, (shape, _) in forms.items()}
    ahead = Follower(forms, root)
    ahead.receiver.step = 50
    refusals: dict[str, Callable[[], object]] = {
        "has no chain.json yet: .* Call again": Follower(forms, tmp_path / "later").receive,
        "call receive_directory$": Follower(forms, whole).receive,
        "call receive_deltas": partial(follower.receiver.receive_directory, root),
        r"plan\(as_stored=True\).*under Ray .*_info\(as_stored=True\)": Follower(
            wider, root
        ).receive,
        r"^[^.]* accepted\. If [^.]* to None\. The engine keeps [^.]*$": ahead.receive,
    }
    for said, refuse in refusals.items():
        with pytest.raises(RefitError, match=said):
            refuse()


def test_an_engine_that_fails_to_load_is_mixed_until_it_loads_again(start: Any) -> None:
    seen, follower = start([0, 1])
    state, load = follower.receiver._engine, follower.receiver._engine.load

    def fail(tensors: Any) -> None:
        load(tensors[:2])
        raise RuntimeError("no memory")

    for version in (None, (state.version[0], 0)):  # whole ones first, then what has changed
        state.load, state.version, state.mixed = fail, version, True
        with pytest.raises(RefitError, match=r"no memory.*mixed"):
            follower.receive()
        assert follower.receiver.mixed and state.version == version
        state.load = load
    assert follower.receive() == seen[1] and not follower.receiver.mixed


def test_what_cannot_be_followed_or_published_is_refused(start: Any, tmp_path: Path) -> None:
    _, follower = start([0])
    direct = Receiver(follower.engine.load, staged=False)
    with pytest.raises(ConfigError, match="staged=True"):
        direct.receive_deltas(follower.root)
    for wrong in (0, "often"):
        with pytest.raises(ConfigError, match=f"whole_every is {wrong!r}"):
            DeltaDirectory(tmp_path, whole_every=wrong)  # type: ignore[arg-type]


PHASES: dict[str, tuple[Any, str, int, int]] = {
    "before a rank writes": (DeltaDirectory, "_write_file", 1, 1),
    "before a version is published": (DeltaDirectory, "_publish", 0, 1),
    "after a version is published": (folder_module, "flush_directory", 0, 1),
    "while a whole version is written": (hf_writing.ShardFile, "put", 0, 13),
    "before old versions are removed": (DeltaDirectory, "_remove_others", 0, 1),
}
"""When a rank dies: in a call of this, which rank, and after how many or twice or thrice that."""


def die(
    path: Path, section: dict[str, Any], root: Path | str, phase: str, calls: int, seen: Path
) -> None:
    """Publish, and die in that phase after so many calls; what is published is in `seen` too."""
    holder, name, culprit, unit = PHASES[phase]
    left = [calls * unit]

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 and policy.rank == culprit:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args)

        return act

    config = policy_config(path, section, refit_timeout_s=900.0)
    with replaced(holder, name, deadly), open_policy(config, **UNUSED) as policy:
        for number in range(100):
            disturb(policy, number, 0.1)
            now = bits_of(policy)
            if policy.rank == 0:
                torch.save(now, seen / f"{number}.bits")
            policy.refit(DeltaDirectory(root, whole_every=2))


@pytest.mark.parametrize(
    "phase", [pytest.param(p, marks=[pytest.mark.daily] * (p in list(PHASES)[1:2])) for p in PHASES]
)
def test_a_trainer_killed_in_any_phase_leaves_a_chain_that_can_be_followed(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, phase: str
) -> None:
    path, root, section = checkpoint("qwen2", **SIZES), tmp_path / "chain", LAYOUTS["tp2"][1]
    forms = {name: (tuple(t.shape), t.dtype) for name, t in tensors_of(path).items()}
    follower, seen = Follower(forms, root), list[Bits]()
    for calls in (0, 1, 3):
        with pytest.raises(RankFailure, match="died: exit code -9"):
            ranks.run(2, die, path, section, root, phase, calls, tmp_path)
        # Who has died before its first version leaves those of the trainer before it.
        moments = [torch.load(file) for file in tmp_path.glob("*.bits")] + seen[-1:]
        try:
            assert follower.receive() in moments
        except RefitError as error:
            assert not root.joinpath(MANIFEST).exists(), error
        seen, *_ = ranks.run(2, publish, path, section, root, [200, 201])
        assert follower.receive() == seen[-1]
    assert not {file.name for file in root.iterdir()} - {MANIFEST, chain_in(root).name}
