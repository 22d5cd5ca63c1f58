"""The real OpenAI client against a live server: what people's programs do."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from live import Live, eventually, live, speaker

from duodecoding import SamplingParams
from duodecoding.types import Mode

openai = pytest.importorskip("openai")

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(lambda: speaker(Mode.SERIAL)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(content: str = "hello", **params) -> str:
    llm = speaker(Mode.OFF)
    return llm.chat([{"role": "user", "content": content}], SamplingParams(**{"max_tokens": 32, **params})).text


def test_a_chat(client):
    answer = client.chat.completions.create(model="target", messages=HELLO)
    assert answer.choices[0].message.content == expected()
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.completion_tokens + answer.usage.prompt_tokens == answer.usage.total_tokens
    assert answer.object == "chat.completion"


def test_a_stream_says_the_same(client):
    guessing = {"duo": {"mode": "chain"}}  # whatever it costs
    with client.chat.completions.create(model="target", messages=HELLO, stream=True, extra_body=guessing) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected()
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].timings["draft_n"] >= chunks[-1].timings["draft_n_accepted"] > 0


def test_usage_comes_last_and_alone(client):
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="target", messages=HELLO, stream=True, stream_options=options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_parts_and_roles(client):
    parts = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]},
    ]
    answer = client.chat.completions.create(model="target", messages=parts)
    llm = speaker(Mode.OFF)
    plain = [{"role": "system", "content": "be"}, {"role": "user", "content": "he\ny"}]
    assert answer.choices[0].message.content == llm.chat(plain, SamplingParams(max_tokens=32)).text


def test_stop_and_length(client):
    whole = expected(max_tokens=24)
    stop = whole[10:12]
    cut = client.chat.completions.create(model="target", messages=HELLO, max_completion_tokens=24, stop=[stop, "ZZ"])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(model="target", messages=HELLO, max_tokens=5)
    assert short.choices[0].message.content == whole[:5]
    assert short.choices[0].finish_reason == "length"


@pytest.mark.parametrize("mode", ["off", "chain", "serial"])
def test_a_seed_fixes_the_answer_in_every_mode(client, mode):
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "extra_body": {"top_k": 9, "min_p": 0.01, "duo": {"mode": mode}}}
    answer = client.chat.completions.create(model="target", messages=HELLO, **settings)
    assert answer.choices[0].message.content == expected(temperature=1.0, top_p=0.9, seed=7, top_k=9, min_p=0.01)
    assert answer.duo["mode"] == mode


def test_without_a_seed_answers_differ(client):
    texts = {
        client.chat.completions.create(model="target", messages=HELLO, temperature=2.0).choices[0].message.content for _ in range(4)
    }
    assert len(texts) > 1


def test_penalties_and_bias(client):
    settings = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"99": 3}}
    answer = client.chat.completions.create(model="target", messages=HELLO, **settings, extra_body={"repetition_penalty": 1.3})
    params = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {99: 3.0}, "repetition_penalty": 1.3}
    assert answer.choices[0].message.content == expected(**params)


def test_logprobs(client):
    answer = client.chat.completions.create(model="target", messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=8)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert [entry.token] == [top.token for top in entry.top_logprobs[:1]]  # greedy: the likeliest is the chosen one
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob >= entry.top_logprobs[2].logprob
        assert bytes(entry.bytes).decode() == entry.token
    chunks = list(client.chat.completions.create(model="target", messages=HELLO, logprobs=True, max_tokens=8, stream=True))
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [(entry.token, entry.logprob) for entry in streamed] == [(entry.token, entry.logprob) for entry in content]
    assert not streamed[0].top_logprobs


def test_completions(client):
    llm = speaker(Mode.OFF)
    answer = client.completions.create(model="target", prompt="abc", max_tokens=9, logprobs=2)
    assert answer.choices[0].text == llm.generate("abc", SamplingParams(max_tokens=9)).text
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset == list(range(9))
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    by_ids = client.completions.create(model="target", prompt=llm.vocabulary.tokenize("abc", special=True, bos=True), max_tokens=9)
    streamed = client.completions.create(model="target", prompt=["abc"], max_tokens=9, stream=True)
    assert by_ids.choices[0].text == answer.choices[0].text == "".join(chunk.choices[0].text for chunk in streamed)


def test_a_json_schema_is_followed(client):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    texts = set()
    for mode in ("off", "serial"):
        answer = client.chat.completions.create(
            model="target", messages=HELLO, max_tokens=200, response_format=format, extra_body={"duo": {"mode": mode}}
        )
        texts.add(answer.choices[0].message.content)
        assert answer.choices[0].finish_reason == "stop"
    assert len(texts) == 1
    person = json.loads(texts.pop())
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_a_json_object(client):
    pytest.importorskip("llguidance")
    answer = client.chat.completions.create(
        model="target", messages=HELLO, max_tokens=400, response_format={"type": "json_object"}, logit_bias={"127": 30}
    )  # 127: the brace that closes, so that the object ends some time
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["target"]
    assert client.models.retrieve("target").id == "target"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("fields", "error", "param", "word"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model", "gpt-9"),
        ({"messages": []}, openai.BadRequestError, "messages", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, openai.BadRequestError, "messages", "context"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "temperature"),
        ({"n": 2}, openai.BadRequestError, "n", "n is not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools", "tools"),
        ({"logit_bias": {"9999": 1}}, openai.BadRequestError, "logit_bias", "9999"),
        ({"extra_body": {"duo": {"mode": "duo"}}}, openai.BadRequestError, "duo.mode", "serial"),
        ({"extra_body": {"duo": {"colour": 1}}}, openai.BadRequestError, "duo.colour", "colour"),
        ({"extra_body": {"best_of": 3}}, openai.BadRequestError, "best_of", "best_of"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs", "logprobs"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options", "stream"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            openai.BadRequestError,
            "response_format",
            "not",
        ),
    ],
)
def test_errors_say_what_is_wrong(client, fields, error, param, word):
    if "response_format" in fields:
        pytest.importorskip("llguidance")
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "target", "messages": HELLO, **fields})
    assert caught.value.param == param
    assert word in caught.value.message


def test_a_prompt_beyond_the_context_has_its_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="target", prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_leaves_stops_its_answer():
    with (
        live(lambda: speaker(delay=0.01, end=-100.0)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        stream = client.chat.completions.create(model="target", messages=HELLO, stream=True, max_tokens=400)
        next(stream)
        assert server.engines.running == 1
        stream.close()
        eventually(lambda: server.engines.running == 0)
        target = server.engines.llm.target
        assert target.passes < 300  # 400 tokens would take nearly as many


def test_an_error_in_the_middle_is_one_event():
    with live(lambda: speaker(end=-100.0, fails_at=5)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="the engine failed") as caught:
                list(client.chat.completions.create(model="target", messages=HELLO, stream=True))
            assert "secret" not in str(caught.value)
            assert client.chat.completions.create(model="target", messages=HELLO).choices[0].message.content  # it goes on
        server.engines.llm.target.passes = 0
        events = server.events("/v1/chat/completions", {"messages": HELLO})
        assert [list(json.loads(event)) == ["error"] for event in events] == [False] * (len(events) - 1) + [True]
        server.engines.llm.target.passes = 4
        assert server.chat("hello")[0] == 500
