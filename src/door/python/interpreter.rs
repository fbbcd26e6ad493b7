//! The CPython of this process, and the frames of its threads.
//!
//! torch's operators release the interpreter's lock before they allocate: most requests come on a
//! thread that does not hold it, and must not wait for it. But a thread's frames change only while
//! it runs Python: during our call its frames and their code objects stand still, lock or not. So
//! they are read as a debugger reads them, by the [`Layout`] of the version: nothing counts
//! references, allocates, raises, or runs a collector or a finalizer. The only Python functions
//! called meanwhile read constant data: the characters of a string, the line of a place in a code
//! object.
//!
//! An embedder may hand a thread's state over to another thread during our call. The frames of such
//! a run would change while they are read, so only frames that began on this thread are read
//! ([`Innermost`]).
//!
//! The layout is verified: before its first use, on a thread that holds the lock, Python's own
//! functions must find the same frames ([`Interpreter::check`]).

use super::content;
use super::layout::{self, Entry, GENERATOR, Identity, Innermost, Layout, Place};
use super::stack;
use super::word::{mix, number, number_now, word, word_now};
use crate::record::sites::Frame;
use std::ffi::{CStr, c_char, c_int, c_void};

type Object = *mut c_void;
type Ask<T> = unsafe extern "C" fn() -> T;
type Of<T> = unsafe extern "C" fn(Object) -> T;
type OfAt<A, T> = unsafe extern "C" fn(Object, A) -> T;

/// Frames that are read: the innermost.
const MOST_FRAMES: usize = 256;
/// Frames passed on the way to the one by which C entered Python: a run of the loop has as many as
/// Python functions call each other.
const MOST_OF_A_RUN: usize = 1 << 14;
/// Characters read of a name.
const MOST_CHARACTERS: isize = 512;
/// Bytes of an instruction.
const INSTRUCTION: i32 = 2;
/// Offset of `ob_type` in every object, bytes.
const TYPE: usize = 8;
/// Offset in a type: the bytes of its objects; and those of `object`, where objects begin as in
/// usual builds.
const BASIC_SIZE: usize = 32;
const USUAL_SIZE: usize = 16;

/// Functions of Python's, those called without the lock first.
struct Functions {
    this_thread: Ask<Object>,
    is_finalizing: Ask<c_int>,
    line: OfAt<c_int, c_int>,
    length: Of<isize>,
    character: OfAt<isize, u32>,
    running: Ask<Object>,
    frame: Of<Object>,
    back: Of<Object>,
    code: Of<Object>,
    line_of_frame: Of<c_int>,
    drop: Of<()>,
    occurred: Ask<Object>,
    clear: Ask<()>,
}

/// The interpreter.
pub(super) struct Interpreter {
    functions: Functions,
    /// The address of `PyCode_Type`.
    code_type: usize,
    layout: &'static Layout,
}

/// A frame, reduced to the program's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    /// Its code object.
    pub code: usize,
    /// Progress in its bytecode, bytes.
    pub offset: i32,
}

/// A walk that reads no name: it only distinguishes one stack from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Walk {
    /// Of all frames, with the identities of their code objects.
    pub hash: u64,
    /// The number of frames.
    pub frames: usize,
    /// The first argument of the innermost call of the wanted code; 0: there is none.
    pub argument: usize,
}

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: dlsym reads a NUL-terminated string.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

impl Interpreter {
    /// Whether the process has one, of any version.
    pub(super) fn is_there() -> bool {
        symbol(c"Py_GetVersion").is_some()
    }

    /// The interpreter loaded in this process.
    ///
    /// # Errors
    /// Why its frames cannot be read, in words for the log; `None`: there is no interpreter.
    pub(super) fn find() -> Result<Self, Option<String>> {
        let version = symbol(c"Py_GetVersion").ok_or(None)?;
        // SAFETY: the symbol is CPython's function of that name, in this version as in all of them:
        // it returns a static text, initialised or not.
        let version = unsafe {
            let version = std::mem::transmute::<*mut c_void, Ask<*const c_char>>(version);
            CStr::from_ptr(version()).to_string_lossy().into_owned()
        };
        let short = version.split(" (").next().unwrap_or_default().to_owned();
        let layout = layout::of(&version)
            .ok_or_else(|| Some(format!("the frame layout of Python {short} is unknown")))?;
        let missing =
            |name: &CStr| Some(format!("Python {short} has no {}", name.to_string_lossy()));
        macro_rules! function {
            ($type:ty, $name:literal $(, $other:literal)?) => {
                // SAFETY: the symbol is CPython's function of that name, whose arguments are those
                // of the field that it goes to in all versions that have a layout.
                unsafe {
                    std::mem::transmute::<*mut c_void, $type>(
                        symbol($name)$(.or_else(|| symbol($other)))?
                            .ok_or_else(|| missing($name))?,
                    )
                }
            };
        }
        let functions = Functions {
            this_thread: function!(Ask<Object>, c"PyGILState_GetThisThreadState"),
            is_finalizing: function!(Ask<c_int>, c"Py_IsFinalizing", c"_Py_IsFinalizing"),
            line: function!(OfAt<c_int, c_int>, c"PyCode_Addr2Line"),
            length: function!(Of<isize>, c"PyUnicode_GetLength"),
            character: function!(OfAt<isize, u32>, c"PyUnicode_ReadChar"),
            running: function!(
                Ask<Object>,
                c"PyThreadState_GetUnchecked",
                c"_PyThreadState_UncheckedGet"
            ),
            frame: function!(Of<Object>, c"PyThreadState_GetFrame"),
            back: function!(Of<Object>, c"PyFrame_GetBack"),
            code: function!(Of<Object>, c"PyFrame_GetCode"),
            line_of_frame: function!(Of<c_int>, c"PyFrame_GetLineNumber"),
            drop: function!(Of<()>, c"Py_DecRef"),
            occurred: function!(Ask<Object>, c"PyErr_Occurred"),
            clear: function!(Ask<()>, c"PyErr_Clear"),
        };
        let type_of =
            |name| symbol(name).map(|address| address as usize).ok_or_else(|| missing(name));
        let (object, code_type) = (type_of(c"PyBaseObject_Type")?, type_of(c"PyCode_Type")?);
        // SAFETY: a type, which begins as every object of variable size does, and then has a name
        // and this number.
        if unsafe { word(object, BASIC_SIZE) } != USUAL_SIZE {
            return Err(Some(format!("this build of Python {short} has other object headers")));
        }
        Ok(Self { functions, code_type, layout })
    }

