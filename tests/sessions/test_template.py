import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from chatd.errors import InvalidRequest, ModelError
from chatd.protocol import Message, Role
from chatd.sessions.template import ChatTemplate
from chatd.sessions.template_sandbox import Case, TemplateRefused, render_all
from chatd.sessions.template_shape import DateSlot
from chatd.sessions.tokenizer import ChatTokenizer, load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
DAY = date(2024, 7, 26)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def say(role: Role, content: str) -> Message:
    return Message(role=role, content=content)


@pytest.fixture(scope="module")
def chatml(model_folder: Callable[[str], Path]) -> ChatTokenizer:
    return load_tokenizer(model_folder("chatml_default"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("chatml_default", "append-only, system prompt first, default system prompt"),
        ("chatml_thoughts", "drops earlier thoughts, system prompt first"),
        ("llama3", "append-only, system prompt first, trims system and user and assistant"),
        ("llama3_dated", "append-only, system prompt first, writes the date, trims system and user and assistant"),
        (
            "llama2",
            "generation prompt differs from history, system prompt first, trims user and assistant, strict turns",
        ),
        (
            "mistral_v3",
            "generation prompt differs from history, floating system prompt, kept first, trims assistant, strict turns",
        ),
        ("mistral_nemo", "floating system prompt, kept first, strict turns"),
        (
            "gemma2",
            "append-only, no system prompt, put before the first message, trims user and assistant, strict turns",
        ),
        ("gemma3", "append-only, system prompt first, trims user and assistant, strict turns"),
        ("phi3", "append-only, system prompt first"),
        (
            "deepseek_r1",
            "drops earlier thoughts, generation prompt differs from history, system prompt first",
        ),
        (
            "plain_roles",
            "generation prompt differs from history, system prompt first, default system prompt, "
            "trims user and assistant",
        ),
    ],
)
def test_a_template_is_classed_by_what_it_does(
    chat_template: Callable[[str], ChatTemplate], name: str, kind: str
) -> None:
    assert str(chat_template(name).kind) == kind


def test_every_template_of_the_test_data_is_classed_and_described() -> None:
    names = {path.stem for path in TEMPLATES.glob("*.jinja")}
    readme = (TEMPLATES / "README.md").read_text()
    assert names == {
        line.split("|")[1].strip().removesuffix(".jinja") for line in readme.splitlines() if ".jinja" in line
    }


def test_a_template_that_counts_turns_rewrites_its_history(chatml: ChatTokenizer) -> None:
    counting = "{{ messages | length }} messages:\n" + CHATML + "{{ '<|im_start|>assistant\n' }}"
    kind = ChatTemplate(counting, chatml).kind
    assert not kind.append_only
    assert str(kind).endswith("rewrites its history, which is kept as it was computed")


def test_a_date_is_found_with_its_format(chat_template: Callable[[str], ChatTemplate]) -> None:
    opening = chat_template("llama3_dated").shape.opening["user"]
    assert [piece for piece in opening if isinstance(piece, DateSlot)] == [DateSlot("%d %b %Y")]


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_rendering_is_that_of_transformers_environment(
    model_folder: Callable[[str], Path], chat_template: Callable[[str], ChatTemplate], name: str
) -> None:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    template = chat_template(name)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    config = json.loads((model_folder(name) / "tokenizer_config.json").read_text())
    messages = [say("user", " Hi <b>&amp; </b>\n"), say("assistant", "Hello.  "), say("user", "")]
    expected = environment.from_string(template.source).render(
        messages=[{"role": message.role, "content": message.content} for message in messages],
        add_generation_prompt=True,
        date_string="26 Jul 2024",
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
    )
    assert template.render(messages, add_generation_prompt=True, date=DAY) == expected


def test_what_the_template_refuses_is_the_requests_fault(chat_template: Callable[[str], ChatTemplate]) -> None:
    template = chat_template("gemma2")
    with pytest.raises(InvalidRequest, match="System role not supported"):
        template.render([say("system", "Be brief."), say("user", "Hi")], add_generation_prompt=True, date=DAY)


