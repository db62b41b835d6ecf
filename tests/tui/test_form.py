"""The form of a conversation's settings, against a scripted daemon; and what is typed into it, without a screen."""

from collections.abc import Callable

import pytest
from textual.pilot import Pilot
from textual.widgets import Checkbox, Input, Static, TextArea

from chatd import protocol as p
from chatd.protocol.ranges import RANGES
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.form_fields import FIELDS, Changes, FormView, changes, mistakes, text_of
from chatd_tui.screens.form import FieldRow, FormScreen, LeaveScreen
from chatd_tui.settings_form import SAVED

MakeApp = Callable[..., ChatApp]
SIZE = (100, 40)
PARAMS = p.Params(temperature=0.5, stop=("a b", "\x1b[2J"), logit_bias={"7": -1.0}, ignore_eos=True)


def connected(app: ChatApp) -> Callable[[], bool]:
    return lambda: app.is_running and app.chat.title_bar.view.phase == "connected"


async def type_line(pilot: Pilot[None], text: str) -> None:
    app = pilot.app
    assert isinstance(app, ChatApp)
    app.chat.set_focus(app.chat.composer)
    app.chat.composer.load_text(text)
    await pilot.press("enter")


async def talk(app: ChatApp, pilot: Pilot[None], wait_until) -> None:
    await wait_until(connected(app))
    await type_line(pilot, "hello")
    await wait_until(lambda: len(app.chat.transcript.views()) >= 2 and not app.conversation.busy)


async def opened(app: ChatApp, pilot: Pilot[None], wait_until) -> FormScreen:
    await pilot.press("f4")
    await wait_until(lambda: isinstance(app.screen, FormScreen) and app.screen.is_mounted)
    assert isinstance(app.screen, FormScreen)
    return app.screen


def note(form: FormScreen, name: str) -> str:
    row = next(row for row in form.query(FieldRow) if row.field.name == name)
    return str(row.query_one(".note", Static).render())


def put(form: FormScreen, name: str, text: str) -> None:
    form.query_one(f"#{name}", Input).value = text


def test_every_parameter_has_a_field() -> None:
    assert {field.name for field in FIELDS} == set(p.Params.__struct_fields__)
    assert {field.name for field in FIELDS if field.range_text} == set(RANGES)


def test_what_is_shown_is_read_back_as_it_was() -> None:
    view = FormView(system="Be\x1b brief.", params=PARAMS, context_policy="drop_oldest")
    texts = {field.name: text_of(PARAMS, field.name) for field in FIELDS}
    assert texts["stop"] == r'["a b", "\u001b[2J"]'
    assert not mistakes(texts)
    unchanged = changes(view, "Be␛ brief.", texts, drops_oldest=True, typeahead=False)
    assert unchanged == Changes()
    texts |= {"temperature": "", "top_k": "3", "stop": "END"}
    changed = changes(view, "", texts, drops_oldest=False, typeahead=True)
    assert changed == Changes(
        system="",
        params=(("temperature", ""), ("top_k", "3"), ("stop", "END")),
        context_policy="refuse",
        typeahead=True,
    )
    # What another client set meanwhile stays.
    assert changed.over(p.Params(temperature=1.0, seed=4)) == p.Params(seed=4, top_k=3, stop=("END",))


@pytest.mark.parametrize("name", RANGES)
def test_a_fields_range_is_the_protocols(name: str) -> None:
    low, high = RANGES[name]
    for value in (low, high):
        assert not mistakes({name: str(value)})
    for value in (low - 1, high + 1):
        assert mistakes({name: str(value)}) == {name: f"{name} is {value}, the range is {low} to {high}"}
    assert mistakes({name: "x"}).keys() == {name}


def test_what_is_wrong_is_said_of_each_field() -> None:
    texts = {"temperature": "hot", "top_k": "1.5", "max_tokens": "3", "min_tokens": "4", "stop": '["", 2]', "seed": "1"}
    assert {name: said.split(",")[0] for name, said in mistakes(texts).items()} == {
        "temperature": "temperature is 'hot'",
        "top_k": "top_k is '1.5'",
        "min_tokens": "min_tokens is 4",
        "stop": "stop[0]: expected `str` of length >= 1",
    }


