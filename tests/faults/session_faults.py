"""Faults of sessions, of their events and of the doors."""

from __future__ import annotations

from seeded_fault import fault

SESSION_SIMULATION = (
    "tests/sessions/test_session_simulation.py::test_every_client_shows_the_same_transcript_whatever_happens[40]"
)

SESSION_FAULTS = (
    fault(
        "half a character is sent",
        "a client shows U+FFFD where the answer has an emoji",
        "chatd/sessions/detokenizer.py",
        "            return self._decoder.decode(token_bytes[ids[0]])",
        "            return self._decoder.decode(token_bytes[ids[0]], final=True)",
        "tests/sessions/test_detokenizer.py::test_a_character_is_sent_once_its_last_byte_is_there",
    ),
    fault(
        "the beginning of a stop string is sent",
        "a client sees what it asked never to see",
        "chatd/sessions/stop_strings.py",
        "num_held = max((automaton.state for automaton in self._automatons), default=0)",
        "num_held = 0",
        "tests/sessions/test_stop_strings.py::test_no_part_of_a_stop_string_that_comes_to_be_matched_is_ever_sent",
    ),
    fault(
        "an event is missing after a reconnect",
        "a client's answer has a hole",
        "chatd/sessions/events.py",
        "start = len(self._events) - missed",
        "start = len(self._events) - missed + 1",
        "tests/sessions/test_events.py::test_what_was_missed_is_given_exactly",
    ),
    fault(
        "what the ring no longer has is not missed",
        "a client that was away long goes on with a hole and is not told",
        "chatd/sessions/events.py",
        "if missed < 0 or missed > len(self._events):",
        "if missed < 0:",
        "tests/sessions/test_events.py::test_what_the_ring_no_longer_has_is_not_guessed",
        says="AssertionError|assert|IndexError",
    ),
    fault(
        "events come before the answer to attach",
        "a client sees deltas of a session that it does not know yet, and again in the snapshot",
        "chatd/sessions/events.py",
        "        self._waiting: list[Event] | None = list(replay)",
        "        self._waiting: list[Event] | None = None",
        "tests/sessions/test_events.py::test_a_held_subscription_keeps_the_order",
    ),
    fault(
        "a command that comes twice is done twice",
        "a client that reconnects asks its question again",
        "chatd/server/idempotency.py",
        "            known = answers.by_id.get(command.id)\n",
        "            known = None\n",
        "tests/server/test_idempotency.py::test_the_first_answer_is_given_again_to_the_same_user_only",
    ),
    fault(
        "a foreign session can be named",
        "who guesses an id reads somebody else's conversation",
        "chatd/sessions/store.py",
        "session = self.owned(owner).by_name.get(session_id)",
        "session = self.find(session_id)",
        "tests/sessions/test_isolation.py::test_a_foreign_session_and_an_unknown_one_are_refused_in_the_same_words",
    ),
    fault(
        "a second turn begins beside the first",
        "two answers are written into one conversation",
        "chatd/sessions/turns.py",
        "    if session.turn is not None:\n        raise Conflict(",
        "    if session.turn is not None and session.closed:\n        raise Conflict(",
        "tests/sessions/test_manager.py::test_a_second_turn_is_refused_while_one_runs",
    ),
    fault(
        "a refused turn leaves the session busy",
        "a session that once was refused something never answers again",
        "chatd/sessions/turns.py",
        "            self._ends.uncount(owner, num_samples - 1)\n            self._ends.free(turn)\n",
        "            self._ends.uncount(owner, num_samples - 1)\n",
        "tests/sessions/test_manager.py::test_whatever_the_encoder_raises_the_session_is_free_again",
    ),
    fault(
        "a failed turn stays in the history",
        "the next prompt has a question that was never answered",
        "chatd/sessions/turn_ends.py",
        "            session.conversation.remove_from(turn.first_node, turn.previous_head)\n        finally:",
        "            pass\n        finally:",
        "tests/sessions/test_manager.py::test_a_turn_that_fails_leaves_the_session_as_it_was",
    ),
    fault(
        "the engine is told to keep a token past a stop string",
        "the next turn goes on from ids that the session does not have",
        "chatd/sessions/turn_progress.py",
        "self._requests.finish(turn, answer.num_tokens + len(text.ids))",
        "self._requests.finish(turn, answer.num_tokens + len(text.ids) + 1)",
        "tests/sessions/test_manager.py::test_a_stop_string_ends_the_answer_where_it_was_completed",
    ),
    fault(
        "a failed turn goes back to another head",
        "an edit that failed leaves the conversation on a branch that nobody chose",
        "chatd/sessions/turn_ends.py",
        "session.conversation.remove_from(turn.first_node, turn.previous_head)",
        "session.conversation.remove_from(turn.first_node, turn.first_node.parent)",
        SESSION_SIMULATION,
    ),
    fault(
        "a turn is told before it is durable",
        "a crash loses a message that its sender was told is kept",
        "chatd/sessions/turns.py",
        "                await self._keep(turn, parent, begun, also_kept)\n",
        "                self._recorder._spawn(self._keep(turn, parent, begun, also_kept))\n",
        "tests/sessions/test_durability.py::test_nothing_is_told_before_it_is_durable",
    ),
    fault(
        "an answer goes on as if it had no tokens",
        "after a crash an answer begins again behind what was shown of it",
        "chatd/sessions/engine_requests.py",
        "                num_answered=len(answered),\n",
        "                num_answered=0,\n",
        "tests/sessions/test_durability.py::test_an_answer_goes_on_after_the_daemon_was_killed",
    ),
    fault(
        "what a failed turn owes the journal is forgotten",
        "a turn that was said to have failed is back after a restart",
        "chatd/sessions/turn_ends.py",
        "                self._recorder.owe(self._rollback(turn))\n                self._failed(turn, failure)\n",
        "                self._failed(turn, failure)\n",
        "tests/sessions/test_durability.py::"
        "test_an_end_that_cannot_be_kept_fails_the_turn_alone_and_the_journal_agrees_later",
    ),
)
