"""Functions of the user as parts of the objective: loading, and their check on a small batch.

    policy_loss  f(inputs: LossInputs, cfg) -> loss [tokens], or (loss, is_bound [tokens] bool)
    advantage    f(rewards [member], members, cfg) -> [member], or [num_turns] for each member
    correction   f(log_rho [tokens], sequence_ids, num_sequences, cfg) -> [tokens]
    groups.filter  f(members, cfg) -> whether the group is trained

A correction of dtype bool is a mask; another one replaces the ratio rho.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.config.algorithm import AlgorithmSection
from common.config.groups import GroupsSection
from common.errors import ConfigError
from common.user_code import ImportedFunction, load_function
from common.wire.messages import EndReason, EpisodeKind, PolicyKind, Trajectory
from learner.algorithms.interface import Estimator, GroupAdvantages, LossInputs, Surrogate, Weight
from learner.policy.finite import is_finite

CPU = torch.device("cpu")
NUM_SHOWN = 8  # Numbers of a tensor in a message.
SIZES = (4, 3)  # Tokens of the two sequences of the small batch.
# Log-ratios of its tokens: small ones, as of a policy that has moved by one update.
LOG_RATIOS = (0.0, 0.05, -0.05, 0.02, -0.02, 0.04, -0.03)
TURNS = (0, 0, 1, 1, 2, 2, 2)
# Rewards of groups: unequal ones, and equal ones, whose deviation is zero.
GROUPS = ((0.0, 1.0, 0.5, 0.0), (1.0, 1.0, 1.0, 1.0))
NUM_FILTERED = 8  # Calls of a filter with equal members.


def functions_of(cfg: AlgorithmSection) -> list[ImportedFunction]:
    """Return the functions of the user that the configuration names. Raises: ConfigError."""
    return [
        load_function(f"algorithm.{name}", reference)
        for name in ("policy_loss", "advantage", "correction")
        if ":" in (reference := getattr(cfg, name))
    ]


def check_functions(cfg: AlgorithmSection, device: torch.device = CPU) -> None:
    """Check the functions of the user on a small batch on a device. Raises: ConfigError."""
    for user in functions_of(cfg):
        if user.key == "algorithm.policy_loss":
            user_surrogate(user.reference, cfg, device)
        elif user.key == "algorithm.correction":
            user_weight(user.reference, cfg, device)
        else:
            user_estimator(user.reference, cfg)


def read_keys(cfg: AlgorithmSection, call: Callable[[AlgorithmSection], object]) -> tuple[str, ...]:
    """Return the keys of `algorithm` that a call reads, in their order."""
    read: set[str] = set()

    class Noting(AlgorithmSection):
        """The configuration; it notes its keys that are read."""

        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return object.__getattribute__(self, name)

    names = [field.name for field in fields(cfg)]
    noting = Noting(**{name: getattr(cfg, name) for name in names})
    read.clear()
    call(noting)
    return tuple(name for name in names if name in read)


def user_surrogate(reference: str, cfg: AlgorithmSection, device: torch.device = CPU) -> Surrogate:
    """Return a policy loss of the user after its check.

    Raises: ConfigError: its result has a wrong shape, is not finite, or has no gradient.
    """
    user = load_function("algorithm.policy_loss", reference)

    def loss(inputs: LossInputs, cfg: AlgorithmSection) -> tuple[Tensor, Tensor]:
        return _checked_loss(user, user.call(inputs, cfg), inputs.new_logprobs)

    inputs = small_batch(cfg, device)
    losses: list[Tensor] = []
    keys = read_keys(cfg, lambda noting: losses.append(loss(inputs, noting)[0]))
    _check_gradient(user, losses[0], inputs)
    losses.append(loss(inputs, cfg)[0])
    _check_repeated(user, *losses)
    alone = loss(_first_sequence(inputs), cfg)[0]
    together = losses[0][: SIZES[0]]
    return Surrogate(
        loss=loss,
        formula=lambda _: f"(-{user.short})",
        keys=keys,
        is_plain_at_one=False,
        # A small batch cannot exclude a penalty at other ratios.
        is_zero_without_advantage=False,
        is_of_sequence=torch.allclose(alone, together, rtol=1e-4, atol=1e-6),
    )


def small_batch(cfg: AlgorithmSection, device: torch.device) -> LossInputs:
    """Return two short sequences with advantages of both signs, in three turns."""
    num = sum(SIZES)
    sampler = torch.linspace(-2.0, -0.5, num, device=device)
    new = (sampler + torch.tensor(LOG_RATIOS, device=device)).requires_grad_()
    top = torch.log_softmax(torch.arange(3.0, device=device), 0).expand(num, 3)
    has_top = cfg.teacher.is_on and cfg.teacher.num_top > 0
    return LossInputs(
        new_logprobs=new,
        anchor_logprobs=sampler,
        sampler_logprobs=sampler,
        advantages=torch.tensor([1.0, 0.5, -1.0, -0.5, 1.0, -1.0, 0.5], device=device),
        is_weights=torch.ones(num, device=device),
        sequence_ids=torch.tensor([0] * SIZES[0] + [1] * SIZES[1], device=device),
        num_sequences=len(SIZES),
        turn_ids=torch.tensor(TURNS, device=device),
        num_turns=max(TURNS) + 1,
        episode_tokens=torch.tensor([float(size) for size in SIZES], device=device),
        entropy=-new if cfg.entropy_coef else None,
        reference_logprobs=sampler - 0.1 if cfg.kl_coef else None,
        kl_weights=torch.ones(num, device=device) if cfg.kl_coef else None,
        teacher_logprobs=sampler if cfg.teacher.is_on and not has_top else None,
        teacher_top=top if has_top else None,
        support_logprobs=top if has_top else None,
    )


def _first_sequence(inputs: LossInputs) -> LossInputs:
    """Return the first sequence of the small batch as a batch of its own."""
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    cut = {
        name: column[: SIZES[0]] for name, column in columns.items() if isinstance(column, Tensor)
    }
    return replace(inputs, **cut, num_sequences=1, num_turns=max(TURNS[: SIZES[0]]) + 1)


def _checked_loss(
    user: ImportedFunction, result: Any, new_logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss and its bounds.

    Raises: ConfigError: one has a wrong type or shape, or the loss is not finite though the
        log-probabilities are.
    """
    shape = new_logprobs.shape
    loss: Any = result
    is_bound: Any = None
    if isinstance(result, tuple) and len(result) == 2:
        loss, is_bound = result
    _check_tensor(user, loss, shape, "one loss for each token")
    if not is_finite(loss) and is_finite(new_logprobs):
        raise ConfigError(
            f"{user.where}: returned {_shown(loss)} for finite log-probabilities, not finite"
        )
    if is_bound is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    _check_tensor(user, is_bound, shape, "one flag for each token as its second value")
    return loss, is_bound


