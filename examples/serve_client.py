"""Ask a server for predictions, by nothing but the standard library: the Open Inference Protocol over HTTP.

    petal serve --demo                                               # in another terminal
    python examples/serve_client.py examples/digit.png
    python examples/serve_client.py --url http://localhost:8080 --model digits *.png
"""

import argparse
import base64
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def asked(url: str, request: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a request; what it refuses is said in its own words."""
    body = json.dumps(request).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{url} refuses: {error.read().decode()}")
    except urllib.error.URLError as error:
        sys.exit(f"{url} does not answer: {error.reason}. Start a server with `petal serve --demo`")


def main() -> None:
    """Images as they are on disk go out in one request; a line for each comes back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="+", type=Path, help="PNG or JPEG files")
    parser.add_argument("--url", default="http://localhost:8080")
    parser.add_argument("--model", default="digits")
    arguments = parser.parse_args()
    data = [base64.b64encode(path.read_bytes()).decode() for path in arguments.images]
    image = {"name": "input", "shape": [len(data)], "datatype": "BYTES", "data": data}
    image["parameters"] = {"content_type": "image"}
    answer = asked(f"{arguments.url}/v2/models/{arguments.model}/infer", {"inputs": [image]})
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    for number, path in enumerate(arguments.images):
        print(path, {name: values[number] for name, values in outputs.items() if len(values) == len(data)})


if __name__ == "__main__":
    main()
