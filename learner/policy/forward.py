"""Forward passes of the policy, its critic and its reference over microbatches."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from common.config.learner import Layout, LearnerSection, Offload
from common.errors import ConfigError
from common.segments import RoutingShape
from learner.batch.batching import TokenBatch, collate_tokens, plan_microbatches, row_part
from learner.policy.activation_plan import choose_layers, row_of
from learner.policy.activations import use_activations
from learner.policy.composite import text_config
from learner.policy.expert_ranks import ExpertRanks, check_expert_ranks
from learner.policy.expert_routing import balance_loss_of, install
from learner.policy.kernels.attention import check_sequence_ranks, use_attention
from learner.policy.kernels.compiling import compile_parts, naming_compiler
from learner.policy.kernels.head import own_logits_gap, trunk_of, use_own_logits
from learner.policy.kernels.sequence import gather_entries, gather_positions
from learner.policy.lora import adapters_off
from learner.policy.model import (
    Critic,
    Scoring,
    flat_hidden,
    flat_hidden_and_routers,
    hidden_logprobs,
    vocabulary_size,
)
from learner.policy.model_shape import read_shape
from learner.policy.precision import pass_dtype
from learner.policy.selfcheck import (
    NeighboursDiffer,
    PackingRefused,
    Score,
    arithmetics,
    check_scores,
    make_probe,
    own_attention,
    plain_logprobs,
)
from learner.policy.sharding import device_of, reshard, shard

logger = logging.getLogger(__name__)

NO_OTHERS = (None,) * 5  # The fields of `Scores` after the first.
WARM_UP_LENGTH = 64  # Tokens of a sequence whose only purpose is to compile kernels.


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """The networks of a learner, all on the policy's device."""

    policy: PreTrainedModel
    critic: Critic | None = None  # Required by `advantage=ppo`.
    reference: PreTrainedModel | None = None  # Frozen; required if `kl_coef` is not 0.
    is_base_reference: bool = False  # True: the reference is the policy without its adapters.

    @property
    def device(self) -> torch.device:
        """The compute device of the networks."""
        first = next(self.policy.parameters())
        return device_of(first.device_mesh) if isinstance(first, DTensor) else first.device

    @property
    def has_reference(self) -> bool:
        return self.reference is not None or self.is_base_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The results of a pass for the scored tokens of a block."""

    logprobs: Tensor = field(repr=False)  # [tokens] float32 nats
    entropy: Tensor | None = field(repr=False, default=None)  # [tokens] float32 nats
    values: Tensor | None = field(repr=False, default=None)  # [tokens] float32
    end_values: Tensor | None = field(repr=False, default=None)  # [batch] values of the last states
    balance: Tensor | None = field(repr=False, default=None)  # Load-balancing loss of the routers.
    # [tokens, k] float32 nats at `TokenBatch.support_ids`
    support: Tensor | None = field(repr=False, default=None)


class Probed(Enum):
    """Additional outputs of the learner's path for the start check."""

    LOGITS = auto()  # Log-probabilities by the policy's own forward pass.
    HEAD = auto()  # The measurement of `own_logits_gap`.
    TRUNK = auto()  # States [tokens, hidden] of the critic's own trunk.


