"""Three of the programs of others' making (dryrun_programs/) that need no package of their own,
each under torch's own allocator and through Gruyère's door. The others are run by hand
(dryrun_programs/run)."""

import pytest

import framework_runs
from framework_runs import MODULE, PLAIN

pytestmark = pytest.mark.thorough

PROGRAMS = ["diffusers_unet", "compile_eager", "amp_scaler"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_others_runs_to_its_end_and_lives_in_the_same_memory(tmp_path, program):
    script = f"../dryrun_programs/{program}"
    torchs, ours = (
        framework_runs.run(tmp_path, script, launch=launch, through=through, answers=False)
        for launch, through in ((PLAIN, "torch"), (MODULE, "native"))
    )
    assert ours.live_peak == pytest.approx(torchs.live_peak, rel=0.02)
    if program == "diffusers_unet":
        unknown = torchs.books[0]["unknown_workspaces"]
        assert unknown == ours.books[0]["unknown_workspaces"]
        assert unknown["cudnnConvolutionForward"] > 0
