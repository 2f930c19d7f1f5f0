"""Cuts a transformers model on the meta device to what one tensor-parallel rank has of it, and has
activations pass between the ranks where its modules need them.

A block is a child of a layer, such as its attention or its MLP. One whose linear layers are all cut
takes activations once for all of them; others do so at each linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megatron_policy.engines.hugging_face.module import Decoder, SourceTensors
from megatron_policy.engines.hugging_face.table import Cut, Shares
from megatron_policy.engines.hugging_face.tensor_plan import KEY, Plan, Style, linears
from megatron_policy.engines.hugging_face.tensor_regions import TensorRegion
from megatron_policy.errors import ConfigError

Module = torch.nn.Module
_SIZE = "policy.dtensor_cfg.tensor_parallel_size"
_BETWEEN = frozenset({Style.COLUMNS, Style.ROWS})


def split(
    decoder: Decoder,
    plan: Plan,
    sources: Mapping[str, SourceTensors],
    region: TensorRegion,
    ends: bool,
) -> Shares:
    """Cut `decoder` by the plan, and its embedding and head along the vocabulary if `ends`.

    ConfigError, naming the fix, for what the ranks of `region` cannot share.
    """
    # Columns in a layer, or in a block, whose outputs no rows of it take, and the other way round.
    modules = dict(decoder.model.named_modules())
    styles = {id(modules[name]): style for name, style in plan.items()}
    for layer in decoder.layers:
        for unit in layer.children() if region.splits_tokens else (layer,):
            found = {styles[i] for i in map(id, unit.modules()) if i in styles} & _BETWEEN
            if len(found) == 1:
                raise ConfigError(
                    f"the plan of tensor parallelism gives {type(unit).__name__} the style "
                    f"{found.pop().value!r} alone: 'colwise' and 'rowwise' belong together, give "
                    f"both by {KEY}"
                )
    splitting = _Splitting(decoder, plan, sources, region)
    for name, style in plan.items():
        splitting.share(name, style)
    if ends:
        splitting.share_ends()
    splitting.join_blocks()
    return splitting.shares()


class _Splitting:
    """One model's cuts, as they are made."""

    def __init__(
        self,
        decoder: Decoder,
        plan: Plan,
        sources: Mapping[str, SourceTensors],
        region: TensorRegion,
    ) -> None:
        self._decoder, self._sources, self._region = decoder, sources, region
        model = decoder.model
        self._modules: dict[str, Module] = dict(model.named_modules())
        self._styles = {id(self._modules[name]): style for name, style in plan.items()}
        self._whole = {
            name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)
        }
        self._cuts: dict[int, Cut] = {}
        self._partial: set[int] = set()
        self._blocks = [
            (child, self._is_pure(child))
            for layer in decoder.layers
            for child in layer.children()
            if any(id(each) in self._styles for each in child.modules())
            or (region.splits_tokens and any(linears(child)))
        ]
        self._joined = {
            id(each) for child, pure in self._blocks if pure for each in child.modules()
        }
        self._copies = _count_key_copies(model.config.get_text_config(), plan, region.size)

    def _is_pure(self, child: Module) -> bool:
        """Whether its linear layers are all cut, so that only its ends exchange activations."""
        styles = {self._styles[id(each)] for each in child.modules() if id(each) in self._styles}
        cut = all(id(each) in self._styles for each in linears(child))
        return cut and _BETWEEN <= styles <= _BETWEEN | {Style.SINKS}

    def share(self, name: str, style: Style) -> None:
        """Cut the module `name`."""
        module = self._modules[name]
        if style is Style.SINKS:
            self._cut(module, "sinks", name, 0)
        elif style is Style.EXPERTS:
            self._share_experts(name, module)
        elif not isinstance(module, torch.nn.Linear):
            raise ConfigError(
                f"{_SIZE}={self._region.size}: the plan gives {name}, a {type(module).__name__}, "
                f"the style {style.value!r}, which linear layers have: leave it out of {KEY}"
            )
        elif style in (Style.ROWS, Style.ROWS_SPLIT):
            self._share_rows(name, module, split=style is Style.ROWS_SPLIT)
        else:
            self._share_columns(name, module, gather=style is Style.COLUMNS_GATHERED)

    def _share_columns(self, name: str, module: torch.nn.Linear, gather: bool) -> None:
        keys = not gather and name.rsplit(".", 1)[-1] in ("k_proj", "v_proj")
        copies = self._copies if keys else 1
        for each, parameter in module._parameters.items():
            if parameter is not None:
                self._cut(module, each, name, 0, copies=copies)
        region, before = self._region, id(module) not in self._joined
        if not before and not gather:
            return
        computed = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = computed(_copied(region, x) if before else x)
            return region.gather_features(y) if gather else y

        module.forward = forward  # type: ignore[method-assign,assignment]

    def _share_rows(self, name: str, module: torch.nn.Linear, split: bool) -> None:
        self._cut(module, "weight", name, 1)
        region, joined = self._region, id(module) in self._joined
        if module.bias is not None and joined and region.splits_tokens:
            self._partial.add(id(module.bias))

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = F.linear(region.own_features(x) if split else x, module.weight)
            y = region.leave(y) if joined else _summed(region, y)
            return y if module.bias is None else y + module.bias

        module.forward = forward  # type: ignore[method-assign,assignment]

    def _share_experts(self, name: str, module: Module) -> None:
        """Each rank computes a share of every expert's inner features; outputs are summed."""
        dims, added = self._find_inner_dims(name, module), []
        for each, parameter in module._parameters.items():
            if parameter is None:
                continue
            if each == "down_proj_bias":
                added.append(each)
                self._partial.add(id(parameter))
            elif each in dims:
                self._cut(module, each, name, dims[each], of=2 if each in _PAIRS else 1)
            else:
                raise ConfigError(
                    f"{_SIZE}={self._region.size} cannot share {name}.{each}, which this package "
                    "does not know: set it to 1"
                )
        computed, region = module.forward, self._region

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            args = tuple(_copied(region, each) for each in args)
            kwargs = {key: _copied(region, each) for key, each in kwargs.items()}
            # A bias that every rank adds counts once in the sum.
            own = {each: module._parameters[each] for each in added}
            for each, bias in own.items():
                module._parameters[each] = bias / region.size  # type: ignore[operator,assignment]
            try:
                return _summed(region, computed(*args, **kwargs))
            finally:
                module._parameters.update(own)

        module.forward = forward

    def _find_inner_dims(self, name: str, module: Module) -> dict[str, int]:
        """By the name of a parameter of experts: the dimension of the inner features, of one expert
        if the file has them one by one.
        """
        weights = module._parameters
        first = "gate_up_proj" if "gate_up_proj" in weights else "up_proj"
        if self._sources[f"{name}.{first}"].stacked:
            return {first: 0, "down_proj": 1}
        up, down = weights[first], weights["down_proj"]
        assert up is not None and down is not None
        if up.size(1) != down.size(2):  # the model's features, if weights are transposed
            raise ConfigError(
                f"{_SIZE}={self._region.size} cannot share {name}.{first}, where each expert has "
                "its gates above its up projections: set it to 1"
            )
        return _TRANSPOSED

    def share_ends(self) -> None:
        """Cut the embedding and the head along the vocabulary."""
        model, region = self._decoder.model, self._region
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head.weight is embedding.weight
        vocab = embedding.weight.size(0)
        for module in (embedding,) if tied else (embedding, head):
            self._cut(module, "weight", "", 0, padded=True)
        if tied:
            head._parameters["weight"] = embedding._parameters["weight"]
        first, real, _ = Cut(region.size, 0).share((vocab,), 0, region.rank)
        ignored = embedding.padding_idx
        if ignored is not None:
            inside = first <= ignored < first + real
            embedding.padding_idx = ignored - first if inside else None
        computed = embedding.forward

        def forward(tokens_RT: torch.Tensor) -> torch.Tensor:
            own_RT = tokens_RT - first
            mine_RT = (own_RT >= 0) & (own_RT < real)
            found_RTD = computed(own_RT.masked_fill(~mine_RT, 0))
            return region.leave(found_RTD.masked_fill(~mine_RT.unsqueeze(-1), 0.0))

        embedding.forward = forward

    def join_blocks(self) -> None:
        """Have activations enter and leave the blocks, and find which gradients are partial."""
        region = self._region
        for child, pure in self._blocks:
            if pure:
                _wrap(child, region.enter, None)
            elif region.splits_tokens:
                _wrap(child, region.enter_alike, region.leave_alike)
            self._find_partial(child)
        if region.splits_tokens:
            inside = {id(p) for child, _ in self._blocks for p in child.parameters()}
            self._partial |= {id(p) for p in self._decoder.model.parameters()} - inside

    def _find_partial(self, child: Module) -> None:
        """Weights between cut linear layers see this rank's heads or features only: those that are
        the same for all of them are supported.
        """
        for parent in child.modules():
            among = list(parent.children())
            if not any(self._styles.get(id(each)) is Style.COLUMNS for each in among):
                continue
            if hasattr(parent, "num_key_value_groups"):
                settings = self._decoder.model.config.get_text_config()
                heads = settings.num_attention_heads
                keys = getattr(settings, "num_key_value_heads", None) or heads
                parent.num_key_value_groups = heads // max(keys, self._region.size)
            for module in (parent, *among):
                if isinstance(module, torch.nn.Linear):
                    continue
                for name, parameter in module._parameters.items():
                    if parameter is None or id(parameter) in self._cuts:
                        continue
                    whole = [each for each in linears(parent) if id(each) not in self._styles]
                    alike = ((), (1,), (getattr(parent, "head_dim", None),))
                    if whole or tuple(parameter.shape) not in alike:
                        raise ConfigError(
                            f"{_SIZE}={self._region.size} cannot split {type(parent).__name__}, "
                            f"whose {type(module).__name__}.{name} is not one for all: set "
                            "it to 1, or use megatron_cfg"
                        )
                    self._partial.add(id(parameter))

    def _cut(
        self,
        module: Module,
        each: str,
        name: str,
        dim: int,
        *,
        copies: int = 1,
        of: int = 1,
        padded: bool = False,
    ) -> None:
        """Leave this rank's share of a parameter along `dim` of its HF tensors, whose length there
        is in units of `of` elements.
        """
        parameter = module._parameters[each]
        assert parameter is not None
        source = self._sources.get(f"{name}.{each}")
        at = dim + bool(source and source.stacked)
        shares, length = self._region.size // copies, parameter.size(at)
        if length % (shares * of) and not padded:
            legal = [n for n in range(1, length // of + 1) if length // of % n == 0]
            raise ConfigError(
                f"{_SIZE}={self._region.size} does not divide the {length // of} features of "
                f"{name}.{each}: use one of {legal[:12]}"
            )
        shape = list(parameter.shape)
        shape[at] = -(-length // shares)
        own = torch.nn.Parameter(
            torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
        )
        module._parameters[each] = own
        self._cuts[id(own)] = Cut(self._region.size, dim, copies)

    def shares(self) -> Shares:
        """All cuts, by the names of parameters."""
        named = list(self._decoder.model.named_parameters(remove_duplicate=False))
        return Shares(
            ranks=self._region.size,
            shapes=self._whole,
            cuts={name: self._cuts[id(p)] for name, p in named if id(p) in self._cuts},
            partial=frozenset(name for name, p in named if id(p) in self._partial),
        )


def _count_key_copies(settings: Any, plan: Plan, size: int) -> int:
    """How many of `size` ranks have the same key-value head, because they are more than those."""
    named = (name for name, style in plan.items() if style is Style.COLUMNS)
    heads = getattr(settings, "num_attention_heads", None)
    if heads is None or not any("attn" in name or "attention" in name for name in named):
        return 1
    groups = getattr(settings, "num_key_value_heads", None) or heads
    legal = [n for n in range(1, heads + 1) if not (heads % n or (groups % n and n % groups))]
    if size not in legal:
        raise ConfigError(
            f"{_SIZE}={size} does not split {heads} attention heads with {groups} key-value "
            f"heads: use one of {legal}"
        )
    copies: int = max(1, size // groups)
    return copies


_PAIRS = ("gate_up_proj", "gate_up_proj_bias")
"""Gate and up projection in one."""
_TRANSPOSED = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}
"""The dimension of the inner features where the file has stacks too, of transposed weights."""


def _copied(region: TensorRegion, x: Any) -> Any:
    """`x` for weights of which each rank has a share; it has all positions already."""
    floats = isinstance(x, torch.Tensor) and x.is_floating_point()
    with region.whole_sequences():
        return region.enter(x) if floats else x


def _summed(region: TensorRegion, x: torch.Tensor) -> torch.Tensor:
    with region.whole_sequences():
        return region.leave(x)


def _wrap(
    module: Module,
    enter: Callable[[torch.Tensor], torch.Tensor],
    leave: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    """Pass the hidden states of a block, its first argument or `hidden_states`, through `enter`,
    and what it makes of them, alone or the first of several, through `leave`.
    """
    computed = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (enter(args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = enter(kwargs["hidden_states"])
        found = computed(*args, **kwargs)
        if leave is None:
            return found
        return (leave(found[0]), *found[1:]) if isinstance(found, tuple) else leave(found)

    module.forward = forward
