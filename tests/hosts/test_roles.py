"""A trained role and a reference of one process on one policy, in whatever order they enter, leave
and fail; and two policies side by side that compute what each computes alone.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.config.section import Section
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.roles import MAY_DIFFER, SharedPolicy, check_alike
from megatron_policy.memory.states import Kind
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, own_share, policy_config
from tests.dist.layouts import LAYOUTS, SIZES

PARAMETERS, OPTIMIZER = Kind.PARAMETERS, Kind.OPTIMIZER


class Engine:
    """What a host makes for a role."""


class Memory:
    def __init__(self) -> None:
        self.calls: list[tuple[str, frozenset[Kind]]] = []

    def offload(self, kinds: frozenset[Kind]) -> None:
        self.calls.append(("offload", kinds))

    def onload(self, kinds: frozenset[Kind]) -> None:
        self.calls.append(("onload", kinds))


class Policy:
    """Remembers how it was made and what it was asked for."""

    made: list[Policy] = []  # noqa: RUF012

    def __init__(self, config: PolicyConfig, tokenizer: Any, **options: Any) -> None:
        if config.seed == 13:
            raise ConfigError("no such seed")
        self.config, self.options, self.open, self.in_reference = config, options, True, False
        self.memory = Memory()
        assert not any(each.open for each in self.made), "one at a time"
        self.made.append(self)

    @contextmanager
    def reference(self) -> Iterator[None]:
        assert not self.in_reference
        self.in_reference = True
        try:
            yield
        finally:
            self.in_reference = False

    def shutdown(self) -> None:
        self.open = False


class Process:
    """A process of a host, whose roles enter and leave."""

    def __init__(self) -> None:
        self.stage, self.engine = SharedPolicy(Policy), Engine()

    def enter_reference(self, name: str = "model", *, offloads: bool = False, **top: Any) -> None:
        self.stage.enter_reference(config(name, **top), offloads=offloads)

    def enter_trained(self, name: str = "model", *, offloads: bool = False, **top: Any) -> Any:
        return self.stage.enter_trained(self.engine, config(name, **top), offloads=offloads)


@pytest.fixture
def process() -> Iterator[Process]:
    Policy.made.clear()
    yield Process()
    Policy.made.clear()


def config(name: str = "model", **top: Any) -> PolicyConfig:
    return PolicyConfig.parse(policy_config(name, {}, **top))


def test_a_reference_waits_for_the_trained_role_and_shares_its_policy(process: Process) -> None:
    process.enter_reference()
    assert not Policy.made
    policy = process.enter_trained()
    assert policy.options["init_reference_model"] and len(Policy.made) == 1
    with pytest.raises(ValueError, match="of a loss"), process.stage.as_reference():
        raise ValueError("of a loss")
    assert not policy.in_reference, "the trained weights are back after an exception"
    with process.stage.as_reference() as found:
        assert found is policy and policy.in_reference
    assert not policy.in_reference


def test_a_reference_that_computes_first_has_a_policy_of_its_own_which_gives_way(
    process: Process,
) -> None:
    process.enter_reference()
    with process.stage.as_reference() as own:
        assert not own.in_reference and own.options["init_optimizer"] is False
    with pytest.raises(ConfigError, match="no such seed"):
        process.enter_trained(seed=13)
    with process.stage.as_reference() as own:
        assert own.open and not own.in_reference, "it computes after a build that failed"
    policy = process.enter_trained()
    assert (own.open, policy.open) == (False, True)
    assert process.stage.policy_of_reference() is policy


def test_a_reference_of_other_weights_is_read_into_the_same_policy(process: Process) -> None:
    process.enter_reference("older")
    policy = process.enter_trained("newer")
    assert policy.config.model_name == "newer"
    assert policy.config.reference_model_name == "older"
    process.enter_reference("older")


def test_a_reference_that_both_roles_name_is_the_policys(process: Process) -> None:
    named = {"reference_model_name": "oldest"}
    for model in ("newer", "older"):
        process.enter_reference(model, **named)
        policy = process.enter_trained("newer", **named)
        assert policy.config.reference_model_name == "oldest"
        assert policy.options["init_reference_model"]
        with process.stage.as_reference() as found:
            assert found is policy and policy.in_reference
        process.enter_reference(model, **named)
        process.stage.leave()


def test_a_repeated_reset_of_either_role_leaves_one_policy(process: Process) -> None:
    process.enter_reference()
    first = process.enter_trained()
    process.enter_reference()
    assert process.stage.policy_of_reference() is first
    second = process.enter_trained()
    assert [each.open for each in Policy.made] == [False, True]
    assert second.options["init_reference_model"]


def test_a_reset_reference_alone_takes_its_new_configuration(process: Process) -> None:
    process.enter_reference("older")
    first = process.stage.policy_of_reference()
    process.enter_reference("older", offloads=True)
    assert process.stage.policy_of_reference() is first
    process.enter_reference("newer")
    assert process.stage.policy_of_reference().config.model_name == "newer" and not first.open


def test_roles_that_differ_are_refused_with_the_keys_and_both_values(process: Process) -> None:
    half = {"precision": "bfloat16"}
    process.enter_reference(**half)
    own = process.stage.policy_of_reference()
    with pytest.raises(ConfigError, match="precision: 'float32' and 'bfloat16'"):
        process.enter_trained()
    assert own.open, "what was there stays"
    policy = process.enter_trained(**half)
    other = PolicyConfig.parse(policy_config("model", {"tensor_model_parallel_size": 2}, **half))
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size: 1 and 2: give both"):
        process.stage.enter_reference(other, offloads=False)
    assert policy.open and process.stage.policy_of_reference() is policy


def paths(section: type[Section], at: str = "") -> Iterator[str]:
    """The sections of a configuration and the keys in them."""
    for name, field in section.model_fields.items():
        yield at + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from paths(field.annotation, f"{at}{name}.")


def changed(section: Section, path: str, value: object) -> Any:
    name, _, rest = path.partition(".")
    return section.model_copy(
        update={name: changed(getattr(section, name), rest, value) if rest else value}
    )


FREE = {key: why for why, keys in MAY_DIFFER.items() for key in keys.split()}


def test_keys_in_which_roles_may_differ_exist_once_and_all_others_have_to_agree() -> None:
    every = [*paths(PolicyConfig)]
    assert set(FREE) <= set(every) and len(FREE) == sum(
        len(keys.split()) for keys in MAY_DIFFER.values()
    )
    keys = {path for path in every if not any(each.startswith(f"{path}.") for each in every)}
    assert len(keys) > 150
    for key in keys:
        parts = key.split(".")
        other = changed(config(), key, object())
        if any(".".join(parts[:count]) in FREE for count in range(1, len(parts) + 1)):
            check_alike(other, config())
        else:
            with pytest.raises(ConfigError, match=rf"agree in policy\.{re.escape(key)}\b"):
                check_alike(other, config())


def test_a_reference_may_lack_the_actors_adapters_but_not_have_its_own() -> None:
    plain, adapted, other = (
        PolicyConfig.parse(policy_config("model", megatron))
        for megatron in ({}, *({"peft": {"enabled": True, "dim": 4, "alpha": a}} for a in (4, 8)))
    )
    for reference in (plain, adapted):
        check_alike(adapted, reference)
    for trained, key in ((plain, "enabled: False and True"), (other, r"alpha: 8\.0 and 4\.0")):
        with pytest.raises(ConfigError, match=rf"megatron_cfg\.peft\.{key}"):
            check_alike(trained, adapted)


def test_a_refusal_does_not_show_environment_variables() -> None:
    secret = changed(config(), "megatron_cfg.env_vars", {"TOKEN": "secret"})
    with pytest.raises(
        ConfigError, match=r"agree in policy\.megatron_cfg\.env_vars: give both"
    ) as found:
        check_alike(config(), secret)
    assert "secret" not in str(found.value)


@pytest.mark.parametrize("name", ["model", "other"])
def test_a_reference_after_a_policy_without_one_is_refused(process: Process, name: str) -> None:
    process.enter_trained()
    with pytest.raises(ConfigError, match="make the reference first"):
        process.enter_reference(name)


def test_a_second_trained_role_is_refused_until_the_first_is_gone(process: Process) -> None:
    policy, other = process.enter_trained(), Engine()
    with pytest.raises(ConfigError, match="'model' is trained in this process already"):
        process.stage.enter_trained(other, config("other"), offloads=False)
    assert policy.open
    del process.engine
    gc.collect()
    assert process.stage.enter_trained(other, config("other"), offloads=False).open
    assert not policy.open


def test_a_reference_that_has_not_entered_cannot_compute(process: Process) -> None:
    with pytest.raises(RuntimeError, match="the reference is not initialized"):
        process.stage.policy_of_reference()


def test_parameters_leave_the_device_if_all_roles_ask_for_it(process: Process) -> None:
    whole = frozenset({PARAMETERS, OPTIMIZER})
    for reference, trained, moved in (
        (True, True, whole),
        (True, False, {OPTIMIZER}),
        (False, True, {OPTIMIZER}),
        (None, True, whole),
    ):
        if reference is not None:
            process.enter_reference(offloads=reference)
        policy = process.enter_trained(offloads=trained)
        process.stage.offload(whole)
        process.stage.onload(frozenset({PARAMETERS}))
        process.stage.offload(frozenset())
        assert policy.memory.calls == [("offload", moved), ("onload", {PARAMETERS})]
        process.stage.leave()


def test_a_process_that_everyone_has_left_is_as_new(process: Process) -> None:
    process.enter_reference(precision="bfloat16")
    policy = process.enter_trained(precision="bfloat16")
    process.stage.leave()
    assert not policy.open
    other = process.enter_trained(offloads=True)
    assert not other.options["init_reference_model"]


def batch() -> BatchedDataDict:
    return oracle.make_batch(GLOBAL_BATCH, 13, SIZES["vocab"])


def one_step(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    data = own_share(policy, batch())
    found = {"norm": policy.train(data, LOSSES["token"](), mbs=1)["grad_norm"]}
    found["after"] = policy.logprobs(data)
    return found | {name: each.detach().clone() for name, each in policy.named_parameters()}


def alone_and_together(
    first: dict[str, Any], second: dict[str, Any], third: dict[str, Any], folder: str
) -> list[dict[str, torch.Tensor]]:
    """The second policy's numbers alone, and beside the first; the first's after both; what a
    third layout is refused with; and a save and exports of both.
    """
    join_process_group(60.0)  # as hosts do
    with_reference = {"init_reference_model": True}
    policy = MegatronPolicy(second, **with_reference)
    alone = one_step(policy)
    policy.shutdown()
    policy = MegatronPolicy(first, **with_reference)
    expected = one_step(policy)
    policy.shutdown()

    one, two = MegatronPolicy(first, **with_reference), MegatronPolicy(second, **with_reference)
    together = one_step(two)
    other = one_step(one)
    for name, each in (("one", one), ("two", two)):
        each.save_checkpoint(f"{folder}/{name}", f"{folder}/{name}")
    with one.reference():
        read = two.logprobs(own_share(two, batch()))
    assert torch.equal(read, together["after"])
    exported = dict(two.export())
    two.shutdown()
    again = one.logprobs(own_share(one, batch()))
    assert torch.equal(again, other["after"]), "the first goes on when the second has gone"
    assert exported.keys() == dict(one.export()).keys()
    with pytest.raises(ConfigError, match=r"in another layout: .*dp 2 \(not 1\)"):
        MegatronPolicy(third)
    one.shutdown()
    return [alone, together, expected, other]


@pytest.mark.parametrize("name", ["TP2+SP", "PP2"])
def test_two_policies_of_one_process_compute_what_each_computes_alone(
    ranks: Any, checkpoint: Any, tmp_path: Path, name: str
) -> None:
    path = checkpoint("qwen2", **SIZES)
    first = policy_config(path, LAYOUTS[name].megatron)
    second = policy_config(path, LAYOUTS[name].megatron, lr=3 * oracle.LR)
    for found in ranks.run(
        2, alone_and_together, first, second, policy_config(path, {}), str(tmp_path)
    ):
        alone, together, expected, other = found
        assert all(torch.equal(together[key], each) for key, each in alone.items())
        assert all(torch.equal(other[key], each) for key, each in expected.items())
        assert any(not torch.equal(other[key], each) for key, each in together.items())


def leave_in_order(config: dict[str, Any]) -> None:
    one, two = MegatronPolicy(config), MegatronPolicy(config)
    one.shutdown()
    assert torch.distributed.is_initialized(), "the other one is in the group"
    two.logprobs(own_share(two, batch()))
    two.shutdown()
    assert not torch.distributed.is_initialized()


def test_the_process_group_ends_with_the_last_policy_in_it(ranks: Any, checkpoint: Any) -> None:
    ranks.run(1, leave_in_order, policy_config(checkpoint("qwen2", **SIZES), {}))
