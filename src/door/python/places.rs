//! What a site keeps of a stack, and the phase of a program that uses torch, from its frames.
#![deny(unsafe_code)]

use crate::record::sites::{Frame, Phase};

/// Whether a frame is torch's way from a module's call to its `forward`: two or three a module,
/// which add nothing to the module's path.
fn is_plumbing(frame: &Frame) -> bool {
    frame.file.ends_with("torch/nn/modules/module.py") && frame.function.contains("_call_impl")
}

/// Whether a frame is of the functions in Python by which torch serves an operator (`bmm` since
/// 2.15). They add nothing to the line that calls the operator; where a node of a backward does,
/// they are the only frames of autograd's thread.
fn is_operator(frame: &Frame) -> bool {
    frame.file.contains("/torch/_native/")
}

/// The frames of a stack that a site keeps, the innermost first, `most` at most: the innermost.
///
/// A library's function may call itself more often than that (`copy.deepcopy`, `Module._apply`).
/// Where none of these frames is the program's own, those from its innermost one on are kept in
/// place of the outer ones, up to half.
pub(super) fn kept(stack: &[Frame], most: usize) -> Vec<&Frame> {
    let is_kept = |frame: &&Frame| !is_plumbing(frame) && !is_operator(frame);
    let mut frames: Vec<&Frame> = stack.iter().filter(is_kept).collect();
    let own = frames.iter().position(|frame| frame.is_own());
    if let Some(own) = own.filter(|&own| own >= most) {
        let outer = (frames.len() - own).min(most / 2);
        frames.drain(most - outer..own);
    }
    frames.truncate(most);
    frames
}

/// Whether a node of a backward runs that no line of Python implements: on a thread of autograd's,
/// or on the one that called the engine.
pub(super) fn is_of_node(stack: &[Frame]) -> bool {
    stack.iter().find(|frame| !is_operator(frame)).is_none_or(is_engine)
}

/// Whether a frame is torch's way into its engine, which calls a node that runs on the same thread.
fn is_engine(frame: &Frame) -> bool {
    frame.file.ends_with("torch/autograd/graph.py") && frame.function == "_engine_run_backward"
}

/// The phase of a frame.
fn of(frame: &Frame) -> Phase {
    if is_plumbing(frame) {
        return Phase::Forward;
    }
    let Some((_, file)) = frame.file.rsplit_once("/torch/") else { return Phase::Unknown };
    // By the ends of paths: torch may be anywhere.
    match file {
        "_tensor.py" if frame.function.ends_with("backward") => Phase::Backward,
        "autograd/__init__.py" | "autograd/graph.py" | "autograd/function.py" => {
            match frame.function.as_str() {
                "backward" | "grad" | "_engine_run_backward" => Phase::Backward,
                "BackwardCFunction.apply" => Phase::Backward,
                _ => Phase::Unknown,
            }
        }
        "distributed/distributed_c10d.py" | "distributed/_functional_collectives.py" => {
            Phase::Collective
        }
        // Averages of a model's weights (EMA, SWA): copies, and no state of an optimiser.
        "optim/swa_utils.py" => Phase::Unknown,
        file if file.starts_with("optim/") => Phase::Optimizer,
        _ => Phase::Unknown,
    }
}

