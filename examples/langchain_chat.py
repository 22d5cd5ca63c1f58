"""LangChain against `duo serve`.

pip install langchain-openai
python examples/langchain_chat.py [http://127.0.0.1:8000/v1]
"""

import sys

from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
chat = ChatOpenAI(base_url=url, api_key="none", model="smollm2-135m", temperature=0, max_tokens=60)

for piece in chat.stream("Name three rivers."):
    print(piece.text, end="", flush=True)
print()
