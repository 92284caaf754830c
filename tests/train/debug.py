"""The debug-size draft, its target head and random samples that every training test uses."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from app.draft_config import DraftConfig
from app.target import TargetHead
from app.train.draft import Eagle3Draft

WORKERS = "forkserver"  # one process imports torch and our modules, and all workers of all tests are its forks
VOCAB = 96
RULE_TOKENS = 24


@dataclass(frozen=True)
class FakeSample:
    sample_id: str
    conversation_id: str
    domain: str
    split: str
    token_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    teacher: Tensor
    teacher_pos: Tensor
    greedy: bool = True


class WideHead(TargetHead):
    """The teacher in fp64, for comparisons without rounding."""

    def logits(self, s_n: Tensor, rows: Tensor | None = None) -> Tensor:
        x = s_n.double()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps) * (self.norm_weight + self.norm_plus_one)
        weight = (self.lm_head if rows is None else self.lm_head[rows]).double()
        out = x @ weight.T * self.logit_scale
        return out if self.logit_softcap is None else torch.tanh(out / self.logit_softcap) * self.logit_softcap


def debug_config(**changes: Any) -> DraftConfig:
    """H 32, 4 query and 2 key heads of 16 (so heads x head_dim is not H), V 96, Vd 40."""
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "aux_layer_ids": (1, 2, 3),
    }
    return DraftConfig(**(values | changes))


def debug_head(seed: int = 0, hidden: int = 32, vocab: int = VOCAB, wide: bool = False, **changes: Any) -> TargetHead:
    g = torch.Generator().manual_seed(seed)
    values: dict[str, Any] = {
        "norm_weight": 1 + 0.1 * torch.randn(hidden, generator=g),
        "norm_eps": 1e-5,
        "norm_plus_one": False,
        "lm_head": (0.5 * torch.randn(vocab, hidden, generator=g)).bfloat16(),
        "embed_tokens": torch.randn(vocab, hidden, generator=g).bfloat16(),
    }
    return (WideHead if wide else TargetHead)(**(values | changes))


def kept_ids(config: DraftConfig, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randperm(config.vocab_size, generator=g)[: config.draft_vocab_size].sort().values


def debug_draft(head: TargetHead | None = None, seed: int = 0, **changes: Any) -> Eagle3Draft:
    """A debug draft with every weight away from its start, so that no gradient vanishes by symmetry."""
    config = debug_config(**changes)
    torch.manual_seed(seed)
    draft = Eagle3Draft(config)
    if config.target_hidden_size == config.hidden_size:
        draft.init_from_target(head or debug_head(vocab=config.vocab_size), kept_ids(config, seed))
    else:
        draft.embed_tokens.weight = torch.randn(config.vocab_size, config.hidden_size).bfloat16()
        draft.lm_head.weight.data.normal_(0, 0.3)
        draft.set_vocabulary(kept_ids(config, seed))
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return draft


def span_mask(length: int, spans: list[tuple[int, int]]) -> Tensor:
    mask = torch.zeros(length, dtype=torch.bool)
    for a, b in spans:
        mask[a:b] = True
    return mask


def make_sample(
    mask: Tensor, seed: int = 0, hidden: int = 32, vocab: int = VOCAB, name: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> FakeSample:  # fmt: skip
    """Random tokens and states for a loss mask [T]; the teacher only where it is read."""
    g = torch.Generator().manual_seed(seed)
    length = len(mask)
    positions = (mask[:-1] & mask[1:]).nonzero().flatten()
    return FakeSample(
        sample_id=name or f"s{seed}",
        conversation_id=name or f"c{seed}",
        domain=("math", "code")[seed % 2],
        split="train",
        token_ids=torch.randint(0, vocab, (length,), generator=g),
        loss_mask=mask,
        aux=torch.randn(length - 1, 3 * hidden, generator=g).to(dtype),
        teacher=(2 * torch.randn(len(positions), hidden, generator=g)).to(dtype),
        teacher_pos=positions,
    )


def random_samples(n: int, seed: int = 0, longest: int = 24, hidden: int = 32, vocab: int = VOCAB) -> list[FakeSample]:
    """Documents of random length with random masks: one span, several spans, scattered tokens, or nothing."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(n):
        length = int(torch.randint(2, longest + 1, (1,), generator=g))
        kind = int(torch.randint(0, 4, (1,), generator=g))
        if kind == 0:
            start = int(torch.randint(0, length, (1,), generator=g))
            mask = span_mask(length, [(start, length)])
        elif kind == 1:
            mask = torch.rand(length, generator=g) < 0.8
        elif kind == 2:
            third = length // 3
            mask = span_mask(length, [(1, third + 1), (third + 2, length - 1)])
        else:
            mask = torch.rand(length, generator=g) < 0.3
        samples.append(make_sample(mask, seed=seed * 1000 + i, hidden=hidden, vocab=vocab))
    return samples


@dataclass(frozen=True)
class Length:
    num_tokens: int
    num_supervised: int
    sample_id: str = ""


class ListSource:
    """Samples in memory behind the reader's interface."""

    def __init__(self, samples: list[FakeSample]) -> None:
        self.samples = samples
        self.infos = [Length(len(s.token_ids), len(s.teacher_pos), s.sample_id) for s in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def learnable_samples(n: int, head: TargetHead, length: int = 24, seed: int = 0) -> list[FakeSample]:
    """Answers that follow a rule: the next token is a function of the one before, and so is the teacher."""
    vocab, hidden = head.lm_head.shape
    g = torch.Generator().manual_seed(99)
    successor = torch.randperm(RULE_TOKENS, generator=g)
    states = torch.randn(vocab, 3 * hidden, generator=g)
    samples = []
    for i in range(n):
        g.manual_seed(seed * 1000 + i)
        ids = torch.randint(0, RULE_TOKENS, (length,), generator=g)
        for t in range(5, length):
            ids[t] = successor[ids[t - 1]]
        sample = make_sample(span_mask(length, [(4, length)]), seed=seed * 1000 + i, name=f"c{seed}-{i}")
        values = {
            **sample.__dict__,
            "token_ids": ids,
            "aux": states[ids[:-1]].bfloat16(),
            "teacher": 8 * head.lm_head[ids[sample.teacher_pos + 1]],
        }
        samples.append(FakeSample(**values))
    return samples


def run_workers(function: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    """Call `function(rank, *args)` in `world` processes of their own.

    Raises:
        ProcessRaisedException: one of them did; the others are ended.
    """
    multiprocessing.get_context(WORKERS).set_forkserver_preload(["tests.train.test_trainer"])
    mp.start_processes(function, args, nprocs=world, start_method=WORKERS)
