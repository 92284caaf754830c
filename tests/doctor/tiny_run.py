"""A whole run on TINY in seconds, without engine and Ray: the target itself answers and gives its states on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.bench.measure import Served
from app.captured import load_entries, part_keys
from app.codecs import decoded
from app.config import Config
from app.parts import read_ingest_part, write_part
from app.pipeline import Stage, StageContext, StageResult, run_stage
from app.pipelines.bench import compare
from app.pipelines.evaluate import load_draft
from app.pipelines.vocab import load_vocab
from app.record import record_of
from app.runfolder import digest_of
from app.samples import SampleReader, load_split
from app.target import FINAL_NORM, inspect_target
from app.train.loop import draft_config, run_worker
from tests.pipelines.finished import stage
from tests.runs import context, prompts, tiny_config, write_rows
from tests.train.serving import serve_answer

NEW_TOKENS = 24
Row = dict[str, Any]
Spoil = Callable[[Row, list[Tensor]], tuple[Row, Tensor]]  # a sample and s_0 .. s_n -> what is stored of it


class Target:
    """TINY in fp32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder, self.info = folder, inspect_target(str(folder))
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._last: list[Tensor] = []
        norm = self.model.get_submodule(FINAL_NORM[0].removesuffix(".weight"))
        norm.register_forward_pre_hook(lambda module, inputs: self._last.append(inputs[0]))

    @torch.no_grad()
    def answer(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy answers of up to NEW_TOKENS; prompts of one length at once."""
        answers: dict[int, list[int]] = {}
        for length in {len(p) for p in prompts}:
            mine = [i for i, p in enumerate(prompts) if len(p) == length]
            ids, cache, out = torch.tensor([prompts[i] for i in mine]), None, []
            for _ in range(NEW_TOKENS):
                step = self.model(ids, past_key_values=cache, use_cache=True)
                ids, cache = step.logits[:, -1:].argmax(-1), step.past_key_values
                out.append(ids)
            for i, row in zip(mine, torch.cat(out, 1).tolist(), strict=True):
                ends = [n for n, token in enumerate(row) if token in self.info.eos_token_ids]
                answers[i] = row[: ends[0] + 1] if ends else row
        return [answers[i] for i in range(len(prompts))]

    @torch.no_grad()
    def states(self, ids: list[int]) -> list[Tensor]:
        """s_0 .. s_n before the final norm: n + 1 times [T-1, H]."""
        self._last.clear()
        out = self.model(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False)
        return [s[0] for s in (*out.hidden_states[:-1], self._last[-1])]


def as_captured(layers: tuple[int, ...]) -> Spoil:
    """What a right engine stores: s_k of `layers`, and s_n."""
    return lambda row, states: (row, torch.stack([*(states[k] for k in layers), states[-1]], 1).bfloat16())


def generated(config: Config, target: Target, spoil: Spoil | None = None) -> StageContext:
    """Ingest and generate done: TINY's own answers, stored as `spoil` has it."""
    ctx = context(config)
    run_stage(stage("ingest"), ctx)
    keep = spoil or as_captured(ctx.layers)
    for part, key in part_keys(ctx).items():
        source = read_ingest_part(ctx.run.store, part)
        anew = [row for row in source if row["use"] == "regenerate"]
        answers = target.answer([list(r["requests"][0]["prompt_ids"]) for r in anew])
        limit = config.generate.max_length
        samples = [_answered(row, answer, target, limit) for row, answer in zip(anew, answers, strict=True)]
        samples += [sample for row in source if row["use"] == "as_is" for sample in _as_is(row)]
        pairs = [keep(s, target.states([*s["prompt_ids"], *s["answer_ids"]])) for s in samples]
        rows = [row for row, _ in pairs]
        entry = {
            "part": part, "key": key, "rows_in": len(source), "conversations": len(source), "rejects": [],
            "cut_short": [],
            "tokens": {
                "prompt": sum(len(r["prompt_ids"]) for r in rows),
                "answer": sum(len(r["answer_ids"]) for r in rows),
                "supervised": sum(map(sum, (r["loss_mask"] for r in rows))),
            },
            "finish_reasons": {k: sum(r["finish_reason"] == k for r in rows) for k in ("stop", "length")},
            "layers": list(ctx.layers), "dtype": "bfloat16", "hidden_size": ctx.target.hidden_size, "seconds": 0.0,
            "record": record_of(config, ctx.target, ctx.layers), "codec": config.capture.codec,
        }  # fmt: skip
        write_part(ctx.run.store, entry, rows, [states for _, states in pairs])
    run_stage(stage("generate"), ctx)
    return ctx


def _common(row: Row, turn: int) -> Row:
    kept = ("source", "domain", "use", "private", "messages", "template_kwargs", "mask_method")
    own = {"sample_id": f"{row['id']}-{turn}", "conversation_id": row["id"], "turn": turn}
    return {**own, **{key: row[key] for key in kept}}


def _answered(row: Row, answer: list[int], target: Target, limit: int) -> Row:
    prompt = list(row["requests"][0]["prompt_ids"])
    answer = answer[: limit - len(prompt)]
    stopped = answer[-1] in target.info.eos_token_ids
    return {
        **_common(row, 0),
        "messages": json.dumps([*json.loads(row["messages"]), {"role": "assistant", "content": "..."}]),
        "sampling": json.dumps({"temperature": 0.0}),
        "prompt_ids": prompt, "answer_ids": answer, "loss_mask": [False] * len(prompt) + [True] * len(answer),
        "finish_reason": "stop" if stopped else "length", "truncated": not stopped,
    }  # fmt: skip


def _as_is(row: Row) -> list[Row]:
    keys = ("prompt_ids", "answer_ids", "loss_mask", "truncated")
    return [
        {**_common(row, turn), **{key: request[key] for key in keys}, "sampling": "{}", "finish_reason": "prefill"}
        for turn, request in enumerate(row["requests"])
    ]


def trained(ctx: StageContext) -> StageContext:
    """Vocab and train done, in this process."""

    def train(ctx: StageContext) -> StageResult:
        config, vocab = ctx.config, load_vocab(ctx.run.store)
        entries = load_entries(ctx)
        summary = run_worker(
            ctx.run.store, config.model_dump(mode="json"), ctx.target.to_json(), entries, torch.device("cpu")
        )
        shape = draft_config(ctx.target, config.train, list(ctx.layers), len(vocab.kept_ids))
        counts = {k: v for k, v in summary.items() if k != "validation"}
        extra = {"draft_config": shape.model_dump(mode="json")}
        return StageResult([], counts, digest=digest_of(summary["loss"]), extra=extra)

    run_stage(stage("vocab"), ctx)
    run_stage(Stage("train", train, inputs=("generate", "vocab")), ctx)
    return ctx


def benched(ctx: StageContext) -> StageContext:
    """Export, and a bench whose engine is `tests/train/serving.py`: row by row, from the exported draft."""

    def bench(ctx: StageContext) -> StageResult:
        k, served = ctx.config.evaluate.num_draft_tokens, Served([], [1.0], 0)
        served.accepted_per_position = [0] * k
        entries, draft = load_entries(ctx), load_draft(ctx)
        reader = SampleReader(ctx.run.store, entries, load_split(ctx.run.store, entries, ctx.config), ("holdout",))
        for i in range(len(reader)):
            sample = replace(reader[i], aux=decoded(reader[i].aux))
            for turn in serve_answer(draft, sample, int(sample.loss_mask.nonzero()[0]), k):
                served.drafts += 1
                served.draft_tokens += len(turn.proposals)
                served.accepted += turn.accepted
                for position in range(turn.accepted):
                    served.accepted_per_position[position] += 1
            served.tokens += int(sample.loss_mask.sum())
        result = compare(replace(served), served, k)
        result |= {"prompts": len(reader), "concurrency": 1, "max_new_tokens": NEW_TOKENS}
        return StageResult([], result, digest="bench")

    run_stage(stage("export"), ctx)
    run_stage(Stage("bench", bench, inputs=("generate", "export")), ctx)
    return ctx


def run_config(target: Path, folder: Path, rows: int = 20, prefix: str = "Please count", **changes: Any) -> Config:
    """A run of `rows` prompts under `folder`, a fifth of them held out."""
    folder.mkdir(parents=True, exist_ok=True)
    source = write_rows(folder / "rows.jsonl", prompts(rows, prefix))
    settings = {
        "evaluate__holdout": rows // 5,
        "generate__max_new_tokens": NEW_TOKENS,
        "train__min_teacher_agreement": 0.9,
        "train__validation_share": 0.0,
        "train__cpus_per_worker": 1,
        "ingest__workers": 1,
    }
    return tiny_config(target, folder / "run", source, **settings | changes)


def copied(config: Config, folder: Path) -> Config:
    """A copy of the run under `folder`, to be spoilt."""
    shutil.copytree(config.run_dir, folder)
    return config.model_copy(update={"run_dir": str(folder)})
