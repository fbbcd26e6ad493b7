//! The phase of a program that uses torch, from its frames.
#![deny(unsafe_code)]

use super::interpreter::Frame;
use crate::record::sites::Phase;

/// Whether a frame is torch's way from a module's call to its `forward`: two or three a module,
/// which add nothing to the module's path.
pub(super) fn is_plumbing(frame: &Frame) -> bool {
    frame.file.ends_with("torch/nn/modules/module.py") && frame.function.contains("_call_impl")
}

/// Whether a frame is torch's way into its engine, which calls a node that runs on the same thread.
pub(super) fn is_engine(frame: &Frame) -> bool {
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
    fn activations_that_are_computed_again_are_the_backwards() {
        assert_eq!(phase_of(&[SCRIPT, CALL, BACKWARD, SCRIPT]), Phase::Backward);
    }

    #[test]
    fn a_file_of_the_programs_that_is_named_like_one_of_torchs_says_nothing() {
        assert_eq!(phase_of(&[("/home/me/optim/adam.py", "step")]), Phase::Unknown);
    }
}