def _check_tensor(user: ImportedFunction, value: Any, shape: torch.Size, wanted: str) -> None:
    """Raise ConfigError if a value is no tensor of this shape."""
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{user.where}: returned {type(value).__name__}; expected {wanted}, a tensor {[*shape]}"
        )
    if value.shape != shape:
        raise ConfigError(
            f"{user.where}: returned a tensor {[*value.shape]}; expected {wanted}, {[*shape]}"
        )


def _shown(values: Tensor) -> list[float]:
    """Return the first numbers of a tensor, for messages."""
    return values.detach()[:NUM_SHOWN].tolist()


def _check_repeated(user: ImportedFunction, first: Tensor, second: Tensor) -> None:
    """Raise ConfigError if the values of two calls with equal arguments differ.

    A GPU may add the same numbers in another order.
    """
    if not torch.allclose(first.float(), second.float(), rtol=1e-5, atol=1e-6):
        user.check_equal(_shown(first), _shown(second))


def _gradient(loss: Tensor, inputs: LossInputs) -> Tensor | None:
    """Return the gradient of the policy's log-probabilities; None: the loss has none."""
    if not loss.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.new_logprobs, allow_unused=True)
    return gradient


def _check_gradient(user: ImportedFunction, loss: Tensor, inputs: LossInputs) -> None:
    """Raise ConfigError if a loss of the small batch or its gradient is of no use."""
    gradient = _gradient(loss, inputs)
    if gradient is None or not gradient.any():
        raise ConfigError(
            f"{user.where}: the loss has no gradient: it must depend on inputs.new_logprobs,"
            " without detach()"
        )
    if not torch.isfinite(gradient).all():
        raise ConfigError(f"{user.where}: its gradient is {gradient.tolist()}, not finite")


