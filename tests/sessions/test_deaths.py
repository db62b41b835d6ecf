"""Which answers go on after an engine's death."""

from chatd.sessions.deaths import DeathCount


def test_an_answer_that_waited_goes_on_and_is_no_suspect():
    count = DeathCount()
    for _ in range(5):
        assert count.on_death(0, was_running=False)
        assert not count.is_suspect(0)


def test_an_answer_that_was_running_goes_on_alone_and_fails_at_the_second_death():
    count = DeathCount()
    assert not count.is_suspect(0)
    assert count.on_death(7, was_running=True)
    assert count.is_suspect(7)
    assert not count.on_death(8, was_running=True)


def test_a_suspect_that_waited_at_the_next_death_stays_one():
    count = DeathCount()
    assert count.on_death(7, was_running=True)
    assert count.on_death(7, was_running=False)
    assert count.is_suspect(7)
    assert not count.on_death(7, was_running=True)


def test_an_answer_that_got_on_between_two_deaths_is_counted_anew():
    count = DeathCount()
    assert count.on_death(7, was_running=True)
    assert not count.is_suspect(9)
    assert count.on_death(9, was_running=True)
    assert count.is_suspect(9)
    assert count.on_death(30, was_running=False)
    assert not count.is_suspect(30)
