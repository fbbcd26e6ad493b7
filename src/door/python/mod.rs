//! The place in a Python program that a request comes from (`blame:`): the calling thread's frames,
//! the running module of torch's, and the phase, as a site of the record.
//!
//! [`interpreter`] reads the frames, with or without the interpreter's lock; [`known`] holds known
//! stacks, so that a repeated one costs the walk alone; [`modules`] the paths of modules, from the
//! package; [`autograd`] the forward of a running backward, from the native door's shim. A thread
//! that runs neither Python nor a backward has no site.

pub mod autograd;
mod cells;
mod content;
mod grad;
mod interpreter;
mod known;
mod layout;
mod modules;
mod places;
mod stack;
mod word;

use super::fork;
use super::process::{self, GRUYERE_INVALID, GRUYERE_OK, GRUYERE_UNAVAILABLE, guarded};
use crate::heap::Sites;
use crate::record::Record;
use crate::record::sites::{DEPTH, Frame, FrameId, NODE, NewSite, Phase, SiteId};
use autograd::{Forwards, GruyereAutograd};
use interpreter::{Interpreter, Walk};
use known::Known;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use word::mix;

/// Failed comparisons of our frames with the interpreter's own before they are given up.
const TRIES: u32 = 4;
/// How long the interpreter's end waits for threads that read frames.
const PATIENCE: Duration = Duration::from_millis(200);

/// The interpreter; searched for once. `None`: there is none with readable frames.
static INTERPRETER: OnceLock<Option<Interpreter>> = OnceLock::new();

/// Whether the interpreter's frames match our layout.
///
/// ```text
/// state      meaning                        changed by
/// UNTRIED    not compared yet               -> TRYING: the first thread that holds the lock
/// TRYING     a thread compares them         -> TRUSTED, REFUSED, or UNTRIED again: that thread
/// TRUSTED    they match                     -> ENDED: the end of the interpreter
/// REFUSED    they do not match              never
/// ENDED      the interpreter ends           never
/// ```
static TRUST: AtomicU8 = AtomicU8::new(UNTRIED);
const UNTRIED: u8 = 0;
const TRYING: u8 = 1;
const TRUSTED: u8 = 2;
const REFUSED: u8 = 3;
const ENDED: u8 = 4;

/// Threads that read frames now: raised before the thread looks at TRUST, so that the end of the
/// interpreter sees the reader, or the reader sees the end. SeqCst, both.
static READING: AtomicU32 = AtomicU32::new(0);

/// The code object of `torch.nn.Module.__call__`, from the package: 0, then that for good.
static CALL: AtomicUsize = AtomicUsize::new(0);

/// The program has made an optimiser that no record knows yet: set by the package's call, cleared
/// by the thread that notes it on the record.
static OPTIMIZER: AtomicBool = AtomicBool::new(false);

/// The package has begun: false, then true for good.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Whether the process has an interpreter, with readable frames or without.
pub(super) fn is_there() -> bool {
    Interpreter::is_there()
}

/// Whether the Python package serves this process.
pub(super) fn is_begun() -> bool {
    BEGUN.load(Ordering::Relaxed)
}

fn interpreter() -> Option<&'static Interpreter> {
    let find = || match Interpreter::find() {
        Ok(found) => Some(found),
        Err(reason) => {
            if let Some(reason) = reason {
                log::warn!(
                    "blame: blocks will not record their place in the program: {reason} (blame:off \
                     turns this warning off)"
                );
            }
            None
        }
    };
    INTERPRETER.get_or_init(find).as_ref()
}

