# SPDX-License-Identifier: Apache-2.0
"""Chat templates against Transformers' rendering, and faults in them as one request's
ValueError."""

from __future__ import annotations

import pytest

from vllm.tokenizers.chat_template import render_chat_template

MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Grüße, 世界"},
    {"role": "assistant", "content": "Hallo ", "tool_calls": None},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "ä <x>", "parameters": {"type": "object"}},
    }
]

TEMPLATES = {
    "chatml": "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "trimmed": "{% for m in messages %}\n  {{ m.content | trim }}\n{% endfor %}end",
    "loopcontrols": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "tojson": "{% if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}"
    "{{ messages | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "whitespace": "  {% for m in messages %}\n    {% if true %}\n  {{ m.content }}\n    "
    "{% endif %}\n"
    "{% endfor %}\n\n",
    "tokens": "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ custom | default('none') }}",
    "none_keys": "{% for m in messages %}{{ 'tool_calls' in m }}{% endfor %}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generate", [False, True])
def test_renders_as_transformers(name, generate):
    """Guards against any difference in white space control, filters, globals or plain data."""
    from transformers.tokenization_utils_base import _normalize_chat_messages
    from transformers.utils.chat_template_utils import render_jinja_template

    extra = {"bos_token": "<s>", "custom": "c"}
    ours = render_chat_template(
        MESSAGES, TEMPLATES[name], tools=TOOLS, add_generation_prompt=generate, **extra
    )
    theirs, _ = render_jinja_template(
        [_normalize_chat_messages(MESSAGES)],
        tools=TOOLS,
        chat_template=TEMPLATES[name],
        add_generation_prompt=generate,
        **extra,
    )
    assert ours == theirs[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chatml", "trimmed"])
@pytest.mark.parametrize("content", ["Hallo ", "Hallo", [{"type": "text", "text": "Hi"}]])
def test_continue_final_message_as_transformers(name, content):
    """The last message stays open whether or not the template trims it."""
    if not isinstance(content, str):
        template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        template += "{{ m.content[0].text }}{% endif %}<end>{% endfor %}"
    else:
        template = TEMPLATES[name]
    messages = [*MESSAGES[:2], {"role": "assistant", "content": content}]
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        [messages], chat_template=template, continue_final_message=True
    )
    assert render_chat_template(messages, template, continue_final_message=True) == theirs[0]


@pytest.mark.parametrize(
    ("template", "messages", "options", "says"),
    [
        ("{% for %}", MESSAGES, {}, "not valid"),
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, {}, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", MESSAGES, {}, "failed on this conversation"),
        ("{{ messages[7].content }}", MESSAGES, {}, "refused this conversation"),
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            MESSAGES,
            {},
            "refused this conversation",
        ),
        ("{{ messages.append(1) }}", MESSAGES, {}, "refused this conversation"),
        ("{{ messages }}", [], {}, "empty"),
        ("{{ messages }}", ["text"], {}, "must be an object"),
        (
            "x",
            MESSAGES,
            {"add_generation_prompt": True, "continue_final_message": True},
            "exclude each other",
        ),
        ("x", MESSAGES, {"continue_final_message": True}, "does not keep the final message"),
        ("x", [{"role": "user"}], {"continue_final_message": True}, "no text to continue"),
    ],
)
def test_faults_are_value_errors(template, messages, options, says):
    """Bad input or a bad template must fail one request with its reason, not the server."""
    with pytest.raises(ValueError, match=says):
        render_chat_template(messages, template, **options)


def test_caller_s_messages_stay_as_they_were():
    """A template render must not write the continuation mark into the request."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    render_chat_template(messages, "{{ messages[0].content[0].text }}", continue_final_message=True)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_objects_with_methods_do_not_reach_a_template():
    """A template is foreign code: it must see plain data only."""

    class Image:
        def save(self) -> str:
            return "written"

    messages = [{"role": "user", "content": Image()}]
    assert render_chat_template(messages, "{{ messages[0].content }}") == "<Image>"
