"""What is wrong with an answer, by looking at it: the classes of the quality stage.

Loops are found on token ids and are exact for what they say. Refusals, languages and leftover markers are heuristics
on the decoded text.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.answers import read_answer
from app.config import QualityConfig
from app.marked import text_of
from app.target import Renderer

SAMPLE_CLASSES = ("empty", "cut", "loop", "language", "leftover", "refusal", "thinking_only")
COLUMNS = (
    "sample_id", "source", "messages", "template_kwargs", "prompt_ids", "answer_ids", "loss_mask", "mask_method",
    "finish_reason", "use",
)  # fmt: skip
_LOOP_TOKENS = 16  # a row of dashes is no loop
_CLEAR_LETTERS, _CLEAR_SHARE = 8, 0.7

_CODE = re.compile(r"```.*?(?:```|\Z)", re.S)
_ROLE_MARK = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|start_of_role|end_of_role|user|assistant|system"
    r"|observation|endoftext)\|>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>|<｜(?:User|Assistant)｜>"
)
_TOOL_MARK = re.compile(r"</?tool_(?:call|response)s?>|<\|tool_calls?(?:_section)?(?:_begin|_end)?\|>|\[TOOL_CALLS\]")
_CANNOT = (
    r"(?:i|we)\s*(?:cannot|can['’]?t|can not|won['’]?t|will not|must decline|(?:am|are|['’]m|['’]re)"
    r"\s+(?:unable|not able|not allowed))"
)
_SERVE = (
    r"(?:\s+to)?(?:\s+\w+){0,2}?\s+(?:help|assist|provide|fulfill?|comply|answer|create|generate|write|support|engage"
    r"|share|discuss|give|continue|complete|offer|recommend|participate|do (?:that|this))\b"
)
_REFUSAL = re.compile(
    rf"(?:(?:i['’]?m|i am|we['’]?re)\s+(?:\w+\s+)?sorry[,.]?\s+(?:but\s+)?{_CANNOT}"
    rf"|(?:sorry|i\s+apologi[sz]e|unfortunately)[,.]?\s+(?:but\s+)?{_CANNOT}"
    rf"|{_CANNOT}{_SERVE}|(?:i|we)\s+must\s+decline"
    r"|as an? (?:ai|artificial intelligence|(?:large )?language model)\b"
    r"|(?:很|非常|十分)?(?:抱歉|对不起|不好意思)[，,。!！ ]{0,2}.{0,12}?(?:无法|不能|没法|没有办法)"
    r"|我(?:无法|不能|没有办法)(?:为|帮|给|提供|回答|满足|协助|完成|生成)|作为(?:一个|一名)?(?:人工智能|AI|语言模型))",
    re.I,
)
_CJK = ("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "IDEOGRAPHIC")


class Judge:
    """Finds the classes a sample belongs to.

    Args:
        tokenizer: the target's, with the chat template of the run.
        end_ids: tokens that end a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...], config: QualityConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._thinks = Renderer(tokenizer).thinks
        self._ends = {*end_ids, *tokenizer.all_special_ids}

    def classes(self, row: Mapping[str, Any]) -> list[str]:
        """Classes of a SAMPLE_SCHEMA row (COLUMNS are enough), in the order of SAMPLE_CLASSES.

        An answer is a run of supervised tokens; a sample of several answers belongs to the classes of each.
        """
        found: set[str] = set()
        if row["finish_reason"] == "length":
            found.add("cut")
        ids = [*row["prompt_ids"], *row["answer_ids"]]
        tools = bool(json.loads(row["template_kwargs"]).get("tools"))
        contents = []
        for begin, end in _runs(row["loss_mask"]):
            content = self._answer(ids[:begin], ids[begin:end], tools, row["mask_method"] == "all", found)
            contents.append(content)
        if row["mask_method"] != "all" and _differs(_asked(row), "\n".join(contents)):
            found.add("language")
        return [c for c in SAMPLE_CLASSES if c in found]

    def _answer(self, before: list[int], answer: list[int], tools: bool, everything: bool, found: set[str]) -> str:
        """Add the classes of one answer to `found`; returns its text behind the thinking."""
        ids = list(answer)
        while ids and ids[-1] in self._ends:
            ids.pop()
        text = text_of(self._tokenizer, ids)
        if len(answer) < self._config.min_tokens or not text.strip():
            found.add("empty")
        if loop_period(ids, self._config.loop_repeats) is not None:
            found.add("loop")
        if everything:  # the supervised text holds the template's own markers and the user's words
            return text
        opened = text_of(self._tokenizer, before[-8:]).rstrip().endswith("<think>")
        parts = read_answer(text, self._thinks, opened)
        if parts.thinking_only:
            found.add("thinking_only")
        if parts.leftover_tag or _ROLE_MARK.search(text) or (not tools and _TOOL_MARK.search(text)):
            found.add("leftover")
        if _REFUSAL.match(parts.content.lstrip(" \n\t\"'“*#")):
            found.add("refusal")
        return parts.content


def loop_period(ids: list[int], repeats: int) -> int | None:
    """Length of the shortest period that the tail of `ids` repeats, at least `repeats` times and over 16 tokens.

    None where there is none. Loops that the answer leaves again, and loops that count up, are not found.
    """
    count = len(ids)
    for period in range(1, count // repeats + 1):
        run = period
        while run < count and ids[count - 1 - run] == ids[count - 1 - run + period]:
            run += 1
        if run >= max(repeats * period, _LOOP_TOKENS):
            return period
    return None


def script_of(text: str) -> str | None:
    """The Unicode script most letters of `text` belong to, code blocks apart; None where that is not clear.

    Han, kana and bopomofo are one: Chinese and Japanese are not told apart.
    """
    letters = Counter(s for c in _CODE.sub(" ", text) if c.isalpha() and (s := _script(c)))
    if letters.total() < _CLEAR_LETTERS:
        return None
    script, most = letters.most_common(1)[0]
    return script if most >= _CLEAR_SHARE * letters.total() else None


@functools.lru_cache(maxsize=65536)
def _script(letter: str) -> str:
    name = unicodedata.name(letter, "").replace("FULLWIDTH ", "").replace("HALFWIDTH ", "")
    first = name.split(" ", 1)[0]
    return "CJK" if first.startswith(_CJK) else first


def _differs(asked: str, answered: str) -> bool:
    one, other = script_of(asked), script_of(answered)
    return one is not None and other is not None and one != other


def _asked(row: Mapping[str, Any]) -> str:
    """What the user said: the last turn where the target answered it, all turns of a conversation taken as it is."""
    said = [m["content"] for m in json.loads(row["messages"]) if m["role"] == "user"]
    return "\n".join(said if row["use"] == "as_is" else said[-1:])


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Begin and end of each run of true."""
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))
