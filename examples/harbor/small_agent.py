"""An agent in one file: it runs each command of the model and shows the output, until a reply has no command."""

import json
import os
import subprocess
import sys
import urllib.request

RULES = "Write one shell command in a block that begins with ```sh. When you are done, answer without a block."


def ask(messages):
    """Return the model's next message."""
    body = json.dumps({"model": "polyturn", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


messages = [{"role": "system", "content": RULES}, {"role": "user", "content": sys.argv[1]}]
while True:
    messages.append(ask(messages))
    _, begins, rest = messages[-1]["content"].partition("```sh\n")
    if not begins:
        break
    done = subprocess.run(["sh", "-c", rest.partition("```")[0]], capture_output=True, text=True)
    messages.append({"role": "user", "content": (done.stdout + done.stderr)[-2000:] or "(no output)"})
