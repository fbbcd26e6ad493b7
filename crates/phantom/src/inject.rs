//! Faults on request: the n-th call fails with a chosen code.

use crate::calls::CallKind;

/// A fault to inject, armed by [`crate::Gpu::inject`], which also starts the count of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The kind of call that fails; `None`: every kind.
    pub kind: Option<CallKind>,
    /// The call that fails; 1 is the next.
    pub nth: u64,
    /// The `CUresult` that it returns. A sticky code (device lost, see
    /// [`crate::error::code::is_sticky`]) fails every later call too, whatever its kind.
    pub code: u32,
    /// True: every later call of the kind fails too, until [`crate::Gpu::clear_injections`].
    pub from_then_on: bool,
}

/// The armed faults.
#[derive(Debug, Default)]
pub(crate) struct Injections {
    armed: Vec<(Injection, u64)>,
}

impl Injections {
    pub(crate) fn arm(&mut self, injection: Injection) {
        self.armed.push((injection, 0));
    }

    pub(crate) fn clear(&mut self) {
        self.armed.clear();
    }

    /// Counts a call of `kind`; returns the code of an injected failure.
    pub(crate) fn strike(&mut self, kind: CallKind) -> Option<u32> {
        let mut code = None;
        self.armed.retain_mut(|(injection, seen)| {
            if injection.kind.is_some_and(|k| k != kind) {
                return true;
            }
            *seen += 1;
            let hit = *seen == injection.nth || (injection.from_then_on && *seen > injection.nth);
            if hit && code.is_none() {
                code = Some(injection.code);
            }
            injection.from_then_on || *seen < injection.nth
        });
        code
    }
}