def test_tojson_and_the_generation_tag_and_loop_controls_work_as_in_transformers() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ {'é<': [1, none, m.content]} | tojson }}{% endgeneration %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    assert render_all(source, {}, [Case(messages, False)])[0].text == '{"é<": [1, null, "x"]}'


# What a hostile or broken template may try. Each is refused when the model is loaded.

HOSTILE = {
    "class": "{{ ''.__class__ }}",
    "class in a branch that no probe takes": "{% if messages | length > 99 %}{{ ''.__class__ }}{% endif %}" + CHATML,
    "class by subscript": "{{ messages[0]['__class__'] }}" + CHATML,
    "class by filter": "{{ messages | map(attribute='__class__') | list }}" + CHATML,
    "class by a name that is put together": "{{ messages | attr('__cl' ~ 'ass__') }}" + CHATML,
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f['__glo' ~ 'bals__'] }}" + CHATML,
    "format string": "{{ '{0.__class__}'.format(messages) }}" + CHATML,
    "internals of an undefined name": "{{ cycler._undefined_hint }}" + CHATML,
    "another file": "{% include '/etc/hostname' %}" + CHATML,
    "another template": "{% import 'os' as os %}" + CHATML,
    "mutation": "{{ messages.clear() }}" + CHATML,
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_template_that_reaches_for_internals_is_refused(chatml: ChatTokenizer, source: str) -> None:
    with pytest.raises(ModelError, match="refused: it reaches for what a template must not"):
        ChatTemplate(source, chatml)


@pytest.mark.parametrize(
    "source",
    [
        "{% set s = namespace(s='x') %}{% for i in range(60) %}{% set s.s = s.s ~ s.s %}{% endfor %}{{ s.s }}",
        "{{ 'x' * 10**10 }}",
        "{{ 'x'.ljust(10**9) }}{{ 'y'.ljust(10**9) }}",
    ],
    ids=["doubling", "repetition", "padding"],
)
def test_a_template_that_takes_too_much_memory_is_refused(chatml: ChatTokenizer, source: str) -> None:
    with pytest.raises(ModelError, match=r"refused: it (needs too much memory|exceeded|renders to more)"):
        ChatTemplate(source, chatml)


def test_a_template_that_never_ends_is_ended() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateRefused, match=r"longer than 0\.5 s"):
        render_all(source, {}, [Case([], False)], wall_seconds=0.5)


def test_a_template_that_writes_without_end_is_refused(chatml: ChatTokenizer) -> None:
    source = "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}"
    with pytest.raises(ModelError, match="more than 8388608 characters"):
        ChatTemplate(source, chatml)


def test_a_template_sees_no_environment_and_reads_no_clock() -> None:
    source = "{{ strftime_now('%Y') }}"
    assert render_all(source, {}, [Case([], False)])[0].text == "\ue0100\ue011"
    assert render_all(source, {}, [Case([], False)], date="1999-12-31T00:00:00")[0].text == "1999"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for m in messages %}", "does not compile, line 1"),
        ("{{ messages[0].nonsense.more }}", "does not render a plain conversation.*UndefinedError"),
        ("no messages at all", "does not render a plain conversation.*missing"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "missing, moved or changed"),
        (CHATML.replace("m.content", "m.content | upper"), "missing, moved or changed"),
        (CHATML.replace("m.content", "m.content | tojson"), "missing, moved or changed"),
        (CHATML.replace("m.content", "m.content | replace('\t', '+')"), "strips user messages in a way"),
        (CHATML.replace("m.content", "m.content | replace('\n', '+')"), "changes the text of messages"),
        (CHATML.replace("m.content", "m.content | replace('[', '(')"), "changes the text of messages"),
        ("{{ strftime_now('%Y' * 99) }}" + CHATML, "writes the date as .* more than 100 characters"),
        ("{{ strftime_now('%Y')[:1] }}" + CHATML, "takes the date or a message apart"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(chatml: ChatTokenizer, source: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        ChatTemplate(source, chatml)


# Where a template is found.


def test_the_file_goes_before_the_entry_in_the_config(chatml: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "not used"}))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert ChatTemplate.load(tmp_path, chatml).source == CHATML


@pytest.mark.parametrize(
    "entry", [CHATML, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]]
)
def test_the_entry_in_the_config_may_be_a_text_or_a_list_of_named_ones(
    chatml: ChatTokenizer, tmp_path: Path, entry: object
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    assert ChatTemplate.load(tmp_path, chatml).source == CHATML


@pytest.mark.parametrize(
    "config", [None, {}, {"chat_template": 3}, {"chat_template": [{"name": "rag", "template": "x"}]}]
)
def test_a_model_without_a_template_is_refused_by_name(chatml: ChatTokenizer, tmp_path: Path, config: object) -> None:
    folder = tmp_path / "base-model"
    folder.mkdir()
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="base-model has no chat template"):
        ChatTemplate.load(folder, chatml)


def test_a_template_file_that_is_no_text_is_refused(chatml: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate.load(tmp_path, chatml)
