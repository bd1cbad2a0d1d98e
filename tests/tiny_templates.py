"""Chat templates with the peculiarities of model families, and small tokenizers that have their special tokens."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Compute.",
            "parameters": {
                "type": "object",
                "properties": {
                    "first": {"type": "integer", "description": "A number."},
                    "word": {"type": "string", "description": "A word."},
                    "table": {"type": "object", "description": "A table."},
                    "loud": {"type": "boolean", "description": "A choice."},
                },
                "required": ["first"],
            },
        },
    }
    for name in ("add", "look_up")
]
CHATML = "{% if tools %}{{ tools | tojson }}{% endif %}"
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN3 = CHATML + (  # earlier reasoning goes, results of tools are in one message of the user
    "{% set last = namespace(query=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.query = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% set said = m.content.split('</think>')[-1].lstrip() %}"
    "{% if loop.index0 > last.query and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ said }}"
    "{% for call in m.tool_calls or [] %}{% if said or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + GENERATION
)
CODER = QWEN3.replace(  # Qwen3-Coder
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    "<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n"
    "{{ value | tojson if value is mapping or value is sequence and value is not string else value | string }}\n"
    "</parameter>\n{% endfor %}</function>",
)
SMOL = QWEN3.replace(GENERATION, "") + (  # SmolLM3: the system prompt turns reasoning off
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if '/no_think' in messages[0].content %}"
    "<think>\n\n</think>\n{% endif %}{% endif %}"
)
LLAMA3 = (  # the content of tools is JSON, and a turn has one call or a content
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>"
    "{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    "<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # version 3: ids have nine characters, and results name the id of their call
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</s>{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
MISTRAL_13 = re.sub(
    r"\[TOOL_CALLS\].*?\{% endfor %\}\]",
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    "{% endfor %}",
    MISTRAL,
)
MISTRAL_11 = MISTRAL_13.replace("[ARGS]", "[CALL_ID]{{ call.id }}[ARGS]")  # version 11, of Mistral Small 3.1 and 3.2
GEMMA3 = (  # no tools; the assistant is the model
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GPT_OSS = (  # a result names the tool of the call before it, and a call ends with a token of its own
    "{{ tools | tojson }}{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% set last.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions."
    "{{ last.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{% if not last.name %}{{ raise_exception('a tool message without a call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM4 = (  # a turn of the model ends with the role of the next message
    "[gMASK]<sop>{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}\n"
    "{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}</arg_key>\n<arg_value>"
    "{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DEEPSEEK = (  # arguments are text
    "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}<ASSISTANT>"
    '{% for call in m.tool_calls %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments + '}</tool_call>' }}"
    "{% endfor %}<end>{% elif m.role == 'assistant' %}<ASSISTANT>{{ m.content }}<end>{% elif m.role == 'tool' %}"
    "<OUTPUT>{{ m.content }}</OUTPUT>{% else %}<USER>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<ASSISTANT>{% endif %}"
)
COHERE = (  # two tokens end a turn
    "{{ bos_token }}{% for m in messages %}<TURN><{{ m.role | upper }}>{% if m.role == 'assistant' %}<RESPONSE>"
    "{{ m.content }}</RESPONSE>{% else %}{{ m.content }}{% endif %}</TURN>{% endfor %}"
    "{% if add_generation_prompt %}<TURN><ASSISTANT><RESPONSE>{% endif %}"
)
PHI3 = (  # the tokenizer gives the line break after a special token to that token
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ENDS = {
    **dict.fromkeys(("QWEN3", "CODER", "SMOL"), "<|im_end|>"),
    **dict.fromkeys(("MISTRAL", "MISTRAL_11", "MISTRAL_13", "LLAMA2"), "</s>"),
    **dict.fromkeys(("GPT_OSS", "PHI3"), "<|end|>"),
    **{"LLAMA3": "<|eot_id|>", "GEMMA3": "<end_of_turn>", "GLM4": "<|user|>", "DEEPSEEK": "<end>", "COHERE": "</TURN>"},
}
"""token that ends a turn of the model without calls, by the name of the template"""
CALL_ENDS = ENDS | {"GPT_OSS": "<|call|>", "GLM4": "<|observation|>"}
"""token that ends a turn of the model with calls"""
_SPECIAL = re.compile(
    r"<\|\w+\|>|</?(?:s|start_of_turn|end_of_turn|end|sop|USER|ASSISTANT|OUTPUT|TURN|RESPONSE)>|\[[/A-Z_]+\]"
)


def family(name: str, words: str = "bytes") -> Any:
    """Return a tokenizer with the template and the special tokens of a family. `words` names its other tokens: one for
    each byte; or pieces of words as in SentencePiece, with a space before the first word of a text ("first") or of each
    text between special tokens ("each")."""
    template, end = globals()[name], ENDS[name]
    made = {"bytes": byte_words, "first": _pieces, "each": lambda: _pieces("each")}[words]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token=end)
    roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "[gMASK]"]
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # special in some tokenizers, plain text in others
    special = dict.fromkeys([*_SPECIAL.findall(template), CALL_ENDS[name], *roles, *tags])
    tokens = [AddedToken(token, special=True, normalized=False, rstrip=name == "PHI3") for token in special]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def byte_words() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    return made


def _pieces(scheme: str = "first") -> Tokenizer:
    """Return a tokenizer with the merges of some words, as Llama 2's."""
    letters = ["\u2581", *map(chr, range(32, 127)), *(f"<0x{i:02X}>" for i in range(256))]
    merges = [("\u2581", "l"), ("\u2581l", "o"), ("\u2581lo", "w"), ("l", "o"), ("lo", "w"), ("\u2581", "[")]
    vocab = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    if scheme == "each":  # as in older tokenizers
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made
