//! The CPython of this process, and the frames of its threads.
//!
//! torch's operators let go of the interpreter's lock before they allocate: a request mostly comes
//! on a thread that does not hold it, and must not wait for it. But the frames of a thread change
//! only while it runs Python: as long as it is in our call, what its frames and their code objects
//! say stands still, lock or not. So they are read as a debugger reads them, by the [`Layout`] of
//! the version: nothing counts references, allocates, raises, or runs a collector or a finalizer.
//! Of Python's functions only those are called meanwhile that read what never changes: the
//! characters of a string, the line of a place in a code object.
//!
//! That the layout is right is not taken on trust: before its first use, on a thread that holds the
//! lock, the frames are read by Python's own functions too, and must be the same
//! ([`Interpreter::check`]).

use super::layout::{self, Entry, GENERATOR, Layout, Place};
use std::ffi::{CStr, c_char, c_int, c_void};

type Object = *mut c_void;
type Ask<T> = unsafe extern "C" fn() -> T;
type Of<T> = unsafe extern "C" fn(Object) -> T;
type OfAt<A, T> = unsafe extern "C" fn(Object, A) -> T;

/// Frames that are looked at: the innermost.
const MOST_FRAMES: usize = 256;
/// Characters of a name that are read.
const MOST_CHARACTERS: isize = 512;
/// Bytes of an instruction.
const INSTRUCTION: i32 = 2;
/// Of every object: its type.
const TYPE: usize = 8;
/// Of a type: the bytes of its objects; and those of `object`, where objects begin as they do in
/// usual builds.
const BASIC_SIZE: usize = 32;
const USUAL_SIZE: usize = 16;

/// Functions of Python's, those that are called without the lock first.
struct Functions {
    this_thread: Ask<Object>,
    is_finalizing: Ask<c_int>,
    line: OfAt<c_int, c_int>,
    length: Of<isize>,
    character: OfAt<isize, u32>,
    holds_lock: Ask<c_int>,
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

/// A frame, as far as it says where the program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    /// Its code object.
    pub code: usize,
    /// How far in its bytecode, in bytes.
    pub offset: i32,
}

/// A frame in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub file: String,
    pub function: String,
    pub line: u32,
}

/// What is found without a name being read: all that tells one stack from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Walk {
    /// Of all frames, with what says that a code object is still the one that it was.
    pub hash: u64,
    /// How many there are.
    pub frames: usize,
    /// The first argument of the innermost call of the code that was asked for; 0: there is none.
    pub argument: usize,
}

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: dlsym reads a NUL-terminated string.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// The word at `at` bytes of `base`.
///
/// # Safety
/// There is one, and nobody writes it meanwhile.
#[inline(always)]
unsafe fn word(base: usize, at: usize) -> usize {
    // SAFETY: the caller's promise; Python aligns its words.
    unsafe { ((base + at) as *const usize).read() }
}

/// As [`word`].
///
/// # Safety
/// As [`word`].
#[inline(always)]
unsafe fn number(base: usize, at: usize) -> i32 {
    // SAFETY: as above.
    unsafe { ((base + at) as *const i32).read() }
}

/// Adds a word to a hash.
#[inline(always)]
pub(super) fn mix(hash: u64, word: u64) -> u64 {
    // The multiplier of FxHash, and a rotation, so that the order counts.
    (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
}

impl Interpreter {
    /// The interpreter that this process has loaded.
    ///
    /// # Errors
    /// Why its frames cannot be read, in words for the log; `None`: there is no interpreter.
    pub(super) fn find() -> Result<Self, Option<String>> {
        let version = symbol(c"Py_GetVersion").ok_or(None)?;
        // SAFETY: the symbol is CPython's function of that name, in this version as in all of them:
        // it answers a static text, initialised or not.
        let version = unsafe {
            let version = std::mem::transmute::<*mut c_void, Ask<*const c_char>>(version);
            CStr::from_ptr(version()).to_string_lossy().into_owned()
        };
        let short = version.split(" (").next().unwrap_or_default().to_owned();
        let layout = layout::of(&version)
            .ok_or_else(|| Some(format!("how Python {short} keeps its frames is not known")))?;
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
            holds_lock: function!(Ask<c_int>, c"PyGILState_Check"),
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
            return Err(Some(format!("objects of this build of Python {short} begin otherwise")));
        }
        Ok(Self { functions, code_type, layout })
    }

    /// Whether the calling thread holds the interpreter's lock.
    pub(super) fn holds_lock(&self) -> bool {
        // SAFETY: reads the thread's own state.
        unsafe { (self.functions.holds_lock)() == 1 }
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

    /// Calls `each` with the frames of the calling thread, the innermost first, and where their
    /// local variables are.
    #[inline(always)]
    fn each_frame(&self, mut each: impl FnMut(At, usize)) {
        let Some(mut frame) = self.this_thread() else { return };
        let Layout { innermost, back, code, place, entry, locals, .. } = *self.layout;
        // SAFETY: the thread is in our call, so its state and its frames are there and stand still;
        // where things are in them was checked.
        unsafe {
            for &at in innermost {
                frame = word(frame, at);
                if frame == 0 {
                    return;
                }
            }
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

    /// What tells the stack of the calling thread from others; and the first argument of its
    /// innermost call of the code object `call`.
    #[inline]
    pub(super) fn walk(&self, call: usize) -> Walk {
        let mut walk = Walk { hash: 0, frames: 0, argument: 0 };
        let Layout { file, name, first_line, .. } = *self.layout;
        self.each_frame(|At { code, offset }, locals| {
            // SAFETY: a code object that a frame names is there as long as the frame is.
            unsafe {
                let identity = (word(code, file) as u64).rotate_left(32) ^ word(code, name) as u64;
                let place = (number(code, first_line) as u64) << 32 | u64::from(offset as u32);
                walk.hash = mix(mix(mix(walk.hash, code as u64), identity), place);
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

    /// The characters of a string of Python's.
    ///
    /// # Safety
    /// It is one, and somebody keeps it.
    unsafe fn text(&self, string: usize) -> String {
        let Functions { length, character, .. } = self.functions;
        // SAFETY: the caller's promise; strings never change, and no index is out of bounds.
        unsafe {
            let count = length(string as Object).min(MOST_CHARACTERS);
            let read = |at| char::from_u32(character(string as Object, at)).unwrap_or('\u{fffd}');
            (0..count).map(read).collect()
        }
    }

    /// Whether the frames that are found by the layout are those that Python's own functions find.
    /// Called with the interpreter's lock held, and with no lock of ours: Python may run its
    /// collector meanwhile.
    pub(super) fn check(&self) -> bool {
        let Functions { this_thread, frame, back, code, line_of_frame, drop, .. } = self.functions;
        let Functions { occurred, clear, .. } = self.functions;
        let mut told = Vec::new();
        // SAFETY: the lock is held. Each function but the last two answers a reference of ours or
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
        // Of a stack that is deeper than is looked at, the innermost.
        let is_whole = found.len() == told.len() || told.len() == MOST_FRAMES;
        !found.is_empty() && is_whole && found.iter().zip(&told).all(|(found, told)| found == told)
    }
}
