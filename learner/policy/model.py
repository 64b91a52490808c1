"""The policy network: loading, log-probabilities of tokens, and tensors for publishing."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from common.config.learner import FULL, CriticKind, CriticSection, LoraSection
from common.config.model import BaseFormat
from common.errors import ConfigError
from learner.batch.batching import TokenBatch
from learner.batch.packing import row_size
from learner.policy.composite import composite_class, reduce_to_text, text_config
from learner.policy.determinism import make_deterministic
from learner.policy.expert_routing import set_routes
from learner.policy.expert_weights import Stored, stored_tensors
from learner.policy.kernels.head import (
    Logits,
    TokenScores,
    logits_function,
    own_logits_gap,
    trunk_of,
    use_own_logits,
)
from learner.policy.loading import (
    META,
    fill,
    give_memory,
    is_unloaded,
    load_network,
    set_plain_attention,
    take_memory,
)
from learner.policy.lora import adapter_tensors, adapts_experts, add_adapters, has_adapters
from learner.policy.merging import Merged, live_merged
from learner.policy.model_kind import check_kind, check_trainable
from learner.policy.precision import round_all_factors, store_in
from learner.policy.quantised_base import quantise_layers


def pick_device(name: str) -> torch.device:
    """Return the torch device of `learner.device`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def load_policy(
    path: str,
    *,
    device: torch.device | str,
    lora: LoraSection = FULL,
    base: BaseFormat = BaseFormat.FULL,
    base_dtype: torch.dtype = torch.float32,
    is_frozen: bool = False,
    is_skeleton: bool = False,
    max_tokens: int | None = None,
) -> PreTrainedModel:
    """Return the causal language model at `path` with fp32 master weights, ready to train.

    Its passes draw no random numbers: the trained policy must be the function that sampled.

    Args:
        path: transformers checkpoint directory; never a name to download.
        lora: with a rank above 0, only new adapters are trained.
        base: number format of the frozen linear layers beside adapters. The checkpoint must have
            numbers of this format, see `policy/quantised_base.py`.
        base_dtype: dtype of frozen weights. A frozen network in 16 bits computes the same numbers
            as a trained one with fp32 master weights, whose pass rounds them.
        is_frozen: no weight is trained.
        is_skeleton: stored weights get memory after sharding, see `policy/loading.py`.
        max_tokens: length of the longest sequence that an engine may produce; None: the model's own
            limit.

    Raises:
        ConfigError: the directory is missing, the model is no decoder of text, it has no head, or
            its rotary embedding cannot match the engine's, or its weights are quantised.
    """
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"model.path={path!r}: the folder has no config.json; give a folder of transformers"
        )
    check_kind(Path(path))
    check_trainable(Path(path))
    is_rounded = is_frozen and base_dtype is not torch.float32
    is_quantised = base is not BaseFormat.FULL
    model = load_network(
        AutoModelForCausalLM,
        path,
        is_skeleton=is_skeleton or is_rounded or is_quantised,
        dtype=base_dtype if lora.rank else torch.float32,
        max_tokens=max_tokens,
    )
    # On one CPU core, bf16: plain matrix products 20-24k tokens/s, the fused kernel 13-16k.
    set_plain_attention(model, is_fused=torch.device(device).type == "cuda")
    if lora.rank:
        is_bare = is_skeleton or is_quantised
        if is_bare:  # The memory is never used: peft puts adapters on the device of their base.
            give_memory(model, torch.device("cpu"))
        add_adapters(model, lora, base_path=path)
        if is_bare:
            take_memory(model)
    if is_quantised:
        quantise_layers(model, base, torch.device(device))
        give_memory(model, torch.device(device))
        fill(model, path)
    if is_frozen:
        model.requires_grad_(False)
    if is_rounded:
        store_in(model, base_dtype, is_sharded=is_skeleton)
        if not is_skeleton:
            give_memory(model, torch.device(device))
            fill(model, path)
    make_deterministic(model)  # Adapters are new.
    if not is_skeleton:
        # This moves the model in place; the wrapper in transformers hides the type.
        nn.Module.to(model, torch.device(device))
        settle_head(model, path)
    return model


