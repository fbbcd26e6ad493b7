"""What a dry run says of steps that it has not run: that they may be larger, and how much they
would take."""

import json
from types import SimpleNamespace

import pytest

from gruyere._dryrun import amounts, live, page, sentences
from gruyere._dryrun.hooks import OPTIMIZER, Seen
from gruyere._dryrun.optimizers import Known
from gruyere._dryrun.partial import Partial
from gruyere._dryrun.scope import spread

MIB, GIB = 1 << 20, 1 << 30
WEIGHTS = 100


class Nowhere:
    def of_frames(self, frames):
        return "(libraries)"

    def inside(self, frames):
        return ""


class Trace:
    """A training of so many MiB of activations a step, as torch's history tells it."""

    def __init__(self, *activations):
        self.entries, self.mark, self.address = [], 0, 0
        self.seen = Seen(backwards=[], steps=[])
        weights = self.alloc(WEIGHTS)
        self.seen.sightings.append((1, weights["addr"], "weights", "w"))
        self.train(*activations)

    def train(self, *activations):
        for number in activations:
            self.mark += 2
            kept = self.alloc(number)
            self.mark += 1
            self.seen.backwards.append(self.mark)
            self.free(self.alloc(10))
            self.free(kept)
            # Torch's optimiser: temporaries of the weights' size, whatever the batch.
            self.free(self.alloc(WEIGHTS, OPTIMIZER))
            self.mark += 1
            self.seen.steps.append(self.mark)

    def try_in_vain(self, activations):
        self.mark += 2
        tried = self.alloc(activations)
        self.entries.append({**tried, "action": "oom"})
        self.free(tried)

    def alloc(self, mib, phase=0):
        self.address += GIB
        entry = {"action": "alloc", "addr": self.address, "size": mib * MIB, "frames": [],
                 "user_metadata": f"{self.mark} {phase} 0 0"}  # fmt: skip
        self.entries.append(entry)
        return entry

    def free(self, entry):
        whose = f"{self.mark} 0 0 0"
        for action in ("free_requested", "free_completed"):
            self.entries.append({**entry, "action": action, "user_metadata": whose})

    def steps(self, partial=()):
        return live.analyse(self.entries, self.seen, Nowhere(), partial)["steps"]


def report(*activations, asked=None, growth=None, fits=True, partial=()):
    """A dry run's report, as far as the words need it."""
    run = {"allocator": "gruyere", "fits": fits, "failed": False, "margin": GIB, "caught": 0}
    return {
        "trust": {"reasons": []},
        "gpus": [{"id": "t4-16", "runs": [run], "kernels": True}],
        "growth": growth,
        "rest": None,
        "verdict": {"max_bytes": None, "needs": None, "fits": fits},
        "program": {"steps": len(activations), "steps_asked": asked or len(activations)},
        "steps": Trace(*activations).steps(partial),
    }


def test_steps_are_told_by_their_activations_and_what_grows_apart_from_what_does_not():
    found = Trace(300, 900, 600).steps()
    assert found["activations"] == [number * MIB for number in (300, 900, 600)]
    # In the backward of the largest: the weights beside its activations and a temporary.
    assert found["fixed_bytes"] == WEIGHTS * MIB
    assert found["growing_bytes"] == (900 + 10) * MIB


def test_a_larger_batch_takes_what_the_line_says():
    found = Trace(300, 300).steps()
    for times in (2, 5):
        grown = Trace(300 * times, 300 * times)
        (most,) = {live.analyse(grown.entries, grown.seen, Nowhere())["peak"]["bytes"]}
        said = found["fixed_bytes"] + times * found["growing_bytes"]
        # The temporary of a fixed size counts as growing.
        assert most <= said <= 1.1 * most


def test_a_step_that_was_tried_in_vain_with_a_larger_batch_does_not_count():
    trace = Trace(300, 300)
    # In the first step, before the batch that fits: activations until there is no memory.
    weights, rest = trace.entries[0], trace.entries[1:]
    tried = [trace.alloc(2000), trace.alloc(500)]
    tried = [{**entry, "user_metadata": "1 0 0 0"} for entry in tried]
    refused = {**tried[0], "action": "oom"}
    freed = [{**entry, "action": "free_requested"} for entry in tried]
    entries = [weights, *tried, refused, *freed, *rest]
    found = live.analyse(entries, trace.seen, Nowhere())["steps"]
    assert found == Trace(300, 300).steps()