def user_weight(reference: str, cfg: AlgorithmSection, device: torch.device = CPU) -> Weight:
    """Return a correction of the user after its check.

    Raises: ConfigError: a weight has a wrong shape, is negative or not finite, or removes every
        token of the policy itself.
    """
    user = load_function("algorithm.correction", reference)

    def weight(
        log_rho: Tensor, sequence_ids: Tensor, num_sequences: int, cfg: AlgorithmSection
    ) -> Tensor:
        weights = user.call(log_rho, sequence_ids, num_sequences, cfg)
        _check_tensor(user, weights, log_rho.shape, "one weight for each token")
        is_wrong = not is_finite(weights) or bool((weights < 0).any())
        if is_wrong and is_finite(log_rho):
            raise ConfigError(
                f"{user.where}: returned {_shown(weights)} for log rho {_shown(log_rho)};"
                " a weight is finite and >= 0"
            )
        return weights.detach()

    batch = small_batch(cfg, device)
    sequences = (batch.sequence_ids, batch.num_sequences)
    log_rho = 20 * torch.tensor(LOG_RATIOS, device=device)
    repeated: list[Tensor] = []
    keys = read_keys(cfg, lambda noting: repeated.append(weight(log_rho, *sequences, noting)))
    repeated.append(weight(log_rho, *sequences, cfg))
    _check_repeated(user, *repeated)
    weights = weight(torch.zeros_like(log_rho), *sequences, cfg)
    if not weights.any():
        raise ConfigError(f"{user.where}: its weight is 0 where rho is 1, so no token would train")
    is_mask = weights.dtype == torch.bool
    return Weight(
        weight=weight,
        formula=lambda _, rho: f"{user.short}({rho})",
        keys=keys,
        is_mask=is_mask,
        removes_tokens=True,
        over_ratio=None if is_mask else lambda _, limit: _over_ratio(user.short, limit),
    )


def _over_ratio(name: str, limit: float | None) -> str:
    """Return the formula of the weight of a surrogate whose ratio is already pi / mu."""
    if limit is None:
        return f"{name}(r)/r"
    return f"min({name}(r), {limit:g})/min(r, {limit:g})"


def user_estimator(reference: str, cfg: AlgorithmSection) -> Estimator:
    """Return an estimator of advantages of the user after its check.

    Raises: ConfigError: its result has a wrong shape, is not finite, or is zero for unequal
        rewards.
    """
    user = load_function("algorithm.advantage", reference)

    def of_group(
        rewards: Tensor, members: Sequence[Trajectory], cfg: AlgorithmSection
    ) -> GroupAdvantages:
        return _as_advantages(user, user.call(rewards, members, cfg), rewards, members)

    read: list[str] = []
    for rewards in GROUPS:
        read += _keys_of_group(user, rewards, cfg, of_group)
    advantages, turns = of_group(*_group(GROUPS[0]), cfg)
    if not advantages.any() and not any(part.any() for part in turns or []):
        raise ConfigError(
            f"{user.where}: every advantage is 0 for the rewards {[*GROUPS[0]]}, so nothing would"
            " train"
        )
    return Estimator(
        formula=lambda cfg, learner: f"{user.short}(R)",
        keys=tuple(dict.fromkeys(read)),
        of_group=of_group,
        is_group_relative=True,
    )


def _keys_of_group(
    user: ImportedFunction,
    rewards: Sequence[float],
    cfg: AlgorithmSection,
    of_group: Callable[..., GroupAdvantages],
) -> tuple[str, ...]:
    """Return the keys that the advantages of a group read.

    Raises: ConfigError: another call with equal arguments returned other advantages.
    """
    calls: list[list[Any]] = []

    def call(cfg: AlgorithmSection) -> None:
        calls.append(_plain_advantages(of_group(*_group(rewards), cfg)))

    keys = read_keys(cfg, call)
    call(cfg)
    user.check_equal(*calls)
    return keys


def _plain_advantages(advantages: GroupAdvantages) -> list[Any]:
    """Return advantages as lists: a number for each member, or [num_turns] for each."""
    of_members, turns = advantages
    return of_members.tolist() if turns is None else [part.tolist() for part in turns]