    /// Whether the calling thread holds the interpreter's lock. Up to 3.11 Python reports only
    /// which state runs, not on which thread: this thread's own frames are taken as proof.
    pub(super) fn holds_lock(&self) -> bool {
        let Some(state) = self.this_thread() else { return false };
        // SAFETY: this thread's state is there.
        self.runs(state) && unsafe { self.innermost(state) } != 0
    }

    /// Whether `state` runs: from 3.12 on, on this thread.
    #[inline]
    fn runs(&self, state: usize) -> bool {
        // SAFETY: reads what may be read without the lock.
        unsafe { (self.functions.running)() as usize == state }
    }

    /// The state of the calling thread; `None`: it runs no Python, or the interpreter ends.
    #[inline]
    fn this_thread(&self) -> Option<usize> {
        // SAFETY: both read what may be read without the lock.
        unsafe {
            if (self.functions.is_finalizing)() != 0 {
                return None;
            }
            let state = (self.functions.this_thread)() as usize;
            (state != 0).then_some(state)
        }
    }

    /// The innermost frame of `state` that began on the calling thread; 0: none, or not known. The
    /// state may change meanwhile.
    ///
    /// # Safety
    /// `state` is the calling thread's.
    #[inline(always)]
    unsafe fn innermost(&self, state: usize) -> usize {
        // SAFETY: the caller's promise; a frame is followed only as long as it is known to exist.
        unsafe {
            match self.layout.innermost {
                Innermost::Kept(frame) => {
                    let frame = word_now(state, frame);
                    if frame != 0 && stack::holds(frame) { frame } else { 0 }
                }
                Innermost::Beside { frame, run, state: is_over } => {
                    // The loop sets the run before the frame; at the end it marks the frame's run
                    // as over, then takes back the run, and then the frame.
                    let found = word_now(state, frame);
                    let is_there = found != 0
                        && stack::has(word_now(state, run))
                        && word_now(state, frame) == found;
                    if is_there && ((found + is_over) as *const i8).read() == 0 { found } else { 0 }
                }
                Innermost::Through(run, frame) => {
                    let run = word_now(state, run);
                    if stack::has(run) { word(run, frame) } else { 0 }
                }
                Innermost::Entered { frame, status, active } => {
                    self.entered(state, (frame, status, active))
                }
            }
        }
    }

    /// As [`Self::innermost`], where the loop's own frame must be searched for.
    ///
    /// # Safety
    /// As there.
    #[inline]
    unsafe fn entered(&self, state: usize, (at, status, active): (usize, usize, u32)) -> usize {
        let Some(Entry { owner, of_c, .. }) = self.layout.entry else { return 0 };
        // SAFETY: the caller's promise. A state that is not active runs nowhere, so its frames
        // stand still; to become active takes longer than to follow one pointer.
        unsafe {
            let innermost = word_now(state, at);
            let is_active = || number_now(state, status) & active != 0;
            if is_active() {
                return if self.runs(state) { innermost } else { 0 };
            }
            let mut frame = innermost;
            for _ in 0..MOST_OF_A_RUN {
                if frame == 0 || is_active() || word_now(state, at) != innermost {
                    return 0;
                }
                if ((frame + owner) as *const u8).read() == of_c {
                    return if stack::has(frame) { innermost } else { 0 };
                }
                frame = word(frame, self.layout.back);
            }
        }
        0
    }

