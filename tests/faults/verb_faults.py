"""Faults of what people do with kept conversations: go on, erase, type ahead, cut, change; and of who is to blame."""

from __future__ import annotations

from seeded_fault import fault

PROGRESS = "chatd/sessions/turn_progress.py"
TURNS = "chatd/sessions/turns.py"
ERASING = "chatd/sessions/erasing.py"
OPERATOR = "chatd/sessions/operator_door.py"
AHEAD = "chatd/sessions/computed_ahead.py"
CONTEXT = "chatd/sessions/context_policy.py"
RECORDER = "chatd/sessions/recorder.py"
CRASHES = "chatd/sessions/crashes.py"
TEST_GOING_ON = "tests/sessions/test_going_on.py::test_"
TEST_ERASING = "tests/sessions/test_erasing.py::test_"
TEST_DRAFTS = "tests/sessions/test_drafts.py::test_"
TEST_CONTEXT = "tests/sessions/test_context_policy.py::test_"
TEST_RECORDER = "tests/sessions/test_recorder.py::test_"
TEST_BLAME = "tests/sessions/test_blame.py::test_"
TEST_CRASHES = "tests/sessions/test_crashes.py::test_"
TEST_OPERATING = "tests/server/test_operating.py::test_"
TEST_QUOTA = "tests/server/test_branch_verbs.py::test_"
TEST_JOURNAL = "tests/journal/test_journal.py::test_"

