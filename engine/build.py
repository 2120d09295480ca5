"""From a config to running parts: models loaded, the KV memory shared out, executors made.

Everything that can be refused is refused here, before a request is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import NamedTuple

import torch

from engine.cache.paged import PagedCache
from engine.cache.policy import KVSpec
from engine.cache.sizes import PoolPages, Sizes
from engine.cache.view import KVShape
from engine.config import EngineConfig, ModelSpec, ReasoningSpec
from engine.executor import Executor
from engine.host import available_bytes
from engine.kernels.attention import ATTENTION, PAGE, AttentionSpec
from engine.kernels.dispatch import select
from engine.kernels.linear import LINEAR
from engine.model.architecture import DecoderConfig
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.model.decoder import Decoder
from engine.model.quantize import ACTIVATIONS, WEIGHT_FORMATS
from engine.model.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from engine.request import MAIN, Role, SamplingParams
from engine.sampling.grammar import GrammarCompiler
from engine.sampling.sampler import Sampler, SamplingDefaults
from engine.scheduler.reasoning import Markers

log = logging.getLogger(__name__)

SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingDefaults))
"""What a generation_config.json may set, by SamplingDefaults' names."""

KV_SHARE = 0.5
"""Of the memory that is left once the weights are in, where `kv_bytes` isn't given."""


class Loaded(NamedTuple):
    """One role's model, in memory."""

    role: Role
    spec: ModelSpec
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    decoder: Decoder
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> KVShape:
        return shape_of(self.checkpoint.config)


def shape_of(c: DecoderConfig) -> KVShape:
    return KVShape(c.layers, c.q_heads, c.kv_heads, c.head_dim)


def load_model(role: Role, spec: ModelSpec, backends: tuple[str, ...]) -> Loaded:
    """Open, check and load; a broken file fails here with its name and the tensor's."""
    check_backends(backends)
    device = torch.device(device_of(spec.device))
    dtype = dtype_of(spec.dtype, device)
    checkpoint = open_checkpoint(spec.model)
    kv = spec.kv.measured(checkpoint.path).sized(shape_of(checkpoint.config), dtype)
    spec = replace(spec, kv=kv)
    check_weights(checkpoint, spec.weights)
    check_activations(checkpoint, spec)
    checkpoint.check()
    with ThreadPoolExecutor(1) as beside:  # much of a start-up's time is either of the two
        loading = beside.submit(load_tokenizer, checkpoint)
        decoder = Decoder.load(
            checkpoint,
            dtype=dtype,
            device=device,
            prefer=backends,
            weights=WEIGHT_FORMATS[spec.weights],
            activation_bits=ACTIVATIONS[spec.activations],
            kv_bits=spec.kv.cells(dtype).bits,
        )
        tokenizer = loading.result()
    return Loaded(role, spec, checkpoint, tokenizer, decoder, dtype, device)


def check_weights(checkpoint: Checkpoint, weights: str) -> None:
    """What is quantised already isn't quantised again, to something else."""
    stored = checkpoint.stored_format
    if stored is not None and weights not in ("float", stored):
        raise ValueError(
            f"{checkpoint.source} is quantised to {stored} already: weights must be float (as "
            f"stored) or {stored} (the LM head quantised too), not {weights}"
        )