/// Whether frames may be read. Compares them first where that is not known yet and the calling
/// thread holds the lock.
#[cold]
fn is_trusted_now(python: &Interpreter) -> bool {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    if !python.holds_lock()
        || TRUST.compare_exchange(UNTRIED, TRYING, Ordering::SeqCst, Ordering::SeqCst).is_err()
    {
        return false;
    }
    let next = match python.check() {
        true => TRUSTED,
        false if TRIED.fetch_add(1, Ordering::Relaxed) + 1 < TRIES => UNTRIED,
        false => {
            log::warn!(
                "blame: blocks will not record their place in the program: the frame layout of \
                 this build of Python differs from that of its version (blame:off turns this \
                 warning off)"
            );
            REFUSED
        }
    };
    let _ = TRUST.compare_exchange(TRYING, next, Ordering::SeqCst, Ordering::SeqCst);
    next == TRUSTED
}

/// A read of frames; the interpreter does not end before it is dropped.
struct Reading;

impl Reading {
    #[inline]
    fn begin(python: &Interpreter) -> Option<Self> {
        if TRUST.load(Ordering::Relaxed) == UNTRIED {
            is_trusted_now(python);
        }
        READING.fetch_add(1, Ordering::SeqCst);
        let reading = Self;
        (TRUST.load(Ordering::SeqCst) == TRUSTED).then_some(reading)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        READING.fetch_sub(1, Ordering::Release);
    }
}

/// Finds the sites of a heap's requests.
pub(super) struct Program {
    python: &'static Interpreter,
    known: Known,
    forwards: Forwards,
}

/// A request, as far as it differs from others before any name is read.
struct Asked {
    /// The calling thread's stack, if any.
    stack: Option<Walk>,
    /// The site of the forward whose backward runs; `None`: none runs.
    backward: Option<SiteId>,
    /// Gradients are off.
    no_grad: bool,
}

impl Program {
    /// Of the interpreter that the process has by now. `None`: there is none with readable frames.
    pub(super) fn find() -> Option<Self> {
        let python = interpreter()?;
        Some(Self { python, known: Known::default(), forwards: Forwards::default() })
    }

    #[cold]
    #[inline(never)]
    fn learn(&self, record: &Record, asked: &Asked, key: u64) -> SiteId {
        if OPTIMIZER.load(Ordering::Relaxed) && OPTIMIZER.swap(false, Ordering::Relaxed) {
            // A site without blocks: its existence is the message.
            record.site(&NewSite { phase: Phase::Optimizer, ..NewSite::default() });
        }
        cells::note(record);
        let stack: Vec<Frame> = match asked.stack {
            Some(_) => self.python.stack().into_iter().map(|at| self.python.frame(at)).collect(),
            None => Vec::new(),
        };
        let told = |frame: &Frame| record.frame(&frame.file, &frame.function, frame.line);
        let is_node = asked.backward.is_some() && places::is_of_node(&stack);
        let node = is_node.then(|| record.frame(NODE, &autograd::name(), 0));
        let frames = places::kept(&stack, DEPTH - usize::from(is_node));
        let frames: Vec<FrameId> = node.into_iter().chain(frames.into_iter().map(told)).collect();
        let phase = match asked.backward {
            Some(_) => Phase::Backward,
            None => places::phase(&stack),
        };
        let site = record.site(&NewSite {
            frames: &frames,
            module: &modules::path(asked.stack.map_or(0, |walk| walk.argument)),
            phase,
            forward: asked.backward.unwrap_or(SiteId::NONE),
            // A backward runs with gradients off: that means nothing.
            no_grad: asked.no_grad && phase != Phase::Backward,
        });
        self.known.set(key, site);
        site
    }
}

impl Sites for Program {
    fn current(&self, record: &Record, bytes: u64) -> SiteId {
        guarded(SiteId::NONE, || self.site(record, bytes))
    }
}

