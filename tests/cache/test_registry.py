"""Policies by name, as the command line spells them."""

import pytest

from engine.cache.policies.sinks_recent import SinksRecent
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policies.tam import TAM
from engine.cache.policy import KVPolicy
from engine.cache.registry import policy_classes, policy_from_text


def test_every_file_of_the_folder_is_a_policy() -> None:
    classes = policy_classes()
    assert {"snapkv": SnapKV, "sinks_recent": SinksRecent}.items() <= classes.items()
    for name in classes:
        assert isinstance(policy_from_text(name), classes[name])


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("snapkv", SnapKV()),
        (" snapkv() ", SnapKV()),
        ("snapkv(queries=16, group='mean', sinks=None)", SnapKV(queries=16, group="mean")),
        ("sinks_recent(sinks=2)", SinksRecent(sinks=2)),
        ("tam()", TAM()),
        ("tam(pivotal=2, lead=0)", TAM(pivotal=2, lead=0)),
    ],
)
def test_text_makes_a_policy(text: str, policy: KVPolicy) -> None:
    assert policy_from_text(text) == policy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "isn't a KV policy: write name"),
        ("snapkv(", "isn't a KV policy: write name"),
        ("snapkv\0", "isn't a KV policy: write name"),
        ("snapkv(16)", "isn't a KV policy: write name"),
        ("a.b", "isn't a KV policy: write name"),
        ("__import__('os').getcwd()", "isn't a KV policy: write name"),
        ("vse(sinks=4)", "there is no KV policy 'vse'; known: .*sinks_recent, snapkv"),
        ("snapkv(heads=4)", "there is no field heads; known: queries, kernel, group"),
        ("snapkv(**{'queries': 4})", r"there is no field \*\*"),
        ("snapkv(queries=4, queries=5)", "queries is given twice"),
        ("snapkv(queries=four)", "the value of queries must be a literal"),
        ("snapkv(queries='4')", "queries must be int, not '4'"),
        ("snapkv(queries=4.5)", "queries must be int, not 4.5"),
        ("snapkv(queries=True)", "queries must be int, not True"),
        ("snapkv(sinks='few')", r"sinks must be int \| None, not 'few'"),
        ("snapkv(group='sum')", r"group must be Literal\['max', 'mean', 'softmax'\], not 'sum'"),
        ("snapkv(kernel=4)", "'snapkv.kernel=4.': kernel must be odd"),
    ],
)
def test_bad_text_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        policy_from_text(text)