def make_bare(path: str) -> PreTrainedModel:
    """Return the network of the configuration at `path`, with shapes but without weights.

    Raises: ConfigError: transformers has no such network, or it is no decoder of text.
    """
    check_kind(Path(path))
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        composite: Any = composite_class(config, path)
        with META:
            if composite is None:
                return AutoModelForCausalLM.from_config(config)
            model = composite._from_config(config)
        reduce_to_text(model, path)
        return model
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={path}: transformers has no network for its config.json: {error}"
        ) from error


def settle_head(model: PreTrainedModel, path: str) -> None:
    """Measure whether the logits are those of the head alone; if not, use the network's own code.

    Raises: ConfigError: the network has no head.
    """
    if model.get_output_embeddings() is None:
        raise ConfigError(
            f"model.path={path!r}: {type(model).__name__} has no output head; choose a causal"
            " language model"
        )
    if not float(own_logits_gap(model)) <= 1.0:
        use_own_logits(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Settings for scoring tokens.

    A bf16 engine rounds its logits. Equal rounding in the learner halves the difference of
    log-probabilities (0.0046 against 0.0105 nats on average). Log-softmax is always fp32.
    """

    chunk_tokens: int  # Rows of the vocabulary projection in memory at once.
    dtype: torch.dtype  # Dtype of the products, over fp32 weights.
    temperature: float = 1.0  # Sampling temperature; logits are divided by it, as in the sampler.
    # Dtype of the projection in a pass of 16 bits: that of the engine. The weights are rounded as
    # in the rest of the pass.
    head_dtype: torch.dtype = torch.bfloat16


def token_logprobs(model: PreTrainedModel, tokens: TokenBatch, scoring: Scoring) -> Tensor:
    """Return the log-probability of each scored token given its own sequence before it.

    Returns: [tokens] float32 nats.
    """
    hidden = flat_hidden(trunk_of(model), tokens, dtype=scoring.dtype)[tokens.source_rows]
    scores = hidden_logprobs(model, hidden, tokens.target_ids, scoring, with_entropy=False)[0]
    logprobs = tokens.per_token(scores)
    assert logprobs is not None
    return logprobs


def flat_hidden(body: nn.Module, tokens: TokenBatch, *, dtype: torch.dtype) -> Tensor:
    """Return the last hidden states of a network without its head, [batch * seq, hidden]."""
    return _run(body, tokens, dtype=dtype).last_hidden_state.flatten(0, 1)


def flat_hidden_and_routers(
    body: nn.Module, tokens: TokenBatch, *, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return `flat_hidden`, and each router's logits [batch * seq, expert]."""
    out = _run(body, tokens, dtype=dtype, output_router_logits=True)
    logits = tuple(each.flatten(0, -2) for each in out.router_logits)
    return out.last_hidden_state.flatten(0, 1), logits


def _run(body: nn.Module, tokens: TokenBatch, *, dtype: torch.dtype, **outputs: bool) -> Any:
    """Run a network without its head over a block; return transformers' output."""
    device_type = tokens.token_ids.device.type
    set_routes(body, tokens.routes)
    is_cast = dtype is not torch.float32
    if is_cast:
        round_all_factors(body)
    packed: dict[str, Any] = {}
    if tokens.packing is not None:
        packed = {"position_ids": tokens.position_ids, "packing": tokens.packing}
    if tokens.sequence_group is not None:
        packed["sequence_group"] = tokens.sequence_group
    with torch.autocast(device_type, dtype=dtype, enabled=is_cast):
        return body(input_ids=tokens.token_ids, use_cache=False, **packed, **outputs)


def hidden_logprobs(
    model: PreTrainedModel,
    hidden: Tensor,
    target_ids: Tensor,
    scoring: Scoring,
    *,
    with_entropy: bool,
    support_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log-probabilities [tokens], entropies and those of `support_ids`, in float32 nats.

    The log-probabilities equal those of `token_logprobs`; `hidden` [tokens, hidden] predicts the
    targets. Only positions that predict a scored token are projected to the vocabulary,
    `chunk_tokens` at a time. The logits of the last chunk are stored for the backward pass, which
    computes all other chunks again: [tokens, vocab] never exists. The first chunk has the rows that
    fill no chunk, and is padded to one of few sizes.

    Args:
        with_entropy: return the entropies [tokens], else None.
        support_ids: [tokens, k] further tokens to score at each position; None: none.
    """
    dtype = scoring.dtype if scoring.dtype is torch.float32 else scoring.head_dtype
    logits_of = logits_function(model, dtype, pass_dtype=scoring.dtype)

    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    supports: list[Tensor] = []
    num_rows = hidden.shape[0]
    chunk_tokens = scoring.chunk_tokens
    first = num_rows % chunk_tokens or min(num_rows, chunk_tokens)
    starts = [0, *range(first, num_rows, chunk_tokens)]  # Without rows there is one empty chunk.
    for start, end in pairwise([*starts, num_rows]):
        rows = hidden[start:end]
        targets = target_ids[start:end]
        support = None if support_ids is None else support_ids[start:end]
        missing = max(len(rows), min(row_size(len(rows)), chunk_tokens)) - len(rows)
        if missing:
            rows = F.pad(rows, (0, 0, 0, missing))
            targets = F.pad(targets, (0, missing))
            support = None if support is None else F.pad(support, (0, 0, 0, missing))
        args = (rows, logits_of, targets, scoring.temperature, with_entropy, support)
        if torch.is_grad_enabled() and end < num_rows:
            chunk = checkpoint(_score_rows, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            chunk = _score_rows(*args)
        logprobs.append(chunk[0][: len(chunk[0]) - missing])
        entropies.append(chunk[1][: max(0, len(chunk[1]) - missing)])
        supports.append(chunk[2][: max(0, len(chunk[2]) - missing)])
    # FSDP accepts no views as results; these are copies, without the padding.
    return (
        torch.cat(logprobs),
        torch.cat(entropies) if with_entropy else None,
        None if support_ids is None else torch.cat(supports),
    )


def _score_rows(
    rows: Tensor,
    logits_of: Logits,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    support_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `TokenScores` for states [rows, hidden]."""
    logits = logits_of(rows)  # [rows, vocab]
    scores: Any = TokenScores.apply(logits, targets, temperature, with_entropy, support_ids)
    return scores


def published_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor | Merged | Stored]]:
    """Yield (name in a checkpoint, live tensor or this rank's shard) that engines need.

    These are the adapters if the model has any, otherwise all weights, tied ones once. Adapters of
    experts are merged into their weights, because engines do not take them.

    Raises: ConfigError: as `stored_tensors`.
    """
    if has_adapters(model) and not adapts_experts(model):
        yield from adapter_tensors(model)
        return
    yield from stored_tensors(model, dict(live_merged(model))).items()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor of all ranks' shards. If it is sharded, all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of embedding rows, an upper bound of the token ids."""
    embedding = model.get_input_embeddings()
    # Every causal language model of transformers has one.
    assert isinstance(embedding, nn.Embedding)
    return embedding.num_embeddings