def test_a_search_for_the_largest_batch_is_told_by_what_came_after_its_last_attempt():
    trace = Trace(900, 900)
    trace.try_in_vain(2000)
    trace.train(400)
    trace.try_in_vain(1000)
    trace.train(300, 300, 300)
    found = live.analyse(trace.entries, trace.seen, Nowhere(), (1, 2, 5), in_vain=3)
    assert found["steps"]["activations"] == [300 * MIB] * 3
    assert found["steps"]["partial"] == [2]
    peak = found["peak"]
    assert (peak["bytes"], peak["step"]) == ((WEIGHTS + 310) * MIB, 1)
    assert peak["refused"] == 2
    # A refusal after the steps makes none of them vain.
    trace.try_in_vain(1500)
    later = live.analyse(trace.entries, trace.seen, Nowhere(), (), in_vain=3)["peak"]
    assert (later["bytes"], later["refused"]) == ((WEIGHTS + 1500) * MIB, 2)


def test_steps_whose_batch_is_fetched_one_ahead_are_alike():
    trace = Trace()
    fetched = trace.alloc(1000)
    for _ in range(4):
        trace.mark += 2
        batch, fetched = fetched, trace.alloc(1000)
        kept = trace.alloc(300)
        trace.mark += 1
        trace.seen.backwards.append(trace.mark)
        trace.free(kept)
        trace.mark += 1
        trace.seen.steps.append(trace.mark)
        trace.free(batch)
    found = {**report(300, 300, 300, 300), "steps": trace.steps()}
    # The first batch lives for a step, the others for two.
    assert found["steps"]["activations"][0] > found["steps"]["activations"][1]
    assert sentences.verdict(found).count("differ") == 0
    assert any("Steps are alike" in line for line in sentences.scope(found))


@pytest.mark.parametrize(
    ("activations", "differ"),
    [((300, 300, 300), False), ((300, 310, 305), False), ((300, 900, 600), True)],
)
def test_it_fits_these_steps_and_is_told_what_more_take_where_they_differ(activations, differ):
    found = report(*activations)
    said = sentences.verdict(found)
    assert said.startswith("It fits these 3 steps on t4-16: 1.00 GiB to spare")
    scope = " ".join(sentences.scope(found))
    assert "--steps" in scope and "n times as large" in scope
    if differ:
        assert "But steps differ: their activations take 300 MiB to 900 MiB." in said
        assert "n times the largest, about 100 MiB + n x 910 MiB live. --steps" in said
        assert "300 MiB to 900 MiB" in scope
    else:
        assert "Steps are alike" in scope and "differ" not in said


@pytest.mark.parametrize(
    ("activations", "partial", "differ"),
    [
        # A captured graph is replayed.
        ((300, 300, 2), [3], False),
        ((300, 600, 2), [3], True),
        # Two optimisers take turns, and the first step ends at the first of them.
        ((200, 300, 300), [1], False),
        ((200, 300, 600), [1], True),
        # A part that needs more than a whole step is a larger step.
        ((300, 300, 600), [3], True),
        # Graphs captured before the first step, and all replay them.
        ((300, 300, 600), [1, 2, 3], True),
    ],
)
def test_a_step_that_is_only_a_part_of_one_does_not_differ_for_being_less(
    activations, partial, differ
):
    found = report(*activations, partial=partial)
    assert ("But steps differ" in sentences.verdict(found)) == differ
    alike = "Steps are alike: the activations of each that is whole take 300 MiB."
    assert (alike in sentences.scope(found)) == (not differ)


class Optimizer:
    """Stands for one of torch's."""


def parts_of(*steps, made_at_once=True):
    """The steps that are only a part, if the optimisers of these numbers step, the last of each
    step being the one that ends it."""
    optimizers = {name: Optimizer() for step in steps for name in step}
    known = {name: Known(optimizer, "train.py:1") for name, optimizer in optimizers.items()}
    partial, gone = Partial(), set()
    for step in steps:
        for name in step:
            partial.stepped(optimizers[name])
            gone.add(name)
        partial.step_is_over([known[name] for name in known if name not in gone and made_at_once])
    return partial.found()


def test_the_first_step_is_a_part_where_another_optimiser_steps_before_the_next_ends():
    assert parts_of("d", "gd", "gd") == [1]
    # One, several in each step, one for many of another's, and one made after the first step.
    assert parts_of("d", "d", "d") == []
    assert parts_of("gd", "gd") == []
    assert parts_of("d", "d", "gd") == []
    assert parts_of("d", "gd", "gd", made_at_once=False) == []


