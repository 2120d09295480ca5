"""From settled tokens to what callers read: thinking and answer text, deltas, the Output.

Thinking is told by token ids. A marker of several tokens is known only when it is complete, so that
many tokens less one are held back; text inside a channel never waits for anything but the rest of
its own character.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from engine.model.detokenizer import Detokenizer
from engine.model.tokenizer import Tokenizer
from engine.output import Choice, Delta, Output
from engine.request import Finish, Sequence
from engine.scheduler.reasoning import Markers, track_chain
from engine.scheduler.scheduler import Settled

Channel = Literal["thinking", "answer", "marker"]


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
        self._texts: dict[Channel, list[str]] = {"thinking": [], "answer": []}
        self._decoders: dict[Channel, Detokenizer] = {
            "thinking": tokenizer.detokenizer(),
            "answer": tokenizer.detokenizer(),
        }
        self._answer_tokens = 0

    def push(self, settled: Settled) -> dict[Channel, str]:
        """New text of each channel."""
        tokens = self.seq.tokens
        for position in range(self._fed, settled.end):
            self._chain.feed(tokens[position])
        self._fed = settled.end
        self.finish = settled.finish
        until = settled.end if settled.finish else max(self._shown, settled.end - self._hold)
        pieces = [(self._channel(p), tokens[p]) for p in range(self._shown, until)]
        self._shown = until
        self._answer_tokens += sum(channel == "answer" for channel, _ in pieces)
        return self._write(self._bytes(pieces))

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
        )

    def _channel(self, position: int) -> Channel:
        start, end = self._markers.start, self._markers.end
        if not end:
            return "answer"  # a model without markers: all of its text is the answer
        for begin, stop in self._chain.spans:
            if begin <= position < stop:
                return "thinking"
            if begin - len(start) <= position < begin and position >= self.seq.prompt_len:
                return "marker"
            if stop <= position < stop + len(end):
                return "marker"
        # a closing marker outside any block: the model closed what a budget had closed before
        return (
            "marker" if self.seq.tokens[position : position + len(end)] == list(end) else "answer"
        )

    def _bytes(self, pieces: list[tuple[Channel, int]]) -> Iterable[tuple[Channel, bytes]]:
        """The visible bytes of each piece, less what a stop cut off the end."""
        data = [(channel, self._visible(token)) for channel, token in pieces]
        finish = self.finish
        if finish is None:
            return data
        if finish.reason == "stop" and isinstance(finish.detail, int) and data:
            data.pop()  # the stop token itself
        drop = finish.drop_bytes
        while drop > 0 and data:
            channel, last = data.pop()
            if len(last) > drop:
                data.append((channel, last[: len(last) - drop]))
            drop -= min(drop, len(last))
        return data

    def _visible(self, token: int) -> bytes:
        if self.seq.params.skip_special_tokens and token in self._tokenizer.special_ids:
            return b""
        return self._tokenizer.token_bytes(token)

    def _write(self, data: Iterable[tuple[Channel, bytes]]) -> dict[Channel, str]:
        new: dict[Channel, str] = {"thinking": "", "answer": ""}
        for channel, piece in data:
            if channel != "marker":
                new[channel] += self._decoders[channel].push_bytes(piece)
        if self.finish is not None:
            for channel, decoder in self._decoders.items():
                new[channel] += decoder.finish()
        for channel, text in new.items():
            self._texts[channel].append(text)
        return new


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
            prompt_logprobs=(
                None if first.params.prompt_logprobs is None else tuple(first.prompt_logprobs)
            ),
        )