def parameter_count(model: PreTrainedModel) -> int:
    """Return the number of weights, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


class Critic(nn.Module):
    """A value head on the policy's trunk or on its own trunk. All values start at zero."""

    def __init__(self, hidden_size: int, trunk: PreTrainedModel | None) -> None:
        """Make the head; `trunk` is None for a head on the policy."""
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        """Return [rows] float32 values of hidden states [rows, hidden]."""
        return self.head(hidden.float()).sum(-1)  # The sum has one entry; FSDP warns about views.

    def hidden(self, tokens: TokenBatch, policy_hidden: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return the head's input states [batch * seq, hidden], of the policy or of its trunk."""
        if self.trunk is None:
            return policy_hidden
        return flat_hidden(self.trunk, tokens, dtype=dtype)


def make_critic(
    cfg: CriticSection, policy: PreTrainedModel, *, policy_path: str, max_tokens: int | None = None
) -> Critic:
    """Return a critic on the policy's device; a trunk without a path starts as `policy_path`.

    If the policy's weights have no memory yet, the trunk's have none either.

    Args:
        max_tokens: length of the longest sequence that an engine may produce; None: the model's own
            limit.
    """
    trunk = None
    if cfg.kind is CriticKind.MODEL:
        trunk = load_network(
            AutoModel,
            cfg.path or policy_path,
            is_skeleton=is_unloaded(policy),
            dtype=torch.float32,
            max_tokens=max_tokens,
        )
    critic = Critic(text_config(policy.config).hidden_size, trunk)
    return critic if is_unloaded(policy) else critic.to(next(policy.parameters()).device)
