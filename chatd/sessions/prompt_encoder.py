"""Conversations to token ids, such that content can never be control.

Token ids are the truth. `PromptEncoder.begin` gives the ids of a new conversation, `extend` what to append after an
answer, from the new messages alone: history is never rendered or tokenized again.

How text becomes ids: a conversation is composed from the template's pieces (`template_shape`) and the contents. It is
cut at the added tokens in the *pieces*; each becomes its id. Each stretch between two of them, pieces and contents
together, is encoded as one string by an encoder that knows no control tokens. So `<|im_end|>` in a message is a few
ordinary tokens, and plain conversations give the ids of transformers' `apply_chat_template`. A beginning-of-text token
is there once, if the template writes it, and not at all if it does not; what a tokenizer would add by itself is not.

Encoding releases the GIL: run it in a thread.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date as Date
from typing import Literal

from chatd.errors import InvalidRequest, ModelError
from chatd.protocol import Message, Role
from chatd.sessions.content_encoder import ContentEncoder, Place, Stretch
from chatd.sessions.template import ChatTemplate, moment_of
from chatd.sessions.template_shape import PLAIN_TEXTS, THOUGHT_END, DateSlot, Text, Trim
from chatd.sessions.tokenizer import AddedToken, ChatTokenizer, check_size, strip_beside

MAX_CONTENT_BYTES = 4 * 1024 * 1024
JOINT = "\n\n"
"""Between two contents that a template cannot tell apart."""

Thoughts = Literal["auto", "keep", "drop"]
"""What becomes of the thoughts of earlier answers: what the template does, or one of the two whatever it does."""

_CHECK_DATE = Date(2024, 7, 26)


@dataclass(frozen=True, slots=True)
class SettledAnswer:
    """An answer as later prompts of a thought-dropping template have it.

    Args:
        num_prompt_ids: Ids to drop from the end of the prompt, before the answer.
        ids: What stands in their and the answer's place.
    """

    num_prompt_ids: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class _Control:
    id: int


@dataclass(frozen=True, slots=True)
class _Said:
    role: Role
    content: str


_Item = str | DateSlot | _Control


class PromptEncoder:
    """Makes the token ids of conversations, for one model.

    Args:
        max_bytes: The most UTF-8 bytes of content that one call encodes.
        thoughts: Whether earlier answers keep their thoughts.

    Raises:
        ModelError: Content could yield a control id, or plain conversations give other ids than the template's text.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: ChatTokenizer,
        *,
        max_bytes: int = MAX_CONTENT_BYTES,
        thoughts: Thoughts = "auto",
    ) -> None:
        self.template = template
        self.max_bytes = max_bytes
        self.drops_thoughts = template.kind.drops_thoughts if thoughts == "auto" else thoughts == "drop"
        """Whether later prompts have earlier answers without their thoughts."""
        self._tokenizer = tokenizer
        self._shape = template.shape
        template_text = "\n".join(piece for text in self._shape.texts() for piece in text if isinstance(piece, str))
        contents = [
            token.content
            for token in tokenizer.added_tokens
            if token.content and token.content in template_text and not self._is_blank(token)
        ]
        longest_first = sorted(contents, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._items: dict[Text, tuple[_Item, ...]] = {text: self._compile(text) for text in self._shape.texts()}

        to_next = self._items[self._shape.between["assistant", "user"]]
        turn_end = next((item for item in self._items[self._shape.closing] if isinstance(item, _Control)), None)
        self.turn_end_id: int | None = turn_end.id if turn_end in to_next and turn_end is not None else None
        """What ends an answer in this template; it belongs to the session's ids once the model has said it."""
        self.stop_token_ids: frozenset[int] = tokenizer.stop_token_ids | (
            frozenset() if self.turn_end_id is None else {self.turn_end_id}
        )
        """The ids at which an answer ends. Of these only `turn_end_id` stays in a session's ids."""
        cut = 0 if self.turn_end_id is None else to_next.index(_Control(self.turn_end_id)) + 1
        self._closing, self._after_turn_end = to_next[:cut], to_next[cut:]
        self.thought_end_id = tokenizer.token_id(THOUGHT_END)
        """The id of `</think>`, where it is one token."""

        self.control_ids = self._find_control_ids()
        """The ids that no content can yield."""
        self._encoder: ContentEncoder = tokenizer.content_encoder(self.control_ids)
        self._check_contents()
        self._check_plain_conversations()

    def begin(self, system: str | None, messages: Sequence[Message], *, date: Date) -> list[int]:
        """Return the ids of a whole new conversation, up to where the answer begins.

        Args:
            system: Goes before system messages at the start of `messages`; None is not the same as an empty one.
            messages: Ends with a user message.
            date: Of the session's creation; what the template writes where it writes the date.

        Raises:
            InvalidRequest: The contents are too large, or the template has no place for these messages in this order.
        """
        check_size((system or "", *(message.content for message in messages)), self.max_bytes)
        return self._encode(self._begin_items(system, messages), date, opens_text=True)

    def extend(self, new_messages: Sequence[Message], *, answer_ended: bool, date: Date) -> list[int]:
        """Return the ids to append after an answer, up to where the next answer begins.

        What they are depends on the new messages alone.

        Args:
            new_messages: What was said since the answer; ends with a user message.
            answer_ended: The session's ids end with `turn_end_id`. If not, the template's closing ids come first.
            date: Of the session's creation.

        Raises:
            InvalidRequest: See `begin`.
        """
        check_size((message.content for message in new_messages), self.max_bytes)
        head, rest = self._arrange(None, new_messages, after_answer=True)
        assert head is None, "a system prompt has no first place after an answer"
        first = rest[0].role
        items: list[_Item] = []
        if first == "user":
            items += self._after_turn_end if answer_ended else [*self._closing, *self._after_turn_end]
        else:
            lead = self._shape.between.get(("assistant", first))
            if lead is None:
                raise InvalidRequest(f"a message of the {first} cannot follow an answer", param="messages")
            whole = self._items[lead]
            items += (
                whole[len(self._closing) :] if answer_ended and whole[: len(self._closing)] == self._closing else whole
            )
        items += self._conversation(rest)
        return self._encode(items, date, before=self._turn_end() if answer_ended else None)

    def settle(self, answer_ids: Sequence[int]) -> SettledAnswer | None:
        """Return an answer without its thoughts, as history has it where it has none; None where nothing changes."""
        thought_end = self.thought_end_id
        if not self.drops_thoughts or thought_end is None or thought_end not in answer_ids:
            return None
        prompt = self._encode(self._items[self._shape.to_answer["user"]], _CHECK_DATE)
        history = self._encode(self._items[self._shape.between["user", "assistant"]], _CHECK_DATE)
        if prompt[: len(history)] != history:
            return None
        end = len(answer_ids) - 1 - list(reversed(answer_ids)).index(thought_end)
        ids = list(answer_ids[end + 1 :])
        while ids:
            data = self._tokenizer.token_bytes[ids[0]]
            rest = data.lstrip(self._shape.thought_strip.encode())
            try:
                text = rest.decode()
            except UnicodeDecodeError:  # a part of a character, which cannot be encoded anew
                break
            if rest == data:
                break
            ids[:1] = self._encode([text])
        return SettledAnswer(len(prompt) - len(history), ids)

    def _begin_items(self, system: str | None, messages: Sequence[Message]) -> list[_Item]:
        """Return a whole new conversation as template text, control tokens and contents."""
        head, rest = self._arrange(system, messages)
        first = rest[0].role
        items: list[_Item] = []
        if head is None:
            start = self._shape.opening.get(first)
        else:
            assert self._shape.before_system is not None, "a system prompt was kept for a template without one"
            items += [*self._items[self._shape.before_system], self._trimmed(_Said("system", head))]
            start = self._shape.after_system.get(first)
        if start is None:
            raise InvalidRequest(f"first message is the {first}'s, this model wants the user's", param="messages")
        inside = head is not None and first == "user"
        items += self._items[start]
        return items + self._conversation(rest, first_trim=self._shape.trim_after_system if inside else None)

    def _arrange(
        self, system: str | None, messages: Sequence[Message], *, after_answer: bool = False
    ) -> tuple[str | None, list[_Said]]:
        """Return the system prompt, and the messages as the template can write them one after the other."""
        said = [_Said(message.role, message.content) for message in messages]
        heads = [] if system is None else [system]
        if not after_answer:
            while said and said[0].role == "system":
                heads.append(said.pop(0).content)
        if self._shape.ignores_empty_system:
            heads = [text for text in heads if text]
        # What has no place of its own goes before the next user message's text.
        waiting = heads if self._shape.before_system is None else []
        head = JOINT.join(heads) if heads and not waiting else None
        between = self._shape.between
        rest: list[_Said] = []
        for item in said:
            previous = rest[-1].role if rest else "assistant" if after_answer else None
            if item.role == "system" and ("system", "user") not in between:
                waiting = [*waiting, item.content]
                continue
            if item.role == "user" and waiting:
                item, waiting = _Said("user", JOINT.join([*waiting, item.content])), []
            if rest and item.role == previous and (item.role, item.role) not in between:
                rest[-1] = _Said(item.role, JOINT.join((rest[-1].content, item.content)))
                continue
            if previous is not None and (previous, item.role) not in between:
                raise InvalidRequest(
                    f"{item.role} message after {previous} message: this model's template has no place for it",
                    param="messages",
                )
            rest.append(item)
        if not rest:
            raise InvalidRequest("no user message: there is nothing to answer", param="messages")
        if waiting or rest[-1].role not in self._shape.to_answer:
            last = "system" if waiting else rest[-1].role
            raise InvalidRequest(f"last message is the {last}'s, it must be the user's", param="messages")
        return head, rest

    def _conversation(self, messages: Sequence[_Said], *, first_trim: Trim | None = None) -> list[_Item]:
        """Return the items from the first message's content to where the answer begins."""
        items: list[_Item] = []
        for message, following in zip(messages, [*messages[1:], None], strict=True):
            items.append(self._trimmed(message, None if items else first_trim))
            text = (
                self._shape.to_answer[message.role]
                if following is None
                else self._shape.between[message.role, following.role]
            )
            items += self._items[text]
        return items

    def _trimmed(self, message: _Said, trim: Trim | None = None) -> str:
        """Return a content as the template would write it; `trim` goes before that of its role."""
        content = message.content
        if self.drops_thoughts and message.role == "assistant":
            content = self._shape.without_thoughts(content)
        trim = trim or self._shape.trims.get(message.role)
        return content if trim is None else trim.apply(content)

    def _compile(self, text: Text) -> tuple[_Item, ...]:
        """Find the added tokens that the template wrote."""
        items: list[_Item] = []
        for piece in text:
            if isinstance(piece, DateSlot):
                items.append(piece)
                continue
            position = 0
            for match in self._added.finditer(piece):
                token_id = self._tokenizer.token_id(match[0])
                assert token_id is not None, "an added token without an id"
                items += [piece[position : match.start()], _Control(token_id)]
                position = match.end()
            items.append(piece[position:])
        return tuple(item for item in items if item != "")

    def _turn_end(self) -> AddedToken | None:
        return None if self.turn_end_id is None else self._tokenizer.added_token(self.turn_end_id)

    def _encode(
        self,
        items: Iterable[_Item],
        date: Date | None = None,
        *,
        opens_text: bool = False,
        before: AddedToken | None = None,
    ) -> list[int]:
        """Return the ids of template text, control tokens and contents in a row, which follow the token `before`."""
        stretches: list[Stretch] = []
        slots: list[int | None] = []  # a control id, or None for the next stretch
        texts: list[str] = []

        def close_stretch(after: AddedToken | None) -> None:
            text = strip_beside("".join(texts), before=before, after=after)
            if text:
                outset = Place.OPENING if opens_text else Place.GOING_ON
                stretches.append(Stretch(text, Place.AFTER_CONTROL if slots or before is not None else outset))
                slots.append(None)
            texts.clear()

        for item in items:
            if isinstance(item, str):
                texts.append(item)
            elif isinstance(item, DateSlot):
                assert date is not None, "the template writes a date where none is given"
                texts.append(moment_of(date).strftime(item.format))
            else:
                token = self._tokenizer.added_token(item.id)
                close_stretch(token)
                slots.append(item.id)
                before = token
        close_stretch(None)
        encoded = iter(self._encoder.encode(stretches))
        ids: list[int] = []
        for slot in slots:
            if slot is None:
                ids += next(encoded)
            else:
                ids.append(slot)
        return ids

    def _is_blank(self, token: AddedToken) -> bool:
        """Return whether an added token is but a run of blanks that the vocabulary spells too, as in Gemma."""
        blank = not token.content.replace("\u2581", " ").strip()
        return blank and not token.special and self._tokenizer.in_vocabulary(token)

    def _find_control_ids(self) -> frozenset[int]:
        """Return every added id, special or not, but runs of blanks; and every id at which an answer ends.

        So HTML tags, which Gemma lists among its added tokens, are spelled out in contents.
        """
        written = {item.id for items in self._items.values() for item in items if isinstance(item, _Control)}
        added = {token.id for token in self._tokenizer.added_tokens if not self._is_blank(token)}
        # A vocabulary that cannot spell every text has a token for what it cannot spell.
        return frozenset((added - {self._tokenizer.unknown_id}) | written | self.stop_token_ids)

    def _check_contents(self) -> None:
        """Refuse a model in which the text of an added token, alone or among other text, becomes a control id."""
        texts = [
            f"{text} a{text}b {text} {text}{text}\n{text}\n{text}"
            for text in (token.content for token in self._tokenizer.added_tokens)
        ]
        leaked = self._encoder.control_ids_in(texts)
        if leaked:
            names = ", ".join(repr(getattr(self._tokenizer.added_token(i), "content", i)) for i in sorted(leaked)[:5])
            raise ModelError(f"{self.template.name} cannot be served: text in a message would become {names}")
        if any(isinstance(item, DateSlot) for item in self._closing):
            raise ModelError(f"{self.template.name} cannot be served: its template ends an answer with the date")

    def _check_plain_conversations(self) -> None:
        """Refuse a model for which stretches give other ids than its own tokenizer gives for the template's text."""
        reference = self._tokenizer.reference()
        said = [Message(role="assistant" if i % 2 else "user", content=text) for i, text in enumerate(PLAIN_TEXTS)]
        for system in (None, "You are a helpful assistant."):
            for messages in (said[:1], said[:3], said):
                items = self._begin_items(system, messages)
                text = "".join(self._written(item) for item in items)
                expected = reference.encode(text, add_special_tokens=False).ids
                if self._encode(items, _CHECK_DATE, opens_text=True) != expected:
                    raise ModelError(
                        f"{self.template.name} cannot be served: its tokenizer gives other ids for a conversation "
                        "than for the stretches between its control tokens"
                    )

    def _written(self, item: _Item) -> str:
        """Return an item as text."""
        if isinstance(item, str):
            return item
        if isinstance(item, DateSlot):
            return moment_of(_CHECK_DATE).strftime(item.format)
        token = self._tokenizer.added_token(item.id)
        assert token is not None, "a control token that is not an added token"
        return token.content
