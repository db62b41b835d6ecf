"""Long conversations: what is seen is what a layout of all messages shows, and few of them have widgets."""

import random
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from chatd.protocol import Siblings
from chatd.testing.scripted_daemon import ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.views import ItemView
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.message_window import FAR_PAGES
from chatd_tui.widgets.transcript import Transcript
from chatd_tui.widgets.transcript_window import covering, estimated_height, message_at
from chatd_tui.widgets.user_message import UserMessage

SIZE = (90, 30)
MakeApp = Callable[..., ChatApp]


def views(count: int, seed: int = 1) -> list[ItemView]:
    """Messages of many heights; the number of a message is its first line."""
    rng = random.Random(seed)
    made = []
    for n in range(count):
        words = " ".join(rng.choice(("cache", "**block**", "of", "日本")) for _ in range(rng.choice((1, 9, 60, 300))))
        lines = "\n".join(f"- item {i}" for i in range(rng.choice((0, 0, 0, 40))))
        role = "assistant" if n % 2 else "user"
        siblings = Siblings(index=1, count=2, previous=None, next="x") if n % 7 == 0 else None
        note = "90 tokens" if n % 2 and n % 3 else ""
        made.append(ItemView(f"m{n}", role, f"number {n}.\n\n{words}\n\n{lines}", note=note, siblings=siblings))
    return made


def whole(transcript: Transcript) -> list[tuple[str, int]]:
    """The message and its line for each line of a layout of all of them."""
    lines = []
    for view in transcript.views():
        message = AnswerMessage(view) if view.role == "assistant" else UserMessage(view)
        lines += [(view.id, line) for line in range(message.height_at(transcript._width) + 1)]
    return lines


def seen(transcript: Transcript) -> list[tuple[str, int]]:
    """The message and its line for each line on the screen, as the compositor places them."""
    lines: dict[int, tuple[str, int]] = {}
    for message in transcript.messages:
        region = message.virtual_region
        for line in range(region.height + 1):
            lines[region.y + line] = (message.item_id, line)
    top = round(transcript.scroll_y)
    return [lines[y] for y in range(top, top + transcript.size.height) if y in lines]


async def opened(app: ChatApp, pilot: Pilot[None], items: list[ItemView], wait_until) -> Transcript:
    await wait_until(lambda: app.chat.is_attached and bool(app.chat.transcript.size))
    await app.chat.transcript.show(items)
    await settled(app.chat.transcript, pilot)
    return app.chat.transcript


async def settled(transcript: Transcript, pilot: Pilot[None]) -> None:
    for _ in range(3):
        await pilot.pause()
    assert not transcript._slides
    assert [child for child in transcript.children if isinstance(child, UserMessage | AnswerMessage)] == list(
        transcript.messages
    )


def assert_true_to_the_whole(transcript: Transcript, every: list[tuple[str, int]] | None = None) -> None:
    every, part = every or whole(transcript), seen(transcript)
    assert len(part) >= min(transcript.size.height, len(every))
    at = every.index(part[0])
    assert every[at : at + len(part)] == part


