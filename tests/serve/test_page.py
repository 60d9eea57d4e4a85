"""The live page in a real browser: the one that the system has, driven by playwright."""

import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serve.running import Running

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser here: apt-get install chromium")

SECONDS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield one
        one.close()


@pytest.fixture
def stream(server: Running, x: NDArray[np.float32]) -> Iterator[None]:
    """Requests, one after the other, for as long as a test runs."""
    stopped = threading.Event()

    def send() -> None:
        while not stopped.is_set():
            server.infer(x[:12])
            time.sleep(0.05)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    stopped.set()
    thread.join()


def connect(browser: Any, server: Running, **options: Any) -> Any:
    page = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options)).new_page()
    page.set_default_timeout(SECONDS)
    page.errors, at = [], f"http://127.0.0.1:{server.admin}/"
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda m: page.errors.append(m.text) if m.type == "error" and "401" not in m.text else None)
    page.on("request", lambda r: page.errors.append(r.url) if not r.url.startswith((at, "data:")) else None)
    page.goto(at)
    page.fill("#token", server.token)
    page.keyboard.press("Enter")
    page.wait_for_selector("#main:not([hidden])")
    return page


def wait(page: Any, condition: str) -> None:
    """Until a JavaScript expression holds. The page allows no evaluation of text from within, so it is asked from here."""
    end = time.monotonic() + SECONDS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


def shown(page: Any, name: str) -> int:
    return int(page.inner_text(f"#{name}"))


def test_a_wrong_token_opens_nothing(browser: Any, server: Running) -> None:
    page = browser.new_page()
    page.goto(f"http://127.0.0.1:{server.admin}/")
    page.fill("#token", "not the token at all")
    page.keyboard.press("Enter")
    wait(page, "document.getElementById('login-error').textContent !== ''")
    assert page.is_hidden("#main")
    assert page.is_visible("#login")
    page.close()


def test_numbers_move_while_a_stream_is_served(browser: Any, server: Running, stream: None) -> None:
    page = connect(browser, server)
    wait(page, "document.querySelectorAll('#images li').length > 0")
    first = shown(page, "version")
    wait(page, f"Number(document.getElementById('version').textContent) > {first}")
    wait(page, "document.querySelectorAll('#charts path.line').length >= 4")
    before = page.get_attribute("#charts figure:first-child path.line", "d")
    wait(page, f"document.querySelector('#charts figure:first-child path.line').getAttribute('d') !== '{before}'")
    assert page.locator(".tile").count() == 12
    assert "–" not in page.locator(".tile").nth(1).inner_text()
    assert page.inner_text("#state") == "adapting"
    assert page.errors == []
    page.context.close()


def test_roll_back_and_freeze_by_keyboard_alone(browser: Any, server: Running) -> None:
    server.ask("POST", "/api/thaw")
    server.infer(np.zeros((4, 3, 32, 32), np.float32) + np.arange(32, dtype=np.float32) / 32)
    kept = server.ask("POST", "/api/snapshot")
    at_kept = server.digest()
    server.infer(np.zeros((4, 3, 32, 32), np.float32) + np.arange(32, dtype=np.float32) / 40)
    page = connect(browser, server)
    page.wait_for_selector(f'#versions [data-version="{kept["version"]}"]')
    wait(page, f"document.getElementById('version').textContent === '{server.digest()['version']}'")
    page.focus(f'#versions [data-version="{kept["version"]}"]')
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    assert server.digest() != at_kept, "Escape changes nothing"
    page.focus(f'#versions [data-version="{kept["version"]}"]')
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    wait(page, f"document.getElementById('version').textContent === '{kept['version']}'")
    assert server.digest() == at_kept
    page.focus("#freeze")
    page.keyboard.press("Space")
    wait(page, "document.getElementById('state').textContent === 'frozen'")
    assert server.ask("GET", "/api/status")["frozen"]
    wait(page, "document.getElementById('freeze').disabled && !document.getElementById('thaw').disabled")
    page.focus("#thaw")
    page.keyboard.press("Space")
    wait(page, "document.getElementById('state').textContent === 'adapting'")
    assert not server.ask("GET", "/api/status")["frozen"]
    assert page.errors == []
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_in_its_width(browser: Any, server: Running, stream: None, scheme: str) -> None:
    page = connect(browser, server, viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True)
    wait(page, "document.querySelectorAll('#images li').length > 0")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    boxes = [button.bounding_box() for button in page.query_selector_all(".buttons button, td button")]
    assert min(box["height"] for box in boxes) >= 32
    assert max(box["x"] + box["width"] for box in boxes) <= 360, "roll back is in reach"
    assert page.errors == []
    page.context.close()


def test_the_page_says_when_the_server_is_gone(browser: Any, server: Running) -> None:
    page = connect(browser, server)
    page.context.route("**/api/live*", lambda route: route.abort())
    wait(page, "document.getElementById('state').textContent === 'offline'")
    page.context.unroute("**/api/live*")
    wait(page, "document.getElementById('state').textContent !== 'offline'")
    page.context.close()
