//! Results of a notebook's cells.

use super::*;

/// Weights, and one result of 64 MiB per cell; `file` names the cells.
fn notebook(cells: u32, phase: Phase, file: impl Fn(u32) -> String) -> Made {
    let mut made = with_weights(0);
    for number in 0..cells {
        let frames = [
            frame(&file(number), 1, "<module>"),
            frame("/venv/lib/python3.12/site-packages/IPython/core/run.py", 3, "run_code"),
            frame("/venv/lib/python3.12/site-packages/ipykernel_launcher.py", 18, "<module>"),
        ];
        let site = made.site(&frames, "", phase);
        made.block(site, 0, 64 * MIB);
    }
    made.refused(64 * MIB, 0, SiteId::NONE);
    made
}

fn of_jupyter(number: u32) -> String {
    format!("/tmp/ipykernel_4242/{}.py", 1_000_000 + number)
}

#[test]
fn results_of_many_cells_that_live_on_are_told_of_with_a_cell() {
    let (cause, first) = notebook(40, Phase::Unknown, of_jupyter).first();
    assert_eq!(cause, Cause::Collected);
    assert!(first.starts_with("Results of 40 cells of a notebook live on, the most of 10000"));
    assert!(first.ends_with(": 2.5 GiB of the 3.5 GiB live (71%)"), "{first}");
    let ipython = notebook(40, Phase::Unknown, |number| format!("<ipython-input-{number}-a1b2>"));
    assert!(ipython.first().1.contains("<ipython-input-"));
    let colab = notebook(40, Phase::Unknown, |number| format!("/tmp/ipython-input-{number}-9.py"));
    assert_eq!(colab.first().0, Cause::Collected);
}

#[test]
fn what_few_cells_made_or_an_optimiser_or_no_cell_is_accused_of_nothing() {
    let full = |made: Made| assert_eq!(made.first().0, Cause::Full);
    full(notebook(11, Phase::Unknown, of_jupyter));
    full(notebook(40, Phase::Optimizer, of_jupyter));
    // The same cell again and again.
    full(notebook(40, Phase::Unknown, |_| of_jupyter(0)));
    full(notebook(40, Phase::Unknown, |number| format!("/home/me/{number}.py")));
}
