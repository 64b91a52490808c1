"""The learner's arithmetic: bf16 or fp16 over fp32 master weights, or fp32 throughout.

Some tensors are stored, gathered and sent in fp32 in all: vectors, the rows of routers, and the
decay rates and convolutions of recurrent layers. They are a thousandth of a network. A pass in 16
bits rounds those of them that are factors of a product, as autocast does, and all other tensors.

A version for the engines has the numbers that the pass uses (`rounded_names`). Otherwise an engine
in fp32 would follow updates that the pass does not see, and its samples would come from another
policy than the gradient.
"""

import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from common.config.learner import LearnerSection, Precision
from common.errors import ConfigError
from common.host.machine import has_bf16_units
from learner.policy.expert_weights import holds_experts
from learner.policy.precision_choice import PrecisionChoice, choose_precision
from learner.training.ranks import Ranks

_ENTERED = "rounding_modes"  # Attribute of a module: the modes of its current calls.
DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}
LARGEST_FP16 = torch.finfo(torch.float16).max
MAX_WIDTH = 16  # Product of the shorter axes: states of Mamba have 16 numbers, convolutions 4.


def settled_precision(
    learner: LearnerSection, device: torch.device, *, path: str, engine_dtype: str = ""
) -> PrecisionChoice:
    """Return precision and rounding as configured, or as of the rules for a checkpoint.

    Args:
        path: folder of the checkpoint to start from; "": new weights.
        engine_dtype: value of `model.dtype`; "": the training has no engines.

    Raises: ConfigError: as `choose_precision`.
    """
    folder = Path(path) if path else None
    has_units = precision_by_rule(device.type) is Precision.BF16
    is_cuda = device.type == "cuda"
    return choose_precision(
        learner, folder, is_cuda=is_cuda, has_units=has_units, engine_dtype=engine_dtype
    )


def pass_dtype(learner: LearnerSection, device: torch.device) -> torch.dtype:
    """Return the dtype of the passes; auto is what the device has units for."""
    if learner.precision is Precision.AUTO:
        return DTYPES[precision_by_rule(device.type)]
    return DTYPES[learner.precision]


def frozen_dtype(
    learner: LearnerSection, device: torch.device, *, engine_dtype: str = ""
) -> torch.dtype:
    """Return the dtype of frozen weights: on GPUs the dtype of the computation.

    Args:
        engine_dtype: value of `model.dtype`; "": the training has no engines.
    """
    # The rule for adapters beside engines in fp32; a settled precision is not auto.
    is_fp32 = learner.lora.rank > 0 and engine_dtype == "float32"
    is_fp32 = is_fp32 and learner.precision is Precision.AUTO
    if device.type != "cuda" or is_fp32:
        return torch.float32
    return pass_dtype(learner, device)


@cache
def precision_by_rule(device_type: str) -> Precision:
    """Return bf16 if the device has units for it; the result is the same on every start."""
    if device_type == "cuda":
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_units = has_bf16_units()
    return Precision.BF16 if has_units else Precision.FP32


