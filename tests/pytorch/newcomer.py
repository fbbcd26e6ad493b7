"""Somebody who tries Gruyère for the first time."""

import os
import pty
import subprocess
import sys

from conftest import COMMAND, PHANTOM, launched_environment, without_the_phantoms_line


class Newcomer:
    """A folder with a script, and a shell in it."""

    def __init__(self, folder, script):
        self.folder = folder
        (folder / "train.py").write_text(script)

    def environment(self, **settings):
        # Their records are their own.
        records = self.folder / "records"
        records.mkdir(exist_ok=True)
        return launched_environment(records, GRUYERE_PHANTOM=str(PHANTOM), **settings)

    def python(self, *words, stdin=None, **settings):
        ran = subprocess.run(
            [sys.executable, *words],
            env=self.environment(**settings),
            cwd=self.folder,
            capture_output=True,
            text=True,
            input=stdin,
        )
        ran.stderr = without_the_phantoms_line(ran.stderr)
        return ran

    def on_a_terminal(self, *words, **settings):
        """What stderr said where it is a terminal."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, *words],
            env=self.environment(**settings),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=theirs,
        )
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:
                break
            if not part:
                break
            said += part
        os.close(ours)
        assert process.wait() == 0, said
        return without_the_phantoms_line(said.decode().replace("\r\n", "\n"))

    def run(self, *words, **settings):
        """A command that finds the stand-in GPU by itself."""
        kept = self.environment(**settings)
        del kept["LD_PRELOAD"], kept["LD_LIBRARY_PATH"]
        return subprocess.run(
            list(map(str, words)), env=kept, cwd=self.folder, capture_output=True, text=True
        )

    def command(self, *words, **settings):
        return self.run(COMMAND, *words, **settings)