async def test_what_is_saved_is_what_was_changed(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    daemon.model = p.ModelInfo(
        id="smollm2-135m", context=8192, block_size=16, blocks=256, params=p.Params(temperature=0.2, max_tokens=512)
    )
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await talk(app, pilot, wait_until)
        session = daemon.sessions[app.link.session]
        session.params = p.Params(top_k=7)
        await type_line(pilot, "/set seed=9")
        await wait_until(lambda: session.params.seed == 9)
        form = await opened(app, pilot, wait_until)
        assert form.query_one("#system", TextArea).has_focus
        assert note(form, "temperature") == "default 0.2 · 0 to 5"
        assert note(form, "max_tokens") == "default 512 · 1 and more"
        assert note(form, "seed") == "default drawn anew · 0 and more"
        assert form.query_one("#temperature", Input).placeholder == "0.2"
        await pilot.press(*"Hi", "tab", *"9")
        await wait_until(lambda: note(form, "temperature") == "✕ temperature is 9.0, the range is 0.0 to 5.0")
        await pilot.press("ctrl+s")
        assert app.screen is form
        assert form.query_one("#temperature", Input).has_focus
        await pilot.press("backspace", *"0.7", "enter")
        await wait_until(lambda: note(form, "temperature").startswith("default"))
        assert form.query_one("#top_p", Input).has_focus
        await pilot.press("up")
        assert form.query_one("#temperature", Input).has_focus
        form.query_one("#seed", Input).focus()
        await pilot.press("f5")
        assert form.query_one("#seed", Input).value == ""
        form.query_one("#policy", Checkbox).toggle()
        form.query_one("#typeahead", Checkbox).toggle()
        await pilot.press("ctrl+s")
        await wait_until(lambda: app.screen is app.chat and app.chat.status == SAVED)
        assert (session.system, session.context_policy) == ("Hi", "drop_oldest")
        assert session.params == p.Params(temperature=0.7)
        assert app.typing_ahead.is_on
        await wait_until(lambda: app.chat.transcript.views()[0].text == "Hi")
        update = next(c for c in reversed(daemon.commands) if isinstance(c, p.SessionUpdate))
        assert update.title is None


async def test_what_is_typed_right_before_it_is_saved_is_saved(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE):
        await wait_until(connected(app))
        app.simulate_key("f4")
        await wait_until(lambda: isinstance(app.screen, FormScreen) and app.screen.focused is not None)
        for key in ("H", "i", "ctrl+s"):
            app.simulate_key(key)
        await wait_until(lambda: app.screen is app.chat)
        assert app.link.draft.system == "Hi"


async def test_esc_asks_before_changes_are_lost(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await opened(app, pilot, wait_until)
        await pilot.press("escape")
        await wait_until(lambda: app.screen is app.chat)
        form = await opened(app, pilot, wait_until)
        await pilot.press("x", "escape")
        await wait_until(lambda: isinstance(app.screen, LeaveScreen))
        await pilot.press("escape")
        await wait_until(lambda: app.screen is form)
        assert form.changes == Changes(system="x")
        await pilot.press("escape")
        await wait_until(lambda: isinstance(app.screen, LeaveScreen))
        await pilot.press("s")
        await wait_until(lambda: app.screen is app.chat)
        # It is of the conversation that the first message begins.
        form = await opened(app, pilot, wait_until)
        assert form.query_one("#system", TextArea).text == "x"
        put(form, "top_k", "5")
        await pilot.pause()
        await pilot.press("escape")
        await wait_until(lambda: isinstance(app.screen, LeaveScreen))
        await pilot.press("d")
        await wait_until(lambda: app.screen is app.chat)
        assert (app.link.draft.system, app.link.draft.params) == ("x", p.Params())
        await type_line(pilot, "hello")
        await wait_until(lambda: [view.text for view in app.chat.transcript.views()][:2] == ["x", "hello"])


async def test_set_and_system_alone_open_the_form_where_they_belong(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        for typed, field in (("/system", "system"), ("/set", "temperature"), ("/settings", "system")):
            await type_line(pilot, typed)
            await wait_until(lambda: isinstance(app.screen, FormScreen) and app.screen.focused is not None)
            assert app.screen.focused.id == field
            await pilot.press("escape")
            await wait_until(lambda: app.screen is app.chat)


async def test_who_watches_reads_it_and_changes_nothing(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await talk(app, pilot, wait_until)
        daemon.sessions[app.link.session].system = "Be [brief]."
        daemon.sessions[app.link.session].params = p.Params(top_k=7)
        await type_line(pilot, "/watch")
        await wait_until(
            lambda: app.link.role == "observer" and app.link.info is not None and app.link.info.params.top_k == 7
        )
        form = await opened(app, pilot, wait_until)
        assert form.query_one("#system", TextArea).text == "Be [brief]."
        assert form.query_one("#top_k", Input).value == "7"
        assert all(field.disabled for field in form.query(Input))
        assert all(field.disabled for field in form.query(Checkbox))
        assert "you only watch" in str(form.query_one("#status", Static).render())
        form.query_one("#system", TextArea).focus()
        num_commands = len(daemon.commands)
        await pilot.press("x", "f5", "ctrl+s")
        assert (form.changes, app.screen) == (Changes(), form)
        await pilot.press("escape")
        await wait_until(lambda: app.screen is app.chat)
        assert not any(isinstance(command, p.SessionUpdate) for command in daemon.commands[num_commands:])


async def test_what_an_older_daemon_cannot_do_is_grey_and_says_why(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script()], caps=()) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            form = await opened(app, pilot, wait_until)
            for name in ("policy", "typeahead"):
                box = form.query_one(f"#{name}", Checkbox)
                assert box.disabled
                assert "this daemon is too old for that" in str(box.label)
            # It does not say what the model's parameters are.
            assert note(form, "temperature") == "default the model's · 0 to 5"


async def test_a_refusal_is_shown_and_the_form_stays(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await talk(app, pilot, wait_until)
        form = await opened(app, pilot, wait_until)
        await pilot.press("x")
        await daemon.drop()
        daemon.sessions.clear()
        await pilot.press("ctrl+s")
        await wait_until(lambda: "not saved" in str(form.query_one("#status", Static).render()))
        assert app.screen is form
        assert form.changes == Changes(system="x")


async def test_a_system_prompt_that_no_frame_can_have_is_refused_with_the_numbers(
    make_app: MakeApp, wait_until
) -> None:
    async with ScriptedDaemon([Script()], frame_bytes=4000) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            form = await opened(app, pilot, wait_until)
            form.query_one("#system", TextArea).load_text("é" * 2000)
            await pilot.press("ctrl+s")
            assert app.screen is form
            said = str(form.query_one("#status", Static).render())
            assert said == "the system prompt makes a frame of 5026 bytes, the limit is 4000"


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (200, 60)])
async def test_the_form_fits_any_terminal(daemon: ScriptedDaemon, make_app: MakeApp, wait_until, size) -> None:
    app = make_app(daemon)
    async with app.run_test(size=size) as pilot:
        await wait_until(connected(app))
        form = await opened(app, pilot, wait_until)
        last = form.query_one("#ignore_eos", Input)
        last.focus()
        await wait_until(lambda: form.region.contains_region(last.region) and last.region.area > 0)
        await pilot.press("?")
        said = "✕ ignore_eos: expected"
        await wait_until(lambda: note(form, "ignore_eos").startswith(said))
        assert str(form.query_one("#status", Static).render()).startswith(said)
        await pilot.resize_terminal(30, 8)
        await wait_until(lambda: form.region.contains_region(last.region) and last.region.area > 0)
        await pilot.press("tab", "shift+tab")
        assert last.has_focus


@pytest.mark.parametrize("width", [56, 60, 79])
async def test_a_narrow_form_shows_the_ranges_and_the_defaults_too(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until, width: int
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(width, 60)) as pilot:
        await wait_until(connected(app))
        form = await opened(app, pilot, wait_until)
        put(form, "top_p", "2")
        await wait_until(lambda: note(form, "top_p") == "✕")
        await pilot.pause()
        lines = [strip.text for strip in app.screen._compositor.render_strips()]
        for field in FIELDS:
            (line,) = [line for line in lines if line.strip().startswith(f"{field.label} ")]
            if field.name != "top_p":
                assert line.rstrip().endswith(field.range_text or field.default(None)), line
                assert field.default(None) in line
        form.query_one("#top_p", Input).focus()
        await wait_until(lambda: "top_p" in str(form.query_one("#status", Static).render()))
        # Wider, all of it has room again.
        await pilot.resize_terminal(100, 60)
        await wait_until(lambda: note(form, "seed") == "default drawn anew · 0 and more")


async def test_what_others_wrote_is_shown_without_controls_and_is_no_markup(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    hostile = "\x1b]0;owned\x07[bold red]\x9b2J\u202e[/nothing]"
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await talk(app, pilot, wait_until)
        session = daemon.sessions[app.link.session]
        session.system, session.title, session.params = hostile, hostile, p.Params(stop=(hostile,), seed=3)
        await type_line(pilot, "/pin")
        await wait_until(lambda: app.link.info is not None and app.link.info.system == hostile)
        form = await opened(app, pilot, wait_until)
        await pilot.pause()
        shown = "\n".join(strip.text for strip in app.screen._compositor.render_strips())
        assert "␛]0;owned␇[bold red]" in shown
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e" for c in shown.replace("\n", ""))
        # Shown otherwise than it is, and still not changed.
        assert form.changes == Changes()
        put(form, "seed", "4")
        await pilot.press("ctrl+s")
        await wait_until(lambda: app.screen is app.chat)
        assert (session.system, session.params.stop, session.params.seed) == (hostile, (hostile,), 4)
