//! Offsets of a thread's frames in CPython, in bytes, by version.
//!
//! They are fixed for a minor version, from its first release on. These were read from the headers
//! of 3.9.18, 3.10.13, 3.11.7, 3.12.1 and 3.13.0, and are checked against the interpreter's own
//! functions before use (`super::interpreter`).

/// The offsets of a version of CPython.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// The way from a thread's state to the innermost frame that is the thread's own.
    pub innermost: Innermost,
    /// In a frame: its caller.
    pub back: usize,
    /// In a frame: its code object.
    pub code: usize,
    /// In a frame: its progress.
    pub place: Place,
    /// Marks frames that belong to no function, or have not begun yet.
    pub entry: Option<Entry>,
    /// In a frame: its local variables, the arguments first.
    pub locals: usize,
    /// In a code object: its file, its name (qualified from 3.11 on) and its first line.
    pub file: usize,
    pub name: usize,
    pub first_line: usize,
    /// In a code object: its identity.
    pub identity: Identity,
}

/// The way from a thread's state to its innermost frame, with the proof that the frame's run is on
/// the calling thread. A state may run on another thread meanwhile: it is read once, and believed
/// only where the calling thread's stack agrees ([`super::stack`]).
#[derive(Clone, Copy, Debug)]
pub(super) enum Innermost {
    /// 3.9: the state has the frame at this offset. The only proof of its thread is that the loop,
    /// which has its frame in a variable, keeps it on the stack.
    Kept(usize),
    /// 3.10: the state has the frame at `frame`, and at `run` a structure on the loop's stack. A
    /// frame whose run is not over has 0 at `state`.
    Beside { frame: usize, run: usize, state: usize },
    /// 3.11 and 3.12: the state has, at the first offset, a structure on the loop's stack; that has
    /// the frame at the second.
    Through(usize, usize),
    /// 3.13: the state has the frame at `frame`; at `status` the bits `active` are set while some
    /// thread runs it. The loop has a frame of its own on the stack, below those that it runs.
    Entered { frame: usize, status: usize, active: u32 },
}

/// Distinguishes a code object from an earlier one at the same address.
#[derive(Clone, Copy, Debug)]
pub(super) enum Identity {
    /// The object has a number that no other has had.
    Number(usize),
    /// It has none: the contents of its file's name, its name and its table of lines identify it.
    /// The first offset is that of the table, the second that of a plain string's characters.
    Content(usize, usize),
}

/// The marks that Python's own functions use (`_PyFrame_IsIncomplete`).
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// In a frame: its owner.
    pub owner: usize,
    /// The owner of frames by which C enters Python; an unused value where there are none.
    pub of_c: u8,
    /// In a code object: the first instruction that a tracer would see. Before it, only the frame
    /// of a generator counts.
    pub first: usize,
}

/// The owner of a generator's frame.
pub(super) const GENERATOR: u8 = 1;

/// A frame's progress.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// A number in the frame at this offset, in units of so many bytes of bytecode.
    Number(usize, i32),
    /// A pointer in the frame at the first offset, into the bytecode, which begins at the second in
    /// the code object.
    Pointer(usize, usize),
}

const V9: Layout = Layout {
    innermost: Innermost::Kept(24),
    back: 24,
    code: 32,
    place: Place::Number(104, 1),
    entry: None,
    locals: 360,
    file: 104,
    name: 112,
    first_line: 40,
    identity: Identity::Content(120, 48),
};

const V10: Layout = Layout {
    innermost: Innermost::Beside { frame: 24, run: 48, state: 108 },
    place: Place::Number(96, 2),
    locals: 352,
    ..V9
};

const V11: Layout = Layout {
    innermost: Innermost::Through(56, 8),
    back: 48,
    code: 32,
    place: Place::Pointer(56, 184),
    entry: Some(Entry { owner: 69, of_c: u8::MAX, first: 168 }),
    locals: 72,
    file: 112,
    name: 128,
    first_line: 72,
    identity: Identity::Content(136, 48),
};

const V12: Layout = Layout {
    innermost: Innermost::Through(56, 0),
    back: 8,
    code: 0,
    place: Place::Pointer(56, 192),
    entry: Some(Entry { owner: 70, of_c: 3, first: 176 }),
    first_line: 68,
    identity: Identity::Number(92),
    ..V11
};

const V13: Layout = Layout {
    innermost: Innermost::Entered { frame: 72, status: 32, active: 1 << 4 },
    place: Place::Pointer(56, 200),
    entry: Some(Entry { owner: 70, of_c: 3, first: 184 }),
    ..V12
};

/// The layout of the interpreter whose `Py_GetVersion` returns `version`; `None`: it is not known,
/// or the build's threads share no lock.
pub(super) fn of(version: &str) -> Option<&'static Layout> {
    if version.contains("free-threading") {
        return None;
    }
    let mut numbers = version.split('.');
    match (numbers.next(), numbers.next()) {
        (Some("3"), Some("9")) => Some(&V9),
        (Some("3"), Some("10")) => Some(&V10),
        (Some("3"), Some("11")) => Some(&V11),
        (Some("3"), Some("12")) => Some(&V12),
        (Some("3"), Some("13")) => Some(&V13),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_that_was_not_looked_at_has_no_layout() {
        assert!(of("3.9.18 (main, Nov 20 2026, 10:00:00) \n[GCC 12.2.0]").is_some());
        assert!(of("3.13.0 (main) [Clang 18]").is_some());
        for version in ["3.8.18 (main)", "3.14.0 (main)", "3.1.4", "2.7.18", "4.9.0", "", "3"] {
            assert!(of(version).is_none(), "{version}");
        }
    }

    #[test]
    fn a_build_without_the_lock_has_no_layout() {
        assert!(of("3.13.0 experimental free-threading build (main) [GCC 12.2.0]").is_none());
    }
}
