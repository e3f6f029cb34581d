# SPDX-License-Identifier: Apache-2.0
"""A streamed chat with a running `make serve`, through OpenAI's client (pip install openai).

.venv/bin/python examples/openai_client.py [URL]     URL: default http://localhost:8000/v1
"""

import os
import sys

from openai import OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
    client = OpenAI(base_url=url, api_key=os.getenv("VLLM_API_KEY", "none needed"))
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three rivers in Europe."}],
        max_tokens=64,
        temperature=0.0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
