"""Chat templates in the shapes of models whose templates no installed package ships."""

from transformers import PreTrainedTokenizerFast

from tests.actor.formats.trl_templates import byte_tokenizer

ASKS = "{% if add_generation_prompt %}PROMPT{% endif %}"
# DeepSeek-V3.1's: arguments are a JSON text, thoughts of earlier turns are dropped.
DEEPSEEK = (
    "{{ bos_token }}{% if tools %}## Tools{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    "{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}"
    "<|tool_output_begin|>{{ m.content }}<|tool_output_end|>"
    "{% else %}<|Assistant|></think>{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}{% if loop.first %}<|tool_calls_begin|>{% endif %}"
    "<|tool_call_begin|>{{ c.function.name + '<|tool_sep|>' + c.function.arguments }}"
    "<|tool_call_end|>{% if loop.last %}<|tool_calls_end|>{% endif %}{% endfor %}"
    "<|end_of_sentence|>{% endif %}{% endfor %}" + ASKS.replace("PROMPT", "<|Assistant|><think>")
)
# Kimi-K2's: the call's name has a number.
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role if m.role != 'tool' else 'system' }}|>{{ m.role }}"
    "<|im_middle|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if loop.first %}<|tool_calls_section_begin|>{% endif %}<|tool_call_begin|>"
    "functions.{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments if c.function.arguments is string else"
    " c.function.arguments | tojson }}<|tool_call_end|>"
    "{% if loop.last %}<|tool_calls_section_end|>{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    + ASKS.replace("PROMPT", "<|im_assistant|>assistant<|im_middle|>")
)
# MiniMax-M2's: tags with attributes, and the thoughts begin in the prompt.
MINIMAX = (
    "{% if tools %}]~b]system\n{{ tools | tojson }}[e~[\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}]~b]ai\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if loop.first %}\n<minimax:tool_call>{% endif %}"
    '\n<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}\n'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>{% endfor %}'
    "\n</invoke>{% if loop.last %}\n</minimax:tool_call>{% endif %}{% endfor %}[e~[\n"
    "{% elif m.role == 'tool' %}]~b]tool\n<response>{{ m.content }}</response>[e~[\n"
    "{% else %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    + ASKS.replace("PROMPT", "]~b]ai\n<think>\n")
)

# OLMo 3's: one Python call in each line, whose values are JSON.
OLMO = (
    "{% for m in messages %}<|im_start|>{{ 'environment' if m.role == 'tool' else m.role }}\n"
    "{{ m.content }}{% if loop.first and tools %}{{ tools | tojson }}{% endif %}"
    "{% if m.tool_calls %}<function_calls>{% for c in m.tool_calls %}"
    "{{ '\\n' if not loop.first }}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){% endfor %}</function_calls>{% endif %}"
    "<|im_end|>\n{% endfor %}" + ASKS.replace("PROMPT", "<|im_start|>assistant\n")
)


def shapes() -> dict[str, PreTrainedTokenizerFast]:
    """Return a tokenizer for each shape."""
    of_deepseek = ("User", "Assistant", "tool_output_begin", "tool_output_end", "tool_sep")
    of_deepseek += ("tool_calls_begin", "tool_call_begin", "tool_call_end", "tool_calls_end")
    of_kimi = ("im_system", "im_user", "im_assistant", "im_middle", "im_end")
    of_kimi += ("tool_calls_section_begin", "tool_call_begin", "tool_call_argument_begin")
    of_kimi += ("tool_call_end", "tool_calls_section_end")
    return {
        "deepseek": byte_tokenizer(
            DEEPSEEK, eos="<|end_of_sentence|>", special=[f"<|{each}|>" for each in of_deepseek]
        ),
        "kimi": byte_tokenizer(KIMI, eos="[EOS]", special=[f"<|{each}|>" for each in of_kimi]),
        "olmo": byte_tokenizer(OLMO, eos="<|im_end|>", special=["<|im_start|>"]),
        "minimax": byte_tokenizer(MINIMAX, eos="[e~[", special=["]~b]"]),
    }
