"""A thousand CUDA graphs of torch's, each with a pool of its own, in little address space
(programs/many_graphs.py checks the books as it goes)."""

TIB = 1 << 40


def test_a_thousand_graphs_of_torch_live_in_eight_tebibytes_of_addresses(phantom):
    ran = phantom.run("many_graphs", 1000, allocator="hooked", PHANTOM_WINDOW="8TiB").check()
    assert ran.books["program"]["cuGraphLaunch"] == 1000
    # Each had memory of its own, and all of it came back.
    assert ran.report["held"] > 1000 * (4 << 20)
    assert ran.books["devices"][0]["physical"] == 0
    assert ran.books["address_space_peak"] < 8 * TIB


def test_graphs_that_run_out_of_addresses_are_told_so(phantom):
    """An eighth of that: the limit is felt, and torch's own exception names it."""
    ran = phantom.run("many_graphs", 1000, allocator="hooked", PHANTOM_WINDOW="1TiB")
    assert ran.code == 1
    assert "OutOfMemoryError" in ran.err and "Address space ran out, not memory" in ran.err
    assert ran.books["misuse"] == []