def check_activations(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Only integers multiply integers."""
    held = checkpoint.stored_format or spec.weights
    if spec.activations != "float" and held not in ("int8", "nvfp4"):
        raise ValueError(
            f"activations={spec.activations!r} needs weights int8 or nvfp4, not {held!r}"
        )


def check_backends(names: tuple[str, ...]) -> None:
    """Backends asked for by name exist for some op; whether one serves is seen at its turn."""
    known = {impl.backend for op in (ATTENTION, LINEAR) for impl in op.impls}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"backends names {unknown}; there are {sorted(known)}")


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """From the GGUF's metadata, or from the folder's tokenizer files; as wide as the embedding."""
    if checkpoint.metadata is not None:
        tokenizer = tokenizer_from_gguf(checkpoint.metadata)
    else:
        assert checkpoint.folder is not None
        tokenizer = tokenizer_from_folder(checkpoint.folder)
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise ValueError(
            f"{checkpoint.source}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model only {checkpoint.config.vocab_size}"
        )
    return tokenizer.padded_to(checkpoint.config.vocab_size)


def check_roles(models: Mapping[Role, Loaded]) -> None:
    """Roles read the same token ids: transcripts between tokenizers don't exist yet."""
    first, *others = models.values()
    for other in others:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise ValueError(
                f"the roles {first.role!r} and {other.role!r} have different tokenizers "
                f"({first.checkpoint.source}, {other.checkpoint.source}); roles must share one "
                "until transcripts are supported"
            )


def context_length(config: EngineConfig, models: Mapping[Role, Loaded]) -> int:
    """`max_model_len`, at most what every role's positions allow."""
    own = min(m.checkpoint.config.max_positions for m in models.values())
    if config.max_model_len is not None and config.max_model_len > own:
        raise ValueError(f"max_model_len ({config.max_model_len}) is above the model's own {own}")
    return config.max_model_len or own


class RoleCache(NamedTuple):
    """What decides the size of one role's cache."""

    shape: KVShape
    spec: KVSpec
    dtype: torch.dtype
    slots: int

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.shape, self.spec, self.dtype)

    @property
    def token_bytes(self) -> float:
        """One token in every head of every layer of a full cache."""
        return self.sizes.token_bytes

    def side_bytes(self, max_len: int) -> int:
        """Query rings and tables of all slots."""
        return self.slots * self.sizes.slot_bytes(max_len)


class KVPlan(NamedTuple):
    """How the KV memory is shared out: every role's cache holds `tokens` uncompressed."""

    tokens: int
    pages: dict[Role, PoolPages]
    cell_bytes: int
    side_bytes: int


def plan_kv(config: EngineConfig, caches: Mapping[Role, RoleCache], max_len: int) -> KVPlan:
    """Share `kv_bytes` by what a token costs each role; ValueError if it holds next to nothing.

    Formats with packed cells have plain tails of some sequences before that.
    """
    side = sum(cache.side_bytes(max_len) for cache in caches.values())
    per_token = sum(cache.token_bytes for cache in caches.values())
    total = config.kv_bytes or int(available_bytes() * KV_SHARE)
    tails = {
        role: c.sizes.tails((total - side) * c.token_bytes / per_token, c.slots, max_len)
        for role, c in caches.items()
    }
    tail = sum(tails[role] * c.sizes.tail_bytes(max_len) for role, c in caches.items())
    fits = int((total - side - tail) / per_token)
    tokens = min(fits, config.max_num_seqs * max_len) // PAGE * PAGE
    if tokens < 2 * PAGE:
        beside = f" and a plain tail {tail}" if tail else ""
        raise ValueError(
            f"kv_bytes ({total}) is too small: the slots' side state takes {side}{beside} and a"
            f" token costs {per_token:.0f}; one sequence of {max_len} tokens needs "
            f"{side + tail + int(per_token * max_len)}"
        )
    pages = {role: c.sizes.pages(tokens, tails[role], max_len) for role, c in caches.items()}
    return KVPlan(tokens, pages, int(tokens * per_token) + tail, side)


