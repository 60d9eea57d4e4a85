"""Pictures of the live page of `petal serve --demo`, while corrupted digits come in: docs/guides/images/serve-*.png.

    python tools/make_serve_screenshots.py [FOLDER]

FOLDER keeps the demo's network between runs. Needs a browser (Debian's chromium) and takes about two minutes.
"""

import http.client
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

import petal
from petal.bench.load import binary_requests

IMAGES = Path(__file__).parents[1] / "docs" / "guides" / "images"
VIEWS = (("page", 1280, 900, "light"), ("dark", 1280, 900, "dark"), ("phone", 390, 844, "light"))


def stream(port: int, stopped: threading.Event) -> None:
    """Digits through the 15 corruptions, a few at a time, over and over."""
    data = petal.data.digits("test")
    while not stopped.is_set():
        for batch in petal.streams.continual(data, petal.CORRUPTIONS, severity=5, batch_size=4, images=120):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            for number in range(len(batch.x)):
                body, headers = binary_requests(batch.x[number : number + 1].numpy(), True)(number)
                connection.request("POST", "/v2/models/digits/infer", body, headers)
                connection.getresponse().read()
            connection.close()
            if stopped.is_set():
                return


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    for name in ("serve.json", "audit.jsonl"):
        (folder / name).unlink(missing_ok=True)
    for old in (*folder.glob("checkpoint-*"), *folder.glob("versions/*")):
        old.unlink()
    ports = ["--http-port", "0", "--grpc-port", "0", "--admin-port", "0"]
    command = [sys.executable, "-c", "from petal.cli import main; main()", "serve", "--demo", "-q", "--folder", str(folder)]
    process = subprocess.Popen([*command, *ports, "--snapshot-every", "150"])
    stopped = threading.Event()
    try:
        while not (folder / "serve.json").exists():
            time.sleep(0.2)
        at = json.loads((folder / "serve.json").read_text())
        thread = threading.Thread(target=stream, args=(at["http_port"], stopped))
        thread.start()
        token = Path(at["token_file"]).read_text().strip()
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            time.sleep(70)
            for name, width, height, scheme in VIEWS:
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(f"http://127.0.0.1:{at['admin_port']}/")
                page.fill("#token", token)
                page.keyboard.press("Enter")
                page.wait_for_selector("#images li")
                page.wait_for_timeout(3000)
                page.screenshot(path=IMAGES / f"serve-{name}.png", full_page=True)
            browser.close()
    finally:
        stopped.set()
        process.send_signal(signal.SIGTERM)
        process.wait(40)


if __name__ == "__main__":
    main()
