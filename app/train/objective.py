"""What a draft is trained towards: the loss of one row and the gradient of its logits, by objective.

z are the draft's logits of a row and T is `train.temperature`; q = softmax(z / T) is the draft, P the teacher's
softmax at T over all V tokens, `inside` = sum of P over the draft vocabulary, p = P / inside there.

    kl              KL(p || q) = sum p (log p - log q)                                   gradient  q - p
    cross_entropy   -log q(x) of the emitted token x                                     gradient  q - [x]
    lk, log_alpha   -log alpha, alpha = sum over the draft vocabulary of min(P, q)       gradient  -g / alpha
    lk, hybrid      lambda KL(p || q) + (1 - lambda) (1 - alpha)           lambda (q - p) - (1 - lambda) g

with g = q (below - sum q below) the gradient of alpha, where below = [q < P]. Gradients are those by z / T; by z they
are 1 / T of that.

alpha is the probability that speculative sampling accepts a token drawn from q, and 1 - alpha the total variation
distance. The lk forms are those of "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding" (arXiv
2602.23881): lambda = exp(-eta * stop_gradient(mean alpha)), the mean over the batch, one lambda for each unroll step
(section 4.2), eta = 3; and -log alpha, whose gradient is that of alpha times 1 / alpha, so that it does not vanish for
a draft that knows nothing. Here the mean is that of the optimiser step before: the same number but for one step, at no
second pass over the batch.

Teacher mass outside the draft vocabulary: kl spreads it (p). For lk it can never be accepted, so alpha takes P itself,
as section 4.4 of the paper does, and only the KL term uses p, which would be infinite otherwise; alpha is at most
`inside`. cross_entropy cannot say a token outside: such a row is a miss, with loss and gradient 0, and still counts in
the mean. `drop` (rows whose teacher's first choice is outside are left out) works the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from app.config import TrainConfig
from app.train.fusion import fused_on_gpu

# Rows of a chunk that the CPU's elementwise passes take at once.
ELEMENTWISE_ROWS = 256

Buffer = Callable[[str, int, int, torch.dtype], Tensor]


@dataclass(frozen=True)
class Objective:
    """Which loss, and what happens to the teacher's mass outside the draft vocabulary."""

    loss: Literal["kl", "lk", "cross_entropy"] = "kl"
    lk_form: Literal["hybrid", "log_alpha"] = "hybrid"
    lk_eta: float = 3.0
    temperature: float = 1.0
    drop_out_of_vocab: bool = False

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        drop = config.out_of_vocab == "drop"
        return cls(config.loss, config.lk_form, config.lk_eta, config.temperature, drop)

    @property
    def measures_alpha(self) -> bool:
        """Whether rows give their acceptance alpha, for which the teacher's whole softmax is needed."""
        return self.loss == "lk"

    @property
    def adapts(self) -> bool:
        """Whether the loss depends on the mean acceptance of the step before."""
        return self.loss == "lk" and self.lk_form == "hybrid"

    def kl_share(self, alpha: Tensor) -> Tensor:
        """lambda of each unroll step: mean acceptance [K] -> [K]; before the first step alpha is 0, all KL."""
        return torch.exp(-self.lk_eta * alpha)


@dataclass(frozen=True)
class Distribution:
    """The teacher at C positions, at the objective's temperature."""

    probs: Tensor  # [C, Vd] over the draft vocabulary, summing to 1
    self_term: Tensor  # [C] sum p log p
    inside: Tensor  # [C] share of the teacher's mass that lies in the draft vocabulary; 1 where it is not measured


@dataclass(frozen=True)
class RowLosses:
    """Of n rows: losses [n], whether the top token is the label [n], acceptance [n] where the objective has it."""

    loss: Tensor
    hits: Tensor
    alpha: Tensor | None = None


def row_losses(
    objective: Objective, logits: Tensor, index: Tensor, labels: Tensor, teacher: Distribution | None,
    kl_share: Tensor, buffer: Buffer,
) -> RowLosses:  # fmt: skip
    """Losses of n rows; `logits` [n, Vd] becomes their gradient by logits / T.

    index [n] says which of the C positions of `teacher` and `labels` [C] (draft ids, -1 outside the draft vocabulary)
    a row reads. kl_share: lambda of these rows [n]. teacher is not read for cross_entropy.
    """
    t = objective.temperature
    if objective.loss == "cross_entropy":
        return RowLosses(*_by_blocks(lambda z, at: _cross_entropy(z, at, labels, t), logits, index))
    assert teacher is not None
    p, own, inside = teacher.probs, teacher.self_term, teacher.inside
    if objective.loss == "kl":
        if logits.is_cuda:
            return RowLosses(*_kl(logits, index, labels, p, own, t))
        return RowLosses(*_by_blocks(lambda z, at: _kl_in_place(z, at, labels, p, own, t, buffer), logits, index))
    if objective.lk_form == "log_alpha":
        return RowLosses(*_by_blocks(lambda z, at: _log_alpha(z, at, labels, p, inside, t), logits, index))
    shares = kl_share.to(p)
    return RowLosses(
        *_by_blocks(lambda z, at, share: _hybrid(z, at, labels, p, own, inside, share, t), logits, index, shares)
    )