class _Trained(nn.Module):
    """A policy and its optional critic as one module.

    Sharded weights are whole during its forward pass. The ranks of a sequence group compute a
    packed row together, each its part. All of them return the results of the whole row.
    """

    def __init__(
        self, policy: PreTrainedModel, critic: Critic | None, group: ProcessGroup | None
    ) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic
        self._group = group

    def forward(
        self,
        tokens: TokenBatch,
        scoring: Scoring,
        *,
        with_entropy: bool,
        with_values: bool,
        with_balance: bool = False,
        with_support: bool = False,
        probed: Probed | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return the fields of `Scores` in order, as a plain tuple that FSDP can traverse.

        Args:
            probed: output for the start check, which replaces the log-probabilities.
        """
        if probed is Probed.HEAD:
            return own_logits_gap(self.policy), *NO_OTHERS
        if probed is Probed.LOGITS:
            return plain_logprobs(self.policy, tokens, dtype=scoring.dtype), *NO_OTHERS
        settings = (with_entropy, with_values, with_balance, with_support, probed)
        group = self._group
        if group is None or tokens.packing is None:
            fields = self._computed(tokens, scoring, *settings)
            logprobs, entropy, values, ends, balance, support = fields
            scored = (logprobs, entropy, values, support)
        else:
            part = row_part(tokens, group)
            fields = self._computed(part.tokens, scoring, *settings, whole=tokens)
            logprobs, entropy, values, end_values, balance, support = fields
            scored = (
                gather_entries(each, part.scored, group)
                for each in (logprobs, entropy, values, support)
            )
            ends = gather_entries(end_values, part.ends, group)
        logprobs, entropy, values, support = map(tokens.per_token, scored)
        return logprobs, entropy, values, ends, balance, support

    def _computed(
        self,
        tokens: TokenBatch,
        scoring: Scoring,
        with_entropy: bool,
        with_values: bool,
        with_balance: bool,
        with_support: bool,
        probed: Probed | None,
        *,
        whole: TokenBatch | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return the results of `forward` for a batch, or for this rank's part of `whole`."""
        policy = self.policy
        critic = self.critic
        if probed is Probed.TRUNK:
            assert critic is not None
            assert critic.trunk is not None
            states = flat_hidden(critic.trunk, tokens, dtype=scoring.dtype)
            return states[tokens.source_rows], *NO_OTHERS
        body = trunk_of(policy)
        balance = None
        if with_balance:
            hidden, routers = flat_hidden_and_routers(body, tokens, dtype=scoring.dtype)
            if whole is not None and self._group is not None:
                num = whole.token_ids.shape[1]
                routers = tuple(gather_positions(each, num, self._group) for each in routers)
            balance = balance_loss_of(policy)(routers, whole or tokens)
        else:
            hidden = flat_hidden(body, tokens, dtype=scoring.dtype)
        rows = hidden[tokens.source_rows]
        targets = tokens.target_ids
        logprobs, entropy, support = hidden_logprobs(
            policy,
            rows,
            targets,
            scoring,
            with_entropy=with_entropy,
            support_ids=tokens.support_ids if with_support else None,
        )
        if not with_values or critic is None:
            return logprobs, entropy, None, None, balance, support
        states = critic.hidden(tokens, hidden, dtype=scoring.dtype)
        of_tokens = critic.of_hidden(states[tokens.source_rows])
        of_ends = critic.of_hidden(states[tokens.last_rows])
        return logprobs, entropy, of_tokens, of_ends, balance, support


class Passes:
    """The networks of a learner behind one interface."""

    def __init__(
        self,
        cfg: LearnerSection,
        networks: Networks,
        *,
        temperature: float,
        engine_dtype: str,
        mesh: DeviceMesh | None = None,
        sequence_group: ProcessGroup | None = None,
        expert_mesh: DeviceMesh | None = None,
        replays_routing: bool = False,
        longest_tokens: int = 0,
    ) -> None:
        """Store the networks, settle their attention, and shard them in place over `mesh`.

        Args:
            temperature: temperature of the sampler.
            engine_dtype: value of `model.dtype`.
            sequence_group: the ranks that compute rows together with this one; None: it is alone.
            expert_mesh: mesh of the ranks that divide the experts; None: each rank gathers all.
            replays_routing: value of `algorithm.routing_replay`.
            longest_tokens: tokens of the longest episode, for `learner.activation_gib`; 0: rows
                have at most `learner.max_tokens_per_microbatch`.

        Raises: ConfigError: the networks do not support the configuration.
        """
        self._cfg = cfg
        self._max_tokens = cfg.row_tokens
        self._is_divided = sequence_group is not None
        self.device = networks.device if mesh is None else device_of(mesh)
        self._trained = _Trained(networks.policy, networks.critic, sequence_group)
        self._reference = None
        if networks.reference is not None:
            self._reference = _Trained(networks.reference, None, sequence_group)
        self._is_one_of_many = mesh is not None
        present = self._existing_networks()
        self.is_packed = self._use_layout(cfg.layout)
        fit = f"blocks of {self._max_tokens} tokens"
        # True until the kernels are compiled.
        self.is_cold = cfg.compile and compile_parts(present, fit=fit) > 0
        self._store_activations(longest_tokens)
        self._is_base_reference = networks.is_base_reference
        self._replay = install(trunk_of(networks.policy)) if replays_routing else None
        self.scoring = Scoring(
            chunk_tokens=cfg.logprob_chunk_tokens,
            dtype=pass_dtype(cfg, self.device),
            temperature=temperature,
            head_dtype=_head_dtype(networks.policy, engine_dtype, pass_dtype(cfg, self.device)),
        )
        # The ranks that divide the experts; None: FSDP gathers all experts.
        self.experts: ExpertRanks | None = None
        if expert_mesh is not None:
            check_expert_ranks([networks.policy, *present], cfg.expert_ranks)
            self.experts = ExpertRanks(expert_mesh, dtype=self.scoring.dtype)
        # The module to call for each network.
        self._units: dict[nn.Module, nn.Module] = {each: each for each in present}
        for network in present:
            if mesh is not None:
                is_offloaded = cfg.offload is Offload.OPTIMIZER
                dtype = self.scoring.dtype
                unit = shard(
                    network, mesh, dtype=dtype, is_offloaded=is_offloaded, experts=self.experts
                )
                self._units[network] = unit

    def _store_activations(self, longest_tokens: int) -> None:
        """Let the trained networks treat their activations as configured."""
        cfg = self._cfg
        policy = self._trained.policy
        num_layers = text_config(policy.config).num_hidden_layers
        shape = None
        if cfg.activation_gib and policy.name_or_path:
            shape = read_shape(Path(policy.name_or_path))
        is_cuda = self.device.type == "cuda"
        is_16_bit = pass_dtype(cfg, self.device) is not torch.float32
        row = row_of(cfg, longest_tokens, is_cuda=is_cuda, is_16_bit=is_16_bit)
        stored = choose_layers(cfg, shape, row, num_layers=num_layers)
        logger.info(
            "activations=%s: %d of %d layers store theirs, the inputs of the others are %s",
            cfg.activations.value,
            stored.num_stored,
            num_layers,
            "in host memory" if stored.is_offloaded else "on the device",
        )
        if stored.num_stored < num_layers:  # Else all store theirs, also those of a deeper critic.
            use_activations(self._trained, cfg.activations, stored, cfg.mlp_chunk_tokens)

    def _existing_networks(self) -> list[_Trained]:
        return [self._trained] + ([] if self._reference is None else [self._reference])

    def _use_layout(self, layout: Layout) -> bool:
        """Set the attention of all networks for a layout."""
        if self._is_divided:
            check_sequence_ranks(self._existing_networks(), self._cfg.sequence_ranks)
            layout = Layout.PACKED
        kind = self.device.type
        return use_attention(self._existing_networks(), kind, layout, self._cfg.attention)

    def check_start(self, *, may_pad: bool) -> None:
        """Compare the scores of all networks with those of their own forward passes.

        All ranks call this method together after the weights are loaded.

        Args:
            may_pad: switch to padding if packed sequences attend to each other, or are refused.

        Raises: ConfigError: scores differ by more than rounding; names both scores.
        """
        # `warm_up` compiles the kernels and repeats the check.
        with torch.compiler.set_stance("force_eager"):
            try:
                self._check_networks()
            except (NeighboursDiffer, PackingRefused) as error:
                if self._is_divided:
                    raise ConfigError(
                        f"learner.sequence_ranks={self._cfg.sequence_ranks} divides packed rows:"
                        f" {error} With this model, use learner.sequence_ranks=1."
                    ) from error
                if not (may_pad and self.is_packed):
                    raise
                logger.warning("learner.layout=auto: sequences are padded, not packed: %s", error)
                self.is_packed = self._use_layout(Layout.PADDED)
                self._check_networks()

            self._measure_routing()

    @torch.no_grad()
    def _measure_routing(self) -> None:
        """Find the calls by which the policy's routers choose experts. Raises: ConfigError."""
        if self._replay is None:
            return
        ids = np.arange(4)
        tokens = collate_tokens([ids], [ids > 0], device=self.device, is_packed=self.is_packed)
        with self._replay.measuring():
            self._logprobs(self._trained, tokens, self.scoring)

    @property
    def routing(self) -> RoutingShape | None:
        """The sizes of recorded experts; None if they are not replayed."""
        return None if self._replay is None else self._replay.shape

    def _check_networks(self) -> None:
        """Compare the scores of each network in each arithmetic."""
        for network in self._existing_networks():
            self._settle_head(network)
            for scoring in arithmetics(network, self.scoring):
                self._check_network(network, scoring)

    @torch.no_grad()
    def _settle_head(self, network: _Trained) -> None:
        """Measure the head again: weights that several ranks share had no values before."""
        vocab_size = vocabulary_size(network.policy)
        probe = make_probe(
            network.policy, self.device, vocab_size=vocab_size, is_packed=False, dtype=torch.float32
        )
        tokens = probe.alone(0, is_packed=False)
        if not float(self._logprobs(network, tokens, self.scoring, Probed.HEAD)) <= 1.0:
            use_own_logits(network.policy)

    def _check_network(self, network: _Trained, scoring: Scoring) -> None:
        """Compare a network's scores in one arithmetic. Raises: ScoresDiffer."""
        vocab_size = vocabulary_size(network.policy)
        probe = make_probe(
            network.policy,
            self.device,
            vocab_size=vocab_size,
            shares_prefix=self._cfg.shared_prefix,
            is_packed=self.is_packed,
            dtype=scoring.dtype,
        )
        compute = partial(self._logprobs, network, scoring=scoring)
        check_scores(probe, compute, partial(compute, probed=Probed.LOGITS))
        trunk = None if network.critic is None else network.critic.trunk
        if trunk is not None:
            probe = make_probe(
                trunk,
                self.device,
                vocab_size=vocab_size,
                shares_prefix=self._cfg.shared_prefix,
                is_packed=self.is_packed,
                dtype=scoring.dtype,
            )
            states = partial(compute, probed=Probed.TRUNK)
            check_scores(probe, states, _by_own_attention(trunk, states))

    def score(
        self,
        tokens: TokenBatch,
        *,
        with_entropy: bool = False,
        with_values: bool = False,
        with_balance: bool = False,
        with_support: bool = False,
    ) -> Scores:
        """Return log-probabilities of a block and, if requested, the other fields of `Scores`."""
        if self._replay is not None and not self._replay.is_measured:
            self._measure_routing()
        unit = self._units[self._trained]
        fields = unit(
            tokens,
            self.scoring,
            with_entropy=with_entropy,
            with_values=with_values,
            with_balance=with_balance,
            with_support=with_support,
        )
        if not torch.is_grad_enabled():
            reshard(unit)
        logprobs, entropy, values, end_values, balance, support = fields
        return Scores(
            logprobs=logprobs,
            entropy=entropy,
            values=values,
            end_values=end_values,
            balance=balance,
            support=support,
        )

    @naming_compiler()
    def warm_up(self) -> None:
        """Compile the kernels, once. The first block is full, so that the kernels fit this size.

        A size of one has its own kernels. It occurs for a single padded sequence, and for the token
        of a rank that waits for the blocks of other ranks. The scores of the kernels are then
        compared with those of the networks' own forward passes.

        Raises: ConfigError: the compiler fails, or scores differ.
        """
        if not self.is_cold:
            return
        self.is_cold = False
        full = [WARM_UP_LENGTH] * max(2, self._max_tokens // WARM_UP_LENGTH)
        blocks = [full, [WARM_UP_LENGTH // 2, WARM_UP_LENGTH // 4]]
        blocks += [] if self.is_packed else [[WARM_UP_LENGTH]]
        blocks += [[1]] if self._is_one_of_many else []
        for lengths in blocks:
            ids = [np.arange(length) % 2 for length in lengths]
            masks = [np.arange(length) > 1 for length in lengths]
            tokens = collate_tokens(ids, masks, device=self.device, is_packed=self.is_packed)
            scores = self.score(tokens, with_values=self._trained.critic is not None)
            ends = [each.sum() for each in (scores.logprobs, scores.values) if each is not None]
            torch.stack(ends).sum().backward()
            self._trained.zero_grad()
            with torch.no_grad():
                self.score(tokens)
                self.score_by_reference(tokens)
        self._check_networks()

    @torch.no_grad()
    def score_by_reference(self, tokens: TokenBatch) -> Tensor | None:
        """Return the reference's logprobs, [tokens] float32 nats, None without a reference."""
        if self._is_base_reference:
            with adapters_off(self._trained):
                return self._logprobs(self._trained, tokens, self.scoring)
        if self._reference is None:
            return None
        return self._logprobs(self._reference, tokens, self.scoring)

    @torch.no_grad()
    def score_sequences(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the logprob of each token after the first, at temperature 1, per sequence."""
        scores: list[list[float]] = [[] for _ in token_ids]
        scoring = replace(self.scoring, temperature=1.0)
        lengths = [len(ids) for ids in token_ids]
        is_packed = self.is_packed
        for block in plan_microbatches(lengths, max_tokens=self._max_tokens, is_packed=is_packed):
            sequences = [np.asarray(token_ids[index]) for index in block]
            masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
            tokens = collate_tokens(sequences, masks, device=self.device, is_packed=is_packed)
            logprobs = self._logprobs(self._trained, tokens, scoring)
            parts = logprobs.cpu().split([len(sequence) - 1 for sequence in sequences])
            for index, part in zip(block, parts, strict=True):
                scores[index] = part.tolist()
        return scores

    @torch.no_grad()
    def score_crosswise(
        self, prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray]
    ) -> Tensor:
        """Return log p(answer | prompt) at temperature 1, [answer, prompt] float32 on the CPU.

        Args:
            prompts, answers: each [seq] integer token ids. The packed layout computes a prompt
                once.
        """
        num = len(answers)
        scoring = replace(self.scoring, temperature=1.0)
        pairs = [(prompt, answer) for prompt in prompts for answer in answers]
        sequences = [np.concatenate(pair) for pair in pairs]
        lengths = [len(sequence) for sequence in sequences]
        if self.is_packed:
            tails = sum(map(len, answers))
            totals = [len(prompt) + tails for prompt in prompts]
            planned = plan_microbatches(totals, max_tokens=self._max_tokens, is_packed=True)
            blocks = [[at * num + each for at in block for each in range(num)] for block in planned]
        else:
            blocks = plan_microbatches(lengths, max_tokens=self._max_tokens)
        sums = torch.zeros(len(pairs))
        for block in blocks:
            heads = [len(pairs[index][0]) if at % num else 0 for at, index in enumerate(block)]
            tokens = collate_tokens(
                [sequences[index] for index in block],
                [np.arange(lengths[index]) >= len(pairs[index][0]) for index in block],
                device=self.device,
                is_packed=self.is_packed,
                shared=heads if self.is_packed else (),
            )
            parts = self._logprobs(self._trained, tokens, scoring).cpu()
            parts = parts.split([len(pairs[index][1]) for index in block])
            sums[block] = torch.stack([part.sum() for part in parts])
        return sums.view(len(prompts), num).T

    def _logprobs(
        self, network: _Trained, tokens: TokenBatch, scoring: Scoring, probed: Probed | None = None
    ) -> Tensor:
        """Return a network's log-probabilities of a block; the whole weights are freed again."""
        unit = self._units[network]
        logprobs = unit(tokens, scoring, with_entropy=False, with_values=False, probed=probed)[0]
        reshard(unit)
        return logprobs


def _head_dtype(policy: PreTrainedModel, engine_dtype: str, pass_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which engines compute logits: theirs, or `head_dtype` of config.json.

    It is fp16 in a pass in fp16 only: other losses are not scaled, so gradients would be zero.
    """
    named = getattr(text_config(policy.config), "head_dtype", None)
    dtype = engine_dtype if named in (None, "model") else str(named).removeprefix("torch.")
    if dtype == "float16" and pass_dtype is torch.float16:
        return torch.float16
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def _by_own_attention(trunk: nn.Module, score: Score) -> Score:
    """Return a score function that uses transformers' own attention."""

    def scored(tokens: TokenBatch) -> Tensor:
        with own_attention(trunk):
            return score(tokens)

    return scored
