# SPDX-License-Identifier: Apache-2.0
"""What a running Nemotron Parse reads on a page, through OpenAI's client (pip install openai).

.venv/bin/vllm serve tests/models/nemotron_parse/checkpoint
.venv/bin/python examples/nemotron_parse_client.py [URL] [IMAGE]     URL: default http://localhost:8000/v1
"""

import base64
import os
import sys
from pathlib import Path

from openai import OpenAI

TASK = "</s><s><predict_bbox><predict_classes><output_markdown>"


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
    image = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "page.png"
    client = OpenAI(base_url=url, api_key=os.getenv("VLLM_API_KEY", "none needed"))
    data = base64.b64encode(image.read_bytes()).decode()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                    {"type": "text", "text": TASK},
                ],
            }
        ],
        temperature=0.0,
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
