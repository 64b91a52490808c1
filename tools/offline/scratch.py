"""A randomly initialised policy: a small Qwen3 with its own tokenizer and chat template."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from learner.policy.finite import TrainingDiverged, is_finite
from learner.policy.lora import has_adapters, save_adapter, trained_state
from learner.policy.merging import merged_tensors
from learner.policy.saving import save_model, save_tokenizer
from tools.offline.config import SftSection

PAD = "<|pad|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"

# Each turn has only two framing tokens, so that a small model spends its time on the text.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "<|assistant|>{{ message['content'] }}<|end|>"
    "{%- else -%}<|user|>{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def make_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on `texts`, at most `vocab_size` entries.

    Every byte is in the vocabulary, so any text can be encoded. Words of the texts become one token
    each as far as the size allows.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_policy(
    cfg: SftSection, tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> Qwen3ForCausalLM:
    """Return a randomly initialised Qwen3 of the configured size, fp32, untied head."""
    torch.manual_seed(seed)
    vocab_size = -(-len(tokenizer) // 64) * 64  # Kernels are efficient for multiples of 64.
    ids = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        num_key_value_heads=cfg.num_kv_heads,
        head_dim=cfg.hidden_size // cfg.num_heads,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    return Qwen3ForCausalLM(config)


def save_policy(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write a checkpoint directory that every role can load by path, and return it.

    Adapters are merged into the weights, and are also saved alone in the subfolder `adapter`.

    Raises: TrainingDiverged: a tensor has NaN or infinite numbers; names it. Nothing is written.
    """
    tensors = dict(merged_tensors(model, model.state_dict()))
    bad = next((name for name, each in tensors.items() if not is_finite(each)), None)
    if bad is not None:
        raise TrainingDiverged(f"{folder} is not written: {bad} has NaN or infinite values.")
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model, tensors)
    save_tokenizer(folder, tokenizer)
    if has_adapters(model):
        save_adapter(folder / "adapter", model, trained_state(model))
    return folder