impl Program {
    fn site(&self, record: &Record, bytes: u64) -> SiteId {
        let origin = autograd::origin();
        let reading = Reading::begin(self.python);
        let walk = reading.as_ref().map(|_| self.python.walk(CALL.load(Ordering::Relaxed)));
        let stack = walk.filter(|walk| walk.frames > 0);
        let backward = origin.as_ref().and_then(GruyereAutograd::backward_key);
        let backward = backward.map(|key| self.forwards.get(key));
        let asked = Asked { stack, backward, no_grad: grad::is_off() };
        if asked.stack.is_none() && asked.backward.is_none() {
            return SiteId::NONE;
        }
        let key = asked.key(origin.map_or(0, |origin| origin.kind));
        let site = self.known.get(key).unwrap_or_else(|| self.learn(record, &asked, key));
        if let Some(key) = origin.as_ref().and_then(|origin| origin.forward_key(bytes)) {
            self.forwards.set(key, site);
        }
        site
    }
}

impl Asked {
    /// The key of its site; `node`: the kind of the running node.
    fn key(&self, node: u64) -> u64 {
        let (hash, module) =
            self.stack.map_or((0, 0), |walk| (walk.hash, modules::number(walk.argument)));
        let forward = self.backward.map_or(0, |forward| u64::from(forward.0) + 1);
        let words = [module, node, forward << 1 | u64::from(self.no_grad)];
        words.into_iter().fold(hash, mix).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// Announces that the Python package is about to make Gruyère torch's allocator: with `blame:auto`,
/// large blocks then record their place in the program. `call` is the code object of
/// `torch.nn.Module.__call__`, which must stay alive as long as the process, or NULL. Call this
/// from Python, on a thread that holds the interpreter's lock.
///
/// Returns 0, or -1 if the process has no interpreter whose frames can be read (the log says why).
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_blame_begin(call: *const c_void) -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        BEGUN.store(true, Ordering::Relaxed);
        CALL.store(call as usize, Ordering::Relaxed);
        match interpreter().and_then(Reading::begin) {
            Some(_) => GRUYERE_OK,
            None => GRUYERE_UNAVAILABLE,
        }
    })
}

/// Announces the end of the interpreter: the library reads no frame from now on, nor when this
/// returns.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_blame_end() {
    if fork::is_forked_child() {
        return;
    }
    TRUST.store(ENDED, Ordering::SeqCst);
    let start = Instant::now();
    while READING.load(Ordering::SeqCst) != 0 && start.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
}

/// Notes that the program creates an optimiser, so that it trains.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_blame_optimizer() {
    OPTIMIZER.store(true, Ordering::Relaxed);
}

/// Names the module object at `module`: it is the child `name` of the module at `outer`, or, if
/// `outer` is NULL, an outermost module of class `name`. The name holds until
/// `gruyere_blame_forget`, which must be called before the object's memory can be reused.
///
/// Returns 0, or -2 if `name` is NULL or not UTF-8.
///
/// # Safety
/// `name` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_blame_module(
    module: *const c_void,
    outer: *const c_void,
    name: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { with_text(name, |name| modules::name(module as usize, outer as usize, name)) }
}

/// Notes that a notebook runs a cell, whose code has the file name `file`, as `In[number]`: readers
/// then name its lines so.
///
/// Returns 0, or -2 if `file` is NULL or not UTF-8.
///
/// # Safety
/// `file` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_blame_cell(file: *const c_char, number: u32) -> c_int {
    let note = |file: &str| {
        cells::add(file, number);
        if let Some(heap) = process::current() {
            cells::note(heap.record());
        }
    };
    // SAFETY: the caller's promise.
    unsafe { with_text(file, note) }
}

/// Calls `take` with a text of the package's; returns what the functions above do.
///
/// # Safety
/// `text` is NULL or a NUL-terminated string.
unsafe fn with_text(text: *const c_char, take: impl FnOnce(&str)) -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    if text.is_null() {
        return GRUYERE_INVALID;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        // SAFETY: the caller's promise.
        match unsafe { CStr::from_ptr(text) }.to_str() {
            Ok(text) => {
                take(text);
                GRUYERE_OK
            }
            Err(_) => GRUYERE_INVALID,
        }
    })
}

/// Forgets the module object at `module`.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_blame_forget(module: *const c_void) {
    if !fork::is_forked_child() {
        guarded((), || modules::forget(module as usize));
    }
}
