"""What templates may use, what the sandbox forbids, and how their refusals read."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from outrider.errors import RequestError
from outrider.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": "<b>é</b>"}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b>é</b>"}'),
        ('{{ {"b": 1, "a": 2} | tojson(indent=1, sort_keys=true) }}', '{\n "a": 2,\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        ("{{ strftime_now('%Y') }}", datetime.now().strftime("%Y")),
        ("{{ tools is none }} {{ value }}", "True 5"),
    ],
)
def test_what_templates_are_written_for_works(text: str, expected: str) -> None:
    assert ChatTemplate(text).render(USER, tools=None, value=5) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate$"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ messages[0].absent.deeper }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_a_refusal_is_one_line_of_the_request(text: str, named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        ChatTemplate(text).render(USER)
    assert caught.value.param == "messages" and "\n" not in str(caught.value)


def test_a_template_that_does_not_parse_is_named() -> None:
    with pytest.raises(RequestError, match="does not parse"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}], ["x"], None])
def test_messages_of_another_form_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="^messages"):
        ChatTemplate("x").render(messages)


def test_a_template_cannot_change_the_messages_of_the_caller() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError):
        ChatTemplate("{{ messages[0].update({'role': 'y'}) }}").render(messages)
    assert messages == [{"role": "user", "content": "x"}]
