"""Chat templates: the helpers that published templates use, and errors."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.loading import ChatTemplate

HELLO = [{"role": "user", "content": "hi"}]

CHATML = """{%- for message in messages %}
    {%- if loop.index0 == 1 and message.role == 'user' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **options)
    return rendered[0]


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m | tojson }}\n  {% endif %}{% endfor %}\n",
        "{{ messages | tojson(indent=2) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}.",
        "{{ messages[0]['content'].split('i')[0].upper() }}{{ messages[0].get('tool') }}{{ tools is none }}",
    ],
)
def test_rendering_equals_transformers(source: str) -> None:
    messages = [{"role": "user", "content": ' <b>"é & hi" '}, {"role": "user", "content": "skip"}]
    for prompt in (False, True):
        ours = ChatTemplate(source).render(messages, add_generation_prompt=prompt)
        assert ours == reference(source, messages, add_generation_prompt=prompt)


def test_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ tools[0].name }}{{ enable_thinking }}", {"bos_token": "<s>"})
    assert template.render(HELLO, tools=[{"name": "f"}], enable_thinking=False) == "<s>fFalse"


def test_the_date() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO)
    assert rendered == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", ["roles must alternate"]),
        ("{% for %}", ["Expected an expression", "plain prompt"]),
        ("{{ messages[0].content + 1 }}", ["str", "contents"]),
        ("{{ messages[5].content }}", ["no element 5"]),
        ("{{ nothing.at.all }}", ["nothing", "undefined"]),
        ("{{ ''.__class__.__mro__ }}", ["unsafe"]),
        ("{{ messages.append(1) }}", ["append", "unsafe"]),
        ("{% for i in range(10000000) %}{% endfor %}", ["ange"]),
    ],
)
def test_errors_belong_to_the_request(source: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render(HELLO)
    for word in ["chat template", *words]:
        assert word in str(caught.value)
