"""The page on which an engine says what it is doing."""

import os

from chatd.engine.pulse import NO_SUSPECT, NOT_KNOWN, Pulse, Reading, create_page


def test_what_one_side_says_the_other_sees():
    page = create_page()
    engine, front = Pulse(page), Pulse(page)
    os.close(page)
    assert front.read().num_turns == 0
    engine.begin_turn()
    engine.expect(0.25, 7)
    assert front.read() == Reading(1, 0.25, 7)
    # What is expected is of this turn only.
    engine.begin_turn()
    assert front.read() == Reading(2, 0.0, NOT_KNOWN)
    engine.expect(0.5, NO_SUSPECT)
    engine.close()
    assert front.read() == Reading(2, 0.5, NO_SUSPECT)
    front.close()
