"""Small chat templates in the style of the families people serve; names as in FIELD_CASES.md."""

from __future__ import annotations

_HEAD = "{% for m in messages %}"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

PLAIN = _HEAD + "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}" + _PROMPT

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a tiny model.<|im_end|>\n{% endif %}" + PLAIN
)

# Earlier thinking is dropped; the last answer always shows a think block, empty where there was none.
THINK = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + _HEAD
    + "<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ m.get('reasoning_content', '') }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}" + _PROMPT
)

# The generation prompt opens the thinking, so an answer begins inside it.
THINK_OPEN = (
    _HEAD + "<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}<think>\n{{ m.get('reasoning_content', '') }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

# Tools in the system turn, calls as JSON, results that follow each other merged into one user turn.
TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t['function'] | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}" + _HEAD + "{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user\n{% endif %}"
    "<tool_response>\n{{ m['content'] }}\n</tool_response>\n"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<tool_call>\n"
    "{\"name\": \"{{ c['function']['name'] }}\", \"arguments\": {{ c['function']['arguments'] | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}" + _PROMPT
)

GENERATION_TAGS = (
    _HEAD + "<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}" + _PROMPT
)

# Header style of Llama 3, another end token.
HEADERS = (
    _HEAD + "<|start|>{{ m['role'] }}<|sep|>\n\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|sep|>\n\n{% endif %}"
)

STRICT = (
    "{% if not messages or messages[0]['role'] not in ('user', 'system') %}"
    "{{ raise_exception('Conversation must start with a user query') }}{% endif %}"
    "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('No user query found') }}{% endif %}" + PLAIN
)

ALL = {
    "plain": PLAIN,
    "default_system": DEFAULT_SYSTEM,
    "think": THINK,
    "think_open": THINK_OPEN,
    "tools": TOOLS,
    "generation_tags": GENERATION_TAGS,
    "headers": HEADERS,
    "strict": STRICT,
}