/// The phase of a stack (the innermost frame first): that of the innermost frame with a phase. A
/// forward pass inside a backward one (checkpointed activations, computed again) is the backward's.
pub(super) fn phase(stack: &[Frame]) -> Phase {
    let mut phases = stack.iter().map(of).filter(|phase| *phase != Phase::Unknown);
    match phases.next() {
        Some(Phase::Forward) if phases.any(|phase| phase == Phase::Backward) => Phase::Backward,
        Some(phase) => phase,
        None => Phase::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame((file, function): &(&str, &str)) -> Frame {
        Frame { file: (*file).into(), function: (*function).into(), line: 1 }
    }

    fn phase_of(stack: &[(&str, &str)]) -> Phase {
        phase(&stack.iter().map(frame).collect::<Vec<_>>())
    }

    const SCRIPT: (&str, &str) = ("/home/me/train.py", "main");
    const CALL: (&str, &str) = ("/v/site-packages/torch/nn/modules/module.py", "Module._call_impl");
    const STEP: (&str, &str) =
        ("/v/site-packages/torch/optim/optimizer.py", "Optimizer.profile_hook_step.wrapper");
    const BACKWARD: (&str, &str) = ("/v/site-packages/torch/autograd/__init__.py", "backward");
    const REDUCE: (&str, &str) =
        ("/v/site-packages/torch/distributed/distributed_c10d.py", "all_reduce");

    /// The lines that are kept, ten at most, of a stack of `library` frames of a library, from line
    /// 100 on, that `own` frames of the program called, from line 1 on.
    fn lines_kept(library: u32, own: u32) -> Vec<u32> {
        let of = |file: &str, line| Frame { file: file.into(), function: "f".into(), line };
        let copying = (100..100 + library).map(|line| of("/usr/lib/python3.12/copy.py", line));
        let stack: Vec<Frame> =
            copying.chain((1..=own).map(|line| of("/home/me/train.py", line))).collect();
        kept(&stack, 10).into_iter().map(|frame| frame.line).collect()
    }

    #[test]
    fn the_innermost_frames_are_kept_if_one_is_the_programs_or_none_is_anywhere() {
        assert_eq!(lines_kept(2, 3), [100, 101, 1, 2, 3]);
        assert_eq!(lines_kept(9, 3), [100, 101, 102, 103, 104, 105, 106, 107, 108, 1]);
        assert_eq!(lines_kept(12, 0), (100..110).collect::<Vec<_>>());
    }

    #[test]
    fn the_programs_frames_are_kept_that_called_a_library_which_calls_itself_too_often() {
        assert_eq!(lines_kept(10, 1), [100, 101, 102, 103, 104, 105, 106, 107, 108, 1]);
        assert_eq!(lines_kept(200, 2), [100, 101, 102, 103, 104, 105, 106, 107, 1, 2]);
        assert_eq!(lines_kept(200, 50), [100, 101, 102, 103, 104, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn the_innermost_frame_that_says_a_phase_counts() {
        assert_eq!(phase_of(&[SCRIPT]), Phase::Unknown);
        assert_eq!(phase_of(&[SCRIPT, CALL, SCRIPT]), Phase::Forward);
        assert_eq!(phase_of(&[STEP, SCRIPT]), Phase::Optimizer);
        assert_eq!(phase_of(&[CALL, SCRIPT, STEP, SCRIPT]), Phase::Forward, "a closure's");
        assert_eq!(phase_of(&[BACKWARD, SCRIPT]), Phase::Backward);
        assert_eq!(phase_of(&[REDUCE, SCRIPT, CALL, SCRIPT]), Phase::Collective);
    }

    #[test]
    fn what_serves_an_operator_of_a_node_does_not_hide_the_node() {
        let of = |stack: &[(&str, &str)]| stack.iter().map(frame).collect::<Vec<_>>();
        let bmm = ("/v/site-packages/torch/_native/registry.py", "eager_router");
        let engine = ("/v/site-packages/torch/autograd/graph.py", "_engine_run_backward");
        for stack in [&[][..], &[engine, SCRIPT], &[bmm], &[bmm, bmm, engine, SCRIPT]] {
            assert!(is_of_node(&of(stack)), "{stack:?}");
        }
        for stack in [&[SCRIPT][..], &[bmm, SCRIPT, engine, SCRIPT], &[REDUCE, engine]] {
            assert!(!is_of_node(&of(stack)), "{stack:?}");
        }
        assert_eq!(kept(&of(&[bmm, SCRIPT]), 10), [&frame(&SCRIPT)]);
        assert!(kept(&of(&[bmm]), 10).is_empty());
    }

    #[test]
    fn activations_that_are_computed_again_are_the_backwards() {
        assert_eq!(phase_of(&[SCRIPT, CALL, BACKWARD, SCRIPT]), Phase::Backward);
    }

    #[test]
    fn averages_of_weights_are_no_states_of_an_optimiser() {
        let average = ("/v/site-packages/torch/optim/swa_utils.py", "AveragedModel.__init__");
        let copy = ("/usr/lib/python3.12/copy.py", "deepcopy");
        assert_eq!(phase_of(&[copy, average, SCRIPT]), Phase::Unknown);
        assert_eq!(phase_of(&[average, STEP, SCRIPT]), Phase::Optimizer, "a hook's");
    }

    #[test]
    fn a_file_of_the_programs_that_is_named_like_one_of_torchs_says_nothing() {
        assert_eq!(phase_of(&[("/home/me/optim/adam.py", "step")]), Phase::Unknown);
    }
}
