"""Answers that follow a JSON Schema are the same in every mode."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import SPECULATIVE, configs

from duodecoding import LLM, SamplingParams
from duodecoding.backends import scripted
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafting import Drafters
from duodecoding.errors import UsageError
from duodecoding.types import EngineConfig, Mode, Result

pytest.importorskip("llguidance")

from duodecoding.grammar import Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "dog", "döner"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "legs", "tags"],
    "additionalProperties": False,
}
OFF = EngineConfig(mode=Mode.OFF)


class Bytes(scripted.ScriptedVocabulary):
    """Bytes, and a few longer pieces that JSON is made of."""

    def __init__(self) -> None:
        super().__init__(270)
        longer = [b'{"', b'": ', b'", "', b"[]", b'["', b'"]', b"fox", b"og", b": ", b'", ', b"0}", b"]}"]
        self._pieces = [b"", b"", *(bytes([byte]) for byte in range(256)), *longer]


def llm(config: EngineConfig, seed: int) -> LLM:
    script, other = (scripted.random_script(270, seed + i, memory=2) for i in range(2))
    draft = scripted.ScriptedDraft(Bytes(), scripted.disagreeing(script, other, 0.3), context=256)
    target = scripted.ScriptedTarget(Bytes(), script, context=256)
    return LLM.of(target, Drafters(model=ModelDrafter(draft, vocab_limit=270), lookup=LookupDrafter()), config)


def answer(config: EngineConfig, seed: int, params: SamplingParams) -> Result:
    return llm(config, seed).generate([0, 40, 50], params)


@settings(max_examples=25)
@given(
    st.integers(0, 1000),
    configs(SPECULATIVE),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1.0, 0.9]),
    st.integers(1, 120),
    st.sampled_from([0.0, 0.7]),
)
def test_every_mode_follows_it_alike(
    seed: int, config: EngineConfig, temperature: float, top_p: float, most: int, penalty: float
) -> None:
    params = SamplingParams(
        max_tokens=most, temperature=temperature, top_p=top_p, seed=seed, json_schema=json.dumps(SCHEMA), presence_penalty=penalty
    )
    plain, quick = answer(OFF, seed, params), answer(config, seed, params)
    assert quick.token_ids == plain.token_ids
    assert quick.finish_reason == plain.finish_reason
    if plain.finish_reason == "stop":
        check(json.loads(plain.text))


def check(value: Any) -> None:
    assert set(value) == {"kind", "legs", "tags"}
    assert value["kind"] in {"fox", "dog", "döner"}
    assert 0 <= value["legs"] <= 8
    assert len(value["tags"]) <= 2


def test_guesses_are_accepted_under_a_schema():
    params = SamplingParams(max_tokens=120, json_schema=json.dumps(SCHEMA))
    results = [answer(EngineConfig(mode=Mode.SERIAL), seed, params) for seed in range(8)]
    assert sum(result.stats.accepted for result in results) > 0
    assert {result.finish_reason for result in results} == {"stop"}


def test_the_mask_depends_on_the_path_alone():
    constraint = Grammars(Bytes()).constraint(json.dumps(SCHEMA))
    ids = Bytes().tokenize('{"kind": "fox", "legs": 4, "tags": []}', special=False, bos=False)
    masks = [constraint.allowed(ids[:end]) for end in range(len(ids) + 1)]
    assert all(mask[token] for mask, token in zip(masks, ids, strict=False))
    assert np.flatnonzero(masks[-1]).tolist() == [scripted.END]
    for end in (len(ids), 2, 9, 0, 5):  # any order
        assert np.array_equal(constraint.allowed(ids[:end]), masks[end])
    constraint.commit(ids[:5])
    assert np.array_equal(constraint.allowed(ids[5:7]), masks[7])
    assert constraint.allowed([scripted.END]).sum() == 1  # a guessed end: what follows it does not matter


@pytest.mark.parametrize(
    "schema", ["", "{", "[]", '{"not": {}}', '{"$ref": "https://example.org/x"}', '{"type": "wings"}', "false", '{"$ref": "#"}']
)
def test_what_cannot_be_followed_is_refused(schema):
    with pytest.raises(UsageError):
        Grammars(Bytes()).constraint(schema)


def test_a_real_model_under_a_schema(real_target: LlamaTarget):
    drafters = Drafters(lookup=LookupDrafter())
    schema = {
        "type": "object",
        "properties": {"colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 4, "maxItems": 6}},
        "required": ["colours"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=1, json_schema=json.dumps(schema))
    asked = [{"role": "user", "content": "List colours as JSON: red, green, blue, red, green."}]
    plain, quick = (LLM.of(real_target, drafters, EngineConfig(mode=mode)).chat(asked, params) for mode in (Mode.OFF, Mode.DUO))
    assert plain.token_ids == quick.token_ids
    assert set(json.loads(plain.text)["colours"]) <= {"red", "green", "blue"}
