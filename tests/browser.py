"""A headless Chromium: what a script sees in a page once it is drawn."""

import re
import shutil
import subprocess
from html import unescape

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
HEAD = """<script>
const errors = []
addEventListener("error", event => errors.push(event.message))
addEventListener("unhandledrejection", event => errors.push(String(event.reason)))
for (const kind of ["error", "warn"]) console[kind] = (...texts) => errors.push(texts.join(" "))
</script>"""
TAIL = """<script>addEventListener("load", () => setTimeout(() => {
  const out = document.createElement("pre")
  out.id = "seen"
  try { out.textContent = JSON.stringify([%s, errors]) } catch (error) { out.textContent = String(error) }
  document.body.append(out)
}, 1500))</script>"""


def seen(page, folder, look, width=1000):
    """What an expression gives in the page once it is drawn, and the errors up to then."""
    file = folder / "page.html"
    before, end, after = page.replace("<head>", f"<head>{HEAD}", 1).rpartition("</body>")  # scripts may hold others
    file.write_text(f"{before}{TAIL % look}{end}{after}")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'chrome'}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=6000", "--dump-dom", f"file://{file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (text,) = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    return unescape(text)
