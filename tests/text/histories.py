"""Chat templates of the dialects, short: how each one's published template writes the calls of an earlier turn."""

from __future__ import annotations

from collections.abc import Mapping

_DS = "<\uff5ctool\u2581{}\uff5c>".format
_BEGIN, _END, _CALL, _CALL_END, _SEP = (
    _DS(name) for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)


def _template(calls: str) -> str:
    """Roles and texts, and for a message with calls `calls`, where `f` is the function of the call `c`."""
    return (
        "{%- for m in messages -%}{{ m.role }}: {{ m.content }}{%- if m.tool_calls -%}" + calls + "{%- endif -%}"
        "{{ '\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}assistant: {%- endif -%}"
    )


def _each(call: str, between: str = "", begin: str = "", end: str = "") -> str:
    gap = f"{{%- if not loop.last -%}}{{{{ {between!r} }}}}{{%- endif -%}}" if between else ""
    return _template(
        f"{{{{ {begin!r} }}}}{{%- for c in m.tool_calls -%}}{{%- set f = c.function -%}}{call}{gap}{{%- endfor -%}}"
        f"{{{{ {end!r} }}}}"
    )


def _object(arguments: str = "arguments") -> str:
    return f"{{{{ '{{\"name\": \"' + f.name + '\", \"{arguments}\": ' }}}}{{{{ f.arguments | tojson }}}}{{{{ '}}' }}}}"


def _written(before: str, after: str = "") -> str:
    """A call whose template prints the arguments as they are, which must be text."""
    return f"{{{{ {before} + f.arguments + {after!r} }}}}"


_VALUE = "{{ v if v is string else v | tojson }}"
_QWEN = (
    "{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}{%- for k, v in f.arguments | items -%}"
    "{{ '<parameter=' + k + '>\\n' }}" + _VALUE + "{{ '\\n</parameter>\\n' }}{%- endfor -%}"
    "{{ '</function>\\n</tool_call>' }}"
)
_GLM = (
    "{{ '<tool_call>' + f.name + '\\n' }}{%- for k, v in f.arguments.items() -%}"
    "{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}" + _VALUE + "{{ '</arg_value>\\n' }}{%- endfor -%}"
    "{{ '</tool_call>' }}"
)
_MINIMAX = (
    "{{ '<invoke name=\"' + f.name + '\">\\n' }}{%- if f.arguments is mapping -%}"
    "{%- for k, v in f.arguments | items -%}"
    "{{ '<parameter name=\"' + k + '\">' }}" + _VALUE + "{{ '</parameter>\\n' }}{%- endfor -%}{%- endif -%}"
    "{{ '</invoke>\\n' }}"
)
_LFM = (
    "{{ f.name + '(' }}{%- for k, v in f.arguments.items() -%}{{ k + '=' }}"
    '{%- if v is string -%}{{ "\'" + v + "\'" }}{%- elif v is mapping -%}{{ v | tojson }}{%- else -%}{{ v | string }}'
    "{%- endif -%}{%- if not loop.last -%}{{ ', ' }}{%- endif -%}{%- endfor -%}{{ ')' }}"
)
_GEMMA = (
    "{%- macro show(v) -%}{%- if v is string -%}{{ '<|\"|>' + v + '<|\"|>' }}{%- elif v is boolean -%}"
    "{{ 'true' if v else 'false' }}{%- elif v is none -%}null{%- elif v is mapping -%}{{ '{' }}"
    "{%- for k, w in v | dictsort -%}{{ k + ':' }}{{ show(w) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%}"
    "{{ '}' }}{%- elif v is sequence -%}[{%- for w in v -%}{{ show(w) }}{%- if not loop.last -%},{%- endif -%}"
    "{%- endfor -%}]{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}"
)
_HARMONY = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- if m.thinking and m.tool_calls -%}"
    "{%- if m.content -%}{{ raise_exception('content and thinking') }}{%- endif -%}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif -%}"
    "{%- if m.tool_calls -%}{%- set f = m.tool_calls[0].function -%}"
    "{{ '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}"
    "{{ f.arguments | tojson }}{{ '<|call|>' }}"
    "{%- else -%}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif -%}"
    "{%- else -%}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"
)
HARMONY = _HARMONY

HISTORIES: Mapping[str, str] = {
    "hermes": _each("{{ '\\n<tool_call>\\n' }}" + _object() + "{{ '\\n</tool_call>' }}"),
    "qwen-coder": _each(_QWEN, "\n"),
    "glm": _each(_GLM, "\n"),
    "minimax": _each(_MINIMAX, begin="\n<minimax:tool_call>\n", end="</minimax:tool_call>"),
    "deepseek-v3": _each(
        _written(f"'{_CALL}function{_SEP}' + f.name + '\\n```json\\n'", f"\n```{_CALL_END}"), "\n", _BEGIN, _END
    ),
    "deepseek-v3.1": _each(_written(f"'{_CALL}' + f.name + '{_SEP}'", _CALL_END), "", _BEGIN, _END),
    "kimi": _each(
        _written("'<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>'", "<|tool_call_end|>"),
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "mistral": _each(
        "{%- if c.id | length != 9 -%}{{ raise_exception('id') }}{%- endif -%}"
        + _object().removesuffix("{{ '}' }}")
        + "{{ ', \"id\": \"' + c.id + '\"}' }}",
        ", ",
        "[TOOL_CALLS] [",
        "]",
    ),
    "mistral-v11": _each("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{ f.arguments | tojson }}"),
    "granite": _each(_object(), ", ", "<|tool_call|>[", "]"),
    "phi": _each(_object(), ", ", "<|tool_call|>[", "]<|/tool_call|>"),
    "hunyuan": _each(_object(), ",\n", "<tool_calls>[\n", "\n]</tool_calls>"),
    "cohere": _each(
        '{{ \'    {"tool_call_id": "0", "tool_name": "\' + f.name + \'", "parameters": \' }}'
        "{{ f.arguments | tojson }}{{ '}' }}",
        ",\n",
        "<|START_ACTION|>[\n",
        "\n]<|END_ACTION|>",
    ),
    "lfm": _each(_LFM, ", ", "<|tool_call_start|>[", "]<|tool_call_end|>"),
    "llama": _each(_object("parameters"), "", "<|python_start|><|python_end|>"),
    "gemma": _GEMMA
    + _each(
        "{{ '<|tool_call>call:' + f.name + '{' }}{%- if f.arguments is mapping -%}"
        "{%- for k, v in f.arguments | dictsort -%}{{ k + ':' }}{{ show(v) }}{%- if not loop.last -%},{%- endif -%}"
        "{%- endfor -%}{%- else -%}{{ f.arguments }}{%- endif -%}{{ '}<tool_call|>' }}"
    ),
}
