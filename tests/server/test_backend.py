"""What settings mean to the sessions behind the doors."""

import pytest

from chatd.config import Settings
from chatd.server.backend import load_encoder, session_limits


def test_bounds_reach_the_sessions() -> None:
    limits = session_limits(Settings(sessions={"max_text_bytes_per_user": 2**21, "replay_events": 99}))
    assert (limits.max_text_bytes_per_user, limits.replay_events) == (2**21, 99)


@pytest.mark.model
@pytest.mark.parametrize(("thoughts", "dropped"), [("auto", False), ("keep", False), ("drop", True)])
def test_the_encoder_does_with_thoughts_what_settings_say(thoughts: str, dropped: bool) -> None:
    from chatd.models.registry import resolve

    settings = Settings(model={"thoughts": thoughts}, server={"max_body_bytes": 4096})
    _, encoder = load_encoder(resolve("smollm2-135m").path, settings)
    assert (encoder.drops_thoughts, encoder.max_bytes) == (dropped, 4096)
