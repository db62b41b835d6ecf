"""What a beam search found: the best sequence is the turn's answer, the others are answers beside it."""

from __future__ import annotations

from collections.abc import Callable

from chatd.engine.messages import Beams, FinishReason
from chatd.protocol import Usage
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.logs import Node
from chatd.sessions.ports import ChatEncoder, Vocabulary
from chatd.sessions.session import Session
from chatd.sessions.turn import AnswerText, OtherAnswer, Turn
from chatd.sessions.turn_ends import TurnEnds


class BeamResults:
    """Takes in what searches found.

    Args:
        requests: Lets a session share what another one holds.
        vocabulary: Makes text of ids.
        encoder: Knows what later prompts have of an answer.
        ends: Names ends.
        new_id: Makes ids with a prefix.
    """

    def __init__(
        self,
        requests: EngineRequests,
        vocabulary: Vocabulary,
        encoder: ChatEncoder,
        ends: TurnEnds,
        new_id: Callable[[str], str],
    ) -> None:
        self._requests = requests
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._ends = ends
        self._new_id = new_id

    def take(self, turn: Turn, found: Beams) -> None:
        """Keep with a turn what its search found beside the best sequence."""
        assert turn.answer is not None and turn.answer.sampling is not None, "a search without an answer"  # noqa: PT018
        hidden_ids = frozenset(turn.answer.sampling.stop_token_ids)
        for sequence in found.sequences[1:]:
            answer = AnswerText(self._vocabulary.detokenizer(), (), hidden_ids)
            deltas = (answer.push(sequence.ids), answer.flush())
            text = "".join(delta.text for delta in deltas if delta is not None)
            if sequence.reason is FinishReason.STOP and self._ends.is_foreign_stop(answer.ids[-1]):
                answer.ids.pop()
            reason = self._ends.name_of(turn, sequence.reason, turn.answer.num_tokens, len(answer.ids))
            turn.others.append(OtherAnswer(text, answer, reason))

    def keep_other(self, turn: Turn, other: OtherAnswer, session: Session) -> Node | None:
        """Commit an answer that a search found beside the one that was taken, in a session that ends with its messages.

        The session shares the prompt; what it lacks of the answer is computed when it is used.

        Returns:
            None where later prompts would have other ids of either answer than were computed.
        """
        best, conversation = turn.answer, session.conversation
        assert best is not None and turn.text is not None, "a search ended without an answer"  # noqa: PT018
        if best.ids is not turn.text.ids or self._encoder.settle(other.answer.ids) is not None:
            return None
        assert best.sampling is not None, "an answer without its parameters"
        assert best.usage is not None, "an answer in progress"
        assert best.timings is not None, "an answer in progress"
        num_prompt_tokens = best.num_tokens_before + len(best.prompt_ids)
        self._requests.share_prompt(turn.session, best, session)
        answer = conversation.begin_answer(
            self._new_id("msg"),
            best.parent,
            best.prompt_ids,
            best.sampling,
            best.stop_strings,
            log_system=best.log_system,
            context_from=best.context_from,
        )
        answer.append_text(other.text)
        completed = other.reason in (FinishReason.STOP, FinishReason.STOP_STRING)
        conversation.end_answer(
            answer,
            status="completed" if completed else "incomplete",
            reason=other.reason,
            usage=Usage.of(num_prompt_tokens, best.usage.cached_tokens, len(other.answer.ids)),
            timings=best.timings,
        )
        answer.ids = other.answer.ids
        return answer