def build_executors(
    config: EngineConfig, models: Mapping[Role, Loaded], max_len: int
) -> dict[Role, Executor]:
    """One executor a role, each with its own cache and sampler."""
    caches = {
        role: RoleCache(m.shape, m.spec.kv, m.dtype, slots_of(config, role))
        for role, m in models.items()
    }
    plan = plan_kv(config, caches, max_len)
    log.info(
        "KV cache: %d tokens uncompressed, %.2f GiB of cells, %.2f GiB beside them",
        plan.tokens,
        plan.cell_bytes / 2**30,
        plan.side_bytes / 2**30,
    )
    executors = {}
    for role, m in models.items():
        cells = m.spec.kv.cells(m.dtype)
        spec = AttentionSpec(
            head_dim=m.shape.head_dim,
            group=m.shape.group,
            device=m.device.type,
            dtype=m.dtype,
            cell_dtype=cells.dtype,
            bias=m.spec.kv.bias,
            bits=cells.bits,
        )
        cache = PagedCache(
            m.shape,
            m.spec.kv,
            pages=plan.pages[role].plain,
            packed_pages=plan.pages[role].packed,
            slots=caches[role].slots,
            max_len=max_len,
            dtype=m.dtype,
            device=m.device,
            attend=select(ATTENTION, spec, config.backends).build(spec),
        )
        sampler = Sampler(m.checkpoint.config.vocab_size, _defaults(m))
        executors[role] = Executor(role, m.decoder, cache, sampler, m.device)
    return executors


def slots_of(config: EngineConfig, role: Role) -> int:
    """Sequences that one role's cache has rows for, children included."""
    children = sum(c.children.get(role, 0) for c in config.controllers)
    return config.max_num_seqs * (1 + children)


def _defaults(m: Loaded) -> SamplingDefaults:
    """The model's own sampling settings, where it names them and the spec lets them count."""
    if not m.spec.generation_defaults:
        return SamplingDefaults()
    named = {name: getattr(m.checkpoint.generation, name) for name in SAMPLING_FIELDS}
    try:
        SamplingParams(**named)
    except ValueError as error:
        raise ValueError(
            f"{m.checkpoint.source}: the model's sampling defaults can't be used: {error}; "
            "switch them off with generation_defaults=False"
        ) from error
    return replace(SamplingDefaults(), **{k: v for k, v in named.items() if v is not None})


def markers_for(spec: ReasoningSpec | None, tokenizer: Tokenizer) -> Markers:
    """The thinking markers as token ids: the config's, or `<think>` where the vocabulary has it."""
    spec = spec or detect_reasoning(tokenizer)
    closing = spec.closing or (_CLOSING_MARKED if spec.end else _CLOSING_PLAIN)

    def ids(text: str | None) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special=False)) if text else ()

    start, end = ids(spec.start), ids(spec.end)
    if spec.end:  # encoded apart, so that the closing phrase ends with exactly the marker's ids
        head, found, rest = closing.rpartition(spec.end)
        closing = head if found and not rest.strip() else closing
    turns = tokenizer.special_ids.difference(start, end)
    return Markers(start=start, end=end, closing=ids(closing) + end, turns=turns)


def grammar_compiler(models: Mapping[Role, Loaded]) -> GrammarCompiler:
    """For every role: they share a tokenizer."""
    main = models[MAIN]
    return GrammarCompiler(main.tokenizer, main.checkpoint.generation.eos_ids)


_CLOSING_MARKED = "\n\nThat is enough thinking; here is the answer.\n"
_CLOSING_PLAIN = "\n\nFinal answer: \\boxed{"


def detect_reasoning(tokenizer: Tokenizer) -> ReasoningSpec:
    """What the vocabulary says of thinking."""
    for start, end in (("<think>", "</think>"), ("<|begin_of_thought|>", "<|end_of_thought|>")):
        if tokenizer.token_id(start) is not None and tokenizer.token_id(end) is not None:
            return ReasoningSpec(start=start, end=end)
    return ReasoningSpec()


def device_of(name: str) -> str:
    """The device of a ModelSpec; ValueError where there is none."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    gpus = torch.cuda.device_count()
    if name != "cpu" and (kind != "cuda" or not (index or "0").isdecimal()):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}")
    if kind == "cuda" and int(index or 0) >= gpus:
        raise ValueError(f"device {name!r}: torch sees {gpus} GPUs here; use auto or cpu")
    return name


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