def test_a_step_that_replays_graphs_and_captures_none_is_a_part():
    class Graph:
        def capture_begin(self):
            pass

        def replay(self, *more):
            return more

    partial = Partial()
    partial.watch(SimpleNamespace(cuda=SimpleNamespace(CUDAGraph=Graph)))
    graph = Graph()
    # It warms up, captures (and then replays to have results), replays.
    partial.step_is_over([])
    graph.capture_begin()
    assert graph.replay(7) == (7,)
    partial.step_is_over([])
    graph.replay()
    partial.step_is_over([])
    # What comes after the steps is none.
    graph.replay()
    assert partial.found() == [3]


def test_what_ended_by_itself_has_no_other_steps():
    found = report(300, 900, asked=3)
    fits = "It fits the 2 steps that it made (3 were asked) on t4-16"
    assert spread(found) is None and sentences.verdict(found).startswith(fits)
    assert not any("The dry run covers" in said for said in sentences.scope(found))


def test_what_steps_leave_behind_is_no_difference_between_them():
    growth = {"bytes_a_step": 50 * MIB, "line": "train.py:3"}
    assert spread(report(300, 350, 400, growth=growth)) is None
    assert spread(report(300, 350, 900, growth=growth)) is not None


@pytest.mark.parametrize(("left", "steps"), [(MIB, "1,024"), (64 << 10, "16,384"), (8 << 10, "")])
def test_what_steps_leave_behind_is_said_where_it_fills_the_gpu_some_day(left, steps):
    said = sentences.verdict(report(300, 300, growth={"bytes_a_step": left, "line": "train.py:3"}))
    assert ("But each step leaves" in said) == bool(steps)
    assert f"t4-16 is full after {steps} more steps." in said or not steps


def test_where_torch_does_not_say_which_step_asks_nothing_is_made_up():
    trace = Trace(300, 900)
    entries = [{**entry, "user_metadata": ""} for entry in trace.entries]
    assert live.analyse(entries, trace.seen, Nowhere())["steps"] is None
    found = {**report(300, 900), "steps": None}
    assert sentences.verdict(found).startswith("It fits these 2 steps on t4-16")
    assert len(sentences.scope(found)) == 1


@pytest.mark.parametrize(
    ("number", "said"),
    [(123 * MIB, "120 MiB"), (9.96 * GIB, "10 GiB"), (2.94 * GIB, "2.9 GiB"),
     (1023 * MIB, "1000 MiB"), (347 * GIB, "350 GiB"), (4 << 10, "4 KiB")],
)  # fmt: skip
def test_no_more_digits_are_told_than_are_known(number, said):
    assert amounts.about(number) == said


def test_the_page_has_the_same_words():
    whole = {
        **report(300, 900, 600), "peak": None, "machine": {}, "timeline": None,
        "program": {"steps": 3, "steps_asked": 3, "command": "train.py", "left_out": []},
    }  # fmt: skip
    drawn = page.draw(whole)
    for said in sentences.scope(whole):
        assert json.dumps(said)[1:-1] in drawn


class Loop(Trace):
    """A training of five MiB a step, that appends a block of 64 MiB to a queue of so many blocks:
    before the optimiser's step, or after it."""

    def __init__(self, steps, length, is_after):
        super().__init__()
        queue = []

        def append():
            queue.append(self.alloc(64))
            if len(queue) > length:
                self.free(queue.pop(0))

        for number in range(steps):
            self.mark += 2
            kept = self.alloc(5)
            if not is_after:
                append()
            self.mark += 1
            self.seen.backwards.append(self.mark)
            self.free(kept)
            self.mark += 1
            self.seen.steps.append(self.mark)
            if is_after and number < steps - 1:
                self.mark += 1
                append()

    def growth(self):
        return live.analyse(self.entries, self.seen, Nowhere())["growth"]


@pytest.mark.parametrize("is_after", [False, True])
def test_what_each_step_leaves_behind_is_told_also_if_made_after_the_optimisers_step(is_after):
    found = Loop(3, 99, is_after).growth()
    assert found["bytes_a_step"] == 64 * MIB
    # After the step there are two blocks at most, which a queue may hold: more steps tell.
    assert found["unsure"] == is_after
    assert Loop(5, 99, is_after).growth()["bytes_a_step"] == 64 * MIB


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_queue_is_no_leak(is_after, length):
    assert Loop(5, length, is_after).growth() is None
    if length < 2:
        assert Loop(3, length, is_after).growth() is None
