"""TINY: a random Llama target of 8 layers with a real byte-level BPE tokenizer, made in under a second.

Its sizes are chosen to catch assumptions: head_dim is not hidden / heads, the configured vocabulary (640) is
longer than the tokenizer (600), the rotary base is not the default, the output head is untied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 8, 4, 2, 32, 128
VOCAB, TOKENIZER_LEN, MAX_POSITIONS, ROPE_THETA = 640, 600, 512, 1e6
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "tied": {"tie_word_embeddings": True},
    "5L": {"num_hidden_layers": 5},
    "llama3rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": ROPE_THETA,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}"
    "{%- else -%}"
    "{{- message['content'] + '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

_TEXT = """
The mill stands by the river, and the wheel turns whenever the water is high. A miller counts the sacks of
grain in the morning, grinds them through the day, and in the evening writes the number of sacks of flour in
a book. When one sack of grain gives three quarters of a sack of flour, how many sacks of grain are needed for
twelve sacks of flour? Let us think step by step: twelve divided by three quarters is sixteen, so it is 16.
A draft model proposes several tokens, the target model checks them in one step and keeps those that agree.
The longer the accepted run, the fewer steps the large model takes, and the faster the answer arrives.
def count_words(text):
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
Question: what is 17 + 25? Answer: 42. Question: what is 9 * 8? Answer: 72. Question: what is 6 * 7? 42.
You are a helpful assistant. Please write a short story of a lighthouse keeper who finds a letter in a bottle.
Once upon a time there was a keeper of a lighthouse on a small island. Every night he lit the lamp, and every
morning he walked along the beach to see what the sea had brought. One day he found a green bottle, and in the
bottle there was a letter from a child who lived on the other side of the ocean, asking whether the stars were
the same over there. He wrote back that they were, only in another order, and threw the bottle into the waves.
import json
with open("data.json") as handle:
    rows = [json.loads(line) for line in handle if line.strip()]
print(len(rows), "rows read", file=sys.stderr)
To make bread, mix flour, water, salt and yeast; knead the dough for ten minutes; let it rest an hour; then
bake it in a hot oven until the crust is brown. The smell tells you when it is done, but a timer is safer.
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly 600 entries, three of them special, trained on the text above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_LEN,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHAT_TEMPLATE
    assert len(fast) == TOKENIZER_LEN, f"the training text gives only {len(fast)} entries"
    return fast


def make_tiny(folder: Path, variant: str = "base", seed: int = 0) -> Path:
    """Write TINY in Hugging Face form under `folder` and return it; the same seed gives the same bits.

    `variant`: "base", "tied", "5L" (five layers) or "llama3rope" (scaled rotary embedding).
    """
    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**settings, **VARIANTS[variant]}))
        for name, parameter in model.named_parameters():
            if "norm" in name:  # distinct from 1.0, so that a forgotten norm weight shows
                parameter.data.uniform_(0.5, 1.5)
        if not model.config.tie_word_embeddings:
            _prefer_successors(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _prefer_successors(model: LlamaForCausalLM) -> None:
    """Give every token a usual successor, so that greedy decoding has a clear first choice.

    Purely random logits have near-ties that bf16 rounding decides one way or the other (one position in
    twenty); here most tokens are the successor of the one before and the context decides the rest.
    """
    embed, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data  # [V, H] both
    embed *= 10.0
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # the layers add less than the token itself
            parameter.data *= 0.25
    successor = torch.randperm(TOKENIZER_LEN)
    head *= 0.3
    head[successor] += 0.15 * embed[:TOKENIZER_LEN]
    head[TOKENIZER_LEN:] = 0.0  # rows no tokenizer id belongs to
