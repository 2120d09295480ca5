"""From settled tokens to what callers read: thinking and answer text, deltas, the Output.

Thinking is told by token ids, and no marker is ever text, wherever it stands. A marker of several
tokens is known only when it is complete, so that many tokens less one are held back; text inside a
channel never waits for anything but the rest of its own character.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from engine.model.detokenizer import Detokenizer
from engine.model.tokenizer import Tokenizer
from engine.output import Choice, Delta, Output
from engine.request import Finish, Sequence
from engine.scheduler.reasoning import Markers, track_chain
from engine.scheduler.scheduler import Settled

Channel = Literal["thinking", "answer", "marker"]


class Piece(NamedTuple):
    """What one token gives to the text."""

    channel: Channel
    data: bytes
    special: bool  # stop strings don't see it


class Assembler:
    """One choice's tokens -> its texts and counts."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer, markers: Markers) -> None:
        self.seq = seq
        self.finish: Finish | None = None
        self._tokenizer = tokenizer
        self._markers = markers
        self._chain = track_chain(markers, seq.tokens[: seq.prompt_len], tokenizer.token_bytes)
        self._hold = max(len(markers.start), len(markers.end), 1) - 1
        self._fed = self._shown = seq.prompt_len  # positions
        self._marked: set[int] = set()  # positions of markers' tokens
        self._texts: dict[Channel, list[str]] = {"thinking": [], "answer": []}
        self._decoders: dict[Channel, Detokenizer] = {}
        # an answer to messages begins afresh; other text goes on from its prompt
        self._begins = seq.messages is not None
        self._answer_tokens = 0

    def push(self, settled: Settled) -> dict[Channel, str]:
        """New text of each channel."""
        for position in range(self._fed, settled.end):
            self._feed(position)
        self._fed = settled.end
        self.finish = settled.finish
        until = settled.end if settled.finish else max(self._shown, settled.end - self._hold)
        pieces = [self._piece(position) for position in range(self._shown, until)]
        self._shown = until
        self._answer_tokens += sum(piece.channel == "answer" for piece in pieces)
        return self._write(_cut(pieces, self.finish))

    def choice(self) -> Choice:
        """The whole, once finished."""
        assert self.finish is not None
        seq, thinking = self.seq, self._chain.thinking_tokens
        marked = bool(self._markers.end)
        return Choice(
            index=seq.index,
            text="".join(self._texts["answer"]),
            thinking="".join(self._texts["thinking"]),
            token_ids=tuple(seq.tokens[seq.prompt_len :]),
            thinking_tokens=thinking,
            answer_tokens=self._answer_tokens if marked else seq.output_len - thinking,
            finish_reason=self.finish.reason,
            stop_reason=self.finish.detail,
            logprobs=None if seq.params.logprobs is None else tuple(seq.logprobs),
            edits=dict(seq.edits),
        )

    def _feed(self, position: int) -> None:
        tokens, after = self.seq.tokens, position + 1
        self._chain.feed(tokens[position])
        for marker in (self._markers.start, self._markers.end):
            begin = after - len(marker)
            if marker and tokens[max(begin, 0) : after] == list(marker):
                self._marked.update(range(begin, after))

    def _piece(self, position: int) -> Piece:
        token = self.seq.tokens[position]
        special = token in self._tokenizer.special_ids
        hidden = special and self.seq.params.skip_special_tokens
        data = b"" if hidden else self._tokenizer.token_bytes(token)
        return Piece(self._channel(position), data, special)

    def _channel(self, position: int) -> Channel:
        if position in self._marked:
            return "marker"
        if self._markers.end and self._chain.inside(position):
            return "thinking"
        return "answer"  # all of the text, for a model without markers

    def _write(self, pieces: list[Piece]) -> dict[Channel, str]:
        new: dict[Channel, str] = {"thinking": "", "answer": ""}
        for channel, data, _ in pieces:
            if channel == "marker":
                self._flush(new)  # no character goes on behind it
            else:
                new[channel] += self._decoder(channel).push_bytes(data)
            self._begins = self._begins and not data
        if self.finish is not None:
            self._flush(new)
        for channel, text in new.items():
            self._texts[channel].append(text)
        return new

    def _decoder(self, channel: Channel) -> Detokenizer:
        if channel not in self._decoders:
            self._decoders[channel] = self._tokenizer.detokenizer(continues=not self._begins)
        return self._decoders[channel]

    def _flush(self, new: dict[Channel, str]) -> None:
        for channel, decoder in self._decoders.items():
            new[channel] += decoder.finish()


def _cut(pieces: list[Piece], finish: Finish | None) -> list[Piece]:
    """Less what a stop takes off the end."""
    if finish is None:
        return pieces
    if finish.reason == "stop" and isinstance(finish.detail, int):
        return pieces[:-1]  # the stop token itself
    drop = finish.drop_bytes
    while drop > 0 and pieces:
        *pieces, last = pieces
        if last.special:
            continue
        if len(last.data) > drop:
            pieces.append(last._replace(data=last.data[: len(last.data) - drop]))
        drop -= min(drop, len(last.data))
    return pieces


class Request:
    """A request's choices on their way to an Output."""

    def __init__(self, choices: list[Sequence], tokenizer: Tokenizer, markers: Markers) -> None:
        self.id = choices[0].id
        self.choices = choices
        self._assemblers = [Assembler(seq, tokenizer, markers) for seq in choices]

    def push(self, settled: Settled) -> Delta:
        """A choice's newly settled tokens as a delta; the request's last one has its Output."""
        seq, finish = settled.seq, settled.finish
        new = self._assemblers[seq.index].push(settled)
        begin, end = settled.start - seq.prompt_len, settled.end - seq.prompt_len
        over = all(assembler.finish is not None for assembler in self._assemblers)
        return Delta(
            id=self.id,
            index=seq.index,
            text=new["answer"],
            thinking=new["thinking"],
            token_ids=tuple(seq.tokens[settled.start : settled.end]),
            logprobs=tuple(seq.logprobs[begin:end]),
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.detail if finish else None,
            output=self._output() if over else None,
        )

    def _output(self) -> Output:
        first = self.choices[0]
        return Output(
            id=self.id,
            prompt_token_ids=tuple(first.tokens[: first.prompt_len]),
            choices=tuple(assembler.choice() for assembler in self._assemblers),
            cached_tokens=first.cached_tokens,
            started=first.started,
            prompt_logprobs=(
                None if first.params.prompt_logprobs is None else tuple(first.prompt_logprobs)
            ),
        )
