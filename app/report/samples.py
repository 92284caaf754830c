"""What the committed parts tell: the mix of the data, its lengths, and a few samples with their loss mask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from app.marked import short, spans_of, visible
from app.parts import PARTS, PartEntry
from app.redact import redact
from app.report.charts import ticks
from app.storage import Store, explained

_COLUMNS = ["sample_id", "conversation_id", "source", "domain", "use", "private", "mask_method"]
_LISTS = ["prompt_ids", "answer_ids", "loss_mask"]
_SHOWN = 4  # samples whose mask is shown
_SHOWN_TOKENS = 1500  # of a shown sample, at most
_SHOWN_CHARACTERS = 700  # of a span, its middle left out
_BINS = 24

Key = tuple[str, str]  # source, domain


@dataclass
class Group:
    """Samples of one source and domain."""

    conversations: set[str] = field(default_factory=set)
    samples: int = 0
    private: int = 0  # samples
    prompt: int = 0  # tokens
    answer: int = 0
    supervised: int = 0


@dataclass
class Survey:
    """All samples: groups, lengths [samples] of prompts and answers, and the rows that are shown."""

    groups: dict[Key, Group] = field(default_factory=lambda: defaultdict(Group))
    prompts: list[np.ndarray[Any, Any]] = field(default_factory=list)
    answers: list[np.ndarray[Any, Any]] = field(default_factory=list)
    shown: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)  # source, domain, mask method -> row

    @property
    def lengths(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        empty = [np.zeros(0, np.int64)]
        return np.concatenate(self.prompts or empty), np.concatenate(self.answers or empty)

    def mix(self) -> list[dict[str, Any]]:
        """Per source and domain: conversations, samples and tokens, most supervised tokens first."""
        found = [
            {
                "source": source,
                "domain": domain,
                "conversations": len(g.conversations),
                "samples": g.samples,
                "private_samples": g.private,
                "tokens": {"prompt": g.prompt, "answer": g.answer, "supervised": g.supervised},
            }
            for (source, domain), g in self.groups.items()
        ]
        return sorted(found, key=lambda m: (-m["tokens"]["supervised"], m["source"], m["domain"]))


def survey(store: Store, entries: Iterable[PartEntry]) -> Survey:
    """Read the rows of parts where they lie, one part at a time; their states are not read."""
    found = Survey()
    for entry in entries:
        path = store.full(f"{PARTS}/{entry.files['rows']['name']}")
        with explained(store.url), store.fs.open(path, "rb") as file:
            table = pq.read_table(file, columns=[*_COLUMNS, *_LISTS]).combine_chunks()
        _add(found, table)
    return found


def _add(found: Survey, table: pa.Table) -> None:
    prompt, answer = _list_lengths(table, "prompt_ids"), _list_lengths(table, "answer_ids")
    mask = table.column("loss_mask").combine_chunks()
    ends = np.concatenate([[0], np.cumsum(_list_lengths(table, "loss_mask"))])
    on = np.concatenate([[0], np.cumsum(mask.flatten().to_numpy(zero_copy_only=False))])
    supervised = on[ends[1:]] - on[ends[:-1]]
    found.prompts.append(prompt)
    found.answers.append(answer)
    columns = {name: table.column(name).to_pylist() for name in _COLUMNS}
    for i in range(table.num_rows):
        group = found.groups[columns["source"][i], columns["domain"][i]]
        group.conversations.add(columns["conversation_id"][i])
        group.samples += 1
        group.private += bool(columns["private"][i])
        group.prompt += int(prompt[i])
        group.answer += int(answer[i])
        group.supervised += int(supervised[i])
        if columns["private"][i] or prompt[i] + answer[i] > _SHOWN_TOKENS:
            continue
        key = tuple(columns[name][i] for name in ("source", "domain", "mask_method"))
        # Ids are hashes, so the least one is drawn as if by chance, and the same whenever the page is made.
        if key not in found.shown or columns["sample_id"][i] < found.shown[key]["sample_id"]:
            found.shown[key] = table.slice(i, 1).to_pylist()[0]


def _list_lengths(table: pa.Table, name: str) -> np.ndarray[Any, Any]:
    """Lengths [rows] int64 of a list column."""
    lengths: np.ndarray[Any, Any] = pc.list_value_length(table.column(name)).to_numpy().astype(np.int64)
    return lengths


def mask_samples(found: Survey, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """A few samples as spans of (text, learnt); none of them is private."""
    rows = sorted(found.shown.values(), key=lambda r: (r["mask_method"], r["sample_id"]))
    methods = {r["mask_method"]: r for r in reversed(rows)}  # one of each, then whatever comes
    order = [*methods.values(), *(r for r in rows if r not in methods.values())][:_SHOWN]
    return [
        {
            "sample_id": row["sample_id"],
            "source": row["source"],
            "domain": row["domain"],
            "use": row["use"],
            "mask_method": row["mask_method"],
            "prompt": len(row["prompt_ids"]),
            "answer": len(row["answer_ids"]),
            "supervised": sum(row["loss_mask"]),
            "spans": [
                [visible(redact(short(s.text, _SHOWN_CHARACTERS))), s.supervised]
                for s in spans_of(tokenizer, [*row["prompt_ids"], *row["answer_ids"]], row["loss_mask"])
            ],
        }
        for row in order
    ]


def length_table(lengths: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    """Median, 95 % and largest of lengths [n], and counts of bins (the left edges of which are given)."""
    if not len(lengths):
        return None
    most = int(lengths.max())
    edges = [int(e) for e in ticks(0, most + 1, _BINS)] if most >= _BINS else list(range(most + 2))
    counts, _ = np.histogram(lengths, bins=[*edges[:-1], max(edges[-1], most + 1)])
    return {
        "median": float(np.median(lengths)),
        "p95": float(np.quantile(lengths, 0.95)),
        "max": most,
        "mean": float(lengths.mean()),
        "edges": edges,
        "counts": [int(c) for c in counts],
    }
