"""What travels through the engine: a request's settings, its sequence, and one batch of work.

Imports nothing of ours and no torch, so that the scheduler and its tests stay light. The invariant
that everything here serves: `Sequence.tokens` is the truth, and a role's KV cache is a view of a
prefix of it (`computed[role] <= len(tokens)`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set, Sized
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

Role = str
"""Which model a sequence runs on: "main", "helper", "full" (the full-precision twin), "scorer"."""

MAIN: Role = "main"

Origin = Literal["sampled", "forced", "adopted"]
"""How a token came into `Sequence.tokens` after the prompt."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended.

    `detail` is the stop string, the stop id or the error's message. `drop_bytes` is how much of the
    text's end isn't output: the stop string and what followed it inside its last token.
    """

    reason: Literal["stop", "length", "abort", "error"]
    detail: str | int | None = None
    drop_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must have: a JSON schema's text, or a grammar in llguidance's Lark.

    JSON is written on one line, with one space behind colons and commas.
    """

    kind: Literal["json_schema", "lark"]
    text: str

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "lark"):
            raise ValueError(f"grammar.kind must be json_schema or lark, not {self.kind!r}")
        if not isinstance(self.text, str):
            raise ValueError(f"grammar.text must be a string, not {self.text!r:.100}")


class GrammarError(ValueError):
    """A grammar that nothing can follow: it is malformed, unsupported or too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. `None` means the model's own default (generation_config.json).

    `temperature` 0 is greedy. Penalties: `repetition_penalty` divides (multiplies) positive
    (negative) logits of every token in prompt or output; `presence_penalty` and `frequency_penalty`
    are OpenAI's, over the output. Order: logit_bias and bans, penalties, temperature, min_p, top_k,
    top_p. `logprobs` are of the raw model distribution, before all of these; k >= 0 asks for the
    sampled token's and the k best. `stop` strings are matched in the text of the answer, and in the
    thinking too with `stop_in_thinking`; special tokens have no text: use `stop_token_ids` for
    them. `thinking_token_budget` closes the thinking after exactly that many tokens. `grammar` is
    the form of the answer, which begins behind the thinking and ends when the form is complete,
    whatever `min_tokens` says. `max_tokens` None: up to the context's end. `n` choices differ by
    lineage. `kv_budget` cells a head are kept of the KV cache instead of the server's budget, which
    it can't exceed; "full" keeps them all, where the server allows it. Caches of other roles than
    the main one follow as far as they can.
    """

    n: int = 1
    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Seq[int] | None = None
    seed: int | None = None
    stop: Seq[str] = ()
    stop_token_ids: Seq[int] = ()
    stop_in_thinking: bool = False
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    kv_budget: int | Literal["full"] | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _check_params(self)


MAX_LOGPROBS = 20

_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("n", 1, 1024, "from 1 to 1024"),
    ("max_tokens", 1, float("inf"), "at least 1"),
    ("min_tokens", 0, float("inf"), "at least 0"),
    ("temperature", 0.0, 100.0, "from 0 (greedy) to 100"),
    ("top_k", -1, float("inf"), "at least 1 (0 or -1: off)"),
    ("top_p", 1e-9, 1.0, "above 0 and at most 1 (1: off)"),
    ("min_p", 0.0, 1.0, "from 0 (off) to 1"),
    ("repetition_penalty", 1e-9, 100.0, "above 0 and at most 100 (1: off)"),
    ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
    ("logprobs", 0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", 0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    ("thinking_token_budget", 0, float("inf"), "at least 0 (None: no budget)"),
)
_INTEGERS = frozenset(
    (
        "n",
        "max_tokens",
        "min_tokens",
        "top_k",
        "logprobs",
        "prompt_logprobs",
        "thinking_token_budget",
        "kv_budget",
    )
)