def exact_names(network: nn.Module, shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the names of a network's tensors that stay in fp32.

    Args:
        shapes: shapes of the tensors by name.
    """
    num_experts = {count for module in network.modules() for count in _counts_in(module)}
    listed = _listed(network)
    return {
        name
        for name, shape in shapes.items()
        if stays_exact(shape, num_experts) or listed.search(name)
    }


def rounded_names(network: nn.Module, shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the names of a network's tensors that a pass in 16 bits rounds to its dtype.

    These are the tensors that do not stay in fp32, and factors of products that do: autocast rounds
    biases, convolutions and the rows of routers. The biases of Mamba-2's time steps are cast to the
    dtype of the steps. Norms, decay rates and corrections remain.

    Args:
        shapes: shapes of the tensors by name.
    """
    exact = exact_names(network, shapes)
    # Falcon H1 scales its time steps in fp32, so their bias is added in fp32, too.
    is_scaled = hasattr(getattr(network, "config", None), "ssm_multipliers")
    return {
        name
        for name in shapes
        if name not in exact
        or _is_factor(name, shapes)
        or (_is_step_bias(name, shapes) and not is_scaled)
    }


def _is_step_bias(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a tensor is the bias of Mamba-2's time steps, which are in bf16.

    Delta networks have no `D` beside theirs, and add it in fp32.
    """
    owner, _, kind = name.rpartition(".")
    return kind == "dt_bias" and f"{owner}.D" in shapes


def _is_factor(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a tensor is the weight or the bias of a layer whose weight is a matrix."""
    owner, _, kind = name.rpartition(".")
    return kind in ("weight", "bias") and len(shapes.get(f"{owner}.weight", ())) > 1


class RoundedFactors(TorchFunctionMode):
    """Rounds factors to the dtype of a pass that autocast leaves in fp32.

    Autocast knows neither the rows of tables nor the products of stacked experts, and some routers
    turn it off. Sharded weights are gathered in 16 bits, so several ranks would compute another
    function than one rank.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        match getattr(func, "__name__", ""):
            case "embedding":
                return on_grid(func(*args, **named), self._dtype)
            case "linear":
                rows, *factors = args
                named = {key: self._rounded(each) for key, each in named.items()}
                return func(rows, *map(self._rounded, factors), **named)
            case "_grouped_mm" | "grouped_mm_fallback":
                states, weights, *others = args
                both = (states.to(self._dtype), weights.to(self._dtype))
                return func(*both, *others, **named).to(states.dtype)
            case _:
                return func(*args, **named)

    def _rounded(self, value: Any) -> Any:
        return on_grid(value, self._dtype) if isinstance(value, Tensor) else value


def on_grid(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight rounded to `dtype`, in its own dtype. Its gradient is that of the result."""
    return weight.to(dtype).to(weight.dtype)


def round_all_factors(network: nn.Module) -> None:
    """Let tables, stacked experts and routers of a network follow autocast, like other products.

    A second call changes nothing. Without autocast their results are the same as before.
    """
    for module in network.modules():
        is_odd = isinstance(module, nn.Embedding) or holds_experts(module) or _is_router(module)
        if is_odd and not hasattr(module, _ENTERED):
            setattr(module, _ENTERED, [])
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)


def _is_router(module: nn.Module) -> bool:
    """Return whether a module multiplies by a matrix in its own code, as routers do."""
    weight = module._parameters.get("weight")
    is_plain = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    return weight is not None and weight.ndim > 1 and not is_plain


def _enter(module: nn.Module, _: object) -> None:
    """Begin to round, if autocast is active on the module's device."""
    device_type = next(module.parameters()).device.type
    is_cast = torch.is_autocast_enabled(device_type)
    mode = RoundedFactors(torch.get_autocast_dtype(device_type)) if is_cast else None
    getattr(module, _ENTERED).append(mode)
    if mode is not None:
        mode.__enter__()


def _leave(module: nn.Module, _: object, __: object) -> None:
    """End what `_enter` began."""
    mode = getattr(module, _ENTERED).pop()
    if mode is not None:
        mode.__exit__(None, None, None)


def store_in(network: nn.Module, dtype: torch.dtype, *, is_sharded: bool) -> None:
    """Let a frozen network in fp32, without values yet, store its matrices in 16 bits.

    It computes the numbers that a pass of this dtype over master weights in fp32 computes. Norms
    and other tensors that such a pass does not round remain in fp32, and so do tables. Modules with
    code of their own, such as experts, have their weights in fp32 while they compute: their results
    would have another dtype otherwise. Sharded weights are gathered in `dtype` for both networks.
    """
    state = network.state_dict(keep_vars=True)
    exact = exact_names(network, {name: each.shape for name, each in state.items()})
    tables = [each for each in network.modules() if isinstance(each, nn.Embedding)]
    wide = {id(state[name]) for name in exact} | {
        id(each.weight) for each in tables if not is_sharded
    }
    for each in network.parameters():
        if id(each) not in wide:
            each.data = each.data.to(dtype)
    for module in network.modules():
        if not is_sharded and not isinstance(module, nn.Linear) and _halves(module):
            module.register_forward_pre_hook(_widen)
            module.register_forward_hook(_narrow, always_call=True)


def _halves(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a module itself that are stored in 16 bits."""
    stored = module.named_parameters(recurse=False)
    return {name: each for name, each in stored if each.dtype in (torch.bfloat16, torch.float16)}


_NARROW = "weights_in_16_bits"  # Attribute of a module while it computes: its stored weights.


def _widen(module: nn.Module, _: object) -> None:
    """Replace the weights of a module by copies in fp32 for one call."""
    stored = _halves(module)
    setattr(module, _NARROW, {name: each.data for name, each in stored.items()})
    for each in stored.values():
        each.data = each.data.float()


def _narrow(module: nn.Module, _: object, __: object) -> None:
    """End what `_widen` began."""
    for name, numbers in getattr(module, _NARROW).items():
        module.get_parameter(name).data = numbers
    delattr(module, _NARROW)


def stays_exact(shape: Sequence[int], num_experts: Iterable[int]) -> bool:
    """Return whether a tensor keeps its own dtype: a vector, or one row for each expert.

    Example with 64 experts: [64] and [64, 2048] stay exact; [8192, 16] is a set of decay rates and
    [8192, 1, 4] a convolution, which are nearly vectors. [2048, 8192] is cast.

    Args:
        num_experts: the numbers of experts in the layers of the network.
    """
    width = prod(sorted(shape)[:-1])
    return width <= MAX_WIDTH or (len(shape) == 2 and shape[0] in set(num_experts))


def _listed(network: nn.Module) -> re.Pattern[str]:
    """Return a pattern of the names that transformers keeps in fp32 in every network."""
    models = [each for each in network.modules() if isinstance(each, PreTrainedModel)]
    names = {name for each in models for name in each._keep_in_fp32_modules_strict or ()}
    patterns = [rf"(^|\.){re.escape(name)}(\.|$)" for name in sorted(names)]
    return re.compile("|".join(patterns) or "(?!)")


def _counts_in(module: nn.Module) -> Iterator[int]:
    """Yield the numbers of experts that a router or its block has as attributes."""
    for name, value in vars(module).items():
        if "experts" in name and type(value) is int:
            yield value


def check_range(networks: Iterable[nn.Module], ranks: Ranks) -> None:
    """Check that fp16 has the weights that a pass in fp16 rounds. All ranks call it together.

    Raises: ConfigError: names the first tensor with a number above 65,504, on any rank.
    """
    for network in networks:
        weights = dict(network.named_parameters())
        names = rounded_names(network, {name: each.shape for name, each in weights.items()})
        largest = torch.zeros(len(weights))
        for index, (name, weight) in enumerate(weights.items()):
            numbers = _local(weight).detach()
            if name in names and numbers.numel() and numbers.is_floating_point():
                largest[index] = numbers.float().abs().max() > LARGEST_FP16
        beyond = ranks.sum(largest).nonzero()
        if len(beyond):
            name = list(weights)[int(beyond[0])]
            raise ConfigError(
                f"learner.precision=fp16: the weight {name} has a number above"
                f" {LARGEST_FP16:,.0f}, the largest of fp16. Use learner.precision=bf16 or fp32"
            )


logger = logging.getLogger(__name__)

# Numbers of each weight that are compared. All numbers of a large weight would take a copy of it.
NUM_COMPARED = 1 << 16
MAX_HIDDEN_FRAC = 0.9  # A larger share is logged as a warning.


DRAWN_NUMBERS = 1 << 16  # Numbers of a CPU's weight that are rounded at once: they fit its caches.
DRAWN_NUMBERS_GPU = 1 << 24
# Multipliers of MurmurHash3's last step and of the index, as signed numbers of 32 bits.
_FIRST, _SECOND, _STRIDE = -2048144789, -1028477387, -1640531527
_LOW_BITS = 0xFFFF  # The bits of an fp32 number that bf16 lacks.


def draw_bits(name: str, number: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return uniform integers of 16 bits for a range of a weight's numbers, [count] int32.

    They are a hash of the arguments. Ranges of one weight may therefore be drawn in any parts.

    Args:
        name: of the weight.
        number: of the version, or of the update that made it.
        first: index of the first number in the flat whole weight.

    Source: the last step of MurmurHash3, Appleby, 2011, twice.
    """
    seeds = [zlib.crc32(f"{part} {name} {number}".encode()) for part in ("first", "second")]
    low, high = (each - (1 << 32) if each >> 31 else each for each in seeds)
    start = (first + (1 << 31)) % (1 << 32) - (1 << 31)
    mixed = torch.arange(count, dtype=torch.int32, device=device)
    mixed.add_(start).mul_(_STRIDE).bitwise_xor_(low)
    _mix(mixed)
    _mix(mixed.bitwise_xor_(high))
    return mixed.bitwise_and_(_LOW_BITS)


def _mix(words: Tensor) -> None:
    """Mix the bits of each word [count] int32 in place."""
    for bits, factor in ((16, _FIRST), (13, _SECOND), (16, 1)):
        # The shift repeats the sign; the mask leaves the bits of an unsigned shift.
        words.bitwise_xor_((words >> bits).bitwise_and_((1 << 32 - bits) - 1)).mul_(factor)


def round_stochastically(
    weight: Tensor, into: Tensor, *, name: str, number: int, first: int
) -> None:
    """Write `weight`, rounded up or down to bf16 at random, to `into`; both [number] fp32.

    The mean over many versions is the weight. Numbers of bf16 do not change.

    Args:
        first: index of the first number in the flat whole weight.
    """
    size = DRAWN_NUMBERS_GPU if weight.is_cuda else DRAWN_NUMBERS
    bits, rounded = weight.view(torch.int32), into.view(torch.int32)
    for start in range(0, len(weight), size):
        part = bits[start : start + size]
        drawn = draw_bits(name, number, first + start, len(part), weight.device)
        # The carry from the low bits rounds the magnitude up.
        rounded[start : start + size] = drawn.add_(part).bitwise_and_(~_LOW_BITS)


class RoundedWeights:
    """Trained weights that a pass in bf16 rounds, and their fp32 masters.

    The network's own tensors have the stochastically rounded numbers, which are bf16 numbers in
    fp32 tensors. All later casts to bf16 are exact: of autocast, of FSDP, of a version.

    Example: `take(0)` makes the masters from the loaded weights, and rounds the weights. Before an
    update `put()` writes the masters to the weights. `take(1)` stores the updated masters, and
    rounds the weights for version 1.
    """

    def __init__(self, model: nn.Module) -> None:
        """Select the weights, which must be sharded by now. `take` must follow."""
        trained, rounded = _trained_and_rounded(model)
        self._weights = {name: each for name, each in trained.items() if name in rounded}
        self._masters: dict[str, Tensor] = {}

    @property
    def masters(self) -> dict[int, Tensor]:
        """The masters by the identity of their weights; sharded as these."""
        return {id(self._weights[name]): master for name, master in self._masters.items()}

    @torch.no_grad()
    def put(self) -> None:
        """Write the masters to the weights, which an update or a file needs."""
        for name, master in self._masters.items():
            _local(self._weights[name]).copy_(_local(master))

    @torch.no_grad()
    def take(self, number: int) -> None:
        """Store the weights as masters, and round the weights.

        Args:
            number: updates made so far, from which the random numbers follow. With 0 the weights
                are rounded to the nearest number, as by a reference and by engines that load the
                checkpoint.
        """
        for name, weight in self._weights.items():
            if name not in self._masters:
                copy = weight.detach().clone(memory_format=torch.contiguous_format)
                self._masters[name] = copy
            master = _local(self._masters[name])
            rounded = _local(weight)
            master.copy_(rounded)
            if number == 0:
                rounded.copy_(on_grid(master, torch.bfloat16))
                continue
            flat = rounded.reshape(-1)  # A view, unless the layout in memory forbids one.
            first = _first_number(weight)
            round_stochastically(master.view(-1), flat, name=name, number=number, first=first)
            if flat.data_ptr() != rounded.data_ptr():
                rounded.copy_(flat.view_as(rounded))


def _first_number(weight: Tensor) -> int:
    """Return the index of this rank's first number in the flat whole weight."""
    if not isinstance(weight, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    assert not any(offset[1:])  # FSDP shards along the first axis.
    return offset[0] * (weight.numel() // max(len(weight), 1)) if offset else 0


def _trained_and_rounded(model: nn.Module) -> tuple[dict[str, nn.Parameter], set[str]]:
    """Return the trained weights by name, and the names that a pass in 16 bits rounds."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    shapes = {name: each.shape for name, each in trained.items() if ".lora_" not in name}
    return trained, rounded_names(model, shapes) | (trained.keys() - shapes.keys())


class VanishedUpdates:
    """The share of changed weights whose rounded value is the same before and after a step.

    An update below half a unit of the pass's dtype changes the fp32 master, and not the weight of
    the forward pass, until several have added up. Weights of a checkpoint in bf16 lie on the grid
    of bf16, so small updates vanish there for many steps. Without rounding the share is 0.

    Example: weights of .02 have units of 2^-13 = 1.2e-4, so steps of 1e-5 vanish six times.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype,
        ranks: Ranks | None = None,
        copies: RoundedWeights | None = None,
    ) -> None:
        """Watch the trained weights, which must be sharded by now.

        Args:
            dtype: dtype of the passes.
            copies: rounds the weights stochastically; None: they are rounded to the nearest number.
        """
        self._ranks = ranks or Ranks()
        self._copies = copies
        self._weights: list[Tensor] = []
        # [number] of the sampled numbers: how many numbers each stands for, and if it is rounded.
        self._shares = self._is_rounded = torch.zeros(0)
        # [number] fp32: the masters before the step, and their rounded numbers
        self._before: tuple[Tensor, Tensor] | None = None
        self._is_high = False
        self._dtype = dtype
        if dtype is not torch.float32:
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        trained, rounded = _trained_and_rounded(model)
        self._weights = list(trained.values())
        sampled = [_sampled(each) for each in self._weights]
        device = sampled[0].device
        sizes = torch.tensor([len(each) for each in sampled])
        totals = torch.tensor([_local(each).numel() for each in self._weights])
        copies = torch.tensor([_num_copies(each) for each in self._weights])
        shares = totals.double() / sizes.clamp_min(1) / copies
        flags = torch.tensor([name in rounded for name in trained])
        self._shares = shares.repeat_interleave(sizes).to(device, torch.float32)
        self._is_rounded = flags.repeat_interleave(sizes).to(device)

    @torch.no_grad()
    def begin(self) -> None:
        """Note the weights before the updates of a step."""
        if self._weights:
            self._before = self._numbers()

    @torch.no_grad()
    def share(self, *, lr: float) -> float:
        """Return the share of the updates since `begin` over all ranks, and warn if it is large.

        All ranks call this method together.

        Args:
            lr: the learning rate of the step, for the warning.
        """
        before = self._before
        if before is None:
            return 0.0
        self._before = None
        masters, rounded = self._numbers()
        is_changed = masters != before[0]
        is_hidden = is_changed & self._is_rounded & (rounded == before[1])
        counts = torch.stack([(self._shares * each).sum() for each in (is_hidden, is_changed)])
        num_hidden, num_changed = self._ranks.sum(counts).tolist()
        hidden = num_hidden / max(num_changed, 1.0)
        # Stochastic rounding shows the mean of all updates.
        if hidden > MAX_HIDDEN_FRAC and not self._is_high and self._copies is None:
            logger.warning(
                "train/vanished_update_frac=%.2f: rounding to %s hides this share of the updates"
                " from the forward pass until they add up (learning rate %.1e). Set"
                "%s learner.precision=fp32 and model.dtype=float32, or raise the learning rate.",
                hidden,
                "fp16" if self._dtype is torch.float16 else "bf16",
                lr,
                "" if self._dtype is torch.float16 else " learner.rounding=stochastic, or",
            )
        self._is_high = hidden > MAX_HIDDEN_FRAC
        return hidden

    def _numbers(self) -> tuple[Tensor, Tensor]:
        """Return sampled numbers of the masters and their rounded numbers, [number] fp32 each."""
        stored = torch.cat([_sampled(each) for each in self._weights])
        if self._copies is None:
            return stored, on_grid(stored, self._dtype)
        masters = self._copies.masters
        return torch.cat([_sampled(masters.get(id(each), each)) for each in self._weights]), stored


def _local(weight: Tensor) -> Tensor:
    """Return this rank's numbers of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _num_copies(weight: Tensor) -> int:
    """Return how many copies of a sharded weight all ranks have."""
    if not isinstance(weight, DTensor):
        return 1
    return weight.device_mesh.size() // weight.device_mesh.size(-1)


def _sampled(weight: Tensor) -> Tensor:
    """Return up to about `NUM_COMPARED` numbers of a weight, [number], the same at each call."""
    flat = _local(weight).detach().reshape(-1)
    # An odd distance meets all columns of the usual widths.
    return flat[:: len(flat) // NUM_COMPARED | 1]
