"""OpenAI's own client against `duo serve`.

pip install openai
python examples/openai_client.py [http://127.0.0.1:8000/v1]
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Why is the sky blue? Two sentences."}]

for chunk in client.chat.completions.create(model=model, messages=question, max_tokens=80, stream=True):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if timings := (chunk.model_extra or {}).get("timings"):
        guesses = f"{timings['draft_n_accepted']} of {timings['draft_n']} guesses were right"
        print(f"\n\n{timings['predicted_per_second']:.1f} tokens/s, {guesses}")

schema = {
    "type": "object",
    "properties": {"colour": {"type": "string"}, "wavelength_nm": {"type": "integer"}},
    "required": ["colour", "wavelength_nm"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Which colour is scattered most, and at which wavelength? Answer as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}},
    max_tokens=60,
)
print(answer.choices[0].message.content)