    /// Calls `each` with the frames of the calling thread, the innermost first, and the address of
    /// each frame's local variables.
    #[inline(always)]
    fn each_frame(&self, mut each: impl FnMut(At, usize)) {
        let Some(state) = self.this_thread() else { return };
        let Layout { back, code, place, entry, locals, .. } = *self.layout;
        // SAFETY: the thread is in our call, so its state exists, and the frames that began on it
        // stand still; the offsets in them were checked.
        unsafe {
            let mut frame = self.innermost(state);
            for _ in 0..MOST_FRAMES {
                if frame == 0 {
                    return;
                }
                let object = word(frame, code);
                if object != 0 && word(object, TYPE) == self.code_type {
                    let offset = match place {
                        Place::Number(at, unit) => number(frame, at).wrapping_mul(unit),
                        Place::Pointer(at, start) => {
                            word(frame, at).wrapping_sub(object + start) as i32
                        }
                    };
                    let counts = entry.is_none_or(|Entry { owner, of_c, first }| {
                        let owner = ((frame + owner) as *const u8).read();
                        let has_begun = || offset >= number(object, first) * INSTRUCTION;
                        owner != of_c && (owner == GENERATOR || has_begun())
                    });
                    if counts {
                        each(At { code: object, offset }, frame + locals);
                    }
                }
                frame = word(frame, back);
            }
        }
    }

    /// The hash of the calling thread's stack; and the first argument of its innermost call of the
    /// code object `call`.
    #[inline]
    pub(super) fn walk(&self, call: usize) -> Walk {
        let mut walk = Walk { hash: 0, frames: 0, argument: 0 };
        let Layout { file, name, first_line, identity, .. } = *self.layout;
        self.each_frame(|At { code, offset }, locals| {
            // SAFETY: a code object that a frame names lives as long as the frame.
            unsafe {
                let strings = (word(code, file) as u64).rotate_left(32) ^ word(code, name) as u64;
                let which = match identity {
                    Identity::Number(at) => number(code, at),
                    Identity::Content(table, characters) => {
                        let table = content::of_bytes(word(code, table));
                        let file = content::of_string(word(code, file), characters);
                        let name = content::of_string(word(code, name), characters);
                        walk.hash = mix(mix(walk.hash, table), file ^ name.rotate_left(32));
                        number(code, first_line)
                    }
                };
                let place = (which as u64) << 32 | u64::from(offset as u32);
                walk.hash = mix(mix(mix(walk.hash, code as u64), strings), place);
                if code == call && walk.argument == 0 {
                    walk.argument = word(locals, 0);
                }
            }
            walk.frames += 1;
        });
        walk
    }

    /// The frames of the calling thread, the innermost first.
    pub(super) fn stack(&self) -> Vec<At> {
        let mut all = Vec::new();
        self.each_frame(|at, _| all.push(at));
        all
    }

    /// A frame of the calling thread in words.
    pub(super) fn frame(&self, at: At) -> Frame {
        let At { code, offset } = at;
        // SAFETY: as in `walk`. The line is read from a table that never changes.
        unsafe {
            Frame {
                file: self.text(word(code, self.layout.file)),
                function: self.text(word(code, self.layout.name)),
                line: (self.functions.line)(code as Object, offset).max(0) as u32,
            }
        }
    }

    /// The characters of a Python string.
    ///
    /// # Safety
    /// `string` is one, and is kept alive.
    unsafe fn text(&self, string: usize) -> String {
        let Functions { length, character, .. } = self.functions;
        // SAFETY: the caller's promise; strings never change, and no index is out of bounds.
        unsafe {
            let count = length(string as Object).min(MOST_CHARACTERS);
            let read = |at| char::from_u32(character(string as Object, at)).unwrap_or('\u{fffd}');
            (0..count).map(read).collect()
        }
    }

    /// Whether the layout finds the same frames as Python's own functions. Call it with the
    /// interpreter's lock held, and with no lock of ours: Python may run its collector meanwhile.
    pub(super) fn check(&self) -> bool {
        let Functions { this_thread, frame, back, code, line_of_frame, drop, .. } = self.functions;
        let Functions { occurred, clear, .. } = self.functions;
        let mut told = Vec::new();
        // SAFETY: the lock is held. Each function but the last two returns a reference of ours or
        // NULL, which is dropped; an error is only cleared where there was none before.
        unsafe {
            let state = this_thread();
            if state.is_null() || !occurred().is_null() {
                return false;
            }
            let mut at = frame(state);
            while !at.is_null() {
                let object = code(at);
                if told.len() < MOST_FRAMES {
                    told.push((object as usize, line_of_frame(at)));
                }
                drop(object);
                let outer = back(at);
                drop(at);
                at = outer;
            }
            if !occurred().is_null() {
                clear();
                return false;
            }
        }
        let line = |at: &At| {
            // SAFETY: as in `frame`.
            unsafe { (self.functions.line)(at.code as Object, at.offset) }
        };
        let found: Vec<_> = self.stack().iter().map(|at| (at.code, line(at))).collect();
        // Of a stack deeper than the limit, the innermost.
        let is_whole = found.len() == told.len() || told.len() == MOST_FRAMES;
        !found.is_empty() && is_whole && found.iter().zip(&told).all(|(found, told)| found == told)
    }
}