async def test_heights_are_known_before_a_message_is_drawn(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        transcript = await opened(app, pilot, views(40), wait_until)
        await pilot.press("ctrl+home")
        await settled(transcript, pilot)
        for message in transcript.messages:
            assert message.virtual_region.height == message.height_at(transcript._width)


async def test_a_conversation_is_opened_at_its_end_and_scrolled_to_its_beginning_and_back(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        items = views(60)
        transcript = await opened(app, pilot, items, wait_until)
        every, most = whole(transcript), 0
        assert seen(transcript)[-1] == every[-1]
        for key, edge in (("pageup", every[0]), ("pagedown", every[-1])):
            while edge not in seen(transcript):
                before = every.index(seen(transcript)[0])
                await pilot.press(key)
                await settled(transcript, pilot)
                assert_true_to_the_whole(transcript, every)
                # A page up or down, but for the edge: nothing is passed over.
                moved = abs(every.index(seen(transcript)[0]) - before)
                assert moved == transcript.size.height or edge in seen(transcript)
                most = max(most, sum(message.virtual_region.height for message in transcript.messages))
        assert most < len(every) / 3
        assert transcript.views() == items


async def test_nothing_that_was_drawn_of_a_message_is_kept_once_it_is_gone(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        transcript = await opened(app, pilot, views(60), wait_until)
        gone = list(transcript.messages)
        await pilot.press("ctrl+home")
        await settled(transcript, pilot)
        assert not set(gone) & set(transcript.messages)
        assert not any(message._styles_cache._cache for message in gone)


async def test_jumps_show_what_is_there(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        transcript = await opened(app, pilot, views(100), wait_until)
        rng, every = random.Random(5), whole(transcript)
        for _ in range(12):
            transcript.scroll_to(y=rng.randrange(transcript.max_scroll_y), animate=False)
            await settled(transcript, pilot)
            assert_true_to_the_whole(transcript, every)
        await pilot.press("ctrl+home")
        await settled(transcript, pilot)
        assert seen(transcript)[0] == ("m0", 0)
        transcript.action_to_end(1)
        await settled(transcript, pilot)
        assert seen(transcript)[-1] == every[-1]


async def test_another_width_keeps_what_is_seen_first(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        transcript = await opened(app, pilot, views(60), wait_until)
        for _ in range(10):
            await pilot.press("pageup")
        await settled(transcript, pilot)
        before = seen(transcript)[0][0]
        for size in ((60, 20), (130, 45), SIZE):
            await pilot.resize_terminal(*size)
            await settled(transcript, pilot)
            assert_true_to_the_whole(transcript)
            assert seen(transcript)[0][0] == before


async def test_an_answer_grows_out_of_sight_and_is_whole_where_one_comes_back(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        items = [*views(100), ItemView("answer", "assistant", "begun ", done=False)]
        transcript = await opened(app, pilot, items, wait_until)
        await pilot.press("ctrl+home")
        await settled(transcript, pilot)
        assert transcript._find("answer") is None
        for n in range(50):
            transcript.extend("answer", f"word {n} ")
        text = "begun " + "".join(f"word {n} " for n in range(50))
        assert transcript.answer_in_progress() == ItemView("answer", "assistant", text, done=False)
        assert seen(transcript)[0] == ("m0", 0)
        transcript.finish(ItemView("answer", "assistant", f"{text}end", note="51 tokens"))
        assert transcript.answer_in_progress() is None
        transcript.action_to_end(1)
        await settled(transcript, pilot)
        assert transcript.views()[-1] == ItemView("answer", "assistant", f"{text}end", note="51 tokens")
        assert_true_to_the_whole(transcript)


async def test_what_is_said_is_seen_and_what_others_say_is_not_in_the_way(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        transcript = await opened(app, pilot, views(100), wait_until)
        await pilot.press("ctrl+home")
        await settled(transcript, pilot)
        await transcript.branch("m99", [ItemView("a", "assistant", "from elsewhere", done=False)])
        await settled(transcript, pilot)
        assert seen(transcript)[0] == ("m0", 0)
        assert transcript.views()[-1].id == "a"
        transcript.finish(ItemView("a", "assistant", "from elsewhere"))
        await transcript.branch("a", [ItemView("q", "user", "what I say")])
        await settled(transcript, pilot)
        assert seen(transcript)[-2] == ("q", 0)
        assert_true_to_the_whole(transcript)


async def test_the_answer_to_a_message_of_many_screens_is_seen(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        transcript = await opened(app, pilot, [], wait_until)
        text = "\n".join(f"line {n}" for n in range(FAR_PAGES * SIZE[1] * 2))
        await transcript.branch(None, [ItemView("q", "user", text)])
        await transcript.branch("q", [ItemView("a", "assistant", "short", done=False)])
        await settled(transcript, pilot)
        assert seen(transcript)[-2] == ("a", 0)
        assert_true_to_the_whole(transcript)


@pytest.mark.parametrize("kept", [1, 30, 99])
async def test_another_branch_is_drawn_wherever_it_begins(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until, kept: int
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        items = views(100)
        for start in ("ctrl+home", "pageup"):
            transcript = await opened(app, pilot, items, wait_until)
            await pilot.press(start)
            await settled(transcript, pilot)
            others = [ItemView(f"b{n}", "assistant", f"branch {n}") for n in range(60)]
            await transcript.branch(f"m{kept - 1}", others)
            await settled(transcript, pilot)
            assert transcript.views() == [*items[:kept], *others]
            assert_true_to_the_whole(transcript)


async def test_the_selected_message_can_be_any(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        transcript = await opened(app, pilot, views(90), wait_until)
        await pilot.press("tab")
        await wait_until(lambda: transcript.has_focus)
        for place in range(88, 70, -1):
            await pilot.press("up")
            await wait_until(
                lambda place=place: transcript.selected is not None and transcript.selected.id == f"m{place}"
            )
        transcript.action_to_end(1)
        await settled(transcript, pilot)
        assert transcript._find("m71") is None
        await pilot.press("up")
        await settled(transcript, pilot)
        assert transcript.selected == transcript.views()[70]
        assert ("m70", 0) in seen(transcript)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.data())
def test_the_chosen_messages_cover_what_is_asked_and_little_more(heights: list[int], data: st.DataObject) -> None:
    begins = list(accumulate(heights, initial=0))
    at = data.draw(st.integers(0, len(heights)))
    top = data.draw(st.integers(-50, begins[at]))
    bottom = data.draw(st.integers(begins[at], begins[-1] + 50))
    asked: list[int] = []

    def height(place: int) -> int:
        asked.append(place)
        return heights[place]

    first, end, y = covering(len(heights), at, begins[at], top, bottom, height)
    assert y == begins[first]
    assert sorted(asked) == list(range(first, end))
    assert first == 0 or begins[first] <= top
    assert end == len(heights) or begins[end] >= bottom
    assert all(begins[place + 1] > top for place in range(first, at))
    assert all(begins[place] < bottom for place in range(at, end))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 5000), st.integers(0, 5000))
def test_the_message_at_a_line_of_a_gap_begins_at_or_before_it(heights: list[int], lines: int, y: int) -> None:
    place, begin = message_at(heights, lines, min(y, lines))
    assert 0 <= place < len(heights)
    assert 0 <= begin <= max(y, 0)
    assert message_at(heights, lines, 0)[1] == 0


def test_estimates_are_near() -> None:
    for view in views(60):
        message = AnswerMessage(view) if view.role == "assistant" else UserMessage(view)
        height = message.height_at(80) + 1
        assert height / 3 <= estimated_height(view.text, 80) <= 3 * height
    assert FAR_PAGES > 1


async def test_a_correction_of_the_place_does_not_leave_the_end(daemon: ScriptedDaemon, make_app, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        transcript = await opened(app, pilot, views(60), wait_until)
        assert transcript.scroll_y == transcript.max_scroll_y > 0
        transcript._shift_to(transcript.scroll_y - 3)
        transcript.refresh(layout=True)
        await settled(transcript, pilot)
        assert transcript.scroll_y == transcript.max_scroll_y


async def test_a_short_conversation_that_opens_at_a_message_after_a_shorter_one_is_seen_whole(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    short = [ItemView(f"m{n}", "assistant" if n % 2 else "user", f"number {n}") for n in range(6)]
    async with app.run_test(size=SIZE) as pilot:
        transcript = await opened(app, pilot, short[:2], wait_until)
        await transcript.show(short)
        assert transcript.reveal("m1")
        await settled(transcript, pilot)
        regions = [message.region for message in transcript.messages]
        assert transcript.region.y <= regions[0].y
        assert regions[-1].bottom <= transcript.region.bottom


async def test_another_version_that_is_longer_than_the_screen_is_read_from_its_beginning(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    question = ItemView("q", "user", "a question")
    async with app.run_test(size=SIZE) as pilot:
        transcript = await opened(app, pilot, [question, ItemView("short", "assistant", "short")], wait_until)
        for name, text in (("long", "a line\n\n" * 60), ("short", "short"), ("long", "a line\n\n" * 60)):
            await transcript.branch("q", [ItemView(name, "assistant", text)])
            await settled(transcript, pilot)
            answer, place = transcript.messages[-1].region, transcript.region
            assert place.y <= answer.y < place.bottom
            assert answer.bottom <= place.bottom or name == "long"
            # All of it can be come to.
            transcript.action_to_end(1)
            await settled(transcript, pilot)
            assert transcript.messages[-1].region.bottom <= place.bottom
            transcript.action_to_end(-1)
            await settled(transcript, pilot)


async def test_the_mouse_selects_the_characters_that_it_passes_over(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        view = ItemView("a", "assistant", "some **bold** 日本 words\n\nand a second line", note="9 tokens")
        transcript = await opened(app, pilot, [view], wait_until)
        answer = transcript.messages[0]
        await pilot.mouse_down(answer, offset=(2 + len("some "), 0))
        await pilot.hover(answer, offset=(2 + len("and a"), 2))
        await pilot.mouse_up(answer, offset=(2 + len("and a"), 2))
        assert app.screen.get_selected_text() == "bold 日本 words\n\nand a "
