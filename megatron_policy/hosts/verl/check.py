"""Says what becomes of a composed configuration of verl, without verl, GPUs or weights:
`python -m megatron_policy.hosts.verl.check FILE`, of what `--cfg job --resolve` has verl print.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.config import PolicyConfig
from megatron_policy.config.composed import load_yaml
from megatron_policy.config.layout import checked_topology
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.hosts.roles import check_alike
from megatron_policy.hosts.verl.sections import with_verl_names
from megatron_policy.hosts.verl.translate import translate
from megatron_policy.parallel.topology import Topology

_AXES = ("tp", "cp", "pp", "vpp", "ep", "dp")


def roles(document: Mapping[str, Any]) -> dict[str, list[Any]]:
    """verl's sections model, engine, optim and checkpoint of each engine that it makes, by the
    engine's role. KeyError for a document that is not a configuration of its SFT or PPO trainers.
    """
    if "actor_rollout_ref" not in document:
        return {"model": [document[key] for key in ("model", "engine", "optim", "checkpoint")]}
    workers, critic = document["actor_rollout_ref"], document["critic"]
    actor, model, algorithm = workers["actor"], workers["model"], document["algorithm"]
    found = {"actor": [model, _engine(actor), actor["optim"], actor["checkpoint"]]}
    adapted = model["lora"]["rank"] or model["lora_rank"] or model["lora_adapter_path"]
    # With adapters the reference is the actor without them.
    if (algorithm["use_kl_in_reward"] or actor["use_kl_loss"]) and not adapted:
        found["ref"] = [model | {"mtp": None}, _engine(workers["ref"]), None, None]
    gae = algorithm["adv_estimator"] == "gae"
    if gae if critic["enable"] is None else critic["enable"]:
        values = critic["model"] | {"model_type": "value_model"}
        found["critic"] = [values, _engine(critic), critic["optim"], critic["checkpoint"]]
    return found


def _engine(role: Mapping[str, Any]) -> dict[str, Any]:
    sections = {"megatron_policy": "engine", "megatron": "megatron"}
    if role["strategy"] not in sections:
        raise ConfigError(
            f"a strategy is {role['strategy']!r}, an engine of verl's own: set model_engine to "
            f"{' or '.join(sections)}"
        )
    found: dict[str, Any] = role[sections[role["strategy"]]]
    return found


def report(document: Mapping[str, Any]) -> Iterator[str]:
    """A line for each role, and one for each key that asks in vain. ConfigError or ConversionError
    for what is refused.
    """
    ranks = document["trainer"]["nnodes"] * document["trainer"]["n_gpus_per_node"]
    made: dict[str, tuple[PolicyConfig, Topology]] = {}
    for role, (model, engine, optim, checkpoint) in roles(document).items():
        model["hf_config"] = SimpleNamespace(**read_config(model["path"]))
        engine["use_remove_padding"] = model["use_remove_padding"]
        with with_verl_names():
            translation = translate(model, engine, optim, checkpoint)
            config = translation.parse()
            table, _ = bind_tables(config)
            topology = checked_topology(config, table.architecture, ranks, planned=True)
        made[role] = config, topology
        axes = " x ".join(f"{axis}={getattr(topology, axis)}" for axis in _AXES)
        yield f"{role}: {config.model_name} in {config.precision} on {ranks} ranks, {axes}"
        yield from (f"  {warning}" for warning in translation.warnings)
    (trained, layout), *_ = made.values()
    if "ref" in made:
        with with_verl_names():
            check_alike(trained, made["ref"][0])
    if "critic" in made and made["critic"][1] != layout:
        raise ConfigError("actor and critic differ in their layouts: give both the same sizes")


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if len(arguments) != 1:
        print("usage: python -m megatron_policy.hosts.verl.check FILE", file=sys.stderr)
        return 2
    try:
        for line in report(load_yaml(Path(arguments[0]))):
            print(line)
    except (KeyError, TypeError) as error:
        print(f"error: {arguments[0]} is not what verl prints: {error!r}", file=sys.stderr)
        return 2
    except (ConfigError, ConversionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