VERB_FAULTS = (
    fault(
        "an answer that goes on is drawn from its first position again",
        "what was cut short goes on as another answer than one run would have given",
        TURNS,
        "num_answered = turn.num_inherited = len(goes_on.ids)",
        "num_answered = turn.num_inherited = 0",
        TEST_GOING_ON + "on_the_core_a_cancelled_answer_goes_on_to_what_it_would_have_been",
        TEST_GOING_ON + "an_answer_goes_on_as_a_sibling_that_begins_with_its_text",
    ),
    fault(
        "an answer that goes on forgets its stop strings",
        "the rest of an answer runs past where its first part would have ended",
        TURNS,
        "turn.params = Params(stop=goes_on.stop_strings, max_tokens=turn.params.max_tokens)",
        "turn.params = Params(max_tokens=turn.params.max_tokens)",
        TEST_GOING_ON + "pieces_make_the_text_of_one_run",
    ),
    fault(
        "only the shown branch of an erased session is erased",
        "the KV of what somebody regenerated stays when the conversation goes",
        ERASING,
        "    ends = [last_answer(node) for node in conversation if node not in followed]\n",
        "    ends = [last_answer(conversation.head)]\n",
        TEST_ERASING + "nothing_is_left_of_a_session_with_branches_and_logs_of_its_own",
    ),
    fault(
        "what is owed of an erased session is written after it",
        "a session that was erased while the disk was full is back, or keeps all others from the journal",
        ERASING,
        "            owed = await self._recorder.forgive(session.id)\n",
        "            owed: list = []\n",
        TEST_RECORDER + "a_session_whose_changes_are_never_taken_can_be_erased",
    ),
    fault(
        "an erasure tells nobody who is attached",
        "a screen shows a conversation that is gone, and what is said into it is refused without a reason",
        ERASING,
        "        self._attachments.close(session, erased, sender)\n        self._store.drop(session)\n",
        "        self._store.drop(session)\n",
        TEST_ERASING + "nothing_is_left_of_a_session_with_branches_and_logs_of_its_own",
        says="ValueError: not enough values",
    ),
    fault(
        "a tenant's erasure leaves its usage and kept answers owed",
        "what a tenant used is in the journal again after nothing of it should be",
        OPERATOR,
        "            owed = await self._recorder.forgive_tenant(tenant, [session.id for session in held])\n",
        "            owed: list = []\n",
        "tests/sessions/test_operator_door.py::test_nothing_that_is_owed_of_a_tenant_is_written_after_it_is_gone",
    ),
    fault(
        "a tenant's erasure reaches what is in memory only",
        "the blocks of a tenant that is gone stay on the disk",
        OPERATOR,
        "        names = list(await find_blocks(tenant))\n",
        "        names: list = []\n",
        "tests/sessions/test_operator_door.py::test_a_tenants_blocks_on_the_disk_are_named_to_the_engine",
    ),
    fault(
        "a draft is kept where what was sent is another text",
        "an answer goes on from words that nobody sent",
        AHEAD,
        "            base_len = min(base_len + num_equal, answer.num_tokens - 1)\n",
        "            base_len = min(end, answer.num_tokens - 1)\n",
        TEST_DRAFTS + "a_message_that_is_another_one_forgets_the_draft",
        says="AssertionError|assert|AttributeError",
    ),
    fault(
        "what is left of a draft stays in the tiers",
        "what somebody typed and never sent is kept",
        AHEAD,
        "        if base_len < end:\n            self._line.tell(Trim(lease.id, base_len, forget=True))\n",
        "        if base_len < end:\n            self._line.tell(Trim(lease.id, base_len))\n",
        TEST_DRAFTS + "a_message_that_is_another_one_forgets_the_draft",
    ),
    fault(
        "the oldest turns are dropped although everybody was refused that",
        "an answer has not read what its reader thinks it has",
        CONTEXT,
        '            if policy == "refuse" or num_tokens + asked.num_answered + self._room(asked) <= model',
        "            if num_tokens + asked.num_answered + self._room(asked) <= model",
        TEST_CONTEXT + "a_full_context_is_refused_with_the_numbers_where_nothing_else_is_said",
    ),
    fault(
        "a context that was cut is told as whole",
        "nobody sees from where on an answer has read the conversation",
        CONTEXT,
        "        context_from = None if is_whole else kept[0].id if kept else NEW_MESSAGE\n",
        "        context_from = None if is_whole or kept else NEW_MESSAGE\n",
        TEST_CONTEXT + "the_oldest_turns_are_dropped_and_stay_in_the_conversation",
        TEST_CONTEXT + "the_next_turns_go_on_from_the_new_log",
        says="AssertionError|assert",
    ),
    fault(
        "another system prompt does not begin another log",
        "a system prompt that was changed is never read",
        CONTEXT,
        '        return start is not None and start.log_system not in ("", system_digest(system))\n',
        "        return False\n",
        TEST_CONTEXT + "another_system_prompt_holds_from_the_next_answer_on",
    ),
    fault(
        "the system prompt changes under an answer",
        "an answer is kept beside a system prompt that it has not read",
        "chatd/sessions/native.py",
        "            if command.system is not None:\n                check_free(session)\n",
        "            if command.system is not None:\n",
        TEST_CONTEXT + "the_system_prompt_does_not_change_while_an_answer_is_in_progress",
    ),
    fault(
        "a change of a session has effect before it is durable",
        "a title that could not be kept is shown, and is another one after a restart",
        "chatd/sessions/native.py",
        "            record = self._changes.record(session, **changes)\n            if self._changes.keeps(session):\n"
        "                info",
        "            record = self._changes.record(session, **changes)\n            session.take(record)\n"
        "            if self._changes.keeps(session):\n                info",
        "tests/sessions/test_durability.py::test_what_cannot_be_kept_is_refused_and_changes_nothing",
    ),
    fault(
        "what is written without an answer is free",
        "a key that may ask for little writes as much as it likes",
        "chatd/server/charging.py",
        "        quota.admit_change()\n",
        "        pass\n",
        TEST_QUOTA + "what_is_written_without_an_answer_counts_as_a_request_unless_it_is_refused",
    ),
    fault(
        "a revoked key's answers go on",
        "whoever lost its key still has the machine work for it",
        "chatd/server/daemon.py",
        "        self.quotas.forget(key_id)\n        self._end_answers(key_id)\n",
        "        self.quotas.forget(key_id)\n",
        "tests/server/test_websocket.py::test_a_key_that_changes_and_stays_its_owners_keeps_its_answers",
        says="AssertionError|assert|TimeoutError",
    ),
    fault(
        "what is owed is paid after what came later",
        "an older text of a message replaces a newer one",
        RECORDER,
        "await self._commit([*(change for debt in owed for change in debt.changes), *changes])\n"
        "            except Exception:",
        "await self._commit([*changes, *(change for debt in owed[::-1] for change in debt.changes)])\n"
        "            except Exception:",
        TEST_RECORDER + "a_full_disk_loses_nothing_that_is_owed_and_keeps_its_order",
    ),
    fault(
        "owed usage grows with each request",
        "a daemon on a full disk runs out of memory by what it was asked",
        RECORDER,
        "                if place < len(merged):\n",
        "                if place > len(merged):\n",
        TEST_RECORDER + "usage_that_is_owed_takes_no_more_the_longer_the_disk_is_full",
    ),
    fault(
        "tokens that were taken back stay in the journal",
        "an answer that goes on after a crash has what its reader never saw",
        "chatd/journal/tables.py",
        "        if start < length:\n"
        '            self._db.execute("DELETE FROM tokens_in_flight WHERE message = ? AND start >= ?", (pk, start))\n',
        "",
        TEST_JOURNAL + "tokens_in_flight_go_on_where_the_record_ends",
        "tests/journal/test_journal_property.py::test_the_journal_behaves_as_the_one_in_memory",
        says="AssertionError|assert|IntegrityError|StorageError|DamagedRecord",
    ),
    fault(
        "tokens behind a gap are kept",
        "an answer that goes on after a crash has a hole in it",
        "chatd/journal/tables.py",
        "        if start > length:\n            return\n",
        "",
        TEST_JOURNAL + "tokens_with_others_missing_before_them_are_not_kept",
        says="DamagedRecord",
    ),
    fault(
        "a suspect is blamed for what others' steps do",
        "an answer that hurts nobody fails since another one ends engines beside it",
        PROGRESS,
        "    return not turn.deaths.is_suspect(len(turn.text.ids)) if alone == NO_SUSPECT else turn.request == alone\n",
        "    return alone == NO_SUSPECT or turn.request == alone\n",
        TEST_BLAME + "a_suspect_is_not_to_blame_for_what_others_do_in_steps_of_theirs",
    ),
    fault(
        "nobody is blamed for a step alone",
        "one answer ends every engine that is started for it, for ever",
        PROGRESS,
        "    return not turn.deaths.is_suspect(len(turn.text.ids)) if alone == NO_SUSPECT else turn.request == alone\n",
        "    return not turn.deaths.is_suspect(len(turn.text.ids))\n",
        TEST_BLAME + "a_suspect_fails_with_the_engine_that_ends_in_its_own_step_and_nobody_else_is_one",
    ),
    fault(
        "the engine does not say that no suspect is in a step",
        "every death is held against every suspect",
        "chatd/engine/scheduler.py",
        "        return NO_SUSPECT if requests else NOT_KNOWN\n",
        "        return NOT_KNOWN\n",
        "tests/engine/test_suspects.py::test_whoever_watches_is_told_which_suspect_is_in_a_step_and_when_none_is",
    ),
    fault(
        "a kill of the daemon is counted as a crash",
        "people who restart a daemon lose the answers that were in progress",
        CRASHES,
        "    if has_crashed and (not num_crashes or record.is_tried):",
        "    if not num_crashes or record.is_tried:",
        TEST_CRASHES + "a_kill_is_counted_against_nobody",
    ),
    fault(
        "suspects of a crash go on all at once",
        "one answer that ends the daemon takes all others with it",
        "chatd/sessions/restoring.py",
        "            if turn in self._held:\n                self._waiting.append(turn)\n                continue\n",
        "",
        TEST_CRASHES + "suspects_go_on_one_after_another_and_the_journal_knows_which",
        TEST_CRASHES + "of_answers_that_were_tried_the_second_time_it_is_taken_out_and_the_others_go_on",
        says="AssertionError|assert|TimeoutError",
    ),
    fault(
        "a crash is counted against suspects whose turn has not come",
        "two crashes take out every answer that was in progress",
        CRASHES,
        "    if has_crashed and (not num_crashes or record.is_tried):",
        "    if has_crashed:",
        TEST_CRASHES + "a_crash_is_counted_against_all_that_were_in_progress_and_then_against_the_one_that_was_tried",
    ),
    fault(
        "any key may erase what is not its own",
        "whoever has a key removes other people's conversations",
        "chatd/server/policy.py",
        "    if access in (Access.OPERATOR, Access.OPERATORS_KEY) and not principal.operator:",
        "    if access is Access.OPERATOR and not principal.operator:",
        TEST_OPERATING + "only_the_operator_may_and_loopback_is_no_key",
    ),
)
