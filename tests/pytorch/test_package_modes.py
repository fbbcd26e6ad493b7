"""The Python package: modes, which there are no more, are accepted with what to write instead."""

import pytest

from package import PRELUDE, report

SAYS = report(
    door="_enable.door()[0]",
    enabled="gruyere.is_enabled()",
    live="gruyere.stats().live",
    backend="torch.cuda.get_allocator_backend()",
    variable="os.environ['GRUYERE_ENABLE']",
    conf="os.environ['GRUYERE_CONF']",
)


def ways(installed, mode, **settings):
    """Runs a program that asks for `mode` in each way there was."""
    for way in ("call", "variable", "launcher"):
        call = f"gruyere.enable(mode='{mode}')\n" if way == "call" else ""
        code = PRELUDE + "from gruyere import _enable\n" + call + "kept = tensor(3)\n" + SAYS
        installed.write("program.py", code)
        line = ["-m", "gruyere", "--mode", mode] if way == "launcher" else []
        chosen = {"GRUYERE_ENABLE": mode} if way == "variable" else {}
        yield way, installed.python(*line, "program.py", **settings, **chosen)


def test_behind_takes_the_native_door_and_says_what_to_write_instead(installed):
    for way, ran in ways(installed, "behind"):
        said = dict(ran.report)
        assert said.pop("live") == 3 << 20, way
        assert said == {
            "door": "native", "enabled": True, "backend": "gruyere", "variable": "1",
            "conf": "door:native",
        }, way  # fmt: skip
        (line,) = ran.warnings()
        assert "behind" in line and "door:native" in line, way


def test_behind_leaves_a_door_that_was_chosen(installed):
    for way, ran in ways(installed, "behind", GRUYERE_CONF="door:pluggable"):
        assert (ran.report["door"], ran.report["conf"]) == ("pluggable", "door:pluggable"), way
        assert len(ran.warnings()) == 1, way


def test_direct_changes_nothing_but_that_it_is_said_to_be_needless(installed):
    for way, ran in ways(installed, "direct"):
        assert (ran.report["door"], ran.report["conf"]) == ("native", ""), way
        (line,) = ran.warnings()
        assert "direct" in line and "leave it out" in line, way


@pytest.mark.parametrize("variable", ["beside", "2"])
def test_a_variable_that_was_never_known_stops_the_program_with_what_to_say(installed, variable):
    ran = installed.code("import torch", GRUYERE_ENABLE=variable)
    assert ran.code == 1 and f"GRUYERE_ENABLE={variable}: say 1, or 0" in ran.err