def _by_blocks(function: Callable[..., tuple[Tensor, ...]], *by_row: Tensor) -> tuple[Tensor, ...]:
    """`function` over all rows at once on a GPU, over blocks that stay in the cache on a CPU."""
    if by_row[0].is_cuda or len(by_row[0]) <= ELEMENTWISE_ROWS:
        return function(*by_row)
    blocks = zip(*(x.split(ELEMENTWISE_ROWS) for x in by_row), strict=True)
    return tuple(torch.cat(parts) for parts in zip(*(function(*block) for block in blocks), strict=True))


def _kl_in_place(
    logits: Tensor, index: Tensor, labels: Tensor, probs: Tensor, self_term: Tensor, temperature: float, buffer: Buffer
) -> tuple[Tensor, Tensor]:
    """`_kl` with scratch memory that stays: fresh large tensors cost page faults."""
    size = (len(logits), probs.shape[1], probs.dtype)
    z = buffer("z", *size).copy_(logits)  # [n, Vd]
    if temperature != 1.0:
        z.div_(temperature)
    p = torch.index_select(probs, 0, index, out=buffer("p", *size))  # [n, Vd]
    top = z.argmax(-1, keepdim=True)  # [n, 1]
    q = torch.softmax(z, -1, out=buffer("q", *size))  # [n, Vd]
    lse = (z.gather(1, top) - q.gather(1, top).log()).squeeze(1)  # [n]
    loss = self_term[index] + lse - torch.linalg.vecdot(p, z)  # [n]
    logits.copy_(q.sub_(p))
    return loss, top.squeeze(1) == labels[index]


@fused_on_gpu
def _kl(
    logits: Tensor, index: Tensor, labels: Tensor, probs: Tensor, self_term: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    z = logits.to(probs.dtype) / temperature  # [n, Vd]
    p = probs[index]  # [n, Vd]
    lse = z.logsumexp(-1, keepdim=True)  # [n, 1]
    loss = self_term[index] + lse.squeeze(1) - (p * z).sum(-1)  # [n]
    hits = z.argmax(-1) == labels[index]  # [n]
    logits.copy_(torch.exp(z - lse) - p)
    return loss, hits


@fused_on_gpu
def _cross_entropy(logits: Tensor, index: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # [n, Vd]
    label = labels[index].unsqueeze(-1)  # [n, 1], -1 where it cannot be said
    said = label >= 0  # [n, 1]
    lse = z.logsumexp(-1, keepdim=True)  # [n, 1]
    loss = torch.where(said, lse - z.gather(1, label.clamp(min=0)), 0.0).squeeze(1)  # [n]
    hits = z.argmax(-1) == label.squeeze(1)  # [n]
    emitted = torch.arange(z.shape[1], device=z.device) == label  # [n, Vd]
    logits.copy_((torch.exp(z - lse) - emitted.to(z.dtype)) * said)
    return loss, hits


@fused_on_gpu
def _log_alpha(
    logits: Tensor, index: Tensor, labels: Tensor, probs: Tensor, inside: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    z = logits.to(probs.dtype) / temperature  # [n, Vd]
    q = torch.softmax(z, -1)  # [n, Vd]
    truth = probs[index] * inside[index].unsqueeze(-1)  # [n, Vd] P, the teacher's own mass
    alpha = torch.minimum(truth, q).sum(-1)  # [n]
    below = torch.where(q < truth, q, 0.0)  # [n, Vd]
    gradient = below - q * below.sum(-1, keepdim=True)  # [n, Vd] of alpha
    floor = alpha.clamp(min=torch.finfo(alpha.dtype).tiny)  # [n]
    hits = z.argmax(-1) == labels[index]  # [n]
    logits.copy_(-gradient / floor.unsqueeze(-1))
    return -floor.log(), hits, alpha


@fused_on_gpu
def _hybrid(
    logits: Tensor, index: Tensor, labels: Tensor, probs: Tensor, self_term: Tensor, inside: Tensor,
    kl_share: Tensor, temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    z = logits.to(probs.dtype) / temperature  # [n, Vd]
    lse = z.logsumexp(-1, keepdim=True)  # [n, 1]
    q = torch.exp(z - lse)  # [n, Vd]
    p = probs[index]  # [n, Vd]
    truth = p * inside[index].unsqueeze(-1)  # [n, Vd] P, the teacher's own mass
    alpha = torch.minimum(truth, q).sum(-1)  # [n]
    below = torch.where(q < truth, q, 0.0)  # [n, Vd]
    gradient = below - q * below.sum(-1, keepdim=True)  # [n, Vd] of alpha
    kl = self_term[index] + lse.squeeze(1) - (p * z).sum(-1)  # [n]
    hits = z.argmax(-1) == labels[index]  # [n]
    of_kl = kl_share.unsqueeze(-1)  # [n, 1]
    logits.copy_(of_kl * (q - p) - (1.0 - of_kl) * gradient)
    return kl_share * kl + (1.0 - kl_share) * (1.0 - alpha), hits, alpha