def user_filter(cfg: GroupsSection) -> Callable[[Sequence[Trajectory]], bool] | None:
    """Return the user's filter of groups after its check, None without one.

    Raises: ConfigError: it cannot be loaded or called, or returns another value than a bool.
    """
    if not cfg.filter:
        return None
    user = load_function("groups.filter", cfg.filter)
    user.check_arguments("members", "cfg")

    def keeps(members: Sequence[Trajectory]) -> bool:
        answer = user.call(list(members), cfg)
        if not isinstance(answer, (bool, np.bool_)):
            raise ConfigError(
                f"{user.where}: returned {type(answer).__name__}; expected True for a group to"
                " train and False for one to leave out"
            )
        return bool(answer)

    for rewards in GROUPS:
        answers = [keeps(_group(rewards)[1]) for _ in range(NUM_FILTERED)]
        for answer in answers[1:]:
            user.check_equal(answers[0], answer)
    return keeps


def check_group(estimator: Estimator, cfg: AlgorithmSection, size: int) -> None:
    """Check an estimator of the user with a small group. Raises: ConfigError: it is refused."""
    assert estimator.of_group is not None
    estimator.of_group(*_group(GROUPS[0][:size]), cfg)


def _group(rewards: Sequence[float]) -> tuple[Tensor, list[Trajectory]]:
    """Return the credit of a group's members [member], and the members."""
    members = [_episode(number, reward) for number, reward in enumerate(rewards)]
    return torch.tensor(rewards), members


def _as_advantages(
    user: ImportedFunction, result: Any, rewards: Tensor, members: Sequence[Trajectory]
) -> GroupAdvantages:
    """Return the result of a function as advantages. Raises: ConfigError: it is wrong."""
    wanted = f"a number for each of the {len(members)} members, or [num_turns] for each"
    parts = _parts_of(user, result, wanted) if _is_many(result) else []
    if len(parts) != len(members):
        shown = f"{len(parts)} values" if _is_many(result) else type(result).__name__
        raise ConfigError(f"{user.where}: returned {shown}; expected {wanted}")
    if not all(torch.isfinite(part).all() for part in parts):
        shown = [part.tolist() for part in parts]
        raise ConfigError(
            f"{user.where}: returned {shown} for the rewards {rewards.tolist()}, not finite"
        )
    if all(part.ndim == 0 for part in parts):
        return torch.stack(parts).to(rewards.dtype), None
    sizes = [[*part.shape] for part in parts]
    if sizes != [[member.num_turns] for member in members]:
        turns = [member.num_turns for member in members]
        raise ConfigError(
            f"{user.where}: returned shapes {sizes} for members with {turns} turns; expected"
            f" {wanted}"
        )
    return torch.zeros_like(rewards), [part.numpy() for part in parts]


def _parts_of(user: ImportedFunction, result: Any, wanted: str) -> list[Tensor]:
    """Return the parts of a result as tensors. Raises: ConfigError: one has no numbers."""
    try:
        return [torch.as_tensor(part).float() for part in result]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{user.where}: returned {result!r:.200}; expected {wanted}") from error


def _is_many(result: Any) -> bool:
    """Return whether a result has one part for each member."""
    return isinstance(result, (list, tuple)) or (
        isinstance(result, (Tensor, np.ndarray)) and result.ndim > 0
    )


def _episode(number: int, reward: float) -> Trajectory:
    """Return a short episode of two turns, in which the second turn earns the reward."""
    turn_ids = np.array([0, 0, 0, 1, 1], dtype=np.int32)
    return Trajectory(
        episode_id=f"check-{number}",
        group_id="check",
        member=number,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        policy=PolicyKind.MODEL,
        env="check",
        item_id="check-0",
        seed=number,
        horizon=2,
        horizon_stage=0,
        opened_at_version=0,
        actor="check",
        end_reason=EndReason.DONE,
        error="",
        reward=reward,
        is_success=reward == 1.0,
        num_turns=2,
        num_invalid_actions=0,
        generate_s=0.0,
        env_s=0.0,
        wall_s=0.0,
        token_ids=np.arange(5, dtype=np.int32) + number,
        loss_mask=np.array([False, True, True, False, True]),
        logprobs=np.array([0.0, -1.0, -0.5, 0.0, -2.0], dtype=np.float32),
        versions=np.array([-1, 0, 0, -1, 0], dtype=np.int32),
        turn_ids=turn_ids,
        invalid_turns=np.zeros(2, dtype=bool),
        turn_scores=np.array([0.0, reward], dtype=np.float32),
    )
