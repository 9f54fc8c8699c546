"""Chat templates: the texts that transformers makes, and an end to those that compute, build or ask for too much (E22)."""

import json

import pytest

pytest.importorskip("jinja2")
from ttlaunch.untrusted.child import UntrustedError, read_limited

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Qui êtes-vous ?\n<b>"},
    {"role": "assistant", "content": "A model."},
    {"role": "user", "content": "  And now?  "},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "header": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    ),
    "blocks": (
        "{%- if tools is defined and tools is not none %}tools{% endif %}\n"
        "  {% for m in messages %}\n    {% if m.role == 'assistant' %}\n"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n    {% continue %}\n    {% endif %}\n"
        "[{{ m.content | tojson }}]\n  {% endfor %}\n"
    ),
    "macro": "{% macro say(m) %}{{ m.role|upper }}={{ m.get('content', '')|length }};{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
}


def render(template, **variables):
    values = {"messages": CHAT, "add_generation_prompt": True, "tools": None, "documents": None, **TOKENS}
    return read_limited("chat", {"template": template, "variables": values | variables}).decode()


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_becomes_the_text_that_transformers_makes(name):
    import transformers  # noqa: PLC0415 - it takes seconds to import
    from tokenizers import Tokenizer, models  # noqa: PLC0415 - an extra

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    theirs.chat_template = TEMPLATES[name]
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert expected == render(TEMPLATES[name])


def test_a_template_of_blocks_is_written_out():
    assert '[{"a": "ê"}]' == render("[{{ {'a': 'ê'}|tojson }}]")
    assert "Z" == render("{% generation %}Z{% endgeneration %}")
    assert json.dumps("<b>") == render("{{ '<b>'|tojson }}")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(3000) %}{% for b in range(3000) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}", "2 s of processor time"),
        ("{% set n = namespace(a='a' * 1000) %}{% for i in range(28) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a|length }}", "512 MiB of memory"),
        ("{{ 'a' * 2000000 }}", "what it becomes has more than 1 MiB"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "512 MiB of memory"),
        ("{% if %}", "line 1: Expected an expression"),
        ("{{ x.y.z }}", "'x' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ messages.append(1) }}", "is not safely callable|is unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('no system role') }}", "it says: no system role"),
        ("{{ '\\ud800' }}", "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_a_template_that_is_wrong_or_takes_too_much_ends_in_one_clause(template, said):
    with pytest.raises(UntrustedError, match=said):
        render(template)