_FLAGS = (
    "stop_in_thinking",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
_OPTIONAL = frozenset(
    (
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "logprobs",
        "prompt_logprobs",
        "thinking_token_budget",
        "kv_budget",
    )
)


def _check_range(name: str, value: object, low: float, high: float, words: str) -> None:
    if value is None and name in _OPTIONAL:
        return
    kinds = (int,) if name in _INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "an integer" if name in _INTEGERS else "a number"
        raise ValueError(f"{name} must be {kind} {words}, not {value!r}")
    if not low <= value <= high:  # NaN fails too
        raise ValueError(f"{name} must be {words}, not {value!r}")


def _check_params(p: SamplingParams) -> None:
    for name, low, high, words in _RANGES:
        _check_range(name, getattr(p, name), low, high, words)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise ValueError(f"min_tokens ({p.min_tokens}) is above max_tokens ({p.max_tokens})")
    if not isinstance(p.grammar, Grammar | None):
        raise ValueError(f"grammar must be a Grammar or None, not {p.grammar!r:.100}")
    if p.seed is not None and (isinstance(p.seed, bool) or not isinstance(p.seed, int)):
        raise ValueError(f"seed must be an integer, not {p.seed!r}")
    for name in _FLAGS:
        if not isinstance(getattr(p, name), bool):
            raise ValueError(f"{name} must be True or False, not {getattr(p, name)!r}")
    if p.kv_budget != "full":
        _check_range("kv_budget", p.kv_budget, 1, float("inf"), 'at least 1, or "full"')
    _check_stop(p.stop)
    _check_ids("stop_token_ids", p.stop_token_ids)
    if p.allowed_token_ids is not None:
        _check_allowed(p.allowed_token_ids)
    if p.logit_bias is not None:
        _check_bias(p.logit_bias)


def _check_stop(stop: object) -> None:
    if not isinstance(stop, tuple | list):
        raise ValueError(f"stop must be a string or a list of strings, not {stop!r}")
    for string in stop:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold non-empty strings, not {string!r}")
        if any("\ud800" <= char <= "\udfff" for char in string):
            raise ValueError(f"stop holds a lone surrogate, which is no text: {string!r}")


def _check_ids(name: str, ids: object) -> None:
    if not isinstance(ids, tuple | list | range | Set) or not all(map(_is_integer, ids)):
        raise ValueError(f"{name} must be a list of token ids, not {ids!r}")


def _check_allowed(ids: Sized) -> None:
    _check_ids("allowed_token_ids", ids)
    if not ids:
        raise ValueError(
            "allowed_token_ids is empty: nothing could be sampled; leave it None instead"
        )


def _check_bias(biases: object) -> None:
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {biases!r}")
    for token, bias in biases.items():
        if not _is_integer(token):
            raise ValueError(f"logit_bias must map token ids to numbers; {token!r} is no id")
        _check_range(f"logit_bias of token {token}", bias, -100.0, 100.0, "from -100 to 100")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class TokenLogprob(NamedTuple):
    """A token's natural-log probability and the best alternatives, every number finite."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Mask(NamedTuple):
    """What a `LogitsRule` says of the next token: ids to allow (None: all), to ban, to weigh.

    `allow_bits` is another way to allow, for many ids: a bit an id, the lowest bit of the first
    byte for id 0; ids behind its end are forbidden.
    """

    allow: Seq[int] | None = None
    ban: Seq[int] = ()
    bias: Mapping[int, float] | None = None
    allow_bits: bytes | None = None


class LogitsRule(Protocol):
    """May forbid or weigh a sequence's next token; nothing else may steer it but an Edit."""

    def mask(self, tokens: Seq[int]) -> Mask | None:
        """For the token after `tokens` (prompt included); None: no opinion."""

    def fork(self) -> LogitsRule:
        """A copy for a branch."""

    def rewind(self, pos: int) -> None:
        """Tokens from `pos` on were truncated."""


class Matcher(Protocol):
    """Where in its grammar an answer is."""

    @property
    def done(self) -> bool:
        """The form is complete, and no text can follow."""

    def mask(self) -> bytes:
        """Which ids may come next, as in `Mask.allow_bits`; where the answer may end, the ids that
        end the sequence are among them."""

    def accept(self, token: int) -> bool:
        """The next token; False: the grammar doesn't allow it, and nothing has changed."""

    def rewind(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""

    def fork(self) -> Matcher:
        """Another one at the same place."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One trajectory: a choice of a request, or a branch of one. Identity is the object's.

    `computed[role]` counts the tokens whose cells that role's slot covers; `slots[role]` is the
    slot. `thought_ends` are positions just after each thought's last token, ascending. `lineage`
    keys its sampling noise: 0 for choice 0, see design notes in docs/architecture.md.
    """

    id: str
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    messages: Seq[Mapping[str, Any]] | None = None
    role: Role = MAIN
    seed: int = 0
    lineage: int = 0
    priority: int = 0  # lower runs first
    arrival: int = 0
    index: int = 0  # which of the request's n choices
    matcher: Matcher | None = None  # of params.grammar, at its start; the watch's that follows it
    computed: dict[Role, int] = field(default_factory=dict)
    slots: dict[Role, int] = field(default_factory=dict)
    thought_ends: list[int] = field(default_factory=list)
    rules: tuple[LogitsRule, ...] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the output, where asked
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of tokens[1:prompt_len]
    parent: Sequence | None = None
    cached_tokens: int = 0  # of the prompt, found in the main role's prefix cache
    started: float | None = None  # when it first left the queue, as time.perf_counter() tells it
    edits: dict[str, int] = field(default_factory=dict)  # of its text, by controller's name
    score: list[float] | None = None  # a "scored" branch: the logprobs of its appended tokens
    finish: Finish | None = None

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Row:
    """Run tokens[start : start + count] of `seq` through the batch's role.

    The row samples one token if it ends at len(seq.tokens). `given` not None: also return the
    logprobs of the known tokens that its positions predict, with that many alternatives.
    """

    seq: Sequence
    start: int
    count: int
    given: int | None = None

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.seq.tokens)


class Admission(NamedTuple):
    """A granted slot, and how many tokens a prefix hit already covers."""

    slot: int
    computed: int


class Needs(NamedTuple):
    """What a part of the batch asked to know of sampled tokens, beyond the tokens themselves."""

    entropy: bool = False
    watch_ids: tuple[int, ...] = ()


class Batch(NamedTuple):
    """One forward pass of one role; prefill chunks and decode tokens mixed."""

    role: Role
    rows: tuple[Row, ...]
    needs: Needs = Needs()


class RowOutput(NamedTuple):
    """What a row gave, on the host.

    `token` None: the row didn't reach the sequence's end, or, with an `error`, nothing could be
    sampled and this sequence alone ends.
    """

    token: int | None = None
    logprob: TokenLogprob | None = None  # where seq.params.logprobs asks
    entropy: float | None = None  # nats, of the raw distribution, where needed
    watch: tuple[float, ...] = ()  # logprobs of needs.watch_ids
    given: tuple[
        TokenLogprob, ...
    ] = ()  # of tokens[start + 1 : start + count + 1], as far as known
    error: str | None = None


class StepOutput(NamedTuple):
    """One `RowOutput` a row, in the batch's order."""

    rows: tuple[RowOutput, ...]
