"""Faults of what becomes of answers when an engine dies, and of seeing that it does nothing."""

from __future__ import annotations

from seeded_fault import SIMULATION, Edit, Fault, fault

REQUEST = "chatd/engine/request.py"
PLACEMENT = "chatd/engine/placement.py"
SUSPECTS = "chatd/engine/suspects.py"
CLIENT = "chatd/engine/client.py"
HANG_WATCH = "chatd/engine/hang_watch.py"
DEATHS = "chatd/sessions/deaths.py"
TEST_GO_ON = "tests/engine/test_answers_go_on.py::test_"
TEST_SUSPECTS = "tests/engine/test_suspects.py::test_"
TEST_CLIENT = "tests/engine/test_client.py::test_"
TEST_DEATHS = "tests/sessions/test_deaths.py::test_"

DEATH_FAULTS = (
    fault(
        "an answer that goes on is drawn as a new one",
        "after a crash a sampled answer is another one than it would have been",
        REQUEST,
        "self.num_prompt_tokens = self.num_submitted_tokens - num_answered",
        "self.num_prompt_tokens = self.num_submitted_tokens",
        TEST_GO_ON + "every_bit_of_an_answer_is_as_if_it_had_never_stopped",
        TEST_GO_ON + "an_answer_goes_on_to_the_same_end",
    ),
    fault(
        "a suspect is computed beside others",
        "a request that ends engines takes everybody's answers with it",
        PLACEMENT,
        "if (not request.is_suspect) if only is None else request.request_id in only:",
        "if only is None or request.request_id in only:",
        TEST_SUSPECTS + "a_suspect_has_every_second_step_until_it_has_drawn_two_tokens",
        SIMULATION,
    ),
    fault(
        "suspects have all steps until they are past their place",
        "nobody else is answered while a long history is computed again",
        PLACEMENT,
        "        self._was_alone = bool(self._drafts)\n        return self._was_alone\n",
        "        return bool(self._drafts)\n",
        TEST_SUSPECTS + "a_suspect_has_every_second_step_until_it_has_drawn_two_tokens",
    ),
    fault(
        "a suspect is past its place with its first token",
        "it is beside others in the very step that ended the engine before",
        SUSPECTS,
        "num_computed > request.num_submitted_tokens",
        "num_computed >= request.num_submitted_tokens",
        TEST_SUSPECTS + "a_suspect_has_every_second_step_until_it_has_drawn_two_tokens",
    ),
    fault(
        "an engine that spins counts as ready",
        "people are sent to a daemon that answers nobody for half a minute",
        CLIENT,
        "        self._state = EngineState.STALLED\n",
        "",
        TEST_CLIENT + "an_engine_that_is_busy_and_silent_stalls_and_goes_on",
    ),
    Fault(
        "a long step is a stuck one",
        "an honest prefill on a slow machine ends the engine, again and again",
        (
            Edit(HANG_WATCH, "max(limits.quiet_s, _QUIET_FACTOR * expected_s)", "limits.quiet_s"),
            Edit(HANG_WATCH, "max(limits.busy_s, _BUSY_FACTOR * expected_s)", "limits.busy_s"),
        ),
        (TEST_CLIENT + "a_step_that_was_said_to_be_long_is_no_hang_and_no_stall",),
    ),
    fault(
        "who waited counts as running when an engine dies",
        "answers that were never computed fail with the one that ends engines",
        DEATHS,
        "        if was_running:\n",
        "        if True:\n",
        TEST_DEATHS + "an_answer_that_waited_goes_on_and_is_no_suspect",
    ),
    fault(
        "deaths are counted for ever",
        "a long answer fails for what others did",
        DEATHS,
        "            self.num_deaths = 0\n        if",
        "            pass\n        if",
        TEST_DEATHS + "an_answer_that_got_on_between_two_deaths_is_counted_anew",
    ),
)
