"""Chat templates of the shapes in which models write calls of tools, and tokenizers with them."""

from transformers import AddedToken, PreTrainedTokenizerFast

from tests.actor.formats.test_renderer import make_chatml

TOOLS = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
CALL = (
    '\n<tool_call>\n{"name": {{ c.function.name | tojson }}, "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>"
)
# Qwen3-Coder's
TAGS = (
    "\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
# GLM's
PAIRS = (
    "\n<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}\n"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>"
    "{% endfor %}\n</tool_call>"
)
AS_TEXT = CALL.replace("arguments | tojson", "arguments | tojson | tojson")
BODY = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Llama 3's: bare JSON, one call in a turn, a tool's answer as JSON
LLAMA = """
{%- for m in messages %}
    {%- if loop.first and tools %}
        {{- '<|head|>user<|/head|>\\n\\nAnswer with JSON for a function call.\\n\\n' }}
        {%- for t in tools %}{{- (t | tojson) + '\\n\\n' }}{%- endfor %}
        {{- m.content | trim + '<|eot|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception('only single tool-calls at once') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|head|>ipython<|/head|>\\n\\n' + (m.content | tojson) + '<|eot|>' }}
    {%- else %}
        {{- '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}
"""
# Mistral's: tools before the last user, ids of calls, no text beside calls
MISTRAL = """
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and m == asked[-1] %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for c in m.tool_calls %}
            {%- if c.id | length != 9 %}{{- raise_exception('no id') }}{%- endif %}
            {{- '{"name": "' + c.function.name + '", "arguments": ' }}
            {{- (c.function.arguments | tojson) + ', "id": "' + c.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{- raise_exception('no id') }}{%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content }}
        {{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- m.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""
FIRST, LAST = "{{- '[TOOL_CALLS] [' }}", "{{- ']</s>' }}"
NAMED = MISTRAL.replace(FIRST, "{{- m.content }}").replace(LAST, "{{- '</s>' }}")
NAMED = NAMED.replace("""'{"name": "' + c.function.name + '", "arguments": '""", "OPENS")
NAMED = NAMED.replace("OPENS", "'[TOOL_CALLS]' + c.function.name + '[ARGS]'")
NAMED = NAMED.replace("""+ ', "id": "' + c.id + '"}' }}""", "}}")
NAMED = NAMED.replace("{%- if not loop.last %}{{- ', ' }}{%- endif %}", "")
OF_LLAMA = ("<|head|>", "<|/head|>", "<|eot|>")
OF_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
OF_MISTRAL += ("[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")


def chatml(call: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes calls so; the marks of Qwen's are tokens, but not special."""
    tokenizer = make_chatml(TOOLS + BODY.replace("CALL", call))
    marks = [AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")]
    tokenizer.add_tokens(marks)
    return tokenizer


CALLERS = {
    "qwen": chatml(CALL),
    "qwen_coder": chatml(TAGS),
    "glm": chatml(PAIRS),
    "as_text": chatml(AS_TEXT),
    "llama": make_chatml(LLAMA, eos="<|eot|>", more=OF_LLAMA),
    "mistral": make_chatml(MISTRAL, eos="</s>", more=OF_MISTRAL),
    "mistral_named": make_chatml(NAMED, eos="</s>", more=OF_MISTRAL),
}
